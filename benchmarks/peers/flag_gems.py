"""FlagGems. Its fused add and norm writes over both inputs: not the same op."""

from __future__ import annotations

from typing import Any

from ferryman_peers import _common

NAME = "flag-gems"
SLOW_START = True  # it compiles or tunes for seconds a call


def available() -> str | None:
    return _common.missing("flag_gems", "triton")


def version() -> str:
    return _common.version("flag-gems")


def _ops() -> Any:
    import flag_gems

    return flag_gems


def rms_norm(x: Any, weight: Any, eps: float, cast_before_weight: bool) -> _common.Call:
    from flag_gems.ops.rms_norm import rms_norm_forward

    return lambda: rms_norm_forward(x, (x.shape[-1],), weight, eps)[0]


def rms_norm_backward(grad: Any, x: Any, weight: Any, eps: float) -> _common.Call:
    from flag_gems.ops.rms_norm import RmsNorm as Function

    return _common.backward(Function, (x, (x.shape[-1],), weight, eps), (grad,), (0, 2))


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> _common.Call:
    function = _ops().ops.layer_norm
    return lambda: function(x, (x.shape[-1],), weight, bias, eps)[0]


def silu_mul(gate: Any, up: Any) -> _common.Call:
    from flag_gems.fused.silu_and_mul import silu_and_mul

    return lambda: silu_and_mul(gate, up)


def gelu_mul(gate: Any, up: Any, approximate: str) -> _common.Call:
    from flag_gems.fused.gelu_and_mul import gelu_and_mul

    return lambda: gelu_and_mul(gate, up, approximate)


def softmax(x: Any) -> _common.Call:
    function = _ops().ops.softmax
    return lambda: function(x, -1)


def softmax_backward(grad: Any, y: Any) -> _common.Call:
    function = _ops().ops.softmax_backward
    return lambda: function(grad, y, -1, y.dtype)


def cross_entropy(logits: Any, target: Any, ignore_index: int, label_smoothing: float) -> _common.Call:
    from flag_gems.fused.cross_entropy_loss import cross_entropy_loss

    return lambda: cross_entropy_loss(logits, target, None, "mean", ignore_index, label_smoothing)


def linear(x: Any, weight: Any, bias: Any) -> _common.Call:
    function = _ops().ops.mm
    _common.plain(bias=bias)
    return lambda: function(_common.flat(x), weight.t())


def attention(q: Any, k: Any, v: Any, causal: bool, scale: Any, window: Any, softcap: float, mask: Any) -> _common.Call:
    from flag_gems.ops.attention import scaled_dot_product_attention

    _common.plain(window=window, softcap=softcap, mask=mask, decoding=q.shape[2] != k.shape[2])
    grouped = q.shape[1] != k.shape[1]
    return lambda: scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=grouped)


OPS = {
    f.__name__: f
    for f in (
        rms_norm,
        rms_norm_backward,
        layer_norm,
        silu_mul,
        gelu_mul,
        softmax,
        softmax_backward,
        cross_entropy,
        linear,
        attention,
    )
}
