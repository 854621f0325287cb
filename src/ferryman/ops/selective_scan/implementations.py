"""Which implementations of `selective_scan` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import at_least, at_most
from ferryman.ops.menu import Implementation, menu

# a program's part of the state, 16 channels of it and more, stays in registers
_STATE = (at_most("b.shape[2]", 256),)

IMPLEMENTATIONS = menu(
    "ferryman.ops.selective_scan",
    Implementation(op="selective_scan selective_scan_backward", name="torch", composed=True),
    Implementation(
        op="selective_scan",
        name="triton.blocks",
        where=":blocks",
        when=(*_STATE, at_least("x.shape[1]", 2)),
        batch_invariant=True,
        replayable=True,
        partial=True,
    ),
    Implementation(op="selective_scan", name="triton.tokens", when=_STATE, batch_invariant=True, replayable=True),
    Implementation(
        op="selective_scan_backward",
        name="triton",
        where="backward_kernels",
        when=_STATE,
        batch_invariant=True,
        replayable=True,
    ),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "selective_scan": (
        "592a0a8aafa1bd912b4de2bf5ac35cc8e23a73d72352e173ad7b0a048d225a5e",
        ("5fb74705b446242610d6e1c5b9483d6ac36debc3e11fdbaf0bc3e676e2bd0511",),
    ),
    "selective_scan_backward": (
        "656a5b510958a191a67bc31ed13dc58e849007574aad2e8560e8f8ba7135c9b2",
        ("6e91dd5c140fcbcb6efb99586a0b2397b0e7f2f942a51a218555f52e92fce4cb",),
    ),
}
