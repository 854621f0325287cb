"""When small tiles lead: queries of a group that share them, keys of few tiles that are divided, short sequences."""

from __future__ import annotations

import torch

from ferryman.ops.attention.conditions import _ALL_KEYS, _MASKED, _NO_DROPOUT, _PLAIN, _TILES, _rows_of_a_head
from ferryman.ops.clauses import Clause, View, absent, at_most, both, dtypes, either, one_of, threshold, unless


def _queries(view: View) -> int:
    return int(view.args["q"].shape[2])


_WIDE = Clause("a head size above 128", ("q.shape",), lambda v: int(v.args["q"].shape[3]), lambda width: width > 128)


def _tiles(view: View) -> int:
    batch, heads, queries, _ = view.args["q"].shape
    return int(batch * heads * -(-queries // 64))


def _tiles_of_a_head(view: View) -> int:
    return -(-_queries(view) // 64)


def _packed_tiles(view: View) -> int:
    k = view.args["k"]
    return int(k.shape[0] * k.shape[1]) * -(-_rows_of_a_head(view) // 64)


def _keys(view: View) -> int:
    return int(view.args["k"].shape[2])


def _keys_before(view: View) -> int:
    """Keys that a query can see, of those that a window or a chunk leaves."""
    sides = [view.args[name] for name in ("window", "chunk") if view.args[name] is not None]
    return min([_keys(view), *map(int, sides)])


def _group(least: int) -> Clause:
    return Clause(
        f"at least {least} query heads for each key head",
        ("q.shape", "k.shape"),
        lambda view: int(view.args["q"].shape[1]) // int(view.args["k"].shape[1]),
        lambda group: group >= least,
    )


def _queries_at_most(name: str) -> Clause:
    return threshold(f"attention.packed.{name}", "queries", ("q.shape",), _queries, most=True)


def _keys_at_least(name: str) -> Clause:
    return threshold(f"attention.packed.{name}", "keys", ("k.shape",), _keys)


def _width_at_most(name: str) -> Clause:
    return threshold(f"attention.packed.{name}", "head size", ("q.shape",), lambda v: v.args["q"].shape[3], most=True)


_LONG_AND_WIDE = both(_WIDE, _keys_at_least("keys"))
# A tile of 64 rows of one head is mostly empty where queries are few, and each head of a group reads K and V again.
# Packed, the rows of a group fill it; of a mask each of its rows is read for each of its heads then, which is little
# beside wide heads.
_HEADS_SHARE = both(
    either(
        both(_group(2), absent("mask"), _queries_at_most("queries")),
        both(_group(4), either(unless(_MASKED), _LONG_AND_WIDE), _queries_at_most("queries_of_many")),
        both(_group(4), _queries_at_most("queries")),
    ),
    either(
        _keys_at_least("keys"),
        both(_width_at_most("narrow"), _keys_at_least("keys_of_narrow")),
        threshold("attention.packed.tiles", "tiles of 64 rows, of all heads", ("q.shape",), _tiles),
    ),
)


# Tiles of one head may leave a quarter of their rows empty with more queries, too.
_TILES_SHARE = both(
    _group(4),
    unless(_WIDE),
    absent("mask"),
    _queries_at_most("rows"),
    Clause(
        "three quarters of the tiles of 64 rows, or fewer, where heads share them",
        ("q.shape", "k.shape"),
        lambda view: (_packed_tiles(view), _tiles(view)),
        lambda tiles: 4 * tiles[0] <= 3 * tiles[1],
    ),
)


def _keys_at_most(name: str) -> Clause:
    return threshold(f"attention.packed.{name}", "keys", ("k.shape",), _keys, most=True)


def _tiles_at_most(name: str) -> Clause:
    return threshold(f"attention.packed.{name}", "tiles of 64 rows, of all heads", ("q.shape",), _tiles, most=True)


# Each tile of a head's rows reads the keys of a range again, and of many keys other lines' larger tiles read them less.
_FEW_OF_A_RANGE = either(
    absent("key_range"),
    _keys_at_most("keys_of_range"),
    threshold(
        "attention.packed.ranged", "rows of queries for a key head", ("q.shape", "k.shape"), _rows_of_a_head, most=True
    ),
)


_ODD = Clause("an odd number of tiles of 64 rows", ("q.shape",), _tiles_of_a_head, lambda tiles: tiles % 2 == 1)
# Other kernels have tiles of 128 rows for as many queries as keys. Up to 64 rows fill half of one at most, and of an
# odd number of 64 the last stays half empty; a first wave of small tiles leaves fewer units idle. Narrow heads leave
# a tile of 128 rows little to do.
_SMALL_TILES = both(
    *_PLAIN,
    *_ALL_KEYS,
    _NO_DROPOUT,
    Clause(
        "as many queries and heads of queries as of keys",
        ("q.shape", "k.shape"),
        lambda view: (tuple(view.args["q"].shape[1:3]), tuple(view.args["k"].shape[1:3])),
        lambda m: m[0] == m[1],
    ),
    either(
        both(_width_at_most("narrowest"), _keys_at_most("keys_of_narrowest")),
        both(absent("sinks"), _queries_at_most("one_tile"), unless(_WIDE)),
        both(
            absent("sinks"),
            at_most("q.shape[3]", 64),
            _keys_at_most("alone"),
            either(_tiles_at_most("wave"), both(_ODD, _tiles_at_most("waves"))),
        ),
        both(
            absent("sinks"),
            at_most("q.shape[3]", 127),
            _ODD,
            unless(_queries_at_most("one_tile")),
            _keys_at_most("alone_wide"),
            _tiles_at_most("wide_wave"),
        ),
        both(absent("sinks"), one_of("q.shape[3]", 128), _keys_at_most("alone_widest"), _tiles_at_most("widest_wave")),
    ),
)
_LITTLE_CACHE = threshold(
    "attention.packed.cache", "elements of k", ("k.shape",), lambda v: v.args["k"].numel(), most=True
)


def _rows_shared(name: str, *, most: bool) -> Clause:
    facts = ("q.shape", "k.shape")
    return threshold(f"attention.packed.{name}", "packed tiles of 64 rows", facts, _packed_tiles, most=most)


# Where few tiles would leave most units idle, the keys are divided.
_KEYS_SHARED = both(
    threshold(
        "attention.packed.each",
        "keys for each query that it can see",
        ("q.shape", "k.shape", "window", "chunk"),
        lambda v: _keys_before(v) / max(1, _queries(v)),
    ),
    either(
        both(absent("mask"), _rows_shared("idle", most=True), _keys_at_least("divided")),
        both(_rows_shared("idle_masked", most=True), _queries_at_most("queries_of_many"), _keys_at_least("masked")),
    ),
)
# The other kernel with dropout has larger tiles, whose programs hold their random numbers, too. Of narrow heads they
# hold both.
_DROPS = both(
    unless(at_most("q.shape[3]", 64)),
    Clause("dropout", ("dropout_p",), lambda view: view.args["dropout_p"], lambda p: p > 0),
    absent("mask"),
    _rows_shared("dropping", most=False),
)
# Of a large cache a bool mask may hide nearly all, which `triton.masked` does not read. The other leads leave these
# calls out (`unless(_PACKED)`): among lines that lead the profile's order decides.
_MAY_BE_HIDDEN = both(_MASKED, dtypes("mask", torch.bool), unless(_LITTLE_CACHE))
_PACKED = both(
    dtypes("q", torch.float16, torch.bfloat16),
    _TILES,
    unless(_MAY_BE_HIDDEN),
    either(both(_FEW_OF_A_RANGE, either(_HEADS_SHARE, _TILES_SHARE, _KEYS_SHARED)), _DROPS, _SMALL_TILES),
)
