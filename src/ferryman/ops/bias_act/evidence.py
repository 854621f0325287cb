"""What activations after a bias are tried with: cases, exact probes, and shapes of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.bias_act.equivalents import EQUIVALENTS
from ferryman.ops.domain import MODERATE, Domain, Form, Symbols
from ferryman.ops.draw import Draw, Fill, offset
from ferryman.ops.evidence import (
    Evidence,
    Goal,
    Grid,
    ModelSizes,
    Sampler,
    Shape,
    bench_rows,
    moved_rows,
    sampled_cases,
    sampled_rows,
)
from ferryman.ops.primitive import Case, TensorSpec

_ACTIVATIONS = (
    *("gelu", "gelu_tanh", "quick_gelu", "silu", "relu", "relu2"),
    *("leaky_relu", "elu", "tanh", "sigmoid", "hardswish", "softcap"),
)
_ALPHAS = ("leaky_relu", "elu", "softcap")
_CAP = 30.0  # of softcap where a case has no alpha: that of Gemma2's logits
_GRADIENTS = ("grad_x", "grad_bias")


def _call(
    activation: str,
    shape: tuple[int, ...],
    biased: bool = False,
    layout: str = "contiguous",
    fill: str | None = None,
    bias_fill: str | None = None,
    bias_dtype: str = "storage",
    alpha: float | None = None,
) -> dict[str, Any]:
    if activation == "softcap" and alpha is None:
        alpha = _CAP
    bias = (
        TensorSpec(shape[-1:], bias_dtype, bias_fill, layout if layout == "last" else "contiguous") if biased else None
    )
    return {"x": TensorSpec(shape, fill=fill, layout=layout), "bias": bias, "activation": activation, "alpha": alpha}


def _of_each(activation: str) -> Iterator[Case]:
    """What every activation is tried with: its ranges of values, its kinks, and a sum with a bias."""
    alpha = 0.25 if activation in _ALPHAS else None
    name = activation
    yield Case(f"{name}_bias", _call(name, (9, 257), True))
    yield Case(f"{name}_plain", _call(name, (7, 130)))
    for fill in ("moderate", "tiny", "nonfinite"):
        yield Case(f"{name}_{fill}", _call(name, (5, 384), True, fill=fill, bias_fill="tiny", alpha=alpha))
        yield Case(f"{name}_{fill}_plain", _call(name, (5, 384), fill=fill, alpha=alpha))
    # sums of integers meet every kink, 0 and +-3
    yield Case(f"{name}_kinks", _call(name, (5, 257), True, fill="integer", bias_fill="integer", alpha=alpha))
    # past saturation a slope is 0 or 1 (or alpha); 1 - t^2 and 1 - s are then 0, or as small as they are
    inexact = _GRADIENTS if name in ("tanh", "sigmoid", "softcap") else ()
    exact = _call(name, (7, 257), True, fill="saturated", bias_fill="integer", alpha=alpha)
    yield Case(f"exact_{name}", exact, exact=True, inexact=inexact)


def _cases() -> Sequence[Case]:
    cases = [case for activation in _ACTIVATIONS for case in _of_each(activation)]
    shapes = {
        "one_row": (1, 64),
        "row_of_one": (3, 1),
        "wide": (2, 4099),
        "many_rows": (331, 40),
        "three_dims": (2, 3, 130),
        "vector": (96,),
        "empty_rows": (0, 64),
        "no_columns": (5, 0),
    }
    for name, shape in shapes.items():
        cases.append(Case(name, _call("gelu_tanh", shape, True)))
        cases.append(Case(f"{name}_plain", _call("gelu", shape)))
    cases.append(Case("scalar", _call("silu", ())))
    for layout in ("rows", "last", "offset"):
        cases.append(Case(f"layout_{layout}", _call("gelu", (6, 200), True, layout=layout)))
        cases.append(Case(f"layout_{layout}_plain", _call("silu", (6, 200), layout=layout)))
    for dtype in ("float32", "float16", "bfloat16"):
        cases.append(Case(f"bias_{dtype}", _call("silu", (7, 130), True, bias_dtype=dtype)))
    cases.append(Case("no_slope", _call("leaky_relu", (5, 130), True, alpha=0.0)))
    cases.append(Case("negative_alpha", _call("elu", (5, 130), True, alpha=-1.5)))
    for name, cap in {"tiny_cap": 1e-18, "huge_cap": 1e18}.items():
        cases.append(Case(name, _call("softcap", (5, 130), True, alpha=cap)))
    for fill in ("offset", "constant", "zeros"):
        cases.append(Case(f"fill_{fill}", _call("gelu", (5, 384), True, fill=fill, bias_fill=fill)))
    deep = _call("silu", (5, 384), True, fill="deep", bias_fill="tiny")
    cases.append(Case("huge_gradients", deep, cotangent="huge"))
    cases.append(Case("mlp_11008", _call("gelu_tanh", (1024, 11_008), True), "standard"))
    cases.append(Case("mlp_ragged", _call("gelu", (1021, 9_973), True), "standard"))
    cases.append(Case("mlp_plain", _call("silu", (1021, 9_973)), "standard"))
    rows = _call("relu2", (1021, 4_096), True, fill="saturated", bias_fill="integer")
    cases.append(Case("exact_rows", rows, "standard", True))
    return cases


def _saturated(d: Draw) -> Tensor:
    size = (d.uniform() * 32).floor()
    return torch.where(d.uniform(3) < 0.7, 48 + size, -128 - 4 * size)


_FILLS = (
    Fill("saturated", "from 48 on, or below -127: a sigmoid is 1 or 0, in float64 too", _saturated, False),
    # the square of a mean of 1e3 leaves float16
    offset({torch.float16: 16.0}),
)


def _without(args: dict[str, Any], symbols: Symbols) -> None:
    """An alpha belongs to three activations only, and softcap's is positive."""
    if args["activation"] not in _ALPHAS:
        args["alpha"] = None
    if args["activation"] == "softcap" and (args["alpha"] or 0) <= 0:
        args["alpha"] = _CAP


_NAME = re.compile(r"(?P<rows>\d+)x(?P<width>\d+)(-(?P<activation>[a-z_0-9]+?))?(?P<plain>-plain)?")


def _named(name: str) -> Case:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"case {name!r} of bias_act; required: ROWSxWIDTH, -ACTIVATION and -plain after it")
    shape = int(match["rows"]), int(match["width"])
    return Case(name, _call(match["activation"] or "gelu", shape, match["plain"] is None))


def _bench(grid: Grid) -> Iterator[Case]:
    sizes = [f"{rows}x{width}" for rows, width in bench_rows(grid)]
    yield from map(_named, sizes)
    for end in ("silu-plain", "relu2-plain", "gelu_tanh", "elu"):
        yield _named(f"8192x8192-{end}")


def _sampled(s: Sampler) -> str:
    return f"{sampled_rows(s)}-{s.draw.choice(_ACTIVATIONS)}{s.draw.choice(('', '-plain'))}"


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for width in sizes.widths:
        for rows in sizes.rows(width):
            for activation in _ACTIVATIONS:
                for biased in (True, False):
                    yield _call(activation, (rows, width), biased)


def _like(name: str, first: Shape) -> Shape | None:
    return first[-1:] if name == "bias" else first


EVIDENCE = (
    Evidence(
        op="bias_act",
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("... N", MODERATE),
                "bias": Form("N", MODERATE, optional=True, mixed=True),
                "activation": _ACTIVATIONS,
                "alpha": (None, 0.25, -0.5, 1.0, 0.0, _CAP),
            },
            drawn=_without,
        ),
        fills=_FILLS,
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        equivalents=EQUIVALENTS,
        goals=(Goal("bias_act", sampled_cases(_sampled, _named, moved=moved_rows), {"peers": 1.0, "copy": 0.95}),),
    ),
)
