"""What a bool mask of keys and a key range leave of each sequence, as Hopper's forward pass reads it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.interpreter import Interpreter

pytest.importorskip("triton")

KEYS = 9000  # more than two blocks of the kernel
ENDS = [(0, KEYS), (7, 8000), (4000, 8000), (-3, 99_999), (8192, KEYS), (50, 50), (20, 10)]


def masks() -> Tensor:
    """(7, 1, 1, KEYS): all keys, none, holes, a later part, the last one, and the first ones, twice."""
    place = torch.arange(KEYS)
    holes = torch.rand(KEYS, generator=torch.Generator().manual_seed(0)) < 0.5
    rows = (place >= 0, place < 0, holes, place >= 4100, place == KEYS - 1, place < 60, place < 15)
    return torch.stack(rows)[:, None, None]


def facts(kind: str) -> list[list[int]]:
    """Of each sequence; run by an interpreter."""
    from ferryman.ops.attention.key_mask_kernels import keys_of_mask

    mask = masks()
    if kind == "columns":  # as a transposed mask lies
        mask = mask[:, 0, 0].t().contiguous().t()[:, None, None]
    if kind == "one":
        mask = mask[2:3].expand(7, 1, 1, KEYS)
    ranges = torch.tensor(ENDS, dtype=torch.int32) if kind != "alone" else None
    known: list[list[int]] = keys_of_mask(mask.view(torch.uint8), ranges, 7)[:, :5].tolist()
    return known


@pytest.mark.parametrize("kind", ["range", "alone", "columns", "one"])
def test_the_first_key_the_end_and_whether_there_are_holes(kind: str, interpreter: Interpreter) -> None:
    known = interpreter.run(f"import json; import {__name__} as mine; print(json.dumps(mine.facts({kind!r})))")
    mask = masks() if kind != "one" else masks()[2:3].expand(7, 1, 1, KEYS)
    for row, ends, (first, past, end, whole, begin) in zip(mask[:, 0, 0], ENDS, known, strict=True):
        low, high = (min(max(n, 0), KEYS) for n in ends) if kind != "alone" else (0, KEYS)
        seen = [key for key, there in enumerate(row.tolist()) if there and low <= key < high]
        assert (begin, end) == (low, high)
        assert past - first == (seen[-1] + 1 - seen[0] if seen else 0)
        assert not seen or (first, past) == (seen[0], seen[-1] + 1)
        assert bool(whole) == (len(seen) == past - first)
    assert {whole for *_, whole, _ in known} == {0, 1}, "some have holes, some have none"


def test_a_mask_of_keys_in_any_form_is_a_row_for_each_sequence() -> None:
    from ferryman.ops.attention.hopper_kernels import _key_mask

    mask = masks()
    wide = mask.expand(7, 4, 30, KEYS)
    apart = mask[:, 0, 0].t().contiguous().t()[:, None, None]  # whose keys are not side by side
    for given, wanted in (
        (mask, mask),
        (wide, mask),
        (apart, mask),
        (mask[2, 0, 0], mask[2:3]),
        (mask[2:3], mask[2:3]),
    ):
        rows = _key_mask(given, 7)
        assert rows.dtype == torch.uint8 and rows.shape == (7, 1, 1, KEYS) and rows.stride(3) == 1
        assert torch.equal(rows.bool(), wanted.expand(7, 1, 1, KEYS))
