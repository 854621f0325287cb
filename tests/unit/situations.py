"""What a ported module and its unported twin are put through: values, modes, dtypes, layouts, sizes, gradients, calls,
and what others do later. Nothing may tell the two apart.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model.sites import PortReport
from tests.unit import choices

CALLS, TERMS = 110, 64
_U32 = 2.0**-24


class Sub(Tensor):
    pass


class Twice(nn.Module):
    def forward(self, w: Tensor) -> Tensor:
        return 2 * w


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@dataclass(frozen=True)
class Stage:
    name: str
    x: Tensor
    dtype: torch.dtype = torch.float32
    training: bool = False
    under: Callable[[], Any] = torch.no_grad
    odd: bool = False  # not finite, or so large that sums overflow in one order of terms and not in another


@contextlib.contextmanager
def _put(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


@contextlib.contextmanager
def _called(function: Callable[[Any], Any], value: Any, before: Any) -> Iterator[None]:
    function(value)
    try:
        yield
    finally:
        function(before)


def rows(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


def _with(value: float) -> Tensor:
    x = rows(2, 5, 64)
    x[0, 0, 3] = value
    return x


def stages() -> Iterator[Stage]:
    x, graded = rows(2, 5, 64), torch.enable_grad
    yield from (Stage(name, x) for name in ("plain", "again"))
    yield from (Stage(f"times {s:g}", x * s, odd=s > 1e14) for s in (1e6, 1e15, 1e38, 1e-4, 0.0))
    yield Stage("seven and a quarter", torch.full_like(x, 7.25))
    yield from (
        Stage(f"one {v:g}", _with(v), odd=True) for v in (float("nan"), float("inf"), -float("inf"), 3e38, 1e20)
    )
    yield Stage("training", x, training=True)
    yield from (Stage(f"gradients, training {t}", x, training=t, under=graded) for t in (False, True))
    yield Stage("gradients of small rows", x * 1e-3, under=graded)
    yield Stage("a parameter", nn.Parameter(x), under=graded)
    yield Stage("transposed", rows(5, 2, 64).transpose(0, 1))
    yield Stage("columns", rows(2, 64, 5).transpose(1, 2))
    yield Stage("behind another", rows(3, 5, 64)[1:])
    yield Stage("expanded", rows(1, 5, 64).expand(4, 5, 64))
    yield Stage("a subclass", x.as_subclass(Sub))
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        yield Stage(str(dtype), x.to(dtype), dtype)
        yield Stage(f"{dtype}, gradients", x.to(dtype), dtype, True, graded)
    yield Stage("narrow rows", x.bfloat16())
    yield Stage("narrow weights", x, torch.bfloat16)
    yield Stage("autocast", x, under=lambda: torch.autocast("cpu", torch.bfloat16))
    yield Stage("inference", x, under=torch.inference_mode)
    yield Stage("compiling", x, under=lambda: _put(torch.compiler, "_is_compiling_flag", True))
    yield Stage("a backend's switch", x, under=lambda: _put(torch.backends.cudnn, "benchmark", True))
    yield Stage("threads", x, under=lambda: _called(torch.set_num_threads, 3, torch.get_num_threads()))
    yield Stage("default dtype", x, under=lambda: _called(torch.set_default_dtype, torch.float64, torch.float32))
    yield Stage("deterministic", x, under=lambda: _called(torch.use_deterministic_algorithms, True, False))
    for shape in ((64,), (7, 64), (2, 3, 2, 64), (33, 5, 64), (21, 5, 64), (0, 5, 64), (1, 1, 64)):
        yield Stage(str(shape), rows(*shape))
    yield from (Stage(f"long {shape}", rows(*shape)) for shape in ((1, 20000, 64), (20000, 64)))


def _environment(home: ModuleType) -> None:
    os.environ.update(FERRYMAN_PLANTED="1", FERRYMAN_NUMBER="2.0")


# what others change of a file, and of a module
FILES: dict[str, Callable[[Any], Any]] = {
    "the environment": _environment,
    "an object": lambda home: setattr(home.KNOBS, "scale", 3.0),
    "a flag": lambda home: setattr(home, "FLAG", True),
    "a dtype": lambda home: setattr(home, "DTYPE", torch.bfloat16),
    "a number": lambda home: setattr(home, "SCALE", 3.0),
    "a function in a table": lambda home: home.TABLE.update(act=torch.tanh),
    "one more in a table": lambda home: home.TABLE.update(more=1),
    "a tensor in a table": lambda home: home.TABLE["w"].fill_(2.0),
    "a number in a table": lambda home: home.ORDERED.update(scale=2.0),
    "a queue": lambda home: home.QUEUE.appendleft(2.0),
    "its class": lambda home: _scale(home.M),
    "its parent": lambda home: _scale(getattr(home, "P", home.M)),
}


def _scale(kind: Any) -> None:
    if hasattr(kind, "scale"):
        kind.scale = 2.0


def _changed_child(name: str, change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda m: change(getattr(m, name)) if isinstance(getattr(m, name, None), nn.Module) else None


def _parametrized(m: nn.Module) -> None:
    if "weight" in m._parameters:
        parametrize.register_parametrization(m, "weight", Twice())


MODULES: dict[str, Callable[[Any], Any]] = {
    "another scale": lambda m: setattr(m, "scale", 5.0),
    "another eps": lambda m: setattr(m, "eps", 0.5),
    "another slope": _changed_child("act", lambda act: act.__setattr__("beta", 2.0)),
    "gradients that are there": lambda m: [p.__setattr__("grad", torch.ones_like(p)) for p in m.parameters()],
    "a hook of its activation": _changed_child("act", lambda act: act.register_forward_hook(lambda m, i, o: o * 2)),
    "a hook of its norm": _changed_child("n", lambda n: n.register_forward_pre_hook(lambda m, i: (i[0] + 1,))),
    "a hook": lambda m: m.register_forward_hook(lambda m, i, o: o * 2),
    "a parametrisation": _parametrized,
    "a child's parametrisation": _changed_child("a", _parametrized),
    "frozen": lambda m: [p.requires_grad_(False) for p in m.parameters()],
}


def _passed(model: nn.Module, stage: Stage) -> list[Tensor]:
    model.to(stage.dtype).train(stage.training)
    torch.manual_seed(3)
    x = stage.x
    with stage.under():
        if stage.under is not torch.enable_grad or not x.is_floating_point():
            return [model(x).detach()]
        x = nn.Parameter(x.detach().clone()) if isinstance(x, nn.Parameter) else x.detach().requires_grad_()
        y = model(x)
        if not y.requires_grad:
            return [y]
        weights = torch.cos(torch.arange(y.numel(), dtype=torch.float32)).reshape(y.shape).to(y.dtype)
        leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
        slopes = torch.autograd.grad(y, leaves, weights, allow_unused=True)
        return [y.detach(), *(torch.zeros_like(p) if s is None else s for s, p in zip(slopes, leaves, strict=True))]


def apart(actual: Tensor, wanted: Tensor, slope: bool = False, dtype: torch.dtype | None = None) -> str:
    """How two results differ, or "".

    Both are sums in float32 of up to `TERMS` terms, in perhaps another order: twice n u of a row's largest number, and
    that again for what follows. In 16 bits a product is rounded at two places, each of which may come out one unit
    apart, and what is added to it, as large as the row, half a unit. A gradient in 16 bits is a sum of products that
    were rounded at four places and cancels: its room is four units of the largest number of all.
    """
    if actual.shape != wanted.shape or actual.dtype != wanted.dtype:
        return f"{tuple(actual.shape)} of {actual.dtype} for {tuple(wanted.shape)} of {wanted.dtype}"
    dtype = dtype or wanted.dtype
    a, w = (t.as_subclass(Tensor).double() for t in (actual, wanted))
    odd = ~w.isfinite()
    if not torch.equal(a[odd].nan_to_num(7.5), w[odd].nan_to_num(7.5)):
        return "not finite in other places"
    a, w = a.masked_fill(odd, 0.0), w.masked_fill(odd, 0.0)
    if not w.numel():
        return ""
    size = w.abs().amax(-1, keepdim=True) if w.dim() else w.abs()
    room = 2 * TERMS * _U32 * size + 1e-30
    if dtype.itemsize == 2:
        unit = torch.finfo(dtype).eps
        room = room + unit * (4 * size.amax() if slope else 2 * w.abs() + size / 2)
    over = ~((a - w).abs() <= room)
    return f"{int(over.sum())} of {w.numel()} by {float(((a - w).abs() / room).max()):.3g} rooms" if over.any() else ""


def load(code: str, name: str, folder: Path) -> Any:
    path = folder / f"{name}.py"
    path.write_text(code)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    home = importlib.util.module_from_spec(spec)
    sys.modules[name] = home
    spec.loader.exec_module(home)
    return home


class Pair:
    """A ported model and its unported twin, each of a file of its own, which nothing of the other reaches."""

    def __init__(self, code: str, name: str, folder: Path) -> None:
        os.environ.pop("FERRYMAN_PLANTED", None)
        os.environ["FERRYMAN_NUMBER"] = "1.0"
        self.code = code
        self.homes = [load(code, f"{name}_{side}", folder) for side in "ab"]
        models = []
        for home in self.homes:
            torch.manual_seed(0)
            models.append(Net(home.M()).eval())
        self.model, self.twin = models
        self.report: PortReport | None = None
        with contextlib.suppress(PortError):
            self.report = ferryman.port(self.model)

    def check(self, stage: Stage) -> str:
        """How the two differ, or "". Where the original raises, nothing is asked: an error is no result."""
        failed, actual = "", list[Tensor]()
        with choices.seen() as chosen:
            try:
                actual = _passed(self.model, stage)
            except Exception as error:  # noqa: BLE001 - it is what is reported
                failed = f"{stage.name}: raises {type(error).__name__}: {error}"[:200]
        try:
            wanted = _passed(choices.like(self.twin, chosen), stage)
        except Exception:  # noqa: BLE001 - foreign code refuses what it likes
            return ""
        if failed:
            return failed
        if len(actual) != len(wanted):
            return f"{stage.name}: {len(wanted)} gradients for {len(actual)}"
        cast = torch.bfloat16 if stage.name == "autocast" or "autocast(" in self.code else None
        for i, (a, w) in enumerate(zip(actual, wanted, strict=True)):
            said = apart(a, w, i > 0 or cast is not None, cast)
            if said:
                return f"{stage.name} [{i}]: {said}"
        return ""

    def stages(self) -> Iterator[Stage]:
        """PyTorch's own kernels for attention and gelu overflow where the definition does not, and take much memory."""
        if "F.embedding" in self.code:
            yield Stage("numbers", torch.tensor([[777, 3]]))
            return
        fused = any(name in self.code for name in ("scaled_dot_product", "gelu"))
        yield from (s for s in stages() if not (fused and (s.odd or "long" in s.name)))

    def differences(self) -> Iterator[str]:
        if self.report is None:
            return
        plain = next(self.stages())
        yield from map(self.check, self.stages())
        with torch.no_grad():
            for _ in range(CALLS):
                for model in (self.model, self.twin):
                    with contextlib.suppress(Exception):
                        model(plain.x)
        yield self.check(Stage(f"after {CALLS} calls", plain.x))
        tagged = plain.x.clone()
        tagged.tag, tagged.scale = 1, 3.0  # type: ignore[attr-defined]
        yield self.check(Stage("attributes of its input", tagged))
        hook = nn.modules.module.register_module_forward_hook(
            lambda m, i, o: o * 2 if isinstance(m, nn.SiLU | nn.LayerNorm) else None
        )
        yield self.check(Stage("a hook of all modules", plain.x))
        hook.remove()
        for what, change in FILES.items():
            for home in self.homes:
                change(home)
            yield self.check(Stage(f"changed: {what}", plain.x))
        for what, change in MODULES.items():
            for model in (self.model, self.twin):
                change(model.inner)
            yield self.check(Stage(f"later: {what}", plain.x, under=torch.enable_grad))
