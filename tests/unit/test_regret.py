"""The regret benchmark: its cells, what counts, its numbers in closed form, and one run in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ferryman import ops
from ferryman.device_profiles import detect
from ferryman.dispatch import lockfile_document, lockfile_entry, registry
from ferryman.porting.bench import grid
from ferryman.porting.inputs.cases import materialise

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "regret.py"
CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")


@pytest.fixture(scope="module")
def regret() -> ModuleType:
    """The script, which finds the modules beside it as it does when it is run."""
    spec = importlib.util.spec_from_file_location("regret_benchmark", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(SCRIPT.parent)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def drawing(regret: ModuleType) -> ModuleType:
    return sys.modules["dispatch_regret.drawing"]


@pytest.fixture(scope="module")
def report(regret: ModuleType) -> ModuleType:
    return sys.modules["dispatch_regret.report"]


def judged(half: str, regret: float, noise: float = 0.01, **more: Any) -> dict[str, Any]:
    cell = {
        "op": "softmax",
        "case": "c",
        "half": half,
        "source": "lockfile",
        "choice": "a",
        "regret": regret,
        "noise": noise,
        "seconds": {"a": 1 + regret, "b": 1.0},
        "hopeless": {},
        "regret_of_preference": 0.5,
        "untrusted": [],
    }
    return cell | more


def test_on_a_device_more_than_half_of_300_cells_were_never_tuned_and_all_ops_are_there(drawing: ModuleType) -> None:
    every = list(registry.primitives().values())
    cells = drawing.cells(every, 300, "full", CUDA, 0)
    assert len(cells) == 300 and {c.op.name for c in cells} == {op.name for op in every}
    tuned = [c for c in cells if c.case.name in {known.name for known in grid.cases(c.op, "full", CUDA)}]
    assert len(tuned) == 135
    assert len({(c.op.name, c.case.name) for c in cells}) == 300
    assert cells == drawing.cells(every, 300, "full", CUDA, 0) != drawing.cells(every, 300, "full", CUDA, 1)
    known = {(c.op.name, c.case.name) for c in cells if c not in tuned}
    others = {(c.op.name, c.case.name) for c in drawing.cells(every, 300, "full", CUDA, 0, known)}
    assert len(others) == 300 and not others & known  # a document that was fitted to names them
    widths = [drawing.widths_of(seed) for seed in range(3)]
    assert len(set(widths)) == 3 and all(w % 64 == 0 and 256 <= w <= 65_536 for ws in widths for w in ws)
    for cell in (c for c in cells if c not in tuned):
        for spec in cell.case.args.values():
            size = 2 * torch.Size(spec.shape).numel() if hasattr(spec, "shape") else 0
            assert size <= 2 << 30, (cell.op.name, cell.case.name)


def test_a_short_grid_is_filled_up_with_shapes_that_were_never_tuned(drawing: ModuleType) -> None:
    cells = drawing.cells([ops.softmax.primitive, ops.linear.primitive], 40, "small", CUDA, 0)
    assert len(cells) == 40
    names = {case.name for op in (ops.softmax, ops.linear) for case in grid.cases(op.primitive, "small", CUDA)}
    assert sum(c.case.name in names for c in cells) == len(names) == 4


def test_every_drawn_shape_is_a_call_that_its_op_takes(drawing: ModuleType) -> None:
    import random

    for op in registry.primitives().values():
        if registry.evidence(op).sampled is None or registry.forward_of(op) is not None:
            continue
        shapes = drawing.drawn(op, CPU, random.Random(3), (), drawing.widths_of(3))
        for _ in range(3):
            case = next(shapes)
            args = materialise(case, op, torch.float32, 0, CPU)
            op.check(*args)
            assert op.cost(*args).bytes < 1 << 22, (op.name, case.name)
            named = registry.evidence(op).named
            assert named is not None and named(case.name) == case  # what the fit of the cost model reads again


def test_what_counts(report: ModuleType) -> None:
    assert report.standing(judged("tuned", 0.0)) == "counts"
    assert report.standing(judged("tuned", 0.0, noise=0.031)) == "noisy"
    assert report.standing(judged("tuned", 0.0, untrusted=["clocks"])) == "untrusted"
    assert report.standing(judged("tuned", 0.0, seconds={"a": 1.0})) == "no choice"
    assert report.standing(judged("tuned", 0.0, seconds={"a": 1.0}, hopeless={"b": 9.0})) == "counts"
    assert report.standing({"op": "x", "case": "c", "failed": "out of memory"}) == "failed"


def test_medians_and_percentiles_of_what_counts(report: ModuleType) -> None:
    cells = [judged("tuned", i / 100) for i in range(21)]
    cells += [judged("untuned", 0.02), judged("untuned", 9.0, noise=0.5), {"op": "x", "case": "c", "failed": "no room"}]
    summary = report.summary(cells, report.half_of)
    assert summary["tuned"]["regret"] == {"median": 0.1, "p95": 0.19, "most": 0.2}
    assert summary["tuned"]["noise"]["median"] == 0.01 and summary["tuned"]["regret_of_preference"]["p95"] == 0.5
    assert summary["untuned"]["counts"] == 1 and summary["untuned"]["noisy"] == 1
    assert summary["untuned"]["regret"]["most"] == 0.02  # the noisy one is left out
    assert summary["failed"] == {"cells": 1, "failed": 1}
    assert report.percentile([3.0, 1.0, 2.0], 0.95) == 3.0 and report.percentile([1.0], 0.5) == 1.0
    text = report.markdown(cells, 7, "A device")
    assert "tuned: median, p95 and worst 10.0%, 19.0%, 20.0%; allowed: 1%, 5%, 30%" in text
    assert "7 cells were left when time was up" in text and "| softmax | c | a | b | 20.0% | lockfile |" in text


def test_a_run_judges_in_another_process(tmp_path: Path) -> None:
    lock, out = tmp_path / "lock.json", tmp_path / "regret.json"
    lockfile_document.record(lock, detect("cpu"), {})
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    arguments = (
        "--lockfile",
        lock,
        "--device",
        "cpu",
        "--dtype",
        "f32",
        "--op",
        "softmax",
        "--cells",
        "1",
        "--json",
        out,
    )
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, arguments)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
        check=True,
    )
    report = json.loads(out.read_text())
    (cell,) = report["cells"]
    assert cell["half"] == "untuned" and cell["choice"] == "torch" and cell["source"] == "profile"
    assert set(cell["seconds"]) | set(cell["hopeless"]) == {"torch", "definition"}
    assert cell["regret"] == pytest.approx(cell["seconds"]["torch"] / min(cell["seconds"].values()) - 1)
    assert cell["noise"] >= 0 and report["left"] == 0 and "| untuned | 1 |" in done.stdout


def test_a_lockfile_that_does_not_hold_here_is_refused(tmp_path: Path) -> None:
    lock = tmp_path / "lock.json"
    lockfile_document.record(lock, detect("cpu"), {})
    lock.write_text(lock.read_text().replace('"profile": "cpu"', '"profile": "h200"'))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--lockfile", str(lock), "--device", "cpu"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 2 and "does not hold here: profile is 'h200', here 'cpu'" in done.stderr


def run(regret: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """Its exit code, or the message that it exits with 1 by; on the CPU where no device is named."""
    device = () if "--device" in arguments else ("--device", "cpu")
    monkeypatch.setattr(sys, "argv", ["regret.py", *map(str, arguments), *device])
    try:
        regret.main()
    except SystemExit as stopped:
        return stopped.code
    return 0


@pytest.fixture
def lock(tmp_path: Path) -> Path:
    path = tmp_path / "lock.json"
    lockfile_document.record(path, detect("cpu"), {})
    return path


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (["--lockfile", "/nonexistent.json"], "/nonexistent.json cannot be read"),
        (["--cells", "0"], "--cells is 0; required"),
        (["--cells", "-3"], "--cells is -3"),
        (["--seconds", "nan"], "--seconds is nan; required: more than 0, finite"),
        (["--seconds", "0"], "--seconds is 0"),
        (["--seconds", "inf"], "--seconds is inf"),
        (["--op", "softmx"], "unknown op 'softmx'; nearest: softmax"),
        (["--grid", "huge"], "unknown grid 'huge'"),
        (["--dtype", "int7"], "unknown dtype"),
        (["--device", "h200"], "a device that is here"),
        (["--json", "/proc/no/x.json"], "choose another --json"),
        (["--markdown", "/proc/no/x.md"], "another --markdown"),
    ],
)
def test_bad_use_is_one_line(
    regret: ModuleType,
    lock: Path,
    arguments: list[str],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = arguments if "--lockfile" in arguments else ["--lockfile", lock, *arguments]
    assert run(regret, monkeypatch, *given) == 2
    complaint = capsys.readouterr().err
    assert reason in complaint and complaint.startswith("regret: ") and complaint.count("\n") == 1


def test_a_lockfile_that_is_cut_off_or_none_is_one_line(
    regret: ModuleType, lock: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lock.write_text(lock.read_text()[:40])
    assert run(regret, monkeypatch, "--lockfile", lock) == 2
    assert "is not JSON" in capsys.readouterr().err
    monkeypatch.setenv("FERRYMAN_LOCKFILE", "none")
    monkeypatch.setattr(regret, "supervise", lambda given, todo, before: ([judged("untuned", 0.0)], 0))
    assert run(regret, monkeypatch, "--op", "softmax") == 0
    assert ", untuned" in capsys.readouterr().out  # dispatch without a lockfile is judged


def test_only_regions_that_hold_are_counted(regret: ModuleType) -> None:
    def entry(kernels: str) -> lockfile_entry.Entry:
        timed = lockfile_entry.Candidate(implementation="torch", seconds=1e-5)
        return lockfile_entry.Entry(implementation="torch", seconds=1e-5, kernels=kernels, candidates=[timed])

    a, b, c = (f"x=bfloat16[2^{rows},64]c" for rows in (4, 5, 6))
    good, old = entry(lockfile_document.digest("softmax")).sealed("softmax", a), entry("0" * 64)
    assert regret.regions(lockfile_document.Lockfile(stamp={}, choices={"softmax": {a: good}})) == "1 tuned regions"
    document = lockfile_document.Lockfile(stamp={}, choices={"softmax": {a: good, b: old, c: old}})
    assert regret.regions(document) == "1 tuned regions (2 more do not hold any longer)"


def test_require_fails_beyond_the_limits_and_where_nothing_counts(
    regret: ModuleType, lock: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of(*cells: dict[str, Any]) -> object:
        monkeypatch.setattr(regret, "supervise", lambda given, todo, before: (list(cells), 0))
        return run(regret, monkeypatch, "--lockfile", lock, "--require", "--op", "softmax", "--json", out)

    out = tmp_path / "regret.json"
    good = [judged("tuned", 0.01), judged("untuned", 0.02)]
    assert of(*good) == 0
    message = "regret: tuned: median 2.00%; required: at most 1%; untuned: p95 13.00%; required: at most 10%"
    assert of(judged("tuned", 0.02), *3 * [judged("untuned", 0.0)], judged("untuned", 0.13)) == message
    assert len(json.loads(out.read_text())["cells"]) == 5  # what was measured is written
    assert of(good[0], judged("untuned", 0.0, noise=0.5)) == "regret: untuned: no cell counts; required: at least one"
    assert of() == 2  # nothing was judged
    monkeypatch.setattr(regret, "supervise", lambda given, todo, before: ([judged("tuned", 0.5)], 0))
    assert run(regret, monkeypatch, "--lockfile", lock, "--op", "softmax") == 0  # nothing is required
