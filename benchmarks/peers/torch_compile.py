"""torch.compile at its best: static shapes, autotuned, each shape a compilation of its own.

Backwards are compiled too: of a function that takes the op's own arguments and returns its gradients, so that Inductor
may compute again what it needs of the forward, as the op's own implementations do.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from ferryman_peers import _functions

NAME = "torch-compile"
SLOW_START = True  # it compiles or tunes for seconds a call
MODE = "max-autotune-no-cudagraphs"  # the benchmark captures its own graphs


def available() -> str | None:
    return None if torch.cuda.is_available() else "torch sees no accelerator to compile for"


def version() -> str:
    return str(torch.__version__)


@functools.cache
def _compiled(name: str, shapes: tuple[Any, ...]) -> Callable[..., Any]:
    function = _GRADIENTS.get(name) or _functions.FORWARD[name]
    torch._dynamo.reset()  # a function recompiles 8 times at most; the shapes that were timed before are done with
    return torch.compile(function, mode=MODE, dynamic=False, fullgraph=True)


def _prepared(name: str) -> Callable[..., Callable[[], Any]]:
    def prepare(*args: Any) -> Callable[[], Any]:
        shapes = tuple((a.shape, a.stride(), a.dtype) if isinstance(a, torch.Tensor) else a for a in args)
        return functools.partial(_compiled(name, shapes), *args)

    return prepare


def _rms_norm_backward(grad: Any, x: Any, weight: Any, eps: float) -> Any:
    return torch.func.vjp(lambda x, w: _functions.rms_norm(x, w, eps, False), x, weight)[1](grad)


def _layer_norm_backward(grad: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return torch.func.vjp(lambda x, w, b: _functions.layer_norm(x, w, b, eps), x, weight, bias)[1](grad)


def _silu_mul_backward(grad: Any, gate: Any, up: Any) -> Any:
    return torch.func.vjp(_functions.silu_mul, gate, up)[1](grad)


def _gelu_mul_backward(grad: Any, gate: Any, up: Any, approximate: str) -> Any:
    return torch.func.vjp(lambda a, b: _functions.gelu_mul(a, b, approximate), gate, up)[1](grad)


def _softmax_backward(grad: Any, y: Any) -> Any:
    return torch.ops.aten._softmax_backward_data(grad, y, -1, y.dtype)


_GRADIENTS: dict[str, Callable[..., Any]] = {
    "rms_norm_backward": _rms_norm_backward,
    "layer_norm_backward": _layer_norm_backward,
    "silu_mul_backward": _silu_mul_backward,
    "gelu_mul_backward": _gelu_mul_backward,
    "softmax_backward": _softmax_backward,
}
# one call of the vendor's, sorts and convolutions, which it hands on, and 4 GB of logits
_LEFT = ("attention", "moe_permute", "moe_combine", "causal_conv1d", "linear_cross_entropy")
OPS = {name: _prepared(name) for name in (*_functions.FORWARD, *_GRADIENTS) if name not in _LEFT}
