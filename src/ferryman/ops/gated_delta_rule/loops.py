"""The gated delta rule as a loop over tokens that a model writes out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ferryman.ops.recognition import Recurrence

_SEEDS = (
    {"B": 2, "L": 7, "H": 4, "K": 5, "V": 3},
    {"B": 1, "L": 6, "H": 3, "K": 4, "V": 2},
    {"B": 3, "L": 2, "H": 1, "K": 4, "V": 6},
    {"B": 2, "L": 1, "H": 4, "K": 3, "V": 2},
    {"B": 1, "L": 3, "H": 2, "K": 5, "V": 3},
    {"B": 1, "L": 9, "H": 3, "K": 3, "V": 2},
    {"B": 2, "L": 8, "H": 1, "K": 3, "V": 2},
    {"B": 1, "L": 19, "H": 2, "K": 3, "V": 4},
    {"B": 2, "L": 5, "H": 2, "K": 4, "V": 3},
    {"B": 1, "L": 3, "H": 2, "K": 4, "V": 3},
    {"B": 1, "L": 4, "H": 2, "K": 4, "V": 3},
)


def recurrences() -> Iterator[Recurrence]:
    """q, k, v, the logarithm of a decay or none, and beta; keys of as many heads as values."""
    for decay in (True, False):
        g, beta = ("a3", "a4") if decay else ("None", "a3")
        call = "ops.gated_delta_rule(a0, a1, a2, {}, {}, None, {}, {})[0]"
        expressions = tuple(
            call.format(g, beta, scale, normed) for normed in (False, True) for scale in ("1.0", "None")
        )
        axes = ("BLHK", "BLHK", "BLHV", *["BLH"] * (1 + decay))
        draw = _decaying if decay else _plain
        yield Recurrence("gated_delta_rule", expressions, axes, "BLHV", ("BHKV", "BHVK"), draw, _SEEDS, 10)


def _plain(sizes: Mapping[str, int], seed: int) -> tuple[Tensor, ...]:
    q, k, v, _, beta = _decaying(sizes, seed)
    return q, k, v, beta


def _decaying(sizes: Mapping[str, int], seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    words = ("BLHK", "BLHK", "BLHV", "BLH", "BLH")
    q, k, v, g, beta = (
        torch.randn([sizes[axis] for axis in word], generator=generator, dtype=torch.float64) for word in words
    )
    k, g, beta = k / sizes["K"] ** 0.5, -g.abs() * (9.0 if seed == 4 else 0.5), torch.sigmoid(beta)
    if seed == 4:  # what is bounded from above is bounded here
        q, k, beta = 40.0 * q, 12.0 * k, 12.0 * beta
    if seed == 5:  # so small that what is added to a square decides
        q, k = 2.0**-10 * q, 2.0**-10 * k
    if seed == 6:
        v, g = 300.0 * v, 0.0 * g
    if seed == 8:
        for x in (q, k, v, beta):
            x[:, 1::2] = 0.0
    if seed == 9:
        g, beta = 0.5 * g.abs(), -beta
    if seed == 10:
        v[:, -1, 0, 1], v[:, -1, 1, 0] = torch.nan, torch.inf
    return q, k, v, g, beta
