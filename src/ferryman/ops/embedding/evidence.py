"""What a table's rows are tried with: ids inside and outside the table, repeated and alone, and shapes of models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import VALUES, Domain, Form, Symbols, positive
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.embedding.equivalents import EQUIVALENTS
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape, sampled_cases
from ferryman.ops.primitive import Case, TensorSpec

_TABLES = ((128_256, 4096), (151_936, 1024), (50_257, 768), (256_000, 2304), (32_000, 4096))
_FEW = ((32, 8), (2, 768), (512, 768), (64, 16))  # T5's distances of every pair of tokens, kinds of tokens, positions


def _outside(d: Draw) -> Tensor:
    """Ids of the table; every third is just outside it, far outside it, or as far as int32 reaches."""
    hostile = torch.tensor([-1, d.high, -(2**31), 2**31 - 1, d.high + 1, -d.high - 1], dtype=torch.float64)
    at = torch.arange(d.words().numel(), device=d.device).reshape(d.shape)
    strange = hostile.to(d.device)[(at // 3) % len(hostile)]
    return torch.where(at % 3 == 1, strange, d.integers(0, max(d.high, 1)) if d.high else strange)


def _call(
    shape: tuple[int, ...],
    height: int,
    width: int,
    scale: float | None = None,
    kind: str = "int64",
    fill: str | None = None,
    layout: str = "contiguous",
    ids: str | None = None,
    high: int | None = None,
) -> dict[str, Any]:
    return {
        "ids": TensorSpec(shape, kind, ids, layout if shape else "contiguous", 0, height if high is None else high),
        "weight": TensorSpec((height, width), fill=fill, layout=layout),
        "scale": scale,
    }


def _cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "one": _call((1,), 5, 64),
        "prime": _call((7,), 31, 67, 0.3),
        "int32": _call((37,), 64, 96, kind="int32"),
        "two_dims": _call((3, 5), 17, 130, 8.0),
        "scalar_id": _call((), 7, 16),
        "width_one": _call((9,), 5, 1),
        "one_row": _call((33,), 1, 48, 1.7),
        "as_many_as_rows": _call((11,), 11, 40),
        "repeated": _call((257,), 3, 40, kind="int32"),
        "runs": _call((2500,), 2, 6, ids="outside"),
        "runs_wide": _call((90,), 1, 1037),
        "sparse": _call((4,), 300, 64),
        "wide": _call((3,), 4, 5003),
        "empty": _call((0,), 5, 16),
        "width_zero": _call((3,), 5, 0),
        "no_table": _call((3,), 0, 16, ids="outside"),
        "outside_no_width": _call((5,), 1, 0, ids="outside"),
        "outside": _call((41,), 19, 72, ids="outside"),
        "outside_int32": _call((41,), 19, 72, 2.5, "int32", ids="outside"),
        "zero_scale": _call((9,), 7, 33, 0.0),
        **{f"layout_{n}": _call((6, 4), 11, 56, 0.3, layout=n) for n in ("rows", "last", "offset")},
        **{f"fill_{f}": _call((24,), 10, 40, 3.3, fill=f) for f in ("nonfinite", "tiny", "large", "constant")},
    }
    exact = {
        "exact_copy": _call((29,), 40, 67, fill="integer"),
        "exact_doubled": _call((29,), 40, 67, 2.0, "int32", fill="integer", layout="rows"),
        "exact_outside": _call((29,), 12, 67, fill="integer", ids="outside"),
    }
    standard = {
        "llama": _call((2, 1023), 128_256, 4096),
        "gemma": _call((1021,), 256_000, 2304, 48.0),
        "gpt2": _call((4099,), 50_257, 768, kind="int32"),
        "hot": _call((8192,), 50_257, 768, high=2),
        "buckets": _call((1024, 1024), 32, 8),
    }
    large = _call((4099,), 32_000, 1024, 0.5, fill="integer")
    return [
        *(Case(n, args) for n, args in small.items()),
        *(Case(f"gradient_{n}", _call((37,), 11, 40), cotangent=n) for n in ("hundreds", "nonfinite")),
        # a sum of a few small integers: 8 bits hold it
        *(Case(n, args, exact=True, cotangent="signs") for n, args in exact.items()),
        *(Case(n, args, "standard") for n, args in standard.items()),
        Case("exact_32000", large, "standard", exact=True, cotangent="signs"),
    ]


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for rows, table, kind in itertools.product(sizes.tokens, _TABLES, ("int64", "int32")):
        yield _call((rows,), *table, kind=kind)


def _named(name: str) -> Case:
    rows, height, width = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _call((rows,), height, width))


def _bench(grid: Grid) -> Iterator[Case]:
    full = [(rows, *table) for table in _TABLES for rows in (1, 512, 8192, 32_768)] + [(1 << 20, 32, 8)]
    for rows, height, width in [(8192, 128_256, 4096)] if grid == "small" else full:
        yield _named(f"{rows}of{height}x{width}")


def _sampled(s: Sampler) -> str:
    height, width = s.draw.choice((*_TABLES, *_FEW))
    if (height, width) in _FEW:
        return f"{s.around(1, (1 << 28) // s.less // width // height)}of{height}x{width}"
    return f"{s.around(1, 32_768 // s.less)}of{height // s.less}x{max(1, width // s.less)}"


def _moved(case: Case) -> int:
    """Rows of 16 bits, read and written."""
    return 4 * case.args["ids"].shape[0] * case.args["weight"].shape[1]


def _like(name: str, first: Shape) -> Shape | None:
    """A table of Llama 3's."""
    return {"weight": _TABLES[0]}.get(name, first)


def _high(args: dict[str, Any], symbols: Symbols) -> None:
    """Ids of the table, or some of them outside it."""
    ids = args["ids"]
    kind = symbols.choose(("int64", "int32"))
    args["ids"] = TensorSpec(ids.shape, kind, symbols.choose((None, "outside")), ids.layout, 0, symbols["V"])


EVIDENCE = (
    Evidence(
        op="embedding",
        cases=_cases,
        fuzz=Domain(
            {
                "ids": Form("...", ("drawn",), dtype="int64", high="V"),
                "weight": Form("V N", VALUES),
                "scale": (None, 0.3, 2.0, -45.25),
            },
            symbols={"V": positive("width"), "N": "width"},
            drawn=_high,
        ),
        fills=(Fill("outside", "ids, every third outside the table", _outside),),
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        goals=(Goal("embedding", sampled_cases(_sampled, _named, moved=_moved), {"peers": 1.0, "copy": 0.95}),),
        equivalents=EQUIVALENTS,
    ),
)
