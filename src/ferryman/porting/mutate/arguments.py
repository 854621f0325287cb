"""Rules over what a kernel reads: its inputs, changed or read wrongly, and its arguments, ignored, off or swapped."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.primitive import Primitive
from ferryman.porting.mutate.rule import Kernel, Named, Sometimes, given, rule


@given("cast early")
def input_in_bfloat16(a: Tensor) -> Tensor:
    """An input through bfloat16."""
    return a.to(torch.bfloat16).to(a.dtype)


@given("8 bits undeclared")
def input_in_e4m3(a: Tensor) -> Tensor:
    """An input through e4m3."""
    return a.float().clamp(-448, 448).to(torch.float8_e4m3fn).to(a.dtype)


@given("strides ignored")
def read_as_if_contiguous(a: Tensor) -> Tensor:
    """An input's strides are taken for contiguous ones."""
    if a.is_contiguous() or a.storage_offset() + a.numel() > a.untyped_storage().nbytes() // a.element_size():
        return a
    return a.as_strided(a.shape, torch.empty(a.shape, device="meta").stride())


@given("strides ignored")
def offset_ignored(a: Tensor) -> Tensor:
    """An input is read from the memory's beginning: its offset is forgotten."""
    return a.as_strided(a.shape, a.stride(), 0)


@given("elements")
def negated(a: Tensor) -> Tensor:
    """An input's sign is lost."""
    return -a


@given("elements")
def reversed_rows(a: Tensor) -> Tensor:
    """An input is read from its end."""
    return a.flip(-1) if a.dim() else a


def _other(value: Any) -> Any:
    """0, an empty text or list, another dtype."""
    if not isinstance(value, torch.dtype):
        return type(value)()
    usual = (torch.float32, torch.bfloat16) if value.is_floating_point else (torch.int64, torch.int32)
    return next(dtype for dtype in usual if dtype != value)


@rule("argument ignored")
def argument_left_out(op: Primitive, right: Kernel) -> Named:
    """An optional argument is taken for absent, a number for its default or 0, a switch or a dtype for another."""
    for i, (name, parameter) in enumerate(zip(op.names, op.parameters, strict=True)):
        kind = op.types[name]
        if kind.startswith("Tensor") and not kind.endswith("?"):
            continue
        default = parameter.default

        def kernel(*args: Any, i: int = i, kind: str = kind, default: Any = default) -> Any:
            value: Any = None
            if kind == "bool":
                value = not args[i]
            elif not kind.endswith("?"):
                value = default if default not in (inspect.Parameter.empty, args[i]) else _other(args[i])
            return right(*args[:i], value, *args[i + 1 :])

        yield name, kernel


@rule("argument wrong")
def argument_off(op: Primitive, right: Kernel) -> Named:
    """A whole number one off, another ten times as large: 1e-5 for 1e-6."""
    for i, name in enumerate(op.names):
        if not op.types[name].startswith(("int", "float")):
            continue
        for more in (1, -1) if op.types[name].startswith("int") else (10,):

            def kernel(*args: Any, i: int = i, more: int = more) -> Any:
                a = args[i]
                value = a if a is None else a * more if isinstance(a, float) else a + more
                return right(*args[:i], value, *args[i + 1 :])

            yield f"{name}_{'less' if more < 0 else 'more'}", kernel


@rule("arguments swapped")
def inputs_swapped(op: Primitive, right: Kernel) -> Named:
    """Two inputs of one shape are taken for each other."""
    over = {place for place, _ in op.overwritten}
    places = [i for i, n in enumerate(op.names) if op.types[n] == "Tensor" and i not in over]
    for i, j in itertools.pairwise(places):

        def swapped(*args: Any, i: int = i, j: int = j) -> Any:
            a, b = args[i], args[j]
            if (a.shape, a.dtype) != (b.shape, b.dtype):
                return None
            mixed = list(args)
            mixed[i], mixed[j] = b, a
            return right(*mixed)

        yield f"{op.names[i]}_{op.names[j]}", Sometimes(right, swapped)
