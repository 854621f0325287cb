"""Mamba2's scan as a loop over tokens that a model writes out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ferryman.ops.recognition import Recurrence

_SEEDS = (
    {"B": 2, "L": 7, "H": 3, "P": 5, "N": 4},
    {"B": 1, "L": 6, "H": 2, "P": 4, "N": 7},
    {"B": 3, "L": 2, "H": 4, "P": 6, "N": 2},
    {"B": 2, "L": 1, "H": 2, "P": 4, "N": 5},
    {"B": 1, "L": 5, "H": 3, "P": 6, "N": 3},
    {"B": 1, "L": 9, "H": 1, "P": 3, "N": 4},
    {"B": 2, "L": 8, "H": 2, "P": 4, "N": 3},
    {"B": 1, "L": 19, "H": 2, "P": 3, "N": 2},
    {"B": 2, "L": 5, "H": 3, "P": 4, "N": 5},
    {"B": 1, "L": 4, "H": 2, "P": 4, "N": 3},
)
_FINITE = 9
_SPAN = 256  # tokens whose exponents an implementation may sum
_DEEP = 64.0  # such a sum's, which leaves float32 its digits


def recurrences() -> Iterator[Recurrence]:
    """x, dt, a (also as the logarithm of its negative), b and c, of all heads or of each."""
    for of_heads in ("BLN", "BLHN"):
        axes = ("BLHP", "BLH", "H", of_heads, of_heads)
        b, c = ("a3", "a4") if of_heads == "BLHN" else ("a3.unsqueeze(2)", "a4.unsqueeze(2)")
        for rate in ("a2", "-torch.exp(a2)"):
            steps = f"(a1 * {rate})"
            sums = (
                f"({steps}.cumsum(1) - torch.nn.functional.pad({steps}.cumsum(1), (0, 0, {_SPAN}, 0))[:, :a1.shape[1]])"
            )
            steady = ((steps, -_DEEP, 0.0), (sums, -_DEEP, 1e9))
            draw = functools.partial(_drawn, axes)
            yield Recurrence(
                "ssd_scan",
                (f"ops.ssd_scan(a0, a1, {rate}, {b}, {c})[0].view(a0.shape)",),  # one sequence may have another stride
                axes,
                "BLHP",
                ("BHPN", "BHNP"),
                draw,
                _SEEDS,
                _FINITE,
                steady=steady,
            )


def _drawn(words: tuple[str, ...], sizes: Mapping[str, int], seed: int) -> tuple[Tensor, ...]:
    """x, dt, a, b and c of a seed."""
    generator = torch.Generator().manual_seed(seed)
    x, dt, a, b, c = (
        torch.randn([sizes[axis] for axis in word], generator=generator, dtype=torch.float64) for word in words
    )
    dt, a = 0.2 * dt.abs(), -0.2 - a.abs()
    if seed == 4:
        b, c = 40.0 * b, 40.0 * c
    if seed == 5:
        x, dt = 300.0 * x, 4.0 * dt
    if seed == 6:
        x, dt, b, c = (2.0**-10 * t for t in (x, dt, b, c))
    if seed == 8:
        for t in (x, dt, b, c):
            t[:, 1::2] = 0.0
    if seed == 9:
        x[:, -1, 0], x[:, -1, 1] = torch.nan, torch.inf
    return x, dt, a, b, c
