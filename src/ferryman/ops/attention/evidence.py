"""What attention is tried with: cases, exact probes, and shapes of models."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.domain import Domain, Form, Rule, broadcast, multiple
from ferryman.ops.draw import Draw, Fill, offset
from ferryman.ops.evidence import Evidence, Grid, ModelSizes, Sampler, Shape
from ferryman.ops.primitive import Case, TensorSpec


def _cases() -> Sequence[Case]:
    cases = []

    def add(
        name: str,
        shape: tuple[int, int, int, int],
        *,
        kv_heads: int | None = None,
        sk: int | None = None,
        dv: int | None = None,
        mask: TensorSpec | None = None,
        layout: str = "heads",
        fill: str | None = None,
        tier: str = "small",
        exact: tuple[str, str] | None = None,
        inexact: tuple[str, ...] = (),
        **options: object,
    ) -> None:
        """``exact``: the fills of q and k."""
        batch, heads, sq, head_dim = shape
        keys = (batch, kv_heads or heads, sq if sk is None else sk, head_dim)
        q_fill, k_fill, v_fill = (*exact, "tally") if exact else (fill, fill, fill)
        args: dict[str, object] = {
            "q": TensorSpec(shape, layout=layout, fill=q_fill),
            "k": TensorSpec(keys, layout=layout, fill=k_fill),
            "v": TensorSpec((*keys[:3], dv or head_dim), layout=layout, fill=v_fill),
        }
        args |= {"causal": False, "scale": None, "window": None, "softcap": 0.0, "mask": mask} | options
        cotangent = "tally" if exact else None
        cases.append(Case(name, args, tier, exact is not None, inexact, cotangent))  # type: ignore[arg-type]

    def matching(name: str, shape: tuple[int, int, int, int], *inexact: str, **more: object) -> None:
        """Each query sees 2^n keys of its own code, whose values it averages: exp of any other score is 0. The
        log-sum-exp is rounded, and float32 shows what that does to the probabilities."""
        codes, never = ("codes", "codes"), ("float32", "lse", *inexact)
        add(f"exact_{name}", shape, exact=codes, scale=0.125, inexact=never, **more)  # type: ignore[arg-type]

    add("full", (1, 2, 33, 64))
    add("causal", (1, 2, 65, 64), causal=True)
    add("gqa", (2, 6, 17, 64), kv_heads=2, causal=True)
    add("multi_query", (1, 5, 19, 64), kv_heads=1)
    add("d80", (1, 2, 29, 80), causal=True)
    add("d96", (1, 1, 21, 96))
    add("d128", (1, 2, 31, 128), causal=True)
    add("d256", (1, 1, 18, 256), causal=True)
    add("d_odd", (1, 2, 13, 37))
    add("decode", (2, 4, 1, 64), kv_heads=2, sk=77, causal=True)
    add("append", (1, 2, 5, 64), sk=70, causal=True)
    add("longer_queries", (1, 2, 40, 64), sk=11, causal=True)  # rows that see nothing
    add("window", (1, 2, 70, 64), causal=True, window=9)
    add("window_both_sides", (1, 2, 45, 64), window=7)
    add("window_decode", (2, 4, 1, 64), kv_heads=2, sk=200, causal=True, window=40, scale=1.0, fill="large_logits")
    add("window_one", (1, 1, 20, 64), causal=True, window=1)
    add("softcap", (1, 2, 33, 64), causal=True, softcap=20.0)
    add("scale", (1, 2, 20, 64), scale=0.3)
    add("bool_mask", (2, 2, 21, 64), mask=TensorSpec((2, 1, 21, 21), dtype="bool", fill="mask"))
    add("float_mask", (1, 4, 18, 64), sk=35, mask=TensorSpec((1, 4, 18, 35), fill="bias", layout="rows"))
    add("row_mask", (2, 2, 9, 64), sk=30, causal=True, mask=TensorSpec((2, 1, 1, 30), dtype="bool", fill="mask"))
    add("softcap_mask", (1, 2, 16, 64), softcap=5.0, mask=TensorSpec((16, 16), fill="bias"))
    add("one_key", (2, 2, 3, 64), sk=1)
    add("no_keys", (1, 2, 3, 64), sk=0)
    add("no_queries", (1, 2, 0, 64), sk=5)
    add("contiguous", (1, 3, 20, 64), layout="contiguous", causal=True)
    add("offset", (1, 3, 20, 64), layout="offset")
    for fill in ("offset", "constant", "large_logits", "nonfinite", "zeros"):
        add(f"fill_{fill}", (1, 2, 37, 64), fill=fill)
    add("sinks", (2, 6, 33, 64), kv_heads=2, causal=True, sinks=TensorSpec((6,)))
    add("sinks_window", (1, 4, 41, 64), kv_heads=2, causal=True, window=8, sinks=TensorSpec((4,)))
    add("sinks_wide", (1, 2, 18, 64), sinks=TensorSpec((2,), dtype="float32"))  # a dtype of its own
    add("sinks_large", (1, 2, 19, 64), fill="large_logits", sinks=TensorSpec((2,), fill="large_logits"))
    add("sinks_infinite", (1, 6, 9, 64), kv_heads=3, sinks=TensorSpec((6,), fill="infinite_logits"))
    add("sinks_blind", (1, 2, 12, 64), sk=5, causal=True, sinks=TensorSpec((2,)))  # rows that see their sink alone
    add("sinks_decode", (2, 2, 1, 64), kv_heads=1, sk=300, sinks=TensorSpec((2,)))
    add("sinks_strided", (1, 4, 9, 64), sinks=TensorSpec((4,), layout="last"))
    add("sinks_no_keys", (1, 2, 3, 64), sk=0, sinks=TensorSpec((2,)))
    add("values_narrow", (1, 4, 21, 48), kv_heads=2, causal=True, dv=32)
    add("values_wide", (1, 2, 17, 16), dv=80)
    add("values_one", (1, 2, 9, 37), causal=True, dv=1)
    add("mla", (1, 2, 20, 192), causal=True, dv=128)
    add("mla_decode", (2, 4, 1, 192), kv_heads=2, sk=67, dv=128)
    add("range", (4, 2, 25, 64), sk=40, key_range=_range(4))
    add("range_causal", (4, 4, 25, 64), kv_heads=2, sk=40, causal=True, key_range=_range(4))
    add("range_window", (3, 2, 30, 64), causal=True, window=6, key_range=_range(3))
    add("range_decode", (5, 2, 1, 64), kv_heads=1, sk=300, causal=True, key_range=_range(5))
    add("range_hostile", (6, 2, 9, 64), sk=35, causal=True, key_range=_range(6, "any_range"))
    bool_row = TensorSpec((3, 1, 1, 33), dtype="bool", fill="mask")
    add("range_mask_sinks", (3, 2, 14, 64), sk=33, mask=bool_row, key_range=_range(3), sinks=TensorSpec((2,)))
    add("chunk", (1, 2, 45, 64), causal=True, chunk=16)
    add("chunk_one", (1, 2, 11, 64), sk=14, causal=True, chunk=1)
    add("chunk_append", (2, 2, 7, 64), sk=50, chunk=13)
    add("chunk_range", (3, 4, 33, 64), kv_heads=2, sk=60, causal=True, chunk=20, key_range=_range(3))
    add("chunk_decode", (2, 2, 1, 64), kv_heads=1, sk=300, causal=True, chunk=128, key_range=_range(2))
    add("dropout", (3, 2, 33, 64), dropout_p=0.1, dropout_seed=_seed(3))
    add("dropout_causal", (2, 2, 65, 64), kv_heads=1, causal=True, dropout_p=0.5, dropout_seed=_seed(2))
    add("dropout_most", (1, 2, 21, 48), dv=32, dropout_p=0.9, dropout_seed=_seed(1))
    add("dropout_decode", (2, 2, 1, 64), kv_heads=1, sk=150, dropout_p=0.25, dropout_seed=_seed(2))
    add("dropout_blind", (1, 2, 22, 64), sk=5, causal=True, dropout_p=0.5, dropout_seed=_seed(1))
    add("dropout_nonfinite", (1, 2, 37, 64), fill="nonfinite", dropout_p=0.3, dropout_seed=_seed(1))
    add("dropout_off", (1, 2, 9, 64), dropout_seed=_seed(1))  # a seed alone changes nothing
    add("all_options", (2, 4, 19, 48), kv_heads=2, sk=37, dv=40, **_everything(4, 19, 37))
    # one key for each query: its probability is exp(0), and the log-sum-exp log(1)
    flat = ("float32", "lse", "grad_q", "grad_k")
    add("exact_self", (1, 2, 37, 64), exact=("zeros", "digits"), scale=0.125, causal=True, window=1)
    add("exact_one_key", (2, 4, 3, 80), kv_heads=2, sk=1, exact=("zeros", "digits"), scale=0.125)
    # a sink of -inf is none; one of 0 beside one score of 0 takes half
    add("exact_no_sink", (1, 2, 9, 64), sk=32, exact=("zeros", "digits"), inexact=flat, sinks=_sink("no_logit"))
    half = ("lse", "grad_q", "grad_k", "grad_v", "grad_sinks")
    add("exact_half", (1, 2, 5, 64), sk=1, exact=("zeros", "digits"), inexact=half, sinks=_sink("zeros"))
    # a range may leave three keys of a code: a third is rounded where P is, before P^T dO
    matching("range", (2, 2, 19, 64), "grad_q", "grad_k", "grad_v", sk=37, causal=True, key_range=_range(2))
    matching("chunk", (1, 2, 37, 64), causal=True, chunk=8)
    matching("values", (1, 2, 29, 80), causal=True, dv=48)
    matching("full", (1, 2, 33, 64))
    # what is kept counts twice; half of it meets the gradient, and the log-sum-exp does not
    matching("dropout", (2, 2, 33, 64), "grad_q", "grad_k", dropout_p=0.5, dropout_seed=_seed(2))
    matching("causal", (2, 6, 19, 64), kv_heads=2, causal=True)
    matching("d80", (1, 2, 29, 80), causal=True, layout="contiguous")
    matching("decode", (2, 4, 1, 64), kv_heads=2, sk=61, causal=True)
    matching("pairs", (1, 2, 17, 64), "grad_q", "grad_k", sk=128)
    # equal scores: the mean of the values
    add("exact_mean", (1, 2, 9, 64), sk=32, exact=("zeros", "digits"), inexact=flat)
    matching("full_2048", (1, 8, 2048, 128), "grad_q", "grad_k", tier="standard")
    matching("window_1021", (2, 8, 1021, 128), kv_heads=2, causal=True, window=100, tier="standard")
    matching("decode_128", (16, 32, 1, 128), kv_heads=8, sk=127, tier="standard")
    add(
        "exact_self_1021",
        (2, 8, 1021, 128),
        kv_heads=2,
        exact=("zeros", "digits"),
        scale=0.125,
        causal=True,
        window=1,
        tier="standard",
    )
    add("llama_2k", (1, 32, 2048, 128), kv_heads=8, causal=True, tier="standard")
    add("ragged_1021", (2, 8, 1021, 128), sk=1531, causal=True, tier="standard")
    add("d64_window", (1, 16, 2000, 64), causal=True, window=511, tier="standard")
    add("d256_softcap", (1, 8, 777, 256), kv_heads=4, causal=True, softcap=50.0, tier="standard")
    dropped: dict[str, Any] = {"dropout_p": 0.1, "dropout_seed": _seed(2)}
    add("dropout_1021", (2, 8, 1021, 128), kv_heads=2, causal=True, tier="standard", **dropped)
    add("decode_4k", (16, 32, 1, 128), kv_heads=8, sk=4096, causal=True, tier="standard")
    return cases


def _sink(fill: str) -> TensorSpec:
    return TensorSpec((2,), fill=fill)


def _range(batch: int, fill: str = "ranges") -> TensorSpec:
    return TensorSpec((batch, 2), dtype="int32", fill=fill)


def _everything(heads: int, queries: int, keys: int) -> dict[str, Any]:
    return {
        "causal": True,
        "window": 9,
        "softcap": 20.0,
        "mask": TensorSpec((1, heads, queries, keys), fill="bias"),
        "sinks": TensorSpec((heads,)),
        "key_range": _range(2),
        "chunk": 16,
        "dropout_p": 0.25,
        "dropout_seed": _seed(2),
    }


def _seed(batch: int) -> TensorSpec:
    return TensorSpec((batch,), dtype="int64", fill="seeds")


def _seeds(d: Draw) -> Tensor:
    """Of either sign; both halves of an int64 have bits that differ."""
    return d.integers(-(2**52), 2**52)


def _ranges(d: Draw) -> Tensor:
    """First and end key of each sequence: of the first all keys, then ragged ones, every fifth of them empty."""
    keys = int(d.shape_of("k")[2])
    batch = d.rows()[..., :1]
    first = (d.uniform()[..., :1] * 0.5 * keys).floor()
    end = keys - (d.uniform()[..., 1:] * 0.4 * keys).floor()
    first, end = torch.where(batch == 0, 0, first), torch.where(batch == 0, keys, end)
    end = torch.where(batch % 5 == 4, first, end)
    return torch.cat((first, end), -1)


def _anything(d: Draw) -> Tensor:
    """Numbers below 0 and beyond the keys, ends before their first, the least and the greatest."""
    keys = int(d.shape_of("k")[2])
    ends = (
        (-5, keys + 9),
        (3, 2),
        (-(2**31), 2**31 - 1),
        (keys, keys + 1),
        (keys // 2, keys - 1),
        (2**31 - 1, -(2**31)),
    )
    rows = [ends[i % len(ends)] for i in range(d.shape[0])]
    return torch.tensor(rows, dtype=torch.float64, device=d.device).reshape(d.shape)


def _ends(d: Draw) -> Tensor:
    """Logits of -inf, inf, a very small and a very large one, 0, 1."""
    known = torch.tensor((-torch.inf, torch.inf, -3e4, 3e4, 0.0, 1.0), dtype=torch.float64, device=d.device)
    return known[torch.arange(d.shape[0], device=d.device) % len(known)]


def _never(d: Draw) -> Tensor:
    return torch.full(d.shape, -torch.inf, dtype=torch.float64, device=d.device)


def _nonfinite(d: Draw) -> Tensor:
    """Queries as anywhere. Keys stay clean and only the last head's values are planted, because one NaN key would hide
    every other row."""
    if d.parameter not in ("k", "v") or 0 in d.shape:
        return d.planted(d.rows() % 5)
    row, keys = d.rows(), d.shape[-2]
    planted = (row // keys == row.max() // keys) & (d.parameter == "v") & (row % keys % 4 == 1)
    return d.planted(torch.where(planted, row % keys // 4 % 3 + 1, 0))


def _codes(d: Draw) -> Tensor:
    """Walsh functions: rows of one code have the same large product, others a product of 0 (small, where the head is
    no power of two). They are counted from the end, where a causal diagonal ends."""
    seq, depth = d.shape[-2:]
    many = 1 << (depth.bit_length() - 1)
    code = (seq - 1 - d.rows() % max(seq, 1)) % many
    parity = (d.columns() % many) & code
    for shift in (16, 8, 4, 2, 1):
        parity = parity ^ (parity >> shift)
    return (1.0 - 2.0 * (parity & 1).double()) * (4.0 if depth >= 64 else 8.0)


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
    r"(?: (padding|mask|bias|sinks|range|dropout))?"
)


def _named(name: str) -> Case:
    """padding: the mask of left-padded rows or of a static cache, each query's own. mask: random. bias: of floats, one
    for all of a batch. range: a first and an end key for each sequence. dropout: of a tenth."""
    match = _NAME.fullmatch(name)
    if match is None:
        raise ValueError(f"{name!r} is no case of attention; required: such as B2 H32/8 Q512 K512 D128 causal window64")
    batch, heads, kv, queries, keys, dim = (int(n) for n in match.groups()[:6])
    causal, window, softcap, chunk, kind = match.groups()[6:]
    mask = None
    if kind == "bias":
        mask = TensorSpec((1, heads, queries, keys), fill="normal")
    elif kind in ("padding", "mask"):
        mask = TensorSpec((batch, 1, queries, keys), dtype="bool", fill=kind)
    added: dict[str, dict[str, Any]] = {
        "sinks": {"sinks": TensorSpec((heads,))},
        "range": {"key_range": _range(batch)},
        "dropout": {"dropout_p": 0.1, "dropout_seed": _seed(batch)},
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


_HEAD_DIMS = (40, 64, 64, 72, 80, 96, 112, 128, 128, 128, 160, 192, 256)
_MOST_MASK = 1 << 28  # elements


def _sampled(s: Sampler) -> str:
    """All that the signature has: decoding, a chunk on a cache, squares, cross-attention; windows, softcap, masks."""
    dim, kv = s.draw.choice(_HEAD_DIMS), s.draw.choice((1, 2, 4, 8, 16))
    heads, batch = kv * s.draw.choice((1, 1, 2, 4, 7, 8, 16)), s.around(1, 32)
    keys = s.around(64 // min(s.less, 4), 16_384 // s.less)
    form = s.draw.choice(("square", "square", "square", "decode", "decode", "chunk", "cross"))
    queries = {"square": keys, "decode": 1, "chunk": s.around(2, min(1024, keys)), "cross": s.around(16, 2048)}[form]
    plain, hidden = ("", "", "", " window", " softcap50"), (" padding", " mask", " bias")
    kind = s.draw.choice((*plain, *hidden, " sinks", " range", " chunk", " dropout"))
    batch = s.fitting(batch, heads, queries, max(keys, queries), dim)
    causal = " causal" if form != "cross" and kind not in (" padding", " mask") else ""
    if kind == " window":
        kind = f" window{s.draw.choice((64, 128, 512, 1024, 4096))}" if causal else ""
    if kind == " chunk":
        kind = f" chunk{s.draw.choice((256, 2048, 8192))}" if causal else ""
    rows = {" padding": batch, " mask": batch, " bias": heads}.get(kind, 0)
    if rows * queries * keys > _MOST_MASK // s.less**2:
        kind, causal = "", " causal" if form != "cross" else ""
    return f"B{batch} H{heads}/{kv} Q{queries} K{keys} D{dim}{causal}{kind}"


def _padding(d: Draw) -> Tensor:
    """Bool, (batch, .., queries, keys): up to half of a row's first keys are padding, and no query sees a later key."""
    queries, keys = d.shape[-2:]
    first = (d.uniform()[..., :1, :1] * (keys // 2)).floor()
    position = torch.arange(queries, device=d.device).unsqueeze(-1) + (keys - queries)
    return (d.columns() >= first) & (d.columns() <= position)


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
        cases=_cases,
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
        fills=(
            Fill("padding", "bool: left padding, and nothing later than the query", _padding),
            Fill("ranges", "int32 (batch, 2): first and end key, some of them empty", _ranges),
            Fill("any_range", "int32 (batch, 2): out of the keys and out of order", _anything, False),
            Fill("seeds", "int64 (batch,), of either sign", _seeds, False),
            Fill("infinite_logits", "logits of both infinities and large ones", _ends, False),
            Fill("no_logit", "-inf", _never, False),
            Fill("codes", "rows of Walsh functions: each matches its own code alone", _codes, False),
            Fill("nonfinite", "normal with NaN and Infs planted in queries and in one head's values", _nonfinite),
            # a mean of 1e3 gives scores of 64e6 / 8, whose float32 roundoff is a whole unit
            offset({}, otherwise=4.0),
        ),
        bench=_bench,
        named=_named,
        sampled=_sampled,
        calls=_calls,
        like=_like,
    ),
)
