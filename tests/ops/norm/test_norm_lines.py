"""Which of Triton's kernels serves which rows: what its launchers chose before each was a line of the menu."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from tests.lines import launched, rows_launched

pytest.importorskip("triton")

FORWARD = {"triton.rows": ["_norm"], "triton.long": ["_norm_long"]}
# with a gradient of a weight or bias
BACKWARD = {
    "triton.rows": ["_norm_backward", "_sum_partials"],
    "triton.columns": ["_norm_backward", "_norm_columns", "_sum_partials"],
    "triton.long": ["_norm_long_backward", "_norm_columns", "_sum_partials"],
}
OPS = ("rms_norm", "add_rms_norm", "layer_norm", "add_layer_norm")


def _args(op: str, x: torch.Tensor, w: torch.Tensor | None, sum_too: bool) -> tuple[Any, ...]:
    parameters = (w, 1e-6) if "rms" in op else (w, w, 1e-5)
    if op.endswith("_backward"):
        extra = (x if sum_too else None,) if op.startswith("add") else ()
        return (x, *extra, x, *parameters)
    others = (x,) if op.startswith("add") else ()
    return (x, *others, *parameters, *((False,) if "rms" in op else ()))


def _expected(op: str, width: int, itemsize: int, weighted: bool, sum_too: bool) -> str:
    """64 KiB of registers for padded rows, two at once where there is a residual or a gradient; for the sums over rows
    up to 8192 columns, and half as many in float32 of a layer norm with a sum."""
    padded, backward = 1 << (width - 1).bit_length(), op.endswith("_backward")
    if padded * itemsize * (2 if backward or op.startswith("add") else 1) > 65_536:
        return "triton.long"
    most = 4096 if op == "add_layer_norm_backward" and sum_too and itemsize == 4 else 8192
    return "triton.columns" if backward and weighted and width > most else "triton.rows"


@pytest.mark.parametrize("device", ["h200", "a100", "mi300x", "rx7900xtx"])
@pytest.mark.parametrize("op", [*OPS, *(f"{op}_backward" for op in OPS)])
def test_rows_go_to_the_kernels_that_they_went_to(op: str, device: str) -> None:
    drawn, known = random.Random(f"{op} {device}"), profile(device)
    widths = [1, 4096, 4097, 8192, 8193, 16_384, 16_385, 32_768, 32_769, 131_072]
    widths += [max(1, int(2 ** drawn.uniform(0, 18))) for _ in range(40)]
    lines = set()
    for number, width in enumerate(widths):
        dtype = drawn.choice((torch.float32, torch.float16, torch.bfloat16))
        weighted = number < 10 or drawn.random() < 0.7
        sum_too = op == "add_rms_norm_backward" or drawn.random() < 0.7
        x = torch.empty(drawn.choice((1, 100, 5000)), width, dtype=dtype, device="meta")
        w = torch.empty(width, dtype=dtype, device="meta") if weighted else None
        name, kernels = launched(op, _args(op, x, w, sum_too), known)
        expected = _expected(op, width, dtype.itemsize, weighted, sum_too)
        if not op.endswith("_backward"):
            assert (name, kernels) == (expected, FORWARD[expected]), (width, dtype)
        else:
            assert (name, kernels) == (expected, BACKWARD[expected] if weighted else BACKWARD[expected][:1]), width
        lines.add(name)
    assert lines == set(BACKWARD if op.endswith("_backward") else FORWARD)


@pytest.mark.parametrize("op", OPS)
def test_a_tile_of_another_size_is_a_configuration(op: str) -> None:
    for width in (64, 1000, 8192):
        x, w = (torch.empty(s, dtype=torch.bfloat16, device="meta") for s in ((100_000, width), (width,)))
        tiles = rows_launched(op, _args(op, x, w, True), profile("h200"))
        plan, own, *others = tiles.values()
        assert plan == own and len(set(others)) == len(others) >= 2 and own not in others
        assert list(tiles)[1:] == [f"rows_{r}_warps_{w}" for r, w in (own, *others)]
    assert registry.implementation(op, "triton.rows").ranked_configurations(_args(op, x[:0], w, True), None) == {}
