"""The ops that model code calls. Each is its own specification; which implementation runs is `ferryman.dispatch`'s."""

from ferryman.ops.activation.definition import gelu_mul, gelu_mul_backward, silu_mul, silu_mul_backward
from ferryman.ops.attention.definition import attention, attention_backward
from ferryman.ops.matmul.definition import linear, linear_backward
from ferryman.ops.norm.definition import (
    add_rms_norm,
    add_rms_norm_backward,
    layer_norm,
    layer_norm_backward,
    rms_norm,
    rms_norm_backward,
)
from ferryman.ops.rope.definition import rope, rope_, rope_backward
from ferryman.ops.softmax.definition import (
    cross_entropy,
    cross_entropy_backward,
    cross_entropy_inplace_grad,
    cross_entropy_inplace_grad_backward,
    softmax,
    softmax_backward,
)

__all__ = [
    "add_rms_norm", "add_rms_norm_backward", "attention", "attention_backward", "cross_entropy",
    "cross_entropy_backward", "cross_entropy_inplace_grad", "cross_entropy_inplace_grad_backward", "gelu_mul",
    "gelu_mul_backward", "layer_norm", "layer_norm_backward", "linear", "linear_backward", "rms_norm",
    "rms_norm_backward", "rope", "rope_", "rope_backward", "silu_mul", "silu_mul_backward", "softmax",
    "softmax_backward",
]  # fmt: skip
