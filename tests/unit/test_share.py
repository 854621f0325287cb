"""What is drawn by date: every test is in one share. CI's budget: what its parts and a quick test may take."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.conftest import QUICK, SLOW, cpu_seconds, keep_share, listed

ROOT = Path(__file__).resolve().parents[2]


def test_every_test_is_in_one_share() -> None:
    tests: list[Any] = [SimpleNamespace(nodeid=f"tests/unit/test_x.py::test_{i}") for i in range(400)]
    shares = []
    for turn in range(7):
        items = list(tests)
        keep_share(items, f"{turn}/7")
        shares.append(items)
    assert sorted(i.nodeid for share in shares for i in share) == sorted(i.nodeid for i in tests)
    assert all(30 < len(share) < 90 for share in shares)


@pytest.mark.parametrize("share", ["4/4", "-1/4"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="required: K/N"):
        keep_share([], share)


def test_the_parts_of_ci_fit_its_budget() -> None:
    """30 minutes together and 6 for the quick tests, on two cores; .ci/run prints each part's time against its own."""
    script = (ROOT / ".ci" / "run").read_text()
    parts = {title: int(seconds) for seconds, title in re.findall(r'^ *step (\d+) "([^"]+)"$', script, re.M)}
    assert len(parts) == len(re.findall(r"^ *step \d", script, re.M)) >= 8
    assert sum(parts.values()) <= 1800 and parts["make test"] <= 360


def test_an_unknown_part_of_ci_is_refused_before_anything_is_made() -> None:
    completed = subprocess.run(["sh", str(ROOT / ".ci" / "run"), "chek"], capture_output=True, text=True)
    assert completed.returncode == 2 and not completed.stdout
    assert "no part chek; required: lint, hiprtc, check, test or slow" in completed.stderr


def test_githubs_jobs_are_the_parts_of_ci_within_45_minutes_and_run_each_day() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] <= 45
    script = (ROOT / ".ci" / "run").read_text()
    assert job["strategy"]["matrix"]["part"] == re.findall(r"^if wants (\w+); then$", script, re.M)
    assert workflow[True]["schedule"]  # YAML reads the key "on" as true; a share of the slow tests is of a day


def test_what_is_printed_of_the_parts(tmp_path: Path) -> None:
    """The functions of .ci/run, with two parts of which the second fails."""
    script = (ROOT / ".ci" / "run").read_text()
    functions = script[script.index("begun=") : script.index("trap total EXIT")]
    completed = subprocess.run(
        ["sh", "-euc", functions + 'trap total EXIT; step 9 "one: two"; sleep 1; step 7 three; exit 3'],
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 3 and not completed.stderr
    assert re.search(
        r"==> times\n +[12] s of +9  one: two\n +\d s of +7  three\n +\d s of  1800  together\n", completed.stdout
    )


def test_what_costs_more_than_a_quick_test_is_listed_as_slow(tmp_path: Path) -> None:
    """A run in another process: its costs are written, the list is made of them, and its tests are slow then."""
    long = listed(SLOW.read_text())
    assert all(seconds > QUICK for seconds in long.values())
    gone = {name.partition("::")[0] for name in long if not (ROOT / name.partition("::")[0]).is_file()}
    assert not gone, "files of tests that moved: python ci/slow_tests.py"
    test = "tests/unit/test_share.py::test_a_share_that_is_none_is_refused[4/4]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--costs", str(tmp_path), test]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    (name, seconds) = json.loads(next(tmp_path.glob("*.jsonl")).read_text())
    assert name == test and 0 <= seconds < QUICK


def test_the_cpu_time_of_what_a_test_starts_counts() -> None:
    before = cpu_seconds()
    spin = "import time\nwhile time.process_time() < 1.5: pass\nprint(flush=True)\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert cpu_seconds() - before >= 1.4  # it runs still
    finally:
        child.kill()
        child.communicate()
    assert cpu_seconds() - before >= 1.4  # it has ended
