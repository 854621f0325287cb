"""What gated activations are tried with: cases, exact probes, and shapes of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.activation.equivalents import EQUIVALENTS
from ferryman.ops.domain import MODERATE, Domain, Form
from ferryman.ops.draw import TIES, Draw, Fill, offset
from ferryman.ops.evidence import Evidence, ModelSizes, row_cases, sampled_rows
from ferryman.ops.primitive import Case, TensorSpec


def _cases(**extra: object) -> Sequence[Case]:
    shapes = {
        "one_row": (1, 64),
        "prime": (7, 257),
        "one": (1,),
        "scalar": (),
        "three_dims": (2, 3, 130),
        "empty": (0, 64),
        "many": (5, 3584),  # more than a multiprocessor's first share, in tiles that it does not fill
    }
    cases = [Case(n, {"gate": TensorSpec(s), "up": TensorSpec(s), **extra}) for n, s in shapes.items()]
    for layout in ("rows", "last", "offset"):
        spec = TensorSpec((6, 200), layout=layout)
        up = TensorSpec((6, 200), layout="rows" if layout == "last" else "contiguous")
        cases.append(Case(f"layout_{layout}", {"gate": spec, "up": up, **extra}))
    gapped = TensorSpec((5, 3584), layout="rows")
    cases.append(Case("many_rows", {"gate": gapped, "up": gapped, **extra}))
    # rows that share memory, each beginning where no vector may be loaded
    gate, up = (TensorSpec((2, 2, 64), layout=f"strided:{strides}") for strides in ("128,32,1+1", "152,72,1+3"))
    cases.append(Case("layout_shared", {"gate": gate, "up": up, **extra}))
    for fill in ("offset", "constant", "tiny", "moderate", "nonfinite", "zeros"):
        spec = TensorSpec((5, 384), fill=fill)
        cases.append(Case(f"fill_{fill}", {"gate": spec, "up": spec, **extra}))
    unbounded = {"gate": TensorSpec((5, 384)), "up": TensorSpec((5, 384), fill="nonfinite")}
    cases.append(Case("fill_nonfinite_up", {**unbounded, **extra}))
    deep = {"gate": TensorSpec((5, 384), fill="deep"), "up": TensorSpec((5, 384), fill="tiny")}
    cases.append(Case("huge_gradients", {**deep, **extra}, cotangent="huge"))
    # an activation of at most 63 times an integer of at most 4 fits 8 bits
    for name, shape, layout, tier in (
        ("saturated", (7, 257), "contiguous", "small"),
        ("saturated_rows", (3, 5, 384), "rows", "small"),
        ("saturated_mlp", (1021, 9_973), "contiguous", "standard"),
    ):
        gate, up = TensorSpec(shape, fill="saturated", layout=layout), TensorSpec(shape, fill="integer")
        cases.append(Case(f"exact_{name}", {"gate": gate, "up": up, **extra}, tier, True))  # type: ignore[arg-type]
    # products that lie between two storable numbers
    ties = {"gate": TensorSpec((5, 264), fill="odd"), "up": TensorSpec((5, 264), fill="half_more")}
    cases.append(Case("exact_ties", {**ties, **extra}, exact=True, cotangent="half_more"))
    for name, shape in {"mlp_14336": (1024, 14_336), "mlp_ragged": (1021, 9_973)}.items():
        cases.append(Case(name, {"gate": TensorSpec(shape), "up": TensorSpec(shape), **extra}, "standard"))
    return cases


def _both() -> Sequence[Case]:
    """The formula by tanh, and the one by erf."""
    exact = (replace(c, name=f"erf_{c.name}") for c in _cases(approximate="none"))
    return [*_cases(approximate="tanh"), *exact]


def _saturated(d: Draw) -> Tensor:
    size = (d.uniform() * 32).floor()
    return torch.where(d.uniform(3) < 0.7, 32 + size, -128 - 4 * size)


_FILLS = (
    Fill("saturated", "gates from 32 on, or below -127: the sigmoid is 1 or 0", _saturated, False),
    # the product of two inputs of a mean of 1e3 leaves float16
    offset({torch.float16: 16.0}),
    *TIES,
)
_PAIR = {"gate": Form("...", MODERATE, group="x"), "up": Form("...", MODERATE, group="x")}


def _calls(sizes: ModelSizes, *options: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for width in sizes.widths:
        for rows in sizes.rows(width):
            for option in options:
                yield {"gate": TensorSpec((rows, width)), "up": TensorSpec((rows, width)), **option}


_silu_rows = row_cases(lambda x, line: {"gate": x, "up": x})
_gelu_rows = row_cases(lambda x, line: {"gate": x, "up": x, "approximate": "tanh"})

# an activation's whole shape is leading dimensions
EVIDENCE = (
    Evidence(
        op="silu_mul",
        cases=_cases,
        fuzz=Domain(_PAIR, last="width"),
        fills=_FILLS,
        bench=_silu_rows.bench,
        named=_silu_rows.named,
        sampled=sampled_rows,
        calls=lambda sizes: _calls(sizes, {}),
        equivalents=EQUIVALENTS,
    ),
    Evidence(
        op="gelu_mul",
        cases=_both,
        fuzz=Domain({**_PAIR, "approximate": ("tanh", "none")}, last="width"),
        fills=_FILLS,
        bench=_gelu_rows.bench,
        named=_gelu_rows.named,
        sampled=sampled_rows,
        calls=lambda sizes: _calls(sizes, {"approximate": "tanh"}, {"approximate": "none"}),
        equivalents=EQUIVALENTS,
    ),
)
