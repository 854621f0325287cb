"""Routers in models: a matrix of experts, perhaps a bias for the choice, and a forward of x that gives weights and ids.

What a module computes of drawn numbers says which options it has (how it scores, groups, renormalises, scales); that is
a proposal, and proven like any other. A library that asks for its experts in no order gets ours.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ferryman.ops.gate_topk import bounds
from ferryman.ops.gate_topk.definition import SCORINGS
from ferryman.ops.recognition import Block, Layer

_MOST, _SHORT, _TOKENS = 1024, 48, 9
_NAMED_WIDTH = 1 << 14  # the widest that is tried as it is
_SAME = 2.0**-40
_GUARD = "a0.dim() {} 2 and a0.dtype is self.{}.dtype and a0.dtype.is_floating_point and a0.dtype.itemsize < 8"


class _Asked(TorchFunctionMode):
    """Whether the largest values were asked for in no order."""

    unordered = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.topk, Tensor.topk) and (kwargs or {}).get("sorted") is False:
            self.unordered = True
        return func(*args, **(kwargs or {}))


def blocks(block: Block) -> Iterator[Layer]:
    matrices = [n for n, s in block.tensors.items() if len(s) == 2]
    vectors = [n for n, s in block.tensors.items() if len(s) == 1]
    if block.run is None or block.inputs != 1 or len(matrices) != 1 or len(vectors) > 1:
        return
    weight, bias = matrices[0], vectors[0] if vectors else None
    experts, width = block.tensors[weight]
    if len(block.tensors) != 1 + len(vectors) or not 2 <= experts <= _MOST or experts == width:
        return
    if bias and block.tensors[bias] != (experts,):
        return
    short = min(width, _SHORT if experts != _SHORT else _SHORT - 8)
    yield from _of_width(block, weight, bias, short)
    if (
        short < width <= _NAMED_WIDTH
        and block.run({experts: experts, width: short}, _draw(short, "softmax", 0)) is None
    ):
        yield from _of_width(block, weight, bias, width)  # its code may name its width


def _of_width(block: Block, weight: str, bias: str | None, short: int) -> Iterator[Layer]:
    """With so long rows in the place of its own."""
    experts, width = block.tensors[weight]
    sizes = {experts: experts, width: short}
    x = _draw(short, "softmax", 0)[0]
    assert block.run is not None
    with _Asked() as asked:
        outcome = block.run(sizes, (x,))
    if outcome is None:
        return
    result, tensors = outcome
    kinds = _kinds(result, experts)
    if kinds is None:
        return
    sides = block.run(sizes, _draw(short, "softmax", 1))
    deep = sides is not None and _kinds(sides[0], experts) is not None  # it flattens x of three sides
    logits = x @ tensors[weight].t()
    w, ids = result[kinds.index("w")], result[kinds.index("i")]
    named = [f"a0.shape[-1] == {width}"] if short == width else []
    ways: list[tuple[str | None, str | None]] = [(None, None)]  # the vector in the product, or in the choice
    ways += [(bias, None), (None, bias)] if bias else []
    for inside, beside in ways:
        whole = logits if inside is None else logits + tensors[inside]
        for scoring, groups, renormalise, scale in _options(block, whole, w, ids, tensors[beside] if beside else None):
            options = f"{ids.shape[1]}, {scoring!r}, {f'self.{beside}' if beside else None}, {groups[0]}, {groups[1]}"
            counts = {v for v in (ids.shape[1], *groups) if v > 1}
            same = [f"self.{n} == {v}" for n, v in block.integers.items() if v in counts]
            same += [f"self.{n} == {v!r}" for n, v in block.numbers.items() if v == scale != 1.0]
            for wide, cast in itertools.product((False, True), ("w", "w.to(l.dtype)", "w.to(a0.dtype)")):
                given = ["a0.reshape(-1, a0.shape[-1])", f"self.{weight}", *([f"self.{inside}"] if inside else [])]
                if wide:
                    given = [f"{g}.to(torch.promote_types({g}.dtype, torch.float32))" for g in given]
                if not wide and "a0" in cast:  # as the logits
                    continue
                parts = {"l": "l", "w": cast, "i": "i"}
                inner = f"(lambda w, i: ({', '.join(parts[k] for k in kinds)}))"
                yield Layer(
                    "gate_topk",
                    f"(lambda l: {inner}(*ops.gate_topk(l, {options}, {renormalise}, {scale!r})))"
                    f"(ops.linear({', '.join(given)}))",
                    sizes,
                    functools.partial(_draw, short, scoring, deep=deep),
                    6,
                    " and ".join((_GUARD.format(">=" if deep else "==", weight), *same, *named)),
                    beside=("linear",),
                    canonical=functools.partial(_in_order, kinds) if asked.unordered else None,
                )


def _kinds(result: Any, experts: int) -> tuple[str, ...] | None:
    """What each part of a router's result is: logits, weights, ids; None where it is none."""
    if not isinstance(result, tuple | list) or not all(isinstance(t, Tensor) and t.dim() == 2 for t in result):
        return None
    kinds = tuple(
        "i" if not t.is_floating_point() else "l" if t.shape[1] == experts and "l" not in _before(result, i) else "w"
        for i, t in enumerate(result)
    )
    if sorted(kinds) not in (["i", "w"], ["i", "l", "w"]):
        return None
    w, ids = result[kinds.index("w")], result[kinds.index("i")]
    return kinds if w.shape == ids.shape and ids.dtype == torch.int64 else None


def _before(result: Any, i: int) -> str:
    return "l" if any(t.shape == result[i].shape and t.is_floating_point() for t in result[:i]) else ""


def _options(
    block: Block, logits: Tensor, w: Tensor, ids: Tensor, bias: Tensor | None
) -> Iterator[tuple[str, tuple[int, int], bool, float]]:
    """(scoring, groups and how many are chosen, renormalised, scale) with which the op gives these weights and ids."""
    experts, k = logits.shape[1], ids.shape[1]
    order = ids.argsort(-1)
    said, wanted = ids.gather(1, order), w.gather(1, order)
    whole = sorted({v for v in block.integers.values() if 0 < v <= experts})
    pairs = [(1, 1), *((g, c) for g in whole for c in whole if c < g and experts % g == 0 and k <= experts // g * c)]
    scales = dict.fromkeys((1.0, *(float(v) for v in (*block.numbers.values(), *whole) if v > 0)))
    for scoring, (g, c) in itertools.product(SCORINGS, pairs):
        if g > 1 and scoring == "sigmoid" and experts // g < 2:
            continue
        chosen = bounds.chosen(logits, k, scoring, bias, g, c)
        chosen = chosen.gather(1, chosen.argsort(-1))
        if not torch.equal(chosen, said):
            continue
        for renormalise in (True, False):
            plain = bounds.shares(logits, chosen, scoring, renormalise)
            for scale in dict.fromkeys((*scales, *_written(wanted, plain))):
                if bool(((plain * scale - wanted).abs() <= _SAME * wanted.abs().amax(-1, keepdim=True)).all()):
                    yield scoring, (g, c), renormalise, scale


def _in_order(kinds: tuple[str, ...], result: Any) -> Any:
    """A router's result with each token's experts by their numbers."""
    order = result[kinds.index("i")].argsort(-1)
    return tuple(t if kind == "l" else t.gather(1, order) for kind, t in zip(kinds, result, strict=True))


def _draw(width: int, scoring: str, seed: int, deep: bool = True) -> tuple[Tensor, ...]:
    """No two scores are one number: where they are, either expert is right. deep: one of the shapes has three sides."""
    generator = torch.Generator().manual_seed(seed)
    shape = {1: (2, 5, width) if deep else (5, width), 5: (1, width)}.get(seed, (_TOKENS, width))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return (x * {2: 3.0, 3: 30.0 if scoring == "softmax" else 6.0, 4: 2.0**-10}.get(seed, 1.0),)


def _written(wanted: Tensor, plain: Tensor) -> Iterator[float]:
    """The scale of the largest weight, as code would write it, if that is one."""
    largest = int(plain.argmax())
    scale = float(f"{float(wanted.flatten()[largest] / plain.flatten()[largest]):.9g}")
    if math.isfinite(scale) and scale > 0:
        yield scale
