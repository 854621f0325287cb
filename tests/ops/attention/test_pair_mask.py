"""What a bool mask and all else that hides keys leave of tiles of pairs, as Hopper's forward pass reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.interpreter import Interpreter

pytest.importorskip("triton")

SIDE = 128
# (batch, heads, queries, keys), the mask's shape, and what else hides keys
CALLS: Mapping[str, tuple[tuple[int, int, int, int], tuple[int, ...], dict[str, Any]]] = {
    "causal": ((2, 3, 200, 300), (2, 3, 200, 300), {"causal": True}),
    "range": ((2, 3, 200, 300), (1, 1, 200, 300), {"causal": False, "ranges": [[5, 250], [0, 300]]}),
    "window": ((1, 2, 130, 257), (130, 257), {"causal": True, "window": 40}),
    "two sides": ((1, 2, 257, 130), (2, 257, 130), {"causal": False, "window": 40}),
    "chunks": ((2, 1, 129, 400), (2, 1, 129, 1), {"causal": True, "chunk": 64}),
    "whole blocks": ((1, 1, 256, 400), (256, 400), {"causal": False}),
    "nothing": ((1, 1, 40, 300), (40, 300), {"causal": False, "ranges": [[20, 20]]}),
}


def mask_of(call: str) -> Tensor:
    shape = CALLS[call][1]
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(len(call))) < 0.5
    if call == "whole blocks":
        mask[:], mask[:SIDE, SIDE:] = True, False
        mask[200, 300] = False
    return mask


def seen_in(call: str) -> Tensor:
    """Which keys each query sees, filled up with hidden pairs to whole tiles."""
    (batch, heads, queries, keys), _, options = CALLS[call]
    window, chunk = options.get("window"), options.get("chunk")
    tiles = torch.zeros(batch, heads, -(-queries // SIDE) * SIDE, -(-keys // SIDE) * SIDE, dtype=torch.bool)
    seen = tiles[:, :, :queries, :keys]
    seen.copy_(mask_of(call).expand(seen.shape))
    key = torch.arange(keys)[None, :]
    for of_batch, (begin, end) in zip(seen, options.get("ranges", [(0, keys)] * batch), strict=True):
        at = torch.arange(queries)[:, None] + end - queries
        of_batch &= (key >= begin) & (key < end)
        if options["causal"]:
            of_batch &= key <= at
        if window is not None:
            of_batch &= (at - key).abs() < window
        if chunk is not None:
            of_batch &= (at >= begin) & ((key - begin) // chunk == (at - begin) // chunk)
    return tiles


def tables(call: str, block_keys: int) -> list[Any]:
    """What the kernels write; run by an interpreter."""
    from ferryman.ops.attention.pair_mask_kernels import tiles_of_mask

    shape, _, options = CALLS[call]
    ranges = torch.tensor(options["ranges"], dtype=torch.int32) if "ranges" in options else None
    spans = options.get("window"), options.get("chunk")
    bits, lists, counts, *apart = tiles_of_mask(mask_of(call), ranges, shape, options["causal"], *spans, block_keys)
    for table, (part, whole) in zip(lists, counts.tolist(), strict=True):  # what lies beyond is not written
        table[0, part:], table[1, whole:] = -1, -1
    return [bits.tolist(), lists.tolist(), counts.tolist(), *apart]


@pytest.mark.parametrize("block_keys", [64, 128])
@pytest.mark.parametrize("call", CALLS)
def test_bits_and_lists_say_what_is_seen(call: str, block_keys: int, interpreter: Interpreter) -> None:
    ask = f"mine.tables({call!r}, {block_keys})"
    said = interpreter.run(f"import json; import {__name__} as mine; print(json.dumps({ask}))")
    bits, lists, counts, of_batch, of_head = (*map(torch.tensor, said[:3]), *said[3:])
    (batch, heads, queries, keys), _, _ = CALLS[call]
    blocks = -(-keys // block_keys)
    seen = seen_in(call)
    for b, h, tile in torch.cartesian_prod(*map(torch.arange, (batch, heads, -(-queries // SIDE)))).tolist():
        table = b * of_batch + h * of_head + tile
        of_kind: tuple[list[int], list[int]] = ([], [])
        rows = min(SIDE, queries - tile * SIDE)
        for block in range(blocks):
            wanted = seen[b, h, tile * SIDE : (tile + 1) * SIDE, block * block_keys : (block + 1) * block_keys]
            words = bits[table, block]
            said_seen = torch.stack([(words[key // 32] >> key % 32) & 1 for key in range(block_keys)], 1).bool()
            assert torch.equal(said_seen, wanted)
            if wanted.any():
                of_kind[int(wanted[:rows].all())].append(block)
        assert counts[table].tolist() == [len(kind) for kind in of_kind]
        assert [[n for n in row if n >= 0] for row in lists[table].tolist()] == [*of_kind]


def test_every_kind_of_block_is_among_them() -> None:
    kinds = {
        (bool(tile.any()), bool(tile.all()))
        for call in CALLS
        for tile in seen_in(call).unfold(2, SIDE, SIDE).unfold(3, SIDE, SIDE).flatten(0, 3)
    }
    assert kinds == {(False, False), (True, False), (True, True)}
