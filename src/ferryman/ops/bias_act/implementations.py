"""Which implementations of `bias_act` exist; a bias's gradient is a pass over columns.

No C++ form: an element is read, computed and written by one thread, which Triton's kernel does with the same 16-byte
loads and stores that C++ would have, and no thread needs another's.
"""

from __future__ import annotations

from typing import Any

from ferryman.ops.clauses import absent, one_of, unless
from ferryman.ops.menu import Implementation, menu

# PyTorch takes the gradients of tanh and sigmoid from a rounded result, rounds between the kernels of relu2, and is
# wrong at NaN for elu and hardswish.
_OWN = (absent("bias"), one_of("activation", "gelu", "gelu_tanh", "silu", "relu", "leaky_relu"))

_GRADIENT: dict[str, Any] = {"op": "bias_act_backward", "batch_invariant": True, "replayable": True, "partial": True}
_PLAIN = absent("bias")
_BACKWARD = (
    Implementation(name="triton.plain", when=(_PLAIN,), **_GRADIENT),
    Implementation(name="triton.columns", where=":bias_act_backward_columns", when=(unless(_PLAIN),), **_GRADIENT),
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.bias_act",
    Implementation(op="bias_act", name="torch", differentiable="bias_act_with_gradient", differentiable_when=_OWN),
    Implementation(op="bias_act_backward", name="torch"),
    Implementation(op="bias_act", name="triton", batch_invariant=True, replayable=True),
    *_BACKWARD,
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "bias_act": (
        "3484ce93a0a7f94d0966efb985d6c16ca5e9388402b0ee000adab68195fc820f",
        ("9e311ffbe2ddbde71f18d56ef3fae05f331dce3824ed2df25bf586c5daf146c7",),
    ),
}
