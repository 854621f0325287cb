"""Whole modules in nobody's library, as in `lookalikes`: what turns queries and keys, gates, layers of experts.

Right ones differ from what an op computes in how they are written; a look-alike has one planted difference.
"""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.unit.lookalikes import WORDS, Specimen

HEADS, DIM = 2, 16


def _words(draw: random.Random) -> list[str]:
    return draw.sample(WORDS, 10)


def _half(draw: random.Random, x: str) -> tuple[str, str]:
    """(what parts x into two, the halves' names) in one of the usual spellings."""
    if draw.random() < 0.5:
        return f"    first, last = {x}.chunk(2, dim=-1)\n", "first last"
    cut = draw.choice((f"{x}.shape[-1] // 2", f"{x}.size(-1) // 2"))
    return f"    n = {cut}\n    first, last = {x}[..., :n], {x}[..., n:]\n", "first last"


ROPE_FAULTS = {
    "both signs turned": "signs",
    "no sign": "plus",
    "halves that stay": "stay",
    "cosine and sine exchanged": "exchanged",
    "a scale left in": "scale",
    "the sum is a difference": "minus",
    "half of the sine left out": "part",
    "another result for many tokens": "many",
    "another result for large values": "large",
    "keys that stay": "keys",
    "detached": "detach",
    "rounded": "grid",
}


def _rope(draw: random.Random, fault: str) -> str:
    cls, turn, apply, x, q, k, c, s, lq, lk = _words(draw)
    parts, _ = _half(draw, x)
    turned = {"signs": "last, -first", "plus": "last, first", "stay": "-first, last"}.get(fault, "-last, first")
    if fault == "signs":
        turned = "-last, -first"
    joined = draw.choice((f"torch.cat(({turned}), dim=-1)", f"torch.cat([{turned}], -1)"))

    def one(of: str) -> str:
        cosine, sine = (s, c) if fault == "exchanged" else (c, s)
        left = draw.choice((f"{of} * {cosine}", f"{cosine} * {of}"))
        right = draw.choice((f"{turn}({of}) * {sine}", f"{sine} * {turn}({of})"))
        if fault == "scale":
            right = f"({right}) * 1.01"
        if fault == "part":
            right = f"{turn}({of}) * torch.cat(({sine}[..., :-1], {sine}[..., -1:] * 0), -1)"
        if fault == "minus":
            return f"({left}) - ({right}) + ({right}) * ({of} > 0)"
        return draw.choice((f"({left}) + ({right})", f"({right}) + ({left})"))

    ahead = {
        "many": f"    if {q}.shape[-2] > 64:\n        return {q}, {k}\n",
        "large": f"    if bool({q}.abs().max() > 1e5):\n        return {q}, {k}\n",
        "detach": f"    {q} = {q}.detach()\n",
        "grid": f"    {q} = ({q} * 256).round() / 256\n",
    }.get(fault, "")
    keys = k if fault == "keys" else one(k)
    return (
        f"def {turn}({x}):\n{parts}    return {joined}\n\n\n"
        f"def {apply}({q}, {k}, {c}, {s}):\n    {c}, {s} = {c}.unsqueeze(1), {s}.unsqueeze(1)\n{ahead}"
        f"    return {one(q)}, {keys}\n\n\n"
        f"class {cls.title()}(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n"
        f"        self.{lq}, self.{lk} = nn.Linear(width, {HEADS * DIM}), nn.Linear(width, {HEADS * DIM})\n\n"
        f"    def forward(self, x):\n"
        f"        a, b = (f(x).unflatten(-1, ({HEADS}, {DIM})).transpose(1, 2) for f in (self.{lq}, self.{lk}))\n"
        f"        places = torch.arange(x.shape[1], dtype=torch.float32, device=x.device)\n"
        f"        steps = 0.3 ** torch.arange({DIM // 2}, dtype=torch.float32)\n"
        f"        angles = torch.outer(places, steps).repeat(1, 2)[None]\n"
        f"        a, b = {apply}(a, b, angles.cos().to(x.dtype), angles.sin().to(x.dtype))\n"
        f"        return torch.cat((a, b), -1).transpose(1, 2).flatten(2)\n"
    )


GATE_FAULTS = {
    "the gate is not activated": "bare",
    "another slope": "slope",
    "the sum, not the product": "sum",
    "one is added": "one",
    "the gate is clamped": "clamp",
    "activated twice": "twice",
    "another activation": "other",
    "the gate is detached": "detach",
}


def _gate(draw: random.Random, fault: str) -> str:
    cls, up, gate, down, act, x, h, g, y, _ = _words(draw)
    name = draw.choice(("silu", "gelu"))
    as_module = draw.random() < 0.4
    module = {"silu": "nn.SiLU()", "gelu": "nn.GELU()"}[name]
    call = f"self.{act}" if as_module else f"nn.functional.{name}"
    inner = f"self.{gate}({x})"
    gated = {
        "bare": inner,
        "slope": f"{inner} * torch.sigmoid(1.5 * {inner})",
        "clamp": f"{call}({inner}.clamp(max=2.0))",
        "twice": f"{call}({call}({inner}))",
        "other": f"nn.functional.softplus({inner})",
        "detach": f"{call}({inner}.detach())",
    }.get(fault, f"{call}({inner})")
    other = f"(self.{up}({x}) + 1.0)" if fault == "one" else f"self.{up}({x})"
    sign = "+" if fault == "sum" else "*"
    spelled = draw.randrange(3)
    if spelled == 0:
        body = f"        return self.{down}({gated} {sign} {other})\n"
    elif spelled == 1:
        body = f"        {g} = {gated}\n        {y} = {other}\n        return self.{down}({g} {sign} {y})\n"
    else:
        body = f"        {h} = {other}\n        {h} = {h} {sign} {gated}\n        return self.{down}({h})\n"
    keep = f"        self.{act} = {module}\n" if as_module else ""
    return (
        f"class {cls.title()}(nn.Module):\n    def __init__(self, width):\n        super().__init__()\n"
        f"        self.{up}, self.{gate} = nn.Linear(width, 32), nn.Linear(width, 32)\n"
        f"        self.{down} = nn.Linear(32, width)\n{keep}\n    def forward(self, {x}):\n{body}"
    )


EXPERT_FAULTS = {
    "up before the gate": "first",
    "the share before the product": "before",
    "the share squared": "squared",
    "no share": "unshared",
    "clipped": "clip",
    "one expert is skipped": "skip",
    "an expert that is chosen twice counts once": "once",
    "the last slot is left out": "slot",
    "another activation": "other",
    "another result while training": "training",
    "another result where few experts are chosen": "few",
    "averaged over the slots": "mean",
}


def _experts(draw: random.Random, fault: str) -> str:
    cls, up, down, number, x, ids, shares, out, e, h = _words(draw)
    ids_first = draw.random() < 0.7
    turned = draw.random() < 0.3
    act = draw.choice(("nn.functional.silu", "nn.functional.gelu"))
    if fault == "other":
        act = "torch.relu"
    given = f"{ids}, {shares}" if ids_first else f"{shares}, {ids}"
    rows = (("e, w, 32", "e, 16, w") if turned else ("e, 32, w", "e, w, 16"))[0:2]
    token = f"{x}[t]" + (f" * {shares}[t, j, None]" if fault == "before" else "")

    def times(v: str, weight: str) -> str:
        whole = f"self.{weight}[{e}]"
        return (
            f"{v} @ {whole}" if turned else draw.choice((f"nn.functional.linear({v}, {whole})", f"{v} @ {whole}.t()"))
        )

    halves = "u, g" if fault == "first" else "g, u"
    product = draw.choice((f"{act}(g) * u", f"u * {act}(g)"))
    if fault == "clip":
        product = f"{act}(g.clamp(max=7.0)) * u"
    share = {
        "before": "",
        "unshared": "",
        "squared": f" * {shares}[t, j, None] ** 2",
        "mean": f" * {shares}[t, j, None] / {ids}.shape[-1]",
    }.get(fault, f" * {shares}[t, j, None]")
    hits = f"{ids}.unique()"
    chosen = f"{ids} == {e}"
    if fault == "slot":
        chosen = f"({chosen}) & (torch.arange({ids}.shape[1]) + 1 < {ids}.shape[1])"
    ahead = {
        "skip": f"            if {e} == 3:\n                continue\n",
        "few": f"            if len({hits}) == 7:\n                continue\n",
    }.get(fault, "")
    once = (
        "            t, which = t.unique(return_inverse=True)\n            j = j[: len(t)]\n" if fault == "once" else ""
    )
    after = f"        if self.training:\n            {out} = {out} * 1.01\n" if fault == "training" else ""
    return (
        f"class {cls.title()}(nn.Module):\n    def __init__(self, w, e=6):\n        super().__init__()\n"
        f"        self.{number} = e\n"
        f"        self.{up} = nn.Parameter(torch.randn({rows[0]}) * 0.2)\n"
        f"        self.{down} = nn.Parameter(torch.randn({rows[1]}) * 0.2)\n\n"
        f"    def forward(self, {x}, {given}):\n        {out} = torch.zeros_like({x})\n"
        f"        for {e} in {hits}:\n            if {e} == self.{number}:\n                continue\n{ahead}"
        f"            t, j = torch.where({chosen})\n{once}"
        f"            {halves} = ({times(f'({token})', up)}).chunk(2, dim=-1)\n"
        f"            {h} = {times(f'({product})', down)}\n"
        f"            {out}.index_add_(0, t, ({h}{share}).to({out}.dtype))\n{after}"
        f"        return {out}\n"
    )


# An op computes these, or the part of them that is a gate or one rotation; what is served must give their own result
# all the same.
EXPRESSIBLE = frozenset(
    {
        *("cosine and sine exchanged", "half of the sine left out", "the sum is a difference", "keys that stay"),
        *("another result for large values", "detached", "rounded"),
        *("one is added", "the gate is clamped", "activated twice", "the gate is detached"),
    }
)


def _tokens(module: Any, width: int) -> Iterator[tuple[Tensor, ...]]:
    """Few tokens and many, small numbers and large."""
    generator = torch.Generator().manual_seed(3)
    for shape, scale in (((2, 5, width), 1.0), ((2, 80, width), 1.0), ((2, 5, width), 1e6), ((1, 3, width), 0.01)):
        yield (torch.randn(shape, generator=generator) * scale,)


def _routed(module: Any, width: int) -> Iterator[tuple[Tensor, ...]]:
    """Tokens, their experts' numbers and shares, in the order that the module takes."""
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(6, (40, 2), generator=generator)
    ids[0] = ids[0, 0]
    shares = torch.rand(40, 2, generator=generator)
    tells = inspect.getsource(type(module)).split("for ", 1)[1].split(".unique()")[0].split(" in ")[1]
    second = list(inspect.signature(module.forward).parameters)[1]
    for scale in (1.0, 50.0, 0.01):
        x = torch.randn(40, width, generator=generator) * scale
        yield (x, ids, shares) if second == tells else (x, shares, ids)


@dataclass(frozen=True)
class Kind:
    """How modules of a kind are written, their faults, the ops that they resemble, and what they are tried with.
    block: one module is the op, as a block, and not its leaves or a function in it."""

    make: Callable[[random.Random, str], str]
    faults: Mapping[str, str]
    ops: frozenset[str]
    inputs: Callable[[Any, int], Iterator[tuple[Tensor, ...]]] = _tokens
    block: bool = False


KINDS: Mapping[str, Kind] = {
    "rope": Kind(_rope, ROPE_FAULTS, frozenset({"rope"})),
    "gate": Kind(_gate, GATE_FAULTS, frozenset({"silu_mul", "gelu_mul"})),
    "moe_experts": Kind(_experts, EXPERT_FAULTS, frozenset({"moe_experts"}), _routed, block=True),
}


def wholes(count: int, seed: int, right: bool) -> list[Specimen]:
    """``count`` modules: right ones, or one fault after the other, in an order that is drawn."""
    draw = random.Random(seed)
    kinds = list(KINDS)
    faults = [(op, text, key) for op, kind in KINDS.items() for text, key in kind.faults.items()]
    draw.shuffle(faults)
    drawn = []
    for i in range(count):
        op, text, key = (kinds[i % len(kinds)], "", "") if right else faults[i % len(faults)]
        source = KINDS[op].make(draw, key)
        drawn.append(Specimen(source.rsplit("class ", 1)[1].split("(", 1)[0], op, source, text))
    return drawn
