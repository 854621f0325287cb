"""group_norm through PyTorch, in float32: its kernels for CUDA keep a group's mean and deviation in x's dtype."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.ops.group_norm import layout


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> Tensor:
    if not x.numel():
        return layout.empty_like(x)
    w, b = (None if v is None else v.float() for v in (weight, bias))
    y = torch.group_norm(x.float(), num_groups, w, b, eps, False)
    return y.to(x.dtype).contiguous(memory_format=layout.memory_format(x))


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    need_weight: bool,
    need_bias: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """Written out: PyTorch's own subtracts sums of grad * x from each other, which cancel where the mean is large."""
    samples, channels, places = layout.sizes(x)
    per_group = channels // num_groups
    shape = (samples, num_groups, per_group, places)
    g, rows = grad.float().reshape(shape), x.float().reshape(shape)
    n = rows - rows.mean((2, 3), keepdim=True)
    r = (n.square().mean((2, 3), keepdim=True) + eps).sqrt_().reciprocal_()
    n *= r
    sums, products = g.sum(3, keepdim=True), (g * n).sum(3, keepdim=True)
    by_channel = None if weight is None else weight.float().reshape(num_groups, per_group, 1)
    count = per_group * places
    shares = [
        (part if by_channel is None else part * by_channel).sum(2, keepdim=True) / count for part in (sums, products)
    ]
    absent = x.new_empty(0)
    grad_weight = products.sum(0).reshape(channels).to(x.dtype) if weight is not None and need_weight else absent
    grad_bias = sums.sum(0).reshape(channels).to(x.dtype) if bias is not None and need_bias else absent
    inner = g if by_channel is None else g * by_channel
    grad_x = (inner - shares[0]).sub_(n.mul_(shares[1])).mul_(r).reshape(x.shape).to(x.dtype)
    return grad_x.contiguous(memory_format=layout.memory_format(x)), grad_weight, grad_bias
