"""What an op adds to the check of `.ci/run`, on a CPU, interpreted Triton included: at most 15 s of its time."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import numpy as np
import pytest

from ferryman.dispatch import registry
from ferryman.porting.running import runner
from tests.conftest import cpu_seconds

SECONDS = 15.0
BUSY = 1.25  # the same work takes up to a quarter more CPU time where other processes use the caches
YARDSTICK = 0.45  # CPU seconds of `yardstick()` on the cores that the 15 s are meant for
SLOWEST = 2.5  # cores slower than this by the yardstick are no measure of an op
TURNS = 6  # of a check; `.ci/run` takes one a day
# `make check` runs every op each day; what each of them adds is asked every fourth week
pytestmark = [pytest.mark.slow, pytest.mark.alternate(weeks=4), pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def starting() -> float:
    """CPU seconds of the interpreter's process before its first cell: a check pays them once, whatever its ops."""
    runner.run(
        [next(iter(registry.primitives()))], device="cpu", backends=["torch"]
    )  # what this process imports at a first check
    before = cpu_seconds()
    command = "import ferryman.porting.running.worker, triton.language, triton.runtime.interpreter"
    subprocess.run([sys.executable, "-c", command], env={**os.environ, "TRITON_INTERPRET": "1"}, check=True)
    return cpu_seconds() - before


def yardstick() -> float:
    """CPU seconds of work like an interpreted kernel's: Python's bytecode and NumPy's calls on small arrays."""
    rows, total, before = [np.zeros(64, np.float32) for _ in range(8)], 0.0, time.process_time()
    for n in range(60_000):
        row = rows[n % 8]
        total += float(np.where(row < n, np.add(row, n, dtype=np.float32), row)[n % 64])
        total += len({str(k): k for k in range(4)})
    assert total > 0
    return time.process_time() - before


def added(op: str, starting: float) -> tuple[float, int]:
    """(CPU seconds of the op's cells, how many cells), at the pace of the cores that the limit is meant for."""
    yard, before = yardstick(), cpu_seconds()
    today = int(time.time()) // 86400
    document = runner.run([op], device="cpu", interpreted_jobs=1, turn=(today % TURNS, TURNS))
    spent = cpu_seconds() - before - starting
    pace = (yard + yardstick()) / 2 / YARDSTICK
    return spent / min(max(pace, 1.0), SLOWEST), len(document.cells)


@pytest.mark.parametrize("op", registry.primitives())
def test_an_op_adds_at_most_15_seconds(op: str, starting: float) -> None:
    spent, cells = added(op, starting)
    if spent > SECONDS * BUSY:  # cores that are shared change their pace within seconds
        spent = min(spent, added(op, starting)[0])
    assert spent <= SECONDS * BUSY, (
        f"{op}: {cells} cells took {spent:.1f} s of CPU; at most {SECONDS:.0f}: smaller cases, or fewer"
    )
