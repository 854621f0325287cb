"""Functions that scan a state space in models: of all tokens in chunks, and of the next one after a state.

`ssd_scan` gives no gradient, so they are served where none is needed. PyTorch's softplus is the identity from 20 on,
where the op adds exp(-20) = 2^-29 and less of the step: too little for float32, which has 24 bits, and too much for a
proof in float64. So steps are drawn on both sides of it, and not between 18 and 27.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.recognition import Routine, Signature
from ferryman.ops.ssd_scan.loops import recurrences as recurrences

Places = dict[str, int]
_INFINITE = float("inf")
# (batch, length, heads, head_dim, groups, state, chunk) of a seed
_SHAPES = (
    (2, 7, 4, 3, 2, 5, 3),
    (1, 6, 6, 2, 3, 4, 3),
    (2, 2, 2, 3, 1, 4, 8),
    (1, 1, 4, 2, 4, 3, 4),
    (2, 5, 4, 3, 2, 5, 2),
    (1, 9, 2, 2, 1, 3, 4),
    (2, 0, 2, 2, 1, 3, 4),  # no token: a loop over tokens that is not entered
)


def routines(signature: Signature) -> Iterator[Routine]:
    """x, dt, a, b, c and perhaps a chunk's length; state, x, dt, a, b, c. Then options, in any order."""
    if signature.required in (5, 6):
        for places in options(signature, ("d", "bias", "state"), ("softplus", "final")):
            yield from _chunked(signature, places)
    if signature.required == 6:
        for places in options(signature, ("d", "bias", "z"), ("softplus",)):
            yield from _step(signature, places)


def options(signature: Signature, absent: tuple[str, ...], flags: tuple[str, ...]) -> Iterator[Places]:
    """Which parameter has which role: what is None without being given, what is a flag, a pair of limits."""
    at = {kind: [] for kind in ("none", "flag", "limit", "other")}  # type: dict[str, list[int]]
    for i, value in enumerate(signature.defaults, signature.required):
        pair = isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, float) for v in value)
        kind = "none" if value is None else "flag" if isinstance(value, bool) else "limit" if pair else "other"
        at[kind].append(i)
    if at["other"] or len(at["limit"]) > 1 or len(at["none"]) > len(absent) or len(at["flag"]) > len(flags):
        return
    for first in itertools.permutations(absent, len(at["none"])):
        for second in itertools.permutations(flags, len(at["flag"])):
            named = dict(zip((*first, *second), (*at["none"], *at["flag"]), strict=True))
            yield named | ({"limit": at["limit"][0]} if at["limit"] else {})


def name_of(places: Places, role: str, index: str = "") -> str:
    if role not in places:
        return "None"
    name = f"a{places[role]}"
    return f"(None if {name} is None else {name}{index})" if index else name


def _chunked(signature: Signature, places: Places) -> Iterator[Routine]:
    d, bias, state = (name_of(places, role) for role in ("d", "bias", "state"))
    guard = (
        "a0.dim() == 4 and a1.dim() == 3 and a2.dim() == 1 and a3.dim() == 4 and a0.dtype is a3.dtype"
        " and a0.dtype is a4.dtype"
    )
    limits = f", float(a{places['limit']}[0]), float(a{places['limit']}[1])" if "limit" in places else ""
    count = signature.required + len(signature.defaults)
    wide = frozenset({2, *(places[r] for r in ("d", "bias", "state") if r in places)})
    for b, c in (("a3", "a4"), ("a4", "a3")):
        for softplus in (True,) if "softplus" in places else (True, False):
            for final in (False, True):
                for float32 in (True, False):
                    call = f"ops.ssd_scan(a0, a1, a2, {b}, {c}, {d}, {bias}, {state}, {softplus}, {float32}{limits})"
                    fixed: dict[int, Any] = {places["softplus"]: True} if "softplus" in places else {}
                    if "final" in places:
                        fixed[places["final"]] = final
                    draw = functools.partial(_draw, count, signature.required, places, fixed)
                    expression = call if final else f"{call}[0]"
                    yield Routine("ssd_scan", expression, draw, len(_SHAPES), guard, fixed, wide=wide)


def _step(signature: Signature, places: Places) -> Iterator[Routine]:
    """One token: dt, a, d and the bias come spread over a head's dimensions, seen by strides of 0."""
    count = signature.required + len(signature.defaults)
    d, bias = name_of(places, "d", "[:, 0]"), name_of(places, "bias", "[:, 0]")
    same = ["a2", *(f"a{places[r]}" for r in ("d", "bias") if r in places)]
    spread = " and ".join(
        f"({n} is None or ({n}.shape[-1:] == a1.shape[-1:] and (a1.shape[-1] == 1 or {n}.stride(-1) == 0)))"
        for n in same
    )
    guard = (
        "a0.dim() == 4 and a1.dim() == 3 and a2.dim() == 3 and a3.dim() == 3 and a4.dim() == 3"
        " and a1.numel() > 0 and a1.dtype is a4.dtype and a1.dtype is a5.dtype and a3.shape == a0.shape[1:]"
        " and (a1.shape[-1] == 1 or a3.stride(1) == 0) and (a3.shape[-1] == 1 or a3.stride(2) == 0)"
        f" and {spread}"
    )
    wide = frozenset({0, 3, *(places[r] for r in ("d", "bias") if r in places)})
    for b, c in (("a4", "a5"), ("a5", "a4")):
        for softplus in (True,) if "softplus" in places else (True, False):
            for gated in (False, True) if "z" in places else (False,):
                y = "pair[0].squeeze(1)"
                if gated:  # in float32, and rounded once
                    z = f"a{places['z']}"
                    z = f"{z}.to(torch.promote_types({z}.dtype, torch.float32))"
                    y = f"({y} * torch.nn.functional.silu({z})).to(a1.dtype)"
                expression = (
                    f"(lambda pair: ({y}, pair[1].to(a0.dtype)))(ops.ssd_scan(a1.unsqueeze(1), a2[..., 0].unsqueeze(1),"
                    f" a3[:, 0, 0], {b}.unsqueeze(1), {c}.unsqueeze(1), {d}, {bias}, a0, {softplus}, {gated}))"
                )
                fixed: dict[int, Any] = {places["softplus"]: True} if "softplus" in places else {}
                if "z" in places and not gated:
                    fixed[places["z"]] = None
                test = (
                    f"{guard} and a{places['z']} is not None and a{places['z']}.dtype is a1.dtype" if gated else guard
                )
                draw = functools.partial(_draw_step, count, places, fixed)
                yield Routine("ssd_scan", expression, draw, len(_SHAPES) - 1, test, fixed, 0, wide, gradient=False)


def _values(seed: int) -> dict[str, Tensor]:
    batch, length, heads, dim, groups, width, _ = _SHAPES[seed]
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "x": (batch, length, heads, dim),
        "dt": (batch, length, heads),
        "a": (heads,),
        "b": (batch, length, groups, width),
        "c": (batch, length, groups, width),
        "d": (heads,),
        "bias": (heads,),
        "state": (batch, heads, dim, width),
    }
    values = {n: torch.randn(s, generator=generator, dtype=torch.float64) for n, s in shapes.items()}
    values["a"] = -0.2 - values["a"].abs()
    if seed == 4:  # far on both sides of softplus's bend, and no bias brings them near it
        values["dt"] = torch.where(values["dt"] > 0, 29.0 + values["dt"], -40.0 + values["dt"])
        values["bias"], values["a"] = values["bias"].clamp(-1, 1), 0.01 * values["a"]
    if seed == 5:
        values["x"], values["a"] = 300.0 * values["x"], 8.0 * values["a"]
    return values


def left_out(seed: int) -> set[str]:
    return {1: {"state"}, 2: {"d"}, 3: {"bias"}, 5: {"d", "bias", "state"}}.get(seed, set())


def _draw(count: int, required: int, places: Places, fixed: dict[int, Any], seed: int) -> tuple[Any, ...]:
    values = _values(seed)
    arguments: list[Any] = [*(values[n] for n in ("x", "dt", "a", "b", "c")), *([None] * (count - 5))]
    if required == 6:
        arguments[5] = _SHAPES[seed][-1]
    for role in ("d", "bias", "state"):
        if role in places and role not in left_out(seed):
            arguments[places[role]] = values[role]
    if "limit" in places:
        arguments[places["limit"]] = ((0.4, 1.1), (0.0, _INFINITE), (-1.0, 0.5), (0.2, _INFINITE))[seed % 4]
    for at, value in fixed.items():
        arguments[at] = value
    return tuple(arguments)


def _draw_step(count: int, places: Places, fixed: dict[int, Any], seed: int) -> tuple[Any, ...]:
    values = _values(seed)
    _, _, heads, dim, _, width, _ = _SHAPES[seed]
    dt = values["dt"][:, 0, :, None].expand(-1, -1, dim)
    rate = values["a"][:, None, None].expand(heads, dim, width)
    arguments: list[Any] = [values["state"], values["x"][:, 0], dt, rate, values["b"][:, 0], values["c"][:, 0]]
    arguments += [None] * (count - 6)
    for role in ("d", "bias"):
        if role in places and role not in left_out(seed):
            arguments[places[role]] = values[role][:, None].expand(heads, dim)
    if "z" in places:
        arguments[places["z"]] = 2.0 * values["x"][:, 0].flip(0, -1)
    for at, value in fixed.items():
        arguments[at] = value
    return tuple(arguments)
