"""Calls of the norms as models make them, on meta tensors, with the Triton line that each is for."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ferryman.backends.base import Target
from ferryman.backends.triton_rows import row_tile
from ferryman.ops.norm.implementations import most_columns

# head_dim, hidden sizes on and off the powers of two, and rows beyond registers
_SHAPES = (
    (2**17, 128),
    (8192, 257),
    (4096, 1024),
    (8192, 4096),
    (4096, 5120),
    (8192, 8192),
    (1024, 16384),
    (1, 4096),
    (512, 32768),
    (64, 131072),
    (3, 1),  # a width of 1 is compiled in
)


def model_calls(target: Target, dtype: str) -> Iterator[tuple[str, str, tuple[Any, ...]]]:
    """("rows", "columns" or "long", op, its arguments)."""
    kind = getattr(torch, dtype)
    for rows, width in _SHAPES:
        x = torch.empty(rows, width, dtype=kind, device="meta")
        w = torch.empty(width, dtype=kind, device="meta")

        def forward(arrays: int, op: str, *args: Any, x: torch.Tensor = x) -> tuple[str, str, tuple[Any, ...]]:
            fits = row_tile(target, x.shape[-1], x.element_size(), x.shape[0], arrays=arrays).fits
            return "rows" if fits else "long", op, args

        def backward(sums: int, op: str, *args: Any, x: torch.Tensor = x) -> tuple[str, str, tuple[Any, ...]]:
            line, _, _ = forward(2, op)
            if line == "rows" and sums and x.shape[-1] > most_columns(op, x.element_size()):
                line = "columns"
            return line, op, args

        for cast in (False, True):
            yield forward(1, "rms_norm", x, w, 1e-6, cast)
            yield forward(2, "add_rms_norm", x, x, w, 1e-6, cast)
        yield forward(1, "rms_norm", x, None, 1e-6, False)
        for weight, bias in ((w, w), (w, None), (None, None)):
            yield forward(1, "layer_norm", x, weight, bias, 1e-5)
            yield forward(2, "add_layer_norm", x, x, weight, bias, 1e-5)
        yield backward(1, "rms_norm_backward", x, x, w, 1e-6)
        yield backward(1, "add_rms_norm_backward", x, x, x, w, 1e-6)
        yield backward(2, "layer_norm_backward", x, x, w, w, 1e-5)
        yield backward(2, "add_layer_norm_backward", x, x, x, w, w, 1e-5)
