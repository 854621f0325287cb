"""What a job executes: the record of a real run, and what the pytest plugin tells it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from ferryman.errors import FerrymanError, ResultError
from ferryman.porting.bench.document import Benchmark
from ferryman.porting.ci import changes, evidence, perf, provenance, run
from ferryman.porting.ci import matrix as matrices
from ferryman.porting.ci import record as records
from ferryman.porting.judging import results
from tests.cli.run import ferryman
from tests.unit.ci_world import commit, git, repository
from tests.unit.documents import right

SUITE = """
import pytest

def helper(x):
    return x

@pytest.mark.parametrize("n", [1, 2])
def test_right(n):
    assert helper(n) == n

def test_skips():
    pytest.skip("no device")

@pytest.mark.xfail(reason="known")
def test_xfails():
    assert False

@pytest.mark.xfail(reason="known", strict=False)
def test_xpasses():
    assert True

def test_wrong():
    assert helper(1) == 2

@pytest.fixture
def broken():
    raise RuntimeError("setup")

def test_setup(broken):
    pass

@pytest.fixture
def untidy():
    yield
    raise RuntimeError("teardown")

def test_teardown(untidy):
    pass

def test_left_out():
    pass
"""
MATRIX = """schema: 1
rows:
  - {id: all, vendor: cpu, device: cpu, backend: any, how: cpu, suite: pytest,
     tests: [tests/test_all.py], args: [-q, -k, not left_out]}
  - {id: some, vendor: cpu, device: cpu, backend: any, how: cpu, suite: pytest, tests: [tests/test_some.py], args: [-q]}
  - {id: script, vendor: cpu, device: cpu, backend: any, how: cpu, suite: command, command: [python, tool.py, "{out}"]}
  - {id: gpu, vendor: amd, device: mi300x, backend: triton, how: hardware, suite: pytest,
     tests: [tests], labels: [self-hosted]}
"""
TOOL = """
import sys, pathlib
pathlib.Path(sys.argv[1], "junit.xml").write_text('<testsuite><testcase classname="a" name="b"/></testsuite>')
"""


@pytest.fixture(scope="module")
def repo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = repository(tmp_path_factory.mktemp("run"), MATRIX)
    (root / "tests" / "test_all.py").write_text(SUITE)
    (root / "tests" / "test_some.py").write_text("def test_a():\n    pass\n")
    (root / "tool.py").write_text(TOOL)
    commit(root)
    return root


def record(repo: Path, row: str, out: Path, **options: Any) -> records.Record:
    known = matrices.read(repo / "ferryman.yaml")
    return run.run(repo, known, known.row(row), out, **options).record


def test_every_outcome_of_a_suite_is_recorded(repo: Path, tmp_path: Path) -> None:
    run_record = record(repo, "all", tmp_path)
    outcomes = {case.id.partition("::")[2]: case.outcome for case in run_record.cases}
    assert outcomes == {
        "test_right[1]": "passed",
        "test_right[2]": "passed",
        "test_skips": "skipped",
        "test_xfails": "xfailed",
        "test_xpasses": "xpassed",
        "test_wrong": "failed",
        "test_setup": "error",
        "test_teardown": "error",
        "test_left_out": "deselected",
    }
    assert sorted(run_record.collected) == sorted(case.id for case in run_record.cases)
    assert run_record.exit_code == 1 and run_record.launches is None and run_record.device.kind == "cpu"
    assert run_record.commit == git(repo, "rev-parse", "HEAD") and run_record.dirty is False
    assert set(run_record.kernels) == {"ferryman.yaml", "pyproject.toml", "tests/test_all.py"}
    runs, problems = evidence.collect([tmp_path])
    assert problems == [] and len(runs) == 1 and len(runs[0].items) == len(run_record.cases)


def test_a_laptop_s_run_and_the_gate(repo: Path, tmp_path: Path) -> None:
    done = ferryman("ci", "run", "some", "--root", str(repo), "--out", str(tmp_path))
    assert done.code == 0 and "1 cases" in done.err
    done = ferryman("ci", "run", "script", "--root", str(repo), "--out", str(tmp_path))
    assert done.code == 0
    gate = ferryman("ci", "verify", str(tmp_path), "--root", str(repo), "--json")
    rows = {row["id"]: row for row in json.loads(gate.out)["rows"]}
    assert gate.code == 1, "the row all did not run"
    assert (rows["some"]["green"], rows["script"]["green"]) == (True, True)
    assert (rows["gpu"]["verdict"], rows["all"]["verdict"]) == ("NOT_RUN", "NOT_RUN")


def test_results_below_the_repository_are_no_change_of_it(repo: Path) -> None:
    for folder, ignored in (("out/ci", True), ("results", False)):
        if not ignored:
            (repo / folder).mkdir()  # one that was there may hold what git is to have
        run._emptied(repo / folder / "some")
        (repo / folder / "some" / "record.json").write_text("{}")
        try:
            assert bool(changes.changed(repo, "HEAD")) is not ignored
        finally:
            shutil.rmtree(repo / folder.partition("/")[0])


def test_a_module_that_cannot_be_imported_is_no_silence(repo: Path, tmp_path: Path) -> None:
    (repo / "tests" / "test_some.py").write_text("import no_such_module\n")
    try:
        run_record = record(repo, "some", tmp_path)
    finally:
        git(repo, "checkout", "-q", "tests")
    assert [(c.id, c.outcome) for c in run_record.cases] == [("tests/test_some.py", "error")]
    assert run_record.dirty is True and run_record.exit_code != 0


def test_a_command_without_end_is_ended(repo: Path, tmp_path: Path) -> None:
    (repo / "tool.py").write_text("import time\ntime.sleep(60)\n")
    try:
        run_record = record(repo, "script", tmp_path, seconds=0.5)
    finally:
        git(repo, "checkout", "-q", "tool.py")
    assert run_record.exit_code == 124 and run_record.files == {}


def test_a_row_of_a_device_that_is_not_here_says_so(repo: Path, tmp_path: Path) -> None:
    with pytest.raises(FerrymanError, match="needs a mi300x.*NOT_RUN"):
        record(repo, "gpu", tmp_path)
    assert not list(tmp_path.rglob("record.json"))
    with pytest.raises(FerrymanError, match="--commit is 000000000000, and this work tree is at"):
        record(repo, "some", tmp_path, commit="0" * 40)


def test_what_an_earlier_run_left_is_not_taken_for_this_one(repo: Path, tmp_path: Path) -> None:
    (tmp_path / "script").mkdir()
    (tmp_path / "script" / "check.json").write_text("{}")
    assert set(record(repo, "script", tmp_path).files) == {"junit.xml"}
    (tmp_path / "script" / "folder").mkdir()
    with pytest.raises(FerrymanError, match="holds a folder"):
        record(repo, "script", tmp_path)


def test_launches_are_kernels_and_nothing_else() -> None:
    from pytest_ferryman.recorder import _kernel

    class Event:
        def __init__(self, name: str, device: str) -> None:
            self._name, self._device = name, device

        def name(self) -> str:
            return self._name

        def device_type(self) -> str:
            return f"DeviceType.{self._device}"

    is_kernel = {
        ("_scale", "CUDA"): True,
        ("Memcpy HtoD", "CUDA"): False,
        ("Memset (Device)", "CUDA"): False,
        ("aten::add", "CPU"): False,
        ("CopyDeviceToHost", "CUDA"): False,
    }
    assert {key: _kernel(Event(*key)) for key in is_kernel} == is_kernel


def test_results_carry_what_they_are_of(tmp_path: Path) -> None:
    from tests.unit.documents import document

    unstamped = document(right(), right(case="other"), right(implementation="user:mine", op="rope"))
    stamped = provenance.stamped(unstamped, given=provenance.State("a" * 40, ("x.py",)))
    of = stamped.provenance
    assert of is not None and (of.commit, of.dirty, of.row) == ("a" * 40, True, None)
    assert of.manifest == sorted(results.cell_id(c) for c in unstamped.cells)
    assert set(of.kernels) == {"rms_norm"}, "a user's function is not one of ours"
    assert of.toolchain["torch"] and of.toolchain["ferryman"]
    results.save(stamped, tmp_path / "check.json")
    assert results.load(tmp_path / "check.json") == stamped
    raw = json.loads(results.dumps(stamped))
    raw["provenance"]["manifest"].pop()
    with pytest.raises(ResultError, match="1 cells stand in its manifest or its cells alone"):
        results.parse(raw)


@pytest.mark.parametrize("text", ["\\u001b", "\\b", "\\r", "\x7f", "é\u202e"])
def test_text_that_is_not_clean_is_cleaned(tmp_path: Path, text: str) -> None:
    from tests.unit.documents import document

    path = tmp_path / "check.json"
    path.write_text(results.dumps(document(right(case="PLANTED"))).replace("PLANTED", f"a{text}b"), "utf-8")
    wanted = {"\\r": "a | b", "é\u202e": "aé\ufffdb"}.get(text, "a\ufffdb")  # a line break becomes a mark
    assert results.load(path).cells[0].case == wanted


# perf: a baseline that knows its own noise


def bench(times: dict[str, float], device: str = "NVIDIA H200", noise: float = 0.01) -> Benchmark:
    import torch

    from ferryman.device_profiles import profile

    facts = results.environment(torch.device("cpu"), profile("h200"), 0, "small").model_copy(
        update={"device_name": device, "profile": "h200"}
    )
    cells = [
        {
            "op": "rms_norm",
            "case": case,
            "dtype": "bfloat16",
            "bytes": 1.0,
            "flops": 1.0,
            "sets": 1,
            "rotated_bytes": 1,
            "noise": noise,
            "condition": {"source": "x"},
            "times": [{"name": "triton", "role": "implementation", "method": "graph replay", "trials": [t, t, t]}],
        }
        for case, t in times.items()
    ]
    return Benchmark.model_validate(
        {
            "environment": facts.model_dump(),
            "ceilings": {"copy_bytes_per_s": 1.0, "copy_bytes": 1, "product_flops_per_s": 1.0, "product": "x"},
            "cells": cells,
        }
    )


def baseline(*runs: dict[str, float]) -> perf.Baseline:
    known: perf.Baseline | None = None
    for times in runs:
        known = perf.extended(known, bench(times), [])
    assert known is not None
    return known


QUIET = [{"a": 1.00e-5, "b": 2e-5}, {"a": 1.01e-5, "b": 2e-5}, {"a": 1.00e-5, "b": 2e-5}, {"a": 0.99e-5, "b": 2e-5}]
LOUD = [{"a": 1.0e-5}, {"a": 1.2e-5}, {"a": 0.9e-5}, {"a": 1.15e-5}, {"a": 0.95e-5}]


def never(pairs: frozenset[tuple[str, str]]) -> Benchmark:
    raise AssertionError(f"{pairs} is not slower: nothing is to be timed again")


def test_a_regression_is_slower_than_the_device_s_own_noise_twice() -> None:
    known = baseline(*QUIET)
    quiet = {c.key[1]: c for c in perf.judge(known, bench({"a": 1.01e-5, "b": 2.01e-5}), never)}
    assert {c.verdict for c in quiet.values()} == {"same"}
    slow = bench({"a": 1.3e-5, "b": 2e-5})
    asked = []

    def again(pairs: frozenset[tuple[str, str]]) -> Benchmark:
        asked.append(pairs)
        return bench({"a": 1.29e-5})

    changes = perf.judge(known, slow, again)
    assert asked == [frozenset({("rms_norm", "a")})], "once, and what is slower alone"
    assert [(c.key[1], c.verdict) for c in changes if c.verdict != "same"] == [("a", "slower")] and perf.regressed(
        changes
    )
    changes = perf.judge(known, slow, lambda pairs: bench({"a": 1.0e-5}))
    assert [c.verdict for c in changes if c.key[1] == "a"] == ["not confirmed"] and not perf.regressed(changes)
    assert (
        perf.calibrated(perf.extended(known, slow, perf.judge(known, slow, again)))[
            ("rms_norm", "a", "bfloat16", "triton")
        ][2]
        == 4
    )


def test_a_device_that_is_noisy_allows_more() -> None:
    changes = perf.judge(baseline(*LOUD), bench({"a": 1.35e-5}), never)
    assert [c.verdict for c in changes] == ["same"]
    assert changes[0].allowed is not None and changes[0].allowed > 0.3


def test_few_runs_only_calibrate_and_a_lost_contender_fails() -> None:
    assert [c.verdict for c in perf.judge(baseline(*LOUD[:2]), bench({"a": 9e-5}), never)] == ["calibrating"]
    changes = perf.judge(baseline(*QUIET), bench({"a": 1e-5}), never)
    assert {c.key[1]: c.verdict for c in changes} == {"a": "same", "b": "no longer timed"} and perf.regressed(changes)
    with pytest.raises(ResultError, match="speeds compare on one device"):
        perf.judge(baseline(*QUIET), bench({"a": 1e-5}, device="NVIDIA H100"), never)


def test_a_baseline_that_is_damaged_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "h200.json"
    written = baseline(*QUIET)  # once: each run in it has a time of its own
    path.write_text(written.model_dump_json())
    assert perf.load(path) == written and len(written.runs) == 4
    good = path.read_text()
    for key, value, message in (("seconds", -1, "seconds"), ("noise", None, "noise")):
        raw = json.loads(good)
        raw["runs"][0]["samples"][0][key] = value
        path.write_text(json.dumps(raw))
        with pytest.raises(ResultError, match=message):
            perf.load(path)
    path.write_text(good.replace("ferryman-ci-baseline", "ferryman-baseline"))
    with pytest.raises(ResultError, match="is no ferryman-ci-baseline"):
        perf.load(path)


def test_compiling_judges_each_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ferryman.backends.artefacts import Entry, Manifest
    from ferryman.porting import aot
    from ferryman.porting.ci import compiled

    def entry(kernel: str, verdict: Any, reason: str | None) -> Entry:
        return Entry(
            key="0" * 64,
            profile="mi300x",
            arch="gfx942",
            backend="hip",
            family="norm",
            kernel=kernel,
            dtype="any",
            verdict=verdict,
            reason=reason,
        )

    compile_all = aot.compile_all

    def planted(profiles: Any, **options: Any) -> aot.Compiled:
        if options["backends"] != ["hip"]:
            return compile_all(profiles, **options)
        entries = [
            entry("a", "COMPILED_ONLY", None),
            entry("b", "QUARANTINED", "no such instruction"),
            entry("c", "FAIL", "shared: 70000 bytes a block, required at most 65536"),
        ]
        time = "2026-01-01T00:00:00"
        return aot.Compiled(Manifest(time=time, toolchain={}, profiles=["mi300x"], seconds=1.0, entries=entries))

    monkeypatch.setattr(aot, "compile_all", planted)
    path = tmp_path / "row" / "check.json"
    assert compiled.main(["mi300x", "hip", str(path)]) == 1
    document = results.load(path)
    assert [(c.op, c.case, c.verdict, c.reason) for c in document.cells] == [
        ("norm", "0: a()", "COMPILED_ONLY", None),
        ("norm", "1: b()", "QUARANTINED", "no such instruction"),
        ("norm", "2: c()", "FAIL", "shared: 70000 bytes a block, required at most 65536"),
    ]
    assert document.environment.device == compiled.DEVICE == "none"
    assert compiled.main(["mi300x", "cuda", str(path)]) == 2
    assert compiled.main(["mi300", "hip", str(path)]) == 2
    assert compiled.main([]) == 2
