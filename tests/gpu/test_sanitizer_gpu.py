"""compute-sanitizer on our kernels at small shapes: no access outside an allocation, no race in shared memory."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ferryman.dispatch import registry

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
CLEAN = {"memcheck": "ERROR SUMMARY: 0 errors", "racecheck": "RACECHECK SUMMARY: 0 hazards"}
KERNELS = [
    (op, backend)
    for op in registry.primitives()
    for backend in ("cuda", "triton")
    if any(line.backend == backend for line in registry.implementations(op))
]


@pytest.mark.parametrize(("op", "backend"), KERNELS)
def test_clean(op: str, backend: str) -> None:
    tool = shutil.which("compute-sanitizer") or shutil.which("/usr/local/cuda/bin/compute-sanitizer")
    if tool is None:
        pytest.skip("NOT_RUN: no compute-sanitizer here; it comes with CUDA's toolkit")
    path = os.pathsep.join(p for p in ("src", ".", os.environ.get("PYTHONPATH", "")) if p)
    # Without PyTorch's cache every tensor is an allocation of its own, whose end the tool knows.
    env = {**os.environ, "PYTHONPATH": path, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    for check, verdict in CLEAN.items():
        done = subprocess.run(
            [
                tool,
                "--tool",
                check,
                "--error-exitcode",
                "9",
                "--print-limit",
                "5",
                sys.executable,
                "tests/gpu/sanitizer_cases.py",
                backend,
                op,
            ],
            cwd=ROOT,
            env=env,
            capture_output=True,
            text=True,
            timeout=400,
        )
        said = done.stdout + done.stderr
        assert done.returncode == 0 and "launches" in said and verdict in said, (
            f"{check}: {said[:4000]}\n...\n{said[-1000:]}"
        )
