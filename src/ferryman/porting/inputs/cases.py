"""The arguments that an op is tried with: its own cases, and for a backward those of its forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.dispatch.registry import forward_of
from ferryman.errors import CapsuleError, EvidenceError, UnknownName
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.inputs.fills import DTYPES, Buffer, Draw, fill

__all__ = [
    "APART",
    "TIERS",
    "Arguments",
    "arguments",
    "as_tuple",
    "cases_of",
    "double",
    "forward_of",
    "independent",
    "materialise",
    "must_be_arguments",
    "output_gradients",
    "specs_of",
]

TIERS = ("small", "standard")
APART = ("rows", "last")  # layouts of gradients beside a first tensor without gaps


@dataclass(frozen=True)
class Arguments:
    """Materialised arguments in schema order, and the guarded buffers that their tensors lie in."""

    values: tuple[Any, ...]
    buffers: dict[str, Buffer]

    def to(self, device: torch.device) -> Arguments:
        """The same arguments on another device, bit for bit and layout for layout."""
        moved = {name: buffer.to(device) for name, buffer in self.buffers.items()}
        there = {id(b.tensor): moved[name].tensor for name, b in self.buffers.items()}

        def at(value: Any) -> Any:
            return [at(v) for v in value] if isinstance(value, list) else there.get(id(value), value)

        return Arguments(tuple(map(at, self.values)), moved)

    def untouched(self) -> list[str]:
        """What was written to that should not have been; empty when nothing was."""
        writes = []
        for name, buffer in self.buffers.items():
            if not buffer.untouched():
                writes.append(f"wrote outside {name}" if buffer.overrun() else f"{name} was modified")
        return writes


def cases_of(primitive: Primitive, tier: str = "small") -> list[Case]:
    """The cases of one tier. A backward has its forward's; those with ``need_...`` switches get one with each off (an
    optional tensor's in each case that has it), and optional gradients are absent in every other case. Last come two of
    its usual case, whose gradients lie in memory as no other tensor does: strides are not taken for another's unseen.
    """
    forward = forward_of(primitive)
    if forward is None:
        return [c for c in registry.evidence(primitive).cases() if c.tier == tier]
    cases = []
    needs = [n for n in primitive.names if n.startswith("need_")]
    optional = [n for n in output_gradients(primitive, forward) if primitive.types[n] == "Tensor?"]
    own = [c for c in registry.evidence(forward).cases() if c.tier == tier]
    for index, case in enumerate(own):
        there = {n: case.args.get(n.removeprefix("need_")) is not None for n in needs}
        extra: dict[str, Any] = there | dict.fromkeys(optional, index % 2 == 1)
        cases.append(replace(case, args={**case.args, **extra}))
        for name in needs:
            if there[name] if forward.types[name.removeprefix("need_")] == "Tensor?" else index == 0:
                args = {**case.args, **extra, name: False}
                cases.append(replace(case, name=f"{case.name}_without_{name}", args=args))
    usual = max(own, key=_strides, default=None) if tier == "small" else None
    if usual is not None and _strides(usual) > 1:
        args = {**usual.args, **{n: usual.args.get(n.removeprefix("need_")) is not None for n in needs}}
        args |= dict.fromkeys(optional, True)
        cases += [replace(usual, name=f"{usual.name}_gradients_{kind}", args=args, gradients=kind) for kind in APART]
    return cases


def _strides(case: Case) -> int:
    """How many strides of a case's first tensor tell it from one that lies in another way; three are enough."""
    first = next(iter(specs_of(case)), None)
    if first is None or first.layout not in ("contiguous", "heads") or 0 in first.shape:
        return 0
    return min(sum(n > 1 for n in first.shape), 3)


def output_gradients(backward: Primitive, forward: Primitive) -> dict[str, int]:
    """Parameters of a backward that are gradients of outputs -> the output's index."""
    known = forward.gradient_names() | {"grad": 0}
    return {n: known[n] for n in backward.names if n in known}


def specs_of(case: Case) -> list[TensorSpec]:
    """The tensors of a case that are still to be made, those in lists too."""
    values = [v for a in case.args.values() for v in (a if isinstance(a, list | tuple) else (a,))]
    return [v for v in values if isinstance(v, TensorSpec)]


def dtype_of(spec: TensorSpec, storage: torch.dtype) -> torch.dtype:
    """A tensor's dtype where "storage" is ``storage``. Raises UnknownName."""
    if spec.dtype == "storage":
        return storage
    if spec.dtype not in DTYPES:
        raise UnknownName("dtype of a TensorSpec", spec.dtype, ("storage", *DTYPES))
    return DTYPES[spec.dtype]


def must_be_arguments(case: Case, primitive: Primitive) -> None:
    """Raises EvidenceError for what a case names that is no argument of its op, nor of the forward of a backward."""
    forward = forward_of(primitive)
    known = {*primitive.names, *(() if forward is None else forward.names)}
    for name in case.args:
        if name not in known:
            raise EvidenceError(f"{primitive.name}, case {case.name}: {UnknownName('argument', name, known)}")


def independent(case: Case) -> bool:
    """Whether rounding errors behave as random ones: no equal terms by a fill, by repeated memory, or as given."""
    for spec in specs_of(case):
        if not fill(spec.fill or "normal").independent or Buffer.repeats(spec.shape, spec.layout):
            return False
    given = (a for a in case.args.values() if isinstance(a, Tensor) and a.numel() > 1)
    return all(len(a.unique()) > 1 for a in given)


def double(args: Sequence[Any]) -> tuple[Any, ...]:
    """The oracle's view of arguments: floating tensors in float64, exactly as they were quantised."""

    def wide(value: Any) -> Any:
        if isinstance(value, list | tuple):
            return [wide(v) for v in value]
        return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value

    return tuple(map(wide, args))


def as_tuple(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


def arguments(case: Case, primitive: Primitive, dtype: torch.dtype, seed: int, device: torch.device) -> Arguments:
    """Every argument of a case, on the device, each tensor in a guarded buffer of its own.

    A case may hold tensors themselves; then it holds every argument of the op, a backward's saved ones too. Raises
    EvidenceError for an argument that the op lacks, and for a fill that is unknown or raises.
    """
    must_be_arguments(case, primitive)
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
    first = specs_of(case)[0]
    in_place = set(forward.mutates.values())
    values: list[Any] = []
    buffers: dict[str, Buffer] = {}
    for name in primitive.names:
        if name in gradients:
            index = gradients[name]
            if not case.args.get(name, True):
                values.append(None)
                continue
            like = declared[index]
            layout = case.gradients or (first.layout if like.dim() == len(first.shape) else "contiguous")
            draw = Draw.of(seed, primitive.name, case.name, name, tuple(like.shape), like.dtype, device)
            content = _content(case, primitive.name, _cotangent(case), draw)
            buffers[name] = Buffer.around(content, like.dtype, layout)
        elif name in by_name:
            values.append(by_name[name])
            if name in given.buffers:
                buffers[name] = given.buffers[name]
            continue
        elif (output := name.removeprefix("out_") if name not in saved else name) in saved:
            exact, like = saved[output]
            model = like.dim() == 4 and not like.is_contiguous()
            layout = case.saved if output in in_place else "heads" if model else "contiguous"
            buffers[name] = Buffer.around(exact, like.dtype, layout)
        else:
            values.append(case.args[name] if name in case.args else primitive.added[name])
            continue
        values.append(buffers[name].tensor)
    return Arguments(tuple(values), buffers)


def _cotangent(case: Case) -> str:
    """The fill that the case says; else integers where it is about exactness, random values elsewhere."""
    if case.cotangent is not None:
        return case.cotangent
    integer = case.exact or any(isinstance(a, TensorSpec) and a.fill == "integer" for a in case.args.values())
    return "integer" if integer else "normal"


def _content(case: Case, op: str, filled: str, draw: Draw) -> Tensor:
    """What a fill makes of a draw. Raises EvidenceError where it is unknown or raises; what memory lacks, as it is."""
    try:
        return fill(filled, op).make(draw)
    except (torch.OutOfMemoryError, CapsuleError, EvidenceError):
        raise
    except Exception as error:  # an op's own fill may raise anything
        why = f"{type(error).__name__}: {str(error)[:300]}"
        message = f"{op}, case {case.name}: the fill {filled!r} of {draw.parameter} raised {why}"
        raise EvidenceError(message) from error


def _own(case: Case, primitive: Primitive, dtype: torch.dtype, seed: int, device: torch.device) -> Arguments:
    given = {p.name: case.args.get(p.name, p.default) for p in primitive.parameters}
    buffers: dict[str, Buffer] = {}
    making: list[str] = []

    def value_of(name: str, value: Any) -> Any:
        """An argument as the op takes it; a tensor is made once, whoever asks first."""
        if isinstance(value, list | tuple):
            return [value_of(f"{name}_{i}", one) for i, one in enumerate(value)]
        if isinstance(value, TensorSpec) and name not in buffers:
            own = dtype_of(value, dtype)
            if name in making:
                names = ", ".join(making)
                raise EvidenceError(
                    f"{primitive.name}, case {case.name}: the fills of {names} need each other's content"
                )
            making.append(name)
            draw = Draw.of(
                *(seed, primitive.name, case.name, name, value.shape, own, device),
                given=argument,
                shape_of=shape_of,
                low=value.low,
                high=value.high,
            )
            content = _content(case, primitive.name, _filled(value, own), draw)
            making.remove(name)
            buffers[name] = Buffer.around(content, own, value.layout)
        elif isinstance(value, Tensor) and name not in buffers:
            buffers[name] = Buffer.holding(value, device)
        return buffers[name].tensor if name in buffers else value

    def argument(name: str) -> Any:
        return value_of(name, given[name])

    def shape_of(name: str) -> tuple[int, ...]:
        return tuple(given[name].shape)

    values = tuple(value_of(name, value) for name, value in given.items())
    return Arguments(values, {n: buffers[n] for n in sorted(buffers, key=lambda n: _place(primitive, n))})


def _filled(spec: TensorSpec, dtype: torch.dtype) -> str:
    """The fill of a tensor: its own, or the usual one of its dtype."""
    if spec.fill:
        return spec.fill
    return "normal" if dtype.is_floating_point else "mask" if dtype == torch.bool else "drawn"


def _place(primitive: Primitive, buffer: str) -> tuple[int, int]:
    """Where an argument, or one of a list, stands in the schema."""
    if buffer in primitive.names:
        return primitive.names.index(buffer), 0
    name, _, index = buffer.rpartition("_")
    return primitive.names.index(name), int(index)


def materialise(
    case: Case, primitive: Primitive, dtype: torch.dtype, seed: int = 0, device: torch.device | str = "cpu"
) -> tuple[Any, ...]:
    """The arguments of a case in schema order; see `arguments`."""
    return arguments(case, primitive, dtype, seed, torch.device(device)).values
