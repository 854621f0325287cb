"""Functions that rotate queries and keys, in the layouts and with the angles that models have."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.recognition import Helper

# A rotation is linear in the heads and in the angles' cosine and sine: no function of it is one of these.
_OTHERS = (
    *(functional.scaled_dot_product_attention, functional.embedding, functional.dropout, functional.softplus),
    *(functional.cross_entropy, functional.nll_loss, functional.gelu, functional.silu, functional.relu),
    *(functional.rms_norm, functional.layer_norm, torch.softmax, torch.log_softmax, torch.logsumexp, torch.topk),
    *(torch.cos, torch.sin, torch.tanh, torch.exp, torch.log, torch.sigmoid, torch.rsqrt, torch.sqrt),
)
_NEVER = frozenset(f.__name__ for f in _OTHERS)
# (batch, heads, heads of keys, tokens, width) of a seed; what a function cuts shows in the last two
_SIZES = ((2, 4, 2, 5, 16), (2, 4, 2, 5, 16), (2, 4, 2, 5, 16), (1, 40, 20, 3, 320), (3, 2, 1, 1030, 8))

_MORE = (8, 2, 6, 304, 4)  # numbers of a head that are not turned, where code names how many are


@dataclass(frozen=True)
class _Layout:
    """How queries lie: the shape of heads ``h``, and expressions to (B, H, S, D) and back."""

    dims: int
    into: str
    back: str
    name: str

    def shape(self, heads: int, batch: int, tokens: int, width: int) -> tuple[int, ...]:
        full = {"b": batch, "h": heads, "s": tokens, "d": width}
        return tuple(full[letter] for letter in self.name)


_LAYOUTS = (
    _Layout(4, "{x}", "{x}", "bhsd"),
    _Layout(4, "{x}.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)", "{x}", "bhsd"),  # pairs brought apart first
    _Layout(4, "{x}.transpose(1, 2)", "{x}.transpose(1, 2)", "bshd"),
    _Layout(3, "{x}.transpose(0, 1).unsqueeze(0)", "{x}.squeeze(0).transpose(0, 1)", "shd"),
)
# What the op needs of a model's angles: how wide they are, expressions of cosine and sine, whether pairs interleave
_TWICE = "{c}[..., : {c}.shape[-1] // 2].repeat_interleave(2, -1)"
_ANGLES: tuple[tuple[str, str, str, bool], ...] = (
    ("full", "{c}", "{c}", False),
    ("full", "{c}", "{c}", True),
    ("half", "torch.cat(({c}, {c}), -1)", "torch.cat(({c}, {c}), -1)", False),
    ("half", "{c}.repeat_interleave(2, -1)", "{c}.repeat_interleave(2, -1)", True),
    ("full", _TWICE, _TWICE, True),
    ("full", "{c}", "-({c})", False),  # the other way round
    ("half", "torch.cat(({c}, {c}), -1)", "-torch.cat(({c}, {c}), -1)", False),
)


@dataclass(frozen=True)
class _Place:
    """How angles lie beside their width: letters of sizes, and what makes (B or 1, S, R) of them; ``only``: beside
    queries that lie so."""

    lead: str
    into: str
    only: str = ""

    def guard(self, angle: str, layout: _Layout) -> list[str]:
        parts = [f"{angle}.dim() == {len(self.lead) + 1}"]
        if self.lead[0] == "b":
            parts.append(f"{angle}.shape[0] in (1, a0.shape[0])")
        if "1" in self.lead:
            parts.append(f"{angle}.shape[{self.lead.index('1')}] == 1")
        parts.append(f"{angle}.shape[{self.lead.index('s')}] == a0.shape[{layout.name.index('s')}]")
        return parts


_PLACES = (
    _Place("bs", "{c}"),
    _Place("s", "{c}.unsqueeze(0)"),
    _Place("b1s", "{c}.squeeze(1)"),
    _Place("bs1", "{c}.squeeze(2)", "bshd"),
    _Place("1s", "{c}", "bhsd"),  # broadcast over heads, and so of all batches
    _Place("s1", "{c}.transpose(0, 1)", "bshd"),
)


def _draw(
    layout: _Layout,
    kind: str,
    place: _Place,
    whole: bool,
    pair: bool,
    seed: int,
    width: int = 0,
    turned: int = 0,
) -> tuple[Tensor, ...]:
    size, heads, fewer, tokens, usual = _SIZES[seed]
    width = turned + _MORE[seed] if turned else width or usual
    rotary = turned or (width if whole else width // 2)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    lead = [{"b": size, "s": tokens, "1": 1}[letter] for letter in place.lead]
    angles = []
    for _ in range(2):
        angles.append(normal(*lead, rotary // 2 if kind == "half" else rotary))
    queries = [normal(*layout.shape(h, size, tokens, width)) for h in ((heads, fewer) if pair else (heads,))]
    return (*queries, *angles)


@functools.cache
def helpers() -> tuple[Helper, ...]:
    """q, k, cos, sin, or x, cos, sin; cos and sin in either order; whole heads, or their first half."""
    return tuple(_helpers())


def _helpers() -> Iterator[Helper]:
    for pair in (True, False):
        count = 2 if pair else 1
        names = [f"a{i}" for i in range(count + 2)]
        for layout, place in itertools.product(_LAYOUTS, _PLACES):
            if (layout.name == "shd" and place.lead != "s") or place.only not in ("", layout.name):
                continue
            for kind, cosine, sine, interleaved in _ANGLES:
                for turned in (False, True):
                    cos, sin = names[count:][:: -1 if turned else 1]
                    given = [cosine.format(c=place.into.format(c=cos)), sine.format(c=place.into.format(c=sin))]
                    rope = _expression(names[:count], layout, given, interleaved)
                    for whole in (True, False):
                        draw = functools.partial(_draw, layout, kind, place, whole, pair)
                        guard = _guard(names, count, layout, place, kind == "half", whole)
                        strict = f"{names[0]}.dtype is {names[count]}.dtype"
                        part = "" if whole else f"a{count}.shape[-1]{' * 2' if kind == 'half' else ''}"
                        yield Helper("rope", rope, count + 2, draw, guard, strict, never=_NEVER, turned=part)
                        if kind == "half" and interleaved and not turned:
                            for one in _IN_ONE:
                                yield _in_one(one, names, count, rope, draw, layout, place, whole)


# Cosine and sine in one: expressions of both, what it must be, the axis of its width, how the heads' dtype may be
_IN_ONE = {
    "complex": (("{a}.real", "{a}.imag"), "{a}.dtype is torch.complex64", -1, "a0.dtype is torch.float32"),
    "pairs": (
        ("{a}[..., 0]", "{a}[..., 1]"),
        "{a}.shape[-1] == 2 and {a}.is_floating_point() and {a}.dtype.itemsize < 8",
        -2,
        "a0.dtype is {a}.dtype",
    ),
}


def _in_one(
    kind: str, names: list[str], count: int, rope: str, draw: Any, layout: _Layout, place: _Place, whole: bool
) -> Helper:
    """Of complex angles, or of a table with each cosine beside its sine."""
    angle = names[count]
    both, is_one, axis, strict = _IN_ONE[kind]
    if kind == "pairs" and layout.back != "{x}":  # the function's own result lies as its input does
        layout = replace(layout, back=f"{layout.back}.contiguous()")
    given = [f"{place.into.format(c=text.format(a=angle))}.repeat_interleave(2, -1)" for text in both]
    _, *sides = place.guard(angle, layout)
    width = f"{angle}.shape[{axis}] * 2 {'==' if whole else '<'} a0.shape[-1]"
    parts = [f"a0.dim() == {layout.dims} and {angle}.dim() == {len(place.lead) - axis}", is_one.format(a=angle)]
    parts += [*sides, width, f"a0.dtype.itemsize < 8 and not {angle}.requires_grad"]
    parts += ["a0.dtype is a1.dtype", _as_many(layout)] if count == 2 else []
    spelled, guard = _expression(names[:count], layout, given, True), " and ".join(parts)
    return Helper("rope", spelled, count + 1, draw, guard, strict.format(a=angle), kind, rope, _NEVER)


def _as_many(layout: _Layout) -> str:
    """Keys have as many places as queries."""
    at = layout.name.index("s")
    return f"a1.shape[{at}] == a0.shape[{at}]"


def _expression(xs: list[str], layout: _Layout, angles: list[str], interleaved: bool) -> str:
    pairs = ", interleaved=True" if interleaved else ""
    inside = [layout.into.format(x=x) for x in xs]
    if len(xs) == 2:
        call = f"ops.rope({inside[0]}, {inside[1]}, {angles[0]}, {angles[1]}{pairs})"
        if layout.back == "{x}":
            return call
        turned = [layout.back.format(x=f"pair[{i}]") for i in (0, 1)]
        return f"(lambda pair: ({turned[0]}, {turned[1]}))({call})"
    # the op turns a pair; of the second, no head is given
    call = f"ops.rope({inside[0]}, ({inside[0]})[:, :0], {angles[0]}, {angles[1]}{pairs})[0]"
    return layout.back.format(x=call)


def _guard(names: list[str], count: int, layout: _Layout, place: _Place, half: bool, whole: bool) -> str:
    first, angle = names[0], names[count]
    width = f"{angle}.shape[-1]{' * 2' if half else ''} {'==' if whole else '<'} {first}.shape[-1]"
    parts = [f"{first}.dim() == {layout.dims}", *place.guard(angle, layout), width]
    parts.append(f"{names[count + 1]}.shape == {angle}.shape")
    if count == 2:
        parts += [f"{first}.dtype is {names[1]}.dtype", _as_many(layout)]
    parts += [f"{first}.dtype.itemsize < 8", f"{angle}.dtype.itemsize < 8", f"not {angle}.requires_grad"]
    return " and ".join(parts)
