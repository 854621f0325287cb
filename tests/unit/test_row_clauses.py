"""The clause that says whether registers hold a row: it is what launchers plan by."""

from __future__ import annotations

import random

import pytest
import torch

from ferryman.backends.triton_rows import row_tile
from ferryman.device_profiles import catalogue, profile
from ferryman.dispatch import select
from ferryman.ops import clauses


def _view(known: str, **args: object) -> select.View:
    threads = select.target_of(profile(known)).max_threads
    return select.View(args, frozenset(), 0, {}, max_threads=threads)


@pytest.mark.parametrize("name", sorted(n for n, p in catalogue().items() if p.vendor in ("nvidia", "amd", "cpu")))
@pytest.mark.parametrize("arrays", [1, 2, 4])
def test_a_row_that_fits_registers_is_one_that_a_tile_holds(name: str, arrays: int) -> None:
    drawn, target = random.Random(f"{name} {arrays}"), select.target_of(profile(name))
    widths = [1, 2, 7, *(2**n + d for n in range(10, 18) for d in (-1, 0, 1))]
    widths += [int(2 ** drawn.uniform(0, 18)) for _ in range(50)]
    clause = clauses.row_in_registers("x", arrays)
    said = set()
    for width in widths:
        for dtype in (torch.float32, torch.bfloat16):
            fits = row_tile(target, width, dtype.itemsize, drawn.choice((1, 300, 2**20)), arrays=arrays).fits
            view = _view(name, x=torch.empty(2, width, dtype=dtype, device="meta"))
            assert clause.holds(view) is fits, (width, dtype)
            said.add(fits)
    assert said == {True, False}


def test_groups_and_other_tensors_count() -> None:
    x, wide = (torch.empty(2, 65_536, dtype=d, device="meta") for d in (torch.bfloat16, torch.float32))
    groups = clauses.row_in_registers("x", 2, size="group", beside=("gate",), most=4096)
    assert not groups.holds(_view("h200", x=x, gate=x, group=None))
    assert groups.holds(_view("h200", x=x, gate=wide, group=4096))
    assert not groups.holds(_view("h200", x=x, gate=x, group=8192))  # more than the most, though it would fit
    reason = groups.reason(_view("h200", x=x, gate=x, group=8192))
    assert reason is not None and "8192, 16384, 32768" in reason and "required: rows that fit registers" in reason
    alone = clauses.row_in_registers("x", 2, beside=("gate",))
    row, other = (torch.empty(2, 16_384, dtype=d, device="meta") for d in (torch.bfloat16, torch.float32))
    assert alone.holds(_view("h200", x=row, gate=row)) and not alone.holds(_view("h200", x=row, gate=other))
