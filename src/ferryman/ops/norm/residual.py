"""Modules that add a residual to what they are given, and norm the sum: `add_rms_norm`, `add_layer_norm`.

What a module gives for drawn numbers says which of its results is the sum, and what is added to the mean square; that
is a proposal, and proven like any other.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.recognition import Block, Layer

_SHORT, _LARGEST_EPS, _EXACT = 96, 0.1, 1e-6
# (shape before the width, magnitude) of a seed; in the last two a number is not finite
_SIZES = (
    ((4, 16), 1.0),  # of many numbers: which of two is rounded less is a matter of their most and their mean
    ((16, 4), 8.0),
    ((8, 8), 1e-2),
    ((2, 2), 1e-4),
    ((2, 3), 1e-9),
    ((1, 6), 1e3),
    ((2, 2), 1e7),
    ((3, 1), 1e15),
    ((1, 2), 0.0),
    ((2, 2), math.nan),
    ((2, 2), math.inf),
)
_SIDES = (None, (), (2,))  # what stands before these: nothing in the second of three, another side in the third


def blocks(block: Block) -> Iterator[Layer]:
    """A weight, and of a layer norm perhaps a bias; the forward takes two tensors of one shape."""
    widths = {max(shape, default=0) for shape in block.tensors.values()}
    lines = all(math.prod(shape) == max(shape, default=0) > 1 for shape in block.tensors.values())
    if block.run is None or block.inputs != 2 or not 0 < len(block.tensors) < 3 or len(widths) != 1 or not lines:
        return
    (width,) = widths
    for short in dict.fromkeys((min(width, _SHORT), width)):
        sizes = {side: side for shape in block.tensors.values() for side in shape} | {width: short}
        outcome = block.run(sizes, _draw(short, False, 0))
        kinds = None if outcome is None else _kinds(outcome[0], _draw(short, False, 0))
        if kinds is None:
            continue
        options = list(_options(block, sizes, short, kinds))
        # in all dtypes before float32 alone, for any dimensions before three
        for single, many in ((False, True), (False, False), (True, True), (True, False)):
            for eps, expression in options:
                same = [f"self.{n} == {v!r}" for n, v in block.numbers.items() if v == eps]
                tests = ["a0.shape == a1.shape", "a0.dtype is a1.dtype", *same]
                tests += ["a0.dtype.itemsize < 8 and a0.dtype.is_floating_point"]
                tests += [f"self.{n}.dtype is a0.dtype" for n in block.tensors]
                tests += ["a0.dim() > 1" if many else "a0.dim() == 3"]
                tests += [f"a0.shape[-1] == self.{next(iter(block.tensors))}.numel()", "a0.numel() > 0"]
                op = "add_rms_norm" if "rms" in expression else "add_layer_norm"
                draw = functools.partial(_draw, short, many)
                yield Layer(op, expression, sizes, draw, len(_SIZES), " and ".join(tests), single=single)
        return


def _draw(width: int, many: bool, seed: int) -> tuple[Tensor, ...]:
    lead: tuple[int, ...] = _SIZES[seed][0]
    size = _SIZES[seed][1]
    if many:
        more = _SIDES[seed % 3]
        lead = lead if more is None else (lead[1],) if not more else (*more, *lead)
    draw = torch.Generator().manual_seed(seed)
    x, addend = (torch.randn(*lead, width, generator=draw, dtype=torch.float64) for _ in "ab")
    if math.isfinite(size):
        return size * x, size * addend
    x[(0,) * x.dim()] = size
    return x, addend


def _kinds(result: Any, given: tuple[Tensor, ...]) -> str | None:
    """ "n" for a norm alone; "ns" or "sn" with the sum beside it."""
    total = given[0] + given[1]
    parts = (result,) if isinstance(result, Tensor) else result
    if not isinstance(parts, tuple | list) or not all(isinstance(t, Tensor) and t.shape == total.shape for t in parts):
        return None
    kinds = "".join("s" if torch.equal(t, total) else "n" for t in parts)
    return kinds if kinds in ("n", "ns", "sn") and isinstance(result, Tensor | tuple) else None


def _options(block: Block, sizes: dict[int, int], short: int, kinds: str) -> Iterator[tuple[float, str]]:
    """(eps, an expression) of the norms that give what it gives for small numbers, without a weight that they share."""
    assert block.run is not None
    given = _draw(short, False, 3)
    outcome = block.run(sizes, given)
    if outcome is None:
        return
    result, tensors = outcome
    normed = result if isinstance(result, Tensor) else result[kinds.index("n")]
    total = given[0] + given[1]
    names = list(tensors)
    spelled = {n: f"self.{n}.flatten()" for n in names}
    for centred, offset, weight in itertools.product((False, True), (False, True), names):
        rest = [n for n in names if n != weight]
        if (centred and offset) or (rest and not centred):
            continue
        h = total - total.mean(-1, keepdim=True) if centred else total
        scale = tensors[weight].flatten() + offset
        shifted = normed - tensors[rest[0]].flatten() if rest else normed
        ratio = (h * scale / shifted).square()
        eps = (ratio - h.square().mean(-1, keepdim=True)).flatten()
        if not bool((ratio / ratio.mean(-1, keepdim=True) - 1).abs().max() < _EXACT):
            continue
        number = float(f"{float(eps.median()):.4g}")
        if not 0 < number <= _LARGEST_EPS:
            continue
        plain = spelled[weight]
        wide = f"1.0 + {plain}.to(torch.promote_types(self.{weight}.dtype, torch.float32))"
        for cast in (True, False):
            if centred:
                bias = spelled[rest[0]] if rest else "None"
                call = f"ops.add_layer_norm(a0, a1, {plain}, {bias}, {number!r})"
            else:
                call = f"ops.add_rms_norm(a0, a1, {wide if offset else plain}, {number!r}, {cast})"
            parts = ", ".join(kinds)
            yield number, f"(lambda n, s: {parts if kinds == 'n' else f'({parts})'})(*{call})"
            if centred:
                break
