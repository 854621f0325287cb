"""The arguments that an op is tried with: its own cases, and for a backward those of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.fills import DTYPES, Buffer, Draw, fill

TIERS = ("small", "standard")


@dataclass(frozen=True)
class Arguments:
    """Materialised arguments in schema order, and the guarded buffers that their tensors lie in."""

    values: tuple[Any, ...]
    buffers: dict[str, Buffer]

    def to(self, device: torch.device) -> Arguments:
        """The same arguments on another device, bit for bit and layout for layout."""
        moved = {name: buffer.to(device) for name, buffer in self.buffers.items()}
        there = {id(b.tensor): moved[name].tensor for name, b in self.buffers.items()}
        return Arguments(tuple(there.get(id(v), v) for v in self.values), moved)

    def untouched(self) -> list[str]:
        """What was written to that should not have been; empty when nothing was."""
        found = []
        for name, buffer in self.buffers.items():
            if not buffer.untouched():
                found.append(f"wrote outside {name}" if buffer.overrun() else f"{name} was modified")
        return found


def forward_of(primitive: Primitive) -> Primitive | None:
    """The op whose gradient this is; None for a forward op."""
    for other in registry.primitives().values():
        if other.backward == primitive.name:
            return other
    return None


def cases_of(primitive: Primitive, tier: str = "small") -> list[Case]:
    """The cases of one tier. A backward has its forward's; those with ``need_...`` switches get one with each off,
    and optional gradients are absent in every other case."""
    forward = forward_of(primitive)
    if forward is None:
        return [c for c in primitive.cases() if c.tier == tier]
    found = []
    needs = [n for n in primitive.names if n.startswith("need_")]
    optional = [n for n in output_gradients(primitive, forward) if primitive.types[n] == "Tensor?"]
    for index, case in enumerate(c for c in forward.cases() if c.tier == tier):
        extra: dict[str, Any] = dict.fromkeys(needs, True) | dict.fromkeys(optional, index % 2 == 1)
        found.append(replace(case, args={**case.args, **extra}))
        if index == 0:
            for name in needs:
                args = {**case.args, **extra, name: False}
                found.append(replace(case, name=f"{case.name}_without_{name}", args=args))
    return found


def output_gradients(backward: Primitive, forward: Primitive) -> dict[str, int]:
    """Parameters of a backward that are gradients of outputs -> the output's index."""
    known = forward.gradient_names() | {"grad": 0}
    return {n: known[n] for n in backward.names if n in known}


def independent(case: Case) -> bool:
    """Whether rounding errors behave as random ones: no equal terms by a fill, by repeated memory, or as given."""
    for a in case.args.values():
        if isinstance(a, TensorSpec):
            if not fill(a.fill or "normal").independent or Buffer.repeats(a.shape, a.layout):
                return False
        elif isinstance(a, Tensor) and a.numel() > 1 and len(a.unique()) == 1:
            return False
    return True


def double(args: Sequence[Any]) -> tuple[Any, ...]:
    """The oracle's view of arguments: floating tensors in float64, exactly as they were quantised."""
    return tuple(a.double() if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def arguments(case: Case, primitive: Primitive, dtype: torch.dtype, seed: int, device: torch.device) -> Arguments:
    """Every argument of a case, on the device, each tensor in a guarded buffer of its own.

    A case may hold tensors themselves; then it holds every argument of the op, a backward's saved ones too.
    """
    if any(isinstance(a, Tensor) for a in case.args.values()):
        return _own(case, primitive, dtype, seed, device)
    forward = forward_of(primitive)
    if forward is None:
        return _own(case, primitive, dtype, seed, device)
    given = _own(case, forward, dtype, seed, device)
    by_name = dict(zip(forward.names, given.values, strict=True))
    with torch.no_grad():
        outputs = as_tuple(forward.body(*double(given.values)))
        declared = as_tuple(forward.meta(*given.values))
    saved = dict(zip(forward.outputs, zip(outputs, declared, strict=True), strict=True))
    gradients = output_gradients(primitive, forward)
    first = next(a for a in case.args.values() if isinstance(a, TensorSpec))
    values: list[Any] = []
    buffers: dict[str, Buffer] = {}
    for name in primitive.names:
        if name in gradients:
            index = gradients[name]
            if not case.args.get(name, True):
                values.append(None)
                continue
            like = declared[index]
            layout = first.layout if like.dim() == len(first.shape) else "contiguous"
            draw = Draw.of(seed, primitive.name, case.name, name, tuple(like.shape), like.dtype, device)
            buffers[name] = Buffer.around(_cotangent(case, draw), like.dtype, layout)
        elif name in by_name:
            values.append(by_name[name])
            if name in given.buffers:
                buffers[name] = given.buffers[name]
            continue
        elif (output := name.removeprefix("out_") if name not in saved else name) in saved:
            exact, like = saved[output]
            model = like.dim() == 4 and not like.is_contiguous()
            buffers[name] = Buffer.around(exact, like.dtype, "heads" if model else "contiguous")
        else:
            values.append(case.args[name])
            continue
        values.append(buffers[name].tensor)
    return Arguments(tuple(values), buffers)


def _cotangent(case: Case, draw: Draw) -> Tensor:
    """What the case says; else integers where it is about exactness, random values elsewhere."""
    if case.cotangent is not None:
        return fill(case.cotangent).make(draw)
    integer = case.exact or any(isinstance(a, TensorSpec) and a.fill == "integer" for a in case.args.values())
    return fill("integer" if integer else "normal").make(draw)


def _own(case: Case, primitive: Primitive, dtype: torch.dtype, seed: int, device: torch.device) -> Arguments:
    values, buffers = [], {}
    for parameter in primitive.parameters:
        name = parameter.name
        value = case.args.get(name, parameter.default)
        if isinstance(value, TensorSpec):
            buffers[name] = _buffer(value, Draw.of(
                seed, primitive.name, case.name, name, value.shape,
                dtype if value.dtype == "storage" else DTYPES[value.dtype], device,
            ))  # fmt: skip
            value = buffers[name].tensor
        elif isinstance(value, Tensor):
            buffers[name] = Buffer.holding(value, device)
            value = buffers[name].tensor
        values.append(value)
    return Arguments(tuple(values), buffers)


def _buffer(spec: TensorSpec, draw: Draw) -> Buffer:
    if spec.dtype == "int64":
        content = (draw.uniform() * (spec.high - spec.low)).floor() + spec.low
    else:
        content = fill(spec.fill or "normal").make(draw)
    return Buffer.around(content, draw.dtype, spec.layout)


def materialise(
    case: Case, primitive: Primitive, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[Any, ...]:
    """The arguments of a case in schema order; see `arguments`."""
    return arguments(case, primitive, dtype, seed, torch.device(device)).values
