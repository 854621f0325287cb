"""The self-test of the portable C++ kernels: an op's edits in one library of the emulation, judged by its gates.

python -m tests.unit.simt_survey OUT.json.gz --kept FOLDER    every op; goes on where it was stopped
python -m tests.unit.simt_survey OUT.json.gz --kept FOLDER --op rope --edits 40
"""

from __future__ import annotations

import argparse
import ctypes
import faulthandler
import functools
import gzip
import math
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ferryman.backends import simt
from ferryman.backends.base import Target
from ferryman.device_profiles import detect, profile
from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.porting.judging import batch
from ferryman.porting.judging.results import environment
from ferryman.porting.mutate import cpp, sources
from ferryman.porting.mutate.edits import Edit, spread
from ferryman.porting.running.process import quiet
from ferryman.porting.selftest import judging, planting, session, worker
from ferryman.porting.selftest.cells import Cells, Lines
from ferryman.porting.selftest.judging import Outputs
from ferryman.porting.selftest.planting import Mutant
from ferryman.porting.selftest.report import Record, SelfTest, Tally, compose, dumps
from ferryman.porting.selftest.runner import Journal
from tests.unit import simt_host as host
from tests.unit import simt_mutants as mutants

WAVE, EDITS = 32, 16
FILES = [path.name for path in sources.ROOT.rglob("*.cuh")]
CPU = torch.device("cpu")
PORTABLE = (".simt_kernels", ".simt_softmax_backward_kernels")  # for every device; the others are for clusters
SHARED = [path.name for path in simt.HERE.glob("*.cuh")]
_POOL = 8


def line_of(op: str) -> Implementation | None:
    """The op's line in C++ that every device may take; None where it has none."""
    lines = registry.implementations(op)
    return next((line for line in lines if line.where.partition(":")[0].endswith(PORTABLE)), None)


OPS = [op for op in registry.primitives() if line_of(op)]


class Emulated:
    """An op's launcher on the emulated device, as mutant ``index`` of its library."""

    def __init__(self, line: Implementation, runtime: host.EmulatedRuntime, where: Target, index: int = 0) -> None:
        self.launcher, self.runtime, self.where, self.index = registry.launcher(line), runtime, where, index
        self.over = tuple(argument for argument, _ in registry.primitive(line.op).overwritten)

    def __call__(self, *args: Any) -> Any:
        for library in self.runtime._libraries:
            ctypes.c_int.in_dll(library, "ferryman_mutant").value = self.index
        return self.runtime.call(self.launcher, args[:-1], self.where, self.over)


class Traced(Cells):
    """Cells of an op whose right kernel tells which edits of its library a run comes by."""

    def __init__(self, op: str, line: Implementation, seed: int, runtime: host.EmulatedRuntime) -> None:
        super().__init__(op, judging.Setting(CPU, profile("a100"), times=2), seed, "cuda", line)
        self.runtime, self.edits, self.reached = runtime, dict[int, Edit](), set[int]()

    def _traced(self, kernel: Any, args: Any, most: float = math.inf) -> tuple[Outputs, Lines]:
        seen = [(ctypes.c_ubyte * cpp.MOST).in_dll(library, "ferryman_seen") for library in self._planted()]
        for flags in seen:
            ctypes.memset(flags, 0, cpp.MOST)
        outputs = judging.call(self.primitive, kernel, args, self.setting, self.target)
        by = {n for n in self.edits if any(flags[n] for flags in seen)}
        self.reached |= by
        lines = {(e.file, at) for e in (self.edits[n] for n in by) for at in range(e.line, e.last + 1)}
        return outputs, frozenset(lines)

    def _planted(self) -> list[ctypes.CDLL]:
        return self.runtime._libraries if self.edits else []


def survey(op: str, runtime: host.EmulatedRuntime, most: int, seed: int, planted: int) -> Iterator[Record]:
    """What becomes of ``most`` edits, drawn by ``planted``, of the op's own C++ that some case or draw comes by, and of
    half as many in the files that all families share, the same ones for every op that comes by them.

    The runtime is in force, and is this op's alone.
    """
    line = line_of(op)
    assert line is not None
    where = host.target(WAVE)
    cells, right = Traced(op, line, seed, runtime), Emulated(line, runtime, where)
    _collect(cells, right, line)
    draw = functools.partial(_pool, most=most, seed=f"{planted}")
    cells.edits, runtime.order = mutants.Planted(runtime, FILES, most, planted, draw).edits, 0
    cells.warm(right, line, worker.EARLY)
    cells.warm(right, line, None)
    reached = [cells.edits[n] for n in sorted(cells.reached)]
    shared = [e for e in reached if e.file in SHARED][: most // 2]
    chosen = [*spread([e for e in reached if e.file not in SHARED], most, f"{planted}/{op}"), *shared]
    numbers = {edit: n for n, edit in cells.edits.items()}

    def kernel(edit: Edit) -> Emulated:
        return Emulated(line, runtime, where, numbers[edit])

    for mutant in planting.edits_of(op, line, chosen, kernel, lambda: right):
        judge = functools.partial(_judged, mutant, right, cells)
        fate = worker.forked(judge, worker.LIMIT_SECONDS, worker.OWN_SECONDS + worker.SLOWER * cells.seconds)
        yield fate if isinstance(fate, Record) else session.not_run(mutant, str(fate))


def _pool(alive: list[Edit], most: int, seed: str) -> list[Edit]:
    """More than are judged, as most are of other ops."""
    own, shared = ([e for e in alive if (e.file in SHARED) is one] for one in (False, True))
    return [*spread(own, _POOL * most, seed), *spread(shared, _POOL * most, seed)]


def _collect(cells: Cells, right: Emulated, line: Implementation) -> None:
    """Calls everything once, before a library is there: what must be compiled is known then."""
    cells.draws(right, line)
    for case, dtype in cells.order():
        each = cells.prepared(case, dtype)
        judging.call(cells.primitive, right, each.args, cells.setting, cells.target)
        count = batch.samples(each)
        if isinstance(count, int):
            right(*batch.alone(each, count - 1), None)
    cells._draws.clear()


def _judged(mutant: Mutant, right: Emulated, cells: Traced) -> Record | None:
    faulthandler.disable()  # a mutant that dies is no news
    record = None
    for cells.runtime.order in (0, 1):  # a missing barrier shows as a result that depends on the order of threads
        record = session.evaluate(mutant, right, cells, cells.setting, False)
        if record is None or record.outcome != "equivalent":
            break
    return record


def _of(op: str, most: int, seed: int, kept: Path) -> list[Record]:
    """An op's records, from a file of ``kept`` where it has them."""
    stamp = {"simt": 1, "op": op, "edits": most, "seed": seed}
    journal = Journal(kept / f"{op}.jsonl", stamp)
    with tempfile.TemporaryDirectory() as folder:
        runtime = host.EmulatedRuntime(WAVE, Path(folder))
        with host.in_force(runtime), quiet():
            for record in survey(op, runtime, most, seed, seed) if not journal.records else ():
                journal.add(record.key, record)
    return list(journal.records.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the document")
    parser.add_argument("--kept", type=Path, required=True, help="a folder for each op's results")
    parser.add_argument("--op", action="append", choices=OPS, help="only this op; repeatable")
    parser.add_argument(
        "--edits", type=int, default=EDITS, help="of each op's own, and half as many that families share"
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    began, records = time.perf_counter(), list[Record]()
    for op in args.op or OPS:
        records += _of(op, args.edits, args.seed, args.kept)
        sys.stdout.write(f"{op}: {dict(Counter(r.outcome for r in records if r.op == op))}\n")
        sys.stdout.flush()
    facts = environment(CPU, detect(CPU), args.seed, "small", round(time.perf_counter() - began, 3))
    document: SelfTest = compose(facts, records, Tally(), False)
    args.out.write_bytes(gzip.compress(dumps(document).encode(), mtime=0))
    return 0


if __name__ == "__main__":
    sys.exit(main())
