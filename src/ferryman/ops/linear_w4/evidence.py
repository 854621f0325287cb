"""What products with weights of 4 bits are tried with: packed bytes, scales a group, and shapes of models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import PRODUCT, Domain, Form, Rule
from ferryman.ops.draw import Draw, Fill, offset
from ferryman.ops.evidence import Evidence, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.linear_w4.equivalents import EQUIVALENTS
from ferryman.ops.primitive import Case, TensorSpec

_WEIGHTS = ((4096, 4096), (14_336, 4096), (4096, 14_336))  # of projections: outputs, inputs


def _scales(d: Draw) -> Tensor:
    """About a sixteenth, of either sign: the weights are of size 1 then."""
    return (0.5 + d.uniform()) * 2.0**-3 * torch.where(d.words(3) % 8 == 0, -1.0, 1.0)


def _powers(d: Draw) -> Tensor:
    """1, 1/2 or 1/4: an integer times it, and any sum of such, is exact in float32."""
    return torch.exp2(-(d.integers(0, 3)))


_FILLS = (
    Fill("scales", "from 1/16 to 3/16, every eighth below 0", _scales),
    Fill("halves", "1, 1/2 or 1/4", _powers, False),
    offset({torch.float16: 16.0}),  # 96 products of 8e3 leave the range of float16
)


def _call(
    rows: tuple[int, ...],
    outputs: int,
    inputs: int,
    group: int = 32,
    biased: bool = False,
    fill: str | None = None,
    layout: str = "contiguous",
    scales: str = "scales",
) -> dict[str, Any]:
    """The arguments; ``rows``: the leading dimensions."""
    return {
        "x": TensorSpec((*rows, inputs), fill=fill, layout=layout),
        "weight": TensorSpec((outputs, inputs // 2), "uint8", layout=layout, high=256),
        "scales": TensorSpec((outputs, inputs // group), fill=scales, layout=layout),
        "bias": TensorSpec((outputs,), fill="integer" if scales == "halves" else None, layout=layout)
        if biased
        else None,
        "group": group,
    }


def _cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "one_group": _call((9,), 40, 128, 128),
        "square": _call((64,), 64, 64),
        "ragged": _call((37,), 101, 96, biased=True),
        "one_row": _call((1,), 96, 128, 64),
        "one_column": _call((33,), 1, 64, biased=True),
        "group_96": _call((9,), 24, 288, 96),
        "group_of_two": _call((9,), 17, 10, 2),
        "group_of_six": _call((5,), 33, 66, 6, biased=True),
        "depth_zero": _call((5,), 8, 0, biased=True),
        "three_dims": _call((2, 5), 40, 64, biased=True),
        "vector": _call((), 24, 64),
        "empty": _call((0,), 16, 32),
        "no_outputs": _call((3,), 0, 32),
        "tile_edge": _call((65,), 66, 96),
        "layout_rows": _call((20,), 40, 96, layout="rows"),
        "layout_last": _call((20,), 40, 96, biased=True, layout="last"),
        "layout_offset": _call((20,), 40, 96, layout="offset"),
        "fill_offset": _call((24,), 40, 96, fill="offset"),
        "fill_nonfinite": _call((24,), 40, 96, fill="nonfinite"),
        "fill_constant": _call((24,), 40, 96, fill="constant"),
        "no_scale": _call((24,), 40, 96, scales="zeros"),
    }
    exact: dict[str, dict[str, Any]] = {
        "exact_integers": _call((24,), 40, 96, fill="integer", scales="halves"),
        "exact_integers_ragged": _call((37,), 67, 192, 64, True, "integer", "rows", "halves"),
    }
    standard = {
        "decode_1": _call((1,), 14_336, 4096, 128),
        "decode_16": _call((16,), 4096, 4096, 128),
        "mlp_ragged": _call((1021,), 2051, 4096, 128, True),
    }
    long = _call((517,), 2051, 4096, 128, True, "integer", scales="halves")
    return [
        *(Case(name, args) for name, args in small.items()),
        *(Case(name, args, exact=True, inexact=("split-k",)) for name, args in exact.items()),
        *(Case(name, args, "standard") for name, args in standard.items()),
        Case("exact_integers_4096", long, "standard", exact=True, inexact=("split-k",)),
    ]


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    weights = [(n, k) for n, k in sizes.weights if k % 128 == 0]
    for rows, weight, group, biased in itertools.product(sizes.tokens, weights, (32, 64, 128), (False, True)):
        yield _call((rows,), *weight, group, biased)


def _bench(grid: Grid) -> Iterator[Case]:
    few = [(m, *weight) for m in (1, 16, 64) for weight in _WEIGHTS]
    for m, n, k in [(16, 14_336, 4096)] if grid == "small" else [*few, (4096, 4096, 4096)]:
        yield _named(f"{m}x{n}x{k}")


def _named(name: str) -> Case:
    rows, outputs, inputs = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _call((rows,), outputs, inputs, 128 if inputs % 128 == 0 else 32))


def _sampled(s: Sampler) -> str:
    (n, k), rows = s.draw.choice(_WEIGHTS), s.around(1, max(2, 8192 // s.less))
    return f"{rows}x{n // s.less}x{max(32, k // s.less // 32 * 32)}"


def _like(name: str, first: Shape) -> Shape | None:
    """A square weight, scales for groups of 128, no bias."""
    inputs = first[-1]
    shapes = {"weight": (inputs, inputs // 2), "scales": (inputs, inputs // 128), "bias": None}
    return shapes.get(name, first)


_SYMBOLS: dict[str, Rule] = {
    "group": lambda s: int(s.choose((32, 2, 6, 64, 96))),
    "groups": lambda s: s.size((0, 1, 2, 3)),
    "K": lambda s: s["group"] * s["groups"],
    "half": lambda s: s["K"] // 2,
    "F": "depth",
}


def _group(args: dict[str, Any], symbols: Any) -> None:
    args["group"] = symbols["group"]


EVIDENCE = (
    Evidence(
        op="linear_w4",
        equivalents=EQUIVALENTS,
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("... K", PRODUCT),
                "weight": Form("F half", ("drawn",), dtype="uint8", high=256),
                "scales": Form("F groups", ("scales", "integer", "zeros", "halves")),
                "bias": Form("F", ("normal", "integer", "zeros"), True),
            },
            symbols=_SYMBOLS,
            drawn=_group,
        ),
        fills=_FILLS,
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
    ),
)
