"""What writing into a paged cache is tried with: slots in any order, skipped and hostile ones, shapes of models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Symbols
from ferryman.ops.draw import Draw, Fill
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape, sampled_cases
from ferryman.ops.primitive import Case, TensorSpec

_VALUES = ("normal", "nonfinite", "tiny", "integer", "huge", "zeros")


def _slots(d: Draw) -> Tensor:
    """Different slots in random order; every fourth token is skipped, and so are those that find no slot left."""
    pages, size = d.shape_of("k_cache")[:2]
    places, tokens = pages * size, d.shape[0]
    hostile = torch.tensor([-1, places, -(2**31), 2**31 - 1, places + 1], dtype=torch.float64, device=d.device)
    at = torch.arange(tokens, device=d.device)
    strange = hostile[(at // 4) % len(hostile)]
    longer = (
        Draw((max(places, tokens),), d.dtype, d.device, d.key, d.op, d.parameter).words(5).argsort()[:tokens].double()
    )
    return torch.where((at % 4 == 1) | (longer >= places), strange, longer)


def _call(
    tokens: int,
    heads: int,
    dims: tuple[int, int],
    pages: tuple[int, int],
    kind: str = "int64",
    fill: str | None = None,
    layout: str = "contiguous",
    cache_layout: str = "contiguous",
    slots: str = "slots",
) -> dict[str, Any]:
    new = [TensorSpec((tokens, heads, dim), fill=fill, layout=layout) for dim in dims]
    caches = [TensorSpec((*pages, heads, dim), fill=fill, layout=cache_layout) for dim in dims]
    return {
        "k": new[0],
        "v": new[1],
        "k_cache": caches[0],
        "v_cache": caches[1],
        "slots": TensorSpec((tokens,), kind, slots, low=-9, high=0),
        "k_scale": None,
        "v_scale": None,
    }


def _cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "decode": _call(5, 2, (64, 64), (3, 16)),
        "int32": _call(37, 3, (32, 32), (7, 8), "int32"),
        "one": _call(1, 1, (16, 16), (1, 1)),
        "mla": _call(6, 1, (96, 64), (4, 4)),
        "odd": _call(11, 3, (37, 5), (5, 3)),
        "wide": _call(3, 5, (257, 130), (2, 4), "int32"),
        "wide_values": _call(3, 5, (16, 257), (2, 4)),
        "pages_of_one": _call(9, 2, (16, 16), (13, 1)),
        "more_tokens_than_slots": _call(40, 2, (16, 24), (3, 4)),
        "all_skipped": _call(9, 2, (16, 16), (2, 8), slots="drawn"),
        "no_tokens": _call(0, 2, (16, 16), (2, 8)),
        "no_pages": _call(4, 2, (16, 16), (0, 8)),
        "no_values": _call(4, 2, (16, 0), (3, 8)),
        "no_keys": _call(4, 2, (0, 16), (3, 8)),
        **{f"layout_{n}": _call(10, 3, (40, 40), (4, 4), layout=n) for n in ("rows", "last", "offset")},
        **{f"cache_{n}": _call(10, 3, (40, 40), (4, 4), "int32", cache_layout=n) for n in ("rows", "last", "heads")},
        **{f"fill_{f}": _call(10, 2, (40, 40), (4, 4), fill=f) for f in ("nonfinite", "tiny", "huge")},
    }
    standard = {
        "llama": _call(1021, 8, (128, 128), (256, 16)),
        "deepseek": _call(515, 1, (576, 512), (64, 64), "int32"),
        "batch_of_64": _call(64, 8, (128, 128), (4096, 16)),
    }
    layouts = {"k": "last", "v": "rows", "k_cache": "last", "v_cache": "heads"}
    apart = _call(10, 3, (40, 24), (4, 4))
    small["layout_apart"] = apart | {n: replace(apart[n], layout=layout) for n, layout in layouts.items()}
    return [
        *(Case(n, args, exact=True) for n, args in small.items()),
        *(Case(n, args, "standard", exact=True) for n, args in standard.items()),
    ]


def _model(tokens: int, heads: int, dim: int, kind: str = "int64") -> dict[str, Any]:
    return _call(tokens, heads, (dim, dim), (max(256, -(-tokens * 2 // 16)), 16), kind)


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    groups = dict.fromkeys(g for _, g in sizes.heads)
    for tokens, heads, dim, kind in itertools.product(sizes.tokens, groups, sizes.head_dims, ("int64", "int32")):
        yield _model(tokens, heads, dim, kind)


def _named(name: str) -> Case:
    tokens, heads, dim = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _model(tokens, heads, dim))


def _bench(grid: Grid) -> Iterator[Case]:
    full = itertools.product((1, 64, 2048, 32_768), (1, 8, 32), (64, 128))
    for tokens, heads, dim in [(8192, 8, 128)] if grid == "small" else full:
        yield _named(f"T{tokens} H{heads} D{dim}")


def _sampled(s: Sampler) -> str:
    return f"T{s.around(1, 32_768 // s.less)} H{s.draw.choice((1, 2, 4, 8, 16, 32))} D{s.draw.choice((64, 128, 256))}"


def _like(name: str, first: Shape) -> Shape | None:
    """256 pages of 16."""
    if name.endswith("_scale"):
        return None
    return {"k": first, "v": first, "slots": first[:1]}.get(name, (256, 16, *first[1:]))


def _drawn(args: dict[str, Any], symbols: Symbols) -> None:
    args["slots"] = TensorSpec(args["slots"].shape, symbols.choose(("int64", "int32")), "slots")


EVIDENCE = (
    Evidence(
        op="kv_append",
        cases=_cases,
        fuzz=Domain(
            {
                "k": Form("T G D", _VALUES, group="k"),
                "v": Form("T G E", _VALUES, group="k"),
                "k_cache": Form("P S G D", _VALUES, group="cache", over=True),
                "v_cache": Form("P S G E", _VALUES, group="cache", over=True),
                "slots": Form("T", ("slots",), dtype="int64", layouts=False),
                "k_scale": (None,),
                "v_scale": (None,),
            },
            symbols={"T": "rows", "G": "groups", "D": "head_dim", "E": "head_dim", "P": "batch", "S": "rows"},
            drawn=_drawn,
        ),
        fills=(Fill("slots", "different slots of the cache, some negative or past it", _slots),),
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        goals=(Goal("kv_append", sampled_cases(_sampled, _named), {"peers": 1.0}),),
    ),
)
