"""When an implementation of attention goes before those that a device prefers."""

from __future__ import annotations

import torch

from ferryman.ops.attention.conditions import (
    _ALL_KEYS,
    _BACKWARD_OF_FEW_ROWS,
    _CAUSAL_SPAN,
    _MASK_OF_HOPPER,
    _MASKED,
    _NO_CHUNK,
    _NO_WINDOW,
    _OF_HOPPER,
    _ONE_TILE,
    _SQUARE,
    _TILES,
    _rows_of,
    _rows_of_a_head,
)
from ferryman.ops.attention.sharing import _PACKED, _WIDE, _queries, _tiles
from ferryman.ops.clauses import (
    Clause,
    View,
    absent,
    at_least,
    at_most,
    both,
    dtypes,
    either,
    feature,
    multiple_of,
    not_multiple_of,
    threshold,
    unless,
)


def _elements(view: View) -> int:
    k = view.args["k"]
    return int(k.shape[0] * k.shape[1] * k.shape[2] * k.shape[3])


def _width(view: View) -> int:
    return int(view.args["q"].shape[3])


# What a mask hides is not known on the host. Of one token that reads a cache, and of a few, most keys are hidden while
# the cache fills, and a mask that hides none costs little; over a short cache making the lists costs more. Of a cache
# that is not large the heads of a group share tiles instead (`sharing`).
_HIDING = (
    dtypes("mask", torch.bool),
    threshold("attention.masked.elements", "elements of k", ("k.shape",), _elements),
    threshold("attention.masked.width", "head size", ("q.shape",), _width, most=True),
)
_FEW_ON_A_CACHE = (
    unless(_PACKED),
    *_HIDING,
    threshold("attention.masked.queries", "queries", ("q.shape",), _queries, most=True),
)


def _large_tiles(view: View) -> int:
    batch, heads, queries, _ = view.args["q"].shape
    return int(batch * heads * -(-queries // 128))


def _products(view: View) -> int:
    """Of a query and the keys that its chunk has at most."""
    keys, chunk = int(view.args["k"].shape[2]), view.args["chunk"]
    return int(view.args["q"].numel()) * (keys if chunk is None else min(keys, chunk))


def _seen_elements(view: View) -> int:
    window, keys = view.args["window"], int(view.args["k"].shape[2])
    return _elements(view) // max(1, keys) * (keys if window is None else min(keys, window))


_WINDOWED = unless(_NO_WINDOW)
_BIASED = Clause(
    "a float mask",
    ("mask.dtype",),
    lambda view: None if view.args["mask"] is None else view.args["mask"].dtype,
    lambda dtype: dtype not in (None, torch.bool),
)
# Triton reads rows of odd head sizes in words, and wide heads and what a window leaves no slower than cuDNN. A float
# mask is brought to cuDNN's form before, which a long cache makes up for.
_READ_BY_CUDNN = (
    unless(_PACKED),
    *_ALL_KEYS,
    absent("sinks"),
    either(
        multiple_of("q.shape[-1]", 16),
        threshold(
            "attention.cudnn_decode.most",
            "elements of k in the window",
            ("k.shape", "window"),
            _seen_elements,
            most=True,
        ),
    ),
    either(
        both(
            absent("mask"),
            not_multiple_of("q.shape[-1]", 16),
            threshold(
                "attention.cudnn_decode.elements", "elements of k in the window", ("k.shape", "window"), _seen_elements
            ),
        ),
        both(
            _NO_WINDOW,
            threshold("attention.cudnn_decode.width", "head size", ("q.shape",), _width, most=True),
            either(
                absent("mask"),
                both(
                    _BIASED,
                    threshold("attention.cudnn_decode.biased", "elements of k", ("k.shape",), _elements),
                ),
            ),
        ),
    ),
)
# PyTorch's fused kernels are given a key range and chunks as a mask, which is made first and hides no tile from them.
_RANGED = either(
    Clause("a key range", ("key_range",), lambda view: view.args["key_range"] is not None, bool), unless(_NO_CHUNK)
)
_SINKS = Clause("sinks", ("sinks",), lambda view: view.args["sinks"] is not None, bool)
_CAPPED = Clause("a soft cap", ("softcap",), lambda view: view.args["softcap"], lambda cap: cap > 0)
_PRODUCTS = ("products (B H Sq D, and Sk or a chunk)", ("q.shape", "k.shape", "chunk"), _products)


def _reach(view: View) -> float:
    """Keys that a query has before it: of a causal call in the mean; at most a window, or the mean of a chunk, and half
    a tile."""
    queries, keys = _rows_of(view)
    seen = float(keys)
    if view.args["causal"]:
        seen = keys - (queries - 1) / 2 if queries <= keys else keys * keys / (2 * queries)
    window, chunk = view.args["window"], view.args["chunk"]
    if chunk is not None:
        seen = min(seen, (chunk / 2 if view.args["causal"] else chunk) + 32)
    return max(1.0, seen if window is None else min(seen, window + 32))


def _read_in_turn(view: View) -> float:
    """Elements of keys, of tiles: a head size is filled up to a power of two."""
    return _reach(view) * max(16, 1 << (_width(view) - 1).bit_length())


def _tile_products(view: View) -> float:
    batch, heads, queries, _ = view.args["q"].shape
    return float(batch * heads * queries * _read_in_turn(view))


_SEEN_FACTS = ("q.shape", "k.shape", "causal", "window", "chunk")
_MUCH_IN_TURN = threshold(
    "attention.flash.reach", "elements of the keys that a query has before it", _SEEN_FACTS, _read_in_turn
)
_FEWER_QUERIES = Clause(
    "fewer queries than keys", ("q.shape[2]", "k.shape[2]"), _rows_of, lambda rows: rows[0] < rows[1]
)


def _products_at_most(name: str) -> Clause:
    return threshold(name, "products of tiles that are seen", _SEEN_FACTS, _tile_products, most=True)


def _at_most(kind: str) -> Clause:
    return _products_at_most(f"attention.tiled.{kind}")


# Hopper's kernel has sinks, float masks, caps and what hides keys, too, and leaves little work alone to smaller tiles:
# of wide heads, for which those have few registers, the least.
_HOPPERS = both(*_OF_HOPPER, _CAUSAL_SPAN, _MASK_OF_HOPPER)
# From so many tiles on Hopper's leave no unit idle, however few keys there are; head sizes to 64 have half the work.
_LARGE_TILES = both(
    Clause("a head size above 64", ("q.shape",), _width, lambda width: width > 64),
    threshold("attention.hopper.tiles", "tiles of 128 rows, of all heads", ("q.shape",), _large_tiles),
)
# A program of theirs has more warps, which counts where each has many keys before it; a cap takes that time again.
_LONG = both(
    unless(_CAPPED),
    threshold("attention.hopper.reach", "elements of the keys that a query has before it", _SEEN_FACTS, _read_in_turn),
)
_LITTLE = both(either(unless(_WIDE), _RANGED), _at_most("plain"))
_LITTLE_BESIDE_HOPPERS = either(
    both(unless(_WIDE), unless(_LARGE_TILES), unless(_LONG), _at_most("hopper")), _at_most("plain")
)
_LESS_THAN_HOPPERS = either(unless(_HOPPERS), _LITTLE_BESIDE_HOPPERS)
_SERVED_BY_HOPPER = both(feature("wgmma"), _HOPPERS)
# PyTorch's FlashAttention divides the keys where its tiles leave most units idle, which cuDNN does of one query only. A
# program of Triton's goes over all of a query's keys, one tile after the other, and Hopper's kernel begins late for
# what a narrow window leaves.
_FEW_TILES = threshold(
    "attention.flash.square", "tiles of 64 rows, of as many queries", ("q.shape",), _tiles, most=True
)
_KEYS_DIVIDED = both(
    _NO_WINDOW,
    threshold("attention.flash.tiles", "tiles of 64 rows, of all heads", ("q.shape",), _tiles, most=True),
    either(
        threshold("attention.flash.keys", "keys", ("k.shape",), lambda v: v.args["k"].shape[2]),
        both(absent("sinks"), either(_FEWER_QUERIES, _FEW_TILES), _MUCH_IN_TURN),
    ),
)
_FLASH_LEADS = (
    _TILES,
    unless(_PACKED),
    at_least("q.shape[2]", 2),
    either(
        _KEYS_DIVIDED,
        both(
            _WINDOWED,
            _SERVED_BY_HOPPER,
            threshold("attention.flash.window", "window", ("window",), lambda v: v.args["window"] or 0, most=True),
            _at_most("hopper"),
            unless(_at_most("plain")),
        ),
    ),
)
_DIAGONAL = Clause("causal", ("causal",), lambda view: bool(view.args["causal"]), bool)


def _keys_at_most(name: str) -> Clause:
    return threshold(f"attention.cudnn.{name}", "keys", ("k.shape",), lambda v: v.args["k"].shape[2], most=True)


# Beside Hopper's kernel cuDNN begins sooner, which counts where little follows: of a call, or of each tile where keys
# are few. It has tiles of fewer rows, and of most wide heads' own size, which Hopper's fills up to 128 rows and 256
# columns.
_BEFORE_HOPPERS = (
    unless(_PACKED),
    absent("mask"),
    absent("sinks"),
    _NO_WINDOW,
    unless(_RANGED),
    _SERVED_BY_HOPPER,
    unless(_LITTLE),
    either(
        both(
            unless(_KEYS_DIVIDED),
            either(
                both(unless(_FEWER_QUERIES), _products_at_most("attention.cudnn.products")), at_most("q.shape[2]", 127)
            ),
        ),
        both(_WIDE, threshold("attention.cudnn.width", "head size", ("q.shape",), _width, most=True)),
        both(
            unless(_FEWER_QUERIES),
            unless(_WIDE),
            either(_keys_at_most("keys"), both(_DIAGONAL, _keys_at_most("causal_keys"))),
        ),
    ),
)
_RANGE_OF_MUCH = (unless(_PACKED), _RANGED, unless(_LITTLE_BESIDE_HOPPERS))
_NARROW = threshold(
    "attention.flex.narrow", "head size", ("q.shape",), _width, most=True
)  # whose tiles FlexAttention does not outrun
# Of few queries of narrow heads most of a float mask's time is its reading, where cuDNN is ahead of tiles.
_MANY_OR_WIDE = either(
    at_least("q.shape[2]", 64), Clause("a head size above 96", ("q.shape",), _width, lambda width: width > 96)
)
# A fused kernel of PyTorch's has a mask brought to its own form before, and rows that see nothing cleared after; sinks
# are added to its result. FlexAttention makes a list of blocks at each call.
_LITTLE_WORK = (
    _TILES,
    unless(_PACKED),
    either(
        both(_RANGED, either(unless(_SERVED_BY_HOPPER), _LITTLE_BESIDE_HOPPERS)),
        both(
            _CAPPED,
            either(_LESS_THAN_HOPPERS, both(_NARROW, _at_most("capped"))),
            either(_NARROW, threshold("attention.flex.products", *_PRODUCTS, most=True)),
        ),
        both(_WINDOWED, _SERVED_BY_HOPPER, _LITTLE_BESIDE_HOPPERS),
        both(_SINKS, _LESS_THAN_HOPPERS, _at_most("sinks")),
        both(_BIASED, _LESS_THAN_HOPPERS, either(_MANY_OR_WIDE, _at_most("masked")), _at_most("biased")),
        both(
            _MASKED,
            either(both(_BIASED, unless(_WIDE)), _LESS_THAN_HOPPERS),
            _at_most("masked"),
            threshold("attention.masked.elements", "elements of k", ("k.shape",), _elements, most=True),
        ),
        _LITTLE,
    ),
)
# What FlexAttention's list of blocks skips costs PyTorch's other kernels their time, or a mask that says it.
_MUCH_TO_SKIP = (
    unless(_PACKED),
    absent("mask"),
    _TILES,
    unless(_NARROW),
    threshold("attention.flex.products", *_PRODUCTS),
    either(_RANGED, _CAPPED),
    unless(_SERVED_BY_HOPPER),
)
_MORE_ROWS = unless(both(*_BACKWARD_OF_FEW_ROWS))


def _narrow_rows(view: View) -> int:
    return _rows_of_a_head(view) * -(-_width(view) // 128)


# Of many rows of one head the kernel for few has little left to share.
_ROWS_OF_ONE_HEAD = both(
    *_BACKWARD_OF_FEW_ROWS,
    _NO_WINDOW,
    Clause(
        "more than 56 rows of queries of one head for each key head, wider than 64; of others more than 96",
        ("q.shape", "k.shape"),
        lambda view: (int(view.args["q"].shape[1]), int(view.args["k"].shape[1]), _queries(view), _width(view)),
        lambda m: m[0] == m[1] and m[2] > (56 if m[3] > 64 else 96),
    ),
)
# PyTorch's backward kernels bring tensors to their layouts before, and sum the heads of a group after. A program of
# Triton's goes over all queries of a key head's group for its keys, and over all keys for its queries.
_LITTLE_GRADIENTS = both(
    either(_MORE_ROWS, _ROWS_OF_ONE_HEAD),
    threshold(
        "attention.tiled.gradients.rows",
        "rows of queries for a key head (Sq * H / Hk), of 128 elements",
        _ONE_TILE.facts,
        _narrow_rows,
        most=True,
    ),
    threshold(
        "attention.tiled.gradients.keys",
        "keys, or a window and a tile",
        ("k.shape", "window"),
        lambda view: min(int(view.args["k"].shape[2]), (view.args["window"] or 1 << 62) + 64),
        most=True,
    ),
    either(
        both(_BIASED, _at_most("gradients.biased")),
        both(_MASKED, unless(_BIASED), _at_most("gradients.masked"), either(unless(_WIDE), _at_most("gradients.wide"))),
        both(_SINKS, _at_most("gradients.sinks")),
        both(_WINDOWED, _at_most("gradients.window")),
        both(absent("mask"), either(unless(_WIDE), _RANGED), _at_most("gradients.plain"), unless(_MUCH_IN_TURN)),
    ),
)
_MASKED_ROWS = (
    _MASKED,
    unless(_LITTLE_GRADIENTS),
    either(
        threshold("attention.efficient.rows", "queries of a mask's gradients", ("q.shape",), _queries),
        threshold(
            "attention.efficient.odd_rows",
            "those of head sizes that 16 does not divide",
            ("q.shape",),
            lambda view: _queries(view) if view.args["q"].shape[3] % 16 else 0,
        ),
    ),
)
# FlashAttention has a tile for each head of a group, most of whose rows are empty where queries are few.
_FEW_QUERIES_OF_MANY_HEADS = both(
    _MORE_ROWS,
    absent("mask"),
    unless(_SQUARE),
    Clause(
        "at most 32 queries of 8 heads or more for each key head, and 512 tiles of 64 keys",
        ("q.shape", "k.shape"),
        lambda view: (
            _queries(view),
            int(view.args["q"].shape[1]) // int(view.args["k"].shape[1]),
            int(view.args["k"].shape[0] * view.args["k"].shape[1] * -(-view.args["k"].shape[2] // 64)),
        ),
        lambda m: m[0] <= 32 and m[1] >= 8 and m[2] >= 512,
    ),
)
# Beside Hopper's kernel cuDNN begins sooner.
_GRADIENTS_OF_CUDNN = (
    either(
        _ROWS_OF_ONE_HEAD,
        both(_MORE_ROWS, absent("sinks"), _products_at_most("attention.cudnn.gradients")),
    ),
    unless(_LITTLE_GRADIENTS),
)
_MASKED_GRADIENTS_OF_CUDNN = (either(_ROWS_OF_ONE_HEAD, _MORE_ROWS), unless(_LITTLE_GRADIENTS))
