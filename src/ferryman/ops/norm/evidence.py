"""What norms are tried with: cases, exact probes, and shapes of models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form
from ferryman.ops.draw import Draw, Fill, level
from ferryman.ops.evidence import (
    Evidence,
    Goal,
    ModelSizes,
    RowCases,
    Sampler,
    moved_rows,
    of_rows,
    row_cases,
    sampled_cases,
    sampled_rows,
)
from ferryman.ops.norm.equivalents import EQUIVALENTS
from ferryman.ops.primitive import Case, TensorSpec

_SHAPES = {
    "one_row": (1, 64),
    "prime": (7, 257),
    "row_of_one": (3, 1),
    "wide": (2, 4099),
    "three_dims": (2, 3, 128),
    "short_rows": (43, 17),  # several blocks, each of several rows
    "wide_whole": (2, 16_392),
    "empty_rows": (0, 64),
    "vector": (96,),
}


def _cases(*, residual: bool = False, bias: bool = False, cast: bool = False) -> Sequence[Case]:
    """Ragged shapes, mixed weight dtypes and hostile layouts for one norm."""
    cases: list[Case] = []

    def add(
        name: str,
        shape: tuple[int, ...],
        layout: str = "contiguous",
        weight: str | None = "storage",
        tier: str = "small",
        fill: str | None = None,
        eps: float = 1e-6,
        cast_before_weight: bool = False,
        inexact: tuple[str, ...] | None = None,
    ) -> None:
        """``inexact`` is given where the case is exact."""
        exact = inexact is not None
        x = TensorSpec(shape, layout=layout, fill=fill)
        args: dict[str, object] = {"x": x}
        if residual:
            args["residual"] = x
        scale, shift = ("digits", "fours") if exact else ("weight", "normal")
        args["weight"] = None if weight is None else TensorSpec(shape[-1:], dtype=weight, fill=scale)
        if bias:
            args["bias"] = None if weight is None else TensorSpec(shape[-1:], dtype=weight, fill=shift)
        args["eps"] = eps
        if cast:
            args["cast_before_weight"] = cast_before_weight
        cases.append(Case(name, args, tier, exact, inexact or ()))  # type: ignore[arg-type]

    for name, shape in _SHAPES.items():
        add(name, shape)
    add("no_weight", (5, 96), weight=None)
    if bias:  # one without the other, as a normal case has both or neither
        for absent in ("weight", "bias"):
            add(f"no_{absent}_alone", (5, 96))
            cases[-1] = replace(cases[-1], args={**cases[-1].args, absent: None})
    add("float32_weight", (5, 96), weight="float32")
    add("bfloat16_weight", (5, 96), weight="bfloat16")
    if cast:
        add("cast_before_weight", (5, 160), cast_before_weight=True)
        add("cast_float32_weight", (5, 160), weight="float32", cast_before_weight=True)
    for layout in ("rows", "last", "offset"):
        add(f"layout_{layout}", (6, 200), layout=layout)
    for fill in ("offset", "constant", "tiny", "large", "nonfinite", "zeros"):
        add(f"fill_{fill}", (5, 384), fill=fill)
    # weight and bias as columns of something, and large: results, and gradients summed over rows, go past 448
    add("column_weight", (6, 200))
    columns = {
        n: replace(cases[-1].args[n], layout="last", fill="offset") for n in ("weight", "bias") if n in cases[-1].args
    }
    cases[-1] = replace(cases[-1], args={**cases[-1].args, **columns}, cotangent="offset")
    add("large_eps", (4, 128), eps=0.5)
    if bias:
        # Welford's update divides by every count: its float32 shows it, and so do gradients through the statistics
        layer = ("float32", "grad_x", "grad_sum", "grad_weight")
        for name, shape, tier in (
            ("levels", (7, 256), "small"),
            ("levels_ragged", (5, 1026), "small"),
            ("levels_4096", (517, 4096), "standard"),
            ("levels_long", (9, 65_536), "standard"),
        ):
            add(f"exact_{name}", shape, tier=tier, fill="levels", eps=0.0, inexact=layer)
        # three times a normalised value of 9 digits: where that is rounded before, bfloat16 shows it
        for name, shape in (("odd", (3, 256)), ("odd_long", (1, 16_640))):
            add(f"exact_{name}", shape, fill="odd_apart", eps=0.0, inexact=layer)
            lines = {"weight": replace(cases[-1].args["weight"], fill="three"), "bias": None}
            cases[-1] = replace(cases[-1], args={**cases[-1].args, **lines})
        for name, shape, tier in (("plateaus", (7, 256), "small"), ("plateaus_4096", (1021, 4096), "standard")):
            add(f"exact_{name}", shape, tier=tier, fill="plateaus", eps=0.25, inexact=())
    else:
        # 4^n columns: the mean square and the norm are powers of two, whatever the way to them
        add("exact_powers", (7, 256), fill="powers", eps=0.0, inexact=())
        add("exact_powers_wide", (3, 4096), layout="rows", weight="float32", fill="powers", eps=0.0, inexact=())
        add("exact_powers_cast", (2, 3, 64), fill="powers", eps=0.0, cast_before_weight=cast, inexact=())
        # 1 / 257 is rounded, and then multiplied in 16 bits: only the forward result is far from every tie
        ragged = ("float32", "grad_x", "grad_sum", "grad_weight")
        add("exact_powers_ragged", (5, 257), fill="powers", eps=0.0, inexact=ragged)
        add("exact_powers_4096", (1021, 4096), tier="standard", fill="powers", eps=0.0, inexact=())
        add("exact_powers_long", (17, 65_536), tier="standard", fill="powers", eps=0.0, inexact=())
    # a weight, or a bias that nothing is added to, halfway between two 16-bit numbers: so is the result
    if bias:
        add("exact_ties", (7, 256), weight="float32", fill="plateaus", eps=0.25, inexact=())
    else:
        gradients = ("grad_x", "grad_sum", "grad_weight")
        add("exact_ties", (7, 256), weight="float32", fill="powers", eps=0.0, inexact=gradients)
    halfway = TensorSpec((256,), dtype="float32", fill="halfway")
    cases[-1] = replace(cases[-1], args={**cases[-1].args, "bias" if bias else "weight": halfway})
    # long rows, read in parts, whose terms a cast to 16 bits rounds alike; with a large eps little but the mean of the
    # gradients can be off
    for name, cotangent, eps in (("wide_between", "between_signs", 1e-6), ("wide_between_eps", "between", 16.0)):
        add(name, _SHAPES["wide_whole"], fill="between_signs", eps=eps)
        lines = {n: replace(cases[-1].args[n], fill="between") for n in ("weight", "bias") if n in cases[-1].args}
        cases[-1] = replace(cases[-1], args={**cases[-1].args, **lines}, cotangent=cotangent)
    if bias:  # squares of what lies apart from a mean that changes sign: Welford's update has 0 for the others
        add("wide_squares", (1, 16_392), fill="squares_between")
    add("hidden_4096", (2048, 4096), tier="standard")
    add("hidden_5120_ragged", (1021, 5119), tier="standard")
    add("wide_row", (17, 131_072), tier="standard")
    add("head_dim", (4, 1024, 32, 128), tier="standard")
    return cases


def _sign(columns: Tensor) -> Tensor:
    """The Thue-Morse sequence: as many + as - in every 2^n columns, and no period that a tile could have."""
    parity = columns.clone()
    for shift in (32, 16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return 1.0 - 2.0 * (parity & 1).double()


def _signs(d: Draw) -> Tensor:
    """Other ones in every row; balanced in every even number of columns."""
    return _sign(d.columns() + 2 * d.rows())


def _halfway(d: Draw) -> Tensor:
    odd = 2 * (d.uniform() * 32).floor() + 1
    return 1 + odd * torch.where(d.uniform(3) < 0.5, 2.0**-8, 2.0**-11)


def _powers(d: Draw) -> Tensor:
    return _signs(d) * torch.exp2((d.rows() * 5 % 7 - 3).double())


def _levels(d: Draw) -> Tensor:
    return level(d.rows()) + _signs(d) * torch.exp2((d.rows() * 3 % 4 - 1).double())


def _plateaus(d: Draw) -> Tensor:
    return level(d.rows()).expand(d.shape).clone()


def _odd_apart(d: Draw) -> Tensor:
    """Of 256 columns the mean is 1 and the variance 4096; 257 has 9 digits, where 258 and -256 fit 8."""
    odd = (*[257] * 7, *[129] * 3, *[63] * 3, *[1] * 115)
    apart = torch.tensor([*odd, *(-n for n in odd)], dtype=torch.float64, device=d.device)
    return 1 + apart[(37 * d.columns() + 11 * d.rows()) % 256].expand(d.shape)


_FILLS = (
    Fill("powers", "one power of two a row, with signs: the mean square is a power of four", _powers, False),
    Fill("halfway", "between 1 and 2: half of them between two numbers of bfloat16, half of float16", _halfway, False),
    Fill("levels", "an integer a row, plus and minus a power of two: so is the deviation", _levels, False),
    Fill("plateaus", "one integer a row: deviation 0", _plateaus, False),
    Fill("odd_apart", "apart by odd numbers up to 257 from a mean of 1: the deviation is 64", _odd_apart, False),
    Fill("three", "3 everywhere", lambda d: torch.full(d.shape, 3.0, dtype=torch.float64, device=d.device), False),
    Fill(
        "squares_between",
        "1.00511 with signs: twice the square lies between two numbers of float16",
        lambda d: 1.00511 * _signs(d),
        independent=False,
    ),
)
_WEIGHTS = ("weight", "normal", "integer", "zeros", "tiny")
_LINE: dict[str, Form | tuple[Any, ...] | str] = {"weight": Form("N", _WEIGHTS, True, True), "eps": (1e-6, 1e-5, 0.5)}
_CAST: dict[str, Form | tuple[Any, ...] | str] = {**_LINE, "cast_before_weight": (False, True)}


def _rms_calls(sizes: ModelSizes, residual: bool = False) -> Iterator[dict[str, Any]]:
    for width in sizes.widths:
        for rows in sizes.rows(width):
            x = TensorSpec((rows, width))
            more = {"residual": x} if residual else {}
            for weight, before in ((True, False), (True, True), (False, False)):
                line = TensorSpec((width,), fill="weight") if weight else None
                yield {"x": x, **more, "weight": line, "eps": 1e-6, "cast_before_weight": before}


def _layer_calls(sizes: ModelSizes, residual: bool = False) -> Iterator[dict[str, Any]]:
    for width in sizes.widths:
        line = TensorSpec((width,))
        for rows in sizes.rows(width):
            x = TensorSpec((rows, width))
            more = {"residual": x} if residual else {}
            for weight, bias in ((line, line), (line, None), (None, None)):
                yield {"x": x, **more, "weight": weight, "bias": bias, "eps": 1e-5}


_rms_rows = row_cases(lambda x, line: {"x": x, "weight": line, "eps": 1e-6, "cast_before_weight": False})
_add_rows = row_cases(lambda x, line: {"x": x, "residual": x, "weight": line, "eps": 1e-6, "cast_before_weight": False})
_layer_rows = row_cases(lambda x, line: {"x": x, "weight": line, "bias": TensorSpec(line.shape), "eps": 1e-5})
_add_layer_rows = row_cases(
    lambda x, line: {"x": x, "residual": x, "weight": line, "bias": TensorSpec(line.shape), "eps": 1e-5}
)


def _goal(name: str, rows: RowCases) -> tuple[Goal, ...]:
    return (Goal(name, sampled_cases(sampled_rows, rows.named, moved=moved_rows), {"peers": 1.0, "copy": 0.95}),)


def _with(sampler: Sampler, rows: RowCases, **lines: TensorSpec | None) -> Iterator[Case]:
    """Drawn rows with other weights than a model's usual ones; None for no weight, shapes are a row's."""
    for case in sampled_cases(sampled_rows, rows.named, 4, moved_rows)(sampler):
        width = case.args["x"].shape[-1:]
        given = {n: None if line is None else replace(line, shape=width) for n, line in lines.items()}
        name = " ".join([case.name, *(_layout_name(n, v) for n, v in given.items())])
        yield replace(case, name=name, args={**case.args, **given})


def _layout_name(name: str, line: TensorSpec | None) -> str:
    return f"no {name}" if line is None else f"{name} {line.dtype}"


def _rms_forms(s: Sampler) -> list[Case]:
    """An offset weight is 1 + weight in float32."""
    offset = TensorSpec((), "float32", "weight")
    return [*_with(s, _rms_rows, weight=offset), *_with(s, _rms_rows, weight=None)]


def _layer_forms(s: Sampler) -> list[Case]:
    line = TensorSpec((), fill="weight")
    return [*_with(s, _layer_rows, weight=None, bias=None), *_with(s, _layer_rows, weight=line, bias=None)]


_BIAS = Form("N", ("normal", "zeros", "integer"), True, True)

EVIDENCE = (
    Evidence(
        op="rms_norm",
        cases=lambda: _cases(cast=True),
        fuzz=Domain({"x": Form("... N"), **_CAST}),
        fills=_FILLS,
        bench=_rms_rows.bench,
        named=_rms_rows.named,
        sampled=sampled_rows,
        calls=_rms_calls,
        like=of_rows,
        equivalents=EQUIVALENTS,
        goals=(Goal("rms_norm, offset or none", _rms_forms, {"peers": 1.0, "copy": 0.95}),),
    ),
    Evidence(
        op="add_rms_norm",
        cases=lambda: _cases(residual=True, cast=True),
        fuzz=Domain({"x": Form("... N", group="x"), "residual": Form("... N", group="x"), **_CAST}),
        fills=_FILLS,
        bench=_add_rows.bench,
        named=_add_rows.named,
        sampled=sampled_rows,
        calls=lambda sizes: _rms_calls(sizes, residual=True),
        like=of_rows,
        equivalents=EQUIVALENTS,
        goals=_goal("add_rms_norm", _add_rows),
    ),
    Evidence(
        op="layer_norm",
        cases=lambda: _cases(bias=True),
        fuzz=Domain({"x": Form("... N"), **_LINE, "bias": _BIAS}),
        fills=_FILLS,
        bench=_layer_rows.bench,
        named=_layer_rows.named,
        sampled=sampled_rows,
        calls=_layer_calls,
        like=of_rows,
        equivalents=EQUIVALENTS,
        goals=(Goal("layer_norm, no weight or bias", _layer_forms, {"peers": 1.0, "copy": 0.95}),),
    ),
    Evidence(
        op="add_layer_norm",
        cases=lambda: _cases(residual=True, bias=True),
        fuzz=Domain({"x": Form("... N", group="x"), "residual": Form("... N", group="x"), **_LINE, "bias": _BIAS}),
        fills=_FILLS,
        bench=_add_layer_rows.bench,
        named=_add_layer_rows.named,
        sampled=sampled_rows,
        calls=lambda sizes: _layer_calls(sizes, residual=True),
        like=of_rows,
        equivalents=EQUIVALENTS,
        goals=_goal("add_layer_norm", _add_layer_rows),
    ),
)
