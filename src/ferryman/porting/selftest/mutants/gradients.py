"""Gradients: terms left out, factors forgotten, the forward's conditions not repeated."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.selftest.mutants import attention
from ferryman.porting.selftest.planting import Bugs, through, torch_kernel

BUGS = Bugs()


def _norm_parts(x: Tensor, eps: float, centred: bool) -> tuple[Tensor, Tensor]:
    """(normalised, reciprocal deviation)."""
    h = x.float()
    d = h - h.mean(-1, keepdim=True) if centred else h
    r = torch.rsqrt(d.square().mean(-1, keepdim=True) + eps)
    return d * r, r


@BUGS.kernel("gradient term missing", "layer_norm_backward")
def mean_of_the_gradient_forgotten(
    g: Tensor, x: Tensor, w: Tensor | None, b: Tensor | None, eps: float, target: Any
) -> Any:
    """grad_x without the gradient's mean"""
    _, gw, gb = torch_kernel("layer_norm_backward")(g, x, w, b, eps, target)
    n, r = _norm_parts(x, eps, True)
    s = g.float() if w is None else g.float() * w.float()
    return (r * (s - n * (s * n).mean(-1, keepdim=True))).to(x.dtype).contiguous(), gw, gb


@BUGS.kernel("gradient term missing", "rms_norm_backward")
def root_taken_as_constant(grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Any) -> Any:
    """grad_x as if the root did not depend on x"""
    _, gw = torch_kernel("rms_norm_backward")(grad, x, weight, eps, target)
    _, r = _norm_parts(x, eps, False)
    s = grad.float() if weight is None else grad.float() * weight.float()
    return (s * r).to(x.dtype).contiguous(), gw


@BUGS.kernel("gradient term missing", "add_rms_norm_backward")
def residual_gradient_forgotten(gy: Tensor, gr: Tensor, *rest: Any) -> Any:
    """The gradient that arrives at the sum itself is left out"""
    return torch_kernel("add_rms_norm_backward")(gy, torch.zeros_like(gr), *rest)


@BUGS.kernel("gradient term missing", "add_rms_norm_backward")
def residual_gradient_inside_the_norm(gy: Tensor, gr: Tensor, s: Tensor, w: Tensor | None, *rest: Any) -> Any:
    """The sum's gradient is added before the norm's backward, where there is no weight"""
    right = torch_kernel("add_rms_norm_backward")
    return right(gy + gr, torch.zeros_like(gr), s, w, *rest) if w is None else right(gy, gr, s, w, *rest)


@BUGS.kernel("gradient term missing", "softmax_backward")
def diagonal_alone(grad: Tensor, y: Tensor, target: Any) -> Tensor:
    """y (1 - y) grad: the Jacobian's diagonal"""
    p = y.float()
    return (grad.float() * p * (1 - p)).to(y.dtype).contiguous()


@BUGS.kernel("gradient term missing", "silu_mul_backward")
def slope_of_sigmoid_forgotten(grad: Tensor, gate: Tensor, up: Tensor, target: Any) -> Any:
    """grad_gate without g sigma'"""
    d, g, u = grad.float(), gate.float(), up.float()
    s = torch.sigmoid(g)
    return (d * u * s).to(gate.dtype).contiguous(), (d * g * s).to(gate.dtype).contiguous()


@BUGS.kernel("gradient term missing", "gelu_mul_backward")
def cubic_slope_forgotten(grad: Tensor, gate: Tensor, up: Tensor, approximate: str, target: Any) -> Any:
    """tanh-gelu's slope without 3 * 0.044715 g^2"""
    gg, gu = torch_kernel("gelu_mul_backward")(grad, gate, up, approximate, target)
    if approximate == "none":
        return gg, gu
    g = gate.float()
    c = math.sqrt(2 / math.pi)
    t = torch.tanh(c * (g + 0.044715 * g**3))
    slope = 0.5 * (1 + t) + 0.5 * g * (1 - t * t) * c
    return (grad.float() * up.float() * slope).to(gate.dtype).contiguous(), gu


@BUGS.kernel("gradient term missing", "attention_backward")
def grad_lse_ignored(grad: Tensor, grad_lse: Tensor | None, *rest: Any) -> Any:
    """The log-sum-exp's gradient is left out"""
    return torch_kernel("attention_backward")(grad, None, *rest)


@BUGS.kernel("gradient term missing", "attention_backward")
def delta_forgotten(grad: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
                    *rest: Any) -> Any:  # fmt: skip
    """dS without rowsum(out * grad)"""
    return torch_kernel("attention_backward")(grad, grad_lse, q, k, v, torch.zeros_like(out), *rest)


@BUGS.given("gradient term missing", "attention_backward")
def grad_lse_with_the_wrong_sign(a: dict[str, Any]) -> None:
    """delta + grad_lse in place of delta - grad_lse"""
    if a["grad_lse"] is not None:
        a["grad_lse"] = -a["grad_lse"]


@BUGS.given("gradient term missing", "attention_backward")
def causal_forgotten_in_backward(a: dict[str, Any]) -> None:
    """The backward is not causal"""
    a["causal"] = False


@BUGS.given("gradient factor", "cross_entropy_backward")
def not_divided_by_the_count(a: dict[str, Any]) -> None:
    """The gradient of the sum, not of the mean"""
    a["grad"] = a["grad"] * (a["target"] != a["ignore_index"]).sum()


@BUGS.given("gradient factor", "cross_entropy_backward")
def incoming_gradient_taken_as_one(a: dict[str, Any]) -> None:
    """The loss is taken to be the last op: grad = 1"""
    a["grad"] = torch.ones_like(a["grad"])


@BUGS.given("gradient factor", "cross_entropy_backward")
def log_sum_exp_in_storage_dtype(a: dict[str, Any]) -> None:
    """The saved log-sum-exp is rounded to 16 bits before it is used"""
    a["lse"] = through(a["lse"], torch.float16)


@BUGS.given("gradient factor", "attention_backward")
def saved_statistics_in_storage_dtype(a: dict[str, Any]) -> None:
    """The saved log-sum-exp is rounded to bfloat16 before it is used"""
    a["lse"] = through(a["lse"], torch.bfloat16)


@BUGS.kernel("gradient factor", "rms_norm_backward", "layer_norm_backward")
def weight_gradient_of_the_raw_input(*args: Any) -> Any:
    """The weight's gradient sums grad * x, not grad * normalised x"""
    op = "rms_norm_backward" if len(args) == 5 else "layer_norm_backward"
    gx, gw, *rest = torch_kernel(op)(*args)
    grad, x, weight = args[:3]
    if weight is None or x.numel() == 0:
        return (gx, gw, *rest)
    raw = (grad.float() * x.float()).reshape(-1, x.shape[-1]).sum(0)
    return (gx, raw.to(gw.dtype), *rest)


@BUGS.kernel("gradient factor", "gelu_mul_backward", "silu_mul_backward")
def gradients_swapped(*args: Any) -> Any:
    """grad_gate and grad_up change places"""
    op = "gelu_mul_backward" if len(args) == 5 else "silu_mul_backward"
    first, second = torch_kernel(op)(*args)
    return second, first


@BUGS.kernel("gradient factor", "linear_backward")
def weight_gradient_transposed(grad: Tensor, x: Tensor, weight: Tensor, *rest: Any) -> Any:
    """A square weight's gradient is transposed"""
    gx, gw, gb = torch_kernel("linear_backward")(grad, x, weight, *rest)
    return gx, gw.T.contiguous() if gw.dim() == 2 and gw.shape[0] == gw.shape[1] else gw, gb


@BUGS.kernel("gradient factor", "linear_backward")
def bias_gradient_is_a_mean(grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, *rest: Any) -> Any:
    """The bias gradient is averaged over the inner batch in three dimensions"""
    gx, gw, gb = torch_kernel("linear_backward")(grad, x, weight, bias, *rest)
    return gx, gw, gb / grad.shape[1] if bias is not None and grad.dim() == 3 else gb


def _attention_gradients(args: tuple[Any, ...], change: Callable[[Tensor, Tensor], Tensor]) -> Any:
    """The gradients from dS as ``change`` makes it, of (dS before the softcap's slope, tanh of the capped scores)."""
    grad, grad_lse, q, k, v, out, lse, causal, scale, window, softcap, mask, _ = args
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    a = {"q": q, "k": k, "v": v, "causal": causal, "scale": scale, "window": window, "softcap": softcap, "mask": mask}
    p = torch.exp(attention.scores(a) - lse.masked_fill(lse.isneginf(), 0.0).unsqueeze(-1))
    bare = attention.scores({**a, "softcap": 0.0, "mask": None, "causal": False, "window": None})
    t = torch.tanh(bare / softcap) if softcap else torch.zeros_like(bare)
    g, keys, values = grad.float(), *(x.float().repeat_interleave(group, 1) for x in (k, v))
    delta = (g * out.float()).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    ds = change(p * (g @ values.mT - delta.unsqueeze(-1)), t) * (q.shape[-1] ** -0.5 if scale is None else scale)

    def summed(x: Tensor) -> Tensor:
        return x.unflatten(1, (heads // group, group)).sum(2).to(k.dtype).contiguous()

    return (ds @ keys).to(q.dtype).contiguous(), summed(ds.mT @ q.float()), summed(p.mT @ g)


@BUGS.kernel("8-bit operands", "attention_backward")
def gradient_of_scores_in_8_bits(*args: Any) -> Any:
    """dS is rounded to e5m2 before its products"""
    return _attention_gradients(args, lambda ds, t: through(ds * (1 - t * t), torch.float8_e5m2))


@BUGS.kernel("softcap", "attention_backward")
def slope_of_the_softcap_forgotten(*args: Any) -> Any:
    """dS without 1 - tanh^2: the cap is repeated, its slope is not"""
    return _attention_gradients(args, lambda ds, t: ds)


@BUGS.kernel("softcap", "attention_backward")
def slope_of_the_softcap_not_squared(*args: Any) -> Any:
    """1 - tanh in place of 1 - tanh^2"""
    return _attention_gradients(args, lambda ds, t: ds * (1 - t))
