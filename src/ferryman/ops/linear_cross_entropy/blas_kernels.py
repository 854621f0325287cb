"""A projection's cross entropy with the products of the vendor's BLAS, and Triton's two passes over a block of logits.

Limit: four products, 34 TFLOP of 8192 x 4096 x 128256. It has no time on a GPU, so `triton.tiled` goes before it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, recorded
from ferryman.ops.linear_cross_entropy import block_kernels as blocks
from ferryman.ops.linear_cross_entropy.triton_kernels import measured, sloped
from ferryman.ops.matmul import torch_kernels as products

_PARTS = blocks.Parts(products.linear, products.linear_backward, measured, sloped, 0)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    target: Target,
) -> tuple[Tensor, Tensor]:
    return blocks.forward(_PARTS, x, weight, labels, bias, ignore_index, label_smoothing, z_loss, target)


def linear_cross_entropy_backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    labels: Tensor,
    bias: Tensor | None,
    lse: Tensor,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    need_x: bool,
    need_weight: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    return blocks.backward(
        _PARTS, grad, x, weight, labels, bias, lse, ignore_index, label_smoothing, z_loss, need_x, need_weight, target
    )


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """The two passes, of blocks of models' vocabularies and of short ones."""
    kind = getattr(torch, dtype)

    def passes(rows: int, width: int) -> None:
        z = torch.empty(rows, width, dtype=kind, device="meta")
        goal = torch.empty(rows, dtype=torch.int64, device="meta")
        lse, total = (torch.empty(n, dtype=torch.float32, device="meta") for n in (rows, rows))
        for sums in (total, total[:0]):
            measured(z, goal, 0, lse, sums, target)
        sloped(z, goal, lse, 0, width, -100, 0.0, 1e-4, 1.0, target)

    return recorded(lambda s=s: passes(*s) for s in ((8192, 2816), (1021, 5376), (7, 131), (3, 5)))  # type: ignore[misc]
