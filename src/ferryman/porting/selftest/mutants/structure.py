"""Structure: dtypes, shapes, strides of the result; strides and offsets of the inputs that are not honoured."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.porting.selftest.planting import Bugs, Outputs, torch_kernel

BUGS = Bugs()


# -------------------------------------------------------------------------------------------------------------- dtypes


@BUGS.kernel("wrong dtype", "rms_norm")
def weights_dtype_returned(x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
    """The result has the weight's dtype, as type promotion gives it"""
    y = torch_kernel("rms_norm")(x, weight, eps, cast, target)
    return y if weight is None else y.to(weight.dtype)


@BUGS.output("wrong dtype", "softmax", "linear", "layer_norm")
def float32_returned(y: Tensor) -> Outputs:
    """The result stays in float32"""
    return (y.float(),)


@BUGS.kernel("wrong dtype", "rms_norm_backward", "layer_norm_backward")
def weight_gradient_in_the_inputs_dtype(*args: Any) -> Any:
    """The weight's gradient has x's dtype, not the weight's"""
    op = "rms_norm_backward" if len(args) == 5 else "layer_norm_backward"
    gx, gw, *rest = torch_kernel(op)(*args)
    return (gx, gw.to(gx.dtype), *rest)


@BUGS.kernel("wrong dtype", "attention")
def log_sum_exp_in_storage_dtype(*args: Any) -> Any:
    """The log-sum-exp is stored in 16 bits"""
    out, lse = torch_kernel("attention")(*args)
    return out, lse.to(torch.bfloat16)


@BUGS.kernel("wrong dtype", "cross_entropy")
def loss_in_the_logits_dtype(x: Tensor, *rest: Any) -> Any:
    """The loss has the logits' dtype"""
    loss, lse = torch_kernel("cross_entropy")(x, *rest)
    return loss.to(x.dtype), lse


@BUGS.output("wrong device", "softmax", gpu="results on the CPU are where they belong")
def result_on_the_host(y: Tensor) -> Outputs:
    """The result comes back in host memory"""
    return (y.cpu(),)


# -------------------------------------------------------------------------------------------------------------- shapes


@BUGS.kernel("wrong structure", "silu_mul")
def a_number_returned(gate: Tensor, up: Tensor, target: Any) -> Any:
    """A tuple with a number in it"""
    return (1.0,)


@BUGS.output("wrong structure", "attention", "rope", "cross_entropy")
def second_output_missing(*outputs: Tensor) -> Outputs:
    """Only the first output is returned"""
    return outputs[:1]


@BUGS.output("wrong structure", "rms_norm", "softmax")
def batch_dimensions_merged(y: Tensor) -> Outputs:
    """The leading dimensions come back as one"""
    return (y.reshape(-1, y.shape[-1]) if y.dim() > 2 else y,)


@BUGS.output("wrong structure", "cross_entropy")
def loss_of_one_element(loss: Tensor, lse: Tensor) -> Outputs:
    """The loss has shape (1,), not ()"""
    return loss.reshape(1), lse


@BUGS.output("wrong structure", "linear_backward", "layer_norm_backward")
def bias_gradient_as_a_row(*outputs: Tensor) -> Outputs:
    """The bias gradient keeps the summed dimension"""
    return (*outputs[:-1], outputs[-1].unsqueeze(0) if outputs[-1].numel() else outputs[-1])


@BUGS.kernel("wrong structure", "linear_backward")
def unwanted_gradient_returned(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_weight: bool, target: Any
) -> Any:
    """need_x is not looked at"""
    return torch_kernel("linear_backward")(grad, x, weight, bias, True, need_weight, target)


@BUGS.output("wrong strides", "rms_norm", "linear", "layer_norm")
def transposed_memory(y: Tensor) -> Outputs:
    """The result is a transposed view"""
    return (y.mT.contiguous().mT if y.dim() > 1 else y,)


@BUGS.output("wrong strides", "attention")
def heads_outermost(out: Tensor, lse: Tensor) -> Outputs:
    """(B, H, S, D) in memory, where (B, S, H, D) is declared"""
    return out.contiguous(), lse


@BUGS.kernel("wrong strides", "rope")
def inputs_strides_kept(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Any) -> Any:
    """The result has the input's strides, not a contiguous tensor's"""
    outputs = torch_kernel("rope")(q, k, cos, sin, interleaved, target)
    return tuple(torch.empty_like(x).copy_(y) for x, y in zip((q, k), outputs, strict=True))


@BUGS.output("wrong strides", "cross_entropy_backward", "softmax_backward")
def rows_padded(y: Tensor) -> Outputs:
    """Rows of the result lie a multiple of 64 elements apart"""
    if y.dim() != 2 or not y.numel():
        return (y,)
    width = -(-y.shape[1] // 64) * 64
    padded = torch.empty(y.shape[0], width, dtype=y.dtype, device=y.device)
    return (padded[:, : y.shape[1]].copy_(y),)


# ---------------------------------------------------------------------------------------------- the inputs' own strides


def _as_if_contiguous(x: Tensor) -> Tensor:
    strides: list[int] = []
    step = 1
    for n in reversed(x.shape):
        strides.insert(0, step)
        step *= max(n, 1)
    return torch.as_strided(x, x.shape, strides, x.storage_offset())


@BUGS.given("strides ignored", "rms_norm", "silu_mul", "softmax", "rope", "attention", "cross_entropy", "linear")
def read_as_if_contiguous(a: dict[str, Any]) -> None:
    """The first input is read as if it were contiguous"""
    name = next(iter(a))
    a[name] = _as_if_contiguous(a[name])


@BUGS.given("strides ignored", "layer_norm_backward", "softmax_backward", "rms_norm_backward")
def gradient_read_as_if_contiguous(a: dict[str, Any]) -> None:
    """The incoming gradient is read as if it were contiguous"""
    a["grad"] = _as_if_contiguous(a["grad"])


@BUGS.given("strides ignored", "add_rms_norm", "gelu_mul")
def one_stride_for_both_inputs(a: dict[str, Any]) -> None:
    """The second input is walked with the first one's strides, within what it has"""
    first, second = list(a)[:2]
    x, y = a[first], a[second]
    reach = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    have = 1 + sum((n - 1) * s for n, s in zip(y.shape, y.stride(), strict=True)) if y.numel() else 0
    a[second] = torch.as_strided(y, x.shape, x.stride(), y.storage_offset()) if reach <= have else _as_if_contiguous(y)
    if reach > have:
        a[first] = _as_if_contiguous(x)


@BUGS.given("strides ignored", "linear")
def weight_stride_is_k(a: dict[str, Any]) -> None:
    """The weight's rows are taken to be K elements apart"""
    a["weight"] = _as_if_contiguous(a["weight"])


@BUGS.given("offset ignored", "rms_norm", "softmax", "silu_mul", "rope")
def aligned_down_to_16_bytes(a: dict[str, Any]) -> None:
    """Vector loads drop the low bits of the address"""
    name = next(iter(a))
    x = a[name]
    extra = x.data_ptr() % 16 // x.element_size()
    if extra and x.numel():
        a[name] = torch.as_strided(x, x.shape, x.stride(), x.storage_offset() - extra)
