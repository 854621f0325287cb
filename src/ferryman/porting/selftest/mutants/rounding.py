"""Roundings that were not declared, rounded wrongly, or approximated too far; results scaled or clamped."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.porting.selftest.planting import Bugs, Outputs, first_tensor, through, torch_kernel, truncated

BUGS = Bugs()
FP8 = torch.float8_e4m3fn


# --------------------------------------------------------------------------------------------------- the last rounding


@BUGS.unrounded("rounding direction", "rms_norm", "silu_mul", "linear", "softmax", "add_rms_norm_backward", "rope")
def truncated_cast(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """The result is cut to 16 bits, not rounded"""
    dtype = first_tensor(args).dtype
    return tuple(o if o.dim() == 0 else truncated(o, dtype) for o in outputs)


@BUGS.unrounded("rounding direction", "layer_norm", "silu_mul_backward")
def rounded_up(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """The result is rounded away from zero, as adding half a unit twice does"""
    dtype = first_tensor(args).dtype

    def up(o: Tensor) -> Tensor:
        low = truncated(o, dtype).float()
        step = 2.0**-7 if dtype == torch.bfloat16 else 2.0**-10
        far = torch.where(low == o, low, low * (1 + step))
        return o if dtype == torch.float32 else far

    return tuple(map(up, outputs))


@BUGS.unrounded("rounding direction", "linear")
def ties_away_from_zero(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """Ties round away from zero, as adding half a unit and cutting does"""
    dtype = first_tensor(args).dtype
    if dtype != torch.bfloat16:
        return outputs
    return tuple(((o.view(torch.int32) + 0x8000) & -65536).view(torch.float32) for o in outputs)


@BUGS.unrounded("rounding twice", "silu_mul", "layer_norm")
def through_float16(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """The result passes through float16 on its way, whatever the storage dtype"""
    return tuple(through(o, torch.float16) for o in outputs)


@BUGS.unrounded("rounding twice", "rms_norm_backward", "cross_entropy_backward", "gelu_mul")
def through_bfloat16(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """The result passes through bfloat16 on its way, whatever the storage dtype"""
    return tuple(through(o, torch.bfloat16) for o in outputs)


@BUGS.unrounded("subnormals flushed", "silu_mul", "rms_norm", "rope")
def subnormals_flushed(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """Subnormal results become zero (-ftz=true, or an AMD denorm mode)"""
    tiny = torch.finfo(first_tensor(args).dtype).tiny
    return tuple(o.masked_fill(o.abs() < tiny, 0.0) for o in outputs)


# ------------------------------------------------------------------------------------------------- undeclared roundings


@BUGS.kernel("undeclared rounding", "silu_mul")
def activation_rounded(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    """The activation is rounded to storage before the product, and nobody said so"""
    return functional.silu(gate.contiguous()) * up


@BUGS.kernel("undeclared rounding", "gelu_mul")
def gelu_rounded(gate: Tensor, up: Tensor, approximate: str, target: Any) -> Tensor:
    """The activation is rounded to storage before the product, and nobody said so"""
    activation = torch_kernel("gelu_mul")(gate, torch.ones_like(gate), approximate, target)
    return (activation * up).contiguous()


@BUGS.given("undeclared rounding", "rms_norm", "layer_norm")
def weight_cast_early(a: dict[str, Any]) -> None:
    """A float32 weight is cast to the activations' dtype"""
    for name in ("weight", "bias"):
        if a.get(name) is not None:
            a[name] = a[name].to(a["x"].dtype)


@BUGS.kernel("undeclared rounding", "rms_norm")
def product_rounded_before_the_weight(
    x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any
) -> Tensor:  # fmt: skip
    """cast_before_weight, whether asked for or not"""
    return torch_kernel("rms_norm")(x, weight, eps, True, target)


@BUGS.given("undeclared rounding", "linear", "linear_backward")
def tf32_operands(a: dict[str, Any]) -> None:
    """float32 operands lose 13 bits on their way into a matrix unit"""
    for name in ("x", "weight", "grad"):
        if name in a and a[name].dtype == torch.float32:
            cut = a[name].contiguous().view(torch.int32) & -8192
            a[name] = cut.view(torch.float32)


@BUGS.kernel("undeclared rounding", "rope")
def products_in_storage_dtype(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Any) -> Any:
    """x cos + rotate(x) sin with every product rounded to storage, as eager model code does"""
    right = torch_kernel("rope")
    zeros = torch.zeros_like(cos)
    parts = zip(right(q, k, cos, zeros, interleaved, target), right(q, k, zeros, sin, interleaved, target), strict=True)
    width = cos.shape[-1]
    found = []
    for (a, b), x in zip(parts, (q, k), strict=True):
        out = a + b
        out[..., width:] = x[..., width:]
        found.append(out)
    return tuple(found)


@BUGS.kernel("undeclared rounding", "softmax_backward")
def difference_rounded(grad: Tensor, y: Tensor, target: Any) -> Tensor:
    """grad - sum(grad y) is rounded to storage before the product with y"""
    inner = (grad.float() * y.float()).sum(-1, keepdim=True)
    low = torch.bfloat16 if y.dtype == torch.float32 else y.dtype
    return (y.float() * through(grad.float() - inner, low)).to(y.dtype).contiguous()


# ------------------------------------------------------------------------------------------------------------- 8 bits


@BUGS.given("8-bit operands", "linear")
def fp8_operands(a: dict[str, Any]) -> None:
    """Both operands are quantised to e4m3 and back"""
    for name in ("x", "weight"):
        a[name] = through(a[name].float().clamp(-448, 448), FP8).to(a[name].dtype)


@BUGS.given("8-bit operands", "attention", "attention_backward")
def fp8_values(a: dict[str, Any]) -> None:
    """V is quantised to e4m3, as an 8-bit cache does"""
    a["v"] = through(a["v"].float().clamp(-448, 448), FP8).to(a["v"].dtype)


@BUGS.given("8-bit operands", "silu_mul")
def fp8_with_the_other_flavours_scale(a: dict[str, Any]) -> None:
    """up is quantised to e4m3 and read as e4m3fnuz: half the value"""
    a["up"] = (through(a["up"].float().clamp(-448, 448), FP8) / 2).to(a["up"].dtype)


# -------------------------------------------------------------------------------------------------------------- scaled


@BUGS.unrounded("scaled", "rms_norm", "linear", "softmax", "silu_mul_backward", "layer_norm", "cross_entropy_backward")
def a_thousandth_too_large(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """x 1.001"""
    return tuple(o * 1.001 for o in outputs)


@BUGS.unrounded("scaled", "gelu_mul", "rope_backward", "softmax_backward")
def a_hundredth_too_small(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """x 0.99"""
    return tuple(o * 0.99 for o in outputs)


@BUGS.unrounded("scaled", "silu_mul", "linear_backward", "rope")
def two_hundredths_too_large(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """x 1.02"""
    return tuple(o * 1.02 for o in outputs)


@BUGS.unrounded("scaled", "layer_norm", "rms_norm_backward")
def shifted_by_a_ten_thousandth(outputs: Outputs, args: tuple[Any, ...]) -> Outputs:
    """+ 1e-4 everywhere"""
    return tuple(o + 1e-4 for o in outputs)


# ------------------------------------------------------------------------------------------------------------ clamped


@BUGS.output("saturated", "linear", "add_rms_norm", "layer_norm_backward")
def saturated_at_448(*outputs: Tensor) -> Outputs:
    """Results stop at e4m3's largest number"""
    return tuple(o.clamp(-448, 448) for o in outputs)


@BUGS.output("saturated", "silu_mul", "gelu_mul")
def saturated_at_240(*outputs: Tensor) -> Outputs:
    """Results stop at e4m3fnuz's largest number"""
    return tuple(o.clamp(-240, 240) for o in outputs)


@BUGS.output("saturated", "rope", "gelu_mul_backward", "add_rms_norm")
def saturated_at_float16s_largest(*outputs: Tensor) -> Outputs:
    """Results of every dtype stop at 65504"""
    return tuple(o.clamp(-65504, 65504) for o in outputs)


# ------------------------------------------------------------------------------------------ approximations of functions


@BUGS.kernel("approximate function", "rms_norm", "add_rms_norm_backward")
def inverse_root_by_bits(*args: Any) -> Any:
    """The inverse root by the integer trick and one Newton step: 1.7e-3 off"""
    if len(args) == 6:
        grad, extra, s, weight, eps, target = args
        gx, gw = torch_kernel("add_rms_norm_backward")(grad, torch.zeros_like(extra), s, weight, eps, target)
        exact, quick = _roots(s, eps)
        return (gx.float() * (quick / exact) + extra.float()).to(s.dtype).contiguous(), gw
    x, weight, eps, _, _ = args
    h = x.float() * _roots(x, eps)[1]
    return (h if weight is None else h * weight.float()).to(x.dtype).contiguous()


def _roots(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    a = x.float().square().mean(-1, keepdim=True) + eps
    y = (0x5F3759DF - (a.view(torch.int32) >> 1)).view(torch.float32)
    exact = torch.rsqrt(a)
    return exact, torch.where(a.isfinite() & (a > 0), y * (1.5 - 0.5 * a * y * y), exact)


@BUGS.kernel("approximate function", "softmax")
def exponential_by_a_cubic(x: Tensor, target: Any) -> Tensor:
    """exp2's fraction by a cubic: 1e-4 off, below bfloat16's rounding"""
    h = x.float() * math.log2(math.e)
    z = h - h.amax(-1, keepdim=True) if h.numel() else h
    whole = z.floor()
    f = z - whole
    e = torch.ldexp(1 + f * (0.6951 + f * (0.2276 + f * 0.0773)), whole.nan_to_num(neginf=-200).clamp(min=-200).int())
    e = torch.where(z.isneginf(), 0.0, torch.where(z.isnan(), math.nan, e))
    return (e / e.sum(-1, keepdim=True)).to(x.dtype).contiguous()


@BUGS.kernel("approximate function", "gelu_mul", roundings=("activation",))
def tanh_of_ten_bits(gate: Tensor, up: Tensor, approximate: str, target: Any) -> Tensor:
    """tanh.approx.f32: 2^-11 off"""
    g = gate.float()
    t = torch.tanh(math.sqrt(2 / math.pi) * (g + 0.044715 * g**3))
    if approximate == "none":
        t = torch.erf(g * 0.5**0.5)
    t = (t * 2048).round() / 2048
    return (0.5 * g * (1 + t)).to(gate.dtype).mul(up).contiguous()


@BUGS.kernel("approximate function", "silu_mul_backward")
def sigmoid_of_half_precision(grad: Tensor, gate: Tensor, up: Tensor, target: Any) -> Any:
    """The reciprocal in sigmoid has 11 bits (rcp.approx.f16)"""
    d, g, u = grad.float(), gate.float(), up.float()
    s = through(torch.sigmoid(g), torch.float16)
    low = gate.dtype
    return (d * u * s * (1 + g * (1 - s))).to(low).contiguous(), (d * g * s).to(low).contiguous()


@BUGS.kernel("approximate function", "silu_mul", roundings=("activation",))
def hard_sigmoid(gate: Tensor, up: Tensor, target: Any) -> Tensor:
    """hard-swish in place of swish"""
    return functional.hardswish(gate.contiguous()).mul(up)


@BUGS.output("approximate function", "attention")
def log_of_eight_bits(out: Tensor, lse: Tensor) -> Outputs:
    """The log-sum-exp's logarithm is off by 2^-9"""
    return out, lse + 2.0**-9
