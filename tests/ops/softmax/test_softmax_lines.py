"""Which of Triton's kernels serves which rows: what its launchers chose before each was a line of the menu."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch

import ferryman
from ferryman.device_profiles import profile
from tests.lines import launched, rows_launched

pytest.importorskip("triton")

KERNELS = {
    "softmax": {"triton.rows": ["_softmax"], "triton.long": ["_softmax_long"]},
    "softmax_backward": {"triton.rows": ["_softmax_backward"], "triton.long": ["_softmax_long_backward"]},
    "cross_entropy": {"triton.rows": ["_loss_short", "_mean_loss"], "triton.long": ["_loss", "_mean_loss"]},
    "cross_entropy_inplace_grad": {
        "triton.rows": ["_inverse_count", "_loss_over_short", "_mean_loss"],
        "triton.long": ["_inverse_count", "_loss_over", "_mean_loss"],
    },
}


def _args(op: str, rows: int, width: int, dtype: torch.dtype) -> tuple[Any, ...]:
    x = torch.empty(rows, width, dtype=dtype, device="meta")
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    return {"softmax": (x,), "softmax_backward": (x, x)}.get(op, (x, labels, -100, 0.0))


def _holds(op: str, width: int, itemsize: int) -> bool:
    """64 KiB of registers for padded rows, the backward and the loss two at once; few classes for the loss alone."""
    if op == "cross_entropy":
        return width <= 2048
    padded = 1 << (width - 1).bit_length()
    return padded * itemsize * (1 if op == "softmax" else 2) <= 65_536


@pytest.mark.parametrize("device", ["h200", "a100", "mi300x", "rx7900xtx"])
@pytest.mark.parametrize("op", KERNELS)
def test_rows_go_to_the_kernel_that_they_went_to(op: str, device: str) -> None:
    drawn, known = random.Random(f"{op} {device}"), profile(device)
    widths = [1, 2048, 2049, 8192, 8193, 16_384, 16_385, 32_768, 32_769, 128_256]
    widths += [max(1, int(2 ** drawn.uniform(0, 18))) for _ in range(40)]
    lines = set()
    for width in widths:
        dtype = drawn.choice((torch.float32, torch.float16, torch.bfloat16))
        name, kernels = launched(op, _args(op, drawn.choice((1, 100, 5000)), width, dtype), known)
        expected = "triton.rows" if _holds(op, width, dtype.itemsize) else "triton.long"
        assert (name, kernels) == (expected, KERNELS[op][expected]), (width, dtype)
        lines.add(name)
    assert lines == set(KERNELS[op])


def test_a_gradient_without_gaps_is_scaled_flat() -> None:
    grad, x = torch.empty((), device="meta"), torch.empty(8, 128, device="meta")
    op = "cross_entropy_inplace_grad_backward"
    assert launched(op, (grad, x), profile("h200")) == ("triton.flat", ["_scale_flat"])
    assert launched(op, (grad, x[:, :100]), profile("h200")) == ("triton.rows", ["_scale_over"])
    assert launched("cross_entropy_backward", (grad, x, grad, grad, -100, 0.0), profile("h200")) == (
        "triton",
        ["_mean_loss", "_loss_backward"],
    )


@pytest.mark.parametrize("op", ["softmax", "softmax_backward"])
def test_a_tile_of_another_size_is_a_configuration(op: str) -> None:
    """The plan's own first, and with it beside it tiles of half and twice its rows or warps, each launched as named."""
    for width in (64, 1000, 8192):
        tiles = rows_launched(op, _args(op, 100_000, width, torch.bfloat16), profile("h200"))
        plan, own, *others = tiles.values()
        assert plan == own and len(set(others)) == len(others) >= 2 and own not in others
        assert list(tiles)[1:] == [f"rows_{r}_warps_{w}" for r, w in (own, *others)]
        assert all(sorted((r / own[0], w / own[1])) in ([1, 2], [0.5, 1]) for r, w in others)
    # rows so far apart that more in a tile would overflow
    wide = torch.empty(70_000, 2**25, dtype=torch.bfloat16, device="meta")[:, :64]
    tiles = rows_launched(op, (wide,) if op == "softmax" else (wide, wide), profile("h200"))
    assert all(rows * 2**25 < 2**31 for rows, _ in tiles.values())


@pytest.mark.parametrize(("classes", "line"), [(128_256, "triton.rows"), (50_257, "triton.flat")])
def test_a_gradient_of_odd_rows_is_scaled_flat_on_hopper(classes: int, line: str) -> None:
    grad, x = torch.empty((), device="meta"), torch.empty(512, classes, dtype=torch.bfloat16, device="meta")
    assert ferryman.explain("cross_entropy_inplace_grad_backward", grad, x, device="h100").chosen == line
