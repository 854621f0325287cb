"""Functions that scan a state space with a rate for each channel: one more token, whose state they renew, or all.

`selective_scan` gives no gradient, so they are served where none is needed. Steps are drawn on both sides of softplus's
bend, and not near 20 (`ssd_scan`). A function that imports another package's scan as it runs is none: no proof follows
that.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch

from ferryman.ops.recognition import Routine, Signature
from ferryman.ops.selective_scan import whole
from ferryman.ops.selective_scan.loops import recurrences as recurrences
from ferryman.ops.ssd_scan.recognise import Places, left_out, name_of, options

# (batch, channels, state) of a seed
_SHAPES = ((2, 5, 3), (1, 4, 7), (3, 6, 2), (2, 3, 4), (2, 4, 5), (1, 6, 3))


def routines(signature: Signature) -> Iterator[Routine]:
    """state, x, dt, a, b, c; then options, in any order. Or all tokens (`whole`)."""
    yield from whole.routines(signature)
    if signature.required != 6:
        return
    for places in options(signature, ("d", "bias", "z"), ("softplus",)):
        yield from _step(signature, places)


def _step(signature: Signature, places: Places) -> Iterator[Routine]:
    count = signature.required + len(signature.defaults)
    d, bias, z = name_of(places, "d"), name_of(places, "bias"), name_of(places, "z", ".unsqueeze(1)")
    guard = (
        "a0.dim() == 3 and a1.dim() == 2 and a2.shape == a1.shape and a3.dim() == 2 and a4.dim() == 2"
        " and a1.dtype is a4.dtype and a1.dtype is a5.dtype"
    )
    if "z" in places:
        guard += f" and (a{places['z']} is None or a{places['z']}.dtype is a1.dtype)"
    wide = frozenset({0, 3, *(places[r] for r in ("d", "bias") if r in places)})
    for b, c in (("a4", "a5"), ("a5", "a4")):
        for softplus in (True,) if "softplus" in places else (True, False):
            expression = (
                "(lambda pair: (pair[0].squeeze(1), pair[1].to(a0.dtype)))(ops.selective_scan(a1.unsqueeze(1),"
                f" a2.unsqueeze(1), a3, {b}.unsqueeze(1), {c}.unsqueeze(1), {d}, {z}, {bias}, a0, {softplus}))"
            )
            fixed: dict[int, Any] = {places["softplus"]: True} if "softplus" in places else {}
            draw = functools.partial(_draw, count, places, fixed)
            yield Routine("selective_scan", expression, draw, len(_SHAPES), guard, fixed, 0, wide, gradient=False)


def _draw(count: int, places: Places, fixed: dict[int, Any], seed: int) -> tuple[Any, ...]:
    batch, channels, width = _SHAPES[seed]
    generator = torch.Generator().manual_seed(seed)
    shapes = (
        (batch, channels, width),
        (batch, channels),
        (batch, channels),
        (channels, width),
        (batch, width),
        (batch, width),
        (channels,),
        (channels,),
        (batch, channels),
    )
    drawn = [torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes]
    drawn[3] = -0.2 - drawn[3].abs()
    if seed == 4:  # far on both sides of softplus's bend, and no bias brings them near it
        drawn[2] = torch.where(drawn[2] > 0, 29.0 + drawn[2], -40.0 + drawn[2])
        drawn[3], drawn[7] = 0.01 * drawn[3], drawn[7].clamp(-1, 1)
    if seed == 5:
        drawn[1], drawn[3] = 300.0 * drawn[1], 8.0 * drawn[3]
    arguments: list[Any] = [*drawn[:6], *([None] * (count - 6))]
    for role, value in (("d", drawn[6]), ("bias", drawn[7]), ("z", drawn[8])):
        if role in places and role not in left_out(seed) and not (role == "z" and seed in (2, 4)):
            arguments[places[role]] = value
    for at, value in fixed.items():
        arguments[at] = value
    return tuple(arguments)
