"""Do two callables compute the same? In float64 on drawn and hostile inputs, and at the same rounding points.

A proof holds for the inputs it ran. Whoever asks draws them, on both sides of every branch that he relies on.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode, _pop_mode, _push_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map_only

from ferryman.porting.model.distance import LIMIT, UNIT, Disagreement, distance, equal, flat
from ferryman.porting.model.exact import Widened
from ferryman.porting.model.trace import Unproven
from ferryman.porting.model.unread import undrawn, unread

_MOVES = 3
_TURNED = 2.0**-16  # 2^12 of it are a sixteenth of the largest gradient: more is no rounding
# Two float32 evaluations that round to storage at the same places differ where float32's noise (16 units of 2^-24)
# crosses a rounding boundary: 16 * 2^-24 / 2^-11 = 2^-9 of float16's elements, 2^-12 of bfloat16's. A rounding point
# more or less changes a quarter of them or more. 2^-5 lies between, 16 times away from the one and 8 from the other.
DIFFERING = 2.0**-5
_NOISE = 16 * 2.0**-24
STORAGE = (torch.bfloat16, torch.float16)
Function = Callable[..., Any]


@dataclass(frozen=True)
class Proof:
    """What was shown. ``worst``: largest float64 error of a result, ``gradient``: of a gradient, both relative to the
    largest element of their row; ``differing``: share of elements that differ in a storage dtype; ``form``: which of
    the permitted roundings agreed there; ``inputs``: how many were drawn; ``rounding``: "same" rounding points, or
    "fewer" than the original's. ``reason`` says why it is no proof, and ``distance`` how far the
    two were apart, where both gave a result of the same kind. ``narrow``: False where float64 agreed, and in a storage
    dtype one of them raised or gave another dtype: that says nothing of float32."""

    ok: bool
    reason: str = ""
    worst: float = 0.0
    gradient: float = 0.0
    differing: dict[str, float] = field(default_factory=dict)
    form: int = 0
    inputs: int = 0
    rounding: str = ""
    distance: float | None = None
    narrow: bool = True


def drawn(*shape: int, seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    """(name, float64 tensor) of a shape: plain, and with what hides or shows a shift, a scale, an eps or a sign."""
    generator = torch.Generator().manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    yield "normal", normal()
    yield "offset", normal() * 0.5 + 3.0
    yield "one sign", normal().abs() + 0.1
    yield "large", normal() * 300.0
    yield "small", normal() * 2.0**-10  # mean square about 1e-6: eps decides
    yield "tiny", normal() * 2.0**-20
    spikes = normal()
    yield "sparse", torch.where(spikes.abs() > 1.0, spikes, torch.zeros_like(spikes))


def prove(
    original: Function,
    candidate: Function,
    inputs: Sequence[tuple[Any, ...]],
    *,
    forms: Sequence[Function] = (),
    storage: Sequence[torch.dtype] = STORAGE,
    narrow: int = 3,
    gradients: bool = True,
    limit: float = LIMIT,
    wide: frozenset[int] = frozenset(),
    values: bool = False,
    runs: dict[int, Any] | None = None,
) -> Proof:
    """Run ``original(*x)`` and ``candidate(*x)`` on each input and compare results, and gradients of floating tensors.

    inputs: tuples; floating tensors in them are float64 and on the CPU, anything else is passed as it is. forms: what
    may stand for the candidate in a storage dtype (definitions with permitted roundings); default the candidate.
    narrow: how many of the inputs, from the first, are rounded to each of ``storage`` and compared element by element.
    wide: arguments that are rounded to float32 there. values: the original may read what tensors hold, as ``item`` and
    ``if x.any()`` do: drawn inputs show nothing of what such a reading decides.
    runs: what the same original gave of the same inputs, by place; what is not in it yet is put there.
    The original may not change its inputs, draw random numbers, nor give another result the second time. Nothing is
    raised: what the original raises is the reason of a proof that is not ``ok``.
    """
    # oneDNN reads bfloat16's subnormals as 0 and adds in blocks of its own: PyTorch's plain kernels judge here
    with plain_kernels():
        forms = forms or (candidate,)
        runs = {} if runs is None else runs
        return _prove(original, candidate, inputs, forms, storage, narrow, gradients, limit, wide, values, runs)


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """None of the caller's modes reaches what is proven in it: a proof is kept, and holds outside of them, too.

    Left out: autocast, a default device or dtype, fake tensors and all other modes, inference mode, anomaly detection.
    """
    dtype, autocast = torch.get_default_dtype(), torch.is_autocast_enabled("cpu")
    above: list[TorchFunctionMode] = []
    with (
        _disable_current_modes(),
        torch.inference_mode(False),
        torch.autograd.set_detect_anomaly(False),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(torch.set_default_dtype, dtype)
        stack.callback(torch.set_autocast_enabled, "cpu", autocast)
        torch.set_default_dtype(torch.float32)
        torch.set_autocast_enabled("cpu", False)
        try:
            while torch._C._len_torch_function_stack():
                above.append(_pop_mode())
            yield
        finally:
            for mode in reversed(above):
                _push_mode(mode)


@contextlib.contextmanager
def plain_kernels() -> Iterator[None]:
    before = torch._C._get_mkldnn_enabled()
    torch._C._set_mkldnn_enabled(False)
    try:
        yield
    finally:
        torch._C._set_mkldnn_enabled(before)


def _prove(
    original: Function,
    candidate: Function,
    inputs: Sequence[tuple[Any, ...]],
    forms: Sequence[Function],
    storage: Sequence[torch.dtype],
    narrow: int,
    gradients: bool,
    limit: float,
    wide: frozenset[int],
    values: bool,
    runs: dict[int, Any],
) -> Proof:
    worst = gradient = 0.0
    agreed = False
    try:
        for place, given in enumerate(inputs):
            actual, slopes = _run(candidate, given, gradients)
            if place not in runs:
                with Widened(torch.float64), undrawn():
                    run = _run(original, given, gradients)
                    again, _ = _run(original if values else unread(original), given, False)
                _same(run[0], again, limit)
                runs[place] = run
            wanted, wanted_slopes = runs[place]
            worst = max(worst, distance("result", actual, wanted, limit))
            reach = functools.partial(_reach, original, candidate, given, slopes, wanted_slopes)
            gradient = max(gradient, distance("gradient", slopes, wanted_slopes, limit, reach))
        agreed = True
        form, differing, rounding = _rounded(original, forms, inputs[:narrow], storage, wide)
    except (Disagreement, Unproven) as error:
        apart = error.distance if isinstance(error, Disagreement) else None
        other = agreed and " inputs is torch." in str(error)
        return Proof(False, str(error), worst, gradient, inputs=len(inputs), distance=apart, narrow=not other)
    except Exception as error:  # noqa: BLE001 - foreign code ran: what it raises is the reason why nothing is proven
        return Proof(False, _first_line(error), inputs=len(inputs), narrow=not agreed)
    return Proof(True, "", worst, gradient, differing, form, len(inputs), rounding)


@dataclass
class First:
    """One original on the first input of a proof, for all candidates of it: most go no further.

    What agrees there is proven as a whole, with runs of its own: nothing is shown here.
    """

    original: Function
    runs: dict[Any, tuple[tuple[Any, ...], list[Tensor]] | str] = field(default_factory=dict)

    def refuted(self, key: Any, given: Callable[[], tuple[Any, ...]], candidate: Function, grad: bool) -> Proof | None:
        """What `prove` says of a candidate that ends there. key: of the input that ``given`` draws."""
        with plain_kernels():
            if (key, grad) not in self.runs:
                self.runs[key, grad] = self._run(given(), grad)
            run = self.runs[key, grad]
            if isinstance(run, str):
                return Proof(False, run)
            try:
                with torch.enable_grad() if grad else torch.no_grad():
                    actual = [r.detach() for r in _forward(candidate, run[0], grad)[1]]
                distance("result", actual, run[1], LIMIT)
            except Disagreement as error:
                return Proof(False, str(error), distance=error.distance)
            except Exception as error:  # noqa: BLE001 - the op refuses such an input
                return Proof(False, _first_line(error))
            return None

    def _run(self, given: tuple[Any, ...], grad: bool) -> tuple[tuple[Any, ...], list[Tensor]] | str:
        """An input and its result; why there is none, whatever the candidate is."""
        try:
            with Widened(torch.float64), undrawn():
                wanted, _ = _run(self.original, given, grad)
                again, _ = _run(unread(self.original), given, False)
            _same(wanted, again, LIMIT)
        except Exception as error:  # noqa: BLE001 - foreign code ran: what it raises is the reason
            return _first_line(error)
        return given, wanted


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]


def _run(
    call: Function, given: tuple[Any, ...], gradients: bool, rounding: int | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """(results, gradients of floating inputs for a fixed cotangent). rounding: the seed of `_Rounding` for both."""
    with torch.enable_grad() if gradients else torch.no_grad():
        arguments, results = _forward(call, given, gradients, rounding)
        leaves = [x for x in arguments if isinstance(x, Tensor) and x.requires_grad]
        reached = [r for r in results if r.requires_grad]
        if not gradients or not leaves:
            return [r.detach() for r in results], []
        if not reached:  # of no tokens, say
            return [r.detach() for r in results], [torch.zeros_like(x) for x in leaves]
        weights = [torch.cos(torch.arange(r.numel(), dtype=r.dtype)).reshape(r.shape) for r in reached]
        with contextlib.nullcontext() if rounding is None else _Rounding(rounding):
            slopes = torch.autograd.grad(reached, leaves, weights, allow_unused=True)
        pairs = zip(slopes, leaves, strict=True)
        return [r.detach() for r in results], [torch.zeros_like(x) if s is None else s for s, x in pairs]


def _forward(
    call: Function, given: tuple[Any, ...], gradients: bool, rounding: int | None = None
) -> tuple[list[Any], list[Tensor]]:
    """(the arguments that it was called with, its results)."""
    arguments = [_leaf(x, gradients) for x in given]
    kept = [x.detach().clone() for x in arguments if isinstance(x, Tensor)]
    with contextlib.nullcontext() if rounding is None else _Rounding(rounding):
        results = flat(call(*arguments))
    if not all(equal(a, b) for a, b in zip((x for x in arguments if isinstance(x, Tensor)), kept, strict=True)):
        raise Disagreement("it changes its input")
    return arguments, results


def _leaf(x: Any, gradients: bool) -> Any:
    if not isinstance(x, Tensor):
        return x
    leaf = x.detach().clone()
    return leaf.requires_grad_(gradients and leaf.is_floating_point())


def _same(first: list[Tensor], again: list[Tensor], limit: float) -> None:
    """A BLAS may add in another order where memory lies elsewhere: last places may differ, as between two functions."""
    if all(a.shape == b.shape and equal(a, b) for a, b in zip(first, again, strict=True)):
        return
    try:
        distance("result", again, first, limit)
    except Disagreement as error:
        raise Disagreement("it gives another result the second time") from error


class _Rounding(TorchDispatchMode):
    """Moves each float64 number that an op makes one unit in its last place up or down, forward and backward."""

    def __init__(self, seed: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.units = torch.Generator().manual_seed(seed)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if any(r.alias_info is not None for r in func._schema.returns):
            return outputs  # a view, or written in place
        return tree_map_only(Tensor, self._moved, outputs)

    def _moved(self, x: Tensor) -> Tensor:
        if x.dtype != torch.float64:
            return x
        return x * (1.0 + UNIT * torch.randint(0, 2, x.shape, generator=self.units).double().mul(2.0).sub(1.0))


def _reach(
    original: Function, candidate: Function, given: tuple[Any, ...], slopes: list[Tensor], wanted: list[Tensor]
) -> list[Tensor]:
    """How far roundings of one unit in the last place, at each op of either, move each gradient, by row."""
    reach = [torch.zeros_like(w) for w in wanted]
    for seed in range(_MOVES):
        rounded = _run(candidate, given, True, seed)[1]
        with Widened(torch.float64):
            again = _run(original, given, True, seed)[1]
        for now, before in ((rounded, slopes), (again, wanted)):
            apart = [(a - b).abs().nan_to_num(0.0, 0.0, 0.0) for a, b in zip(now, before, strict=True)]
            reach = [torch.maximum(r, a) for r, a in zip(reach, apart, strict=True)]
    # a comparison that a rounding turned moves a gradient by much of its size, and speaks of no cancelling
    reach = [
        r.masked_fill(r > _TURNED * w.abs().amax(), 0.0) if w.numel() else r for r, w in zip(reach, wanted, strict=True)
    ]
    return [r.amax(-1, keepdim=True) if r.dim() and r.numel() else r for r in reach]


@torch.no_grad()
def _rounded(
    original: Function,
    forms: Sequence[Function],
    inputs: Sequence[tuple[Any, ...]],
    storage: Sequence[torch.dtype],
    wide: frozenset[int],
) -> tuple[int, dict[str, float], str]:
    """(index of the first form that agrees in every dtype, share of elements that differ there, "same" or "fewer").

    Where no form rounds at the same places, one that rounds less will do: nearer to the float64 result of the same
    rounded inputs than the original is, on average and at its worst.
    """
    said = ""
    for wanted in ("same", "fewer"):
        for index, form in enumerate(forms):
            shares: dict[str, float] = {}
            reason = ""
            for dtype in storage:
                share, reason = _compared(original, form, inputs, dtype, wanted == "fewer", wide)
                shares[str(dtype).removeprefix("torch.")] = share
                if reason:
                    break
            else:
                return index, shares, wanted
            said = said or reason
    raise Disagreement(said, 0.0)


def _compared(
    original: Function,
    form: Function,
    inputs: Sequence[tuple[Any, ...]],
    dtype: torch.dtype,
    exact: bool,
    wide: frozenset[int],
) -> tuple[float, str]:
    """(share of elements that differ, why the form will not do, or "")."""
    differing = total = 0
    worse = ""
    for given in inputs:
        low = [
            x.to(torch.float32 if i in wide else dtype) if isinstance(x, Tensor) and x.is_floating_point() else x
            for i, x in enumerate(given)
        ]
        results = list(zip(flat(form(*low)), flat(original(*low)), strict=True))
        for i, (f, w) in enumerate(results):
            if f.dtype != w.dtype:
                return 1.0, f"result {i} of {dtype} inputs is {w.dtype}, the op's {f.dtype}"
            if f.dtype.itemsize > dtype.itemsize:  # nothing rounded it to storage: float32's own noise is no difference
                size = (w.abs().amax(-1, keepdim=True) if w.dim() and w.numel() else w.abs()).nan_to_num()
                differing += int(((f - w).abs() > _NOISE * size).sum())
            else:
                differing += int(((f != w) & ~((f != f) & (w != w))).sum())
            total += w.numel()
        if exact:
            with Widened(torch.float64):
                exactly = [x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in low]
                truths = flat(original(*exactly))
            for i, ((f, w), truth) in enumerate(zip(results, truths, strict=True)):
                own, theirs = (f.double() - truth).abs(), (w.double() - truth).abs()
                if own.numel() and not (own.mean() <= theirs.mean() and own.max() <= theirs.max()):
                    worse = worse or f"result {i} in {dtype} is farther from the exact one than the module's"
    share = differing / max(total, 1)
    if exact:
        return share, worse
    # few elements cannot show a share: one that differs among 32 is allowed
    if differing > math.ceil(DIFFERING * total) or (differing and differing == total):
        return share, f"{differing} of {total} elements differ in {dtype}: it rounds elsewhere"
    return share, ""
