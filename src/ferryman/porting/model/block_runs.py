"""Runs of a block's code on tensors that are drawn, with short sides."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.ops.recognition import Layer
from ferryman.porting.model.exact import Widened
from ferryman.porting.model.leaf import inputs_of
from ferryman.porting.model.trace import Test, Trace


@torch.no_grad()
def tried(
    module: nn.Module,
    names: tuple[str, ...],
    sizes: Mapping[int, int],
    inputs: tuple[Tensor, ...],
    spoilt: int | None = None,
) -> tuple[Any, dict[str, Tensor]] | None:
    """spoilt: what each of its tensors has there is NaN."""
    state, tensors = shortened(module, names, sizes)
    for tensor in tensors if spoilt is not None else ():
        tensor[spoilt] = torch.nan
    try:
        with Widened(torch.float64):
            outputs = run_of(type(module), state, names, False, len(inputs), *inputs, *tensors)
    except Exception:  # noqa: BLE001 - foreign code ran on what it may not take
        return None
    return outputs, dict(zip(names, tensors, strict=True))


@torch.no_grad()
def shape_of(module: nn.Module, names: tuple[str, ...], inputs: tuple[Tensor, ...]) -> tuple[int, ...] | None:
    weights = {n: p for n, p in [*module._parameters.items(), *module._buffers.items()] if p is not None}
    tensors = [weights[n].detach().clone() for n in names]
    try:
        result = run_of(type(module), dict(module.__dict__), names, False, len(inputs), *inputs, *tensors)
    except Exception:  # noqa: BLE001 - foreign code ran on what it may not take
        return None
    return tuple(result.shape) if isinstance(result, Tensor) else None


def shortened(
    module: nn.Module, names: tuple[str, ...], sizes: Mapping[int, int]
) -> tuple[dict[str, Any], list[Tensor]]:
    """(a module's state with other sizes, its tensors drawn with such sides)."""
    state = dict(module.__dict__)
    for name, value in state.items():
        if isinstance(value, int) and not isinstance(value, bool) and value in sizes:
            state[name] = sizes[value]
    weights = {n: p for n, p in [*module._parameters.items(), *module._buffers.items()] if p is not None}
    generator = torch.Generator().manual_seed(7)
    tensors = []
    for n in names:
        shape = [sizes[s] for s in weights[n].shape]
        tensors.append(torch.randn(shape, generator=generator, dtype=torch.float64) * shape[-1] ** -0.5)
    return state, tensors


@dataclass
class Runs:
    """Runs of a block's code on tensors with short sides: the followed code on float64, the module as callers get it on
    what is narrower. ``walked``: what the numbers of each run were; ``refused``: numbers with which it raised;
    ``remarks``: what a user should know of a layer in its place."""

    module: nn.Module
    followed: type[nn.Module]
    names: tuple[str, ...]
    layer: Layer
    trace: Trace
    walked: dict[int, set[float]] = field(default_factory=dict)
    refused: set[float] = field(default_factory=set)
    remarks: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.state, self.tensors = shortened(self.module, self.names, self.layer.sizes)

    def __call__(self, training: bool, count: int, *given: Any) -> Any:
        exact = next(x.dtype for x in given[::-1] if x.is_floating_point()) == torch.float64
        kind = self.followed if exact else type(self.module)
        numbers = None if self.layer.numbers is None else given[self.layer.numbers]
        self.trace.run += 1
        try:
            outputs = run_of(kind, self.state, self.names, training, count, *given)
        except Exception:
            for test in self.trace.tests:  # what was refused covers nothing
                test.sides.pop(self.trace.run, None)
            raise
        if exact and numbers is not None:
            self.walked[self.trace.run] = set(numbers.unique().tolist())
        return outputs

    def drawn(self, count: int) -> list[tuple[Any, ...]]:
        """Inputs of every seed, but for those of the last ones that the block refuses."""
        layer = self.layer
        inputs = [(*layer.draw(seed), *self.tensors) for seed in range(layer.seeds)]
        first = layer.seeds - layer.refused
        known = {n for given in inputs[:first] for n in self._numbers(given)}
        taken = inputs[:first]
        for given in inputs[first:]:
            before = [set(test.seen) for test in self.trace.tests]
            try:
                with torch.no_grad(), Widened(torch.float64):
                    self(False, count, *given)
            except Exception:  # noqa: BLE001 - foreign code may refuse what it likes
                self.refused |= set(self._numbers(given)) - known
                for test, seen in zip(self.trace.tests, before, strict=True):
                    test.seen = seen
            else:
                taken.append(given)
        return taken

    def _numbers(self, given: tuple[Any, ...]) -> list[float]:
        return [] if self.layer.numbers is None else given[self.layer.numbers].unique().tolist()

    def never(self, test: Test) -> bool:
        """Whether a test cannot be true, because one side went over exactly the numbers of an input, in every run, and
        the other is a side of the module's tensors, with which among the numbers it raises."""
        side = getattr(self.module, test.against, None) if test.against else None
        short = self.layer.sizes.get(side) if isinstance(side, int) else None
        walked = {run: {left for left, _ in test.sides.get(run, ())} for run in self.walked}
        against = {right for pairs in test.sides.values() for _, right in pairs}
        return short in self.refused and against == {short} and walked == self.walked

    def refuses_less(self) -> bool:
        """Whether the block raises without the inputs that its forward says may be left out."""
        count = len(inputs_of(type(self.module)))
        try:
            with torch.no_grad(), Widened(torch.float64):
                self(False, count, *self.layer.draw(0)[:count], *self.tensors)
        except Exception:  # noqa: BLE001 - it does, with whatever error
            return True
        return False


def run_of(kind: Any, state: Mapping[str, Any], names: tuple[str, ...], training: bool, count: int, *given: Any) -> Any:
    twin = kind.__new__(kind)
    twin.__dict__.update(state)
    tensors = dict(zip(names, given[count:], strict=True))
    twin.__dict__["_parameters"] = {n: tensors.get(n) for n in state["_parameters"]}
    twin.__dict__["_buffers"] = {n: tensors.get(n) for n in state["_buffers"]}
    twin.__dict__["training"] = training
    return twin.forward(*given[:count])
