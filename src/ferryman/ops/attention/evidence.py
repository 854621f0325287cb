"""What attention is tried with: its domain and shapes of models, beside its cases (cases.py) and fills (fills.py)."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ferryman.ops.attention.cases import cases, key_ranges, seeds
from ferryman.ops.attention.equivalents import EQUIVALENTS
from ferryman.ops.attention.fills import FILLS
from ferryman.ops.domain import Domain, Form, Rule, broadcast, multiple
from ferryman.ops.evidence import Evidence, Goal, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.primitive import Case, TensorSpec

# causal, window, softcap, whether there is a mask
_MASKING = (
    (True, None, 0.0, False),
    (False, None, 0.0, False),
    (True, 512, 0.0, False),
    (True, None, 50.0, False),
    (True, 512, 50.0, False),
    (False, None, 0.0, True),
)


def _dense(batch: int, heads: tuple[int, int], queries: int, keys: int, dim: int) -> dict[str, Any]:
    q = TensorSpec((batch, heads[0], queries, dim), layout="heads")
    k = TensorSpec((batch, heads[1], keys, dim), layout="heads")
    return {"q": q, "k": k, "v": k, "causal": True, "scale": None, "window": None, "softcap": 0.0, "mask": None}


def _calls(sizes: ModelSizes) -> Iterator[dict[str, Any]]:
    for queries, heads, dim, masking in itertools.product(sizes.lengths, sizes.heads, sizes.head_dims, _MASKING):
        causal, window, softcap, masked = masking
        keys = max(queries, 4096 if queries < 64 else 0)
        mask = TensorSpec((1, 1, queries, keys), dtype="bool") if masked else None
        call = _dense(1, heads, queries, keys, dim)
        yield call | {"causal": causal, "window": window, "softcap": softcap, "mask": mask}


def _bench(grid: Grid) -> Iterator[Case]:
    small = [(2, 32, 8, 8192, 8192, 128), (32, 32, 8, 1, 4096, 128)]
    full = [(2, 32, 32, 8192, 8192, 128), (4, 32, 32, 4096, 4096, 64), (8, 32, 8, 2048, 2048, 128)]
    for b, h, kv, queries, keys, d in [*small, *([*full, (1, 32, 8, 1, 32_768, 128)] if grid == "full" else [])]:
        yield Case(f"B{b} H{h}/{kv} Q{queries} K{keys} D{d} causal", _dense(b, (h, kv), queries, keys, d))


_NAME = re.compile(
    r"B(\d+) H(\d+)/(\d+) Q(\d+) K(\d+) D(\d+)( causal)?(?: window(\d+))?(?: softcap(\d+))?(?: chunk(\d+))?"
    r"(?: (padding|keys|mask|cache|documents|bias|sinks|range|dropout))?"
)


def _named(name: str) -> Case:
    """padding: the mask of left-padded rows, each query's own. keys: of right-padded sequences, the same for all
    queries. cache: of a static cache that is partly full. documents: of packed ones. mask: random. bias: of floats, one
    for all of a batch. range: a first and an end key for each sequence. dropout: of a tenth."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no case of attention; required: such as B2 H32/8 Q512 K512 D128 causal window64")
    batch, heads, kv, queries, keys, dim = (int(n) for n in match.groups()[:6])
    causal, window, softcap, chunk, kind = match.groups()[6:]
    mask = None
    if kind == "bias":
        mask = TensorSpec((1, heads, queries, keys), fill="normal")
    elif kind in ("padding", "mask", "cache", "documents"):
        mask = TensorSpec((batch, 1, queries, keys), dtype="bool", fill=kind)
    elif kind == "keys":
        mask = TensorSpec((batch, 1, 1, keys), dtype="bool", fill=kind)
    added: dict[str, dict[str, Any]] = {
        "sinks": {"sinks": TensorSpec((heads,))},
        "range": {"key_range": key_ranges(batch)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": seeds(batch)},
    }
    return Case(
        name,
        {
            **_dense(batch, (heads, kv), queries, keys, dim),
            "causal": causal is not None,
            "window": None if window is None else int(window),
            "softcap": float(softcap or 0),
            "mask": mask,
            **({} if chunk is None else {"chunk": int(chunk)}),
            **added.get(kind, {}),
        },
    )


# masks that a static cache, padding, packed documents and a position bias make
_CONTENTS = (
    "B32 H32/8 Q1 K4096 D128 cache",
    "B4 H32/8 Q2048 K2048 D128 padding",
    "B2 H32/8 Q4096 K4096 D128 documents",
    "B2 H16/16 Q2048 K2048 D64 bias",
    "B2 H16/16 Q2048 K2048 D64 mask",
    "B8 H32/8 Q17 K4096 D128 cache",
    "B2 H32/8 Q4096 K4096 D64 documents",
    "B8 H12/12 Q512 K512 D64 bias",
    "B8 H12/12 Q512 K512 D64 keys",
)
_HEAD_DIMS = (40, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
_MOST_MASK = 1 << 28  # elements


def _sampled(s: Sampler) -> str:
    """All that the signature has: decoding, a chunk on a cache, squares, encoders, cross-attention; windows, softcap,
    masks."""
    dim, kv = s.draw.choice(_HEAD_DIMS), s.draw.choice((1, 2, 4, 8, 16))
    heads, batch = kv * s.draw.choice((1, 1, 2, 4, 7, 8, 16)), s.around(1, 32)
    keys = s.around(64 // min(s.less, 4), 16_384 // s.less)
    form = s.draw.choice(("square", "square", "square", "encoder", "encoder", "decode", "decode", "chunk", "cross"))
    if form == "encoder":  # each head has keys of its own, and sees all of them
        heads = kv = s.draw.choice((3, 4, 6, 8, 12, 16, 20, 24))
        dim = s.draw.choice((32, 64, 64, 80, dim))
        keys = s.around(32, 4096 // s.less)
    queries = {
        "square": keys,
        "encoder": keys,
        "decode": 1,
        "chunk": s.around(2, min(1024, keys)),
        "cross": s.around(16, 2048),
    }[form]
    plain, hidden = ("", "", "", " window", " softcap50"), (" padding", " keys", " mask", " bias")
    kind = s.draw.choice((*plain, *hidden, " sinks", " range", " chunk", " dropout"))
    batch = s.fitting(batch, heads, queries, max(keys, queries), dim)
    causal = " causal" if form not in ("cross", "encoder") and kind not in (" padding", " keys", " mask") else ""
    if kind == " window":
        kind = f" window{s.draw.choice((64, 128, 512, 1024, 4096))}" if causal else ""
    if kind == " chunk":
        kind = f" chunk{s.draw.choice((256, 2048, 8192))}" if causal else ""
    rows = {" padding": batch, " mask": batch, " bias": heads}.get(kind, 0)
    if rows * queries * keys > _MOST_MASK // s.less**2:
        kind, causal = "", " causal" if form not in ("cross", "encoder") else ""
    return f"B{batch} H{heads}/{kv} Q{queries} K{keys} D{dim}{causal}{kind}"


def _squares(s: Sampler, heads: tuple[tuple[int, int, int], ...], longest: int, end: str) -> Iterator[Case]:
    """Twelve prefills: as many queries as keys, and a batch that keeps the work alike."""
    for at in range(12):
        (many, kv, dim), length = heads[at % len(heads)], max(8, s.around(512, longest) // s.less)
        batch = max(1, min(16, 16_384 // s.less // length))
        yield _named(f"B{batch} H{max(kv, many // min(s.less, 8))}/{kv} Q{length} K{length} D{dim}{end}")


def _plain(case: Case) -> Case:
    """Without what was added: values as wide as here, or for MLA as wide as its heads' values."""
    v = case.args["v"]
    q, k = (replace(case.args[n], shape=(*case.args[n].shape[:3], v.shape[3])) for n in ("q", "k"))
    return Case(f"{case.name}: plain", {**case.args, "q": q, "k": k, "mask": None, "sinks": None})


def _latent(s: Sampler) -> Iterator[Case]:
    """MLA's prefill: keys of 192, values of 128."""
    for case in _squares(s, ((16, 16, 192), (64, 64, 192), (128, 128, 192)), 4096, " causal"):
        v = case.args["v"]
        yield Case(f"{case.name} V128", {**case.args, "v": replace(v, shape=(*v.shape[:3], 128))})


_GOALS = (
    Goal(
        "attention, sinks",
        lambda s: _squares(s, ((64, 8, 64), (32, 8, 128)), 8192, " causal sinks"),
        {"twin": 0.9},
        twin=_plain,
    ),
    Goal(
        "attention, bias",
        lambda s: _squares(s, ((12, 12, 64), (32, 32, 64), (16, 16, 128)), 2048, " bias"),
        {"twin": 0.9},
        twin=_plain,
    ),
    Goal("attention, keys 192 and values 128", _latent, {"twin": 0.9}, twin=_plain),
)


def _like(name: str, first: Shape) -> Shape | None:
    return None if name in ("mask", "sinks", "key_range", "dropout_seed") else first


def _defined(args: dict[str, Any], dtype: torch.dtype) -> None:
    """Leaves out NaN and Inf in a value that a query may not see. Its weight is 0, and 0 * NaN is NaN; a kernel that
    skips the block gives the sum of the others. Both are common, and both are right. So it is with the gradient of a
    key that a query of NaN may not see."""
    regions = [name for name in ("causal", "window", "key_range", "chunk") if args.get(name) not in (None, False)]
    if (regions or args.get("mask") is not None) and args["v"].fill == "nonfinite":
        args["v"] = replace(args["v"], fill="normal")
    if regions and "need_mask" in args:  # of the backward
        for name in ("q", "k"):
            if args[name].fill == "nonfinite":
                args[name] = replace(args[name], fill="normal")
    if args.get("dropout_seed") is None:
        args["dropout_p"] = 0.0


_SCORES = ("normal", "nonfinite", "integer", "uniform", "zeros", "constant", "offset", "large_logits")
_SYMBOLS: dict[str, Rule] = {
    "B": "batch",
    "G": "groups",
    "H": multiple("G", "per_group"),
    "S": "queries",
    "T": "keys",
    "D": lambda s: int(s.choose(s.sizes.head_dim)),
    "E": lambda s: int(s.choose((s["D"], s["D"], *s.sizes.head_dim))),
    "beyond": lambda s: s["T"] + 3,
    **{f"m{symbol}": broadcast(symbol) for symbol in "BHS"},  # a mask's dimension broadcasts or not
}

EVIDENCE = (
    Evidence(
        op="attention",
        cases=cases,
        fuzz=Domain(
            {
                "q": Form("B H S D", _SCORES, group="q"),
                "k": Form("B G T D", _SCORES, group="q"),
                "v": Form("B G T E", _SCORES, group="q"),
                "causal": (False, True),
                "scale": (None, 0.3),
                "window": "windows",
                "softcap": (0.0, 20.0),
                "mask": Form("mB mH mS T", ("bias", "mask"), True, True),
                "sinks": Form("H", ("normal", "zeros", "large_logits"), True, True),
                "key_range": Form(
                    "B 2", ("ranges", "any_range", "integer"), True, dtype="int32", low=-2, high="beyond"
                ),
                "chunk": "windows",
                "dropout_p": (0.0, 0.1, 0.5),
                "dropout_seed": Form("B", ("seeds",), True, dtype="int64"),
            },
            symbols=_SYMBOLS,
            defined=_defined,
        ),
        fills=FILLS,
        bench=_bench,
        named=_named,
        contents=_CONTENTS,
        sampled=_sampled,
        calls=_calls,
        like=_like,
        equivalents=EQUIVALENTS,
        goals=_GOALS,
    ),
)
