"""Which implementations of softmax and cross entropy exist, and under which conditions."""

from __future__ import annotations

from typing import Any

import torch

from ferryman.ops.clauses import (
    Clause,
    at_least,
    at_most,
    contiguous,
    dtypes,
    feature,
    not_multiple_of,
    row_in_registers,
    same_dtype,
    unit_stride,
)
from ferryman.ops.menu import Implementation, menu

# of 16-bit tensors PyTorch's gradient rounds products before it sums them
_OWN = (dtypes("x", torch.float32),)
_OVER = "cross_entropy_inplace_grad cross_entropy_inplace_grad_backward"
# A row is spread over a cluster of up to 8 blocks of 1024 threads, each of which keeps 128 bytes. Up to 16384 classes
# Triton's kernel, too, keeps it in registers and reads it once.
_CLUSTERS = (
    feature("clusters"),
    unit_stride("logits"),
    at_least("logits.shape[-1]", 2**14 + 1),
    at_most("logits.shape[-1]", 2**18 - 64),
)
# Of a gradient nothing is asked: autograd makes it (of a sum it is expanded), and the launcher copies it if need be.
_BACKWARD = (same_dtype("grad", "y"), unit_stride("y"))
# Rows of multiples of 16 are read in whole words by Triton too, and faster: the row streams through.
_ODD = (*_CLUSTERS, not_multiple_of("logits.shape[-1]", 16))

_ROWS: dict[str, Any] = {"replayable": True, "kin": "rows"}
SHORT = 2048  # classes up to which a program of cross entropy takes several rows


def _rows(
    op: str, fits: Clause, module: str = "triton_kernels", tiles: str | None = None
) -> tuple[Implementation, Implementation]:
    """Rows that registers hold, each read once; and rows of any length, in parts."""
    return (
        Implementation(
            op=op, name="triton.rows", where=module, when=(fits,), partial=True, configurations=tiles, **_ROWS
        ),
        Implementation(op=op, name="triton.long", where="long_kernels", **_ROWS),
    )


_TRITON = (
    *_rows("softmax", row_in_registers("x"), tiles="configurations"),
    *_rows("softmax_backward", row_in_registers("y", 2), tiles="configurations_backward"),
    *_rows("cross_entropy", at_most("logits.shape[-1]", SHORT)),
    Implementation(op="cross_entropy_backward", name="triton", replayable=True),
    *_rows("cross_entropy_inplace_grad", row_in_registers("logits", 2), "loss_kernels"),
    Implementation(
        op="cross_entropy_inplace_grad_backward",
        name="triton.flat",
        where="loss_kernels:scale_flat",
        when=(contiguous("out_logits"),),
        leads=(not_multiple_of("out_logits.shape[-1]", 16),),  # whose rows do not begin at whole words
        partial=True,
        **_ROWS,
    ),
    Implementation(
        op="cross_entropy_inplace_grad_backward", name="triton.rows", where="loss_kernels:scale_rows", **_ROWS
    ),
)

IMPLEMENTATIONS = menu(
    "ferryman.ops.softmax",
    Implementation(op="softmax", name="torch", differentiable="softmax", differentiable_when=_OWN),
    Implementation(op=f"softmax_backward cross_entropy cross_entropy_backward {_OVER}", name="torch"),
    *_TRITON,
    Implementation(op="softmax", name="cuda", where="simt_kernels", when=(unit_stride("x"),), replayable=True),
    Implementation(
        op="softmax_backward", name="cuda", where="simt_softmax_backward_kernels", when=_BACKWARD, replayable=True
    ),
    Implementation(
        op="cross_entropy_inplace_grad",
        name="cuda",
        where="simt_loss_kernels",
        when=_CLUSTERS,
        replayable=True,
        partial=True,
    ),
    Implementation(
        op="cross_entropy cross_entropy_backward",
        name="cuda",
        where="simt_loss_kernels",
        when=_ODD,
        replayable=True,
        partial=True,
    ),
    Implementation(op="softmax", name="hip", where="simt_kernels", when=(unit_stride("x"),), replayable=True),
    Implementation(
        op="softmax_backward", name="hip", where="simt_softmax_backward_kernels", when=_BACKWARD, replayable=True
    ),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "softmax": (
        "262ffc011db14fa587f9b2c25a5d3a68774da86a86da56a3c81c974e83c94a6b",
        ("875d82a44d53fbe22f52107a7dca20d742a0f6b4ca05c96e6267621789eebe27",),
    ),
    "softmax_backward": (
        "58df789deefe1402b0e21e272e1e77de8803aa8fd1f5ed3bbd2759a8fc9f3880",
        (
            "9bec723b3ef8c6005a6f5c0ed0f56127190a3959e9013df0f1aa4a3012ceb19b",
            "8986ba77ba52a541d25b3bd8437095bf77025a6e129d83cc82817d1af10a9581",
        ),
    ),
    "cross_entropy": (
        "b6768982e8430889814890d032d1c671be621f0410ba259cbb6920e1b91a5580",
        (
            "1043b74ccfc9f900c17381e0671114943f872313f5158141c49e61047179f3bf",
            "035464df0bd53c66e549a7cc953002910bd0994adbb0e575234cece1923535d6",
        ),
    ),
    "cross_entropy_inplace_grad": (
        "9343c4da946a9d8d053d076aca005e0e65c406f2b9db803657e810bcfd27427e",
        (
            "2095fa6626e7c59dad9c08a559c5ac832da018a9ce35454bf3e0976b8cda0c00",
            "3b0548fe7466999c0cd6dc95886329a72a67d2db2fca0e053237e83438dccc66",
        ),
    ),
    "cross_entropy_inplace_grad_backward": (
        "9827eeeb23df531c5c7c9b549d4e26d91f8b2adb5a5d794d92f495fda079c3a8",
        ("fe618ecbc7a5300869ec883e6a55542fd713835633b8e307d5d894252876faa2",),
    ),
    "cross_entropy_backward": (
        "a0fad00c4bafad7aa968abad8f20503c49586d15c8a9bee658e4a4b57d5fc155",
        ("00af7d52d4a80ad002ec86e42d2c9ab98ee78b2748d4222c373f2b26bc9b7411",),
    ),
}
