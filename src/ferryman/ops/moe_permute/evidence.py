"""What rows sorted by expert are tried with: idle experts, ids of none, sources in any order, layers of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import PRODUCT, VALUES, Domain, Form, Rule, Symbols
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape, sampled_cases
from ferryman.ops.moe_permute.equivalents import EQUIVALENTS
from ferryman.ops.primitive import Case, TensorSpec


def _hostile_ids(d: Draw) -> Tensor:
    """Experts; every third is just outside them, far outside, or as far as int32 reaches."""
    strange = torch.tensor([-1, d.high, -(2**31), 2**31 - 1], dtype=torch.float64, device=d.device)
    return torch.where(d.words(3) % 3 == 0, strange[d.words(4) & 3], d.integers(0, d.high))


def _even(d: Draw) -> Tensor:
    """Experts of even number; the others are idle."""
    return 2 * d.integers(0, (d.high + 1) // 2)


def _permuted(d: Draw) -> Tensor:
    """Slots in any order, each once; -1 where there are more rows than slots."""
    tokens, slots = d.shape_of("topk_weights")
    longer = max(d.shape[0], tokens * slots)
    order = Draw((longer,), d.dtype, d.device, d.key, d.op, d.parameter).words(5).argsort()[: d.shape[0]]
    return torch.where(order < tokens * slots, order, -1).double()


def _hostile(d: Draw) -> Tensor:
    """Slots, some of them again and again; some numbers that are none's."""
    tokens, slots = d.shape_of("topk_weights")
    strange = torch.tensor([-1, tokens * slots, -(2**31), 2**31 - 1], dtype=torch.float64, device=d.device)
    drawn = d.integers(0, max(tokens * slots, 1)) if tokens * slots else strange[d.words(5) & 3]
    return torch.where(d.words(3) % 3 == 0, strange[d.words(4) & 3], drawn)


_ID_FILLS = (
    Fill("hostile_ids", "experts, and numbers that are none's", _hostile_ids),
    Fill("even", "experts of even number", _even),
)
_SOURCE_FILLS = (
    Fill("permuted", "slots in any order, each once", _permuted),
    Fill("hostile", "slots, some again and again, and numbers that are none's", _hostile),
    Fill("halves", "0.5 or 1", lambda d: d.integers(1, 3) / 2, False),
)


def _permute(
    tokens: int,
    experts: int,
    slots: int,
    width: int,
    ids: str | None = None,
    kind: str = "int32",
    layout: str = "contiguous",
    fill: str | None = None,
) -> dict[str, Any]:
    return {
        "x": TensorSpec((tokens, width), fill=fill, layout=layout),
        "topk_ids": TensorSpec((tokens, slots), kind, ids, layout, high=experts),
        "num_experts": experts,
    }


def _combine(
    tokens: int,
    slots: int,
    width: int,
    rows: int | None = None,
    source: str = "permuted",
    weights: str = "storage",
    layout: str = "contiguous",
    fill: str | None = None,
    weights_fill: str = "uniform",
    weights_layout: str | None = None,
) -> dict[str, Any]:
    count = tokens * slots if rows is None else rows
    return {
        "y": TensorSpec((count, width), fill=fill, layout=layout),
        "source": TensorSpec((count,), "int32", source, layout),
        "topk_weights": TensorSpec((tokens, slots), weights, weights_fill, weights_layout or layout),
    }


def _permute_cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "ragged": _permute(13, 5, 2, 67),
        "one_token": _permute(1, 8, 3, 64),
        "one_expert": _permute(7, 1, 2, 40),
        "one_slot": _permute(7, 4, 1, 40),
        "many_slots": _permute(3, 67, 41, 24),
        "many_tokens": _permute(1030, 5, 4, 1, "hostile_ids"),
        "idle_experts": _permute(11, 70, 2, 33, "even"),
        "ids_of_64_bits": _permute(9, 6, 3, 130, kind="int64"),
        "hostile_ids": _permute(41, 7, 3, 72, "hostile_ids"),
        "hostile_ids_of_64_bits": _permute(17, 3, 2, 16, "hostile_ids", "int64"),
        "no_tokens": _permute(0, 4, 2, 16),
        "no_slots": _permute(3, 4, 0, 16),
        "no_width": _permute(3, 4, 2, 0),
        "wide": _permute(3, 4, 2, 5003),
        "nonfinite": _permute(9, 4, 2, 40, "hostile_ids", fill="nonfinite"),
        **{f"layout_{name}": _permute(9, 4, 3, 56, layout=name) for name in ("rows", "last", "offset")},
    }
    exact = {
        "exact_ragged": _permute(29, 6, 3, 67, fill="integer"),
        "exact_hostile": _permute(33, 5, 2, 40, "hostile_ids", fill="integer"),
    }
    standard = {
        "qwen3_moe": _permute(2048, 128, 8, 2048),
        "mixtral": _permute(1021, 8, 2, 4096, kind="int64"),
    }
    return [
        *(Case(name, args) for name, args in small.items()),
        *(Case(f"gradient_{n}", _permute(9, 4, 2, 40), cotangent=n) for n in ("hundreds", "nonfinite")),
        # sums of two or three signs
        *(Case(name, args, exact=True, cotangent="signs") for name, args in exact.items()),
        *(Case(name, args, "standard") for name, args in standard.items()),
        Case("exact_1021", _permute(1021, 64, 8, 1031, fill="integer"), "standard", exact=True, cotangent="signs"),
    ]


def _combine_cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "ragged": _combine(13, 2, 67),
        "one_token": _combine(1, 8, 64),
        "one_slot": _combine(7, 1, 40),
        "many_slots": _combine(5, 33, 24),
        "as_wide_as_slots": _combine(9, 3, 3),
        "weights_float32": _combine(9, 3, 130, weights="float32"),
        "more_rows": _combine(9, 2, 40, 31),
        "fewer_rows": _combine(9, 3, 40, 11),
        "hostile": _combine(21, 3, 72, 90, "hostile"),
        "hostile_few": _combine(11, 2, 33, 9, "hostile", "float32"),
        "no_tokens": _combine(0, 2, 16),
        "no_tokens_but_rows": _combine(0, 2, 16, 5, "hostile"),
        "no_slots": _combine(3, 0, 16),
        "no_rows": _combine(3, 2, 16, 0),
        "no_width": _combine(3, 2, 0),
        "wide": _combine(3, 2, 5003),
        "nonfinite": _combine(9, 2, 40, fill="nonfinite"),
        "tiny": _combine(9, 3, 40, fill="tiny"),
        **{f"layout_{name}": _combine(9, 3, 56, layout=name) for name in ("rows", "last", "offset")},
        # neither's strides may be taken for the other's
        **{f"layout_weights_{name}": _combine(9, 3, 56, weights_layout=name) for name in ("rows", "last")},
    }
    exact = {
        "exact_ragged": _combine(29, 3, 67, fill="signs", weights_fill="halves"),
        "exact_hostile": _combine(15, 2, 40, 47, "hostile", "float32", fill="signs", weights_fill="halves"),
    }
    standard = {
        "qwen3_moe": _combine(2048, 8, 2048, weights="float32"),
        "mixtral": _combine(1021, 2, 4096),
    }
    return [
        *(Case(name, args) for name, args in small.items()),
        # up to 8 halves of signs; a row's product is of at most 67 signs
        *(Case(name, args, exact=True, cotangent="signs") for name, args in exact.items()),
        *(Case(name, args, "standard") for name, args in standard.items()),
        Case(
            "exact_1021",
            _combine(1021, 8, 131, fill="signs", weights_fill="halves", weights="float32"),
            "standard",
            exact=True,
            cotangent="signs",
        ),
    ]


# experts, chosen, width: Mixtral, Qwen3-MoE, DeepSeek-V3
_MODELS = ((8, 2, 4096), (128, 8, 2048), (256, 8, 7168))


def _named_permute(name: str) -> Case:
    tokens, experts, slots, width = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _permute(tokens, experts, slots, width))


def _named_combine(name: str) -> Case:
    tokens, _, slots, width = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _combine(tokens, slots, width, weights="float32"))


def _names(grid: Grid) -> list[str]:
    tokens = (4096,) if grid == "small" else (1, 32, 512, 8192)
    return [f"{t} E{experts} k{slots} H{width}" for experts, slots, width in _MODELS for t in tokens]


def _sampled(s: Sampler) -> str:
    experts, slots, width = s.draw.choice(_MODELS)
    return f"{s.around(1, max(2, 8192 // s.less))} E{experts} k{slots} H{width // s.less}"


def _permute_calls(sizes: ModelSizes) -> Iterator[Mapping[str, Any]]:
    for tokens in sizes.tokens:
        for model in _MODELS:
            yield _permute(tokens, *model)


def _combine_calls(sizes: ModelSizes) -> Iterator[Mapping[str, Any]]:
    for tokens in sizes.tokens:
        for _, slots, width in _MODELS:
            yield _combine(tokens, slots, width, weights="float32")


def _like(name: str, first: Shape) -> Shape:
    """A token chooses two experts."""
    tokens = max(first[0] // 2, 1)
    return {"topk_ids": (first[0], 2), "topk_weights": (tokens, 2), "source": first[:1]}.get(name, first)


def _drawn(args: dict[str, Any], s: Symbols) -> None:
    """Ids of either kind, drawn from as many experts as there are."""
    kind = s.choose(("int32", "int64"))
    args["topk_ids"] = replace(args["topk_ids"], dtype=kind, high=args["num_experts"])


_SYMBOLS: dict[str, Rule] = {
    "T": "rows",
    "H": "width",
    "S": lambda s: s.size((0, 1, 2, 3, 8)),
    "R": lambda s: s["T"] * s["S"] + int(s.choose((0, 0, 1, 7))),
}

EVIDENCE = (
    Evidence(
        op="moe_permute",
        cases=_permute_cases,
        fuzz=Domain(
            {
                "x": Form("T H", VALUES),
                "topk_ids": Form("T S", ("even", "hostile_ids"), dtype="int32"),
                "num_experts": (1, 2, 5, 17, 300),
            },
            symbols=_SYMBOLS,
            drawn=_drawn,
        ),
        fills=_ID_FILLS,
        bench=lambda grid: [_named_permute(name) for name in _names(grid)],
        named=_named_permute,
        sampled=_sampled,
        calls=_permute_calls,
        like=_like,
        equivalents=EQUIVALENTS,
        goals=(Goal("moe_permute", sampled_cases(_sampled, _named_permute), {"peers": 1.0}),),
    ),
    Evidence(
        op="moe_combine",
        cases=_combine_cases,
        fuzz=Domain(
            {
                "y": Form("R H", PRODUCT),
                "source": Form("R", ("permuted", "hostile"), dtype="int32"),
                "topk_weights": Form("T S", ("uniform", "normal", "integer"), mixed=True),
            },
            symbols=_SYMBOLS,
        ),
        fills=_SOURCE_FILLS,
        bench=lambda grid: [_named_combine(name) for name in _names(grid)],
        named=_named_combine,
        sampled=_sampled,
        calls=_combine_calls,
        like=_like,
        equivalents=EQUIVALENTS,
        goals=(Goal("moe_combine", sampled_cases(_sampled, _named_combine), {"peers": 1.0}),),
    ),
)
