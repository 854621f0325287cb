"""A menu line is one algorithm: whichever call it serves, it launches the same kernels, or leaves passes out.

Another kernel function is another line, so that `explain`, `check`, `tune` and lockfiles see the choice.
"""

from __future__ import annotations

import itertools
import re
from typing import cast

import pytest
import torch

pytest.importorskip("triton")

from ferryman.backends import redirect
from ferryman.device_profiles import profile
from ferryman.dispatch import registry, select
from ferryman.porting.aot.calls import Collector
from ferryman.porting.bench import grid
from ferryman.porting.running.cells import tier_cases
from tests import families

EXCEPT: dict[tuple[str, str], str] = families.table("several_kernels", "SEVERAL")  # (op, backend) -> why


def _kernels(unit: str) -> str:
    """A kernel's name, without a C++ unit's activation, dtypes and plan."""
    return re.split(r"_(?:Silu|GeluTanh|GeluErf|f32|f16|bf16)_|_\d|\(", unit)[0]


def _launched(op: str, backend: str, device: str) -> dict[str, set[frozenset[str]]]:
    """Line -> the sets of kernels that its calls launch."""
    primitive, known = registry.primitive(op), profile(device)
    target = select.target_of(known)
    sets: dict[str, set[frozenset[str]]] = {}
    cases = [*tier_cases(primitive, "standard"), *grid.cases(primitive, "full", torch.device("cuda"))]
    for line in registry.asked(op, (backend,)):
        launch = registry.launcher(line)
        for case, dtype in ((c, d) for c in cases for d in (torch.float32, torch.bfloat16)):
            args = grid.on_meta(primitive, case, dtype)
            view = select.View.of(primitive, args, known)
            if select.refusals(line, view, known, absent=True):
                continue
            collector = Collector(target)
            before = redirect.to(cast(redirect.Route, collector))
            try:
                launch(*args, target)
            finally:
                redirect.back(before)
            names = frozenset(_kernels(name) for name in collector.units)
            if names:
                sets.setdefault(line.name, set()).add(names)
    return sets


@pytest.mark.parametrize(("backend", "device"), [("triton", "h200"), ("triton", "mi300x"), ("cuda", "h200")])
def test_a_line_launches_the_same_kernels_for_every_call(backend: str, device: str) -> None:
    seen, several = 0, set()
    for op in registry.primitives():
        for line, sets in _launched(op, backend, device).items():
            seen += 1
            inmost = sorted(sets, key=len)
            if any(not few <= more for few, more in itertools.pairwise(inmost)):
                several.add((op, line))
    assert seen > 15
    unlisted = sorted((op, line) for op, line in several if (op, backend) not in EXCEPT)
    assert not unlisted, f"lines that launch one kernel or another: {unlisted}; required: a line for each"
    wanted = {op for op, toolchain in EXCEPT if toolchain == backend}
    assert {op for op, _ in several} == wanted, "listed and not seen"
