"""Layers of gated experts in models: two weights of three dimensions, perhaps a bias for each, and a forward of
(x, ids, weights). Gates with a bound go by proof like the others: what cuts elsewhere than the op stays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from ferryman.ops.moe.definition import ACTIVATIONS, MAX_EXPERTS
from ferryman.ops.recognition import Block, Layer

_TOKENS, _CHOSEN = 9, 2
_EXPERTS, _INNER, _WIDTH = 5, 16, 24  # short sides, rows of 16 bytes in 16 bits; none is another's double
_SEEDS, _BEYOND = 10, 2


def blocks(block: Block) -> Iterator[Layer]:
    weights = [n for n, s in block.tensors.items() if len(s) == 3]
    biases = [n for n, s in block.tensors.items() if len(s) == 2]
    if len(weights) != 2 or len(biases) not in (0, 2) or len(block.tensors) != 2 + len(biases) or block.inputs != 3:
        return
    for first, second in (tuple(weights), tuple(weights)[::-1]):
        up, down = block.tensors[first], block.tensors[second]
        for turned in (False, True):
            (experts, rows, width), (others, back, inner) = ((x[0], x[2], x[1]) if turned else x for x in (up, down))
            if not (experts == others <= MAX_EXPERTS and rows == 2 * inner and back == width):
                continue
            for pair in (tuple(biases), tuple(biases)[::-1]) if biases else ((),):
                if [block.tensors[n] for n in pair] == [(experts, rows), (experts, width)][: len(pair)]:
                    given = f"a0, self.{first}{'.mT' * turned}, self.{second}{'.mT' * turned}"
                    bias = f", torch.cat((self.{pair[0]}, self.{pair[1]}), 1)" if pair else ""
                    yield from _layers(block, given, bias, (first, second, *pair), experts, width, inner)


def _layers(
    block: Block, given: str, bias: str, names: tuple[str, ...], experts: int, width: int, inner: int
) -> Iterator[Layer]:
    sizes = {inner: _INNER, 2 * inner: 2 * _INNER}
    for side, short in ((experts, _EXPERTS), (width, _WIDTH)):
        sizes.setdefault(side, short)
    yield from _of_sizes(block, given, bias, names, experts, width, sizes, "")
    if experts * width * inner <= _SMALL:  # its code may name sides
        same = {side: side for side in (inner, 2 * inner, experts, width)}
        sided = [f" and self.{n}.shape[0] == {experts} and {width} in self.{n}.shape and {inner} " for n in names[:2]]
        first = f"{sided[0]}* 2 in self.{names[0]}.shape"
        if any(_reads_chosen(block, same, experts, width, first_ids) for first_ids in (True, False)):
            yield from _of_sizes(
                block, given, bias, names, experts, width, same, f"{first}{sided[1]}in self.{names[1]}.shape"
            )


_SMALL = 1 << 16


def _reads_chosen(block: Block, sizes: dict[int, int], experts: int, width: int, ids_first: bool) -> bool:
    """Whether what an expert has that no token chose is not read: 0 times what is not finite is not 0."""
    x, *rest = _draw(experts, width, ids_first, 0)
    ids = rest[0 if ids_first else 1]
    rest[0 if ids_first else 1] = ids.clamp(min=1)
    outcome = None if block.run is None else block.run(sizes, (x, *rest), 0)
    return outcome is not None and isinstance(outcome[0], Tensor) and bool(outcome[0].isfinite().all())


def _takes_any(block: Block, draw: Callable[[int], tuple[Tensor, ...]], sizes: dict[int, int]) -> bool:
    """Whether numbers of no expert are no error, as `torch.take_along_dim` takes them round and round."""
    return block.run is not None and block.run(sizes, draw(_SEEDS - 1)) is not None


def _of_sizes(
    block: Block,
    given: str,
    bias: str,
    names: tuple[str, ...],
    experts: int,
    width: int,
    sizes: dict[int, int],
    sided: str,
) -> Iterator[Layer]:
    for ids, shares in ((1, 2), (2, 1)):
        draw = functools.partial(_draw, sizes[experts], sizes[width], ids == 1)
        takes = _takes_any(block, draw, sizes)
        whole = functools.partial(_draw, experts, sizes[width], ids == 1)
        if not takes and sizes[experts] != experts and _takes_any(block, whole, {**sizes, experts: experts}):
            continue  # its code names how many there are, and brings numbers among them
        numbers = [(f"a{ids}", "")]
        if takes:  # numbers of no expert give nothing, or come round: `torch.take_along_dim` takes one dtype
            around = f"torch.remainder(a{ids}, self.{names[0]}.shape[0])"
            numbers += [(around, f" and a{ids}.dtype is torch.int64")]
        for (number, kind), activation in itertools.product(numbers, ACTIVATIONS):
            yield Layer(
                "moe_experts",
                f"ops.moe_experts({given}, {number}, a{shares}, {activation!r}{bias})",
                sizes,
                draw,
                _SEEDS,
                f"a0.dim() == 2 and a0.shape[0] > 0 and a{ids}.dim() == 2 and a{shares}.shape == a{ids}.shape"
                f" and a{ids}.shape[0] == a0.shape[0]{''.join(f' and a0.dtype is self.{n}.dtype' for n in names)}"
                f" and a0.dtype.itemsize < 8 and (a{ids}.dtype is torch.int64 or a{ids}.dtype is torch.int32)"
                f" and a{shares}.dtype.is_floating_point and a{shares}.dtype.itemsize < 8{kind}{sided}",
                refused=_BEYOND,
                numbers=ids,
            )


def _draw(experts: int, width: int, ids_first: bool, seed: int) -> tuple[Tensor, ...]:
    """Seeds 0 to 2: every token has two experts. Later: numbers so large and small that a clamp shows, an expert that
    is chosen twice, no tokens, one token; last, ids one beyond the experts."""
    generator = torch.Generator().manual_seed(seed)
    tokens = {6: 0, 7: 1}.get(seed, _TOKENS)
    x = torch.randn(tokens, width, generator=generator, dtype=torch.float64)
    if seed in (1, 3):
        x = x * (30.0 if seed == 1 else 3e4)
    if seed in (5, 9):
        x = x * torch.exp2(torch.linspace(-40, 40, tokens, dtype=torch.float64))[:, None]
    chosen = torch.stack([torch.randperm(experts, generator=generator)[:_CHOSEN] for _ in range(max(tokens, 1))])
    ids = chosen[:tokens]
    if seed >= 4 and tokens:
        ids = torch.randint(experts, (tokens, _CHOSEN), generator=generator)
        ids[0] = ids[0, 0]
    if seed >= _SEEDS - _BEYOND:
        ids[1, 0] = ids[2] = experts
    shares = torch.randn(tokens, _CHOSEN, generator=generator, dtype=torch.float64)
    return (x, ids, shares) if ids_first else (x, shares, ids)
