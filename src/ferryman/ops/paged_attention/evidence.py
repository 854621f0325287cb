"""What paged attention is tried with: ragged lengths, pages in any order, shared or not there, and shapes of models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Rule, multiple, positive
from ferryman.ops.draw import Draw, Fill, offset
from ferryman.ops.evidence import Evidence, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.paged_attention.equivalents import EQUIVALENTS
from ferryman.ops.primitive import Case, TensorSpec


def _ragged(d: Draw) -> Tensor:
    """Lengths from 0 to the most that fits, the first ones at the ends."""
    most = d.high - 1
    drawn = d.integers(d.low, d.high)
    edges = torch.tensor([most, 0, 1, max(most - 1, 0)], dtype=torch.float64, device=d.device)[: len(drawn)]
    drawn[: len(edges)] = edges
    return drawn


def _pages(d: Draw) -> Tensor:
    """A page for each entry that a length reaches, in any order; sequences share pages where there are too few. Other
    entries are -1 or far beyond the last page: reading one would leave the cache."""
    pages, size = d.shape_of("k_cache")[:2]
    lengths = d.given("lengths")
    order = d.words(4).reshape(-1).argsort().argsort().reshape(d.shape)
    place = torch.arange(d.shape[1], device=d.device)[None, :]
    needed = place * size < lengths[:, None]
    hostile = torch.where(d.words(5) & 1 == 1, -1, 2**30)
    return torch.where(needed, order % max(pages, 1), hostile).double()


def _poisoned(d: Draw) -> Tensor:
    """Normal values; NaN in every slot that no sequence sees."""
    return _only_seen(d, d.normal())


def _tallied(d: Draw) -> Tensor:
    """Integers from 0 to 4; NaN in every slot that no sequence sees. Their mean over 2^n keys is exact."""
    return _only_seen(d, d.integers(0, 5))


def _only_seen(d: Draw, values: Tensor) -> Tensor:
    size = d.shape[1]
    table, lengths = d.given("page_table").long(), d.given("lengths")
    seen = torch.arange(table.shape[1] * size, device=d.device)[None, :] < lengths[:, None]
    slots = (table[:, :, None] * size + torch.arange(size, device=d.device)).reshape(seen.shape)[seen]
    used = torch.zeros(d.shape[0] * size, dtype=torch.bool, device=d.device)
    used[slots] = True
    return values.masked_fill(~used.reshape(d.shape[0], size, 1, 1), float("nan"))


_FILLS = (
    Fill("ragged", "lengths from 0 to the most that fits, those at the ends first", _ragged),
    Fill("pages", "pages in any order for what a length reaches, else -1 or 2^30", _pages),
    Fill("poisoned", "normal, NaN in every slot that no sequence sees", _poisoned),
    Fill("tallied", "integers from 0 to 4, NaN in every slot that no sequence sees", _tallied, False),
    offset({}, otherwise=4.0),  # as in attention: scores of 64e6 / 8 have a float32 roundoff of a whole unit
)


def _call(
    batch: int,
    heads: tuple[int, int],
    dim: int,
    most: int,
    size: int,
    pages: int | None = None,
    fill: str | None = "poisoned",
    layout: str = "contiguous",
    q_fill: str | None = None,
    lengths: TensorSpec | None = None,
    scale: float | None = None,
) -> dict[str, Any]:
    """``most``: entries of a sequence's table. ``pages``: of the cache; default: as many as the tables have entries."""
    shape = (batch * most + 1 if pages is None else pages, size, heads[1], dim)
    return {
        "q": TensorSpec((batch, heads[0], dim), fill=q_fill, layout=layout),
        "k_cache": TensorSpec(shape, fill=fill, layout=layout),
        "v_cache": TensorSpec(shape, fill="tallied" if q_fill == "zeros" else fill, layout=layout),
        "page_table": TensorSpec((batch, most), "int32", "pages", layout),
        "lengths": lengths or TensorSpec((batch,), "int32", "ragged", high=most * size + 1),
        "scale": scale,
    }


def _of(batch: int, length: int) -> TensorSpec:
    """Every sequence of one length."""
    return TensorSpec((batch,), "int32", low=length, high=length + 1)


def _cases() -> Sequence[Case]:
    small: dict[str, dict[str, Any]] = {
        "ragged": _call(5, (4, 2), 64, 4, 16),
        "one_sequence": _call(1, (2, 1), 64, 5, 16, lengths=_of(1, 77)),
        "heads_alone": _call(4, (3, 3), 64, 3, 16),
        "many_heads": _call(2, (40, 2), 32, 3, 8),
        "d37": _call(4, (4, 2), 37, 3, 5),
        "d80": _call(4, (4, 2), 80, 3, 16),
        "d128": _call(3, (8, 2), 128, 3, 16),
        "d256": _call(2, (4, 1), 256, 2, 8),
        "odd_pages": _call(4, (4, 2), 64, 6, 7),
        "pages_of_one": _call(3, (2, 1), 64, 19, 1),
        "long_page": _call(3, (4, 2), 64, 1, 130),
        "shared_pages": _call(6, (4, 2), 64, 4, 8, pages=3),
        "scale": _call(3, (2, 2), 64, 3, 8, scale=0.3),
        "all_empty": _call(3, (4, 2), 64, 3, 16, lengths=_of(3, 0)),
        "no_entries": _call(3, (4, 2), 64, 0, 16),
        "no_sequences": _call(0, (4, 2), 64, 3, 16),
        "no_pages": _call(2, (4, 2), 64, 2, 16, pages=0, lengths=_of(2, 0), fill=None),
        "beyond_the_table": _call(3, (4, 2), 64, 2, 16, lengths=_of(3, 40), fill=None),
        "layout_rows": _call(4, (4, 2), 64, 3, 16, layout="rows"),
        "layout_last": _call(4, (4, 2), 64, 3, 16, layout="last"),
        "layout_offset": _call(4, (4, 2), 64, 3, 16, layout="offset"),
        "fill_offset": _call(4, (4, 2), 64, 3, 16, fill="offset", q_fill="offset"),
        "fill_constant": _call(4, (4, 2), 64, 3, 16, fill="constant", q_fill="constant"),
        "fill_large_logits": _call(4, (4, 2), 64, 3, 16, fill="poisoned", q_fill="large_logits"),
        "fill_nonfinite": _call(5, (4, 2), 64, 3, 16, q_fill="nonfinite"),
    }
    cases = [Case(name, args) for name, args in small.items()]
    # equal scores over 2^n keys: the mean of their values
    for name, length in (("one", 1), ("two", 2), ("thirty_two", 32)):
        args = _call(4, (4, 2), 64, 4, 8, q_fill="zeros", lengths=_of(4, length))
        cases.append(Case(f"exact_{name}", args, exact=True, inexact=("float32",)))
    exact = _call(16, (32, 8), 128, 32, 16, q_fill="zeros", lengths=_of(16, 512))
    cases.append(Case("exact_512", exact, "standard", exact=True, inexact=("float32",)))
    standard = {
        "decode_4k": _call(8, (32, 8), 128, 256, 16),
        "decode_ragged": _call(33, (28, 4), 128, 40, 16),
        "long_pages": _call(4, (16, 16), 64, 9, 256),
    }
    return [*cases, *(Case(name, args, "standard") for name, args in standard.items())]


def _full(batch: int, heads: tuple[int, int], length: int, dim: int, size: int = 16) -> dict[str, Any]:
    """Sequences that fill their pages."""
    return _call(batch, heads, dim, -(-length // size), size, fill=None, lengths=_of(batch, length))


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for heads, dim, size in itertools.product(sizes.heads, sizes.head_dims, (16, 64)):
        for batch, length in ((1, 4096), (1, 32_768), (32, 4096)):
            yield _full(batch, heads, length, dim, size)


def _bench(grid: Grid) -> Iterator[Case]:
    full = [(1, 32, 8, 4096, 128), (1, 32, 8, 32_768, 128), (32, 32, 8, 4096, 128), (128, 32, 8, 1024, 128)]
    for batch, h, kv, length, dim in [(32, 32, 8, 4096, 128)] if grid == "small" else full:
        yield Case(f"B{batch} H{h}/{kv} K{length} D{dim}", _full(batch, (h, kv), length, dim))


def _named(name: str) -> Case:
    batch, heads, kv, length, dim = (int(n) for n in re.findall(r"\d+", name))
    return Case(name, _full(batch, (heads, kv), length, dim))


def _sampled(s: Sampler) -> str:
    batch, heads, kv, length, dim = s.heads()
    return f"B{s.fitting(batch, heads, 1, length, dim)} H{heads}/{kv} K{length} D{dim}"


def _like(name: str, first: Shape) -> Shape:
    """Pages of 16 for up to 4096 keys of as many KV heads as heads."""
    batch, heads, dim = first[0], first[-2], first[-1]
    cache = (batch * 256, 16, heads, dim)
    return {"k_cache": cache, "v_cache": cache, "page_table": (batch, 256), "lengths": (batch,)}.get(name, first)


_SYMBOLS: dict[str, Rule] = {
    "B": "batch",
    "G": "groups",
    "H": multiple("G", "per_group"),
    "D": positive("head_dim"),
    "M": lambda s: s.size((0, 1, 2, 3)),
    "Z": lambda s: int(s.choose((1, 2, 7, 16))),
    "P": lambda s: int(s.choose((1, 2, 5, 12))),
    "most": lambda s: s["M"] * s["Z"] + 1,
}
_CACHE = ("poisoned", "integer", "uniform", "zeros", "constant", "offset")

EVIDENCE = (
    Evidence(
        op="paged_attention",
        cases=_cases,
        fuzz=Domain(
            {
                "q": Form("B H D", ("normal", "nonfinite", "integer", "zeros", "constant", "large_logits")),
                "k_cache": Form("P Z G D", _CACHE, group="cache"),
                "v_cache": Form("P Z G D", _CACHE, group="cache"),
                # its entries share no memory: one that no length reaches, -1 or 2^30, would stand for one that is read
                "page_table": Form("B M", ("pages",), dtype="int32", over=True),
                "lengths": Form("B", ("ragged",), dtype="int32", high="most"),
                "scale": (None, 0.3),
            },
            symbols=_SYMBOLS,
        ),
        fills=_FILLS,
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        equivalents=EQUIVALENTS,
    ),
)
