"""The numbers among an op's arguments: which are accepted, and as what a launcher gets them."""

from __future__ import annotations

import numbers
from typing import Any

import torch

from ferryman.errors import ArgumentError, shown
from ferryman.ops.primitive import Primitive

_INT64 = range(-(2**63), 2**63)


def exact(op: Primitive, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """``args`` with every number as Python's own float, int or bool; ``args`` itself where that changes nothing.

    NumPy's numbers are accepted, and an integer for a float. Raises ArgumentError for any other type (a bool is no
    number, a fraction no float) and for what a C int64 or double cannot hold.
    """
    arguments = []
    for name, value in zip(op.names, args, strict=True):
        kind = op.types[name].removesuffix("?")
        if kind.startswith("Tensor") or (value is None and op.types[name] != kind):
            arguments.append(value)
        elif kind.endswith("[]"):
            converted = [_exact(op, name, kind.removesuffix("[]"), one) for one in value]
            same = all(type(new) is type(old) for new, old in zip(converted, value, strict=True))
            arguments.append(value if same else converted)
        else:
            arguments.append(_exact(op, name, kind, value))
    same = all(new is old or type(new) is type(old) is not list for new, old in zip(arguments, args, strict=True))
    return args if same else tuple(arguments)


_OTHERS: dict[str, type] = {"bool": bool, "str": str, "ScalarType": torch.dtype}


def _exact(op: Primitive, name: str, kind: str, value: Any) -> Any:
    if kind == "float" and type(value) is float:  # most are: to ask an abstract class takes longer
        return value
    if kind in _OTHERS:
        if isinstance(value, _OTHERS[kind]):
            return value
    elif isinstance(value, numbers.Integral) and not isinstance(value, bool):
        if int(value) in _INT64:
            return int(value) if kind == "int" else float(value)
        raise ArgumentError(op.name, name, f"an integer of {int(value).bit_length()} bits", "at most 64 bits")
    elif kind == "float" and isinstance(value, numbers.Real) and not isinstance(value, (bool, numbers.Rational)):
        return float(value)
    required = "torch.dtype" if kind == "ScalarType" else kind
    raise ArgumentError(op.name, name, f"{shown(repr(value), 80)} ({type(value).__name__})", required)
