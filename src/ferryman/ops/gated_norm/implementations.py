"""Which implementations of the gated norm exist, and under which conditions."""

from __future__ import annotations

from ferryman.ops.clauses import Clause, View, one_of, row_in_registers, threshold
from ferryman.ops.menu import Implementation, menu

_OPS = "gated_rms_norm gated_rms_norm_backward"
_MANY = 1 << 24
MOST_COLUMNS = 4096  # of a padded group, beside whose gradients registers hold the weight's sums


def _columns_of_many(view: View) -> int:
    """Columns of a group; 0 of a small x, whose rows wait for no memory."""
    x, size = view.args["x"], view.args["group_size"]
    return 0 if x.numel() < _MANY else int(x.shape[-1] if size is None else size)


# A gate that follows the norm is not held beside x, which L1 gives again.
_READ_TWICE = (
    one_of("norm_before_gate", True),
    threshold(
        "gated_rms_norm.long.columns",
        f"columns of a group, of {_MANY} elements or more",
        ("x.shape", "group_size"),
        _columns_of_many,
    ),
)


def _rows(op: str, fits: Clause) -> Implementation:
    return Implementation(op=op, name="triton.rows", when=(fits,), replayable=True, partial=True, kin="rows")


IMPLEMENTATIONS = menu(
    "ferryman.ops.gated_norm",
    Implementation(op=_OPS, name="torch"),
    _rows("gated_rms_norm", row_in_registers("x", 2, size="group_size", beside=("gate",))),
    _rows(
        "gated_rms_norm_backward",
        row_in_registers("x", 4, size="group_size", beside=("gate", "grad"), most=MOST_COLUMNS),
    ),
    Implementation(
        op="gated_rms_norm", name="triton.long", where="long_kernels", leads=_READ_TWICE, replayable=True, kin="rows"
    ),
    Implementation(op="gated_rms_norm_backward", name="triton.long", where="long_kernels", replayable=True, kin="rows"),
)

# By op: the digest of today's kernels, and those of earlier code that launched the same.
SAME_KERNELS = {
    "gated_rms_norm": (
        "5b342fb9dec6db0aa5363eeb0913749a64311ba6eff784f372175e1e5d65228d",
        ("ce74e9f4a780d102912e4c9e0d1ef7a360eaefd1d747700fa08f38153c041fba",),
    ),
    "gated_rms_norm_backward": (
        "d7da84a22182b91d9c835c8451ebd7775c0f63866e2e6c4fd5c79358546ecb2f",
        ("51b2c90215d57f83a2741b7a2131884cc313d4a06a3ee9fe26da66549c5eb821",),
    ),
}
