"""Malformed files over all readers: refused or read, never a traceback, in little memory and time."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("malformed_worker.py")
READERS, MOST_MB, MOST_SECONDS = 21, 300, 5


@pytest.mark.parametrize("each", [3, pytest.param(100, marks=pytest.mark.slow)])
def test_malformed_files_are_refused(each: int, tmp_path: Path) -> None:
    seed = time.strftime("%Y%m%d")
    command = [sys.executable, str(WORKER), str(tmp_path), str(each), seed]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    whole = {name for name, how in report["seeds"].items() if how == "read"}
    assert len(whole) == READERS, set(report["seeds"]) - whole  # else most of a reader is never reached
    assert report["faults"] == [], (seed, report["count"], report["faults"][:3])
    assert report["refused"] + report["read"] == each * READERS and report["refused"] > each * READERS / 2
    assert report["MB"] <= MOST_MB and report["seconds"] <= MOST_SECONDS, report
