"""The wrong formula: eps, swapped or misread arguments, another function, labels."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.selftest.planting import Bugs, torch_kernel

BUGS = Bugs()


# ----------------------------------------------------------------------------------------------------------------- eps


@BUGS.given("eps", "rms_norm", "layer_norm_backward", "add_rms_norm_backward")
def eps_dropped(a: dict[str, Any]) -> None:
    """A small eps is left out"""
    if a["eps"] < 0.1:
        a["eps"] = 0.0


@BUGS.given("eps", "rms_norm", "layer_norm")
def eps_ten_times_larger(a: dict[str, Any]) -> None:
    """1e-5 where 1e-6 is asked for"""
    a["eps"] *= 10


@BUGS.given("eps", "add_rms_norm", "rms_norm_backward")
def eps_written_into_the_kernel(a: dict[str, Any]) -> None:
    """The kernel uses 1e-6 whatever eps is"""
    a["eps"] = 1e-6


@BUGS.kernel("eps", "rms_norm")
def eps_outside_the_root(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """x / (rms + eps)"""
    h = x.float()
    y = h / (h.square().mean(-1, keepdim=True).sqrt() + eps)
    return (y if weight is None else y * weight.float()).to(x.dtype).contiguous()


@BUGS.kernel("eps", "layer_norm")
def eps_clamps_the_variance(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    """max(variance, eps) in place of variance + eps"""
    h = x.float()
    d = h - h.mean(-1, keepdim=True)
    y = d * torch.rsqrt(d.square().mean(-1, keepdim=True).clamp(min=eps))
    y = y if weight is None else y * weight.float()
    return (y if bias is None else y + bias.float()).to(x.dtype).contiguous()


# --------------------------------------------------------------------------------------------------- arguments misread


@BUGS.given("arguments swapped", "silu_mul", "gelu_mul", "silu_mul_backward")
def gate_and_up_swapped(a: dict[str, Any]) -> None:
    """up goes through the activation, and the gate does not"""
    a["gate"], a["up"] = a["up"], a["gate"]


@BUGS.given("arguments swapped", "rope", "rope_", "rope_backward")
def cosine_and_sine_swapped(a: dict[str, Any]) -> None:
    """cos and sin change places"""
    a["cos"], a["sin"] = a["sin"], a["cos"]


@BUGS.given("arguments swapped", "layer_norm")
def weight_and_bias_swapped(a: dict[str, Any]) -> None:
    """weight and bias change places"""
    a["weight"], a["bias"] = a["bias"], a["weight"]


@BUGS.given("arguments swapped", "attention")
def keys_and_values_swapped(a: dict[str, Any]) -> None:
    """K and V change places"""
    a["k"], a["v"] = a["v"], a["k"]


@BUGS.given("transposed operand", "linear")
def square_weight_transposed(a: dict[str, Any]) -> None:
    """x @ weight where the weight is square, and nobody notices the shape"""
    if a["weight"].shape[0] == a["weight"].shape[1]:
        a["weight"] = a["weight"].T


@BUGS.given("transposed operand", "linear_backward")
def square_weight_transposed_in_backward(a: dict[str, Any]) -> None:
    """grad @ weight.T where the weight is square"""
    if a["weight"].shape[0] == a["weight"].shape[1]:
        a["weight"] = a["weight"].T.contiguous()


@BUGS.given("argument ignored", "linear")
def bias_ignored_for_one_column(a: dict[str, Any]) -> None:
    """A matrix-vector path forgets the bias"""
    if a["weight"].shape[0] == 1:
        a["bias"] = None


@BUGS.given("argument ignored", "rms_norm", "layer_norm")
def weight_ignored(a: dict[str, Any]) -> None:
    """The weight of a dtype other than x's is ignored"""
    if a["weight"] is not None and a["weight"].dtype != a["x"].dtype:
        a["weight"] = None


@BUGS.given("argument ignored", "rope", "rope_", "rope_backward")
def interleaving_ignored(a: dict[str, Any]) -> None:
    """Halves are paired, whatever is asked for"""
    a["interleaved"] = False


@BUGS.given("argument ignored", "cross_entropy", "cross_entropy_inplace_grad")
def smoothing_ignored(a: dict[str, Any]) -> None:
    """No label smoothing"""
    a["label_smoothing"] = 0.0


@BUGS.given("argument ignored", "cross_entropy_backward")
def smoothing_ignored_in_backward(a: dict[str, Any]) -> None:
    """No label smoothing in the gradient"""
    a["label_smoothing"] = 0.0


# ---------------------------------------------------------------------------------------------------- another function


@BUGS.given("another function", "gelu_mul", "gelu_mul_backward")
def tanh_where_erf_is_asked(a: dict[str, Any]) -> None:
    """The tanh form of gelu, always"""
    a["approximate"] = "tanh"


@BUGS.kernel("another function", "gelu_mul", roundings=("activation",))
def sigmoid_form_of_gelu(gate: Tensor, up: Tensor, approximate: str, target: Any) -> Tensor:
    """x sigmoid(1.702 x), which is no gelu that was asked for"""
    return (gate.float() * torch.sigmoid(1.702 * gate.float())).to(gate.dtype).mul(up).contiguous()


@BUGS.kernel("another function", "layer_norm")
def mean_not_subtracted(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Any) -> Tensor:
    """rms_norm in place of layer_norm"""
    y = torch_kernel("rms_norm")(x, weight, eps, False, target)
    return y if bias is None else (y.float() + bias.float()).to(x.dtype)


@BUGS.output("another function", "cross_entropy")
def log_sum_exp_in_base_two(loss: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """The log-sum-exp in base two"""
    return loss, lse / math.log(2)


@BUGS.kernel("another function", "softmax")
def over_the_rows(x: Tensor, target: Any) -> Tensor:
    """The softmax of a three-dimensional input runs over its second dimension"""
    return torch.softmax(x, 1 if x.dim() == 3 else -1).contiguous()


@BUGS.kernel("another function", "softmax")
def safe_softmax(x: Tensor, target: Any) -> Tensor:
    """A row of -inf alone gives zeros, where NaN is the op's meaning"""
    y = torch.softmax(x, -1)
    return y.masked_fill(x.isneginf().all(-1, keepdim=True), 0.0).contiguous() if x.numel() else y.contiguous()


@BUGS.given("sign", "rope_backward")
def not_transposed(a: dict[str, Any]) -> None:
    """The forward rotation by -sin: right only where both halves of sin are equal"""
    kept = a["cos"].shape[-1] // 2
    sin = a["sin"]
    swapped = (
        torch.stack((sin[..., 1::2], sin[..., 0::2]), -1).flatten(-2)
        if a["interleaved"]
        else torch.cat((sin[..., kept:], sin[..., :kept]), -1)
    )
    a["sin"] = swapped


@BUGS.given("sign", "rope", "rope_")
def rotated_backwards(a: dict[str, Any]) -> None:
    """The angle's sign is wrong"""
    a["sin"] = -a["sin"]


@BUGS.given("angle tables", "rope", "rope_backward")
def halves_assumed_equal(a: dict[str, Any]) -> None:
    """The first half of cos and sin serves for the second, as it does in Llama's tables"""
    half = a["cos"].shape[-1] // 2
    for name in ("cos", "sin"):
        t = a[name]
        a[name] = (
            t[..., ::2].repeat_interleave(2, -1) if a["interleaved"] else torch.cat((t[..., :half], t[..., :half]), -1)
        )


@BUGS.given("angle tables", "rope")
def first_batch_serves_all(a: dict[str, Any]) -> None:
    """The tables of the first sequence serve every sequence"""
    a["cos"], a["sin"] = a["cos"][:1], a["sin"][:1]


@BUGS.given("angle tables", "rope", "rope_backward")
def positions_shifted_by_one(a: dict[str, Any]) -> None:
    """Position i is turned by the angle of i + 1, the last by its own"""
    tokens = a["cos"].shape[1]
    at = torch.arange(1, tokens + 1, device=a["cos"].device).clamp(max=max(tokens - 1, 0))
    a["cos"], a["sin"] = a["cos"][:, at], a["sin"][:, at]


@BUGS.kernel("angle tables", "rope")
def whole_head_turned(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Any) -> Any:
    """Beyond rotary_dim the head is scaled by the tables' first entries instead of copied"""
    outputs = torch_kernel("rope")(q, k, cos, sin, interleaved, target)
    for out in outputs:
        if out.numel() and out.shape[-1] > cos.shape[-1]:
            out[..., cos.shape[-1] :] *= cos[..., :1].unsqueeze(1).to(out.dtype)
    return outputs


# -------------------------------------------------------------------------------------------------------------- labels


@BUGS.given("labels", "cross_entropy", "cross_entropy_backward")
def ignore_index_written_into_the_kernel(a: dict[str, Any]) -> None:
    """-100 is ignored whatever ignore_index is; a label below 0 is then read as class 0"""
    labels, ignored = a["target"], a["ignore_index"]
    if ignored != -100:
        a["target"] = torch.where(labels == ignored, 0, labels)


@BUGS.kernel("labels", "cross_entropy")
def smoothing_over_the_other_classes(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """The smoothed mass goes to V - 1 classes instead of V"""
    n = x.shape[-1]
    wider = min(1.0, smoothing * n / max(n - 1, 1))
    return torch_kernel("cross_entropy")(x, labels, ignore, wider, target)


@BUGS.kernel("labels", "cross_entropy_backward")
def neighbours_label(
    grad: Tensor, x: Tensor, labels: Tensor, lse: Tensor, ignore: int, smoothing: float, target: Any
) -> Tensor:
    """1 is subtracted at the class before the label"""
    moved = torch.where(labels > 0, labels - 1, labels)
    return torch_kernel("cross_entropy_backward")(grad, x, moved, lse, ignore, smoothing, target)


@BUGS.kernel("labels", "cross_entropy")
def sum_in_place_of_mean(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """The loss is not divided by the rows that count"""
    loss, lse = torch_kernel("cross_entropy")(x, labels, ignore, smoothing, target)
    return loss * (labels != ignore).sum(), lse


@BUGS.kernel("labels", "cross_entropy")
def label_of_the_row_before(x: Tensor, labels: Tensor, ignore: int, smoothing: float, target: Any) -> Any:
    """The last row's label is looked up in the row before it"""
    loss, lse = torch_kernel("cross_entropy")(x, labels, ignore, smoothing, target)
    flat, kept = x.reshape(labels.numel(), x.shape[-1]).float(), labels.reshape(-1)
    if len(kept) < 2 or smoothing:
        return loss, lse
    rows = torch.arange(len(kept), device=x.device)
    rows[-1] -= 1
    picked = flat[rows, kept.clamp(min=0)]
    row = torch.where(kept == ignore, 0.0, lse.reshape(-1) - picked)
    return row.sum() / (kept != ignore).sum(), lse


@BUGS.kernel("labels", "cross_entropy_backward")
def ignored_rows_written(
    grad: Tensor, x: Tensor, labels: Tensor, lse: Tensor, ignore: int, smoothing: float, target: Any
) -> Tensor:
    """Ignored rows receive their softmax as gradient"""
    counted = (labels != ignore).sum()
    d = torch.exp(x.float() - lse.unsqueeze(-1)) - smoothing / x.shape[-1]
    d.scatter_add_(-1, labels.clamp(min=0).unsqueeze(-1), torch.full_like(d[..., :1], smoothing - 1.0))
    return (d * grad / counted).to(x.dtype).contiguous()
