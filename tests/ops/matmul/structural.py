"""Kernels with one structural error each, which the exact probe must fail, and right ones of another order, which no
gate may: tests/parity/test_gates.py and test_ops.py run them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.lines import torch_kernel


def linear_without_the_last_k(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    y = x[..., :-1].float() @ weight[:, :-1].float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def linear_with_a_tile_twice(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    y = x.float() @ weight.float().T + x[..., :16].float() @ weight[:, :16].float().T
    return (y if bias is None else y + bias.float()).to(x.dtype)


def linear_in_bfloat16_sums(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    total = torch.zeros(*x.shape[:-1], weight.shape[0], dtype=torch.bfloat16)
    for start in range(0, x.shape[-1], 16):
        part = x[..., start : start + 16].float() @ weight[:, start : start + 16].float().T
        total = (total.float() + part).to(torch.bfloat16)
    return (total.float() if bias is None else total.float() + bias.float()).to(x.dtype)


def weight_gradient_without_the_last_row(grad: Tensor, x: Tensor, *rest: Any) -> Any:
    gx, gw, gb = torch_kernel("linear_backward")(grad, x, *rest)
    flat, rows = grad.reshape(-1, grad.shape[-1]), x.reshape(-1, x.shape[-1])
    return gx, (flat[:-1].float().T @ rows[:-1].float()).to(gw.dtype) if gw.numel() else gw, gb


def honest_linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    """One product after another, the sequential order of a single accumulator."""
    total = torch.zeros(*x.shape[:-1], weight.shape[0])
    for k in range(x.shape[-1]):
        total = total + x[..., k, None].float() * weight[:, k].float()
    return (total if bias is None else total + bias.float()).to(x.dtype)


ERRORS = {
    "linear": (
        linear_without_the_last_k,
        linear_with_a_tile_twice,
        linear_in_bfloat16_sums,
    ),
    "linear_backward": (weight_gradient_without_the_last_row,),
}
RIGHT = {"linear": (honest_linear,)}
TERMS = {"linear": ("ragged", 71)}  # a case, and how many numbers its largest sum has
