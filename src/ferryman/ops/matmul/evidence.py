"""What matrix products are tried with: cases, exact probes, and shapes of models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import PRODUCT, Domain, Form
from ferryman.ops.draw import Draw, Fill, offset
from ferryman.ops.evidence import Evidence, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.matmul.equivalents import EQUIVALENTS
from ferryman.ops.primitive import Case, TensorSpec


def _cases() -> Sequence[Case]:
    cases = []

    def add(
        name: str,
        x: tuple[int, ...],
        n: int,
        bias: bool = False,
        layout: str = "contiguous",
        weight_layout: str = "contiguous",
        tier: str = "small",
        fill: str | None = None,
        weight_fill: str | None = None,
        bias_fill: str | None = None,
        **judged: Any,
    ) -> None:
        cases.append(
            Case(
                name,
                {
                    "x": TensorSpec(x, layout=layout, fill=fill),
                    "weight": TensorSpec((n, x[-1]), layout=weight_layout, fill=weight_fill or fill),
                    "bias": TensorSpec(
                        (n,),
                        fill=bias_fill or ("integer" if judged else None),
                        layout="last" if layout == "last" else "contiguous",
                    )
                    if bias
                    else None,
                },
                tier,  # type: ignore[arg-type]
                **judged,
            )
        )

    # float32 holds every partial sum, 16 bits do not
    integers: dict[str, Any] = {"fill": "integer", "exact": True, "inexact": ("split-k",)}
    # 8 bits hold every partial sum
    few: dict[str, Any] = {"fill": "sparse", "weight_fill": "digits", "exact": True, "cotangent": "sparse"}

    add("square", (64, 64), 64)
    add("ragged", (37, 71), 101, bias=True)
    add("one_row", (1, 128), 96)
    add("one_column", (33, 65), 1, bias=True)
    add("depth_one", (9, 1), 17)
    add("depth_zero", (5, 0), 8, bias=True)
    add("three_dims", (2, 5, 48), 40, bias=True)
    add("vector", (64,), 24)
    add("empty", (0, 32), 16)
    add("tile_edge", (129, 65), 130)
    add("tiles_apart", (577, 16), 40)  # more tiles of rows than one group of them has
    for layout in ("rows", "last", "offset"):
        add(f"layout_{layout}", (20, 72), 40, bias=layout == "last", layout=layout, weight_layout=layout)
    # dense along its outputs: what lies behind the last term of a sum is behind the weight, or its next row
    add("weight_transposed", (20, 72), 40, weight_layout="strided:1,40+0")
    for fill in ("offset", "nonfinite", "constant"):
        add(f"fill_{fill}", (24, 96), 40, fill=fill)
    add("exact_integers", (24, 96), 40, **integers)
    add("exact_integers_ragged", (37, 131), 67, bias=True, layout="rows", **integers)
    add("exact_ties", (29, 131), 67, bias=True, bias_fill="ties", **integers)
    add("exact_few", (2, 19, 257), 71, bias=True, **few)
    add("exact_few_one_row", (1, 193), 33, **few)
    add("mlp_up", (1024, 4096), 14_336, tier="standard")
    add("mlp_ragged", (1021, 4093), 2051, bias=True, tier="standard")
    add("decode_16", (16, 4096), 4096, tier="standard")
    add("decode_1", (1, 4096), 14_336, tier="standard")
    add("exact_integers_4096", (1021, 4096), 2051, tier="standard", **integers)
    add("exact_few_4096", (517, 4093), 4096, bias=True, tier="standard", **few)
    add("exact_few_decode", (3, 4096), 4099, tier="standard", **few)
    return cases


def _ties(d: Draw) -> Tensor:
    """One and a half times the first integer whose successor a 16-bit dtype lacks: odd sums about it are ties."""
    first = 2.0**11 if d.dtype == torch.float16 else 2.0**8
    return torch.full(d.shape, 1.5 * first, dtype=torch.float64, device=d.device)


_BENCH_WEIGHTS = ((4096, 4096), (14_336, 4096), (4096, 14_336), (28_672, 8192))  # of projections: outputs, inputs
_SAMPLED_WEIGHTS = (
    *((6144, 4096), (5120, 5120), (17_408, 5120), (5120, 17_408), (10_240, 8192), (8192, 28_672), (2048, 2048)),
    *((3072, 3072), (16_384, 3072), (11_008, 4096), (4096, 11_008), (1024, 4096)),
)


def _call(rows: int, outputs: int, inputs: int, biased: bool = False) -> dict[str, Any]:
    bias = TensorSpec((outputs,)) if biased else None
    return {"x": TensorSpec((rows, inputs)), "weight": TensorSpec((outputs, inputs)), "bias": bias}


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for rows, weight, biased in itertools.product(sizes.tokens, sizes.weights, (False, True)):
        yield _call(rows, *weight, biased)


def _bench(grid: Grid) -> Iterator[Case]:
    few = [(m, *weight) for m in (1, 16, 64) for weight in _BENCH_WEIGHTS]
    full = [(8192, 8192, 8192), (4096, 14_336, 4096), *few]
    for m, n, k in [(8192, 8192, 8192), (16, 14_336, 4096)] if grid == "small" else full:
        yield Case(f"{m}x{n}x{k}", _call(m, n, k))


def _named(name: str) -> Case:
    rows, outputs, inputs = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _call(rows, outputs, inputs))


def _sampled(s: Sampler) -> str:
    (n, k), rows = s.draw.choice(_SAMPLED_WEIGHTS), s.around(1, max(2, 8192 // s.less))
    return f"{rows}x{n // s.less}x{k // s.less}"


def _like(name: str, first: Shape) -> Shape | None:
    """A square weight, and no bias."""
    return {"weight": (first[-1], first[-1]), "bias": None}.get(name, first)


EVIDENCE = (
    Evidence(
        op="linear",
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("... K", PRODUCT, group="x"),
                "weight": Form("F K", PRODUCT, group="x"),
                "bias": Form("F", ("normal", "integer", "zeros"), True),
            }
        ),
        fills=(
            Fill("ties", "384; 3072 in float16: integers about it lie between two storable ones", _ties, False),
            # 96 products of 1e6 leave the range of float16
            offset({torch.float16: 16.0}),
        ),
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        equivalents=EQUIVALENTS,
    ),
)
