"""Cases in and out of a capsule: a machine rebuilds the inputs from counters and proves by hash that the bits agree."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ferryman.dispatch import registry
from ferryman.errors import CapsuleError, UnknownName
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.capsule.container import digest
from ferryman.porting.capsule.contents import CaseRecord, Generated, InputRecord, Named
from ferryman.porting.inputs.cases import (
    TIERS,
    Arguments,
    arguments,
    as_tuple,
    cases_of,
    double,
    forward_of,
    output_gradients,
)
from ferryman.porting.inputs.fills import dtype_name, fill

STORED_BYTES = 128 * 2**10  # of one saved tensor; attention's largest small one has 53 kB
MOST_BYTES = 4 * 2**30  # of one intermediate; our own largest case has 2 GiB (attention over 4k keys, in float64)
NOISE = 2.0**-40  # relative: how far two float64 evaluations of a derived tensor may be apart
CANCELLED = 2.0**-51  # and absolutely, in units of the largest value, where terms cancel
MOST_PATCHED = 2**14  # elements of one tensor
_ALIGNMENT = 16
NON_FINITE = ("NaN", "Infinity", "-Infinity")  # how JSON of a record spells them


class OtherBits(Exception):
    """This machine rebuilt other inputs than those that were recorded; the message names the argument."""


def recorded(primitive: Primitive, case: Case) -> CaseRecord:
    """A case as data. Raises CapsuleError for one that holds tensors: only what can be rebuilt is recorded."""
    args: dict[str, Any] = {}
    for name, value in case.args.items():
        if isinstance(value, TensorSpec):
            args[name] = Generated.model_validate({**vars(value), "shape": list(value.shape)})
        elif value is None or isinstance(value, bool | int | float | str):
            args[name] = value
        elif isinstance(value, torch.dtype):
            args[name] = Named.model_validate({"scalar_type": dtype_name(value)})
        else:
            raise CapsuleError(f"{primitive.name} {case.name}: {name} is a {type(value).__name__}; required: generated")
    return CaseRecord(
        op=primitive.name,
        case=case.name,
        tier=case.tier,
        exact=case.exact,
        inexact=list(case.inexact),
        cotangent=case.cotangent,
        saved=case.saved,
        gradients=case.gradients,
        args=args,
    )


def case_of(record: CaseRecord) -> Case:
    """The case of a record. JSON has no infinity and no NaN: for a float parameter they are strings there."""
    args: dict[str, Any] = {}
    floats = _floats(record.op)
    for name, value in record.args.items():
        if isinstance(value, Generated):
            spec = value.model_dump()
            args[name] = TensorSpec(**{**spec, "shape": tuple(spec["shape"])})
        elif isinstance(value, Named):
            args[name] = getattr(torch, value.scalar_type)
        elif isinstance(value, str) and name in floats and value in NON_FINITE:
            args[name] = float(value)
        else:
            args[name] = value
    stated = record.cotangent, record.saved, record.gradients
    return Case(record.case, args, record.tier, record.exact, tuple(record.inexact), *stated)


@cache
def _floats(op: str) -> frozenset[str]:
    """The parameters of an op, and of the forward that it is the backward of, whose values are floats."""
    if op not in registry.primitives():
        return frozenset()
    primitive = registry.primitive(op)
    kinds = {**(forward_of(primitive) or primitive).types, **primitive.types}
    return frozenset(name for name, kind in kinds.items() if kind in ("float", "float?"))


@cache
def _own(op: str) -> Mapping[str, Case]:
    primitive = registry.primitive(op)
    return {case.name: case for tier in TIERS for case in cases_of(primitive, tier)}


def misfit(primitive: Primitive, case: Case) -> str | None:
    """Why this Ferryman cannot run a recorded case, if it cannot. Raises CapsuleError where it would take too much.

    A case of our own catalogue is known to fit. Any other is evaluated on meta tensors first, which hold no memory.
    """
    own = _own(primitive.name).get(case.name)
    if own is not None and _comparable(own) == _comparable(case):
        return None
    known = set(primitive.names) | set((forward_of(primitive) or primitive).names)
    strange = sorted(set(case.args) - known)
    if strange:
        return f"{primitive.name} has no argument {strange[0]} here"
    where = f"{primitive.name} {case.name}"
    for name, spec in case.args.items():
        if isinstance(spec, TensorSpec):
            try:
                fill(spec.fill or "normal"), fill(case.cotangent or "normal")
            except UnknownName as error:
                return f"{name} cannot be made here: {error}"
            _allowed(math.prod(spec.shape) * 8, f"{where}: {name}")
            _allowed(_extent(spec) * 8, f"{where}: {name}")
    try:
        with _Sizes(where), torch.no_grad():
            args = arguments(case, primitive, torch.float32, 0, torch.device("meta"))
            primitive.check(*args.values)
            wide = double(args.values)
            body = primitive.body(*wide)
            primitive.limits.bound(wide, body if isinstance(body, tuple) else (body,))
    except CapsuleError:
        raise
    except Exception as error:  # noqa: BLE001 - strange arguments may break a definition anywhere: that is the finding
        return f"the definition refuses it: {type(error).__name__}: {str(error)[:200]}"
    return None


def _comparable(case: Case) -> Case:
    """A NaN is unequal to itself; its name is not."""
    return replace(case, args={n: "NaN" if isinstance(v, float) and v != v else v for n, v in case.args.items()})


def _allowed(size: int, what: str) -> None:
    if size > MOST_BYTES:
        raise CapsuleError(f"{what} asks for {size} bytes; required: at most {MOST_BYTES}")


def _extent(spec: TensorSpec) -> int:
    """Elements that a layout spans."""
    if not spec.layout.startswith("strided:"):
        return math.prod(spec.shape[:-1]) * (spec.shape[-1] + 7) * 2 if spec.shape else 1
    strides, _, offset = spec.layout.removeprefix("strided:").partition("+")
    steps = [int(s) for s in strides.split(",") if s]
    if len(steps) != len(spec.shape):
        raise CapsuleError(f"layout {spec.layout} of a shape with {len(spec.shape)} dimensions")
    return int(offset or 0) + 1 + sum((n - 1) * s for n, s in zip(spec.shape, steps, strict=True) if n)


class _Sizes(TorchDispatchMode):
    """Refuses an operation whose result would be too large; views take nothing."""

    def __init__(self, where: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._where = where

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if not func.is_view:
            for leaf in tree_leaves(out):
                if isinstance(leaf, Tensor):
                    _allowed(leaf.numel() * leaf.element_size(), f"{self._where}: {func}")
        return out


def hashes(args: Arguments) -> dict[str, str]:
    """The hash of every tensor argument, over its elements in order, its strides and its place within 16 bytes."""
    return {name: digest(buffer.tensor, _layout(buffer.tensor)) for name, buffer in args.buffers.items()}


def _layout(tensor: Tensor) -> str:
    steps = [s if n > 1 else 0 for n, s in zip(tensor.shape, tensor.stride(), strict=True)]
    return f"{steps}+{tensor.storage_offset() * tensor.element_size() % _ALIGNMENT}"


def derived(primitive: Primitive, args: Arguments) -> dict[str, Tensor]:
    """What a backward gets from its forward's float64 evaluation: no counter makes it."""
    forward = forward_of(primitive)
    if forward is None:
        return {}
    from_counters = set(forward.names) | set(output_gradients(primitive, forward))
    return {name: b.tensor.detach() for name, b in args.buffers.items() if name not in from_counters}


def small(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.element_size() <= STORED_BYTES


def turning(
    primitive: Primitive, case: Case, dtype: torch.dtype, seed: int, names: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Of large derived tensors, the places where another machine may round another way.

    float64 sums of 2,000 terms differ by about 2^-48 between libraries, and rounding to float32 turns once in 2^-24: of
    attention's 8 million outputs, one in a few evaluations. NOISE covers that 2^8 times over, and picks 2^-15 of all.
    """
    forward = forward_of(primitive)
    if forward is None or not names:
        return {}
    device = next(iter(names.values())).device
    with torch.no_grad():
        exact = as_tuple(forward.body(*double(arguments(case, forward, dtype, seed, device).values)))
    places = {}
    for output, value in zip(forward.outputs, exact, strict=True):
        name = next((n for n in (output, f"out_{output}") if n in names), None)
        if name is not None and value.numel():
            finite = value.nan_to_num(0.0, 0.0, 0.0).abs()
            noise = NOISE * finite + CANCELLED * finite.amax()
            turned = (value + noise).to(names[name].dtype) != (value - noise).to(names[name].dtype)
            at = (turned & value.isfinite() & (value != 0)).reshape(-1).nonzero().reshape(-1)
            if 0 < len(at) <= MOST_PATCHED:
                places[name] = at.cpu()
    return places


@dataclass(frozen=True)
class Rebuild:
    """Makes a capsule's inputs on a device, as `ferryman.porting.judging.parity.prepare` wants them."""

    primitive: Primitive
    case: Case
    dtype: torch.dtype
    seed: int
    record: InputRecord
    tensors: Mapping[str, Tensor]

    def __call__(self, device: torch.device) -> Arguments:
        """Raises OtherBits if the result is not what was recorded, bit for bit."""
        args = arguments(self.case, self.primitive, self.dtype, self.seed, device)
        buffers = dict(args.buffers)
        for name, reference in self.record.stored.items():
            buffer, stored = buffers.get(name), self.tensors[reference]
            if buffer is None or (buffer.tensor.shape, buffer.tensor.dtype) != (stored.shape, stored.dtype):
                raise OtherBits(f"{name} is stored in another shape or dtype than it has here")
            buffer.tensor.copy_(stored)
            buffers[name] = replace(buffer, pristine=buffer.bytes.clone())
        for name, patch in self.record.patched.items():
            buffer, at, values = buffers.get(name), self.tensors[patch.at], self.tensors[patch.values]
            outside = len(at) > 0 and not (int(at.min()) >= 0 and buffer and int(at.max()) < buffer.tensor.numel())
            if buffer is None or buffer.tensor.dtype != values.dtype or outside:
                raise OtherBits(f"{name} is patched in another shape or dtype than it has here")
            place = torch.unravel_index(at.to(device), buffer.tensor.shape)
            buffer.tensor[place] = values.to(device)
            buffers[name] = replace(buffer, pristine=buffer.bytes.clone())
        args = Arguments(args.values, buffers)
        digests = hashes(args)
        for name in sorted(set(digests) | set(self.record.hashes)):
            if digests.get(name) != self.record.hashes.get(name):
                raise OtherBits(
                    f"inputs differ: {name} has hash {digests.get(name, 'none')[:12]} here, "
                    f"recorded {self.record.hashes.get(name, 'none')[:12]}"
                )
        return args
