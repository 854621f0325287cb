"""Which implementations of `ssd_scan` exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import View, at_least, at_most, threshold
from ferryman.ops.menu import Implementation, menu


def _state(view: View) -> int:
    x, b = view.args["x"], view.args["b"]
    return int(x.shape[0] * x.shape[2] * x.shape[3] * b.shape[-1])


# Of one token nothing is a scan: PyTorch's steps read the state as often as Triton's passes, and more at once.
_ONE_TOKEN = (
    at_most("x.shape[1]", 1),
    threshold("ssd_scan.torch.state", "numbers of the state", ("x.shape", "b.shape"), _state),
)

_FEW = (at_most("x.shape[1]", 16), at_most("b.shape[3]", 256))  # a program's rows of the state stay in registers
# two chunks: one shares nothing with others
_MANY = at_least("x.shape[1]", 65)

IMPLEMENTATIONS = menu(
    "ferryman.ops.ssd_scan",
    Implementation(op="ssd_scan", name="torch", composed=True),
    Implementation(op="ssd_scan_backward", name="torch", composed=True, leads=_ONE_TOKEN),
    Implementation(
        op="ssd_scan",
        name="triton.recurrent",
        where="few_kernels",
        when=_FEW,
        batch_invariant=True,
        replayable=True,
        partial=True,
    ),
    Implementation(
        op="ssd_scan",
        name="triton.parallel",
        where="parallel_kernels",
        when=(_MANY,),
        batch_invariant=True,
        replayable=True,
        partial=True,
    ),
    Implementation(op="ssd_scan", name="triton.chunked", batch_invariant=True, replayable=True),
    Implementation(op="ssd_scan_backward", name="triton", batch_invariant=True, replayable=True),
)

# What a lockfile of version 7 was measured with: the same code, whose variables had other names.
SAME_KERNELS = {
    "ssd_scan": ("b8300986b5e9771bc00f656f4327169e796d9ae30830d4477ed089d6252351a3",),
    "ssd_scan_backward": ("07a83e009405afe314b51bbe6d2e61381e7657ef35a1031bf802978c51b3fe44",),
}
