"""Functions that run the gated delta rule in models: of all tokens in chunks, or one after another."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ferryman.ops.gated_delta_rule.loops import recurrences as recurrences
from ferryman.ops.recognition import Routine, Signature

# (batch, length, heads of keys, heads of values, key, value, chunk) of a seed
_SHAPES = (
    (2, 7, 2, 4, 5, 3, 3),
    (1, 6, 3, 3, 4, 2, 3),
    (2, 2, 1, 2, 4, 3, 8),
    (1, 1, 4, 4, 3, 2, 4),
    (2, 5, 2, 2, 5, 3, 2),
    (1, 9, 1, 3, 3, 2, 4),
    (1, 8, 1, 1, 3, 2, 4),
)


def routines(signature: Signature) -> Iterator[Routine]:
    """q, k, v, g and beta; then a chunk's length, a state and two flags, in any order."""
    if signature.required != 5:
        return
    at: dict[str, list[int]] = {"none": [], "flag": [], "chunk": [], "other": []}
    for i, value in enumerate(signature.defaults, signature.required):
        whole = isinstance(value, int) and value > 0
        kind = "none" if value is None else "flag" if isinstance(value, bool) else "chunk" if whole else "other"
        at[kind].append(i)
    if at["other"] or len(at["none"]) != 1 or len(at["flag"]) != 2 or len(at["chunk"]) > 1:
        return
    for (last, norm), final, normed in itertools.product(
        itertools.permutations(at["flag"]), (False, True), (True, False)
    ):
        yield from _of(signature, at["none"][0], at["chunk"], {last: final, norm: normed}, final, normed)


def _of(
    signature: Signature, state: int, chunk: list[int], fixed: dict[int, bool], final: bool, normed: bool
) -> Iterator[Routine]:
    call = f"ops.gated_delta_rule(a0, a1, a2, a3, a4, a{state}, None, {normed})"
    expression = call if final else f"({call}[0], None)"
    guard = (
        "a0.dim() == 4 and a2.dim() == 4 and a3.dim() == 3 and a0.numel() > 0 and a2.numel() > 0"
        " and a0.dtype is a1.dtype and a0.dtype is a2.dtype"
    )
    if chunk:
        guard += f" and a{chunk[0]} > 0"
    draw = functools.partial(_draw, signature.required + len(signature.defaults), state, chunk, fixed)
    wide = frozenset({3, state})
    yield Routine("gated_delta_rule", expression, draw, len(_SHAPES), guard, fixed, wide=wide, entered=True)


def _draw(count: int, state: int, chunk: list[int], fixed: dict[int, bool], seed: int) -> tuple[Any, ...]:
    batch, length, shared, heads, width, dim, size = _SHAPES[seed]
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, length, shared, width),
        (batch, length, shared, width),
        (batch, length, heads, dim),
        (batch, length, heads),
        (batch, length, heads),
        (batch, heads, width, dim),
    )
    q, k, v, g, beta, kept = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    k = k / width**0.5
    g = -g.abs() * (6.0 if seed == 4 else 0.5)
    if seed == 5:  # so small that what is added to a square decides
        q, k = 2.0**-10 * q, 2.0**-10 * k
    if seed == 6:
        v, g = 300.0 * v, 0.0 * g
    arguments: list[Any] = [q, k, v, g, torch.sigmoid(beta), *([None] * (count - 5))]
    if seed not in (1, 5):
        arguments[state] = kept
    for at in chunk:
        arguments[at] = size
    for at, value in fixed.items():
        arguments[at] = value
    return tuple(arguments)
