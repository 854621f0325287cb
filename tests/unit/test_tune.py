"""The tuner: chooses the fastest that is right, survives candidates that crash or hang, resumes; and its check."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import json
import logging
import math
import os
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import filelock
import pytest
import torch

import ferryman
from ferryman import ops, settings
from ferryman.cli import calls, doctor, output
from ferryman.cli import tune as cli_tune
from ferryman.device_profiles import detect, profile
from ferryman.dispatch import (
    cost,
    lockfile,
    lockfile_document,
    lockfile_entry,
    rank,
    registry,
    select,
    state,
    whole_file,
)
from ferryman.errors import LockfileError, UnknownName
from ferryman.ops.menu import Implementation
from ferryman.porting import tune as tuning
from ferryman.porting.bench import clock, condition, contender, grid, peers, rotation, runner
from ferryman.porting.inputs.cases import specs_of
from ferryman.porting.running.timing import standard_case
from ferryman.porting.tune import right, tuner, worker
from tests import lines
from tests.cli.run import ferryman as command
from tests.unit import tune_planted

WORKER = [sys.executable, str(Path(tune_planted.__file__))]
CPU = detect("cpu")
SILU = ops.silu_mul.primitive


@pytest.fixture
def planted(monkeypatch: pytest.MonkeyPatch) -> None:
    tune_planted.plant(monkeypatch.setattr)


def tune(path: Path, *names: str, **more: Any) -> list[tuning.Outcome]:
    given = {"device": "cpu", "dtype": torch.float32, "silence": 60.0, "command": WORKER} | more
    return tuning.tune(path, ["silu_mul"], names, **given)


def test_the_fastest_that_is_right_is_written_and_the_others_with_their_reasons(planted: None, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    outcomes = tune(path, "torch", "slow", "wrong", "crash", "raises", "late")
    assert [o.result for o in outcomes] == ["written"] * 2
    for one in outcomes:
        entry = one.entry
        assert entry is not None and entry.implementation == "torch"
        by = {c.implementation: c for c in entry.candidates}
        assert set(by) == {"torch", "slow", "wrong", "crash", "raises", "late"}
        slow, fast = by["slow"].seconds, by["torch"].seconds
        assert slow is not None and fast is not None and slow > 1e-3 > fast
        assert "relative root mean square" in str(by["wrong"].error) and by["raises"].error == "RuntimeError: no room"
        for name in ("crash", "late"):
            assert "ended with code 11: something about a fault" in str(by[name].error)
    # the file holds them under the keys that dispatch looks up
    document = lockfile_document.load(path)
    assert len(document.choices["silu_mul"]) == 2 and lockfile_document.differing(document, CPU) == []


@pytest.mark.parametrize("where", ["everywhere", "on the timed inputs", "where the definition fails, too"])
def test_a_default_that_is_wrong_is_not_what_the_others_are_judged_by(
    where: str, planted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = registry.launcher

    def spoiled(line: Implementation) -> Any:
        right_one = launcher(line)
        if line.name != "torch":
            return right_one
        return lambda gate, *rest: (
            right_one(gate, *rest) * (1.5 if where == "everywhere" or len(gate) != standard else 1)
        )

    monkeypatch.setattr(registry, "launcher", spoiled)
    first, case = tune_planted.cases(SILU, "small", torch.device("cpu"))
    standard = first.args["gate"].shape[0]
    assert case.args["gate"].shape[0] != standard
    plan = runner.Plan(torch.device("cpu"), CPU, torch.float32, (), ("torch", "definition"), (), 0)
    right.standard("silu_mul", torch.float32, 0, torch.device("cpu"))
    op = SILU if where != "where the definition fails, too" else dataclasses.replace(SILU, body=_no_memory)
    cell = worker.measure(plan, op, case, ["torch", "definition"], {}, lambda name: None)
    if op is SILU:
        assert list(cell["trials"]) == ["definition"] and list(cell["errors"]) == ["torch"]
        assert "relative root mean square" in cell["errors"]["torch"]
        alone = worker.measure(plan, op, case, ["torch"], {}, lambda name: None)
        # one that agrees with itself alone: only where the standard case tells
        assert list(alone["trials"]) == ([] if where == "everywhere" else ["torch"])
    else:
        assert cell["trials"] == {} and len(cell["errors"]) == 2
        assert all("is not known: the definition gives MemoryError: too large" in e for e in cell["errors"].values())


def _no_memory(*args: Any) -> Any:
    raise MemoryError("too large")


def test_one_that_was_killed_once_is_not_to_blame(
    planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRYMAN_TEST_NOTES", str(tmp_path / "mark"))
    entry = tune(tmp_path / "lock.json", "killed", "slow")[0].entry
    assert (tmp_path / "mark").exists() and entry is not None
    assert entry.implementation == "killed" and [c.error for c in entry.candidates] == [None, None]


def test_a_worker_ends_with_its_tuner_and_obeys_no_request_of_the_users(
    planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRYMAN_BACKEND", "triton")  # which no CPU has
    (tmp_path / "random.py").write_text("raise SystemExit('a module of the folder that the tuner runs in')\n")
    given = [os.path.abspath(p) for p in os.environ.get("PYTHONPATH", "").split(os.pathsep) if p]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(given))
    monkeypatch.chdir(tmp_path)
    entry = tune(tmp_path / "lock.json", "slow")[0].entry
    assert entry is not None and entry.implementation == "slow"
    job = {
        "grid": "small",
        "device": "cpu",
        "dtype": "float32",
        "seed": 0,
        "cells": [["silu_mul", "ragged", ["hang"], {}]],
    }
    case = tune_planted.cases(SILU, "small", torch.device("cpu"))[0].name
    job["cells"][0][1] = case  # type: ignore[index]
    process = subprocess.Popen(
        WORKER, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=tuner._environment()
    )
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(job) + "\n")
    process.stdin.flush()
    assert [json.loads(process.stdout.readline()) for _ in range(2)] == [{"start": None}, {"start": "hang"}]
    process.stdin.close()  # as the system does for a tuner that was killed
    assert process.wait(30) == 1


def test_a_failed_candidate_is_told_also_of_an_entry_that_is_kept(planted: None, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    tune(path, "torch", "raises")
    outcomes = tune(path, "torch", "raises")
    assert [o.result for o in outcomes] == ["kept"] * 2
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        cli_tune._print(outcomes, "float32")
    assert printed.getvalue().count(": raises failed: RuntimeError: no room; --again tries it once more") == 2


def test_what_was_measured_before_is_not_lost_to_a_narrower_tuner(planted: None, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    whole = tune(path, "torch", "slow")[0].entry
    assert whole is not None and whole.implementation == "torch"
    assert [o.entry.implementation for o in tune(path, "slow", again=True) if o.entry] == ["torch"] * 2
    tune(path, "definition")
    entries = lockfile_document.load(path).choices["silu_mul"]
    entry = next(e for e in entries.values() if e.case == whole.case)
    assert set(entry.times) == {"torch", "slow", "definition"} and entry.times["torch"] == whole.times["torch"]
    assert entry.seconds == min(entry.times.values()) or entry.implementation == "torch"
    assert entry.times["slow"] != whole.times["slow"]  # which was measured again


def test_candidates_of_other_kernels_are_not_joined() -> None:
    old = _entry(implementation="slow", seconds=1e-6, kernels="0" * 64)
    new = _entry(seconds=2e-6)
    assert lockfile_entry.joined(old, new, ()) == new
    old = _entry(implementation="slow", seconds=1e-6)
    both = lockfile_entry.joined(old, new, ())
    assert (both.implementation, both.seconds, set(both.times)) == ("slow", 1e-6, {"torch", "slow"})
    many = [{"implementation": "torch", "configuration": {"name": f"c{i}"}, "seconds": 1e-5} for i in range(64)]
    crowd = _entry(candidates=[*many[1:], {"implementation": "torch", "seconds": 1e-6}])
    assert len(lockfile_entry.joined(crowd, new, ()).candidates) == 64
    for other in ({"case": "512x64 float32"}, {"bytes": 1e6}):  # of another size of the region
        assert lockfile_entry.joined(old, _entry(seconds=2e-6, **other), ()) == _entry(seconds=2e-6, **other)
    near = lockfile_entry.joined(_entry(implementation="slow", seconds=1.995e-6), new, ("torch", "slow"))
    assert near.implementation == "torch"  # within the noise: by preference


def test_an_output_that_is_empty_ends_no_process(planted: None, tmp_path: Path) -> None:
    """linear_backward gives an empty gradient for a bias that is None: the candidate was recorded as a crash."""
    path = tmp_path / "lock.json"
    given = {"device": "cpu", "dtype": torch.float32, "silence": 60.0, "command": WORKER}
    outcomes = tuning.tune(path, ["linear_backward"], ["torch", "definition"], **given)  # type: ignore[arg-type]
    assert [one.case for one in outcomes] == ["square", "ragged"]  # without a bias, and with one
    for one in outcomes:
        assert one.entry is not None and [c.error for c in one.entry.candidates] == [None, None]


def rename(path: Path, old: str, new: str) -> None:
    """A configuration in a lockfile, sealed as if it had been measured under that name."""
    document = lockfile_document.Lockfile.model_validate_json(path.read_text().replace(f'"{old}"', f'"{new}"'))
    for op, entries in document.choices.items():
        entries.update({region: entry.sealed(op, region) for region, entry in entries.items()})
    path.write_text(document.model_dump_json())


def test_of_an_implementation_s_configurations_the_fastest_is_written_and_run(
    planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock.json"
    entry = next(o.entry for o in tune(path, "forms", "slow"))
    assert entry is not None and (entry.implementation, entry.configuration) == ("forms", {"name": "narrow"})
    tried = {(c.implementation, c.configuration.get("name")): c for c in entry.candidates}
    assert set(tried) == {("forms", None), ("forms", "narrow"), ("forms", "broken"), ("slow", None)}
    assert tried["forms", "broken"].error == "RuntimeError: no such registers"
    assert entry.times["forms"] == tried["forms", "narrow"].seconds
    # dispatch hands the launcher the name, and takes none that the implementation does not list for the call
    args = [
        torch.randn(*spec.shape) for spec in tune_planted.cases(SILU, "small", torch.device("cpu"))[0].args.values()
    ]
    target = select.target_of(CPU, "narrow")
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(path))
    seen: list[Any] = []
    launcher = registry.launcher
    monkeypatch.setattr(
        registry, "launcher", lambda line: lambda *given: seen.append(given[-1]) or launcher(line)(*given)
    )
    try:
        for name in ("narrow", "hopeless", "gone", "Not An Identifier"):
            rename(path, "narrow", name)
            ferryman.reload()
            decision = select.select(SILU, args, CPU, state.State({}, False))
            listed = name in ("narrow", "hopeless")
            assert decision.implementation.name == "forms" and decision.configuration == (name if listed else ""), name
            if name == "narrow":
                ops.silu_mul(*args)
                assert seen == [target]
                explanation = ferryman.explain("silu_mul", *args)
                assert {r.implementation: r.configuration for r in explanation.rows if r.configuration} == {
                    "forms": "narrow"
                }
                assert "chosen, measured in this region, narrow: " in str(explanation)
            rename(path, name, "narrow")
    finally:
        monkeypatch.undo()
        ferryman.reload()


def test_a_candidate_that_hangs_costs_the_time_limit_and_no_more(planted: None, tmp_path: Path) -> None:
    outcomes = tune(tmp_path / "lock.json", "hang", "torch", silence=4.0)
    assert [o.entry.implementation for o in outcomes if o.entry is not None] == ["torch"] * 2
    errors = [c.error for o in outcomes for c in o.entry.candidates if c.seconds is None]  # type: ignore[union-attr]
    reason = "nothing within 4 s (time limit)"
    # one limit for the op, not one a case
    assert errors == [reason, f"left out: on {outcomes[0].case} it gave {reason}"]


def test_quick_ends_when_its_time_is_over_and_blames_nobody(planted: None, tmp_path: Path) -> None:
    path, began = tmp_path / "lock.json", time.monotonic()
    outcomes = tune(path, "hang", "torch", quick=6.0)
    assert time.monotonic() - began < 20.0
    assert all(o.left and o.entry is None for o in outcomes) and len(outcomes) == 2
    assert not path.exists()


def test_quick_takes_something_else_where_it_is_faster(
    planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rank, "rank", lambda *_: [rank.Ranked("slow"), rank.Ranked("torch")])
    outcomes = tune(tmp_path / "lock.json", "slow", "torch", quick=120.0)
    assert [o.entry.implementation for o in outcomes if o.entry is not None] == ["torch"] * 2


def test_quick_keeps_untuned_dispatchs_choice_in_a_tie(monkeypatch: pytest.MonkeyPatch) -> None:
    args = grid.on_meta(SILU, grid.cases(SILU, "small", torch.device("cpu"))[0], torch.float32)
    monkeypatch.setattr(rank, "rank", lambda *_: [rank.Ranked("b"), rank.Ranked("a"), rank.Ranked("b", "wide", False)])
    (cell,) = tuner._quick_cell(SILU, "case", args, ["a", "b"], CPU)
    assert cell.names == ["b", "a"] and cell.bytes > 0
    monkeypatch.setattr(rank, "rank", lambda *_: [rank.Ranked("b")])
    assert tuner._quick_cell(SILU, "case", args, ["a", "b"], CPU) == []


def test_quick_goes_round_the_ops_the_largest_first() -> None:
    other = ops.softmax.primitive
    cells = [
        tuner._Cell(op, name, [], bytes=size)
        for op, name, size in (
            (SILU, "small", 1.0),
            (SILU, "large", 3.0),
            (other, "least", 0.5),
            (other, "more", 2.0),
            (SILU, "middle", 2.5),
        )
    ]
    assert [c.case for c in tuner._largest_of_each_op_first(cells)] == ["large", "more", "middle", "least", "small"]
    cells.append(tuner._Cell(ops.gelu_mul.primitive, "takes half a minute", [], bytes=2.0**35))
    assert tuner._largest_of_each_op_first(cells)[-1].case == "takes half a minute"


@pytest.mark.parametrize("name", registry.primitives())
def test_what_runs_anywhere_is_right_by_the_tuner_s_own_rule(name: str) -> None:
    """Where the standard case is harder than the rule allows, every candidate would be refused."""
    op = registry.primitive(name)
    case = standard_case(op)
    if case is not None and sum(math.prod(spec.shape) for spec in specs_of(case)) > 2**24:
        pytest.skip("in float64 its standard case takes minutes or gigabytes here")
    reference = right.standard(name, torch.bfloat16, 0, torch.device("cpu"))
    if reference is None:
        return  # its candidates are compared on the timed inputs
    _, args, exact = reference
    with torch.no_grad():
        result = op.namespace["_resolve"](*rotation.spared(op, args))
    assert peers.wrong(op, args, result, exact) is None


def test_a_device_of_which_nothing_was_measured_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    monkeypatch.setattr(handler, "handle", records.append)
    monkeypatch.setattr(logging.getLogger(), "handlers", [handler])
    monkeypatch.delenv("FERRYMAN_LOCKFILE")
    monkeypatch.setattr(lockfile, "_reported", set())
    settings.forget()
    for name in ("cpu", "h100", "h200", "mi300x", "mi300x"):
        lockfile.tell_untuned(profile(name))
    assert [r.getMessage().splitlines() for r in records] == [
        [
            "ferryman: nothing was measured on mi300x, choices are predicted; `ferryman tune --quick` measures them in "
            "three minutes, FERRYMAN_LOCKFILE=none leaves it so"
        ]
    ]
    records.clear()
    monkeypatch.setenv("FERRYMAN_LOCKFILE", "none")
    monkeypatch.setattr(lockfile, "_reported", set())
    settings.forget()
    lockfile.tell_untuned(profile("mi300x"))
    assert not records


def test_candidates_run_once_ahead_in_processes_of_their_own(
    planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    monkeypatch.setenv("FERRYMAN_TEST_NOTES", str(notes))
    monkeypatch.setattr(tuner, "AHEAD_CELLS", 1)
    outcomes = tune(tmp_path / "lock.json", "noted", "torch", ahead=2)
    # each of the two cells was run by another process before the one that measured them both
    by = [line.split() for line in notes.read_text().splitlines()]
    pids = list(dict.fromkeys(pid for pid, _ in by))
    ahead = {pid: [size for p, size in by if p == pid] for pid in pids[:2]}
    assert len(pids) >= 3 and sorted(map(len, ahead.values())) == [2, 2]  # the standard case, and the cell's
    assert len({sizes[-1] for sizes in ahead.values()}) == 2
    assert all(one.entry is not None for one in outcomes)
    # one that hangs costs the limit, one that crashes its process; the measurement records them
    monkeypatch.setattr(tuner, "AHEAD_SECONDS", 8.0)
    start = time.monotonic()
    again = tune(tmp_path / "other.json", "crash", "hang", "torch", ahead=2, silence=4.0)
    assert time.monotonic() - start < 60
    for one in again:
        assert one.entry is not None and one.entry.implementation == "torch"
        assert {c.implementation for c in one.entry.candidates if c.error} == {"crash", "hang"}
    # on a CPU nothing is compiled ahead unless asked
    notes.unlink()
    assert all(o.entry is not None for o in tune(tmp_path / "third.json", "noted", "torch"))
    assert len({line.split()[0] for line in notes.read_text().splitlines()}) == 1


def test_where_nothing_runs_nothing_is_written(planted: None, tmp_path: Path) -> None:
    outcomes = tune(tmp_path / "lock.json", "raises")
    assert all(
        o.entry is None and o.result.startswith("no candidate ran and was right: raises: RuntimeError")
        for o in outcomes
    )
    assert not (tmp_path / "lock.json").exists()


class _Ended(subprocess.Popen[str]):
    """A process that is given its job when it has ended."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.wait()


@pytest.mark.parametrize("process", [subprocess.Popen, _Ended], ids=["given a job", "given none"])
def test_a_worker_that_cannot_start_ends_the_run_and_not_in_a_loop(
    planted: None, tmp_path: Path, process: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuner.subprocess, "Popen", process)
    outcomes = tune(
        tmp_path / "lock.json", "torch", command=[sys.executable, "-c", "raise SystemExit('no such thing')"]
    )
    assert [o.entry for o in outcomes] == [None, None]
    assert all("ended with code 1: no such thing" in o.result for o in outcomes)


def test_what_stands_is_kept_until_its_kernels_change(
    planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lock.json"
    first = tune(path, "torch")
    assert [o.result for o in tune(path, "torch", command=["/nonexistent"])] == ["kept"] * 2
    assert [o.result for o in tune(path, "torch", again=True)] == ["written"] * 2
    assert [o.result for o in tune(path, "torch", dtype=torch.float16)] == ["written"] * 2
    assert len(lockfile_document.load(path).choices["silu_mul"]) == 4
    monkeypatch.setattr(lockfile_document, "digest", lambda op, lines=None: "0" * 64)
    assert not tuning.check(path, CPU).holds and len(tuning.check(path, CPU).stale) == 4
    again = tune(path, "torch")
    assert [o.result for o in again] == ["written"] * 2 and first[0].entry != again[0].entry


def test_dispatch_follows_what_was_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    x = torch.randn(8, 16)
    entry = _entry(implementation="definition")
    lockfile_document.record(path, CPU, {"silu_mul": {lockfile.region(SILU, (x, x)): entry}})
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(path))
    ferryman.reload()
    with ferryman.trace() as seen:
        ops.silu_mul(x, x)
    assert seen.calls == {("silu_mul", "definition"): 1}
    monkeypatch.undo()
    ferryman.reload()


def test_the_packages_lockfile_is_in_force_without_a_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, x = tmp_path / "cpu.lock.json", torch.randn(8, 16)
    entry = _entry(implementation="definition")
    lockfile_document.record(path, CPU, {"silu_mul": {lockfile.region(SILU, (x, x)): entry}})
    monkeypatch.setattr(lockfile, "shipped", lambda profile: path)
    monkeypatch.delenv("FERRYMAN_LOCKFILE", raising=False)

    def served() -> str:
        ferryman.reload()
        with warnings.catch_warnings(), ferryman.trace() as seen:
            warnings.simplefilter("error")
            ops.silu_mul(x, x)
        return next(iter(seen.calls))[1]

    assert served() == "definition" and doctor._choices(CPU)["hold"] == "1 of 1"
    assert lockfile.entries("silu_mul", CPU) and not lockfile.covers("silu_mul", CPU)  # torch.compile traces as before
    monkeypatch.setenv("FERRYMAN_LOCKFILE", "none")
    assert served() == "torch" and doctor._choices(CPU)["file"] is None
    monkeypatch.delenv("FERRYMAN_LOCKFILE")
    path.write_text(path.read_text().replace('"torch": "', '"torch": "1.'))  # not of this release: no word at each call
    assert served() == "torch"
    row = doctor._choices(CPU)
    assert row["hold"] == "0 of 1" and row["ignored"] and "torch is" in row["ignored"]
    monkeypatch.undo()
    ferryman.reload()


def test_lockfiles_of_the_package_are_whole() -> None:
    folder = Path(ferryman.__file__).parent / "device_profiles" / "data"
    for path in folder.glob("*.lock.json.gz"):
        document = lockfile_document.load(path)
        assert document.choices and f"{document.stamp['profile']}.lock.json.gz" == path.name
        assert all(document.stamp[fact] for fact in ("arch", "units", "torch", "triton", "cuda", "driver"))
        _, others = lockfile_document.holding(document)
        assert not [one for one in others if "its kernels changed" not in one[2]]


def test_untrusted_times_are_not_written(tmp_path: Path) -> None:
    cell = {
        "op": "silu_mul",
        "case": "c",
        "dtype": "float32",
        "key": "k",
        "noise": 0.0,
        "trials": {"torch": [1e-6]},
        "bytes": 1.0,
        "flops": 1.0,
        "errors": {},
        "untrusted": ["clocks were lowered: hardware thermal slowdown"],
    }
    outcome = tuner._written(tmp_path / "lock.json", CPU, cell, ["torch"])
    assert outcome.entry is None and "hardware thermal slowdown" in outcome.result
    assert not (tmp_path / "lock.json").exists()


DYING = """
import json, os, sys
json.loads(sys.stdin.readline())
print('{{"start": "torch"}}', flush=True)
{}
os._exit(9)
"""


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        (r"os.write(2, b'\xff\xfe a crash')", "ended with code 9: \ufffd\ufffd a crash"),
        (r"os.write(1, b'{\"start\": nu')", "ended with code 9: it said nothing"),
        (r"os.write(1, b'\xff\xfe\n')", "ended with code 9: it said nothing"),
    ],
)
def test_a_worker_that_dies_in_the_middle_of_a_word_is_one_that_dies(how: str, reason: str, tmp_path: Path) -> None:
    cell = tuner._Cell(SILU, "x", ["torch"])
    written: list[Any] = []
    for _ in range(tuner.DEATHS):
        assert tuner._session({}, [cell], 60.0, [sys.executable, "-c", DYING.format(how)], written.append) == 0
    assert reason in cell.errors["torch"] and written == []
    for _ in range(tuner.DEATHS):  # at one that it was told to leave out: no end, else
        done = tuner._session({}, [cell], 60.0, [sys.executable, "-c", DYING.format(how)], written.append)
    assert done == 1 and reason in written[0]["lost"]


def test_what_a_worker_says_is_not_written_as_it_is(planted: None, tmp_path: Path) -> None:
    case = tune_planted.cases(SILU, "small", torch.device("cpu"))[0].name
    cell = {
        "op": "silu_mul",
        "case": case,
        "dtype": "float32",
        "key": REGION,
        "noise": 0.0,
        "bytes": 1.0,
        "flops": 1.0,
        "trials": {"torch": [1e-3], "slow": [1e-12], "noted": [float("nan")], "late": []},
        "errors": {"wrong": "off \udcff\x1b[31m"},
        "untrusted": [],
    }
    says = f"import sys, json; sys.stdin.readline(); print(json.dumps(dict(cell=json.loads({json.dumps(cell)!r}))))"
    outcomes = tune(tmp_path / "lock.json", "torch", "slow", "noted", "wrong", command=[sys.executable, "-c", says])
    entry = outcomes[0].entry
    assert entry is not None and entry.times == {"torch": 1e-3}
    errors = {c.implementation: c.error for c in entry.candidates if c.error is not None}
    assert errors == {
        "slow": "its time is 1e-12 s; required: 1e-09 to 1e+06",
        "noted": "its time is nan s; required: 1e-09 to 1e+06",
        "wrong": "off \ufffd\ufffd[31m",
    }
    assert lockfile_document.load(tmp_path / "lock.json").choices["silu_mul"]


def test_a_worker_that_dies_once_outside_any_candidate_is_tried_again(planted: None, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    dies = f"""
import os, pathlib, runpy, sys
if not os.path.exists({str(mark)!r}):
    pathlib.Path({str(mark)!r}).touch()
    sys.stdin.readline()
    print('{{"start": null}}', flush=True)
    os.kill(os.getpid(), 9)
sys.path.insert(0, {str(Path(tune_planted.__file__).parents[2])!r})
sys.argv = [{WORKER[1]!r}]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    outcomes = tune(tmp_path / "lock.json", "torch", command=[sys.executable, "-c", dies])
    assert mark.exists() and [o.result for o in outcomes] == ["written"] * 2


def test_a_candidate_that_breaks_in_the_trials_leaves_the_others(
    planted: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(tune_planted.KERNELS, "late", _tires())
    tune_planted.plant(monkeypatch.setattr)
    case = tune_planted.cases(SILU, "small", torch.device("cpu"))[0]
    plan = runner.Plan(torch.device("cpu"), CPU, torch.float32, (), ("late", "torch"), (), 0)
    monkeypatch.setattr(worker, "promising", lambda racing, starting: racing)
    cell = worker.measure(plan, SILU, case, ["late", "torch"], {}, lambda name: None)
    assert cell["errors"] == {"late": "RuntimeError: tired"} and len(cell["trials"]["torch"]) == contender.TRIALS
    assert not cell["trials"]["late"] and not cell["untrusted"]
    assert cell["noise"] is not None  # the one that fails was the one timed twice: another was, in another turn


def _tires() -> Any:
    left = [12]

    def kernel(gate: torch.Tensor, up: torch.Tensor, *_: Any) -> torch.Tensor:
        left[0] -= 1
        if left[0] < 0:
            raise RuntimeError("tired")
        return torch.nn.functional.silu(gate) * up

    return kernel


def test_a_choice_in_too_much_noise_is_not_written(tmp_path: Path) -> None:
    cell = {
        "op": "silu_mul",
        "case": "x",
        "dtype": "float32",
        "key": REGION,
        "noise": 3.0,
        "bytes": 1.0,
        "flops": 1.0,
        "trials": {"torch": [1e-3], "definition": [1e-5]},
        "errors": {},
        "untrusted": [],
    }
    outcome = tuner._written(tmp_path / "lock.json", CPU, cell, ["torch", "definition"])
    assert (outcome.entry, outcome.result) == (None, "not written: the noise is 300%; required: at most 20%")
    outcome = tuner._written(tmp_path / "lock.json", CPU, cell | {"noise": 0.2}, ["torch", "definition"])
    assert outcome.entry is not None and outcome.entry.implementation == "definition"


def test_an_entry_under_a_moved_region_is_measured_again(planted: None, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    first, second = (o.entry for o in tune(path, "torch"))
    assert first is not None and second is not None
    raw = json.loads(path.read_text())
    entries = raw["choices"]["silu_mul"]
    region = next(r for r, e in entries.items() if e["case"] == first.case)
    moved = region.replace("gate=float32[2^", "gate=float32[2^1")  # a width or rows that the case has not
    entries[moved] = entries.pop(region)
    path.write_text(json.dumps(raw))
    outcomes = tune(path, "torch")
    assert sorted((o.case, o.result) for o in outcomes) == sorted(
        (e.case.split(" ")[0], "written" if e is first else "kept") for e in (first, second)
    )
    assert region in lockfile_document.load(path).choices["silu_mul"]


def test_regions_are_known_before_the_measurement() -> None:
    """On meta tensors as on inputs, and as the packages' lockfiles have them."""
    recorded = {
        (path.name.split(".")[0], op, entry.case): region
        for path in (Path(ferryman.__file__).parent / "device_profiles" / "data").glob("*.lock.json.gz")
        for op, entries in lockfile_document.load(path).choices.items()
        for region, entry in entries.items()
    }
    for op in registry.primitives().values():
        case = registry.evidence(op).cases()[0]
        here = grid.inputs(op, case, torch.float32, 0, torch.device("cpu"))
        assert lockfile.region(op, grid.on_meta(op, case, torch.float32)) == lockfile.region(op, here), op.name
        for case in grid.cases(op, "full", torch.device("cuda")):
            region = lockfile.region(op, grid.on_meta(op, case, torch.bfloat16))
            for device in ("h100-sxm", "h200"):
                assert recorded.get((device, op.name, f"{case.name} bfloat16"), region) == region


@pytest.mark.parametrize("moving", [0, 2, 9])
def test_trials_on_moving_clocks_are_repeated_on_the_warm_device(moving: int, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, ran = [["the clock moved"]] * moving, []
    trials = contender.trials
    monkeypatch.setattr(contender, "distrust", lambda *_: answers.pop() if answers else [])
    monkeypatch.setattr(
        contender, "trials", lambda kept, starting, turns: ran.append(turns) or trials(kept, starting, turns)
    )
    monkeypatch.setattr(clock, "CPU_SECONDS", 1e-3)
    plan = runner.Plan(torch.device("cpu"), CPU, torch.float32, (), ("torch",), (), 0)
    case = next(case for case in registry.evidence(SILU).cases() if case.tier == "small")
    cell = worker.measure(plan, SILU, case, ["torch"], {}, lambda name: None)
    assert ran == [1, 9, 9][: moving + 1] and len(cell["trials"]["torch"]) == contender.TRIALS
    assert cell["untrusted"] == (["the clock moved"] if moving >= contender.ATTEMPTS else [])


def test_clocks_that_sink_for_all_alike_leave_the_choice_as_it_is() -> None:
    sinking = condition.steadied([[1.0, 1.2, 1.4], [2.0, 2.4, 2.8]])
    assert sinking[0] == pytest.approx([0.5**0.5] * 3) and sinking[1] == pytest.approx([2**0.5] * 3)
    (steady, moved) = condition.steadied([[1.0, 1.0], [1.0, 1.44]])
    assert moved[1] / moved[0] == pytest.approx(1.2) and steady[0] / steady[1] == pytest.approx(1.2)
    assert condition.steadied([[1.0, 1.3]]) == [[1.0, 1.3]] and condition.steadied([]) == []


def test_what_the_noise_does_not_tell_apart_goes_by_preference() -> None:
    assert lockfile_entry.best({"cuda": 1.005, "triton": 1.0}, 0.0) == "cuda"
    assert lockfile_entry.best({"cuda": 1.02, "triton": 1.0}, 0.0) == "triton"
    assert lockfile_entry.best({"cuda": 1.02, "triton": 1.0}, 0.05) == "cuda"


def test_files_that_are_not_this_machines_are_found_before_the_work(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    lockfile_document.record(path, CPU, {})
    path.write_text(path.read_text().replace('"profile": "cpu"', '"profile": "h200"'))
    with pytest.raises(LockfileError, match="not of this machine"):
        tuning.tune(path, ["silu_mul"], device="cpu", command=["/nonexistent"])
    with pytest.raises(UnknownName, match="unknown backend or implementation"):
        tuning.tune(tmp_path / "other.json", ["silu_mul"], ["tritn"], device="cpu")


def test_of_more_candidates_than_eight_those_that_the_model_puts_first_are_measured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = [f"even{i}" for i in range(11)]
    backends, probe = registry.backends(), registry.probe
    ran: set[str] = set()

    def kernel(name: str) -> Any:
        return lambda gate, up, target: ran.add(name) or torch.nn.functional.silu(gate) * up

    kernels = {Implementation(op="silu_mul", name=name, where="nowhere:none"): kernel(name) for name in names}
    lines.planted(monkeypatch.setattr, kernels)
    monkeypatch.setattr(registry, "backends", lambda: {**backends, **dict.fromkeys(names, backends["torch"])})
    monkeypatch.setattr(registry, "probe", lambda name, vendor: () if name in names else probe(name, vendor))
    monkeypatch.setattr(clock, "CPU_SECONDS", 1e-3)
    predicted = {name: (1.0 if name == "even10" else 2.0, 0.03) for name in names}
    monkeypatch.setattr(cost, "predictions", lambda op, work, profile: predicted)
    plan = runner.Plan(torch.device("cpu"), CPU, torch.float32, (), tuple(names), (), 0)
    case = next(case for case in registry.evidence(SILU).cases() if case.tier == "small")
    cell = worker.measure(plan, SILU, case, names, {}, lambda name: None)
    assert set(cell["trials"]) == {"even10", *names[:7]} == ran and worker.MOST_CANDIDATES == 8
    assert cell["bytes"] > 0 and cell["flops"] > 0 and cell["errors"] == {}


def test_check_says_what_is_measured_and_what_is_predicted(tmp_path: Path) -> None:
    path, op = tmp_path / "lock.json", ops.rms_norm.primitive

    def args(rows: int) -> tuple[Any, ...]:
        return torch.empty(rows, 64, device="meta"), None, 1e-6, False

    work = cost.work_of(op, args(128))
    entry = lockfile_entry.Entry(
        implementation="torch",
        seconds=1e-6,
        kernels=lockfile_document.digest("rms_norm"),
        bytes=work.bytes,
        flops=work.flops,
        candidates=[lockfile_entry.Candidate(implementation="torch", seconds=1e-6)],
    )
    lockfile_document.record(path, CPU, {"rms_norm": {lockfile.region(op, args(128)): entry}})
    calls = [(op, args(rows)) for rows in (128, 120, 256, 1024, 2048, 8)] + [(SILU, (torch.empty(2, 2),) * 2)]
    assert tuning.covered(path, CPU, calls) == [
        tuning.Covered("rms_norm", measured=2, predicted=2, neither=2),
        tuning.Covered("silu_mul", neither=1),
    ]
    path.write_text(path.read_text().replace('"profile": "cpu"', '"profile": "h200"'))
    assert tuning.covered(path, CPU, calls)[0] == tuning.Covered("rms_norm", neither=6)


def test_the_command_checks_a_lockfile(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    arguments = ("tune", "--check", "--device", "cpu", "--lockfile", str(path))
    assert command(*arguments).code == 2  # there is none
    lockfile_document.record(path, CPU, {})
    done = command(*arguments)
    assert done.code == 1 and "0 of 0 entries hold here; required: one or more" in done.out
    entry = _entry()
    region = "gate=float32[2^4,64]c up=float32[2^4,64]c"
    lockfile_document.record(path, CPU, {"silu_mul": {region: entry}})
    done = command(*arguments)
    assert done.code == 0 and "1 of 1 entries hold here" in done.out
    raw = json.loads(path.read_text())
    raw["choices"]["silu_mul"][region]["kernels"] = "0" * 64
    path.write_text(json.dumps(raw))
    done = command(*arguments)
    assert done.code == 1 and "its kernels changed" in done.out and "0 of 1 entries hold here" in done.out
    done = command(*arguments, "--json")
    report = json.loads(done.out)
    assert done.code == 1 and (report["holds"], report["entries"], report["holding"]) == (False, 1, 0)
    assert [(one["op"], one["region"]) for one in report["stale"]] == [("silu_mul", region)]
    raw["stamp"]["torch"] = "1.0"
    path.write_text(json.dumps(raw))
    done = command(*arguments)
    assert done.code == 1 and "ignored as a whole: torch is '1.0', here" in done.out
    assert command(*arguments, "--again").code == 2


REGION = "gate=float32[2^4,64]c up=float32[2^4,64]c"


def _entry(**more: Any) -> lockfile_entry.Entry:
    fields = {"implementation": "torch", "seconds": 1e-6, "kernels": lockfile_document.digest("silu_mul"), **more}
    own = {key: fields[key] for key in ("implementation", "seconds", "configuration") if key in fields}
    return lockfile_entry.Entry.model_validate({"candidates": [own], **fields})


EDITS: dict[str, tuple[Any, str]] = {
    "a choice that was not tried": ({"implementation": "definition"}, "required: a timed candidate"),
    "a configuration that was not tried": ({"configuration": {"name": "wide"}}, "required: a timed candidate"),
    "another key of a configuration": ({"configuration": {"nme": "wide"}}, "configuration"),
    "a time that is text": ({"seconds": "0.5"}, "seconds"),
    "a time that is a flag": ({"seconds": True}, "seconds"),
    "a time that no call takes": ({"seconds": 5e-324}, "seconds: Input should be greater than or equal to"),
    "noise that any choice lies within": ({"noise": 3.0}, "noise: Input should be less than or equal to 0.2"),
    "work without end": ({"bytes": 1e308}, "bytes: Input should be less than or equal to"),
    "nothing that was timed": ({"candidates": []}, "no candidates; required: the times of what was measured"),
    "the slower of two": (
        {"candidates": [{"implementation": n, "seconds": s} for n, s in (("torch", 1e-6), ("triton", 5e-7))]},
        "required: the least time of all, 5e-07 s",
    ),
    "another time than its own": ({"seconds": 2e-6}, "among the candidates 1e-06 s; required: the same"),
    "a candidate that stands twice": (
        {"candidates": [{"implementation": "torch", "seconds": 1e-6}] * 2},
        "a candidate stands twice",
    ),
    "a candidate with a time and an error": (
        {"candidates": [{"implementation": "torch", "seconds": 1e-6, "error": "no room"}]},
        "required: one of both",
    ),
}


@pytest.mark.parametrize("what", EDITS)
def test_a_hand_edited_entry_is_told_and_not_obeyed(what: str, tmp_path: Path) -> None:
    path, (edit, reason) = tmp_path / "lock.json", EDITS[what]
    entry = _entry(candidates=[{"implementation": "torch", "seconds": 1e-6}])
    lockfile_document.record(path, CPU, {"silu_mul": {REGION: entry}})
    raw = json.loads(path.read_text())
    raw["choices"]["silu_mul"][REGION] |= edit
    path.write_text(json.dumps(raw))
    done = command("tune", "--check", "--device", "cpu", "--lockfile", str(path))
    assert done.code == 2 and reason in done.err and "Traceback" not in done.err


@pytest.mark.parametrize("edit", ["another choice", "moved", "the work", "no seal"])
def test_an_entry_that_is_not_as_it_was_written_does_not_hold(edit: str, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    both = [{"implementation": "torch", "seconds": 1e-6}, {"implementation": "definition", "seconds": 1.001e-6}]
    lockfile_document.record(path, CPU, {"silu_mul": {REGION: _entry(candidates=both)}})
    check = ("tune", "--check", "--device", "cpu", "--lockfile", str(path))
    assert "1 of 1 entries hold here" in command(*check).out
    raw = json.loads(path.read_text())
    entries = raw["choices"]["silu_mul"]
    if edit == "moved":
        entries[REGION.replace("2^", "2^1")] = entries.pop(REGION)
    elif edit == "another choice":  # within the noise of the best, as a choice may be
        entries[REGION] |= {"implementation": "definition", "seconds": 1.001e-6}
    else:
        entries[REGION] |= {"bytes": 1e9} if edit == "the work" else {"seal": ""}
    path.write_text(json.dumps(raw))
    done = command(*check)
    assert done.code == 1 and "0 of 1 entries hold here" in done.out
    assert "it is not as `ferryman tune` wrote it: edited, or moved" in " ".join(done.out.split())
    # and what is measured anew is not joined with it
    anew = _entry(
        implementation="definition", seconds=3e-6, candidates=[{"implementation": "definition", "seconds": 3e-6}]
    )
    kept = lockfile_document.record(path, CPU, {"silu_mul": dict.fromkeys(entries, anew)})["silu_mul"]
    assert [[c.implementation for c in entry.candidates] for entry in kept.values()] == [["definition"]]
    assert "1 of 1 entries hold here" in command(*check).out


@pytest.mark.parametrize(
    ("region", "edit", "why"),
    [
        ("gate=float32[garbage up=float32[2^4,64]c", {}, "no call of silu_mul has the region"),
        ("gate=float32[2^4,64]c", {}, "no call of silu_mul has the region"),
        ("x=float32[2^4,64]c up=float32[2^4,64]c", {}, "no call of silu_mul has the region"),
        (REGION.replace("float32", "banana"), {}, "no call of silu_mul has the region"),
        (REGION, {"configuration": {"name": "wide"}}, "no configuration"),
        (REGION, {"implementation": "cuda.flat"}, "cuda.flat does not serve cpu devices"),
        (REGION, {"case": "other bfloat16"}, "its case 'other bfloat16' is of another dtype than its region"),
    ],
)
def test_an_entry_that_no_call_can_meet_does_not_hold(region: str, edit: Any, why: str, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    lockfile_document.record(path, CPU, {"silu_mul": {region: _entry(**edit)}})
    done = command("tune", "--check", "--device", "cpu", "--lockfile", str(path))
    assert done.code == 1 and "0 of 1 entries hold here" in done.out and why in " ".join(done.out.split())


def test_scalars_of_a_region_are_those_that_dispatch_writes() -> None:
    said = "x=float32[2^4,64]c weight=None eps={} cast_before_weight={}"
    for eps, cast, holds in (
        ("x", "False", True),
        ("0", "True", True),
        ("1e-06", "False", False),
        ("x", "maybe", False),
    ):
        assert lockfile_document._describes(said.format(eps, cast), "rms_norm") is holds
    assert not lockfile_document._describes(said.format("x", "False").replace("float32[2^4,64]c", "None"), "rms_norm")
    for value, holds in (
        ("torch.int32", True),
        ("int32", False),
        ("torch.int", False),
        ("torch.torch.int32", False),
        ("torch.nn", False),
        ("None", False),
    ):
        assert lockfile_document._is_written("ScalarType", value) is holds, value
    assert lockfile_document._is_written("ScalarType?", "None")


def test_what_could_not_be_read_again_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    lockfile_document.record(path, CPU, {"silu_mul": {REGION: _entry()}})
    before = path.read_bytes()
    with pytest.raises(ValueError, match="required: a timed candidate"):
        lockfile_document.record(path, CPU, {"silu_mul": {REGION: _entry().model_copy(update={"implementation": "x"})}})
    assert path.read_bytes() == before


def test_what_is_no_file_or_of_no_kind_is_told(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")  # reading it would wait for ever
    with pytest.raises(LockfileError, match="it is no regular file") as caught:
        lockfile_document.load(tmp_path / "pipe")
    assert str(caught.value).count("cannot be read") == 1
    path = tmp_path / "lock.json"
    for text, fault in (('{"version": 3}', "has kind None, version 3; required: "), ("[]", "holds a list; required: ")):
        path.write_text(text)
        with pytest.raises(LockfileError, match=fault):
            lockfile_document.load(path)


def test_a_key_that_stands_twice_is_damage(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    lockfile_document.record(path, CPU, {"silu_mul": {REGION: _entry()}})
    path.write_text(path.read_text().rstrip().removesuffix("}") + ',"choices": {}}')
    with pytest.raises(LockfileError, match="'choices' stands twice"):
        lockfile_document.load(path)


def test_regions_are_known_as_dispatch_writes_them() -> None:
    for op in registry.primitives().values():
        for case in registry.evidence(op).cases():
            args = calls.of_case(op, case, torch.bfloat16)
            assert lockfile_document._describes(lockfile.region(op, args), op.name), case.name


def test_a_wrong_name_makes_no_file(tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    for wrong in (("--op", "softmx"), ("--implementation", "trton"), ("--dtype", "bf16", "--dtype", "f99")):
        done = command("tune", "--device", "cpu", "--lockfile", str(path), *wrong)
        assert done.code == 2 and "Traceback" not in done.err and not path.exists(), wrong


@pytest.mark.parametrize("where", ["under a file", "in a folder that nothing may write to"])
def test_a_path_that_cannot_be_written_is_told_before_the_work(where: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = tmp_path / "file" / "lock.json" if where == "under a file" else Path("/proc/x/lock.json")
    with pytest.raises(LockfileError, match="cannot be written.*Name another file"):
        tune(path, "torch", command=["/nonexistent"])
    with pytest.raises(LockfileError, match="cannot be written"):
        lockfile_document.record(path, CPU, {})


def test_a_lock_that_is_held_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockfile_document, "_LOCK_SECONDS", 0.1)
    path = tmp_path / "lock.json"
    with filelock.FileLock(f"{path}.lock"), pytest.raises(LockfileError, match="another process has held .* or end it"):
        lockfile_document.record(path, CPU, {})


def test_a_path_that_stdout_cannot_print_is_escaped(monkeypatch: pytest.MonkeyPatch) -> None:
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    output.say("/ü/\udcff.json: set")
    stdout.flush()
    assert stdout.buffer.getvalue() == b"/\\xfc/\\udcff.json: set\n"  # type: ignore[attr-defined]


def test_a_full_disk_leaves_the_old_file_and_nothing_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    lockfile_document.record(path, CPU, {"silu_mul": {REGION: _entry()}})
    before = path.read_text()
    monkeypatch.setattr(whole_file.os, "replace", _full)
    with pytest.raises(LockfileError, match="No space left"):
        lockfile_document.record(path, CPU, {"silu_mul": {REGION: _entry(seconds=2e-6)}})
    assert path.read_text() == before and {p.name for p in tmp_path.iterdir()} <= {"lock.json", "lock.json.lock"}


def _full(*_: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_link_stays_one_and_shares_its_lock(tmp_path: Path) -> None:
    real, link = tmp_path / "real.json", tmp_path / "link.json"
    lockfile_document.record(real, CPU, {})
    link.symlink_to(real)
    lockfile_document.record(link, CPU, {"silu_mul": {REGION: _entry()}})
    assert link.is_symlink() and lockfile_document.load(real).choices["silu_mul"]
    assert not (tmp_path / "link.json.lock").exists()


def test_what_was_tuned_for_some_implementations_is_tuned_again_for_all(planted: None, tmp_path: Path) -> None:
    path = tmp_path / "lock.json"
    assert [o.result for o in tune(path, "definition")] == ["written"] * 2
    assert [o.result for o in tune(path, "definition")] == ["kept"] * 2
    assert [o.result for o in tune(path, "torch", "definition")] == ["written"] * 2


def test_predicting_names_an_implementation_that_there_is() -> None:
    done = command("tune", "--predict", "--device", "h200", "--op", "softmax", "--implementation", "trton")
    assert done.code == 2 and "trton" in done.err


def test_predictions_are_json_too() -> None:
    done = command("tune", "--predict", "--device", "h200", "--op", "linear", "--grid", "full", "--json")
    predictions = [one for one in json.loads(done.out) if one["case"] == "8192x8192x8192"]
    assert done.code == 0 and [one["rank"] for one in predictions] == list(range(1, len(predictions) + 1))
    assert predictions[0]["implementation"] in ("cuda", "torch") and 1e-3 < predictions[0]["seconds"] < 3e-3


def test_outcomes_are_json_too(planted: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "tune", functools.partial(tuning.tune, command=WORKER))
    path = tmp_path / "lock.json"
    arguments = ("tune", "--op", "silu_mul", "--device", "cpu", "--dtype", "f32", "--implementation", "slow")
    done = command(*arguments, "--lockfile", str(path), "--json")
    report = json.loads(done.out)
    assert done.code == 0 and report["lockfile"] == str(path) and "slow alone is measured" in done.err
    written = lockfile_document.load(path).choices["silu_mul"].values()
    assert [one["entry"]["seconds"] for one in report["outcomes"]] == [one.seconds for one in written]
    assert {(one["op"], one["dtype"], one["result"]) for one in report["outcomes"]} == {("silu_mul", "f32", "written")}
