"""Attention that a forward writes out: two products and a softmax between them, read from what they give.

Values that are an identity make the result the probabilities. Their zeros say what is hidden, and their logarithms,
beside the products of queries and keys, the scale and the soft cap. As of PyTorch's fused kernels, a row whose scores
are all -inf without a mask is 0, where the code that is written out gives NaN.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from torch import Tensor

from ferryman.ops.attention.arguments import MAX_HEAD_DIM
from ferryman.ops.attention.orders import MASKS, ONE_BATCH, SIZED, SIZES, WIDTHS, Reading
from ferryman.ops.attention.readings import numbers_of, readings_of
from ferryman.ops.recognition import Block, Layer


def layers(block: Block) -> Iterator[Layer]:
    sinks = [shape for shape in block.tensors.values() if math.prod(shape) == max(shape, default=0) > 1]
    if len(sinks) != len(block.tensors) or len(sinks) > 1 or block.inputs not in (3, 4) or block.run is None:
        return
    readings = list(readings_of(block))
    if not readings:
        return
    reading = readings[0]
    alike = ("mask", "places", "causal", "scale", "softcap", "mean")
    flat = next(
        (
            r
            for r in readings[1:]
            if r.inner is ONE_BATCH and all(getattr(r, name) == getattr(reading, name) for name in alike)
        ),
        None,
    )
    sides = {side: side for shape in sinks for side in shape}
    # of as many keys as queries alone, where other numbers are refused or give something else
    both = [r for r in (reading, flat) if r is not None]
    if _takes_other_values(block, reading):
        yield from _of_any_numbers([replace(r, apart=True) for r in both], sides)
    yield from _of_any_numbers(both, sides)
    if not (reading.single or sinks):  # the code names its key heads
        for heads in numbers_of(block):
            for square in [True] if reading.causal else [False, True]:
                yield _layer(replace(reading, square=square, shared=False, heads=heads))


def _takes_other_values(block: Block, reading: Reading) -> bool:
    """Whether the code takes values of another size than its keys."""
    return block.shape is not None and block.shape(tuple(replace(reading, apart=True).draw(0))) is not None


def _of_any_numbers(both: Sequence[Reading], sides: Mapping[int, int]) -> Iterator[Layer]:
    reading = both[0]
    for shared in [True, False] if reading.mask in MASKS and not reading.alone else [True]:
        for square in [True] if reading.causal else [False, True]:
            yield _layer(*(replace(r, square=square, shared=shared) for r in both), sides=sides)
            if reading.causal and reading.mask in ("", SIZED):
                yield _layer(*(replace(r, square=square, shared=shared, added=True) for r in both), sides=sides)


def _layer(reading: Reading, flat: Reading | None = None, *, sides: Mapping[int, int] | None = None) -> Layer:
    """``flat``: the same code does for three dimensions, too. sides: of the logits of its own, which stay."""
    expression, guard = _expression(reading), _guard(reading)
    q, _, v, *_ = _names(reading)
    width = f"{q}.shape[{reading.own[0].size}]"  # which the proof says to be one of `WIDTHS`, where that counts
    if flat is not None:
        expression = f"({expression} if {q}.dim() == 4 else {_expression(flat)})"
        guard = f"({guard} if {q}.dim() == 4 else {_guard(flat)})"
    draw = functools.partial(_draw, [reading] if flat is None else [reading, flat])
    return Layer(
        "attention",
        expression,
        sides or {},
        draw,
        len(SIZES),
        guard,
        longer=reading.longer,
        widths=WIDTHS,
        width=f"{v}.shape[{reading.own[2].size}] in {WIDTHS} and {width}" if reading.apart else width,
        fills=True,
    )


def _draw(readings: Sequence[Reading], seed: int) -> tuple[Tensor, ...]:
    return readings[seed % len(readings)].draw(seed)


def _names(reading: Reading) -> list[str]:
    return [f"a{place}" for place in reading.places]


def _expression(reading: Reading) -> str:
    q, k, v, *mask = _names(reading)
    given = [layout.inward.format(x) for layout, x in zip(reading.own, (q, k, v), strict=True)]
    options = {"causal": reading.causal and not reading.added, "scale": reading.scale, "softcap": reading.softcap}
    texts = [f"{name}={value!r}" for name, value in options.items() if value not in (False, None, 0.0)]
    texts += [f"sinks={reading.sinks}"] * bool(reading.sinks)
    if reading.added:
        rows = f"({q}.shape[{reading.own[0].rows}], {k}.shape[{reading.own[1].rows}])"
        hidden = f"torch.full({rows}, -torch.inf, dtype={q}.dtype, device={q}.device).triu(1)"
        texts = [f"mask={hidden}", *texts]
    if reading.mask in ("", SIZED):
        return reading.outer.outward.format(f"ops.attention({', '.join([*given, *texts])})")
    shaped = mask[0] if reading.inner is not ONE_BATCH else f"{mask[0]}[..., None, :, :]"
    texts += [f"mask={MASKS[reading.mask].format(shaped)}"]
    if reading.sinks:  # a row that sees nothing is 0 in both
        return reading.outer.outward.format(f"ops.attention({', '.join([*given, *texts])})")
    texts += ["return_lse=True"]
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


def _guard(reading: Reading) -> str:
    q, k, v, *mask = _names(reading)
    heads, dims = reading.inner.heads, reading.inner.dims
    sizes = [f"{x}.shape[{layout.size}]" for layout, x in zip(reading.own, (q, k, v), strict=True)]
    rows = [f"{x}.shape[{layout.rows}]" for layout, x in zip(reading.own, (q, k, v), strict=True)]
    tests = [
        f"{q}.dim() == {dims} and {k}.dim() == {v}.dim() == {reading.own[1].dims}",
        f"{q}.shape[0] == {k}.shape[0] == {v}.shape[0]",
        f"{' == '.join(sizes[:2] if reading.apart else sizes)} <= {MAX_HEAD_DIM}",
        f"{rows[1]} == {rows[2]}",
        f"{q}.numel() > 0 and {k}.numel() > 0 and {v}.numel() > 0",
        f"{q}.dtype is {k}.dtype is {v}.dtype and {q}.dtype.itemsize < 8 and {q}.dtype.is_floating_point",
    ]
    if reading.apart:
        tests.append(f"0 < {sizes[2]} <= {MAX_HEAD_DIM}")
    if reading.single and reading.group:
        tests.append(f"{q}.shape[{heads}] == {reading.group}")
    elif heads >= 0 and not reading.single:
        of_keys, of_queries = f"{k}.shape[{heads}]", f"{q}.shape[{heads}]"
        group = f"{of_queries} == {reading.group} * {of_keys}" if reading.group else f"{of_queries} % {of_keys} == 0"
        one = f" or {of_keys} == 1" if reading.one else ""
        tests.append(f"{of_keys} == {v}.shape[{heads}] and ({group}{one})")
        tests += [f"{of_keys} == {reading.heads}"] if reading.heads else []
    elif reading.heads and heads < 0:
        tests.append(f"{q}.shape[0] % {reading.heads} == 0")
    if reading.sinks:
        tests.append(f"{reading.sinks}.shape[0] == {q}.shape[{heads}] and {reading.sinks}.dtype is {q}.dtype")
    if reading.square:
        tests.append(f"{rows[0]} == {rows[1]}")
    if reading.mask == SIZED:
        tests.append(f"{mask[0]}.dim() == 3 and {mask[0]}.shape[1] == {rows[0]}")
    elif mask:
        alike, truth = f"{mask[0]}.dtype is {q}.dtype", f"{mask[0]}.dtype is torch.bool"
        kind = {"bias": alike, "truth": f"({alike} or {truth})"}.get(reading.mask, truth)
        shared = (2, 3, 4) if heads >= 0 else (2, 3)
        places = f"{mask[0]}.dim() in {shared}" if reading.shared else f"{mask[0]}.dim() == {dims}"
        places = f"{mask[0]}.dim() == 2" if reading.alone else places
        fixed = "" if reading.mask == "bias" else f" and not {mask[0]}.requires_grad"
        tests.append(f"{places} and {kind}{fixed}")
    return " and ".join(tests)
