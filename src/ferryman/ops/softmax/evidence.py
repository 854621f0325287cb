"""What softmax and cross entropy are tried with: cases, exact probes, and shapes of models."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import MODERATE, VALUES, Domain, Form, Symbols, positive
from ferryman.ops.draw import Draw, Fill, level
from ferryman.ops.evidence import Evidence, Grid, ModelSizes, Sampler, Shape, row_cases, sampled_rows
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.ops.softmax.equivalents import EQUIVALENTS


def _softmax_cases() -> Sequence[Case]:
    shapes = {
        "one_row": (1, 64),
        "prime": (7, 257),
        "row_of_one": (3, 1),
        "wide": (2, 4099),
        "empty_rows": (0, 64),
        "three_dims": (2, 3, 130),
        "short_rows": (43, 17),  # several blocks, each of several rows
        "vector": (96,),
    }
    cases = [Case(n, {"x": TensorSpec(s)}) for n, s in shapes.items()]
    cases += [Case(f"layout_{lay}", {"x": TensorSpec((6, 200), layout=lay)}) for lay in ("rows", "last", "offset")]
    for fill in ("offset", "constant", "large", "nonfinite", "masked", "zeros"):
        cases.append(Case(f"fill_{fill}", {"x": TensorSpec((5, 384), fill=fill)}))
    cases.append(Case("wide_slopes", {"x": TensorSpec((2, 16_381), fill="slopes")}))
    exact = {"exact_support": (9, 257), "exact_support_wide": (3, 4099), "exact_support_dims": (2, 3, 64)}
    cases += [Case(n, {"x": TensorSpec(s, fill="support")}, exact=True, inexact=("float32",)) for n, s in exact.items()]
    cases.append(Case("exact_single", {"x": TensorSpec((9, 257), fill="single")}, exact=True))
    cases += [
        Case(n, {"x": TensorSpec(s, fill="support")}, "standard", exact=True, inexact=("float32",))
        for n, s in {"exact_support_8191": (1021, 8191), "exact_support_vocabulary": (33, 128_256)}.items()
    ]
    cases += [
        Case("scores", {"x": TensorSpec((8, 16, 127, 1031))}, "standard"),
        Case("rows_8192", {"x": TensorSpec((1024, 8192))}, "standard"),
        Case("vocabulary", {"x": TensorSpec((33, 128_256))}, "standard"),
    ]
    return cases


def _loss_cases(over: bool = False) -> Sequence[Case]:
    def case(
        name: str, shape: tuple[int, ...], tier: str = "small", smoothing: float = 0.0, low: int = 0, **spec: Any
    ) -> Case:
        target = TensorSpec(shape[:-1], dtype="int64", low=low, high=shape[-1])
        args = {
            "logits": TensorSpec(shape, **spec),
            "target": target,
            "ignore_index": -100,
            "label_smoothing": smoothing,
        }
        if low < 0:
            args["ignore_index"] = -1
        return Case(name, args, tier)  # type: ignore[arg-type]

    cases = [case("one_row", (1, 64)), case("prime", (7, 257)), case("three_dims", (2, 3, 130)), case("vector", (96,))]
    cases += [case("wide", (3, 4099)), case("wider", (2, 16_411)), case("smoothing", (7, 257), smoothing=0.1)]
    # all of a mean's parts round alike where 16 bits hold them: the logits themselves, and sums of a few
    cases.append(case("smoothing_in_turn", (2, 257), smoothing=0.5, fill="in_turn"))
    cases.append(case("wide_in_turn", (1, 16_411), fill="in_turn"))  # and a long row's sums of exponentials
    cases += [
        case("ignored", (64, 9), low=-1),
        case("empty", (0, 64)),
        case("one_class", (9, 1), fill="tiny"),
        case("smoothing_ignored", (40, 6), smoothing=0.3, low=-1),
    ]
    cases += [case(f"layout_{layout}", (6, 200), layout=layout) for layout in ("rows", "last", "offset")]
    laid_out = [replace(case(f"saved_{layout}", (6, 200), layout=layout), saved=layout) for layout in ("rows", "last")]
    cases += laid_out if over else []
    cases += [case(f"fill_{fill}", (5, 384), fill=fill) for fill in ("offset", "constant", "moderate", "nonfinite")]
    cases.append(case("ignored_nonfinite", (40, 3), low=-1, fill="nonfinite"))  # an ignored row may hold anything
    # 2^n rows, and 2^n classes where they are averaged: the means are exact
    for name, shape, tier, smoothing in (
        ("peaks", (8, 257), "small", 0.0),
        ("peaks_wide", (4, 4099), "small", 0.0),
        ("peaks_smoothing", (2, 8, 128), "small", 0.5),
        ("peaks_vocabulary", (256, 128_256), "standard", 0.0),
        ("peaks_ragged", (64, 50_257), "standard", 0.0),
    ):
        peaks = case(f"exact_{name}", shape, tier, smoothing, fill="peaks")
        cases.append(replace(peaks, exact=True, cotangent="digits"))
    cases += [case("vocabulary", (257, 128_256), "standard"), case("vocabulary_ragged", (63, 50_257), "standard", 0.1)]
    return cases


def _support(d: Draw) -> Tensor:
    if d.shape[-1] == 0:
        return d.normal()
    most = d.shape[-1].bit_length() - 1
    count = torch.exp2((most - d.rows() % (most + 1)).double())
    rank = d.words(8).argsort(-1).argsort(-1)
    return level(d.rows()).expand(d.shape).masked_fill(rank >= count, -math.inf)


def _single(d: Draw) -> Tensor:
    first = d.words(8).argsort(-1).argsort(-1) == 0
    return level(d.rows()).expand(d.shape).masked_fill(~first, -math.inf)


def _peaks(d: Draw) -> Tensor:
    """exp of the rest is below 2^-170, which is 0."""
    width = max(d.shape[-1], 1)
    rest = -128 - (d.uniform() * 128).floor()
    return torch.where(d.columns() == (width - 1 - 7 * d.rows()) % width, level(d.rows()), rest)


def _in_turn(d: Draw) -> Tensor:
    """96 and 5/64 lies between two numbers of float16, which makes it 96 and 1/16; with 95 that is a tie there."""
    return torch.where(d.columns() % 2 == 0, 96.078125, 95.0).double().expand(d.shape)


def _softmax_calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for width in sizes.widths:
        for rows in sizes.rows(width):
            yield {"x": TensorSpec((rows, width))}


def _slopes(d: Draw) -> Tensor:
    """A maximum over part of a row, or of a later part alone, is hundreds below another value: its exp overflows."""
    slope = 512.0 - 1024.0 * d.columns() / max(d.shape[-1] - 1, 1)
    return d.normal() + torch.where(d.rows() % 2 == 0, slope, -slope)


def _loss(rows: int, width: int, smoothing: float = 0.0) -> dict[str, Any]:
    labels = TensorSpec((rows,), dtype="int64", low=0, high=width)
    return {"logits": TensorSpec((rows, width)), "target": labels, "ignore_index": -100, "label_smoothing": smoothing}


def _loss_calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    return itertools.starmap(_loss, itertools.product((1, 512, 8192), sizes.vocabularies, (0.0, 0.1)))


def _loss_bench(grid: Grid) -> Iterator[Case]:
    full = [(512, 32_000), (4096, 50_257), (4096, 128_256), (8192, 152_064)]
    for rows, width in [(4096, 128_256)] if grid == "small" else full:
        yield Case(f"{rows}x{width}", _loss(rows, width))


def _loss_named(name: str) -> Case:
    rows, width = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _loss(rows, width))


def _loss_sampled(s: Sampler) -> str:
    width = s.draw.choice((32_768, 49_152, 100_352, 151_936, 256_000)) // s.less
    return f"{s.around(16, max(16, s.most_bytes // s.less**2 / width))}x{width}"


def _loss_like(name: str, first: Shape) -> Shape:
    return first[:-1] if name == "target" else first


def _labels(args: dict[str, Any], symbols: Symbols) -> None:
    """Labels of rows that are ignored, where those are -1."""
    if args["ignore_index"] == -1:
        args["target"] = replace(args["target"], low=symbols.choose((0, -1)))


def _loss_domain(over: bool) -> Domain:
    return Domain(
        {
            "logits": Form("... V", MODERATE, over=over),
            "target": Form("...", ("integer",), dtype="int64", high="V"),
            "ignore_index": (-100, -1),
            "label_smoothing": (0.0, 0.1, 1.0),
        },
        symbols={"V": positive("width")},
        drawn=_labels,
    )


def _loss_evidence(op: str, over: bool) -> Evidence:
    return Evidence(
        op=op,
        cases=functools.partial(_loss_cases, over),
        fuzz=_loss_domain(over),
        fills=(
            Fill("peaks", "one small integer a row, -128 and less elsewhere", _peaks, False),
            Fill("in_turn", "96 and 5/64, and 95, in turn", _in_turn, False),
        ),
        bench=_loss_bench,
        named=_loss_named,
        sampled=_loss_sampled,
        calls=_loss_calls,
        like=_loss_like,
        equivalents=EQUIVALENTS,
    )


_softmax_rows = row_cases(lambda x, line: {"x": x})

EVIDENCE = (
    Evidence(
        op="softmax",
        cases=_softmax_cases,
        fuzz=Domain({"x": Form("... N", (*VALUES, "masked"))}),
        fills=(
            Fill("support", "2^n equal values a row, -inf elsewhere", _support, False),
            Fill("slopes", "normal, and rows that fall from 512 to -512 or rise from -512 to 512", _slopes, False),
            Fill("single", "one small integer a row, -inf elsewhere", _single, False),
        ),
        bench=_softmax_rows.bench,
        named=_softmax_rows.named,
        sampled=sampled_rows,
        calls=_softmax_calls,
        equivalents=EQUIVALENTS,
    ),
    _loss_evidence("cross_entropy", over=False),
    _loss_evidence("cross_entropy_inplace_grad", over=True),
)
