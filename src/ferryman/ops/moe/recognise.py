"""Layers of gated experts in models: two weights of three dimensions, and a forward of (x, ids, weights).

Gates that are clipped, or that lie between their products' rows, and experts with biases are none of it, and stay.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from ferryman.ops.moe.bounds import CLAMPED
from ferryman.ops.moe.definition import ACTIVATIONS, MAX_EXPERTS
from ferryman.ops.recognition import Block, Layer

_TOKENS, _CHOSEN = 9, 2
_EXPERTS, _INNER, _WIDTH = 5, 16, 24  # short sides, rows of 16 bytes in 16 bits; none is another's double


def blocks(block: Block) -> Iterator[Layer]:
    if len(block.tensors) != 2 or block.inputs != 3 or any(len(s) != 3 for s in block.tensors.values()):
        return
    for first, second in (tuple(block.tensors), tuple(block.tensors)[::-1]):
        up, down = block.tensors[first], block.tensors[second]
        for turned in (False, True):
            (experts, rows, width), (others, back, inner) = ((x[0], x[2], x[1]) if turned else x for x in (up, down))
            if experts == others <= MAX_EXPERTS and rows == 2 * inner and back == width:
                yield from _layers(first, second, ".mT" if turned else "", experts, width, inner)


def _layers(up: str, down: str, turn: str, experts: int, width: int, inner: int) -> Iterator[Layer]:
    sizes = {inner: _INNER, 2 * inner: 2 * _INNER}
    for side, short in ((experts, _EXPERTS), (width, _WIDTH)):
        sizes.setdefault(side, short)
    for ids, shares in ((1, 2), (2, 1)):
        for activation in (name for name in ACTIVATIONS if name not in CLAMPED):
            yield Layer(
                "moe_experts",
                f"ops.moe_experts(a0, self.{up}{turn}, self.{down}{turn}, a{ids}, a{shares}, {activation!r})",
                sizes,
                functools.partial(_draw, sizes[experts], sizes[width], ids == 1),
                8,
                f"a0.dim() == 2 and a{ids}.dim() == 2 and a{shares}.shape == a{ids}.shape"
                f" and a{ids}.shape[0] == a0.shape[0] and a0.dtype is self.{up}.dtype and a0.dtype is self.{down}.dtype"
                f" and a0.dtype.itemsize < 8 and (a{ids}.dtype is torch.int64 or a{ids}.dtype is torch.int32)"
                f" and a{shares}.dtype.is_floating_point and a{shares}.dtype.itemsize < 8",
            )


def _draw(experts: int, width: int, ids_first: bool, seed: int) -> tuple[Tensor, ...]:
    """Seeds 0 to 2: every id is an expert's. Later: numbers so large and small that a clamp shows, ids one beyond the
    experts, an expert that is chosen twice, no tokens, one token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = {6: 0, 7: 1}.get(seed, _TOKENS)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    if seed in (1, 3):
        x = x * (30.0 if seed == 1 else 3e4)
    if seed == 5:
        x = x * torch.exp2(torch.linspace(-40, 40, tokens, dtype=torch.float64))[:, None]
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:_CHOSEN] for _ in range(max(tokens, 1))])
    ids = chosen[:tokens]
    if seed >= 4 and tokens:
        ids = torch.randint(experts + 1, (tokens, _CHOSEN), generator=generator)
        ids[0] = ids[0, 0]
    shares = torch.randn(tokens, _CHOSEN, generator=generator, dtype=torch.float64)
    return (x, ids, shares) if ids_first else (x, shares, ids)
