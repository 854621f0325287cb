"""Mamba2's scan as a loop over tokens that a model writes out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ferryman.ops.recognition import Recurrence, normal, sizes_of_heads

_SIZES = sizes_of_heads("BLHPN")
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
                _SIZES,
                _FINITE,
                steady=steady,
            )


def _drawn(words: tuple[str, ...], sizes: Mapping[str, int], seed: int) -> tuple[Tensor, ...]:
    """x, dt, a, b and c of a seed."""
    x, dt, a, b, c = normal(words, sizes, seed)
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
