"""NaN, infinities, and rows of which nothing is seen."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.selftest.planting import Bugs, Outputs, torch_kernel

BUGS = Bugs()


@BUGS.output("NaN hidden", "rms_norm", "softmax", "linear", "layer_norm", "silu_mul", "attention", "cross_entropy")
def nan_becomes_zero(*outputs: Tensor) -> Outputs:
    """NaN becomes 0 in the result"""
    return tuple(torch.where(o.isnan(), torch.zeros_like(o), o) if o.dim() else o for o in outputs)


@BUGS.given("NaN hidden", "rms_norm_backward", "gelu_mul", "add_rms_norm")
def nan_inputs_become_zero(a: dict[str, Any]) -> None:
    """NaN becomes 0 in the inputs"""
    for name, value in a.items():
        if isinstance(value, Tensor):
            a[name] = torch.where(value.isnan(), torch.zeros_like(value), value)


@BUGS.kernel("NaN hidden", "softmax")
def maximum_that_skips_nan(x: Tensor, target: Any) -> Tensor:
    """NaN logits count as -inf"""
    return torch.softmax(x.nan_to_num(nan=-math.inf, posinf=math.inf, neginf=-math.inf), -1).contiguous()


@BUGS.output("infinity clamped", "silu_mul", "rope", "linear", "gelu_mul_backward")
def infinity_becomes_the_largest(*outputs: Tensor) -> Outputs:
    """Inf becomes the largest number"""
    return tuple(o.clamp(-torch.finfo(o.dtype).max, torch.finfo(o.dtype).max) for o in outputs)


@BUGS.output("infinity clamped", "silu_mul", "rope", "linear", "cross_entropy")
def infinity_of_the_wrong_sign(*outputs: Tensor) -> Outputs:
    """Inf changes its sign"""
    return tuple(torch.where(o.isinf(), -o, o) for o in outputs)


@BUGS.given("infinity clamped", "softmax", "cross_entropy", "layer_norm")
def infinite_inputs_clamped(a: dict[str, Any]) -> None:
    """Infinite inputs become the largest number, to be safe"""
    name = "logits" if "logits" in a else "x"
    limit = torch.finfo(a[name].dtype).max
    a[name] = a[name].clamp(-limit, limit)


@BUGS.output("NaN injected", "rms_norm", "softmax", "silu_mul", "rope")
def one_element_nan(*outputs: Tensor) -> None:
    """The last element of a large result is NaN"""
    if outputs[0].numel() > 256:
        outputs[0].view(-1)[-1] = math.nan


@BUGS.kernel("NaN injected", "layer_norm")
def zero_over_zero(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    """eps is left out where the variance is zero"""
    y = torch_kernel("layer_norm")(x, weight, bias, eps, target)
    flat = (x.float() - x.float().mean(-1, keepdim=True)).square().sum(-1, keepdim=True) == 0
    return torch.where(flat, torch.full_like(y, math.nan), y) if x.shape[-1] > 1 else y


@BUGS.kernel("NaN injected", "silu_mul_backward")
def infinity_times_zero(grad: Tensor, gate: Tensor, up: Tensor, target: Any) -> Any:
    """sigmoid's slope as exp(-g) / (1 + exp(-g))^2: inf / inf from -89 on"""
    d, g, u = grad.float(), gate.float(), up.float()
    e = torch.exp(-g)
    s = 1 / (1 + e)
    slope = e / (1 + e).square()
    low = gate.dtype
    return (d * u * (s + g * slope)).to(low).contiguous(), (d * g * s).to(low).contiguous()


@BUGS.kernel("NaN injected", "gelu_mul", roundings=("activation",))
def tanh_of_an_overflow(gate: Tensor, up: Tensor, approximate: str, target: Any) -> Tensor:
    """tanh(z) as (e - 1) / (e + 1) with e = exp(2 z): NaN from 44 on"""
    g = gate.float()
    z = math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    e = torch.exp(2 * z)
    if approximate == "none":
        return torch_kernel("gelu_mul")(gate, up, approximate, target)
    return (0.5 * g * (1 + (e - 1) / (e + 1))).to(gate.dtype).mul(up).contiguous()


@BUGS.kernel("empty rows", "attention")
def rows_that_see_nothing_are_nan(*args: Any) -> Any:
    """A row that sees no key is 0/0"""
    out, lse = torch_kernel("attention")(*args)
    return out.masked_fill(lse.isneginf().unsqueeze(-1), math.nan), lse


@BUGS.kernel("empty rows", "attention")
def log_sum_exp_of_nothing_is_zero(*args: Any) -> Any:
    """The log-sum-exp of a row that sees no key is 0"""
    out, lse = torch_kernel("attention")(*args)
    return out, lse.masked_fill(lse.isneginf(), 0.0)


@BUGS.kernel("empty rows", "attention")
def rows_that_see_nothing_average_v(*args: Any) -> Any:
    """A row that sees no key gets the mean of V, as softmax of equal -1e9 does"""
    out, lse = torch_kernel("attention")(*args)
    q, v = args[0], args[2]
    if v.shape[2] == 0:
        return out, lse
    mean = v.float().mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1)
    filled = torch.where(lse.isneginf().unsqueeze(-1), mean.to(out.dtype), out)
    return filled.transpose(1, 2).contiguous().transpose(1, 2), lse


@BUGS.kernel("empty rows", "attention_backward")
def gradient_of_rows_that_see_nothing(*args: Any) -> Any:
    """A row that saw no key (lse = -inf) has NaN for gradient"""
    grads = torch_kernel("attention_backward")(*args)
    lse = args[6]
    return (grads[0].masked_fill(lse.isneginf().unsqueeze(-1), math.nan), *grads[1:])


@BUGS.kernel("empty rows", "rms_norm_backward", "layer_norm_backward")
def weight_gradient_of_no_rows(*args: Any) -> Any:
    """With no rows the weight's gradient is left as memory was, not zero"""
    op = "rms_norm_backward" if len(args) == 5 else "layer_norm_backward"
    outputs = torch_kernel(op)(*args)
    if args[1].numel() or args[2] is None:
        return outputs
    return (outputs[0], torch.empty_like(args[2]), *outputs[2:])


@BUGS.kernel("empty rows", "linear")
def depth_of_zero_left_unwritten(x: Tensor, weight: Tensor, bias: Tensor | None, target: Any) -> Tensor:
    """With K = 0 no program runs, and the bias is forgotten"""
    y = torch_kernel("linear")(x, weight, bias, target)
    return torch.zeros_like(y) if x.shape[-1] == 0 else y
