"""The gated delta rule as a loop over tokens that a model writes out."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ferryman.ops.recognition import Recurrence, normal, sizes_of_heads

_SIZES = sizes_of_heads("BLHKV")
_FINITE = 9
_SPAN = 64  # tokens whose decays an implementation may sum
_DEEP = 64.0  # such a sum's, which leaves float32 its digits
# more than it, and no state stays bounded: each token may then give more than its share
_MOST = 2.0


def recurrences() -> Iterator[Recurrence]:
    """q, k, v, the logarithm of the decay and beta; or without the decay. With the usual scale, or none."""
    scales = ("None", "1.0")
    states = ("BHKV", "BHVK")
    for axes in (("BLHK", "BLHK", "BLHV", "BLH", "BLH"), ("BLHK", "BLHK", "BLHV", "BLH")):
        decays = len(axes) == 5
        g, beta = ("a3", "a4") if decays else ("None", "a3")
        expressions = tuple(f"ops.gated_delta_rule(a0, a1, a2, {g}, {beta}, None, {scale})[0]" for scale in scales)
        steady = [(f"{beta} * a1.square().sum(-1)", 0.0, _MOST), (beta, 0.0, _MOST)]
        if decays:
            sums = f"(a3.cumsum(1) - torch.nn.functional.pad(a3.cumsum(1), (0, 0, {_SPAN}, 0))[:, :a3.shape[1]])"
            steady += [("a3", -_DEEP, 0.0), (sums, -_DEEP, 1e9)]
        draw = functools.partial(_drawn, axes)
        yield Recurrence(
            "gated_delta_rule", expressions, axes, "BLHV", states, draw, _SIZES, _FINITE, steady=tuple(steady)
        )


def _drawn(words: tuple[str, ...], sizes: Mapping[str, int], seed: int) -> tuple[Tensor, ...]:
    """q, k, v, perhaps g, and beta of a seed."""
    q, k, v, *g, beta = normal(words, sizes, seed)
    k, beta = k * (0.5 + 0.5 * torch.sigmoid(k)) / k.norm(dim=-1, keepdim=True), torch.sigmoid(beta)  # no unit vectors
    g = [-0.2 * x.abs() * (6.0 if seed == 4 else 1.0) for x in g]
    if seed == 4:
        beta = 2.0 * beta
    if seed == 5:
        q, v = 300.0 * q, 40.0 * v
    if seed == 6:
        q, k, v = (2.0**-10 * x for x in (q, k, v))
    if seed == 8:
        for x in (q, k, v, beta):
            x[:, 1::2] = 0.0
    if seed == 9:
        v[:, -1, 0], v[:, -1, 1] = torch.nan, torch.inf
    return q, k, v, *g, beta
