"""What a projection's cross entropy is tried with: ignored and wrong targets, ragged sizes, and shapes of models."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Symbols, positive
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.primitive import Case, TensorSpec

_HEADS = ((128_256, 4096), (151_936, 1024), (50_257, 768), (32_000, 4096), (256_000, 2304))


def _call(
    rows: tuple[int, ...],
    inputs: int,
    classes: int,
    biased: bool = False,
    ignore: int = -100,
    smoothing: float = 0.0,
    z_loss: float = 0.0,
    fill: str | None = None,
    layout: str = "contiguous",
    target: str | None = None,
    x_fill: str | None = None,
    weight_fill: str | None = None,
) -> dict[str, Any]:
    low = ignore if ignore == -1 else 0
    return {
        "x": TensorSpec((*rows, inputs), fill=x_fill or fill, layout=layout),
        "weight": TensorSpec((classes, inputs), fill=weight_fill or fill, layout=layout),
        "target": TensorSpec(rows, "int64", target, low=low, high=classes),
        "bias": TensorSpec((classes,), fill=fill, layout=layout) if biased else None,
        "ignore_index": ignore,
        "label_smoothing": smoothing,
        "z_loss": z_loss,
    }


def _head(d: Draw) -> Tensor:
    return d.normal() / math.sqrt(max(d.shape[-1], 1))


def _cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "one_row": _call((1,), 32, 64),
        "prime": _call((7,), 31, 131, True),
        "two_dims": _call((2, 3), 16, 130),
        "vector": _call((), 16, 40),
        "one_class": _call((5,), 16, 1),
        "depth_zero": _call((5,), 0, 9, True),
        "ignored": _call((40,), 16, 9, True, -1),
        "all_ignored": _call((6,), 16, 9, ignore=-1, target="ones"),
        "outside": _call((6,), 16, 9, target="beyond"),
        "smoothing": _call((9,), 24, 67, smoothing=0.1),
        "z_loss": _call((9,), 24, 67, z_loss=1e-2),
        "everything": _call((33,), 24, 67, True, -1, 0.3, 1e-3),
        "empty": _call((0,), 16, 20),
        "tile_edge": _call((65,), 33, 130),
        **{f"layout_{n}": _call((10,), 24, 40, n == "last", layout=n) for n in ("rows", "last", "offset")},
        "many_rows": _call((33, 40), 16, 40, z_loss=1e-3),
        "square": _call((40,), 16, 40),
        "nonfinite": _call((11,), 24, 67, True, x_fill="nonfinite"),
        "ignored_nonfinite": _call((40,), 16, 9, True, -1, x_fill="nonfinite"),  # an ignored row may hold anything
        "fill_unit": _call((12,), 48, 96, fill="unit"),
    }
    # logits of 0: every softmax is 2^-n, and no label is nearer than another
    flat = _call((8,), 16, 64, fill="integer", x_fill="zeros")
    standard = {
        "llama_ragged": _call((257,), 1024, 32_003, ignore=-1, weight_fill="head"),
        "gpt2": _call((512,), 768, 50_257, True, smoothing=0.1, weight_fill="head"),
        "vocabulary": _call((64,), 512, 128_256, z_loss=1e-4, weight_fill="head"),
        "sure": _call((64,), 512, 32_003),  # logits of tens: each softmax is one class's
    }
    # each row is a class's code: its logit is 2048 and the others are the bias alone, so every softmax is 0 or 1
    exact = {
        "exact_codes": _codes(16, 64, 61),
        "exact_classes": _codes(8, 256, 200),
        "exact_biased": _codes(8, 128, 67, biased=True),
        "exact_rows": _codes(32, 256, 19, layout="rows"),
    }
    return [
        *(Case(n, args) for n, args in small.items()),
        Case("flat", flat),
        *(Case(n, args, exact=True, cotangent="signs") for n, args in exact.items()),
        *(Case(n, args, "standard") for n, args in standard.items()),
        Case("exact_codes_1000", _codes(64, 1024, 1000, biased=True), "standard", exact=True, cotangent="signs"),
    ]


def _codes(rows: int, inputs: int, classes: int, biased: bool = False, layout: str = "contiguous") -> dict[str, Any]:
    """``inputs`` is a power of two from 32 to 2048, not below ``classes``; ``rows`` is a power of two."""
    args = _call((rows,), inputs, classes, biased, fill="codes", layout=layout)
    return args | ({"bias": TensorSpec((classes,), fill="sixteens")} if biased else {})


def _code(d: Draw) -> Tensor:
    """Rows of Sylvester's Hadamard matrix, orthogonal to each other: a class's own, and a drawn class's for a row of x,
    which is scaled so that the two make 2048."""
    count, width = d.shape
    at = torch.arange(count, device=d.device)
    if d.parameter == "x":
        at = d.words(3)[:, 0] % d.shape_of("weight")[0]
    shared, odd = at[:, None] & torch.arange(width, device=d.device), torch.zeros(count, width, device=d.device)
    for bit in range(max(width - 1, 1).bit_length()):
        odd = odd + ((shared >> bit) & 1)
    return (1 - 2 * (odd % 2)).double() * (2048 / width if d.parameter == "x" else 1)


def _ones(d: Draw) -> Tensor:
    return torch.full(d.shape, -1.0, dtype=torch.float64, device=d.device)


def _beyond(d: Draw) -> Tensor:
    """Targets of which one is just past the classes, and one far below 0."""
    x = d.integers(0, d.high).reshape(-1)
    x[:1], x[1:2] = d.high, -(2**40)
    return x.reshape(d.shape)


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for rows, (classes, inputs) in itertools.product((512, 8192), _HEADS):
        yield _call((rows,), inputs, classes)


def _named(name: str) -> Case:
    rows, inputs, classes = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _call((rows,), inputs, classes, fill="unit"))


def _bench(grid: Grid) -> Iterator[Case]:
    full = [(rows, inputs, classes) for classes, inputs in _HEADS for rows in (1024, 4096, 8192)]
    for rows, inputs, classes in [(8192, 4096, 128_256)] if grid == "small" else full:
        yield _named(f"{rows}x{inputs}x{classes}")


def _sampled(s: Sampler) -> str:
    classes, inputs = s.draw.choice(_HEADS)
    return f"{s.around(64, 8192 // s.less)}x{max(1, inputs // s.less)}x{max(1, classes // s.less)}"


def _trained(s: Sampler) -> Iterator[Case]:
    """Llama 3's, then other vocabularies."""
    for classes, inputs in (_HEADS[0], _HEADS[1], _HEADS[4]):
        yield _named(f"{8192 // s.less}x{max(1, inputs // s.less)}x{max(1, classes // s.less)}")


def _like(name: str, first: Shape) -> Shape | None:
    """Llama 3's vocabulary, no bias."""
    return {"weight": (128_256, first[-1]), "target": first[:-1], "bias": None}.get(name, first)


def _labels(args: dict[str, Any], symbols: Symbols) -> None:
    if args["ignore_index"] == -1:
        target = args["target"]
        args["target"] = TensorSpec(target.shape, "int64", None, target.layout, -1, symbols["V"])


EVIDENCE = (
    Evidence(
        op="linear_cross_entropy",
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("... K", ("normal", "unit", "zeros", "nonfinite"), group="x"),
                "weight": Form("V K", ("normal", "unit", "zeros", "nonfinite"), group="x"),
                "target": Form("...", ("drawn",), dtype="int64", high="V"),
                "bias": Form("V", ("normal", "integer", "zeros"), True),
                "ignore_index": (-100, -1),
                "label_smoothing": (0.0, 0.1, 1.0),
                "z_loss": (0.0, 1e-3),
            },
            symbols={"K": "depth", "V": positive("width")},
            drawn=_labels,
        ),
        fills=(
            Fill("ones", "-1 everywhere", _ones, False),
            Fill("codes", "rows of a Hadamard matrix: a class's own, times 2048 / K for x", _code, False),
            Fill("sixteens", "16 times an integer from -4 to 4", lambda d: 16 * d.integers(-4, 5), False),
            Fill("head", "normal / sqrt(K): logits as of a model that learns", _head),
            Fill("beyond", "targets, one past the classes and one far below 0", _beyond),
        ),
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        goals=(Goal("linear_cross_entropy, step", _trained, {"peers": 1.2}, "step", most_memory=1.2),),
    ),
)
