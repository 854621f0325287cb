"""What routing is tried with: ties, near-ties, groups, biases, rows that are not finite, routers of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Symbols
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape, sampled_cases
from ferryman.ops.gate_topk.equivalents import EQUIVALENTS
from ferryman.ops.primitive import Case, TensorSpec


def _single(d: Draw) -> Tensor:
    """A row has one number in each half of its places, at random ones; the others are -200: with k = 2, softmax is 1/2
    twice, and an exp of the others is nothing beside it. Both are equal: the lower index is first. The first weight is
    then the larger of two, which has a kink there."""
    experts = d.shape[-1]
    place = torch.arange(experts, device=d.device)
    half = max(experts // 2, 1)
    one = (d.words(3) & 0xFFFF)[..., :1] % half
    other = half + (d.words(4) & 0xFFFF)[..., :1] % max(experts - half, 1)
    return torch.where((place == one) | (place == other), 4.0, -200.0).expand(d.shape).double()


def _steps(d: Draw) -> Tensor:
    """40 to 47, or -800 and below: a sigmoid is 1 or 0, in float64 too, so that many experts are equal."""
    step = d.integers(0, 8)
    return torch.where(d.words(3) % 3 == 0, 40.0 + step, -800.0 - 4 * step)


_FILLS = (
    Fill("faint", "-48 to -45: a sigmoid is about 1e-20", lambda d: 3 * d.uniform() - 48),
    Fill("pairs", "two equal numbers a row, the others -200", _single, False, smooth=False),
    Fill("steps", "40 and more, or -800 and less: a sigmoid is 1 or 0", _steps, False),
    Fill("quarters", "multiples of a quarter below 2", lambda d: d.integers(0, 8) / 4, False),
)


def _route(
    tokens: int,
    experts: int,
    k: int,
    scoring: str = "softmax",
    bias: str | None = None,
    groups: int = 1,
    kept: int = 1,
    renormalise: bool = True,
    scale: float = 1.0,
    ids: torch.dtype = torch.int64,
    fill: str | None = None,
    layout: str = "contiguous",
) -> dict[str, Any]:
    return {
        "logits": TensorSpec((tokens, experts), fill=fill, layout=layout),
        "k": k,
        "scoring": scoring,
        "bias": None if bias is None else TensorSpec((experts,), "float32", bias, layout),
        "n_group": groups,
        "topk_group": kept,
        "renormalise": renormalise,
        "scale": scale,
        "ids_dtype": ids,
    }


def _cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "mixtral": _route(7, 8, 2),
        "olmoe": _route(33, 64, 8, renormalise=False),
        "deepseek": _route(7, 64, 6, "sigmoid", "normal", 8, 4, scale=2.5),
        "glm": _route(5, 48, 4, "sigmoid", "uniform"),
        "sigmoid": _route(5, 33, 3, "sigmoid", renormalise=False, ids=torch.int32),
        "sigmoid_again": _route(5, 33, 3, "sigmoid", scale=1.3),
        "sigmoid_faint": _route(5, 33, 3, "sigmoid", fill="faint"),  # what is added to the sum shows
        "sigmoid_groups": _route(5, 24, 5, "sigmoid", None, 6, 3),
        "groups": _route(5, 24, 4, "softmax", None, 4, 2, False, 16.0),
        "softmax_biased": _route(7, 40, 5, "softmax", "uniform", ids=torch.int32),
        "softmax_biased_groups": _route(7, 40, 5, "softmax", "uniform", 5, 3, False),
        "one_expert": _route(5, 1, 1),
        "all_experts": _route(5, 7, 7, "sigmoid", "normal"),
        "no_tokens": _route(0, 8, 2),
        "many_experts": _route(3, 257, 9),
        "many_experts_large": _route(5, 257, 9, renormalise=False, fill="large"),
        "ties": _route(7, 48, 6, fill="integer"),
        "all_equal": _route(6, 12, 5, "sigmoid", None, 3, 2, fill="zeros"),
        "moderate": _route(7, 40, 4, "sigmoid", "normal", fill="moderate"),
        "nonfinite": _route(7, 16, 3, fill="nonfinite"),
        "nonfinite_sigmoid": _route(7, 16, 3, "sigmoid", "normal", 4, 2, fill="nonfinite"),
        "layout_biased": _route(9, 24, 3, "sigmoid", "uniform", layout="last"),
        **{f"layout_{name}": _route(9, 24, 3, layout=name) for name in ("rows", "last", "offset")},
    }
    exact = {
        "exact_pairs": _route(7, 24, 2, fill="pairs", renormalise=True),
        "exact_single_share": _route(7, 24, 2, fill="pairs", renormalise=False),
        "exact_sigmoid": _route(7, 48, 5, "sigmoid", "quarters", fill="steps", renormalise=False, scale=2.0),
        "exact_groups": _route(7, 48, 5, "sigmoid", "quarters", 8, 3, False, fill="steps"),
        "exact_equal": _route(9, 16, 4, "softmax", "quarters", 4, 2, True, fill="zeros"),
    }
    standard = {
        "qwen3_moe": _route(2048, 128, 8),
        "deepseek_v3": _route(1021, 256, 8, "sigmoid", "uniform", 8, 4, True, 2.5),
    }
    return [
        *(Case(name, args) for name, args in small.items()),
        *(
            Case(name, args, exact=True, inexact=("grad_logits",) if args["scoring"] == "sigmoid" else ())
            for name, args in exact.items()
        ),
        *(Case(name, args, "standard") for name, args in standard.items()),
    ]


# experts, chosen, scoring, bias, groups, kept groups
_MODELS = (
    (8, 2, "softmax", None, 1, 1),
    (128, 8, "softmax", None, 1, 1),
    (256, 8, "sigmoid", "uniform", 8, 4),
)


def _bench(grid: Grid) -> Iterator[Case]:
    for model in _MODELS:
        for tokens in (4096,) if grid == "small" else (1, 32, 512, 8192):
            yield _named(f"{tokens}xE{model[0]}")


def _named(name: str) -> Case:
    tokens, experts = (int(n) for n in re.findall(r"\d+", name))
    model = next(m for m in _MODELS if m[0] == experts)
    return Case(name, _route(tokens, *model))


def _sampled(s: Sampler) -> str:
    return f"{s.around(1, max(2, 16_384 // s.less))}xE{s.draw.choice([m[0] for m in _MODELS])}"


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for tokens in sizes.tokens:
        for model in _MODELS:
            yield _route(tokens, *model)


def _like(name: str, first: Shape) -> Shape | None:
    return None if name == "bias" else first


def _experts(s: Symbols) -> int:
    return int(s.choose((4, 8, 12, 24, 36, 60, 260)))


def _drawn(args: dict[str, Any], s: Symbols) -> None:
    """As many groups and experts as there may be."""
    experts = args["logits"].shape[1]
    args["n_group"] = groups = int(s.choose((1, 1, 2, 4)))
    if args["scoring"] == "sigmoid" and experts // groups < 2:
        args["n_group"] = groups = 1
    args["topk_group"] = kept = min(groups, int(s.choose((1, 2, 3))))
    args["k"] = min(experts // groups * kept, int(s.choose((1, 2, 4, 8))))


EVIDENCE = (
    Evidence(
        op="gate_topk",
        equivalents=EQUIVALENTS,
        cases=_cases,
        fuzz=Domain(
            {
                "logits": Form("T E", ("normal", "integer", "uniform", "zeros", "nonfinite", "moderate")),
                "k": "groups",
                "scoring": ("softmax", "sigmoid"),
                "bias": Form("E", ("normal", "integer", "uniform", "zeros"), True, mixed=True),
                "n_group": "groups",
                "topk_group": "groups",
                "renormalise": (True, False),
                "scale": (1.0, 2.5, 0.1),
                "ids_dtype": (torch.int64, torch.int32),
            },
            symbols={"T": "rows", "E": _experts},
            drawn=_drawn,
        ),
        fills=_FILLS,
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        goals=(Goal("gate_topk", sampled_cases(_sampled, _named), {"peers": 1.0}),),
    ),
)
