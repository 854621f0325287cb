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

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "ssd_scan": (
        "b1ee8d9ce728d1a6dfea738538959d9de682fd25ae2c6966f260e7dbe51ff61e",
        ("b8300986b5e9771bc00f656f4327169e796d9ae30830d4477ed089d6252351a3",),
    ),
    "ssd_scan_backward": (
        "0a0c20443820e7a6e3fcd186a070e311d567a086e79a60268fd974dc3546b865",
        ("07a83e009405afe314b51bbe6d2e61381e7657ef35a1031bf802978c51b3fe44",),
    ),
}
