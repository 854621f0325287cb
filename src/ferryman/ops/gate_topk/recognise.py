"""Routers in models: a matrix of experts, perhaps a bias for the choice, and a forward of x that gives weights and ids;
or what gives these of logits. In the weights' place may be a table of all experts, with zeros where one is not chosen.

What a module computes of drawn numbers says which options it has (how it scores, groups, renormalises, scales); that is
a proposal, and proven like any other. A library that asks for its experts in no order gets ours, and so does one that
asks for the largest of scores of which some are equal.
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.gate_topk import bounds
from ferryman.ops.gate_topk.definition import SCORINGS
from ferryman.ops.recognition import Block, Layer

_MOST, _SHORT, _TOKENS, _EXPERTS, _SEEDS = 1024, 48, 9, 16, 6
_NAMED_WIDTH = 1 << 14  # the widest that is tried as it is
_SAME = 2.0**-40
_GUARD = "a0.dim() {} 2 and a0.dtype is self.{}.dtype and a0.dtype.is_floating_point and a0.dtype.itemsize < 8"


def blocks(block: Block) -> Iterator[Layer]:
    matrices = [n for n, s in block.tensors.items() if len(s) == 2]
    vectors = [n for n, s in block.tensors.items() if len(s) == 1]
    if block.run is None or block.inputs != 1 or len(matrices) > 1 or len(vectors) > 1:
        return
    bias = vectors[0] if vectors else None
    if not matrices:
        if len(block.tensors) == len(vectors) and all(2 <= block.tensors[n][0] <= _MOST for n in vectors):
            yield from _of_logits(block, bias)
        return
    weight = matrices[0]
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
    outcome = block.run(sizes, (x,))
    if outcome is None:
        return
    result, tensors = outcome
    kinds = _kinds(result, experts)
    if kinds is None:
        return
    other = block.run(sizes, _draw(short, "softmax", 1))
    deep = other is not None and _kinds(other[0], experts) is not None  # it flattens x of three sides
    kept = not deep and other is not None and _kinds(_flattened(other[0]), experts) == kinds  # or keeps these
    logits = x @ tensors[weight].t()
    w, ids = _weights(result, kinds)
    named = [f"a0.shape[-1] == {width}"] if short == width else []
    ways: list[tuple[str | None, str | None]] = [(None, None)]  # the vector in the product, or in the choice
    ways += [(bias, None), (None, bias)] if bias else []
    for inside, beside in ways:
        whole = logits if inside is None else logits + tensors[inside]
        for scoring, groups, renormalise, scale in _options(block, whole, w, ids, tensors[beside] if beside else None):
            options = f"{ids.shape[1]}, {scoring!r}, {f'self.{beside}' if beside else None}, {groups[0]}, {groups[1]}"
            same = _named(block, ids.shape[1], groups, scale)
            casts = ("w", "w.to(l.dtype)", "w.to(a0.dtype)")
            tables = _TABLES if "t" in kinds else ("",)
            # of two sides alone, what it does to more says nothing; what it keeps of more than three neither
            forms = (True, False) if kept else (False,)
            for three, wide, cast, table in itertools.product(forms, (False, True), casts, tables):
                back, sides = (".unflatten(0, a0.shape[:-1])", ["a0.dim() <= 3"]) if three else ("", [])
                given = ["a0.reshape(-1, a0.shape[-1])", f"self.{weight}", *([f"self.{inside}"] if inside else [])]
                if wide:
                    given = [f"{g}.to(torch.promote_types({g}.dtype, torch.float32))" for g in given]
                if not wide and "a0" in cast:  # as the logits
                    continue
                parts = {"l": "l", "w": cast, "i": "i", "t": table.format(cast)}
                inner = f"(lambda w, i: {_written_as(result, [parts[k] + back for k in kinds])})"
                yield Layer(
                    "gate_topk",
                    f"(lambda l: {inner}(*ops.gate_topk(l, {options}, {renormalise}, {scale!r})))"
                    f"(ops.linear({', '.join(given)}))",
                    sizes,
                    functools.partial(_draw, short, scoring, deep=deep or three),
                    _SEEDS,
                    " and ".join((_GUARD.format(">=" if deep or three else "==", weight), *sides, *same, *named)),
                    beside=("linear",),
                    chosen=operator.itemgetter(kinds.index("i")),
                    level=_LEVEL_OF_TABLES if "t" in kinds else 0,  # which rows of it are NaN
                )


def _of_logits(block: Block, bias: str | None) -> Iterator[Layer]:
    """What chooses experts by logits that it is given: of any number of experts, if its code says none."""
    assert block.run is not None
    named = [v for v in block.integers.values() if 1 < v <= _MOST]
    for experts in [block.tensors[bias][0]] if bias else dict.fromkeys((_EXPERTS, *named)):
        x = _draw(experts, "softmax", 0)[0]
        outcome = block.run({experts: experts}, (x,))
        kinds = None if outcome is None else _kinds(outcome[0], experts)
        if outcome is None or kinds is None:
            continue
        w, ids = _weights(outcome[0], kinds)
        k, free = ids.shape[1], not bias and experts == _EXPERTS
        deep = _draw(experts, "softmax", 1)
        sides = block.run({experts: experts}, deep)
        shape = None if sides is None or len(sides[0]) != len(kinds) else tuple(sides[0][kinds.index("i")].shape)
        known = {(*deep[0].shape[:-1], k): ("*a0.shape[:-1]", "a0"), (deep[0].shape[:-1].numel(), k): ("-1", "l")}
        forms = [(shape in known, *known.get(shape or (), ("-1", "l")))]
        forms += [(False, "-1", "a0")] if shape in known else []  # of two sides, what it does to more says nothing
        # a score with a bias is rounded twice in 16 bits, which may turn two of them
        dtype = "a0.dtype.is_floating_point and a0.dtype.itemsize < 8"
        dtype = f"a0.dtype is torch.float32 and self.{bias}.dtype is torch.float32" if bias else dtype
        options = list(_options(block, x, w, ids, outcome[1][bias] if bias else None))
        casts, tables = ("w", "w.to(a0.dtype)"), _TABLES if "t" in kinds else ("",)
        for (wide, places, logits), single, option, cast, table in itertools.product(
            forms, (False, True), options, casts, tables
        ):
            scoring, groups, renormalise, scale = option
            alone = free and groups == (1, 1)
            said = f"{k}, {scoring!r}, {f'self.{bias}' if bias else None}, {groups[0]}, {groups[1]}, {renormalise}"
            tests = [f"a0.dim() {'>=' if wide else '=='} 2", dtype, *_named(block, k, groups, scale)]
            tests += [f"a0.shape[-1] {'<=' if alone else '=='} {_MOST if alone else experts}"]
            tests += ["a0.is_contiguous()"] * ("t" in kinds)  # a table lies in memory as its logits do
            parts = {"l": logits, "w": f"{cast}.reshape({places}, {k})", "i": f"i.reshape({places}, {k})"}
            parts["t"] = f"{table.format(cast)}.reshape({places}, a0.shape[-1])"
            yield Layer(
                "gate_topk",
                f"(lambda l: (lambda w, i: {_written_as(outcome[0], [parts[n] for n in kinds])})"
                f"(*ops.gate_topk(l, {said}, {scale!r})))(a0.reshape(-1, a0.shape[-1]))",
                {experts: experts},
                functools.partial(_draw, experts, scoring, deep=wide),
                _SEEDS,
                " and ".join(tests),
                chosen=operator.itemgetter(kinds.index("i")),
                level=_LEVEL if groups == (1, 1) else 1,  # of equal groups, either may be chosen
                across=(max(k, 2), _MOST) if alone else None,
                single=single,
            )
        return


def _named(block: Block, k: int, groups: tuple[int, int], scale: float) -> list[str]:
    """Tests of the attributes that may say which options a router has."""
    counts = {v for v in (k, *groups) if v > 1}
    same = [f"self.{n} == {v}" for n, v in block.integers.items() if v in counts]
    return [*same, *(f"self.{n} == {v!r}" for n, v in block.numbers.items() if v == scale != 1.0)]


def _kinds(result: Any, experts: int) -> tuple[str, ...] | None:
    """What each part of a router's result is: logits, weights, a table of these, ids; None where it is none."""
    known = type(result) in (tuple, list) or type(result) in vars(torch.return_types).values()
    if not known or not all(isinstance(t, Tensor) and t.dim() == 2 for t in result):
        return None
    most = next((t.shape[1] for t in result if not t.is_floating_point()), 0)
    kinds: tuple[str, ...] = ()
    for t in result:
        table = t.is_floating_point() and _is_table(t, experts, most)
        wide = t.shape[1] == experts and "l" not in kinds
        kinds += ("i" if not t.is_floating_point() else "t" if table else "l" if wide else "w",)
    if sorted(kinds) not in (["i", "w"], ["i", "l", "w"], ["i", "t"], ["i", "l", "t"]):
        return None
    w, ids = _weights(result, kinds)
    return kinds if w.shape == ids.shape and ids.dtype == torch.int64 else None


def _is_table(t: Tensor, experts: int, most: int) -> bool:
    return t.shape[1] == experts > most and bool(((t != 0).sum(1) <= most).all())


def _weights(result: Any, kinds: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """The weights of experts that are chosen, and which these are."""
    ids = result[kinds.index("i")]
    return (result[kinds.index("t")].gather(1, ids) if "t" in kinds else result[kinds.index("w")]), ids


def _flattened(result: Any) -> Any:
    """A result whose parts have three sides, with two."""
    known = type(result) in (tuple, list) and all(isinstance(t, Tensor) and t.dim() == 3 for t in result)
    return type(result)(t.flatten(0, 1) for t in result) if known else None


# A table of weights: zeros elsewhere; or NaN in a row that has one
_TABLES = tuple(
    f"(lambda v: (torch.zeros_like(l, dtype=v.dtype){beside}).scatter(1, i, v))({{}})"
    for beside in ("", " + 0 * v.sum(1, keepdim=True)")
)


def _written_as(result: Any, parts: Iterable[str]) -> str:
    """What makes a result of its kind: a tuple, a list, or what PyTorch's functions give."""
    text = ", ".join(parts)
    if type(result) is list:
        return f"[{text}]"
    return f"({text})" if type(result) is tuple else f"torch.return_types.{type(result).__name__}(({text}))"


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


def _draw(width: int, scoring: str, seed: int, deep: bool = True) -> tuple[Tensor, ...]:
    """No two scores are one number up to `_SEEDS`. deep: one of the shapes has three sides."""
    generator = torch.Generator().manual_seed(seed)
    shape = {1: (2, 5, width) if deep else (5, width), 5: (1, width)}.get(seed, (_TOKENS, width))
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if seed < _SEEDS:
        return (x * {2: 3.0, 3: 30.0 if scoring == "softmax" else 6.0, 4: 2.0**-10}.get(seed, 1.0),)
    return (_LEVELS[seed - _SEEDS](x),)


def _spoilt(x: Tensor, *values: float) -> Tensor:
    """One of the values in each row, and in every second row another one."""
    x = x.clone()
    for i, row in enumerate(x):
        row[i % x.shape[1]] = values[i % len(values)]
        row[(3 * i + 1) % x.shape[1]] = values[0] if i % 2 else row[(3 * i + 1) % x.shape[1]]
    return x


# Logits of which many are equal, or whose scores are, and such that are not finite
_LEVELS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda x: x,
    lambda x: (x * 1.5).round(),
    torch.zeros_like,
    lambda x: x * 1000.0,
    lambda x: x * 2.0**-30,
    lambda x: x * 2.0**-60,
    lambda x: _spoilt(x, -math.inf),
    lambda x: torch.full_like(x, -math.inf),
    lambda x: _spoilt(x, math.nan, math.inf),
    lambda x: torch.cat([x[:, :1] + math.inf, x[:, 1:2] - math.inf, x[:, 2:]], 1),
)
_LEVEL, _LEVEL_OF_TABLES = len(_LEVELS) - 1, len(_LEVELS)


def _written(wanted: Tensor, plain: Tensor) -> Iterator[float]:
    """The scale of the largest weight, as code would write it, if that is one."""
    largest = int(plain.argmax())
    scale = float(f"{float(wanted.flatten()[largest] / plain.flatten()[largest]):.9g}")
    if math.isfinite(scale) and scale > 0:
        yield scale
