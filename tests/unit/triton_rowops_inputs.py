"""Tensors that calls of Triton's row kernels are made of: shapes, fills and layouts. The calls of a family's ops stand
in `tests/ops/FAMILY/rowops.py`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def fill(shape: tuple[int, ...], kind: str, generator: torch.Generator) -> Tensor:
    x = torch.randn(shape, generator=generator)
    if kind == "offset":
        return x + 1000.0
    if kind == "large":
        return x * 100.0
    if kind == "tiny":
        return x * 1e-6
    if kind == "constant":
        return torch.full(shape, 0.75)
    if kind == "zeros":
        return torch.zeros(shape)
    if kind == "masked":
        x = torch.where(torch.rand(shape, generator=generator) < 0.5, x, -torch.inf)
        x.view(-1, shape[-1])[0] = -torch.inf
        return x
    if kind == "nonfinite":
        flat = x.view(-1)
        for i, value in enumerate((torch.nan, torch.inf, -torch.inf)):
            flat[(i + 1) * flat.numel() // 4] = value
    return x


def lay(x: Tensor, layout: str) -> Tensor:
    if layout == "rows":
        return torch.cat([x, torch.zeros_like(x)], -1)[..., : x.shape[-1]]
    if layout == "last":
        return torch.stack([x, torch.zeros_like(x)], -1)[..., 0]
    if layout == "offset":
        return torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    if layout == "transposed":
        return x.transpose(0, 1).contiguous().transpose(0, 1)
    if layout == "expanded":
        return x[:1].expand(x.shape)
    return x


class Inputs:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype
        # how rows lie in memory does not interact with their dtype: one dtype goes through all of it
        self.layouts = LAYOUTS if dtype == torch.float16 else ["offset"]
        self.generator = torch.Generator().manual_seed(20)

    def __call__(self, *shape: int, kind: str = "normal", layout: str = "", dtype: torch.dtype | None = None) -> Tensor:
        return lay(fill(shape, kind, self.generator).to(dtype or self.dtype), layout)

    def labels(self, *shape: int, classes: int) -> Tensor:
        return torch.randint(0, classes, shape, generator=self.generator)


SHAPES = [(1, 64), (7, 257), (3, 1), (2, 3, 130), (0, 64), (5, 0), (96,), (2, 4099), (50, 33)]
LONG = (2, 9001)  # rows too long for registers in every dtype
LAYOUTS = ["rows", "last", "offset", "transposed", "expanded"]
FILLS = ["offset", "large", "tiny", "constant", "nonfinite", "zeros"]
Calls = Iterator[tuple[str, str, tuple[Any, ...]]]
