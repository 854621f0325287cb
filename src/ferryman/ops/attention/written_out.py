"""Attention that a forward writes out: two products and a softmax between them, read from what they give.

Values that are an identity make the result the probabilities. Their zeros say what is hidden, and their logarithms,
beside the products of queries and keys, the scale and the soft cap. As of PyTorch's fused kernels, a row whose scores
are all -inf without a mask is 0, where the code that is written out gives NaN.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ferryman.ops.attention.arguments import MAX_HEAD_DIM
from ferryman.ops.recognition import Block, Layer

_WIDTHS = (*range(4, 129, 4), 144, 160, 176, 192, 224, 256)  # head sizes
_NAMED = 3
_EXACT = 1e-9  # of a scale that was measured, relative
# (batch, key heads, queries, keys, head size, magnitude) of a seed; in the last a query is NaN
_SIZES = (
    (2, 2, 6, 6, 8, 1.0),
    (1, 1, 5, 9, 12, 1.0),
    (2, 3, 4, 4, 16, 3.0),
    (1, 2, 7, 7, 5, 300.0),
    (2, 1, 3, 8, 8, 2.0**-10),
    (1, 2, 1, 1, 8, 1.0),
    (1, 2, 6, 6, 8, 1.0),
)
# how a fourth input hides: the text that makes it the op's mask. "truth": as `keep`, of any dtype that compares with 0
_MASKS = {"truth": "({} != 0)", "keep": "{}", "hide": "{}.logical_not()", "bias": "{}"}
_TOLD = ("truth", "keep", "hide")
_GROUPS = (1, 2, 3), (4, 8, 6, 5, 7, 16)  # query heads for a key head: those that are tried, and those if none does
# whose size lies before their rows: of no input, of keys, of all, of keys and values
_TURNS = (False, False, False), (False, True, False), (True, True, True), (False, True, True)
_SIZED = "size"  # the fourth input is (B, S, H * D): its sizes say where the diagonal ends, or how scores are scaled


@dataclass(frozen=True)
class _Layout:
    """rows, heads, size: the axes of queries or keys, of heads, and of a head's numbers; -1: heads are part of the
    batch. inward, outward: to the op's order and back."""

    rows: int
    heads: int
    inward: str
    outward: str
    size: int = -1

    @property
    def dims(self) -> int:
        return 3 if self.heads < 0 else 4

    def of(self, x: Tensor) -> Tensor:
        """(B, H, S, D) in this order."""
        x = x if self.size == -1 else x.mT
        if self.heads < 0:
            return x.flatten(0, 1)
        return x.transpose(1, 2) if self.heads == 2 else x

    def turned(self) -> _Layout | None:
        """With the size before the rows, as keys lie before a product; None where nobody has it."""
        if self.heads == 2:
            return None
        return replace(
            self, rows=self.rows + 1, inward=self.inward.format("{}.mT"), outward=f"{self.outward}.mT", size=-2
        )


_HEADS_FIRST = _Layout(2, 1, "{}", "{}")
_ROWS_FIRST = _Layout(1, 2, "{}.transpose(1, 2)", "{}.transpose(1, 2)")
_ONE_BATCH = _Layout(1, -1, "{}.unsqueeze(1)", "{}.squeeze(1)")
_LAYOUTS = (_HEADS_FIRST, _ROWS_FIRST, _ONE_BATCH)


@dataclass(frozen=True)
class _Reading:
    """Which input is which, and how: ``places`` of q, k, v and a mask, and the layouts of the first three, of which
    ``inner`` has the order. group: query heads for a key head, 0: any; one: a single key head serves all, too. shared:
    the mask may be (Sq, Sk), too. heads: so many key heads alone; 0: any. mean: a row that sees nothing is the mean of
    the values, and not NaN."""

    places: tuple[int, ...]
    inner: _Layout
    own: tuple[_Layout, ...]
    outer: _Layout
    group: int
    mask: str
    causal: bool
    scale: float | None
    softcap: float
    one: bool = False
    shared: bool = True
    square: bool = True
    heads: int = 0
    mean: bool = False

    def draw(self, seed: int) -> tuple[Tensor, ...]:
        batch, heads, queries, keys, width, size = _SIZES[seed]
        keys = queries if self.square else keys
        group = self.group or (2, 1, 3)[seed % 3]
        if self.one and seed % 2 and not self.heads:
            heads, group = 1, 2
        heads = self.heads or heads
        given = _inputs(self, batch, heads, group, queries, keys, width, seed, size)
        if seed == len(_SIZES) - 1:
            self.own[0].of(given[self.places[0]])[..., 0, 0] = math.nan
        return tuple(given)

    def longer(self, length: int, width: int) -> tuple[Tensor, ...]:
        """Of many heads where the length is little."""
        return tuple(
            _inputs(self, 1, self.heads or (64 if length < 9 else 1), self.group or 1, length, length, width, 0, 1.0)
        )


def _inputs(
    reading: _Reading,
    batch: int,
    heads: int,
    group: int,
    queries: int,
    keys: int,
    width: int,
    seed: int,
    size: float,
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return size * torch.randn(shape, generator=draw, dtype=torch.float64)

    sides = [(heads * group, queries), (heads, keys), (heads, keys)]
    own = [layout.of(normal(batch, *side, width)) for layout, side in zip(reading.own, sides, strict=True)]
    own[0] = own[0].clone()
    if reading.mask == _SIZED:
        own.append(normal(batch, keys, heads * group * width))
    elif reading.mask:
        own.append(_mask(reading, batch, heads * group, queries, keys, seed > 2, seed % 2 == 1, draw))
    given = [torch.empty(0)] * len(own)
    for place, x in zip(reading.places, own, strict=True):
        given[place] = x
    return given


def _mask(
    reading: _Reading, batch: int, heads: int, queries: int, keys: int, blind: bool, alone: bool, draw: torch.Generator
) -> Tensor:
    """One in whose rows some key is seen, but for the first row of each sequence where it is ``blind``; ``alone``: of
    all sequences, where the code takes one."""
    shape: tuple[int, ...] = (
        (batch * heads, queries, keys) if reading.inner is _ONE_BATCH else (batch, 1, queries, keys)
    )
    if reading.shared and alone:
        # of each head or of all, where the code takes both
        shape = (heads, queries, keys) if reading.inner is not _ONE_BATCH and queries == 4 else (queries, keys)
    seen = torch.rand(shape, generator=draw) < 0.6
    seen[..., 0] = True
    seen[..., :1, :] &= not blind
    if reading.mask == "bias":
        return torch.randn(shape, generator=draw, dtype=torch.float64).masked_fill(~seen, -math.inf)
    if reading.mask == "truth" and not blind:
        return seen.double()
    return ~seen if reading.mask == "hide" else seen


def layers(block: Block) -> Iterator[Layer]:
    if block.tensors or block.inputs not in (3, 4) or block.run is None:
        return
    readings = list(_readings(block))
    if not readings:
        return
    reading = readings[0]
    alike = ("mask", "places", "causal", "scale", "softcap", "mean")
    flat = next(
        (
            r
            for r in readings[1:]
            if r.inner is _ONE_BATCH and all(getattr(r, name) == getattr(reading, name) for name in alike)
        ),
        None,
    )
    # of as many keys as queries alone, where other numbers are refused or give something else
    both = [r for r in (reading, flat) if r is not None]
    for shared in [True, False] if reading.mask in _MASKS else [True]:
        for square in [True] if reading.causal else [False, True]:
            yield _layer(*(replace(r, square=square, shared=shared) for r in both))
    if reading.inner.heads >= 0:  # the code names its key heads
        for heads in _named(block):
            for square in [True] if reading.causal else [False, True]:
                yield _layer(replace(reading, square=square, shared=False, heads=heads))


def _layer(reading: _Reading, flat: _Reading | None = None) -> Layer:
    """``flat``: the same code does for three dimensions, too."""
    expression, guard, q = _expression(reading), _guard(reading), f"a{reading.places[0]}"
    if flat is not None:
        expression = f"({expression} if {q}.dim() == 4 else {_expression(flat)})"
        guard = f"({guard} if {q}.dim() == 4 else {_guard(flat)})"
    draw = functools.partial(_draw, [reading] if flat is None else [reading, flat])
    return Layer(
        "attention",
        expression,
        {},
        draw,
        len(_SIZES),
        guard,
        longer=reading.longer,
        widths=_WIDTHS,
        width=f"{q}.shape[{reading.own[0].size}]",
    )


def _named(block: Block) -> list[int]:
    """The first few numbers of the module's that may be one of heads."""
    return sorted({n for n in block.integers.values() if 1 < n <= 128})[:_NAMED]


def _draw(readings: Sequence[_Reading], seed: int) -> tuple[Tensor, ...]:
    return readings[seed % len(readings)].draw(seed)


def _names(reading: _Reading) -> list[str]:
    return [f"a{place}" for place in reading.places]


def _expression(reading: _Reading) -> str:
    q, k, v, *mask = _names(reading)
    given = [layout.inward.format(x) for layout, x in zip(reading.own, (q, k, v), strict=True)]
    options = {"causal": reading.causal, "scale": reading.scale, "softcap": reading.softcap}
    texts = [f"{name}={value!r}" for name, value in options.items() if value not in (False, None, 0.0)]
    if reading.mask in ("", _SIZED):
        return reading.outer.outward.format(f"ops.attention({', '.join([*given, *texts])})")
    shaped = mask[0] if reading.inner is not _ONE_BATCH else f"{mask[0]}[..., None, :, :]"
    texts += [f"mask={_MASKS[reading.mask].format(shaped)}", "return_lse=True"]
    # a row that sees nothing is NaN there, and 0 here
    nothing, called = "(r[1] == -torch.inf).unsqueeze(-1)", f"ops.attention({', '.join([*given, *texts])})"
    blind = "r[0] * torch.where(b, torch.nan, 1.0).to(r[0].dtype)"
    if reading.mask != "bias":
        # its scores are hidden, so queries and keys have gradients of 0 by it, and values NaN: the op's backward gets
        # no NaN, which its implementations would pass on to queries and keys
        group = f"{given[0]}.shape[1] // {given[1]}.shape[1]"
        mean = f"{given[2]}.mean(-2, keepdim=True).repeat_interleave({group}, 1)"
        summed = f"{given[2]}.sum(-2, keepdim=True).repeat_interleave({group}, 1)"
        spread = f"torch.where(b, {summed} * torch.where(b, torch.nan, 1.0).to(r[0].dtype), r[0])"
        blind = f"{spread} if {v}.requires_grad else r[0].masked_fill(b, torch.nan)"
        blind = f"torch.where(b, {mean}, r[0])" if reading.mean else blind
    both = f"(lambda r: (lambda b: {blind})({nothing}))({called})"
    return reading.outer.outward.format(both)


def _guard(reading: _Reading) -> str:
    q, k, v, *mask = _names(reading)
    heads, dims = reading.inner.heads, reading.inner.dims
    sizes = [f"{x}.shape[{layout.size}]" for layout, x in zip(reading.own, (q, k, v), strict=True)]
    rows = [f"{x}.shape[{layout.rows}]" for layout, x in zip(reading.own, (q, k, v), strict=True)]
    tests = [
        f"{q}.dim() == {k}.dim() == {v}.dim() == {dims}",
        f"{q}.shape[0] == {k}.shape[0] == {v}.shape[0]",
        f"{' == '.join(sizes)} <= {MAX_HEAD_DIM}",
        f"{rows[1]} == {rows[2]}",
        f"{q}.numel() > 0 and {k}.numel() > 0 and {v}.numel() > 0",
        f"{q}.dtype is {k}.dtype is {v}.dtype and {q}.dtype.itemsize < 8 and {q}.dtype.is_floating_point",
    ]
    if heads >= 0:
        of_keys, of_queries = f"{k}.shape[{heads}]", f"{q}.shape[{heads}]"
        group = f"{of_queries} == {reading.group} * {of_keys}" if reading.group else f"{of_queries} % {of_keys} == 0"
        one = f" or {of_keys} == 1" if reading.one else ""
        tests.append(f"{of_keys} == {v}.shape[{heads}] and ({group}{one})")
        tests += [f"{of_keys} == {reading.heads}"] if reading.heads else []
    if reading.square:
        tests.append(f"{rows[0]} == {rows[1]}")
    if reading.mask == _SIZED:
        whole = f"{q}.shape[{heads}] * " if heads >= 0 else f"{q}.shape[0] // {mask[0]}.shape[0] * "
        tests.append(f"{mask[0]}.dim() == 3 and {mask[0]}.shape[1] == {rows[1]}")
        tests.append(f"{mask[0]}.shape[2] == {whole}{sizes[0]}")
    elif mask:
        alike, truth = f"{mask[0]}.dtype is {q}.dtype", f"{mask[0]}.dtype is torch.bool"
        kind = {"bias": alike, "truth": f"({alike} or {truth})"}.get(reading.mask, truth)
        shared = (2, 3, 4) if heads >= 0 else (2, 3)
        places = f"{mask[0]}.dim() in {shared}" if reading.shared else f"{mask[0]}.dim() == {dims}"
        tests.append(f"{places} and {kind} and not {mask[0]}.requires_grad")
    return " and ".join(tests)


# Reading -----------------------------------------------------------------------------------------------------


def _readings(block: Block) -> Iterator[_Reading]:
    masks = ("",) if block.inputs == 3 else (*_MASKS, _SIZED)
    rest = tuple(range(3, block.inputs))
    orders = [(0, 1, 2, *rest), (1, 0, 2, *rest)] if block.ordered else [*itertools.permutations(range(block.inputs))]
    for turns in _TURNS if block.ordered else _TURNS[:1]:
        known = [*_readings_of(block, masks, orders, turns)]
        if known:
            yield from known
            return


def _readings_of(
    block: Block, masks: Sequence[str], orders: Sequence[tuple[int, ...]], turns: Sequence[bool]
) -> Iterator[_Reading]:
    for inner in _LAYOUTS:
        layouts = [inner.turned() if turn else inner for turn in turns]
        own = tuple(layout for layout in layouts if layout is not None)
        fitting = [places for places in orders if len(own) == 3 and _fits(block, inner, own, places)]
        for mask, places in itertools.product(masks, fitting):
            for heads in _heads(block, inner):
                probed = functools.partial(_probed, block, inner, own, mask, places, heads=heads)
                few, more = _GROUPS if inner.heads >= 0 else ((1,), ())
                groups = [g for g in few if probed(g)] or [g for g in more if probed(g)][:1]
                if groups:
                    outer, scale, softcap, causal = probed(groups[0]) or (inner, None, 0.0, False)
                    group = 0 if len(groups) > 1 else groups[0]
                    one = group == 1 and inner.heads >= 0 and probed(2, heads=1) is not None
                    mean = mask in _TOLD and _blind(block, inner, own, mask, places, groups[0], heads)
                    yield _Reading(places, inner, own, outer, group, mask, causal, scale, softcap, one, mean=mean)
                    break


def _heads(block: Block, inner: _Layout) -> tuple[int, ...]:
    return (2, *(n for n in _named(block) if n != 2 and inner.heads >= 0))


def _fits(block: Block, inner: _Layout, own: tuple[_Layout, ...], places: Sequence[int]) -> bool:
    """Whether the code takes inputs of such shapes at all, and gives one of attention: most orders end here."""
    few, more = _GROUPS if inner.heads >= 0 else ((1,), ())
    kinds = ("keep", "bias", _SIZED) if len(places) > 3 else ("",)
    assert block.shape is not None
    turned = any(layout.size != -1 for layout in own)
    groups, numbers = (few, (2,)) if turned else ((*few, *more), _heads(block, inner))
    for group, mask, heads in itertools.product(groups, kinds, numbers):
        reading = _Reading(tuple(places), inner, own, inner, group, mask, False, None, 0.0)
        given = _inputs(reading, 2, heads, group, 5, 5, 12, 0, 1.0)
        q = torch.empty(2, heads * group, 5, 12)
        if block.shape(tuple(given)) in [o.of(q).shape for o in _outer(inner)]:
            return True
    return False


def _outer(inner: _Layout) -> list[_Layout]:
    """Orders that a result may have."""
    turned = inner.turned() or _HEADS_FIRST.turned()
    assert turned is not None
    return [_ONE_BATCH, turned] if inner is _ONE_BATCH else [_HEADS_FIRST, _ROWS_FIRST, turned]


def _probed(
    block: Block,
    inner: _Layout,
    own: tuple[_Layout, ...],
    mask: str,
    places: Sequence[int],
    group: int,
    heads: int = 2,
) -> tuple[_Layout, float | None, float, bool] | None:
    """(the result's order, scale, soft cap, causal), or None where this is no attention of such inputs."""
    run = functools.partial(_probabilities, block, inner, own, mask, places, group, heads)
    near = run(8, 0.5)
    if near is None:
        return None
    outer, p, _ = near
    hidden, future = p == 0, torch.ones(p.shape[-2:]).triu(1).bool()
    masked = _hidden(len(future)) if mask in _MASKS else torch.zeros_like(future)
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
    block: Block, inner: _Layout, own: tuple[_Layout, ...], mask: str, places: Sequence[int], group: int, heads: int
) -> bool:
    """Whether a row that sees nothing is the mean of the values, as where scores are a number that is finite."""
    known = _probabilities(block, inner, own, mask, places, group, heads, 8, 0.5, blind=True)
    return known is not None and bool(((known[1][..., 0, :] - 1 / 8).abs() < 1e-9).all())


def _probabilities(
    block: Block,
    inner: _Layout,
    own: tuple[_Layout, ...],
    mask: str,
    places: Sequence[int],
    group: int,
    heads: int,
    width: int,
    size: float,
    blind: bool = False,
) -> tuple[_Layout, Tensor, Tensor] | None:
    """(the result's order, P, the products of queries and keys), both (B, H, S, S)."""
    batch, rows = 2, width  # values are as wide as keys, where the code has one width for both
    draw = torch.Generator().manual_seed(11)
    q = size * torch.randn(batch, heads * group, rows, width, generator=draw, dtype=torch.float64)
    k = size * torch.randn(batch, heads, rows, width, generator=draw, dtype=torch.float64)
    v = torch.eye(rows, dtype=torch.float64).roll(1, -1).expand(batch, heads, rows, rows)  # which is not its transpose
    inputs = [layout.of(x) for layout, x in zip(own, (q, k, v), strict=True)]
    if mask == _SIZED:
        inputs.append(torch.randn(batch, rows, heads * group * width, generator=draw, dtype=torch.float64))
    elif mask:
        shape = (batch * heads * group, rows, rows) if inner is _ONE_BATCH else (batch, 1, rows, rows)
        inputs.append(_probe(mask, shape, blind))
    given = [torch.empty(0)] * len(inputs)
    for place, x in zip(places, inputs, strict=True):
        given[place] = x
    assert block.run is not None
    outcome = block.run({}, tuple(given))
    result = None if outcome is None else outcome[0]
    if not isinstance(result, Tensor) or not result.is_floating_point():
        return None
    products = q @ k.repeat_interleave(group, 1).mT
    for outer in _outer(inner):
        if result.shape != outer.of(products).shape:
            continue
        p = result.unflatten(0, (batch, -1)) if inner is _ONE_BATCH else outer.of(result)
        p = (p.mT if inner is _ONE_BATCH and outer is not _ONE_BATCH else p).roll(-1, -1)
        if not bool(((p.sum(-1) - 1).abs() < 1e-6).all()) or bool((p < 0).any()):
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


def _softcap(far: tuple[_Layout, Tensor, Tensor] | None) -> float | None:
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
