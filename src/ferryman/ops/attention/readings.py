"""What code that is written out computes of queries, keys and values, read from what it gives."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.attention.orders import (
    HEADS_FIRST,
    MASKS,
    ONE_BATCH,
    ORDERS,
    ROWS_FIRST,
    SIZED,
    Layout,
    Reading,
    inputs_of,
    mask_shape,
)
from ferryman.ops.recognition import Block

_NAMED = 3


_EXACT = 1e-9  # of a scale that was measured, relative


_MASK_MEANINGS = ("truth", "keep", "hide")


_GROUPS = (1, 2, 3), (4, 8, 6, 5, 7, 16)  # query heads for a key head: those that are tried, and those if none does


# whose size lies before their rows: of no input, of keys, of all, of keys and values
_TURNS = (False, False, False), (False, True, False), (True, True, True), (False, True, True)


def numbers_of(block: Block) -> list[int]:
    """The first few numbers of the module's that may be one of heads."""
    return sorted({n for n in block.integers.values() if 1 < n <= 128})[:_NAMED]


# Reading -----------------------------------------------------------------------------------------------------


def readings_of(block: Block) -> Iterator[Reading]:
    masks = ("",) if block.inputs == 3 else (*MASKS, SIZED)
    rest = tuple(range(3, block.inputs))
    block = replace(block, shape=_remembered(block))
    orders = [(0, 1, 2, *rest), (1, 0, 2, *rest)] if block.ordered else [*itertools.permutations(range(block.inputs))]
    for turns in _TURNS if block.ordered else _TURNS[:1]:
        known = [*_of_turns(block, masks, orders, turns)]
        if known:
            yield from known
            return


def _of_turns(
    block: Block, masks: Sequence[str], orders: Sequence[tuple[int, ...]], turns: Sequence[bool]
) -> Iterator[Reading]:
    some = False
    for inner, of_keys in ORDERS:
        if some and inner is not of_keys:
            return
        if block.tensors and inner is ONE_BATCH:
            continue  # a batch of heads does not say whose logit is whose
        bases = (inner, of_keys, of_keys)
        layouts = [layout.turned() if turn else layout for layout, turn in zip(bases, turns, strict=True)]
        own = tuple(layout for layout in layouts if layout is not None)
        fits = functools.partial(_fits, block, inner, own)
        fitting = [(places, False) for places in orders if len(own) == 3 and fits(places, False)]
        if not fitting and block.inputs > 3 and len(own) == 3 and inner is not ONE_BATCH:
            fitting = [(places, True) for places in orders if fits(places, True)]
        for mask, (places, alone) in itertools.product(masks, fitting):
            for heads in _heads(block, inner, own):
                probed = functools.partial(_probed, block, inner, own, mask, places, heads=heads, alone=alone)
                few, rest = _GROUPS if inner.heads >= 0 else ((1,), ())
                groups = [g for g in few if probed(g)] or [g for g in rest if probed(g)][:1]
                if groups:
                    outer, scale, softcap, causal = probed(groups[0]) or (inner, None, 0.0, False)
                    group = 0 if len(groups) > 1 else groups[0]
                    one = (
                        not block.tensors
                        and group == 1
                        and inner is of_keys is not ONE_BATCH
                        and probed(2, heads=1) is not None
                    )
                    blind = functools.partial(_blind, block, inner, own, mask, places, groups[0], heads, alone)
                    mean = mask in _MASK_MEANINGS and blind()
                    only = 1 if inner is not of_keys else 0
                    given = (places, inner, own, outer, group, mask, causal, scale, softcap, one)
                    logits = sinks_of(block), _total(block)
                    yield Reading(*given, heads=only, mean=mean, sinks=logits[0], total=logits[1], alone=alone)
                    some = True
                    break


def _heads(block: Block, inner: Layout, own: tuple[Layout, ...]) -> tuple[int, ...]:
    if inner.heads >= 0 > own[1].heads:
        return (1,)
    return (2, *(n for n in numbers_of(block) if n != 2))


def _total(block: Block) -> int:
    """How many query heads there must be, where each has a logit of its own; 0 for any number."""
    return max((max(shape) for shape in block.tensors.values()), default=0)


def sinks_of(block: Block) -> str:
    """The module's logits, one for each query head."""
    return next((f"self.{name}.flatten()" for name in block.tensors), "")


def _able(block: Block, heads: int, group: int, single: bool) -> int:
    """How many key heads there are with such a group, which a module with logits says; 0 for none."""
    total = _total(block)
    if not total:
        return heads
    heads = 1 if single else total // group
    return heads if heads * group == total else 0


def _fits(block: Block, inner: Layout, own: tuple[Layout, ...], places: Sequence[int], alone: bool) -> bool:
    """Whether the code takes inputs of such shapes at all, and gives one of attention: most orders end here. alone:
    with a mask of rows and keys."""
    few, more = _GROUPS if inner.heads >= 0 else ((1,), ())
    kinds = ("keep", "bias", SIZED) if len(places) > 3 else ("",)
    assert block.shape is not None
    turned = any(layout.size != -1 for layout in own)
    groups, numbers = (few, _heads(block, inner, own)[:1]) if turned else ((*few, *more), _heads(block, inner, own))
    for group, mask, heads in itertools.product(groups, kinds, numbers):
        heads = _able(block, heads, group, inner.heads >= 0 > own[1].heads)
        if not heads:
            continue
        inputs, wanted = _sample(inner, own, mask, heads, group, alone, len(places))
        given = [inputs[places.index(place)] for place in range(len(places))]
        if block.shape(tuple(given)) in wanted:
            if not alone:
                return True
            # a mask of heads, where the code takes that, is of another part
            of_heads = [x.expand(heads * group, -1, -1) if i == places[-1] else x for i, x in enumerate(given)]
            return block.shape(tuple(of_heads)) not in wanted
    return False


@functools.lru_cache(4096)
def _sample(
    inner: Layout, own: tuple[Layout, ...], mask: str, heads: int, group: int, alone: bool, inputs: int
) -> tuple[list[Tensor], list[torch.Size]]:
    """(queries, keys, values, a mask; shapes that attention of them may have)."""
    reading = Reading(tuple(range(inputs)), inner, own, inner, group, mask, False, None, 0.0, alone=alone)
    q = torch.empty(2, heads * group, 5, 12)
    return inputs_of(reading, 2, heads, group, 5, 5, 12, 0, 1.0), [o.of(q).shape for o in _outer(inner, own)]


def _remembered(block: Block) -> Callable[[tuple[Tensor, ...]], tuple[int, ...] | None]:
    """``block.shape``, asked once for inputs of the same shapes and dtypes."""
    known: dict[Any, tuple[int, ...] | None] = {}
    assert block.shape is not None
    ask = block.shape

    def shape(given: tuple[Tensor, ...]) -> tuple[int, ...] | None:
        key = tuple((x.shape, x.dtype) for x in given)
        if key not in known:
            known[key] = ask(tuple(x.detach() for x in given))
        return known[key]

    return shape


def _outer(inner: Layout, own: tuple[Layout, ...]) -> list[Layout]:
    """Orders that a result may have: with the size before the rows only where values have it, too."""
    known = [inner] if inner is ONE_BATCH else [HEADS_FIRST, ROWS_FIRST]
    turned = inner.turned()
    return known if turned is None or own[2].size == -1 else [*known, turned]


def _probed(
    block: Block,
    inner: Layout,
    own: tuple[Layout, ...],
    mask: str,
    places: Sequence[int],
    group: int,
    heads: int = 2,
    alone: bool = False,
) -> tuple[Layout, float | None, float, bool] | None:
    """(the result's order, scale, soft cap, causal), or None where this is no attention of such inputs."""
    run = functools.partial(_probabilities, block, inner, own, mask, places, group, heads, alone)
    near = run(8, 0.5)
    if near is None:
        return None
    outer, p, _ = near
    hidden, future = p == 0, torch.ones(p.shape[-2:]).triu(1).bool()
    masked = _hidden(len(future)) if mask in MASKS else torch.zeros_like(future)
    causal = bool((hidden == (future | masked)).all())
    if not causal and not bool((hidden == masked).all()):
        return None
    softcap = _softcap(run(8, 1e4))
    small, other = (run(width, 0.01 if softcap else 0.5) for width in (8, 12))
    if softcap is None or small is None or other is None:
        return None
    scales = []
    for _, given, products in (small, other):
        steps, falls = (
            x[..., 1:][(given > 0)[..., 1:]] for x in (products - products[..., :1], given.log() - given[..., :1].log())
        )
        at = steps.abs().argmax()
        scales.append(float(falls[at] / steps[at]))
        if not bool(((falls - scales[-1] * steps).abs() < _EXACT).all()):
            return None
    if all(abs(s * math.sqrt(width) - 1) < _EXACT for s, width in zip(scales, (8, 12), strict=True)):
        return outer, None, softcap, causal
    return outer, _nice(scales[0]), softcap, causal


def _blind(
    block: Block,
    inner: Layout,
    own: tuple[Layout, ...],
    mask: str,
    places: Sequence[int],
    group: int,
    heads: int,
    alone: bool,
) -> bool:
    """Whether a row that sees nothing is the mean of the values, as where scores are a number that is finite."""
    known = _probabilities(block, inner, own, mask, places, group, heads, alone, 8, 0.5, blind=True)
    return known is not None and bool(((known[1][..., 0, :] - 1 / 8).abs() < 1e-9).all())


def _probabilities(
    block: Block,
    inner: Layout,
    own: tuple[Layout, ...],
    mask: str,
    places: Sequence[int],
    group: int,
    heads: int,
    alone: bool,
    width: int,
    size: float,
    blind: bool = False,
) -> tuple[Layout, Tensor, Tensor] | None:
    """(the result's order, P, the products of queries and keys), both (B, H, S, S)."""
    heads = _able(block, heads, group, inner.heads >= 0 > own[1].heads)
    if not heads:
        return None
    batch, rows = 2, width  # values are as wide as keys, where the code has one width for both
    draw = torch.Generator().manual_seed(11)
    q = size * torch.randn(batch, heads * group, rows, width, generator=draw, dtype=torch.float64)
    k = size * torch.randn(batch, heads, rows, width, generator=draw, dtype=torch.float64)
    v = torch.eye(rows, dtype=torch.float64).roll(1, -1).expand(batch, heads, rows, rows)  # which is not its transpose
    inputs = [layout.of(x) for layout, x in zip(own, (q, k, v), strict=True)]
    if mask == SIZED:
        inputs.append(torch.randn(batch, rows, 2 * width - 9, generator=draw, dtype=torch.float64))
    elif mask:
        reading = Reading((), inner, own, inner, group, mask, False, None, 0.0, alone=alone)
        shape = mask_shape(reading, batch, heads * group, rows, rows)
        inputs.append(_probe(mask, shape, blind))
    given = [torch.empty(0)] * len(inputs)
    for place, x in zip(places, inputs, strict=True):
        given[place] = x
    assert block.run is not None
    outcome = block.run({side: side for shape in block.tensors.values() for side in shape}, tuple(given))
    result = None if outcome is None else outcome[0]
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return None
    products = q @ k.repeat_interleave(group, 1).mT
    for outer in _outer(inner, own):
        if result.shape != outer.of(products).shape:
            continue
        p = result.unflatten(0, (batch, -1)) if inner is ONE_BATCH else outer.of(result)
        p = (p.mT if inner is ONE_BATCH and outer is not ONE_BATCH else p).roll(-1, -1)
        whole = p.sum(-1) - 1  # less, where a logit of none has its share
        if not bool((whole.abs() < 1e-6).all() if not block.tensors else (whole < 1e-6).all()) or bool((p < 0).any()):
            continue
        if result.is_contiguous():  # a view may follow
            outer = replace(outer, outward=f"{outer.outward}.contiguous()")
        return outer, p.double(), products
    return None


def _probe(mask: str, shape: tuple[int, ...], blind: bool = False) -> Tensor:
    hidden = _hidden(shape[-1])
    hidden[0] |= blind
    hidden = hidden.expand(shape)
    if mask == "bias":
        return torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -math.inf)
    return hidden.logical_not().double() if mask == "truth" else hidden ^ (mask == "keep")


def _hidden(rows: int) -> Tensor:
    """What a mask hides in a probe: of two rows one key each."""
    hidden = torch.zeros(rows, rows, dtype=torch.bool)
    hidden[2, 1] = hidden[4, 3] = True
    return hidden


def _softcap(far: tuple[Layout, Tensor, Tensor] | None) -> float | None:
    """0 for none. Scores beyond any cap are +cap or -cap, whose probabilities are apart by twice the cap."""
    if far is None:
        return None
    last = far[1][..., -1, :]  # the row that sees every key
    least = float((last.amin(-1) / last.amax(-1)).min())
    return _nice(-math.log(least) / 2) if 0 < least < 1 else 0.0


def _nice(measured: float) -> float:
    """What was meant: 1 / sqrt(n), or a number of few digits, where one is that near; else what was measured."""
    whole = round(measured**-2) if measured > 1e-3 else 0
    near = [1.0 / math.sqrt(whole)] if whole else []
    near += [float(f"{measured:.{digits}g}") for digits in (3, 6)]
    return next((n for n in near if abs(measured / n - 1) < _EXACT), measured)
