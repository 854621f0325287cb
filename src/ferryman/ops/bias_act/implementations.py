"""Which implementations of `bias_act` exist; none has a condition but PyTorch's own differentiable call.

No C++ form: an element is read, computed and written by one thread, which Triton's kernel does with the same 16-byte
loads and stores that C++ would have, and no thread needs another's.
"""

from __future__ import annotations

from ferryman.ops.clauses import absent, one_of
from ferryman.ops.menu import Implementation, menu

_OPS = "bias_act bias_act_backward"
# PyTorch takes the gradients of tanh and sigmoid from a rounded result, rounds between the kernels of relu2, and is
# wrong at NaN for elu and hardswish.
_OWN = (absent("bias"), one_of("activation", "gelu", "gelu_tanh", "silu", "relu", "leaky_relu"))

IMPLEMENTATIONS = menu(
    "ferryman.ops.bias_act",
    Implementation(op="bias_act", name="torch", differentiable="bias_act_with_gradient", differentiable_when=_OWN),
    Implementation(op="bias_act_backward", name="torch"),
    Implementation(op=_OPS, name="triton", batch_invariant=True, replayable=True),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "bias_act": (
        "2eaab285062671237f268b3b4bef78221c7b04edd7c11ab896e9abe21b62fe5e",
        ("9e311ffbe2ddbde71f18d56ef3fae05f331dce3824ed2df25bf586c5daf146c7",),
    ),
}
