"""Liger kernels. Its rope writes over q and k, and its cross entropy's gradient over the logits: the mutating ops'
peers, not those of `rope` and `cross_entropy` with a backward. The backward of its gated activations and of its rope
write over what they are given, too: as many bytes as an op that does not.
"""

from __future__ import annotations

from typing import Any

import torch
from ferryman_peers import _common

NAME = "liger"


def available() -> str | None:
    return _common.missing("liger_kernel", "triton")


def version() -> str:
    return _common.version("liger-kernel")


def _casting(cast_before_weight: bool) -> str:
    return "llama" if cast_before_weight else "gemma"  # where the row is rounded: before the weight, or after it


def rms_norm(x: Any, weight: Any, eps: float, cast_before_weight: bool) -> _common.Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Function

    return lambda: Function.apply(x, weight, eps, 0.0, _casting(cast_before_weight), False)


def rms_norm_backward(grad: Any, x: Any, weight: Any, eps: float) -> _common.Call:
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction as Function

    return _common.backward(Function, (x, weight, eps, 0.0, "gemma", False), (grad,), (0, 1))


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, cast_before_weight: bool) -> _common.Call:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Function

    return lambda: Function.apply(x, residual, weight, eps, 0.0, _casting(cast_before_weight), False)


def add_rms_norm_backward(grad_y: Any, grad_residual: Any, total: Any, weight: Any, eps: float) -> _common.Call:
    from liger_kernel.ops.fused_add_rms_norm import LigerFusedAddRMSNormFunction as Function

    nothing = total.new_zeros(()).expand_as(total)  # total + 0: the forward's sum is what the op is given
    forward = (total, nothing.contiguous(), weight, eps, 0.0, "gemma", False)
    return _common.backward(Function, forward, (grad_y, grad_residual), (0, 2))


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> _common.Call:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Function

    return lambda: Function.apply(x, weight, bias, eps)


def layer_norm_backward(grad: Any, x: Any, weight: Any, bias: Any, eps: float) -> _common.Call:
    from liger_kernel.ops.layer_norm import LigerLayerNormFunction as Function

    return _common.backward(Function, (x, weight, bias, eps), (grad,), (0, 1, 2))


def silu_mul(gate: Any, up: Any) -> _common.Call:
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction as Function

    return lambda: Function.apply(gate, up)


def gelu_mul(gate: Any, up: Any, approximate: str) -> _common.Call:
    from liger_kernel.ops.geglu import LigerGELUMulFunction as Function

    _common.plain(exact_gelu=approximate != "tanh")
    return lambda: Function.apply(gate, up)


def silu_mul_backward(grad: Any, gate: Any, up: Any) -> _common.Call:
    from liger_kernel.ops.swiglu import swiglu_backward

    return _gated_backward(swiglu_backward, grad, gate, up)


def gelu_mul_backward(grad: Any, gate: Any, up: Any, approximate: str) -> _common.Call:
    from liger_kernel.ops.geglu import geglu_backward

    _common.plain(exact_gelu=approximate != "tanh")
    return _gated_backward(geglu_backward, grad, gate, up)


def _gated_backward(function: Any, grad: Any, gate: Any, up: Any) -> _common.Call:
    own_gate, own_up = gate.clone(), up.clone()  # the gradients go over both
    kept = ((own_gate, gate), (own_up, up))
    return _common.Overwriting(lambda: function(own_gate, own_up, grad), kept)


def softmax(x: Any) -> _common.Call:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction as Function

    return lambda: Function.apply(x)


def softmax_backward(grad: Any, y: Any) -> _common.Call:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction as Function

    saved = _common.Saved()
    Function.forward(saved, y)  # for its launch's sizes; what is saved is then the op's own y
    saved.saved_tensors = (y,)
    return lambda: Function.backward(saved, grad)


def cross_entropy(logits: Any, target: Any, ignore_index: int, label_smoothing: float) -> _common.Call:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Function

    logits, target = _common.flat(logits), target.reshape(-1)
    return lambda: (Function.apply(logits, target, None, ignore_index, 0.0, label_smoothing, "mean", None, False)[0],)


def cross_entropy_inplace_grad(logits: Any, target: Any, ignore_index: int, label_smoothing: float) -> _common.Call:
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Function

    # it computes the gradient, over the logits, where they require one
    rows, target = _common.flat(logits.detach()).requires_grad_(), target.reshape(-1)

    def call() -> tuple[Any, ...]:
        with torch.enable_grad():
            outputs = Function.apply(rows, target, None, ignore_index, 0.0, label_smoothing, "mean", None, False)
        return outputs[0].detach(), None, logits

    return call


def _half_angles(q: Any, cos: Any, sin: Any, interleaved: bool) -> None:
    _common.plain(interleaved=interleaved)
    if cos.shape[-1] != q.shape[-1]:
        raise _common.NotServed("no partial rotation")
    half = cos.shape[-1] // 2
    if not all(torch.equal(angle[..., :half], angle[..., half:]) for angle in (cos, sin)):
        raise _common.NotServed("it reads half of the angles, and takes the other half to be equal")


def rope_(q: Any, k: Any, cos: Any, sin: Any, interleaved: bool) -> _common.Call:
    from liger_kernel.ops.rope import LigerRopeFunction as Function

    _half_angles(q, cos, sin, interleaved)
    if not all(x.transpose(1, 2).is_contiguous() for x in (q, k)):
        raise _common.NotServed("it copies what is not (batch, seq, heads, head_dim) in memory, and rotates the copy")
    return lambda: Function.apply(q, k, cos, sin)


def rope_backward(grad_q: Any, grad_k: Any, cos: Any, sin: Any, interleaved: bool) -> _common.Call:
    from liger_kernel.ops.rope import rope_backward as function

    _half_angles(grad_q, cos, sin, interleaved)
    # It writes over gradients that are (batch, seq, heads, head_dim) in memory, and copies others first: it gets those.
    own = [x.transpose(1, 2).clone(memory_format=torch.contiguous_format).transpose(1, 2) for x in (grad_q, grad_k)]
    return _common.Overwriting(lambda: function(*own, cos, sin), zip(own, (grad_q, grad_k), strict=True))


def _linear_cross_entropy(
    x: Any, weight: Any, target: Any, bias: Any, ignore_index: int, label_smoothing: float, z_loss: float
) -> Any:
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Function

    outputs = Function.apply(
        _common.flat(x), weight, target.reshape(-1), bias, None, ignore_index, z_loss, label_smoothing
    )
    return outputs[0]


STEPS = {"linear_cross_entropy": _linear_cross_entropy}  # its forward computes the gradients
OPS = {
    f.__name__: f
    for f in (
        rms_norm,
        rms_norm_backward,
        add_rms_norm,
        add_rms_norm_backward,
        layer_norm,
        layer_norm_backward,
        silu_mul,
        silu_mul_backward,
        gelu_mul,
        gelu_mul_backward,
        softmax,
        softmax_backward,
        cross_entropy,
        cross_entropy_inplace_grad,
        rope_,
        rope_backward,
    )
}
