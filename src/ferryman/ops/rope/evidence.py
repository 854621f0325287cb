"""What rotary embeddings are tried with: cases, and shapes of models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Rule, Symbols, broadcast, multiple, positive
from ferryman.ops.draw import TIES, Draw, Fill
from ferryman.ops.evidence import Evidence, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.ops.rope.equivalents import EQUIVALENTS


def _cases() -> Sequence[Case]:
    cases = []

    def add(
        name: str,
        q: tuple[int, ...],
        kv_heads: int,
        rotary: int | None = None,
        cos_dtype: str = "storage",
        batch: int = 1,
        layout: str = "heads",
        interleaved: bool = False,
        tier: str = "small",
        fill: str | None = None,
        exact: bool = False,
    ) -> None:
        apart = "rows" if layout == "last" else "contiguous"
        angle = TensorSpec((batch, q[2], rotary or q[3]), cos_dtype, "signs" if exact else "unit", apart)
        cases.append(
            Case(
                name,
                {
                    "q": TensorSpec(q, layout=layout, fill=fill),
                    "k": TensorSpec((q[0], kv_heads, *q[2:]), layout=layout, fill=fill),
                    "cos": angle,
                    "sin": angle,
                    "interleaved": interleaved,
                },
                tier,  # type: ignore[arg-type]
                exact,
            )
        )

    add("d64", (2, 4, 7, 64), 2)
    add("d128_float32_angles", (1, 3, 5, 128), 1, cos_dtype="float32")
    add("d96", (2, 3, 5, 96), 2)  # half of it is no power of two
    add("partial", (2, 2, 5, 80), 2, rotary=32)
    add("per_batch", (2, 2, 5, 64), 1, batch=2)
    add("interleaved", (2, 3, 7, 64), 1, interleaved=True)
    add("interleaved_partial", (1, 2, 7, 96), 2, rotary=48, interleaved=True)
    # no vector fits a head, and a block has no room for all heads of a token
    add("interleaved_odd", (1, 3, 3, 131), 2, rotary=100, interleaved=True)
    add("decode", (3, 4, 1, 128), 2)
    add("tiny_head", (1, 1, 3, 2), 1)
    add("contiguous", (2, 2, 5, 64), 2, layout="contiguous")
    add("offset", (2, 2, 5, 64), 2, layout="offset")
    add("strided_last", (2, 2, 5, 64), 2, layout="last")
    # angles narrower than x, and sines that do not lie as the cosines do
    add("angles_apart", (2, 2, 17, 64), 2, cos_dtype="bfloat16")
    sines = replace(cases[-1].args["sin"], layout="strided:17,1,17+1")
    cases[-1] = replace(cases[-1], args={**cases[-1].args, "sin": sines})
    add("empty", (0, 2, 5, 64), 2)
    # more packs than a multiprocessor has threads at once, and more than it has room for
    add("packs_some", (2, 4, 33, 64), 2, interleaved=True)
    add("packs_many", (2, 6, 127, 64), 2)
    for fill in ("offset", "large", "nonfinite"):
        add(f"fill_{fill}", (1, 2, 9, 64), 2, fill=fill)
    for name, shape, tier in (("quarters", (2, 3, 7, 64), "small"), ("quarters_1023", (2, 8, 1023, 128), "standard")):
        add(f"exact_{name}", shape, 1, tier=tier, fill="integer", exact=True)
        partial = {"rotary": shape[3] // 4 * 3, "batch": 2, "interleaved": True}
        add(f"exact_{name}_partial", shape, 1, tier=tier, fill="integer", exact=True, **partial)  # type: ignore[arg-type]
    add("exact_quarters_interleaved", (2, 3, 7, 64), 1, fill="integer", exact=True, interleaved=True)
    cases.append(_ties((2, 3, 7, 64)))
    add("llama_prefill", (2, 32, 1023, 128), 8, tier="standard")
    add("glm_prefill", (1, 32, 2048, 128), 2, rotary=64, interleaved=True, tier="standard")
    return cases


def _ties(shape: tuple[int, ...]) -> Case:
    """Products that lie between two storable numbers, with an even one below or above."""
    q, half = TensorSpec(shape, layout="heads", fill="odd"), TensorSpec((1, *shape[2:]), fill="half_more")
    none = replace(half, fill="zeros")
    args = {"q": q, "k": q, "cos": half, "sin": none, "interleaved": False}
    return Case("exact_ties", args, exact=True, cotangent="odd")


def _angles(d: Draw) -> Tensor:
    x = 2 * d.uniform() - 1
    half = x.shape[-1] // 2
    return torch.cat((x[..., :half], x[..., :half], x[..., 2 * half :]), -1)


def _call(
    batch: int, tokens: int, heads: tuple[int, int], dim: int, interleaved: bool = False, fill: str = "angles"
) -> dict[str, Any]:
    angle = TensorSpec((1, tokens, dim), fill=fill)
    q, k = (TensorSpec((batch, count, tokens, dim), layout="heads") for count in heads)
    return {"q": q, "k": k, "cos": angle, "sin": angle, "interleaved": interleaved}


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for some in itertools.product(sizes.lengths, sizes.heads, sizes.head_dims, (False, True)):
        yield _call(1, *some)


def _bench(grid: Grid) -> Iterator[Case]:
    full = [(32, 1, 32, 8, 128), (1, 512, 32, 8, 128), (4, 4096, 32, 8, 128), (4, 4096, 16, 16, 64)]
    for b, s, h, kv, d in [(4, 4096, 32, 8, 128)] if grid == "small" else full:
        yield Case(f"B{b} H{h}/{kv} S{s} D{d}", _call(b, s, (h, kv), d))


def _named(name: str) -> Case:
    batch, heads, kv, length, dim = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _call(batch, length, (heads, kv), dim, fill="unit"))


def _sampled(s: Sampler) -> str:
    batch, heads, kv, length, dim = s.heads()
    return f"B{s.fitting(batch, heads, length, length, dim)} H{heads}/{kv} S{length} D{dim}"


def _like(name: str, first: Shape) -> Shape:
    return (1, *first[-2:]) if name in ("cos", "sin") else first


def _rotated(s: Symbols) -> int:
    """How much of a head is turned: all that is even, a pair, or half."""
    return int(s.choose([r for r in (s["D"] // 2 * 2, 2, s["D"] // 4 * 2) if r]))


_SYMBOLS: dict[str, Rule] = {
    "B": "batch",
    "b": broadcast("B"),
    "G": "groups",
    "H": multiple("G", "per_group"),
    "S": "queries",
    "D": positive("head_dim", 2),
    "R": _rotated,
}


def _evidence(op: str, over: bool) -> Evidence:
    angle = Form("b S R", ("unit",), mixed=True, group="cos")
    return Evidence(
        op=op,
        cases=_cases,
        fuzz=Domain(
            {
                "q": Form("B H S D", group="q", over=over),
                "k": Form("B G S D", group="q", over=over),
                "cos": angle,
                "sin": angle,
                "interleaved": (False, True),
            },
            symbols=_SYMBOLS,
        ),
        fills=(
            # Liger's kernel reads one half only
            Fill("angles", "in [-1, 1], both halves of a row alike: cosines as models make them", _angles),
            *TIES,
        ),
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        equivalents=EQUIVALENTS,
    )


EVIDENCE = (_evidence("rope", over=False), _evidence("rope_", over=True))
