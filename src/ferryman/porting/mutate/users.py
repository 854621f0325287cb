"""How many planted bugs a user's own tests catch: `ferryman mutate mine.py:kernel --test "pytest tests/test_mine.py"`.

The file is never edited. The tests run in processes that begin with `hook.py`, which gives Python another text in its
place. Before that they must pass twice as they are.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from ferryman.errors import ArgumentError, FerrymanError
from ferryman.porting.mutate.edits import Edit, spread
from ferryman.porting.mutate.survivors import revealed, tolerances, words
from ferryman.porting.mutate.targets import Target, command_of, edits_of, target_of, text_of
from ferryman.porting.running.process import bound

SAMPLE = 40
_HOOK = Path(__file__).with_name("hook.py")
_ASSERTS = re.compile(r"^(AssertionError|assert |Failed|Mismatch|Tensor-likes)", re.MULTILINE)
Fate = Literal["caught", "survived", "raised"]
_FATES = ("caught", "survived", "raised")


class TestsError(FerrymanError, RuntimeError):
    """The tests say nothing as they are: they fail, they are flaky, or they never load the file."""


@dataclass
class Survivor:
    """A planted bug that the tests let through. revealed: an input that shows it. tolerances: what let it through."""

    operator: str
    function: str
    line: int
    diff: str
    revealed: str | None = None
    tolerances: list[str] = field(default_factory=list)


@dataclass
class Outcome:
    """What ``ferryman mutate --json`` prints. equal: survivors that no replayed input tells from the original.
    mutants: each that was run, with its fate."""

    target: str
    test: str
    seed: int
    possible: int
    ran: int = 0
    caught: int = 0
    survived: int = 0
    raised: int = 0
    equal: int = 0
    seconds: float = 0.0
    by_operator: dict[str, dict[str, int]] = field(default_factory=dict)
    mutants: list[dict[str, Any]] = field(default_factory=list)
    survivors: list[Survivor] = field(default_factory=list)

    def document(self) -> dict[str, Any]:
        return {"kind": "ferryman-mutate", "schema_version": 1, **asdict(self)}


@dataclass
class _Run:
    code: int | None  # None: the time limit
    seconds: float
    output: str
    tests: dict[str, str]  # pytest's: name -> "passed", or the message of its failure
    notes: list[dict[str, Any]]


class _Tests:
    """The user's command, run as it is or with an edit."""

    def __init__(self, target: Target, command: str, folder: Path, interpret: bool, kernels: list[str]) -> None:
        self.target, self.command, self.folder, self.kernels = target, command_of(command), folder, kernels
        self.record = folder / "launches"
        self.record.mkdir()
        site = folder / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text(_SITE, encoding="utf-8")
        paths = (str(site), os.environ.get("PYTHONPATH", ""))
        self.env = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(p for p in paths if p),
            "PYTHONDONTWRITEBYTECODE": "1",
            "FERRYMAN_HOOK": str(_HOOK),
        }
        if interpret:
            self.env["TRITON_INTERPRET"] = "1"
        self._count = 0

    def run(self, edit: Edit | None, limit: float | None, record: bool = False) -> _Run:
        self._count += 1
        log, junit = self.folder / f"log{self._count}", self.folder / f"junit{self._count}.xml"
        change = None if edit is None else {"start": edit.start, "old": edit.old, "new": edit.new}
        job = {
            "file": str(self.target.file),
            "edit": change,
            "log": str(log),
            "kernels": self.kernels,
            "record": str(self.record) if record else None,
        }
        addopts = f"{os.environ.get('PYTEST_ADDOPTS', '')} -p no:cacheprovider --junitxml={junit}"
        env = {**self.env, "FERRYMAN_MUTATION": json.dumps(job), "PYTEST_ADDOPTS": addopts + (" -x" if edit else "")}
        began = time.monotonic()
        process = subprocess.Popen(
            bound(self.command),
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        code: int | None
        try:
            output, _ = process.communicate(timeout=limit)
            code = process.returncode
        except subprocess.TimeoutExpired:
            code = None
            _end(process)
            output, _ = process.communicate()
        except BaseException:  # this process is asked to end
            _end(process)
            raise
        notes = [json.loads(line) for line in log.read_text("utf-8").splitlines()] if log.exists() else []
        return _Run(code, time.monotonic() - began, output, _tests(junit), notes)


def _end(process: subprocess.Popen[str]) -> None:
    """End a command and all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


_SITE = """import importlib.util, os, sys
here = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [p for p in sys.path if os.path.abspath(p) != here]
spec = importlib.util.spec_from_file_location("_ferryman_hook", os.environ["FERRYMAN_HOOK"])
hook = importlib.util.module_from_spec(spec)
spec.loader.exec_module(hook)
del sys.modules["sitecustomize"]
try:
    import sitecustomize  # the user's own, which ours stood before
except ImportError:
    pass
"""


def _tests(junit: Path) -> dict[str, str]:
    if not junit.exists():
        return {}
    outcomes = {}
    for case in ElementTree.parse(junit).iter("testcase"):
        bad = [e for e in case if e.tag in ("failure", "error")]
        name = f"{case.get('classname')}::{case.get('name')}"
        skipped = any(e.tag == "skipped" for e in case)
        outcomes[name] = (bad[0].get("message") or "failed") if bad else "skipped" if skipped else "passed"
    return outcomes


def _failed(run: _Run) -> set[str]:
    return {name for name, fate in run.tests.items() if fate not in ("passed", "skipped")}


def _baseline(tests: _Tests, limit: float | None) -> tuple[float, _Run]:
    """Two runs as the file is. Raises TestsError where they fail, differ, take too long, or never load it."""
    first = tests.run(None, limit)
    second = first if first.code is None else tests.run(None, limit, record=True)
    if second.code is None:
        raise TestsError(f"the tests take more than {limit:g} s without any edit: give them a longer --limit")
    bad = [_failed(first), _failed(second)]
    flaky = sorted(bad[0] ^ bad[1])
    if flaky or (first.code == 0) != (second.code == 0):
        names = ", ".join(flaky) or "the command's exit code"
        raise TestsError(
            f"flaky without any edit: {names} passed in one of two runs and failed in the other. Mend or "
            "deselect these tests first"
        )
    if first.code != 0:
        names = ", ".join(sorted(bad[0])) or f"exit code {first.code}"
        tail = "" if bad[0] else "\n" + "\n".join(first.output.strip().splitlines()[-8:])
        raise TestsError(f"the tests fail without any edit: {names}. They must pass{tail}")
    if first.tests and all(f == "skipped" for f in first.tests.values()):
        raise TestsError("every test is skipped here: there is nothing that could catch a bug")
    if not any("loaded" in n for n in second.notes):
        raise TestsError(
            f"the tests never import {tests.target.file}: an edit of it would change nothing. Name the file "
            "that they import (an installed copy, perhaps)"
        )
    return max(first.seconds, second.seconds), second


def _must_still_pass(run: _Run) -> None:
    """A test that fails at the end without a bug has perhaps failed with one for the same reason. Raises TestsError."""
    if run.code != 0:
        names = ", ".join(sorted(_failed(run))) or ("the time limit" if run.code is None else f"exit code {run.code}")
        reason = f"{names} passed twice at the beginning and failed at the end. What it caught may be no catch"
        raise TestsError(f"flaky without any edit: {reason}, and there is no score. Mend or deselect these tests first")


def _fate(run: _Run) -> Fate:
    """A test that fails by an assertion, or hangs, has caught the bug; a bug that only raises shows by itself."""
    if run.code == 0:
        return "survived"
    if run.code is None:
        return "caught"
    messages = [m for m in run.tests.values() if m not in ("passed", "skipped")]
    if messages:
        return "caught" if any(_ASSERTS.match(m) for m in messages) else "raised"
    return "caught" if run.code > 0 and _ASSERTS.search(run.output) else "raised"


def mutate(
    kernel: str,
    command: str,
    sample: int | None = SAMPLE,
    seed: int = 0,
    limit: float | None = None,
    interpret: bool = False,
    progress: Callable[[int, int, str], None] | None = None,
) -> Outcome:
    """Run the tests on mutants of a kernel until ``sample`` are judged (None: on all). One that only raises is not.

    kernel: ``file.py:function``, a jitted function or a launcher of some. command: what runs the tests. limit: seconds
    a run; None: ten times what the tests take, at least 30. interpret: run them with TRITON_INTERPRET=1. Raises
    TestsError where the tests fail or are flaky without any edit.
    """
    began, target = time.monotonic(), target_of(kernel)
    command_of(command)
    if sample is not None and sample < 1:
        raise ArgumentError("mutate", "--sample", sample, "1 or more")
    if limit is not None and not 0 < limit < math.inf:
        raise ArgumentError("mutate", "--limit", limit, "seconds above 0")
    possible, kernels = edits_of(target)
    wanted = len(possible) if sample is None else min(sample, len(possible))
    outcome = Outcome(kernel, command, seed, len(possible))
    text = text_of(target.file)
    with tempfile.TemporaryDirectory(prefix="ferryman-mutate-") as name:
        tests = _Tests(target, command, Path(name), interpret, kernels)
        seconds, plain = _baseline(tests, limit)
        longest = limit or max(30.0, 10 * seconds)
        for edit in spread(possible, len(possible), seed):
            if outcome.ran - outcome.raised == wanted:
                break
            run = tests.run(edit, longest)
            fate, outcome.ran = _fate(run), outcome.ran + 1
            setattr(outcome, fate, getattr(outcome, fate) + 1)
            outcome.by_operator.setdefault(edit.operator, dict.fromkeys(_FATES, 0))[fate] += 1
            row = {"operator": edit.operator, "function": edit.function, "line": edit.line, "change": edit.note}
            outcome.mutants.append({**row, "fate": fate})
            if fate == "survived":
                survivor = Survivor(edit.operator, edit.function, edit.line, edit.diff(text))
                answer = revealed(target, tests.record, edit, Path(name) / f"answers{outcome.ran}")
                outcome.equal += "equal" in answer and bool(answer["equal"])
                survivor.revealed = words(answer)
                survivor.tolerances = tolerances(plain.notes, run.notes)
                outcome.survivors.append(survivor)
            if progress is not None:
                counts = f"{outcome.caught} caught, {outcome.survived} survive, {outcome.raised} raise"
                progress(outcome.ran if sample is None else outcome.ran - outcome.raised, wanted, counts)
        _must_still_pass(tests.run(None, longest))
    outcome.seconds = round(time.monotonic() - began, 1)
    return outcome
