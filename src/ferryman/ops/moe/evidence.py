"""What products by experts are tried with: ragged, empty and hostile offsets, ids of no expert, shapes of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import PRODUCT, Domain, Form, Rule, positive
from ferryman.ops.draw import Draw, Fill, offset
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.moe import bounds
from ferryman.ops.primitive import Case, TensorSpec


def _ends(d: Draw) -> Tensor:
    """Ascending ends from 0 to high - 1, the last one there; some experts have no rows."""
    drawn = d.integers(0, d.high).sort().values
    if len(drawn):
        drawn[-1] = d.high - 1
    return drawn


def _short(d: Draw) -> Tensor:
    """Ascending ends that leave the last third of the rows to no expert."""
    return (d.integers(0, d.high) * 2 / 3).floor().sort().values


def _hostile(d: Draw) -> Tensor:
    """Ends in any order; some negative, some beyond the rows, some at the ends of int32."""
    beyond = torch.tensor([-1.0, 2.0**31 - 1, -(2.0**31), d.high + 3.0], dtype=torch.float64, device=d.device)
    return torch.where(d.words(3) % 3 == 0, beyond[d.words(4) & 3], d.integers(0, d.high))


def _hostile_ids(d: Draw) -> Tensor:
    """Experts, and one number in three that is none's."""
    beyond = torch.tensor([-1.0, 2.0**31 - 1, -(2.0**31), float(d.high)], dtype=torch.float64, device=d.device)
    return torch.where(d.words(3) % 3 == 0, beyond[d.words(4) & 3], d.integers(0, d.high))


def _chosen(d: Draw) -> Tensor:
    """Experts of a token, unlike each other where there are enough."""
    slots = d.shape[-1]
    first = d.integers(0, d.high)[..., :1]
    step = torch.arange(slots, device=d.device) * max(d.high // max(slots, 1), 1)
    return (first + step) % max(d.high, 1)


def _opened(d: Draw) -> Tensor:
    """Weights and biases that make every gate 64, where each activation is its argument bit for bit, and every other
    number a small integer: gate_up's first half is 0; the bias is 64 there, -1 to 1 for up, and -64, 0 or 64 after."""
    inner = d.shape_of("down")[2]
    signs, at = d.integers(-1, 2), torch.arange(d.shape[1], device=d.device)
    if d.parameter == "bias":
        return torch.where(at < inner, 64.0, torch.where(at < 2 * inner, signs, 64.0 * signs))
    return torch.where((at < inner)[:, None], 0.0, signs)


_FILLS = (
    Fill("ends", "ascending ends, the last one at the last row", _ends),
    Fill("short", "ascending ends, a third of the rows is no expert's", _short),
    Fill("hostile", "ends in any order, negative, or beyond the rows", _hostile),
    offset({torch.float16: 16.0}),
)
_EXPERT_FILLS = (
    Fill("opened", "every gate is 64: activations are their argument", _opened, False),
    Fill("halves", "0.5 or 1", lambda d: d.integers(1, 3) / 2, False),
    Fill("shallow", "normal, divided by the longer side", lambda d: d.normal() / max(*d.shape[-2:], 1)),
    Fill(
        "scaled",
        "normal, divided by the root of the product's depth",
        lambda d: d.normal() / max(d.shape[-1], 1) ** 0.5,
    ),
    Fill("chosen", "experts of a token, unlike each other", _chosen),
    Fill("hostile_ids", "experts, and numbers that are none's", _hostile_ids),
)


def _grouped(
    rows: int,
    experts: int,
    n: int,
    k: int,
    ends: str = "ends",
    layout: str = "contiguous",
    fill: str | None = None,
    weight_fill: str | None = None,
) -> dict[str, Any]:
    return {
        "x": TensorSpec((rows, k), fill=fill, layout=layout),
        "weight": TensorSpec((experts, n, k), fill=weight_fill or fill, layout=layout),
        "offsets": TensorSpec((experts,), "int32", ends, layout, high=rows + 1),
    }


def _grouped_cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "ragged": _grouped(61, 5, 37, 72),
        "one_expert": _grouped(19, 1, 33, 64),
        "many_experts": _grouped(23, 67, 24, 32),
        "square": _grouped(24, 3, 40, 40),
        "tile_edge": _grouped(129, 2, 65, 128),
        "rest_of_the_rows": _grouped(61, 5, 37, 72, "short"),
        "hostile": _grouped(47, 7, 40, 48, "hostile"),
        "hostile_many": _grouped(200, 5, 24, 40, "hostile"),
        "no_rows": _grouped(0, 4, 8, 16),
        "all_to_none": _grouped(20, 3, 16, 16, "zeros"),
        "depth_zero": _grouped(5, 2, 8, 0),
        "no_columns": _grouped(5, 2, 0, 8),
        **{f"layout_{name}": _grouped(31, 3, 40, 72, layout=name) for name in ("rows", "last", "offset")},
        **{f"fill_{name}": _grouped(24, 3, 40, 96, fill=name) for name in ("offset", "nonfinite", "constant")},
    }
    cases = [Case(name, args) for name, args in small.items()]
    integers: dict[str, Any] = {"exact": True, "inexact": ("split-k",)}
    cases.append(Case("exact_integers", _grouped(37, 4, 67, 131, fill="integer"), **integers))
    cases.append(Case("exact_hostile", _grouped(90, 6, 40, 64, "hostile", fill="integer"), **integers))
    few = _grouped(45, 5, 71, 193, fill="sparse", weight_fill="digits")
    cases.append(Case("exact_few", few, exact=True, cotangent="sparse"))
    standard = {
        "experts_128": _grouped(4096, 128, 768, 2048),
        "experts_8": _grouped(1021, 8, 2051, 1027),
        "decode": _grouped(16, 64, 1024, 2048),
    }
    return [*cases, *(Case(name, args, "standard") for name, args in standard.items())]


def _layer(
    tokens: int,
    experts: int,
    slots: int,
    width: int,
    inner: int,
    *,
    activation: str = "silu",
    biased: bool = False,
    ids: str = "chosen",
    ids_dtype: str = "int32",
    weights: str = "storage",
    weights_fill: str = "uniform",
    layout: str = "contiguous",
    fill: str | None = None,
    gate_up: str | None = "weight",
    down: str | None = None,
) -> dict[str, Any]:
    return {
        "x": TensorSpec((tokens, width), fill=fill, layout=layout),
        "gate_up": TensorSpec((experts, 2 * inner, width), fill=gate_up, layout=layout),
        "down": TensorSpec((experts, width, inner), fill=down, layout=layout),
        "topk_ids": TensorSpec((tokens, slots), ids_dtype, ids, layout, high=experts),
        "topk_weights": TensorSpec((tokens, slots), weights, weights_fill, layout),
        "activation": activation,
        "bias": TensorSpec((experts, 2 * inner + width), layout=layout) if biased else None,
    }


def _trained(tokens: int, experts: int, slots: int, width: int, inner: int, weights: str = "storage") -> dict[str, Any]:
    """Weights as large as trained ones, so that float16 holds every partial result."""
    return _layer(tokens, experts, slots, width, inner, weights=weights, gate_up="scaled", down="scaled")


def _layer_cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "ragged": _layer(13, 5, 2, 40, 24),
        "biased": _layer(9, 4, 2, 33, 17, biased=True),
        "one_token": _layer(1, 8, 2, 64, 32),
        "one_expert": _layer(7, 1, 1, 32, 16),
        "all_experts": _layer(5, 3, 3, 32, 16),
        "many_tokens": _layer(70, 2, 1, 40, 16),
        "gelu": _layer(9, 4, 2, 32, 16, activation="gelu"),
        "gelu_tanh": _layer(9, 4, 2, 32, 16, activation="gelu_tanh"),
        "gpt_oss": _layer(11, 5, 3, 32, 24, activation="swiglu_oai_interleaved", biased=True, gate_up=None),
        "gpt_oss_halves": _layer(9, 4, 2, 33, 17, activation="swiglu_oai", weights="float32", gate_up=None),
        "gpt_oss_layout": _layer(9, 3, 2, 40, 24, activation="swiglu_oai_interleaved", biased=True, layout="rows"),
        "hostile_ids": _layer(17, 5, 3, 32, 16, ids="hostile_ids", biased=True),
        "ids_of_64_bits": _layer(9, 4, 2, 32, 16, ids_dtype="int64"),
        "weights_float32": _layer(9, 4, 2, 32, 16, weights="float32"),
        "nonfinite": _layer(9, 4, 2, 33, 17, fill="nonfinite", biased=True),
        # what an infinite weight multiplies is above 0: of a sum near it a rounding would turn the sign
        "nonfinite_weights": _layer(
            9, 4, 2, 33, 17, fill="uniform", gate_up="uniform", down="uniform", weights_fill="nonfinite"
        ),
        "nonfinite_clamped": _layer(9, 4, 2, 33, 17, fill="nonfinite", gate_up="uniform", activation="swiglu_oai"),
        "nonfinite_narrow": _layer(9, 4, 2, 33, 1, fill="nonfinite", gate_up="uniform"),
        "as_wide_as_slots": _layer(9, 5, 3, 3, 16),
        "no_tokens": _layer(0, 4, 2, 32, 16),
        "no_slots": _layer(3, 4, 0, 32, 16),
        **{
            f"layout_{name}": _layer(9, 3, 2, 40, 24, biased=name == "last", layout=name)
            for name in ("rows", "last", "offset")
        },
    }
    exact = {
        "exact_open": _open(21, 5, 2, 8, 6),
        "exact_gelu": _open(9, 3, 2, 8, 5, activation="gelu"),
        "exact_gelu_tanh": _open(9, 3, 1, 7, 6, activation="gelu_tanh", layout="rows"),
        "exact_hostile": _open(33, 4, 2, 8, 6, ids="hostile_ids"),
    }
    standard = {
        "qwen3_moe": _trained(64, 128, 8, 2048, 768),
        "mixtral": _trained(16, 8, 2, 1024, 3584, weights="float32"),
    }
    return [
        *(Case(name, args) for name, args in small.items()),
        Case("gradient_tiny", _layer(9, 4, 2, 33, 17, biased=True), cotangent="tiny"),
        *(Case(name, args, exact=True, cotangent="signs") for name, args in exact.items()),
        *(Case(name, args, "standard") for name, args in standard.items()),
        Case("exact_open_1021", _open(1021, 16, 2, 8, 6), "standard", exact=True, cotangent="signs"),
    ]


def _open(tokens: int, experts: int, slots: int, width: int, inner: int, **more: Any) -> dict[str, Any]:
    """Up to 8 x 6 products of signs, times 64 and a weight of at most 1: 8 bits hold every partial result. With
    gradients that are signs, too, those of the first product are up to 9 x 8 in halves, or 8 x 64."""
    args = _layer(tokens, experts, slots, width, inner, biased=True, weights="float32", fill="signs", **more)
    args["gate_up"] = replace(args["gate_up"], fill="opened")
    args["down"] = replace(args["down"], fill="signs")
    args["topk_weights"] = replace(args["topk_weights"], fill="halves")
    args["bias"] = replace(args["bias"], fill="opened")
    return args


_MODELS = {"mixtral": (8, 2, 4096, 14_336), "qwen3_moe": (128, 8, 2048, 768), "deepseek_v3": (256, 8, 7168, 2048)}
_TOKENS = (1, 32, 512, 8192)


def _bench_layer(grid: Grid) -> Iterator[Case]:
    for experts, slots, width, inner in _MODELS.values():
        for tokens in (32,) if grid == "small" else _TOKENS:
            yield _named_layer(f"{tokens} E{experts} k{slots} H{width} I{inner}")


def _models(s: Sampler) -> Iterator[Case]:
    """Each model's layer for each number of tokens."""
    for tokens in _TOKENS:
        for experts, slots, width, inner in _MODELS.values():
            width, inner = width // s.less, inner // s.less
            yield _named_layer(f"{max(1, tokens // s.less)} E{experts} k{slots} H{width} I{inner}")


def _trained_models(s: Sampler) -> list[Case]:
    """With as many of its experts as leave room for their gradients."""
    cases, most = [], 1 << 31  # elements of gate_up
    for case in _models(s):
        tokens, experts, slots, width, inner = (int(n) for n in re.findall(r"\d+", case.name))
        while experts * 2 * inner * width > most:
            experts //= 2
        cases.append(_named_layer(f"{tokens} E{experts} k{slots} H{width} I{inner}"))
    return cases


def _named_layer(name: str) -> Case:
    tokens, experts, slots, width, inner = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _trained(tokens, experts, slots, width, inner))


def _sampled_model(s: Sampler) -> tuple[int, int, int, int]:
    """A model's layer, with as many of its experts as one device of several holds."""
    experts, slots, width, inner = s.draw.choice(tuple(_MODELS.values()))
    while experts * 2 * inner * width * 2 > 4 * s.most_bytes:
        experts //= 2
    return experts, min(slots, experts), width, inner


def _sampled_layer(s: Sampler) -> str:
    experts, slots, width, inner = _sampled_model(s)
    tokens = s.around(1, max(2, 8192 // s.less))
    return f"{tokens} E{experts} k{slots} H{width // s.less} I{inner // s.less}"


def _layer_calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for tokens in sizes.tokens:
        for model in _MODELS.values():
            yield _layer(tokens, *model)


def _bench_grouped(grid: Grid) -> Iterator[Case]:
    for experts, slots, width, inner in _MODELS.values():
        for tokens in (32,) if grid == "small" else _TOKENS:
            yield _named_grouped(f"{tokens * slots} E{experts} {2 * inner}x{width}")


def _named_grouped(name: str) -> Case:
    rows, experts, n, k = (int(number) for number in re.findall(r"\d+", name))
    return Case(name, _grouped(rows, experts, n, k))


def _sampled_grouped(s: Sampler) -> str:
    experts, slots, width, inner = _sampled_model(s)
    rows = s.around(1, max(2, 8192 // s.less)) * slots
    return f"{rows} E{experts} {2 * inner // s.less}x{width // s.less}"


def _grouped_calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for tokens in sizes.tokens:
        for experts, slots, width, inner in _MODELS.values():
            yield _grouped(tokens * slots, experts, 2 * inner, width)


def _like_grouped(name: str, first: Shape) -> Shape:
    """Eight experts with square weights."""
    return {"weight": (8, first[-1], first[-1]), "offsets": (8,)}.get(name, first)


def _like_layer(name: str, first: Shape) -> Shape | None:
    """Eight experts of twice the width, of which a token chooses two."""
    rows, width = first[0], first[-1]
    shapes = {"gate_up": (8, 4 * width, width), "down": (8, width, 2 * width), "bias": None}
    return (rows, 2) if name.startswith("topk") else shapes.get(name, first)


_LARGEST = {"zeros": 0.0, "uniform": 1.0, "integer": 4.0, "normal": 4.9, "nonfinite": 4.9, "shallow": 4.9}


def _finite(args: dict[str, Any], dtype: torch.dtype) -> None:
    """Weights so small that no partial result reaches Inf in float16, forward and backward, which an implementation may
    round it to: one that rounds and one that does not would both be right."""
    x, gate_up, down, bias = (args[name] for name in ("x", "gate_up", "down", "bias"))
    added = 0.0 if bias is None else _LARGEST[bias.fill]
    first = x.shape[1] * _LARGEST[x.fill] * _LARGEST[gate_up.fill] + added
    second = down.shape[2] * first * first * _LARGEST[down.fill] + added
    share = max(1.0, _LARGEST[args["topk_weights"].fill])
    behind = x.shape[1] * _LARGEST["normal"] * _LARGEST[down.fill]
    moved = bounds.SLOPE * share * behind * first
    back = gate_up.shape[1] * moved * _LARGEST[gate_up.fill]
    if dtype == torch.float16 and max(share * first * first, second, moved, back) > torch.finfo(dtype).max:
        args["gate_up"], args["down"] = replace(gate_up, fill="shallow"), replace(down, fill="shallow")


_GROUPED_SYMBOLS: dict[str, Rule] = {
    "T": lambda s: s.size((0, 1, 3, 16, 17, 65, 130)),
    "K": "depth",
    "N": "depth",
    "E": lambda s: int(s.choose((1, 2, 3, 8, 33))),
    "most": lambda s: s["T"] + 1,
}
_LAYER_SYMBOLS: dict[str, Rule] = {
    "T": "rows",
    "H": positive("depth"),
    "I": positive("depth"),
    "E": lambda s: int(s.choose((1, 2, 5, 17))),
    "S": lambda s: s.size((0, 1, 2, 3)),
    "twice": lambda s: 2 * s["I"],
    "both": lambda s: 2 * s["I"] + s["H"],
}

EVIDENCE = (
    Evidence(
        op="grouped_linear",
        cases=_grouped_cases,
        fuzz=Domain(
            {
                "x": Form("T K", PRODUCT, group="x"),
                "weight": Form("E N K", PRODUCT, group="x"),
                "offsets": Form("E", ("ends", "short", "hostile"), dtype="int32", high="most"),
            },
            symbols=_GROUPED_SYMBOLS,
        ),
        fills=_FILLS,
        bench=_bench_grouped,
        named=_named_grouped,
        sampled=_sampled_grouped,
        calls=_grouped_calls,
        like=_like_grouped,
    ),
    Evidence(
        op="moe_experts",
        cases=_layer_cases,
        fuzz=Domain(
            {
                "x": Form("T H", ("normal", "integer", "uniform", "zeros", "nonfinite")),
                "gate_up": Form("E twice H", ("uniform", "normal")),
                "down": Form("E H I", ("normal", "integer")),
                "topk_ids": Form("T S", ("chosen", "hostile_ids"), dtype="int32", high="E"),
                "topk_weights": Form("T S", ("uniform", "normal"), mixed=True),
                "activation": ("silu", "gelu", "gelu_tanh", "swiglu_oai", "swiglu_oai_interleaved"),
                "bias": Form("E both", ("normal", "integer"), True),
            },
            symbols=_LAYER_SYMBOLS,
            defined=_finite,
        ),
        fills=_EXPERT_FILLS,
        bench=_bench_layer,
        named=_named_layer,
        sampled=_sampled_layer,
        calls=_layer_calls,
        like=_like_layer,
        goals=(
            Goal("moe_experts", _models, {"peers": 1.0}),
            Goal("moe_experts, step", _trained_models, {"peers": 1.0}, "step"),
        ),
    ),
)
