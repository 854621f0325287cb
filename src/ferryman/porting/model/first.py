"""The first module of a forward that computes something else once it is ported: each alone, on what it was given.

A module is judged on the arguments of its first call in the unported model, so that what came before it does not
count. Its limit is twice the floor: what the unported module does when its parameters and floating arguments move by
one unit in the last place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from torch.utils._pytree import tree_map

from ferryman.porting.model import source
from ferryman.porting.model.results import AMPLITUDE, SEEDS


@dataclass(frozen=True)
class Divergence:
    """``path`` is the first module beyond its limit; ``others`` how many more are."""

    path: str
    module: str
    value: float
    floor: float
    limit: float
    others: int

    @property
    def text(self) -> str:
        more = f"; {self.others} more modules beyond theirs" if self.others else ""
        return (
            f"first divergent module: {self.path or 'the model itself'} ({self.module}): {self.value:.3g}; "
            f"limit {self.limit:.3g} (floor {self.floor:.3g}){more}"
        )


@dataclass
class _Call:
    args: Any
    kwargs: Any
    out: Any = None


def recorded(model: nn.Module, run: Callable[[nn.Module], Any], paths: Iterable[str]) -> dict[str, _Call]:
    """{path: its first call} of the modules at ``paths`` in ``run(model)``, in the order in which they end."""
    wanted = {id(model.get_submodule(path)): path for path in paths}
    begun: dict[str, _Call] = {}
    ended: dict[str, _Call] = {}

    def enter(module: nn.Module, args: Any, kwargs: Any) -> None:
        path = wanted.get(id(module))
        if path is not None and path not in begun:
            begun[path] = _Call(_kept(args), _kept(kwargs))

    def leave(module: nn.Module, args: Any, out: Any) -> None:
        path = wanted.get(id(module))
        if path is not None and path not in ended:
            begun[path].out = _kept(out)
            ended[path] = begun[path]

    with contextlib.ExitStack() as stack:
        for module in model.modules():
            if id(module) in wanted:
                stack.callback(module.register_forward_pre_hook(enter, with_kwargs=True).remove)
        stack.callback(register_module_forward_hook(source.watching(leave)).remove)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            run(model)
    return ended


def _kept(value: Any) -> Any:
    return tree_map(lambda t: t.detach().clone() if isinstance(t, Tensor) else t, value)


def first_divergence(
    model: nn.Module,
    run: Callable[[nn.Module], Any],
    paths: Iterable[str],
    ported: Callable[[], Any],
    unported: Callable[[], Any],
    distance: Callable[[Any, Any], float],
) -> Divergence | None:
    """The first of the modules at ``paths`` beyond its limit, or None.

    The model comes unported, and is left so. ported, unported: put it in that state. distance: of two results. A module
    that cannot be called again by itself (it raises, or was not called) is passed over.
    """
    calls = recorded(model, run, paths)
    floors = {path: _floor(model.get_submodule(path), call, distance) for path, call in calls.items()}
    wrong: list[tuple[str, float, float]] = []
    ported()
    try:
        for path, call in calls.items():
            floor = floors[path]
            replayed = None if floor is None else _again(model.get_submodule(path), call.args, call.kwargs)
            if floor is None or replayed is None:
                continue
            value = distance(replayed, call.out)
            if value > AMPLITUDE * floor:
                wrong.append((path, value, floor))
    finally:
        unported()
    if not wrong:
        return None
    path, value, floor = wrong[0]
    kind = type(model.get_submodule(path)).__name__
    return Divergence(path, kind, value, floor, AMPLITUDE * floor, len(wrong) - 1)


def _again(module: nn.Module, args: Any, kwargs: Any) -> Any:
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            return _kept(module(*_kept(args), **_kept(kwargs)))
        except (RuntimeError, TypeError, ValueError, AttributeError, IndexError):
            return None  # it needs more of the pass than its arguments


def _floor(module: nn.Module, call: _Call, distance: Callable[[Any, Any], float]) -> float | None:
    """None where the module does not even repeat itself."""
    same = _again(module, call.args, call.kwargs)
    if same is None or distance(same, call.out) != 0.0:
        return None
    floor = 0.0
    for seed in SEEDS:
        generator = torch.Generator().manual_seed(seed)
        with moved(module, generator):
            args, kwargs = (tree_map(lambda t: _moved(t, generator), v) for v in (call.args, call.kwargs))  # noqa: B023
            perturbed = _again(module, args, kwargs)
        if perturbed is None:
            return None
        floor = max(floor, distance(perturbed, call.out))
    return floor


@contextlib.contextmanager
def moved(module: nn.Module, generator: torch.Generator) -> Iterator[None]:
    """A module with each floating parameter element moved by one unit in its last place, up, down or not at all."""
    originals: Mapping[Any, Tensor] = {p: p.detach().clone() for p in module.parameters() if p.is_floating_point()}
    with torch.no_grad():
        for p, before in originals.items():
            p.copy_(_moved(before, generator))
    try:
        yield
    finally:
        with torch.no_grad():
            for p, before in originals.items():
                p.copy_(before)


def _moved(value: Any, generator: torch.Generator) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    step = torch.randint(-1, 2, value.shape, generator=generator).to(value.device, value.dtype)
    return value + step * value.abs() * torch.finfo(value.dtype).eps
