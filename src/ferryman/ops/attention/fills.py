"""Attention's own fills: numbers that its masks, key ranges, seeds and sinks are drawn as."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.ops.draw import Draw, Fill, offset


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


def _padding(d: Draw) -> Tensor:
    """Bool, (batch, .., queries, keys): up to half of a row's first keys are padding, and no query sees a later key."""
    queries, keys = d.shape[-2:]
    first = (d.uniform()[..., :1, :1] * (keys // 2)).floor()
    position = torch.arange(queries, device=d.device).unsqueeze(-1) + (keys - queries)
    return (d.columns() >= first) & (d.columns() <= position)


def _cache(d: Draw) -> Tensor:
    """Bool: the keys of a static cache that is a quarter to a half full, the same for all queries of a sequence."""
    keys = d.shape[-1]
    full = ((0.25 + 0.25 * d.uniform()[..., :1, :1]) * keys).floor()
    return (d.columns() < full).expand(d.shape)


def _keys(d: Draw) -> Tensor:
    """Bool: up to half of a sequence's last keys are padding, for all its queries."""
    keys = d.shape[-1]
    past = keys - (d.uniform()[..., :1, :1] * (keys // 2)).floor()
    return (d.columns() < past).expand(d.shape)


def _documents(d: Draw) -> Tensor:
    """Bool: no later key, and none of another document of 512 tokens."""
    queries, keys = d.shape[-2:]
    position = torch.arange(queries, device=d.device).unsqueeze(-1) + (keys - queries)
    seen = (d.columns() <= position) & (d.columns() // 512 == position // 512)
    return seen.expand(d.shape)


FILLS = (
    Fill("cache", "bool: the first quarter to half of the keys", _cache),
    Fill("documents", "bool: nothing later than the query, nor of another 512 tokens", _documents),
    Fill("keys", "bool: right padding, the same for all queries", _keys),
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
)
