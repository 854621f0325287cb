"""The third set of look-alikes: nothing tells a ported module from its unported twin, in any situation."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ferryman
from ferryman.porting.model.classes import is_ported
from tests.unit.lookalikes_fresh import DEVICES, FRESH, HEAD, RIGHT, _conv
from tests.unit.situations import Pair, Stage, apart, rows

_SHARES = 12
# one of each kind, whose proof ends early
QUICK = (
    "an item",
    "a counter in a list",
    "rare random elements",
    "is_compiling as a number",
    "a factor by strides",
    "a scaled gradient",
    "a queue",
    "getattr of its input",
    "how many are large",
    "the seed",
)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    yield
    for name in ("FERRYMAN_PLANTED", "FERRYMAN_NUMBER"):
        os.environ.pop(name, None)


def _wrong(names: list[str], folder: Path) -> list[str]:
    missed = []
    for i, what in enumerate(names):
        pair = Pair(HEAD + FRESH[what], f"fresh_{abs(hash(str(folder)))}_{i}", folder)
        if what in DEVICES and is_ported(pair.model.inner):
            missed.append(f"{what}: ported")
        missed += [f"{what}: {said}" for said in pair.differences() if said]
    return missed


def test_there_are_many() -> None:
    assert len(FRESH) >= 250 and set(DEVICES) | set(QUICK) <= FRESH.keys()


def test_a_few_fresh_look_alikes_are_left(tmp_path: Path) -> None:
    for i, what in enumerate(QUICK):
        pair = Pair(HEAD + FRESH[what], f"quick_{abs(hash(str(tmp_path)))}_{i}", tmp_path)
        assert not is_ported(pair.model.inner), what


@pytest.mark.slow
@pytest.mark.alternate()
@pytest.mark.parametrize("share", range(_SHARES))
def test_fresh_look_alikes(share: int, tmp_path: Path) -> None:
    """CI takes each share every other week; its look-alikes are of all kinds."""
    missed = _wrong(list(FRESH)[share::_SHARES], tmp_path)
    assert not missed, "\n".join(missed)


@pytest.mark.parametrize("what", RIGHT)
def test_what_is_right_is_ported(what: str, tmp_path: Path) -> None:
    code, op, sizes = RIGHT[what]
    pair = Pair(HEAD + code, f"right_{abs(hash(str(tmp_path)))}", tmp_path)
    assert pair.report is not None
    paths = {site.role: site.path for site in pair.report.ported}
    assert op in paths, pair.report.text()
    inner: Any = pair.model.get_submodule(paths[op])
    assert [t for t in type(inner).ferryman_recipe.role.tests if "numel" in t] == sizes
    assert not pair.check(Stage("plain", rows(2, 5, 4096 if "wide" in what else 64)))


def test_a_right_convolution_is_served(tmp_path: Path) -> None:
    pair = Pair(HEAD + _conv("pass"), f"conv_{abs(hash(str(tmp_path)))}", tmp_path)
    with ferryman.trace() as trace:
        assert not pair.check(Stage("plain", rows(2, 5, 64)))
    assert [op for op, _ in trace.calls] == ["causal_conv1d"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_judge_allows_roundings_and_no_more(dtype: torch.dtype) -> None:
    """One unit in the last place of any element; not four, nor a thousandth of float32's."""
    w = rows(7, 64).to(dtype)
    up = torch.nextafter(w, torch.full_like(w, math.inf))
    assert not apart(up, w)
    assert apart(w * (1 + 5 * torch.finfo(dtype).eps if dtype.itemsize == 2 else 1 + 1e-4), w)
    assert apart(w.masked_fill(w == w.max(), math.nan), w) and apart(w[:3], w) and apart(w.double(), w)
