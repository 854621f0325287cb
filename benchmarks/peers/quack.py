"""QuACK's CuTe kernels."""

from __future__ import annotations

from typing import Any

import torch
from ferryman_peers import _common

NAME = "quack"


def available() -> str | None:
    return _common.missing("quack", "cutlass")


def version() -> str:
    return _common.version("quack-kernels")


def _whole(x: Any) -> Any:
    """Rows of whole vectors of 16 bytes: the reductions over classes have no other form."""
    x = _common.flat(x)
    if x.shape[-1] * x.element_size() % 16:
        raise _common.NotServed(f"rows of {x.shape[-1]} elements are no multiple of 16 bytes")
    return x


def rms_norm(x: Any, weight: Any, eps: float, cast_before_weight: bool) -> _common.Call:
    from quack.rmsnorm import rmsnorm_fwd

    x = _common.flat(x)
    return lambda: rmsnorm_fwd(x, weight, eps=eps)[0]


def add_rms_norm(x: Any, residual: Any, weight: Any, eps: float, cast_before_weight: bool) -> _common.Call:
    from quack.rmsnorm import rmsnorm_fwd

    x, residual = _common.flat(x), _common.flat(residual)
    return lambda: rmsnorm_fwd(x, weight, residual=residual, eps=eps)[:2]


def rms_norm_backward(grad: Any, x: Any, weight: Any, eps: float) -> _common.Call:
    from quack.rmsnorm import rmsnorm_bwd, rmsnorm_fwd

    x, grad = _common.flat(x), _common.flat(grad)
    scale = rmsnorm_fwd(x, weight, eps=eps, store_rstd=True)[2]
    return lambda: rmsnorm_bwd(x, weight, grad, scale)[:2]


def layer_norm(x: Any, weight: Any, bias: Any, eps: float) -> _common.Call:
    from quack.rmsnorm import layernorm_fwd

    x, weight, bias = _common.flat(x), weight.float(), None if bias is None else bias.float()
    return lambda: layernorm_fwd(x, weight, bias, eps)


def softmax(x: Any) -> _common.Call:
    from quack.softmax import softmax_fwd

    x = _whole(x)
    return lambda: softmax_fwd(x)


def softmax_backward(grad: Any, y: Any) -> _common.Call:
    from quack.softmax import softmax_bwd

    grad, y = _whole(grad), _whole(y)
    return lambda: softmax_bwd(grad, y)


def cross_entropy(logits: Any, target: Any, ignore_index: int, label_smoothing: float) -> _common.Call:
    from quack.cross_entropy import cross_entropy_fwd

    _common.plain(label_smoothing=label_smoothing)
    logits, target = _whole(logits), target.reshape(-1)
    count = (target != ignore_index).sum()

    def call() -> Any:
        loss, lse = cross_entropy_fwd(logits, target, ignore_index=ignore_index, return_lse=True)[:2]
        return loss.sum() / count, lse

    return call


def cross_entropy_backward(
    grad: Any, logits: Any, target: Any, lse: Any, ignore_index: int, label_smoothing: float
) -> _common.Call:
    from quack.cross_entropy import cross_entropy_bwd

    _common.plain(label_smoothing=label_smoothing)
    logits, target, lse = _whole(logits), target.reshape(-1), lse.reshape(-1)
    each = (grad / (target != ignore_index).sum()).float().expand(target.shape).contiguous()
    return lambda: cross_entropy_bwd(logits, target, each, lse, ignore_index=ignore_index)


def linear(x: Any, weight: Any, bias: Any) -> _common.Call:
    from quack.gemm_interface import gemm

    x = _common.flat(x)
    out = torch.empty(x.shape[0], weight.shape[0], dtype=x.dtype, device=x.device)
    return lambda: gemm(x, weight.t(), out=out, bias=bias)


OPS = {
    f.__name__: f
    for f in (
        rms_norm,
        add_rms_norm,
        rms_norm_backward,
        layer_norm,
        softmax,
        softmax_backward,
        cross_entropy,
        cross_entropy_backward,
        linear,
    )
}
