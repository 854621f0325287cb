"""`torch.softmax` over the last dimension, in the dtype of its input, or cast back to that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.recognition import Served
from ferryman.ops.softmax.definition import softmax as op_softmax

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


def functional_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    if (
        (dtype is None or dtype is input.dtype)
        and dim is not None
        and (dim == (n := input.dim()) - 1 or dim == -1)
        and n > 0
        and input.dtype in _DTYPES
    ):
        return op_softmax(input)
    return functional.softmax(input, dim, _stacklevel + 1, dtype)


def torch_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if (
        (dtype is None or dtype is input.dtype)
        and (dim == (n := input.dim()) - 1 or dim == -1)
        and n > 0
        and input.dtype in _DTYPES
    ):
        return op_softmax(input)
    return torch.softmax(input, dim, dtype=dtype)


def functional_narrowed(
    to: torch.dtype, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """Of an input in ``to``, computed in float32: the op accumulates so, and rounds once."""
    if (
        to is input.dtype
        and (dtype is torch.float32 or dtype is None)
        and dim is not None
        and (dim == (n := input.dim()) - 1 or dim == -1)
        and n > 0
        and to in _DTYPES
    ):
        return op_softmax(input)
    return functional_softmax(input, dim, _stacklevel + 1, dtype).to(to)


def torch_narrowed(to: torch.dtype, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return functional_narrowed(to, input, dim, 4, dtype)


def functions() -> Mapping[Any, Served]:
    return {
        functional.softmax: Served("softmax", functional_softmax, functional_narrowed),
        torch.softmax: Served("softmax", torch_softmax, torch_narrowed),
    }
