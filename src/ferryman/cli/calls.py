"""Calls without data: the arguments of an op on the meta device, from one shape or from one of the op's own cases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.device_profiles import dtype_key
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, UnknownName
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench.grid import on_meta
from ferryman.porting.inputs import sizes
from ferryman.porting.inputs.cases import forward_of

DTYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
_NUMBERS: Mapping[str, Callable[[str], Any]] = {"int": int, "float": float, "str": str}
LAYOUTS = ("contiguous", "rows", "last", "heads")
Shape = tuple[int, ...]


def dtype_of(name: str) -> torch.dtype:
    """A storage dtype by any of its names: bf16, bfloat16, torch.bfloat16."""
    key = dtype_key(name)
    if key not in DTYPES:
        raise UnknownName("dtype for an op's tensors", name, DTYPES)
    return DTYPES[key]


def shape_of(argument: str, text: str) -> Shape:
    """A shape from "8,4096" or "8x4096". Raises ArgumentError."""
    return sizes.shape_of("shape", argument, text, "8,4096")


def empty(shape: Shape, dtype: torch.dtype, layout: str = "contiguous") -> Tensor:
    """A tensor without data, lying in memory as `TensorSpec` describes."""
    if layout == "rows" and shape:
        return torch.empty((*shape[:-1], shape[-1] + 8), dtype=dtype, device="meta")[..., : shape[-1]]
    if layout == "last" and shape:
        return torch.empty((*shape, 2), dtype=dtype, device="meta")[..., 0]
    if layout == "heads" and len(shape) == 4:
        batch, heads, seq, width = shape
        return torch.empty((batch, seq, heads, width), dtype=dtype, device="meta").transpose(1, 2)
    return torch.empty(shape, dtype=dtype, device="meta")


def from_shape(op: Primitive, shape: Shape, dtype: torch.dtype, layout: str, given: Mapping[str, str]) -> list[Any]:
    """Arguments in schema order from the shape of the first tensor, and ``given`` values as text.

    Other tensors follow as the op's evidence says (a norm's weight is (N,)), in the dtype that the op names for them. A
    backward's are those of its forward.
    """
    if not shape:
        raise ArgumentError(op.name, "--shape", "()", "at least one dimension")
    forward = forward_of(op)
    if forward is not None:
        _known(op, given, [*forward.names, *op.names])
        values = from_shape(forward, shape, dtype, layout, {k: v for k, v in given.items() if k in forward.names})
        return _backward(op, forward, values, {k: v for k, v in given.items() if k not in forward.names})
    _known(op, given, op.names)
    values = []
    for index, parameter in enumerate(op.parameters):
        name, kind = parameter.name, op.types[parameter.name]
        text = given.get(name)
        if not kind.startswith("Tensor"):
            values.append(parameter.default if text is None else _scalar(op, name, kind, text))
            continue
        if text is not None and text.lower() == "none":
            values.append(None)
            continue
        its = shape_of(f"--arg {name}", text) if text is not None else shape if index == 0 else None
        if its is None:
            its = _like(op, name, shape)
        own = op.dtypes[name][0] if name in op.dtypes else dtype
        if its is not None:
            sizes.must_fit(op.name, f"the shape of {name}, which follows from --shape,", tuple(its))
        tensor = None if its is None else empty(its, own, layout if its == shape else "contiguous")
        values.append([tensor] if kind == "Tensor[]" else tensor)
    values = _defaults(op, values)
    _results(op, values)
    return values


def _like(op: Primitive, name: str, shape: Shape) -> Shape | None:
    """The shape of another tensor. Raises ArgumentError where the first one's has not the dimensions that it needs."""
    try:
        return registry.evidence(op).like(name, shape)
    except (ValueError, IndexError) as error:
        required = f"a shape from which that of {name} follows ({error}); --arg {name}=SHAPE gives it one of its own"
        raise ArgumentError(op.name, "--shape", shape, required) from error


def of_case(op: Primitive, case: Case, dtype: torch.dtype) -> list[Any]:
    """The arguments of one of the op's cases (for a backward, one of its forward's)."""
    forward = forward_of(op)
    if forward is not None:
        return _backward(op, forward, of_case(forward, case, dtype), {})
    return _defaults(op, list(on_meta(op, case, dtype)))


def first_case(op: Primitive, tier: str = "standard") -> Case | None:
    """The op's first case of a tier: what the support tables ask about. None: its evidence has none."""
    return next((c for c in registry.evidence(op).cases() if c.tier == tier), None)


def _backward(op: Primitive, forward: Primitive, values: Sequence[Any], given: Mapping[str, str]) -> list[Any]:
    """A backward's arguments from its forward's: gradients like the outputs, what was saved, everything needed."""
    known = dict(zip(forward.names, values, strict=True))
    tensors = _results(forward, values)
    outputs = dict(zip(forward.outputs, tensors if isinstance(tensors, tuple) else (tensors,), strict=True))
    gradients = {"grad": 0, **forward.gradient_names()}
    arguments: list[Any] = []
    for name in op.names:
        if name in given and not op.types[name].startswith("Tensor"):
            arguments.append(_scalar(op, name, op.types[name], given[name]))
        elif name in gradients:
            arguments.append(torch.empty_like(list(outputs.values())[gradients[name]]))
        elif name in known:
            arguments.append(known[name])
        elif name.removeprefix("out_") in outputs:
            arguments.append(outputs[name.removeprefix("out_")])
        else:
            arguments.append(True)  # need_...
    return arguments


def _results(op: Primitive, values: Sequence[Any]) -> Any:
    """An op's results without data. Raises ArgumentError where the arguments do not fit, or a result has no size."""
    op.check(*values)
    try:
        return op.meta(*values)
    except RuntimeError as error:
        if "overflow" not in str(error):
            raise
        shapes = [tuple(value.shape) for value in values if isinstance(value, Tensor)]
        required = "sizes with results that PyTorch can count"
        raise ArgumentError(op.name, "--shape, with what follows from it,", shapes, required) from error


def _known(op: Primitive, given: Mapping[str, str], names: Sequence[str]) -> None:
    for name in given:
        if name not in names:
            raise UnknownName(f"argument of {op.name}", name, names)


def _defaults(op: Primitive, values: list[Any]) -> list[Any]:
    """The public function's defaults where the schema has none (they may be keywords there). What a caller has to say,
    as routing's k, is as in the op's first case."""
    from ferryman import ops

    face = getattr(ops, op.name, None)
    if face is None:
        return values
    import inspect

    unsaid = inspect.Parameter.empty
    defaults = {p.name: p.default for p in inspect.signature(face).parameters.values()}
    if any(value is unsaid for value in values):
        usual = registry.evidence(op).cases()[0].args
        defaults = {name: usual.get(name) if value is unsaid else value for name, value in defaults.items()}
    return [defaults.get(name) if value is unsaid else value for name, value in zip(op.names, values, strict=True)]


def _scalar(op: Primitive, name: str, kind: str, text: str) -> Any:
    if kind.endswith("?") and text.lower() == "none":
        return None
    kind = kind.removesuffix("?")
    if kind == "bool":
        if text.lower() not in ("true", "false"):
            raise ArgumentError(op.name, name, repr(text), "true or false")
        return text.lower() == "true"
    if kind == "ScalarType":
        named = getattr(torch, text.removeprefix("torch."), None)
        return named if isinstance(named, torch.dtype) else dtype_of(text)
    try:
        if kind.endswith("[]"):
            return [_NUMBERS[kind.removesuffix("[]")](part) for part in text.split(",")]
        return _NUMBERS[kind](text)
    except ValueError:
        raise ArgumentError(op.name, name, repr(text), f"of type {kind}") from None
