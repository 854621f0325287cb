"""`torch.softmax` over the last dimension, in the dtype of its input, or cast back to that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.recognition import Served
from ferryman.ops.softmax.definition import softmax as op_softmax


def _last(x: Tensor, dim: int | None, dtype: torch.dtype | None) -> bool:
    own = x.dtype
    last = dim is not None and x.dim() > 0 and (dim == -1 or dim == x.dim() - 1)
    return last and (dtype is None or dtype is own) and own.is_floating_point and own.itemsize < 8


def functional_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    if _last(input, dim, dtype):
        return op_softmax(input)
    return functional.softmax(input, dim, _stacklevel + 1, dtype)


def torch_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if _last(input, dim, dtype):
        return op_softmax(input)
    return torch.softmax(input, dim, dtype=dtype)


def functional_narrowed(
    to: torch.dtype, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """Of an input in ``to``, computed in float32: the op accumulates so, and rounds once."""
    if to is input.dtype and (dtype is torch.float32 or dtype is None) and _last(input, dim, None):
        return op_softmax(input)
    return functional_softmax(input, dim, _stacklevel + 1, dtype).to(to)


def torch_narrowed(to: torch.dtype, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return functional_narrowed(to, input, dim, 4, dtype)


def functions() -> Mapping[Any, Served]:
    return {
        functional.softmax: Served("softmax", functional_softmax, functional_narrowed),
        torch.softmax: Served("softmax", torch_softmax, torch_narrowed),
    }
