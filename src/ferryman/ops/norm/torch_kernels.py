"""Norms through PyTorch's own kernels; what PyTorch fuses is used fused."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.backends.base import Target

# Elements that CUDA's kernel reads at once; it sums other rows by Welford's update: NaN of an Inf. Composing those is
# no line of its own: its clauses would have to ask for addresses, too. `x.aligned` asks for 16 bytes, where elements of
# two bytes need 8, and the key of every call of a norm, which reads no address, would read those of x and weight.
_PACK = 4


def _packed(x: Tensor | None) -> bool:
    return x is None or x.data_ptr() % (_PACK * x.element_size()) == 0


def _rms(x: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool) -> Tensor:
    """F.rms_norm fuses the weight when its dtype is x's (1.00 units in the last place, against 1.90 composed)."""
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if x.is_cuda and (x.shape[-1] % _PACK or not all(map(_packed, (x, weight)))):
        h = x.float()
        h = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
        if cast_before_weight:
            h = h.to(x.dtype).float()
        return (h if weight is None else h * weight.float()).to(x.dtype).contiguous()
    if weight is None:
        return functional.rms_norm(x, x.shape[-1:], None, eps).contiguous()
    if cast_before_weight:
        return (functional.rms_norm(x, x.shape[-1:], None, eps).float() * weight.float()).to(x.dtype).contiguous()
    if weight.dtype == x.dtype:
        return functional.rms_norm(x, x.shape[-1:], weight, eps).contiguous()
    return functional.rms_norm(x.float(), x.shape[-1:], weight.float(), eps).to(x.dtype).contiguous()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target) -> Tensor:
    return _rms(x, weight, eps, cast_before_weight)


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    s = (x + residual).contiguous()
    return _rms(s, weight, eps, cast_before_weight), s


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target) -> Tensor:
    if x.numel() == 0:
        return torch.empty_like(x, memory_format=torch.contiguous_format)
    if all(p is None or p.dtype == x.dtype for p in (weight, bias)):
        return functional.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()
    wide = (None if weight is None else weight.float(), None if bias is None else bias.float())
    return functional.layer_norm(x.float(), x.shape[-1:], *wide, eps).to(x.dtype).contiguous()


def layer_norm_with_gradient(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> Tensor:
    """`layer_norm` of some elements: past what asks about each argument in Python, where all have one dtype."""
    if (weight is None or weight.dtype is x.dtype) and (bias is None or bias.dtype is x.dtype):
        return torch.layer_norm(x, x.shape[-1:], weight, bias, eps).contiguous()
    return layer_norm(x, weight, bias, eps, target)


def _rms_gradient(g: Tensor, x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """PyTorch exposes no fused RMS backward below autograd, so it is composed, in float32."""
    h = x.float()
    r = torch.rsqrt(torch.linalg.vector_norm(h, dim=-1, keepdim=True).square() / max(x.shape[-1], 1) + eps)
    n = h * r
    gw = g if weight is None else g * weight.float()
    grad_x = torch.addcmul(gw, n, (gw * n).sum(-1, keepdim=True) / max(x.shape[-1], 1), value=-1) * r
    if weight is None:
        return grad_x, x.new_empty(0)
    return grad_x, torch.einsum("rn,rn->n", g.flatten(0, -2), n.flatten(0, -2)).to(weight.dtype)


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    g, h = torch.atleast_2d(grad.float()), torch.atleast_2d(x)
    grad_x, grad_weight = _rms_gradient(g, h, weight, eps)
    return grad_x.reshape(x.shape).to(x.dtype).contiguous(), grad_weight


def add_rms_norm_backward(
    grad_y: Tensor, grad_residual: Tensor, out_residual: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    g, h = torch.atleast_2d(grad_y.float()), torch.atleast_2d(out_residual)
    grad_s, grad_weight = _rms_gradient(g, h, weight, eps)
    return (grad_s.reshape(grad_y.shape) + grad_residual.float()).to(out_residual.dtype).contiguous(), grad_weight


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    if x.numel() == 0:
        empty = [x.new_empty(0) if p is None else torch.zeros_like(p) for p in (weight, bias)]
        return torch.empty_like(x, memory_format=torch.contiguous_format), empty[0], empty[1]
    # PyTorch's CPU kernel sums 16-bit weight gradients in 16 bits (rows of 384: 50 bounds off); CUDA's does not.
    same = x.is_cuda and all(p is None or p.dtype == x.dtype for p in (weight, bias))
    g, h = (grad, x) if same else (grad.float(), x.float())
    w, b = (weight, bias) if same else (None if p is None else p.float() for p in (weight, bias))
    shape = list(x.shape[-1:])
    mask = [True, weight is not None, bias is not None]
    # The statistics are recomputed: forward saves its inputs only, so that any backward pairs with any forward.
    _, mean, rstd = torch.native_layer_norm(h, shape, w, b, eps)
    gx, gw, gb = torch.ops.aten.native_layer_norm_backward(
        g.contiguous(), h.contiguous(), shape, mean, rstd, w, b, mask
    )
    return (
        gx.to(x.dtype),
        x.new_empty(0) if weight is None else gw.to(weight.dtype),
        x.new_empty(0) if bias is None else gb.to(bias.dtype),
    )


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    s = (x + residual).contiguous()
    return layer_norm(s, weight, bias, eps, target), s


def add_layer_norm_backward(
    grad_y: Tensor,
    grad_residual: Tensor | None,
    out_residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    """In float32, so that the gradient of the sum is added before its one rounding."""
    if grad_residual is None or out_residual.numel() == 0:
        return layer_norm_backward(grad_y, out_residual, weight, bias, eps, target)
    wide = out_residual.float()
    grad, grad_weight, grad_bias = layer_norm_backward(grad_y.float(), wide, weight, bias, eps, target)
    absent = out_residual.new_empty(0)
    return (
        (grad + grad_residual.float()).to(out_residual.dtype),
        absent if weight is None else grad_weight,
        absent if bias is None else grad_bias,
    )
