"""Which form of linear a shape gets on Hopper, what it needs, and that every form compiles without spilling."""

from __future__ import annotations

import itertools
import re

import pytest

from ferryman.backends import cuda, simt_offline
from ferryman.errors import BackendUnavailable
from ferryman.ops.matmul.hopper_kernels import Wide, choose, forms, units
from tests.compiled import compile_unit

ROWS = (1, 2, 7, 8, 9, 16, 17, 63, 64, 65, 127, 128, 129, 200, 256, 300, 512, 1000, 1024, 4096, 8192, 100_000)
WIDTHS = (8, 64, 520, 1024, 2048, 3072, 4096, 4104, 5120, 6144, 10_240, 11_008, 14_336, 17_408, 28_672, 128_256)
DEPTHS = (8, 16, 64, 72, 128, 512, 1032, 4096, 8192, 28_672)


def test_every_choice_is_one_of_the_forms_and_can_serve_its_shape() -> None:
    known, met = set(forms()), set()
    for m, n, k in itertools.product(ROWS, WIDTHS, DEPTHS):
        form = choose(m, n, k, 132)
        met.add(form)
        assert form.split <= max(1, -(-k // (64 * form.boxes)))  # no block without a part of k
        assert form.grid(m, n, 132) > 0 and form.grid(m, n, 132) % (form.cluster * form.split) == 0
    assert met == known, f"never chosen: {known - met}; unknown: {met - known}"


def test_fewer_tiles_than_units_are_split() -> None:
    for m, n, k in ((1, 1024, 4096), (16, 4096, 4096), (64, 4096, 14_336), (256, 4096, 14_336)):
        form = choose(m, n, k, 132)
        blocks = form.grid(m, n, 132)
        assert form.split > 1 and 64 <= blocks <= 264, (form, blocks)


@pytest.mark.slow
def test_every_form_fits_and_compiles_for_hopper_alone() -> None:
    try:
        cuda.nvrtc()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert units(simt_offline.target_for("sm_80")) == [] and units(simt_offline.target_for("gfx942")) == []
    hopper_units = units(simt_offline.target_for("sm_90"))
    assert len({u.name for u in hopper_units}) == len(hopper_units) == 2 * len(forms())
    for form in forms():
        assert form.shared <= 232_448 and form.threads <= 1024
    for unit in hopper_units:
        artefact = compile_unit(unit, "sm_90")
        resources = artefact.resources
        assert resources["spill_stores"] == resources["spill_loads"] == 0, unit.name
        limit = 65_536 // (384 if re.match(r"linear_wide_b?f16_128", unit.name) else 256)
        assert resources["registers"] <= limit and not re.search(r"wgmma.*serializ", artefact.log), unit.name


def test_shared_memory_is_what_the_kernels_lay_out() -> None:
    """`SHARED` of wide.cuh, by its own arithmetic."""
    wide = Wide(128, 256, 4, 2)
    assert wide.shared == 4 * (128 + 256) * 128 + 4 * 8192 + 3 * 128 + 16 * 4 + 16 + 1024
    low = Wide(64, 64, 5, split=4, head=2, boxes=2)
    assert low.shared == 5 * 2 * (64 + 64) * 128 + 3 * 64 * 16 * 4 + 3 * 128 + 16 * 5 + 16 + 8 * 2 + 1024
