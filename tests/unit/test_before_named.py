"""An op's Python is loaded when it is first asked for, and everything works before: `before_named` has the cases."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.unit import before_named

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="a case starts as a fork of a process")


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    command = [sys.executable, "-m", "tests.unit.before_named", str(tmp_path_factory.mktemp("programs"))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    by_case: dict[str, str] = json.loads(done.stdout.splitlines()[-1])
    return by_case


@pytest.mark.parametrize("case", before_named.CASES)
def test_it_works_before_an_op_is_named(case: str, outcomes: dict[str, str]) -> None:
    assert outcomes[case] == "ok", outcomes[case]
