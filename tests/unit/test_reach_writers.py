"""Writers that are killed leave the old file or the new one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

WORKER = Path(__file__).with_name("writers_worker.py")
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")


def killed(folder: Path, kills: int) -> dict[str, dict[str, int]]:
    command = [sys.executable, str(WORKER), str(folder), str(kills), time.strftime("%Y%m%d")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    counts: dict[str, dict[str, int]] = json.loads(done.stdout)
    return counts


@pytest.mark.parametrize("kills", [16, pytest.param(256, marks=pytest.mark.slow)])
def test_a_killed_writer_leaves_nothing_torn(kills: int, tmp_path: Path) -> None:
    counts = killed(tmp_path, kills)
    planted, torn = counts["torn"].pop("planted"), counts["torn"]
    controls = counts["kills"].pop("planted")
    assert sum(counts["kills"].values()) == kills and all(counts["kills"].values())
    assert not any(torn.values())
    if controls:
        assert planted >= 5, "the kills do come while a file is being written"
