"""Sums that go wrong: accumulators too narrow, terms counted wrongly, differences of large numbers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.porting.selftest.planting import Bugs, through, torch_kernel

BUGS = Bugs()


def running_sum(x: Tensor, dtype: torch.dtype, step: int = 1) -> Tensor:
    """The last dimension summed ``step`` terms at a time into an accumulator of ``dtype``; kept as one column."""
    total = torch.zeros(*x.shape[:-1], 1, device=x.device)
    for chunk in x.split(step, -1):
        total = through(total + chunk.sum(-1, keepdim=True), dtype)
    return total


def _scaled(x: Tensor, weight: Tensor | None, scale: Tensor) -> Tensor:
    h = x.float() * scale
    return (h if weight is None else h * weight.float()).to(x.dtype).contiguous()


# ------------------------------------------------------------------------------------- accumulator of the storage dtype


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, step: int) -> Tensor:
    total = torch.zeros(*x.shape[:-1], weight.shape[0], device=x.device)
    for a, b in zip(x.float().split(step, -1), weight.float().split(step, -1), strict=True):
        total = through(total + a @ b.T, dtype)
    return (total if bias is None else total + bias.float()).to(x.dtype)


@BUGS.kernel("accumulator of the storage dtype", "linear")
def storage_dtype_accumulator(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    """Every product is added into an accumulator of the storage dtype"""
    return _product(x, weight, bias, x.dtype, 1)


@BUGS.kernel("accumulator of the storage dtype", "linear")
def half_accumulator_by_16(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    """16 products at a time into a float16 accumulator, as an fp16 matrix unit with fp16 accumulation does"""
    narrow = torch.bfloat16 if x.dtype == torch.bfloat16 else torch.float16
    return _product(x, weight, bias, narrow, 16)


@BUGS.kernel("accumulator of the storage dtype", "rms_norm")
def squares_added_in_storage_dtype(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """The running sum of squares is kept in the storage dtype"""
    mean = running_sum(x.float().square(), x.dtype, 8) / max(x.shape[-1], 1)
    return _scaled(x, weight, torch.rsqrt(mean + eps))


@BUGS.kernel("accumulator of the storage dtype", "softmax")
def denominator_in_bfloat16(x: Tensor, target: Any) -> Tensor:
    """The denominator is rounded to bfloat16"""
    h = x.float()
    e = torch.exp(h - h.amax(-1, keepdim=True)) if h.numel() else h
    return (e / through(e.sum(-1, keepdim=True), torch.bfloat16)).to(x.dtype).contiguous()


@BUGS.kernel("accumulator of the storage dtype", "softmax_backward")
def inner_product_in_storage_dtype(grad: Tensor, y: Tensor, target: Any) -> Tensor:
    """grad * y is rounded to 16 bits before its sum, as PyTorch's own CUDA kernel does"""
    inner = through(grad.float() * y.float(), torch.bfloat16 if y.dtype == torch.float32 else y.dtype)
    return (y.float() * (grad.float() - inner.sum(-1, keepdim=True))).to(y.dtype).contiguous()


@BUGS.kernel("accumulator of the storage dtype", "layer_norm")
def mean_in_storage_dtype(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    """The mean is rounded to the storage dtype (float32: to tf32's ten bits) before it is subtracted"""
    h = x.float()
    mean = h.mean(-1, keepdim=True)
    narrow = mean.view(torch.int32).bitwise_and(-8192).view(torch.float32) if x.dtype == torch.float32 else None
    d = h - (through(mean, x.dtype) if narrow is None else narrow)
    y = d * torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


@BUGS.kernel("accumulator of the storage dtype", "cross_entropy")
def loss_added_in_bfloat16(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """Every row's loss is added into a bfloat16 accumulator"""
    loss, lse = torch_kernel("cross_entropy")(x, labels, ignore, smoothing, target)
    flat, kept = x.reshape(labels.numel(), x.shape[-1]), labels.reshape(-1)
    losses = functional.cross_entropy(
        flat.float(), kept, ignore_index=ignore, label_smoothing=smoothing, reduction="none"
    )
    total = running_sum(losses.unsqueeze(0), torch.bfloat16).reshape(())
    return (total / (kept != ignore).sum() if losses.numel() else loss), lse


@BUGS.kernel("accumulator of the storage dtype", "linear_backward")
def bias_gradient_in_storage_dtype(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any
) -> Any:  # fmt: skip
    """The bias gradient is summed over rows in the storage dtype"""
    gx, gw, gb = torch_kernel("linear_backward")(grad, x, weight, bias, *rest)
    if bias is not None:
        gb = torch.zeros_like(bias)
        for row in grad.reshape(-1, weight.shape[0]):
            gb = gb + row
    return gx, gw, gb


def _column_sums_in_storage(products: Tensor, like: Tensor) -> Tensor:
    return running_sum(products.flatten(0, -2).T, like.dtype if like.dtype != torch.float32 else torch.bfloat16)[:, 0]


@BUGS.kernel("accumulator of the storage dtype", "rms_norm_backward")
def weight_gradient_in_16_bits(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Any) -> Any:
    """The weight's gradient is summed over rows in 16 bits, as PyTorch's CPU layer_norm does"""
    gx, gw = torch_kernel("rms_norm_backward")(grad, x, weight, eps, target)
    if weight is None or x.numel() == 0:
        return gx, gw
    h = torch.atleast_2d(x.float())
    n = h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps)
    return gx, _column_sums_in_storage(torch.atleast_2d(grad.float()) * n, x).to(weight.dtype)


# --------------------------------------------------------------------------------------------------- undeclared split-k


@BUGS.kernel("split-k, undeclared", "linear")
def partials_in_storage_dtype(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    """K in four parts whose products are rounded to the storage dtype before they are added"""
    step = max(1, -(-x.shape[-1] // 4))
    if x.shape[-1] == 0:
        return torch_kernel("linear")(x, weight, bias, target)
    parts = [
        through(a.float() @ b.float().T, x.dtype if x.dtype != torch.float32 else torch.bfloat16)
        for a, b in zip(x.split(step, -1), weight.split(step, -1), strict=True)
    ]
    total = torch.stack(parts).sum(0)
    return (total if bias is None else total + bias.float()).to(x.dtype)


@BUGS.kernel("split-k, undeclared", "linear_backward")
def weight_gradient_of_two_halves(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_weight: bool, target: Any
) -> Any:
    """The weight's gradient is the storage-dtype sum of two halves of the batch (gradient accumulation)"""
    gx, gw, gb = torch_kernel("linear_backward")(grad, x, weight, bias, need_x, need_weight, target)
    flat, rows = grad.reshape(-1, weight.shape[0]), x.reshape(-1, weight.shape[1]) if x.numel() else None
    if not need_weight or rows is None or len(flat) < 2:
        return gx, gw, gb
    half = len(flat) // 2
    low = torch.bfloat16 if x.dtype == torch.float32 else x.dtype
    first, second = ((flat[s].float().T @ rows[s].float()).to(low) for s in (slice(half), slice(half, None)))
    return gx, (first + second).to(weight.dtype), gb


# ---------------------------------------------------------------------------------------------------- squares overflow


@BUGS.kernel("overflow inside", "rms_norm")
def squares_in_storage_dtype(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """Squares are taken in the storage dtype: beyond 255, float16's are infinite"""
    return _scaled(x, weight, torch.rsqrt(x.square().mean(-1, keepdim=True, dtype=torch.float32) + eps))


@BUGS.kernel("overflow inside", "add_rms_norm")
def sum_of_squares_in_float16(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any
) -> Any:
    """The sum of squares passes through float16, and is infinite from 65520 on"""
    y, s = torch_kernel("add_rms_norm")(x, residual, weight, eps, cast, target)
    total = through(s.float().square().sum(-1, keepdim=True), torch.float16)
    return torch.where(total.isinf() & s.isfinite().all(-1, keepdim=True), torch.zeros_like(y), y), s


@BUGS.kernel("overflow inside", "softmax")
def without_the_maximum(x: Tensor, target: Any) -> Tensor:
    """exp of the logits as they are"""
    e = torch.exp(x.float())
    return (e / e.sum(-1, keepdim=True)).to(x.dtype).contiguous()


@BUGS.kernel("overflow inside", "cross_entropy")
def log_sum_exp_without_the_maximum(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """log(sum(exp(x))): infinite from logits of 88 on"""
    loss, lse = torch_kernel("cross_entropy")(x, labels, ignore, smoothing, target)
    bare = x.float().exp().sum(-1).log()
    counted = labels != ignore
    moved = torch.where(counted, bare - lse, 0.0).sum() / counted.sum() if labels.numel() else 0.0
    return (loss + moved if labels.numel() else loss), bare


@BUGS.kernel("overflow inside", "silu_mul", roundings=("activation",))
def exponential_in_storage_dtype(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    """exp(-g) is taken in the storage dtype: float16's is infinite from 11.1 on, and loses bits everywhere"""
    e = torch.exp(-gate)
    return (gate.float() / (1 + e.float())).to(gate.dtype).mul(up).contiguous()


# ------------------------------------------------------------------------------------------------------ counts of terms


@BUGS.kernel("count of terms", "rms_norm")
def mean_over_one_less(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """The mean square divides by N - 1"""
    n = max(x.shape[-1] - 1, 1)
    return _scaled(x, weight, torch.rsqrt(x.float().square().sum(-1, keepdim=True) / n + eps))


@BUGS.kernel("count of terms", "rms_norm")
def mean_over_the_padded_width(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """The mean square divides by the tile's width, the next power of two"""
    n = 1 << max(x.shape[-1] - 1, 0).bit_length()
    return _scaled(x, weight, torch.rsqrt(x.float().square().sum(-1, keepdim=True) / n + eps))


@BUGS.kernel("count of terms", "layer_norm")
def unbiased_variance(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    """The variance divides by N - 1, as torch.var does by default"""
    h = x.float()
    d = h - h.mean(-1, keepdim=True)
    y = d * torch.rsqrt(d.square().sum(-1, keepdim=True) / max(x.shape[-1] - 1, 1) + eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


@BUGS.kernel("count of terms", "cross_entropy")
def mean_over_all_rows(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """Ignored rows count in the mean"""
    loss, lse = torch_kernel("cross_entropy")(x, labels, ignore, smoothing, target)
    return loss * (labels != ignore).sum() / max(labels.numel(), 1), lse


@BUGS.given("count of terms", "cross_entropy_backward")
def gradient_over_all_rows(a: dict[str, Any]) -> None:
    """Ignored rows count in the gradient's divisor"""
    labels = a["target"]
    a["grad"] = a["grad"] * (labels != a["ignore_index"]).sum() / max(labels.numel(), 1)


@BUGS.kernel("count of terms", "softmax")
def padding_counted(x: Tensor, target: Any) -> Tensor:
    """A tile's padding of zeros, as masked loads without other=-inf give, counts in the denominator"""
    pad = -x.shape[-1] % 64
    return torch.softmax(functional.pad(x.float(), (0, pad)), -1)[..., : x.shape[-1]].to(x.dtype).contiguous()


@BUGS.kernel("count of terms", "layer_norm")
def padding_in_the_variance(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    """A tile's padding adds (0 - mean)^2 to the variance"""
    h, n = x.float(), max(x.shape[-1], 1)
    mean = h.mean(-1, keepdim=True)
    extra = (1 << (n - 1).bit_length()) - n
    variance = ((h - mean).square().sum(-1, keepdim=True) + extra * mean.square()) / n
    y = (h - mean) * torch.rsqrt(variance + eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


# --------------------------------------------------------------------------------------------------------- cancellation


@BUGS.kernel("cancellation", "layer_norm")
def variance_as_a_difference(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    """E[x^2] - E[x]^2"""
    h = x.float()
    m = h.mean(-1, keepdim=True)
    y = (h - m) * torch.rsqrt((h.square().mean(-1, keepdim=True) - m * m).clamp(min=0) + eps)
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


@BUGS.kernel("cancellation", "layer_norm_backward")
def variance_as_a_difference_in_backward(
    g: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, target: Any
) -> Any:
    """The backward recomputes the variance as E[x^2] - E[x]^2"""
    gx, gw, gb = torch_kernel("layer_norm_backward")(g, x, w, b, eps, target)
    if x.numel() == 0:
        return gx, gw, gb
    h = x.float()
    m = h.mean(-1, keepdim=True)
    r = torch.rsqrt((h.square().mean(-1, keepdim=True) - m * m).clamp(min=0) + eps)
    n, s = (h - m) * r, g.float() if w is None else g.float() * w.float()
    gx = r * (s - s.mean(-1, keepdim=True) - n * (s * n).mean(-1, keepdim=True))
    return gx.to(x.dtype).contiguous(), gw, gb


@BUGS.kernel("cancellation", "gelu_mul", roundings=("activation",))
def one_plus_tanh_in_storage_dtype(gate: Tensor, up: Tensor, approximate: str, target: Any) -> Tensor:
    """The distribution is rounded to the storage dtype before the product with the gate"""
    g = gate.float()
    z = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    f = 0.5 * (1 + torch.erf(g * 0.5**0.5)) if approximate == "none" else 0.5 * (1 + torch.tanh(z))
    return (g * through(f, gate.dtype)).to(gate.dtype).mul(up).contiguous()


@BUGS.kernel("cancellation", "cross_entropy")
def log_of_a_softmax(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """The loss as -log(softmax + 1e-10): wrong for unlikely targets, and never above 23"""
    loss, lse = torch_kernel("cross_entropy")(x, labels, ignore, smoothing, target)
    if smoothing or x.numel() == 0:
        return loss, lse
    p = torch.softmax(x.float(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    counted = labels != ignore
    return torch.where(counted, -torch.log(p + 1e-10), 0.0).sum() / counted.sum(), lse
