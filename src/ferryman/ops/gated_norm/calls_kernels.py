"""Calls of the gated norm as models make them, on meta tensors, with the Triton line that each is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ferryman.backends.base import Target
from ferryman.backends.triton_rows import row_tile
from ferryman.ops.gated_norm.implementations import MOST_COLUMNS

# Heads of Qwen3-Next, Mamba2's rows whole and in groups, odd and long ones; both places of the gate: rows, columns, of
# a group, norm first, cast before the weight, x in float32, activation
_SHAPES: tuple[tuple[Any, ...], ...] = (
    (2**17, 128, None, True, True, False, "silu"),
    (2**17, 128, None, True, False, False, "sigmoid"),
    (4096, 5120, None, False, True, False, "silu"),
    (4096, 8192, 1024, False, True, False, "silu"),
    (4096, 3072, None, False, False, True, "silu"),
    (8192, 257, None, True, False, False, "silu"),
    (64, 8192, None, False, True, False, "silu"),
    (64, 65_536, None, False, True, False, "silu"),
    (64, 65_536, None, True, False, False, "silu"),
    (1, 4096, None, False, True, False, "silu"),
    (3, 1, None, True, True, False, "silu"),
)


def model_calls(target: Target, dtype: str) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """("rows" or "long", op, its arguments)."""
    kind = getattr(torch, dtype)
    for rows, width, size, first, cast, wide, activation in _SHAPES:
        x = torch.empty(rows, width, dtype=torch.float32 if wide else kind, device="meta")
        gate = torch.empty(rows, width, dtype=kind, device="meta")
        w = torch.empty(width, dtype=kind, device="meta")
        itemsize, group = max(x.element_size(), gate.element_size()), size or width
        fits = row_tile(target, group, itemsize, rows, arrays=2).fits
        yield "rows" if fits else "long", "gated_rms_norm", (x, gate, w, 1e-6, size, first, cast, activation)
        tile = row_tile(target, group, itemsize, rows, arrays=4)
        fits = tile.fits and tile.block <= MOST_COLUMNS
        yield "rows" if fits else "long", "gated_rms_norm_backward", (x, x, gate, w, 1e-6, size, first, activation)
