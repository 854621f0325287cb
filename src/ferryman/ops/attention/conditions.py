"""Under which conditions implementations of attention serve a call; when one leads: `leads`."""

from __future__ import annotations

from typing import Any

import torch

from ferryman.ops.attention import flex_variants
from ferryman.ops.attention.arguments import OF_HOPPER, hiding, most_rows
from ferryman.ops.clauses import (
    Clause,
    View,
    absent,
    at_least,
    at_most,
    both,
    compiled,
    dtypes,
    either,
    feature,
    multiple_of,
    not_empty,
    one_of,
    prepared,
    release,
    unit_stride,
    vendor,
    when_interpreted,
)

_HALF = dtypes("q", torch.float16, torch.bfloat16)
_DOT = (when_interpreted(dtypes("q", torch.float32, torch.float16)),)
_FEW = 16  # rows of the least tile that a matrix unit takes
_UNIT = (unit_stride("q"), unit_stride("k"), unit_stride("v"))


def _hiding(view: View, span: str) -> int | None:
    """The window, or the chunks, where it hides a key."""
    if view.args[span] is None:
        return None
    window, chunk = hiding(*(view.args[name] for name in ("q", "k", "causal", "window", "key_range", "chunk")))
    return window if span == "window" else chunk


_NO_WINDOW = Clause(
    "no window, or one of all keys",
    ("window", "causal", "q.shape[2]", "k.shape[2]"),
    lambda view: _hiding(view, "window"),
    lambda window: window is None,
)
_NO_CHUNK = Clause(
    "no chunks, or one of all keys",
    ("chunk", "causal", "key_range", "q.shape[2]", "k.shape[2]"),
    lambda view: _hiding(view, "chunk"),
    lambda chunk: chunk is None,
)
_PLAIN = (_NO_WINDOW, one_of("softcap", 0.0), absent("mask"))
# of PyTorch's kernels and Hopper's: the former draw other numbers, which no seed of the op's gives
_NO_DROPOUT = one_of("dropout_p", 0.0)


def _rows_of(view: View) -> tuple[int, int]:
    return int(view.args["q"].shape[2]), int(view.args["k"].shape[2])


_SQUARE = Clause(
    "as many queries as keys where causal, or one query",
    ("q.shape[2]", "k.shape[2]", "causal"),
    lambda view: (*_rows_of(view), bool(view.args["causal"])),
    lambda m: not m[2] or m[0] in (1, m[1]),
)
_SQUARE_OR_HIDDEN = Clause(
    "as many queries as keys where causal, or one query, or a mask, key range or chunks, which hold the diagonal",
    ("q.shape[2]", "k.shape[2]", "causal", "mask", "key_range", "chunk"),
    lambda view: (
        *_SQUARE.measure(view),
        any(view.args[name] is not None for name in ("mask", "key_range")) or not _NO_CHUNK.holds(view),
    ),
    lambda m: m[3] or _SQUARE.test(m[:3]),
)
_EVERY_ROW_SEES = Clause(
    "no more queries than keys where causal or windowed",
    ("q.shape[2]", "k.shape[2]", "causal", "window"),
    lambda view: (*_rows_of(view), bool(view.args["causal"]) or view.args["window"] is not None),
    lambda m: not m[2] or m[0] <= m[1],
)
_ONE_SIDED = Clause(
    "a window only where causal",
    ("causal", "window"),
    lambda view: (bool(view.args["causal"]), view.args["window"]),
    lambda m: m[0] or m[1] is None,
)


def _rows_of_a_head(view: View) -> int:
    q, k = view.args["q"], view.args["k"]
    return int(q.shape[2] * (q.shape[1] // k.shape[1]))


_ONE_TILE = Clause(
    f"at most {_FEW} rows of queries for a key head (Sq * H / Hk)",
    ("q.shape", "k.shape"),
    _rows_of_a_head,
    lambda rows: rows <= _FEW,
)
_TILES = Clause(
    f"more than {_FEW} rows of queries for a key head (Sq * H / Hk)",
    _ONE_TILE.facts,
    _rows_of_a_head,
    lambda rows: rows > _FEW,
)
_FEW_ROWS = either(
    _ONE_TILE,
    both(
        feature("wgmma"),
        Clause(
            "as many rows of queries for a key head (Sq * H / Hk) as a tile has: 128, of a head size above 128 64",
            _ONE_TILE.facts,
            lambda view: (_rows_of_a_head(view), int(view.args["q"].shape[3])),
            lambda m: m[0] <= most_rows(m[1]),
        ),
    ),
)
_MASKED = Clause(
    "a mask",
    ("mask",),
    lambda view: "given" if view.args["mask"] is not None else None,
    lambda given: given is not None,
)
_NUMBERED = Clause(
    "fewer than 2^31 rows of queries, and elements of a head",
    ("q.shape", "k.shape"),
    lambda view: max(
        view.args["q"].shape[0] * view.args["q"].shape[1] * (view.args["q"].shape[2] + 128),
        max(_rows_of(view)) * view.args["q"].shape[3],
    ),
    lambda n: n < 2**31,
)

_ONE_WIDTH = Clause(
    "values as wide as keys",
    ("k.shape", "v.shape"),
    lambda view: (int(view.args["k"].shape[3]), int(view.args["v"].shape[3])),
    lambda m: m[0] == m[1],
)
_NO_WIDER = Clause(
    "values no wider than keys",
    ("k.shape", "v.shape"),
    lambda view: (int(view.args["k"].shape[3]), int(view.args["v"].shape[3])),
    lambda m: m[1] <= m[0],
)
_ALL_KEYS = (absent("key_range"), _NO_CHUNK)
_NO_BIAS_GRADIENT = Clause(
    "no gradient of a float mask",
    ("need_mask", "mask.dtype"),
    lambda view: (
        bool(view.args["need_mask"]) and view.args["mask"] is not None and view.args["mask"].dtype != torch.bool
    ),
    lambda wanted: not wanted,
)

_BIAS_GRADIENT = Clause(
    "a gradient of a float mask",
    _NO_BIAS_GRADIENT.facts,
    _NO_BIAS_GRADIENT.measure,
    lambda wanted: wanted,
)

# a float mask is stored in q's dtype for them, which rounds one of another
_MASK_ALIKE = Clause(
    "a mask of bool or of q's dtype",
    ("q.dtype", "mask.dtype"),
    lambda view: None if view.args["mask"] is None else (view.args["q"].dtype, view.args["mask"].dtype),
    lambda m: m is None or m[1] in (torch.bool, m[0]),
)


_MASK_OF_HOPPER = Clause(
    "no mask, a bool one, or a float one of q's dtype with a row for each query and a column for each key",
    ("q.dtype", "q.shape[2]", "k.shape[2]", "mask.dtype", "mask.shape", "mask.stride"),
    lambda view: _mask_facts(view.args["q"], view.args["k"], view.args["mask"]),
    lambda m: m is None or all(m),
)


def _mask_facts(q: torch.Tensor, k: torch.Tensor, mask: torch.Tensor | None) -> tuple[bool, ...] | None:
    """(q's dtype, a row for each query, none of them the same, a column for each key) of a float mask."""
    if mask is None or mask.dtype == torch.bool:
        return None
    columns = mask.dim() > 0 and mask.shape[-1] == k.shape[2]
    rows = mask.dim() > 1 and mask.shape[-2] == q.shape[2]
    return mask.dtype == q.dtype, rows, rows and mask.stride(-2) != 0, columns


_CAUSAL_SPAN = Clause(
    "a window or chunks that hide keys only where causal",
    ("causal", "window", "chunk", "key_range", "q.shape[2]", "k.shape[2]"),
    lambda view: (bool(view.args["causal"]), _hiding(view, "window"), _hiding(view, "chunk")),
    lambda m: m[0] or m[1:] == (None, None),
)
_OF_HOPPER = (
    _HALF,
    at_least("q.shape[-1]", OF_HOPPER.start),
    at_most("q.shape[-1]", OF_HOPPER[-1]),
    multiple_of("q.shape[-1]", OF_HOPPER.step),
    multiple_of("v.shape[-1]", OF_HOPPER.step),
    at_least("v.shape[-1]", 8),
    _NO_DROPOUT,
    _NO_WIDER,
    at_least("q.shape[2]", 64),
)
_ON_HOPPER = (compiled(), feature("wgmma"), release("triton", "3.6"), *_OF_HOPPER)
_BACKWARD_OF_FEW_ROWS = (_HALF, _NO_DROPOUT, _ONE_WIDTH, _FEW_ROWS, _NO_BIAS_GRADIENT)
_BACKWARD_OF_HOPPER = (one_of("q.shape[-1]", 64, 128), _ONE_WIDTH)
_FUSED = (_HALF, multiple_of("q.shape[-1]", 8), one_of("softcap", 0.0), _MASK_ALIKE, _NO_DROPOUT, *_UNIT)
# FlashAttention takes one width: narrower values, as in MLA, go beside columns of zeros
_ALIKE = (*_FUSED, _NO_WIDER)
_CUDNN_ANY = (vendor("nvidia"), feature("wgmma"), *_ALIKE, _NO_WINDOW, _SQUARE_OR_HIDDEN)
_CUDNN = (*_CUDNN_ANY, at_least("q.shape[2]", 2))
# one query in a window sees the last keys, which are handed over alone
_CUDNN_DECODE = (vendor("nvidia"), feature("wgmma"), *_ALIKE, at_least("window", 16), one_of("q.shape[2]", 1))
# its log-sum-exp of a row whose scores are all -inf is inf: of few keys, an infinite query gives such rows
_FLASH_NVIDIA = (
    vendor("nvidia"),
    *_ALIKE,
    absent("mask"),
    *_ALL_KEYS,
    _EVERY_ROW_SEES,
    at_least("k.shape[2]", 16),
)
_FLASH_AMD = (vendor("amd"), *_ALIKE, *_PLAIN, *_ALL_KEYS, _SQUARE)
# the memory-efficient kernel takes values of another width, and a key range and chunks as the mask that says them
_EFFICIENT = (vendor("nvidia"), *_FUSED, multiple_of("v.shape[-1]", 8), _EVERY_ROW_SEES, _ONE_SIDED)
# PyTorch's CPU kernel takes 16-bit types too, but with an exp that is off by 5e-5 in the log-sum-exp, and NaN to 0; a
# row of NaN scores also becomes 0 where its keys do not fill one vector of 16.
_CPU = (
    vendor("cpu"),
    dtypes("q", torch.float32),
    *_PLAIN,
    *_ALL_KEYS,
    _NO_DROPOUT,
    _NO_WIDER,
    _SQUARE,
    at_least("k.shape[2]", 16),
    *_UNIT,
)
# FlexAttention's log-sum-exp of a row of infinite scores is NaN as its output is; it takes 16 columns or more
_FLEX = (
    vendor("nvidia", "amd"),
    _HALF,
    _NO_DROPOUT,
    at_least("q.shape[-1]", 16),
    at_least("v.shape[-1]", 16),
    at_least("q.shape[2]", 1),
    at_least("k.shape[2]", 1),
    prepared(
        lambda view: flex_variants.has(
            *(view.args[n] for n in ("q", "k", "v", "causal", "window", "softcap", "mask", "key_range", "chunk"))
        )
    ),
)
# PyTorch's backward kernels give no gradient of the log-sum-exp. They add dQ atomically, and round every query head's
# dK and dV before a group's sum.
_NORMAL = Clause(
    "as many queries as keys where float16, whose P of many keys is below its normal range",
    ("q.shape[2]", "k.shape[2]", "q.dtype"),
    lambda view: (*_rows_of(view), view.args["q"].dtype),
    lambda m: m[2] != torch.float16 or m[0] == m[1],
)
# PyTorch's own differentiable call of FlashAttention. Of as many heads of keys as of queries: no group is summed.
_OWN = (
    dtypes("q", torch.float16, torch.bfloat16),
    *_PLAIN,
    *_ALL_KEYS,
    absent("sinks"),
    _ONE_WIDTH,
    Clause(
        "as many heads of keys as of queries",
        ("q.shape", "k.shape"),
        lambda view: (int(view.args["q"].shape[1]), int(view.args["k"].shape[1])),
        lambda m: m[0] == m[1],
    ),
    _SQUARE,
    _NORMAL,
    at_least("q.shape[2]", 1),
    at_most("k.shape[2]", 2048),  # of more, a kernel's time passes the host's
    Clause(
        "rows of 16 bytes",
        ("q.stride", "k.stride", "v.stride"),
        lambda view: tuple(step for name in ("q", "k", "v") for step in view.args[name].stride()[:-1]),
        lambda steps: all(step % 8 == 0 for step in steps),
    ),
    Clause(
        "torch.use_deterministic_algorithms off",
        ("deterministic",),
        lambda v: v.flags["deterministic"],
        lambda on: not on,
    ),
)
# cuDNN's, of which nothing is kept for a backward.
_OWN_OF_CUDNN = (
    *_OWN,
    not_empty("q"),
    not_empty("k"),
    Clause(
        "no gradient",
        ("q.requires_grad", "k.requires_grad", "v.requires_grad"),
        lambda view: torch.is_grad_enabled() and any(view.args[name].requires_grad for name in ("q", "k", "v")),
        lambda wanted: not wanted,
    ),
)
_NO_LSE = (absent("grad_lse"), _NORMAL, _NO_BIAS_GRADIENT)
_ADDED: dict[str, Any] = {"roundings": ("p", "ds"), "accumulation": "split-k", "deterministic": False, "partial": True}
_ROUNDED: dict[str, Any] = {"roundings": ("p", "o"), "partial": True}
