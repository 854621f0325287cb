"""Which of Triton's kernels serves which groups: what its launchers chose before each was a line of the menu."""

from __future__ import annotations

import random

import pytest
import torch

from ferryman.device_profiles import profile
from tests.lines import launched

pytest.importorskip("triton")

FORWARD = {"triton.rows": ["_gated_norm"], "triton.long": ["_gated_norm_long"]}
# with a gradient of a weight
BACKWARD = {
    "triton.rows": ["_gated_norm_backward", "_sum_partials"],
    "triton.long": ["_gated_norm_long_backward", "_gated_columns", "_sum_partials"],
}


def _expected(group: int, itemsize: int, backward: bool) -> str:
    """64 KiB of registers for padded groups, two at once, of a backward four and no more than 4096 columns."""
    padded = 1 << (group - 1).bit_length()
    fits = padded * itemsize * (4 if backward else 2) <= 65_536
    return "triton.rows" if fits and not (backward and padded > 4096) else "triton.long"


@pytest.mark.parametrize("device", ["h200", "a100", "mi300x", "rx7900xtx"])
@pytest.mark.parametrize("backward", [False, True])
def test_groups_go_to_the_kernels_that_they_went_to(backward: bool, device: str) -> None:
    drawn, known = random.Random(f"{backward} {device}"), profile(device)
    sizes = [(1, None), (4096, None), (4097, None), (8192, 4096), (16_384, None), (16_385, None), (65_536, 1024)]
    sizes += [(max(1, int(2 ** drawn.uniform(0, 17))), None) for _ in range(40)]
    lines = set()
    for width, group in sizes:
        dtypes = [drawn.choice((torch.float32, torch.float16)) for _ in range(3)]
        grad, x, gate = (torch.empty(drawn.choice((1, 100)), width, dtype=d, device="meta") for d in dtypes)
        w = torch.empty(width, device="meta") if drawn.random() < 0.7 else None
        options = (True, "silu") if backward else (True, False, "silu")
        op, kernels = ("gated_rms_norm_backward", BACKWARD) if backward else ("gated_rms_norm", FORWARD)
        args = (*((grad,) if backward else ()), x, gate, w, 1e-6, group, *options)
        itemsize = max(d.itemsize for d in (dtypes if backward else dtypes[1:]))
        expected = _expected(group or width, itemsize, backward)
        launches = kernels[expected] if w is not None or not backward else kernels[expected][:1]
        assert launched(op, args, known) == (expected, launches), (width, group, dtypes)
        lines.add(expected)
    assert lines == set(FORWARD)
