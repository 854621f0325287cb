"""Mutants of the portable C++ kernels: many in one library that the host's compiler makes, chosen by an index, run by
the emulation of `tests/unit/simt_host.py`.

A GPU has no part in it. Which ops are drawn follows from the date (FERRYMAN_SELFTEST_DATE=YYYYMMDD, else today): every
op comes about once a week. FERRYMAN_SELFTEST_SIMT=all runs them all.
"""

from __future__ import annotations

import ctypes
import datetime
import faulthandler
import os
import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.judging import batch
from ferryman.porting.mutate import sources
from ferryman.porting.selftest import judging, report, session, worker
from ferryman.porting.selftest.cells import Cells
from ferryman.porting.selftest.planting import Mutant
from ferryman.porting.selftest.report import Record
from tests.unit import simt_host as host
from tests.unit import simt_mutants as mutants

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package"),
]
WAVE, EDITS, OPS_A_DAY = 32, 40, 1
FILES = [path.name for path in sources.ROOT.rglob("*.cuh")]
CPU = torch.device("cpu")
TODAY = os.environ.get("FERRYMAN_SELFTEST_DATE") or datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d")


def _line(op: str) -> Any:
    """The op's line in C++ that every call may take; None where the emulation has no such kernel."""
    lines = [line for line in registry.implementations(op) if line.where.endswith(f".simt_kernels:{op}")]
    return lines[0] if lines else None


OPS = [op for op in registry.primitives() if _line(op)]
DRAWN = OPS if os.environ.get("FERRYMAN_SELFTEST_SIMT") == "all" else random.Random(TODAY).sample(OPS, OPS_A_DAY)


class _Emulated:
    """An op's launcher on the emulated device, as mutant ``index`` of its library."""

    def __init__(self, op: str, runtime: host.EmulatedRuntime, index: int = 0) -> None:
        self.launcher, self.runtime, self.index = registry.launcher(_line(op)), runtime, index
        self.over = tuple(argument for argument, _ in registry.primitive(op).overwritten)

    def __call__(self, *args: Any) -> Any:
        for library in self.runtime._libraries:
            ctypes.c_int.in_dll(library, "ferryman_mutant").value = self.index
        return self.runtime.call(self.launcher, args[:-1], host.target(WAVE), self.over)


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[host.EmulatedRuntime]:
    emulator = host.EmulatedRuntime(WAVE, tmp_path)
    with host.in_force(emulator):
        yield emulator


@pytest.mark.parametrize("op", DRAWN)
def test_mutants_of_the_portable_kernels_are_caught(op: str, runtime: host.EmulatedRuntime) -> None:
    """On every small case, and on 200 draws: only what gives the right bits on all is left out."""
    line = _line(op)
    cells = Cells(op, judging.Setting(CPU, profile("a100"), times=2), 0, "cuda", line)
    emulated = _Emulated(op, runtime)

    def every_call() -> None:
        cells.draws(emulated, line)
        for case, dtype in cells.order():
            each = cells.prepared(case, dtype)
            judging.call(cells.primitive, emulated, each.args, cells.setting, cells.target)
            count = batch.samples(each)
            if isinstance(count, int):
                emulated(*batch.alone(each, count - 1), None)

    every_call()  # first collect what must be compiled, all of it at once
    cells._draws.clear()
    planted = mutants.Planted(runtime, FILES, EDITS, int(TODAY))
    runtime.order = 0
    cells.warm(emulated, line, None)
    records = []
    for index, edit in planted.edits.items():
        kernel = _Emulated(op, runtime, index)
        name = f"{edit.function}.{index}"
        mutant = Mutant(
            op, name, edit.operator, edit.note, lambda k=kernel: k, lambda: emulated, line, "cuda", edit=edit
        )  # type: ignore[misc]

        def judged(mutant: Mutant = mutant) -> Record | None:
            faulthandler.disable()  # a mutant that dies is no news
            record = None
            for runtime.order in (0, 1):  # a missing barrier shows as a result that depends on the order of threads
                record = session.evaluate(mutant, emulated, cells, cells.setting, False)
                if record is None or record.outcome != "equivalent":
                    break
            return record

        fate = worker.forked(judged, 120.0, worker.OWN_SECONDS + worker.SLOWER * cells.seconds)
        records.append(fate if isinstance(fate, Record) else session.not_run(mutant, str(fate)))
    fates = Counter(r.outcome for r in records)
    missed = [(r.operator, r.note, r.reason) for r in records if r.outcome == "missed"]
    assert fates["caught"] >= 4, (op, TODAY, fates, f"{planted.refused} refused by the compiler")
    assert fates["caught"] >= report.REQUIRED_SHARE * (fates["caught"] + fates["missed"]), missed
