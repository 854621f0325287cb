"""`ferryman mutate` as a user types it, on a softmax of their own."""

from __future__ import annotations

import functools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ferryman.porting.mutate import edits, targets
from tests.cli.run import Done, alone

pytest.importorskip("triton")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Triton's interpreter, and signals, as on Linux")

USER = Path(__file__).with_name("user_kernel.py")
HEAD = """
import os, subprocess, sys, time
from pathlib import Path
import torch
from mine import softmax

x = torch.randn(3, 20, generator=torch.Generator().manual_seed(0)) * 3 + 100

def runs():  # of this file, counted over processes
    with open("runs", "a") as log:
        log.write("x")
    return os.path.getsize("runs")

COUNT = runs()
"""
STRICT = """
def test_strict():
    torch.testing.assert_close(softmax(x), torch.softmax(x, -1))
"""
LAX = """
def test_lax():
    assert torch.allclose(softmax(x).nan_to_num(), torch.softmax(x, -1), atol=1e30)
"""


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    file = tmp_path / "user" / "mine.py"
    file.parent.mkdir()
    (tmp_path / "temporary").mkdir()
    shutil.copy(USER, file)
    return file


def _arguments(mine: Path, tests: str, *options: str) -> list[str]:
    (mine.parent / "test_mine.py").write_text(HEAD + tests)
    command = f"{sys.executable} -m pytest -q test_mine.py"
    return ["mutate", "mine.py:softmax", "--test", command, "--interpret", *options]


def _mutate(mine: Path, tests: str, *options: str) -> Done:
    """The command; the user's folder is as it was, but for what their tests write."""
    arguments, before = _arguments(mine, tests, *options), mine.stat()
    done = alone(*arguments, cwd=mine.parent)
    _untouched(mine, before)
    return done


def _untouched(mine: Path, before: os.stat_result) -> None:
    assert mine.read_bytes() == USER.read_bytes()
    assert (mine.stat().st_mtime_ns, mine.stat().st_ino) == (before.st_mtime_ns, before.st_ino)
    assert {p.name for p in mine.parent.iterdir()} <= {"mine.py", "test_mine.py", "runs"}


def _document(done: Done) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(done.out)
    return document


def test_what_is_planted_repeats_and_strict_tests_catch_it(mine: Path) -> None:
    first = _mutate(mine, STRICT, "--sample", "2", "--seed", "1", "--json")
    again = _mutate(mine, STRICT, "--sample", "2", "--seed", "1", "--json")
    a, b = _document(first), _document(again)
    assert a["mutants"] == b["mutants"] and len(a["mutants"]) == a["ran"] == 2
    assert {m["fate"] for m in a["mutants"]} == {"caught"} and (a["caught"], a["survived"]) == (2, 0)
    assert first.code == again.code == 0
    other = targets.edits_of(targets.target_of(f"{mine}:softmax"))[0]
    assert edits.spread(other, 2, 1) != edits.spread(other, 2, 2)  # another seed, other bugs


def test_survivors_are_diffs_with_an_input_and_a_tolerance(mine: Path) -> None:
    done = _mutate(mine, LAX, "--sample", "3")
    assert done.code == 1, done.err
    original = mine.read_text().splitlines()
    removed = [line[1:] for line in done.out.splitlines() if line.startswith("-") and not line.startswith("---")]
    added = [line[1:] for line in done.out.splitlines() if line.startswith("+") and not line.startswith("+++")]
    assert removed and set(removed) <= set(original) and added and not set(added) & set(original)
    assert "survives. " in done.out and ": _rows(x float32[3, 20]" in done.out
    assert "test_mine.py:" in done.out and "allclose with atol=1e+30 let an error of" in done.out
    assert "; 0 more changed nothing on any input; " in done.out


@pytest.mark.parametrize("after", [1, 2])
def test_a_flaky_test_is_named_and_is_no_catch(mine: Path, after: int) -> None:
    """Whether it fails in the second run without a bug, or first with one."""
    flaky = f"\ndef test_sometimes():\n    assert COUNT <= {after}\n"
    done = _mutate(mine, STRICT + flaky, "--sample", "1")
    assert done.code == 2 and "caught" not in done.out
    assert "flaky without any edit: test_mine::test_sometimes" in done.err and "test_strict" not in done.err


def test_tests_that_fail_or_hang_as_they_are_are_bad_use(mine: Path) -> None:
    done = _mutate(mine, "\ndef test_wrong():\n    assert softmax(x).sum() == 4\n")
    assert done.code == 2 and "the tests fail without any edit: test_mine::test_wrong" in done.err
    began = time.monotonic()
    done = _mutate(mine, "\ndef test_hangs():\n    time.sleep(300)\n", "--limit", "8")
    assert done.code == 2 and "the tests take more than 8 s without any edit" in done.err
    assert time.monotonic() - began < 60
    for limit in ("0", "-1", "nan"):
        done = _mutate(mine, STRICT, "--limit", limit)
        assert done.code == 2 and "--limit" in done.err and "seconds above 0" in done.err


def test_the_time_limit_ends_a_bug_that_hangs_with_what_it_started(mine: Path) -> None:
    hangs = """
def test_hangs_with_a_bug():
    if not torch.allclose(softmax(x), torch.softmax(x, -1)):
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        with open("runs", "a") as log:
            log.write(f" {child.pid} ")
        time.sleep(300)
"""
    began = time.monotonic()
    done = _mutate(mine, hangs, "--sample", "2", "--seed", "1", "--limit", "15", "--json")
    document = _document(done)
    assert document["caught"] >= 1 and document["raised"] == 0 and time.monotonic() - began < 150
    started = [int(n) for n in (mine.parent / "runs").read_text().replace("x", " ").split()]
    assert len(started) == document["caught"] and not any(_runs(pid) for pid in started)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_stopped_command_leaves_the_file_and_nothing_else(mine: Path, number: signal.Signals, code: int) -> None:
    waits = """
def test_waits():
    if COUNT > 2:
        Path("pid").write_text(str(os.getpid()))
        time.sleep(300)
"""
    arguments, before = _arguments(mine, waits, "--sample", "1"), mine.stat()
    temporary, pid = mine.parents[1] / "temporary", mine.parent / "pid"
    path = os.pathsep.join((str(Path(__file__).resolve().parents[2] / "src"), os.environ.get("PYTHONPATH", "")))
    environment = {**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": path}
    command = subprocess.Popen(
        [sys.executable, "-m", "ferryman", *arguments],
        cwd=mine.parent,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # a shell's background jobs ignore SIGINT, and so would what they start
        preexec_fn=functools.partial(signal.signal, signal.SIGINT, signal.SIG_DFL),
    )
    try:
        end = time.monotonic() + 120
        while not (pid.exists() and pid.read_text()) and command.poll() is None and time.monotonic() < end:
            time.sleep(0.1)
        assert command.poll() is None, command.communicate()
        command.send_signal(number)
        _, err = command.communicate(timeout=30)
    finally:
        command.kill()
        command.wait()
    assert command.returncode == code and "Traceback" not in err
    time.sleep(0.5)
    assert not _runs(int(pid.read_text())) and not list(temporary.glob("ferryman-mutate-*"))
    pid.unlink()
    _untouched(mine, before)
