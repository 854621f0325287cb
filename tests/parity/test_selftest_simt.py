"""The edits of the C++ kernels, compiled by the host's compiler and run by the emulation of `tests/unit/simt_host.py`.

A GPU runs them in `ferryman selftest`; here it is shown that each compiles, changes something, and is caught.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.device_profiles import detect
from ferryman.porting import batch
from ferryman.porting.selftest import judging, mutants, session
from ferryman.porting.selftest.planting import Mutant
from tests.unit import simt_host as host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package"),
]
EDITS = [m for m in mutants.catalogue() if m.backend == "simt"]
WAVE = 32
CELLS = 5


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[host.EmulatedRuntime]:
    found = host.EmulatedRuntime(WAVE, tmp_path)
    with host.in_force(found):
        yield found


class _Emulated:
    """A launcher on the emulated device. The emulation refuses what a GPU may get away with: that too is a catch."""

    def __init__(self, launcher: Any, runtime: host.EmulatedRuntime) -> None:
        self.launcher, self.runtime = launcher, runtime

    def __call__(self, *args: Any) -> Any:
        return self.runtime.call(self.launcher, args[:-1], host.target(WAVE))


def _cells(mutant: Mutant, setting: judging.Setting) -> list[Any]:
    cells = session.Cells(mutant.op, setting, 0, "simt")
    order = cells.order(mutant.first)[: max(CELLS, 3 * len(mutant.first))]
    return [cells.prepared(case, dtype) for case, dtype in order]


def _looks(mutant: Mutant, launcher: Any, runtime: host.EmulatedRuntime) -> list[judging.Seen]:
    """Every cell in two orders of the threads: a missing barrier shows as a result that depends on it."""
    setting = judging.Setting(torch.device("cpu"), detect("cpu"), times=2)
    kernel, prepared = _Emulated(launcher, runtime), _cells(mutant, setting)
    for each in prepared:  # first collect what must be compiled, all of it at once; gate G6 runs one sample alone
        kernel(*each.args.values, None)
        count = batch.samples(each)
        if isinstance(count, int):
            kernel(*batch.alone(each, count - 1), None)
    runtime.load(runtime.compile_collected())
    line, seen = mutant.line(setting.device), []
    for runtime.order in (0, 1):
        seen += [judging.look(kernel, line, each, setting) for each in prepared]
    return seen


@pytest.mark.parametrize("mutant", EDITS, ids=lambda m: m.key)
def test_an_edit_of_the_source_is_caught(mutant: Mutant, runtime: host.EmulatedRuntime) -> None:
    seen = _looks(mutant, mutant.make(), runtime)
    assert any(s.flagged for s in seen), [(s.cell.case, s.cell.dtype, s.cell.reason) for s in seen]


@pytest.mark.parametrize("mutant", {m.op: m for m in EDITS}.values(), ids=lambda m: m.op)
def test_the_unmutated_kernel_passes(mutant: Mutant, runtime: host.EmulatedRuntime) -> None:
    seen = _looks(mutant, mutant.right(), runtime)
    assert not any(s.flagged for s in seen), [(s.cell.case, s.cell.dtype, s.cell.reason) for s in seen]
