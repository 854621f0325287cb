"""Mutants of the portable C++ kernels: many in one library that the host's compiler makes, chosen by an index, run
by the
emulation of `tests/unit/simt_host.py`.

A GPU has no part in it. Which ops are drawn follows from the date (FERRYMAN_SELFTEST_DATE=YYYYMMDD, else today): every
op comes about once a week. FERRYMAN_SELFTEST_SIMT=all runs them all.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import random
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from ferryman.porting.judging import batch
from ferryman.porting.mutate import cpp, sources
from ferryman.porting.mutate.edits import Edit, spread
from ferryman.porting.selftest import judging, session, worker
from ferryman.porting.selftest.cells import Cells, elements
from ferryman.porting.selftest.planting import Mutant
from ferryman.porting.selftest.report import Record
from tests.unit import simt_host as host

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package"),
]
WAVE, CELLS, EDITS, OPS_A_DAY = 32, 6, 40, 1
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


def _planted(source: str, most: int) -> dict[int, Edit]:
    """Edits of the files that a joined source is made of; their own text begins at each `#line 1`."""
    files = {piece.partition('"')[0] for piece in source.split('#line 1 "')[1:]}
    edits: list[Edit] = []
    for path in sorted(sources.ROOT.rglob("*.cuh")):
        if path.name in files:
            edits += cpp.edits(path.read_text("utf-8"), path.name)
    return dict(enumerate(spread(edits, most, int(TODAY)), 1))


def _with(source: str, chosen: dict[int, Edit]) -> str:
    texts = {p.name: p.read_text("utf-8") for p in sources.ROOT.rglob("*.cuh")}
    for name in {e.file for e in chosen.values()}:
        own = {n: e for n, e in chosen.items() if e.file == name}
        assert source.count(texts[name].rstrip()) == 1, name
        source = source.replace(texts[name].rstrip(), cpp.schemata(texts[name], name, own).rstrip())
    return cpp.PRELUDE + source


def _compiled(runtime: host.EmulatedRuntime, most: int) -> tuple[dict[int, Edit], int]:
    """Compile what was collected with as many mutants as the compiler takes: (those, how many it refused)."""
    chosen: dict[int, Edit] = {}

    def first(source: str) -> str:
        chosen.update(_planted(source, most))
        return _with(source, chosen)

    planted, edit = 0, first
    for _ in range(6):
        building = runtime.compile_collected(edit)
        planted = planted or len(chosen)
        if building is None:
            break
        building.kill()
        building.wait()
        command = [str(a) for a in building.args]  # type: ignore[union-attr]
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        if done.returncode == 0:
            Path(command[-1]).replace(runtime._path)
            break
        runtime.unlock()
        refused = cpp.refused(done.stderr) & set(chosen)
        assert refused, done.stderr[:2000]
        for n in refused:
            del chosen[n]

        def edit(source: str) -> str:
            return _with(source, chosen)
    else:
        pytest.fail("the compiler refuses the mutants, one after another")
    runtime.load(None)
    return chosen, planted - len(chosen)


@pytest.mark.parametrize("op", DRAWN)
def test_mutants_of_the_portable_kernels_are_caught(op: str, runtime: host.EmulatedRuntime) -> None:
    line = _line(op)
    setting = judging.Setting(CPU, detect("cpu"), times=2)
    cells = Cells(op, setting, 0, "torch")
    cells.cases = sorted((c for c in cells.cases if c.name != "empty_rows"), key=elements)[:CELLS]
    emulated = _Emulated(op, runtime)
    for case, dtype in cells.order():  # first collect what must be compiled, all of it at once
        each = cells.prepared(case, dtype)
        emulated(*each.args.values, None)
        count = batch.samples(each)
        if isinstance(count, int):
            emulated(*batch.alone(each, count - 1), None)
    chosen, refused = _compiled(runtime, EDITS)
    records: list[Record] = []
    for index, edit in chosen.items():
        kernel = _Emulated(op, runtime, index)
        mutant = Mutant(
            op, f"{edit.function}.{index}", edit.operator, edit.note, lambda k=kernel: k, lambda: emulated, line, "cuda"
        )

        def judged(mutant: Mutant = mutant) -> Record:
            record = session.new_record(mutant).model_copy(update={"outcome": "equivalent"})
            for runtime.order in (0, 1):  # a missing barrier shows as a result that depends on the order of threads
                for case, dtype in cells.order():
                    judgement = session.judged_alone(mutant, emulated, cells, case, dtype)
                    if judgement is not None:
                        return judgement
            return record

        outcome = worker.forked(judged, 60.0)
        records.append(session.not_run(mutant, outcome) if isinstance(outcome, str) else outcome)
    fates = Counter(r.outcome for r in records)
    missed = [(r.operator, r.note) for r in records if r.outcome == "missed"]
    assert fates["caught"] >= 4, (op, TODAY, fates, f"{refused} refused by the compiler")
    assert fates["caught"] >= 0.95 * (fates["caught"] + fates["missed"]), missed
