"""Mamba's scan as a loop over tokens that a model writes out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ferryman.ops.recognition import Recurrence, normal

_SEEDS = (
    {"B": 2, "L": 7, "D": 5, "N": 3},
    {"B": 1, "L": 6, "D": 4, "N": 7},
    {"B": 3, "L": 2, "D": 6, "N": 2},
    {"B": 2, "L": 1, "D": 4, "N": 5},
    {"B": 1, "L": 5, "D": 6, "N": 3},
    {"B": 1, "L": 9, "D": 3, "N": 4},
    {"B": 2, "L": 8, "D": 4, "N": 2},
    {"B": 1, "L": 19, "D": 3, "N": 2},
    {"B": 2, "L": 5, "D": 4, "N": 3},
    {"B": 1, "L": 3, "D": 4, "N": 3},
    {"B": 1, "L": 4, "D": 4, "N": 3},
)


def recurrences() -> Iterator[Recurrence]:
    """x, dt, a (also as the logarithm of its negative), b and c."""
    expressions = tuple(f"ops.selective_scan(a0, a1, {a}, a3, a4)[0]" for a in ("a2", "-torch.exp(a2)"))
    axes = ("BLD", "BLD", "DN", "BLN", "BLN")
    draw = functools.partial(_drawn, axes)
    yield Recurrence("selective_scan", expressions, axes, "BLD", ("BDN", "BND"), draw, _SEEDS, 10)


def _drawn(words: tuple[str, ...], sizes: Mapping[str, int], seed: int) -> tuple[Tensor, ...]:
    """x, dt, a, b and c of a seed."""
    x, dt, a, b, c = normal(words, sizes, seed)
    a = -0.2 - a.abs()
    if seed == 4:  # what is bounded from above is bounded here
        dt, a = torch.where(dt > 0, 29.0 + dt, dt), 0.01 * a
        b, c = 40.0 * b, 40.0 * c
    if seed == 5:
        x, a = 300.0 * x, 8.0 * a
    if seed == 6:
        x, dt, b, c = (2.0**-10 * t for t in (x, dt, b, c))
    if seed == 8:
        for t in (x, dt, b, c):
            t[:, 1::2] = 0.0
    if seed == 9:
        a = 0.3 * a.abs()
    if seed == 10:
        x[:, -1, 0], x[:, -1, 1] = torch.nan, torch.inf
    return x, dt, a, b, c
