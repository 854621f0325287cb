"""What is timed: for each op, shapes of real models, larger than the last cache and smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.errors import UnknownName
from ferryman.ops.evidence import LARGE_BYTES, Grid
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.inputs.cases import as_tuple, forward_of, materialise
from ferryman.porting.inputs.fills import DTYPES, laid_on_meta
from ferryman.porting.running.timing import standard_case

__all__ = ["LARGE_BYTES", "Grid", "cases", "grid_of", "inputs", "on_meta"]


def grid_of(name: str) -> Grid:
    """A grid by name. Raises UnknownName."""
    for known in get_args(Grid):
        if name == known:
            return known
    raise UnknownName("grid", name, get_args(Grid))


def cases(op: Primitive, grid: Grid, device: torch.device) -> list[Case]:
    """The cases that an op is timed on; a backward has its forward's. On a CPU the op's first standard case alone."""
    forward = forward_of(op) or op
    if device.type == "cpu":
        case = standard_case(forward)
        return [] if case is None else [case]
    bench = registry.evidence(forward).bench
    if bench is None:
        case = standard_case(forward)
        return [] if case is None else [case]
    return list(bench(grid))


def inputs(op: Primitive, case: Case, dtype: torch.dtype, seed: int, device: torch.device) -> tuple[Any, ...]:
    """Random arguments in schema order; a backward's from one forward by whatever implementation dispatch chooses."""
    forward = forward_of(op)
    if forward is None:
        return materialise(case, op, dtype, seed, device)
    values = materialise(case, forward, dtype, seed, device)
    with torch.no_grad():
        outputs = as_tuple(forward.namespace["_resolve"](*values))
    generator = torch.Generator(device).manual_seed(seed)

    def gradient(like: Tensor) -> Tensor:
        drawn = torch.randn(like.shape, generator=generator, device=device, dtype=torch.float32).to(like.dtype)
        return torch.empty_like(like).copy_(drawn)

    return _backwards(op, forward, values, outputs, gradient)


def on_meta(op: Primitive, case: Case, dtype: torch.dtype) -> tuple[Any, ...]:
    """The shapes, dtypes and strides that `inputs` gives, on the meta device."""
    forward = forward_of(op) or op
    values = []
    for parameter in forward.parameters:
        values.append(_without_data(case.args.get(parameter.name, parameter.default), dtype))
    if forward is op:
        return tuple(values)

    def gradient(like: Tensor) -> Tensor:
        layout = case.gradients
        return torch.empty_like(like) if layout is None else laid_on_meta(tuple(like.shape), like.dtype, layout)

    return _backwards(op, forward, values, as_tuple(forward.meta(*values)), gradient)


def _without_data(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return [_without_data(one, dtype) for one in value]
    if not isinstance(value, TensorSpec):
        return value
    own = dtype if value.dtype == "storage" else DTYPES[value.dtype]
    return laid_on_meta(value.shape, own, value.layout)


def _backwards(
    op: Primitive,
    forward: Primitive,
    values: Sequence[Any],
    outputs: Sequence[Tensor],
    gradient: Callable[[Tensor], Tensor],
) -> tuple[Any, ...]:
    """A backward's arguments from its forward's and what that gave; gradients that are optional are absent."""
    given = dict(zip(forward.names, values, strict=True))
    for name, tensor in zip(forward.outputs, outputs, strict=True):
        given[f"out_{name}"] = tensor
        given.setdefault(name, tensor)
    for name, index in forward.gradient_names().items():
        drawn = gradient(outputs[index])  # drawn though it may be left out: the others' values stay
        given[name] = None if op.types.get(name) == "Tensor?" else drawn
    needs = [name for name in op.names if name.startswith("need_")]
    given |= {name: forward.types[name.removeprefix("need_")] == "Tensor" for name in needs}  # a bias learns seldom
    return tuple(given[name] for name in op.names)
