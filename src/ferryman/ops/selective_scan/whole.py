"""Functions that scan all tokens of a state space with a rate for each channel, written out as a loop over tokens."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch

from ferryman.ops.recognition import Routine, Signature
from ferryman.ops.ssd_scan.recognise import Places, left_out, name_of, options

# (batch, tokens, channels, state) of a seed
_SHAPES = ((2, 6, 5, 3), (1, 4, 4, 7), (3, 2, 6, 2), (2, 9, 3, 4), (2, 1, 4, 5), (1, 3, 6, 3))


def routines(signature: Signature) -> Iterator[Routine]:
    """x, dt, a, b, c and perhaps d; then options, in any order. Tokens stand before channels or behind them."""
    if signature.required not in (5, 6):
        return
    rest = ("bias", "z", "state") if signature.required == 6 else ("d", "bias", "z", "state")
    for places in options(signature, rest, ("softplus", "final")):
        if "limit" not in places:
            yield from _scans(signature, places | ({"d": 5} if signature.required == 6 else {}))


def _scans(signature: Signature, places: Places) -> Iterator[Routine]:
    count = signature.required + len(signature.defaults)
    wide = frozenset({2, *(places[r] for r in ("d", "bias", "state") if r in places)})
    d, bias, state = (name_of(places, role) for role in ("d", "bias", "state"))
    for turned, (b, c), softplus, final in itertools.product(
        (False, True), (("a3", "a4"), ("a4", "a3")), (True, False), (False, True)
    ):
        turn = ".transpose(1, 2)" if turned else ""
        guard = (
            "a0.dim() == 3 and a1.shape == a0.shape and a2.dim() == 2 and a3.dim() == 3 and a4.dim() == 3"
            " and a0.dtype is a1.dtype and a0.dtype is a3.dtype and a0.dtype is a4.dtype and a0.numel() > 0"
            f" and a2.shape[0] == a0.shape[{1 if turned else 2}] and a3.shape == a4.shape"
        )
        if "z" in places:
            z = f"a{places['z']}"
            guard += f" and ({z} is None or ({z}.dtype is a0.dtype and {z}.shape == a0.shape))"
        call = (
            f"ops.selective_scan(a0{turn}, a1{turn}, a2, {b}{turn}, {c}{turn}, {d}, {name_of(places, 'z', turn)},"
            f" {bias}, {state}, {softplus})"
        )
        fixed: dict[int, Any] = {places["softplus"]: softplus} if "softplus" in places else {}
        fixed |= {places["final"]: final} if "final" in places else {}
        expression = f"(lambda y, h: (y{turn}, h))(*{call})" if final else f"{call}[0]{turn}"
        draw = functools.partial(_draw, count, places, fixed, turned)
        same = [f"{n}.dtype is a0.dtype" for n in (f"a{i}" for i in sorted(wide))]
        same = [f"({n.split('.')[0]} is None or {n})" for n in same]
        strict = " and ".join([guard, *same])  # code that keeps its own dtype among others of one
        apart = " and ".join([guard, *(test.replace("a0.dtype", "torch.float32") for test in same)])
        all_of, none = frozenset(range(count)), frozenset[int]()
        single = f"{strict} and a0.dtype is torch.float32"  # code that gives that of any other
        for test, mixed, only in (
            (guard, wide, False),
            (strict, none, False),
            (apart, wide, True),
            (single, all_of, True),
        ):
            yield Routine(
                "selective_scan",
                expression,
                draw,
                len(_SHAPES),
                test,
                fixed,
                None,
                mixed,
                gradient=False,
                entered=True,
                apart=only,
            )


def _draw(count: int, places: Places, fixed: dict[int, Any], turned: bool, seed: int) -> tuple[Any, ...]:
    batch, length, channels, width = _SHAPES[seed]
    draw = torch.Generator().manual_seed(seed)
    rows = ((batch, length, channels), (batch, length, width))
    shapes = (rows[0], rows[0], (channels, width), rows[1], rows[1], (channels,), (channels,), rows[0])
    x, dt, a, b, c, d, bias, z = (torch.randn(s, generator=draw, dtype=torch.float64) for s in shapes)
    state = torch.randn(batch, channels, width, generator=draw, dtype=torch.float64)
    a = -0.2 - a.abs()
    if seed == 4:  # far on both sides of softplus's bend, and no bias brings them near it
        dt, a, bias = torch.where(dt > 0, 29.0 + dt, -40.0 + dt), 0.01 * a, bias.clamp(-1, 1)
    if seed == 5:
        x, a = 300.0 * x, 8.0 * a
    x, dt, b, c, z = (t.transpose(1, 2).contiguous() if turned else t for t in (x, dt, b, c, z))
    arguments: list[Any] = [x, dt, a, b, c, *([None] * (count - 5))]
    for role, value in (("d", d), ("bias", bias), ("z", z), ("state", state)):
        given = role in places and ((places[role] == 5 and role == "d") or role not in left_out(seed))
        if given and not (role == "z" and seed in (2, 4)):
            arguments[places[role]] = value
    for at, value in fixed.items():
        arguments[at] = value
    return tuple(arguments)
