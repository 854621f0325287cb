"""Which forms of FlexAttention were compiled in this process. A menu asks; no toolchain is imported for that."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Variant:
    """What one compiled function is made for: anything else of a call is read from tensors. Lengths are any, but
    PyTorch specialises sizes of 0 and 1, and FlexAttention has another kernel for fewer than 128 queries."""

    device: torch.device
    dtype: torch.dtype
    heads: tuple[int, int]
    widths: tuple[int, int]
    layouts: tuple[str, str, str]  # of q, k and v
    few: bool
    ones: tuple[bool, bool, bool]  # batch, queries, keys
    causal: bool
    window: bool
    chunk: bool
    softcap: bool
    mask: str  # "", "bool", or "float"
    mask_dtype: torch.dtype | None
    mask_ones: tuple[bool, ...]  # of its four dimensions
    by_range: bool

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.heads[0]}/{self.heads[1]} heads, widths {self.widths[0]} and {self.widths[1]}, {dtype}"


_compiled: dict[Variant, Callable[..., bool]] = {}


def add(variant: Variant, serves: Callable[..., bool]) -> None:
    """Say that a variant was compiled. ``serves``: of `variant_of`'s arguments, whether it is right for their sizes."""
    _compiled[variant] = serves


def forget() -> None:
    _compiled.clear()


def has(*args: Any) -> bool:
    """Whether a call like this was compiled. args: as `variant_of` takes them."""
    serves = _compiled.get(variant_of(*args)) if _compiled else None
    return serves is not None and serves(*args)


def _layout(x: Tensor) -> str:
    """ "heads": (B, H, S, D) in contiguous storage (B, S, H, D), as models bring it; "": contiguous, or made so."""
    _, heads, rows, width = x.shape
    return "heads" if heads > 1 and rows > 1 and x.stride() == (rows * heads * width, width, heads * width, 1) else ""


def laid_out(x: Tensor) -> Tensor:
    """``x`` in the layout that its variant names, strides of sizes of 1 included; a copy where it is in neither."""
    if _layout(x):
        return x
    _, heads, rows, width = x.shape
    return x.contiguous().as_strided(x.shape, (heads * rows * width, rows * width, width, 1))


def variant_of(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
) -> Variant:
    batch, heads, queries, width = q.shape
    sizes = () if mask is None else (1,) * (4 - mask.dim()) + tuple(mask.shape)
    return Variant(
        q.device,
        q.dtype,
        (heads, k.shape[1]),
        (width, v.shape[3]),
        (_layout(q), _layout(k), _layout(v)),
        queries < 128,
        (batch == 1, queries == 1, k.shape[2] == 1),
        causal and queries > 1,
        window is not None,
        chunk is not None,
        softcap > 0,
        "" if mask is None else "bool" if mask.dtype == torch.bool else "float",
        None if mask is None else mask.dtype,
        tuple(n == 1 for n in sizes),
        key_range is not None,
    )
