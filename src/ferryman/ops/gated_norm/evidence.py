"""What the gated norm is tried with: cases, exact probes, and shapes of models."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
from torch import Tensor

from ferryman.ops.domain import PRODUCT, Domain, Form, Symbols
from ferryman.ops.draw import Draw, Fill
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

# (columns, of a group, norm first, cast): Qwen3-Next's heads, Mamba2 2.7B, groups of Nemotron-H, Falcon-H1
_MODELS = (
    (128, None, True, True),
    (5120, None, False, True),
    (8192, 1024, False, True),
    (3072, None, False, False),
)


def _call(
    shape: tuple[int, ...],
    size: int | None = None,
    first: bool = True,
    cast: bool = False,
    activation: str = "silu",
    layout: str = "contiguous",
    fill: str | None = None,
    gate: str | None = None,
    weight: str | None = "storage",
    wide: bool = False,
    eps: float = 1e-6,
    scale: str = "weight",
) -> dict[str, Any]:
    return {
        "x": TensorSpec(shape, "float32" if wide else "storage", fill, layout),
        "gate": TensorSpec(shape, fill=gate, layout=layout),
        "weight": None
        if weight is None
        else TensorSpec(shape[-1:], weight, scale, layout if layout == "last" else "contiguous"),
        "eps": eps,
        "group_size": size,
        "norm_before_gate": first,
        "cast_before_weight": cast,
        "activation": activation,
    }


def _cases() -> Sequence[Case]:
    cases: list[Case] = []
    shapes: dict[str, tuple[tuple[int, ...], int | None]] = {
        "one_row": ((1, 64), None),
        "prime": ((7, 257), None),
        "row_of_one": ((3, 1), None),
        "three_dims": ((2, 3, 64), 32),
        "groups_prime": ((3, 3 * 37), 37),
        "groups_of_one": ((2, 5), 1),
        "many_rows": ((19, 40), 20),
        "vector": ((96,), 48),
        "empty_rows": ((0, 64), 16),
        "no_columns": ((5, 0), None),
        "wide": ((2, 4099), None),
        "long": ((2, 16_400), None),
    }
    for name, (shape, size) in shapes.items():
        for first in (True, False):
            tier: Literal["small", "standard"] = "standard" if name == "long" and not first else "small"
            if name == "many_rows" and first:  # more parts of rows; an interpreter takes long for many groups of each
                shape, size = (37, 40), None
            cases.append(Case(f"{name}_{'norm' if first else 'gate'}", _call(shape, size, first), tier))
    for first in (True, False):
        end = "norm" if first else "gate"
        cases += [
            Case(f"cast_{end}", _call((3, 80), 40, first, True)),
            Case(f"cast_no_weight_{end}", _call((5, 96), None, first, True, weight=None)),
            Case(f"cast_float32_weight_{end}", _call((5, 96), None, first, True, weight="float32")),
            Case(f"sigmoid_{end}", _call((3, 80), 40, first, activation="sigmoid")),
            Case(f"no_weight_{end}", _call((5, 96), None, first, weight=None)),
            Case(f"bfloat16_weight_{end}", _call((5, 96), None, first, weight="bfloat16")),
            Case(f"float32_x_{end}", _call((5, 96), 48, first, True, wide=True)),
            Case(f"large_eps_{end}", _call((4, 128), None, first, eps=0.5)),
        ]
        for layout in ("rows",) if first else ("last", "offset"):
            cases.append(Case(f"layout_{layout}_{end}", _call((3, 100), 50, first, layout=layout)))
        for fill in ("offset", "tiny", "nonfinite") if first else ("constant", "tiny", "nonfinite", "zeros"):
            rows = 5 if fill == "nonfinite" else 3  # each row of five has others of NaN and the infinities
            cases.append(Case(f"fill_{fill}_{end}", _call((rows, 192), 96, first, fill=fill, gate="normal")))
        for gate in ("moderate", "zeros", "hundreds") if first else ("moderate", "tiny"):
            cases.append(Case(f"gate_{gate}_{end}", _call((3, 192), 96, first, gate=gate)))
        # silu of an open gate is 128 and of a closed one 0, its slope 1 and 0; 4^n columns, a quarter of them open:
        # every mean square is a power of four
        powers = {"fill": "powers", "gate": "gates", "scale": "digits", "eps": 0.0}
        for name, shape, size, tier in (
            ("", (7, 256), None, "small"),
            ("_groups", (3, 128), 64, "small"),
            ("_rows", (3, 512), 256, "small"),
            ("_4096", (517, 4096), None, "standard"),
        ):
            call = _call(shape, size, first, **powers)  # type: ignore[arg-type]
            if name == "_rows":
                call |= {n: replace(call[n], layout="rows") for n in ("x", "gate")} | {"cast_before_weight": True}
            cases.append(Case(f"exact_powers{name}_{end}", call, tier, True))
        # long rows, read in parts, whose terms a cast to 16 bits rounds alike
        call = _call((2, 4099), None, first, fill="between_signs", gate="gates", scale="between")
        cases.append(Case(f"wide_between_{end}", call, cotangent="between_signs"))
    for width, size, first, cast in _MODELS:
        rows = 2**20 // width
        call = _call((rows - 3, width), size, first, cast)
        cases.append(Case(f"model_{width}_{'norm' if first else 'gate'}", call, "standard"))
    return cases


def _powers(d: Draw) -> Tensor:
    """One power of two a row; signs that no tile repeats."""
    columns = d.columns() + 3 * d.rows()
    sign = 1.0 - 2.0 * ((columns ^ (columns >> 3) ^ (columns >> 7)) & 1).double()
    return sign * torch.exp2((d.rows() * 5 % 7 - 3).double())


def _gates(d: Draw) -> Tensor:
    """Of four neighbouring columns one is open, another one in every row."""
    return torch.where((d.columns() + d.rows()) % 4 == 0, 128.0, -128.0).double()


_FILLS = (
    Fill("powers", "one power of two a row, with signs: the mean square is a power of four", _powers, False),
    Fill("gates", "128 in every fourth column, -128 in others: open, or closed", _gates, False),
)
_NAME = re.compile(r"(\d+)x(\d+)(?: G(\d+))?( norm)?( cast)?")


def _name(rows: int, width: int, size: int | None, first: bool, cast: bool) -> str:
    return f"{rows}x{width}{f' G{size}' if size else ''}{' norm' if first else ''}{' cast' if cast else ''}"


def _named(name: str) -> Case:
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"case {name!r} of gated_rms_norm; required: such as 4096x8192 G1024 norm cast")
    size = None if match[3] is None else int(match[3])
    return Case(name, _call((int(match[1]), int(match[2])), size, match[4] is not None, match[5] is not None))


def _bench(grid: Grid) -> Iterator[Case]:
    names = [_name(*shape, None, first, True) for shape in bench_rows(grid) for first in (False, True)]
    for width, size, first, cast in _MODELS if grid == "full" else _MODELS[2:3]:
        names.append(_name(2**26 // width, width, size, first, cast))
    yield from map(_named, dict.fromkeys(names))  # a model's rows may be among those of every op


def _sampled(s: Sampler) -> str:
    _, size, first, cast = s.draw.choice(_MODELS)
    rows, width = (int(n) for n in sampled_rows(s).split("x"))
    return _name(rows, width, size if size and width % size == 0 else None, first, cast)


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for width in sizes.widths:
        for rows in sizes.rows(width):
            for first in (True, False):
                yield _call((rows, width), None, first, True)
    for width, size, first, cast in _MODELS:
        for rows in sizes.rows(width):
            yield _call((rows, width), size, first, cast)


def _like(name: str, first: Shape) -> Shape | None:
    return first[-1:] if name == "weight" else first


def _grouped(args: dict[str, Any], symbols: Symbols) -> None:
    """Groups that divide the columns, of some cases."""
    width = args["x"].shape[-1]
    fitting = [n for n in (1, 2, 16, 31, 32, 64) if width and width % n == 0]
    args["group_size"] = symbols.choose([None, *fitting])


_GATES = ("normal", "moderate", "tiny", "integer", "uniform", "zeros", "constant", "offset")

EVIDENCE = (
    Evidence(
        op="gated_rms_norm",
        cases=_cases,
        fuzz=Domain(
            {
                "x": Form("... N", PRODUCT),
                "gate": Form("... N", _GATES, mixed=True),
                "weight": Form("N", ("weight", "normal", "integer", "zeros", "tiny"), True, True),
                "eps": (1e-6, 1e-5, 0.5),
                "norm_before_gate": (True, False),
                "cast_before_weight": (False, True),
                "activation": ("silu", "sigmoid"),
            },
            drawn=_grouped,
        ),
        fills=_FILLS,
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        goals=(
            Goal("gated_rms_norm", sampled_cases(_sampled, _named, moved=moved_rows), {"peers": 1.0, "copy": 0.95}),
        ),
    ),
)
