"""Argument checks shared by the definitions. Each raises ArgumentError naming op and argument, before any launch."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops.primitive import STORAGE_DTYPES


def floating(op: str, **tensors: Tensor | None) -> None:
    """Every given tensor has a storage dtype. float64 is for the definitions' bodies, which oracles call."""
    for name, x in tensors.items():
        if x is not None and x.dtype not in STORAGE_DTYPES:
            raise ArgumentError(op, f"{name}.dtype", x.dtype, "float32, float16 or bfloat16")


def one_device(op: str, **tensors: Tensor | None) -> None:
    first = None
    for name, x in tensors.items():
        if x is None:
            continue
        if not isinstance(x, Tensor):
            raise ArgumentError(op, name, type(x).__name__, "a torch.Tensor")
        if first is None:
            first = (name, x.device)
        elif x.device != first[1]:
            raise ArgumentError(op, f"{name}.device", x.device, f"{first[1]}, the device of {first[0]}")


def same_dtype(op: str, **tensors: Tensor | None) -> None:
    given = [(n, x) for n, x in tensors.items() if x is not None]
    for name, x in given[1:]:
        if x.dtype != given[0][1].dtype:
            raise ArgumentError(op, f"{name}.dtype", x.dtype, f"{given[0][1].dtype}, the dtype of {given[0][0]}")


def same_shape(op: str, **tensors: Tensor) -> None:
    given = list(tensors.items())
    for name, x in given[1:]:
        if x.shape != given[0][1].shape:
            raise ArgumentError(
                op, f"{name}.shape", tuple(x.shape), f"{tuple(given[0][1].shape)}, the shape of {given[0][0]}"
            )


def at_least_1d(op: str, **tensors: Tensor) -> None:
    for name, x in tensors.items():
        if x.dim() == 0:
            raise ArgumentError(op, f"{name}.dim()", 0, "at least 1")


def shaped(op: str, name: str, x: Tensor | None, *shape: int) -> None:
    if x is not None and tuple(x.shape) != shape:
        raise ArgumentError(op, f"{name}.shape", tuple(x.shape), str(shape))


def writable(op: str, **tensors: Tensor) -> None:
    """Elements that share memory cannot hold a result each. Strides that only might let them are refused too.

    Not while Dynamo traces, whose strides are symbols: what it traces writes by ``copy_``, which refuses these itself.
    """
    if torch.compiler.is_dynamo_compiling():
        return
    for name, x in tensors.items():
        span = 0
        for step, n in sorted(zip(x.stride(), x.shape, strict=True)):
            if n > 1 and step <= span and x.numel():
                required = "elements that share no memory: it is written over"
                raise ArgumentError(op, f"{name}.stride()", tuple(x.stride()), required)
            span += (n - 1) * step


def non_negative(op: str, **values: float) -> None:
    for name, value in values.items():
        if not 0 <= value < math.inf:  # math.isfinite breaks torch.compile's graph when the value is symbolic
            raise ArgumentError(op, name, value, "a finite number >= 0")
