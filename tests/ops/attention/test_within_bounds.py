"""Edits that change attention's numbers by less than its bound allows: the proof that `Equivalent.within` asks for."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np

from ferryman.ops.attention.equivalents import EQUIVALENTS
from ferryman.porting.mutate import sources

KERNEL = "attention_backward.triton.decode._saturation"
ALLOWED = 6  # of u times the cap, that a score's tanh may be off by (`ops/attention/bounds.py`)


def _saturation(old: str = "", new: str = "") -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """(errors of tanh by the Triton function with an edit, in float32, in units of 2^-24; its second result)."""
    body = sources.text_of("ops/attention/tile_kernels.py").split("def _saturation(x):")[1].split("@triton.jit")[0]
    assert not old or body.count(old) == 1
    lang = SimpleNamespace(abs=np.abs, where=np.where, exp2=np.exp2)
    names: dict[str, Any] = {"tl": lang, "LOG2E": np.float32(1.4426950408889634)}
    exec("def _saturation(x):" + (body.replace(old, new) if old else body), names)  # noqa: S102
    x = np.linspace(-8, 8, 2_000_001, dtype=np.float32)
    mine, slope = names["_saturation"](x)
    assert mine.dtype == np.float32
    return np.abs(mine - np.tanh(x.astype(np.float64))) * 2**24, slope


def test_what_is_within_the_bounds_is_so() -> None:
    edits = [(one.kernel, edit) for one in EQUIVALENTS if one.within for edit in one.edits]
    assert {kernel for kernel, _ in edits} == {KERNEL}, "each needs its proof here"
    errors, slope = _saturation()
    assert errors.max() < 3
    for _, edit in edits:
        old, new = edit.split(" -> ")
        mine, other = _saturation(old, new.removeprefix("(").removesuffix(")"))
        assert np.abs(mine - errors).max() > 0 and mine.max() < ALLOWED / 2 + 1
        assert np.array_equal(other, slope)
    assert _saturation("square * (62.0 / 2835)", "(62.0 / 2835)")[0].max() > 2 * ALLOWED
