"""What an op adds to a check on a CPU, interpreted Triton included: at most 15 s, so that `.ci/run` stays short."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ferryman.dispatch import registry
from ferryman.porting.running import runner
from tests.conftest import cpu_seconds

SECONDS = 15.0
BUSY = 1.25  # the same work takes up to a quarter more CPU time where other processes use the caches
# `make check` runs every op each day; what each of them adds is asked every twelfth week
pytestmark = [pytest.mark.slow, pytest.mark.alternate(weeks=12), pytest.mark.timeout(400)]


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


@pytest.mark.parametrize("op", registry.primitives())
def test_an_op_adds_at_most_15_seconds(op: str, starting: float) -> None:
    before = cpu_seconds()
    document = runner.run([op], device="cpu", interpreted_jobs=1)
    spent = cpu_seconds() - before - starting
    assert spent <= SECONDS * BUSY, (
        f"{op}: {len(document.cells)} cells took {spent:.1f} s of CPU; at most {SECONDS:.0f}: smaller cases, or fewer"
    )
