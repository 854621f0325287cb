"""Mamba's scan as a loop over tokens that a model writes out."""

from __future__ import annotations

import functools
from collections.abc import Iterator

from ferryman.ops.recognition import Recurrence
from ferryman.ops.ssd_scan.loops import drawn

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
    draw = functools.partial(drawn, axes)
    yield Recurrence("selective_scan", expressions, axes, "BLD", ("BDN", "BND"), draw, _SEEDS, 10)
