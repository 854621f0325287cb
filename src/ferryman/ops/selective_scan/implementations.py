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

# What a lockfile of version 6 was measured with: the same kernels, launched alike, chosen in the launcher; and one of
# version 7: the same code, whose variables had other names.
SAME_KERNELS = {
    "selective_scan": ("5fb74705b446242610d6e1c5b9483d6ac36debc3e11fdbaf0bc3e676e2bd0511",),
    "selective_scan_backward": ("6e91dd5c140fcbcb6efb99586a0b2397b0e7f2f942a51a218555f52e92fce4cb",),
}
