"""The regret benchmark: its cells, what counts, its numbers in closed form, and one run in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from ferryman import ops, settings
from ferryman.device_profiles import detect
from ferryman.dispatch import lockfile_document, lockfile_entry, preparing, registry, select
from ferryman.errors import ResultError
from ferryman.ops.primitive import Primitive
from ferryman.porting.bench import ahead, clock, grid, runner
from ferryman.porting.bench.contender import Contender
from ferryman.porting.bench.laps import Laps
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
def judging(regret: ModuleType) -> ModuleType:
    return sys.modules["dispatch_regret.judging"]


@pytest.fixture(scope="module")
def processes(regret: ModuleType) -> ModuleType:
    return sys.modules["dispatch_regret.processes"]


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
        "regret_without_lockfile": 0.5,
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


def test_the_choice_without_the_lockfile_is_asked_for_beside(
    judging: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(tmp_path / "none-here.json"))
    with pytest.raises(ZeroDivisionError), judging.without_lockfile():
        assert settings.get("lockfile") == settings.NO_LOCKFILE
        raise ZeroDivisionError
    assert settings.get("lockfile") == tmp_path / "none-here.json"


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
    assert summary["tuned"]["noise"]["median"] == 0.01 and summary["tuned"]["regret_without_lockfile"]["p95"] == 0.5
    assert summary["untuned"]["counts"] == 1 and summary["untuned"]["noisy"] == 1
    assert summary["untuned"]["regret"]["most"] == 0.02  # the noisy one is left out
    assert summary["failed"] == {"cells": 1, "failed": 1}
    assert report.percentile([3.0, 1.0, 2.0], 0.95) == 3.0 and report.percentile([1.0], 0.5) == 1.0
    text = report.markdown(cells, 7, "A device")
    assert "tuned: median, p95 and worst 10.0%, 19.0%, 20.0%; allowed: 1%, 5%, 30%" in text
    assert "without a lockfile: median, p95 and worst 50.0%, 50.0%, 50.0%; allowed: 2%, 10%, 30%" in text
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
    assert cell["untuned_choice"] == "torch" and cell["regret_without_lockfile"] == cell["regret"]
    assert cell["noise"] >= 0 and report["left"] == 0 and "| untuned | 1 |" in done.stdout


def test_a_run_that_is_stopped_leaves_what_it_judged_and_another_goes_on(
    regret: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "regret.json"
    arguments = ("--lockfile", "none", "--device", "cpu", "--dtype", "f32", "--op", "softmax", "--cells", "40")
    command = [sys.executable, str(SCRIPT), *arguments, "--seed", "5", "--json", str(out)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    stopped = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
    assert stopped.stderr is not None
    complaint = stopped.stderr.readline()
    stopped.send_signal(signal.SIGTERM)
    stopped.communicate()
    assert complaint.startswith("regret: 1 of 40, ") and " s: " in complaint
    partial = json.loads(out.read_text())
    assert stopped.returncode == 143 and len(partial["cells"]) + partial["left"] == 40
    assert partial["cells"] and partial["left"]
    assert {"inputs", "preparing", "making ready", "trials"} <= set(partial["cells"][0]["parts"])
    given = (*arguments, "--resume", out, "--json", tmp_path / "other.json", "--seed")
    for more, message in (
        (("6",), "seed 5, asked for 6"),
        (("5", "--dtype", "f16"), "dtype f32, asked for f16"),
    ):
        assert run(regret, monkeypatch, *given, *more) == 2 and message in capsys.readouterr().err
    subprocess.run([*command, "--resume", str(out)], capture_output=True, env=environment, check=True)
    whole = json.loads(out.read_text())
    assert whole["left"] == 0 and whole["cells"][: len(partial["cells"])] == partial["cells"]
    assert len({cell["case"] for cell in whole["cells"]}) == len(whole["cells"]) == 40


def test_the_cells_of_a_document_are_judged_again(processes: ModuleType, tmp_path: Path) -> None:
    document, names = tmp_path / "earlier.json", ["300x1000", "7x4096"]
    asked = Namespace(device="cpu", op=["softmax"], dtype="f32", seed=5, again=document)
    pairs = [("softmax", name) for name in names] + [("rms_norm", "4x4096")]
    document.write_text(json.dumps({"cells": [{"op": op, "case": case} for op, case in pairs]}))
    _, todo = processes.plan_of(asked)
    assert [(cell.op.name, cell.case.name) for cell in todo] == pairs[:2]
    assert [tuple(cell.case.args["x"].shape) for cell in todo] == [(300, 1000), (7, 4096)]
    for cells, message in (([], "a cell of softmax"), ([{"op": "softmax", "case": "no such"}], "'no such'")):
        document.write_text(json.dumps({"cells": cells}))
        with pytest.raises(ResultError, match=message):
            processes.plan_of(asked)


def asked_of(**more: Any) -> Namespace:
    return Namespace(**({"lockfile": Path("none"), "seconds": 60.0, "ahead": 0, "prepare_seconds": None} | more))


def test_every_cell_is_kept_as_soon_as_it_is_judged_and_one_that_ends_its_process_is_failed(
    drawing: ModuleType, processes: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    todo = drawing.cells([ops.softmax.primitive], 4, "small", CPU, 0)
    names = [cell.case.name for cell in todo]
    orders: list[list[int]] = []

    def worked(given: Namespace, folder: Path, environment: Any, end: float, add: Any) -> tuple[int | None, str]:
        asked = json.loads((folder / processes.ORDER).read_text())
        orders.append(asked["order"])
        assert asked["prepare_seconds"] is None and asked["prepared"] == [] and asked["unprepared"] == {}
        if len(orders) == 2:
            return 3, "its process ended with code -9: no memory"
        add(asked["order"][0], judged("tuned", 0.1, case=names[asked["order"][0]], parts={"trials": 1.234}))
        return None, ""

    monkeypatch.setattr(processes, "_worked", worked)
    kept: list[list[str]] = []
    before = [judged("tuned", 0.0, case=names[1])]
    cells, left = processes.supervise(
        asked_of(), todo, before, lambda judged: kept.append([cell["case"] for cell in judged])
    )
    assert orders == [[0, 2, 3], [2, 3], [2]] and left == 0
    assert [cell["case"] for cell in cells] == [names[1], names[0], names[3], names[2]]
    assert kept == [[cell["case"] for cell in cells[:count]] for count in (2, 3, 4)]
    assert cells[2]["failed"].endswith("no memory")
    progress = capsys.readouterr().err
    assert "regret: 2 of 4, 0 s: softmax" in progress and "a +10.0%; 1.2 s: trials 1.23" in progress


def test_cells_whose_kernels_are_ready_come_first(processes: ModuleType) -> None:
    said = [
        ahead.Done("kernels", 5, 1.0, None, True),
        ahead.Done("kernels", 4, 1.0, None, True),
        ahead.Done("prepared", 4, 9.0),
        ahead.Done("kernels", 3, 1.0),
        ahead.Done("kernels", 2, 1.0, "no room"),
    ]
    assert processes.ordered([1, 2, 3, 4, 5], said) == [2, 3, 4, 5, 1]
    text = ahead.described(said, 5, 12.0)
    assert "kernels of 3 of 5 cells (1 failed) in 4 s" in text and "prepared of 1 of 2 cells" in text


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> runner.Plan:
    monkeypatch.setattr(clock, "CPU_SECONDS", 1e-3)
    return runner.Plan(CPU, select.profile_for(CPU), torch.float32, (), ("torch", "definition"), (), 0)


def test_what_was_not_compiled_in_time_is_left_out_and_said(
    drawing: ModuleType, judging: ModuleType, report: ModuleType, plan: runner.Plan, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    prepared: list[str] = []

    def ready(op: Primitive, *given: Any) -> tuple[tuple[str, ...], dict[str, Any]]:
        prepared.append(op.name)
        return (), {}

    refusals = select.refusals
    monkeypatch.setattr(preparing, "ready", ready)
    monkeypatch.setattr(preparing, "preparable", lambda op, args, profile: (SimpleNamespace(name="torch"),))
    (cell,) = drawing.cells([ops.softmax.primitive], 1, "small", CPU, 0)
    laps = Laps()
    record = judging.judge(plan, cell, laps)
    assert record["skipped"] == {} and prepared == ["softmax", "softmax"] and "trials" in laps.seconds
    unprepared = dataclasses.replace(plan, prepares=False)

    def not_yet(line: Any, *given: Any, **more: Any) -> list[str]:
        return ["not yet"] if line.name == "torch" else refusals(line, *given, **more)

    monkeypatch.setattr(select, "refusals", not_yet)
    record = judging.judge(unprepared, cell, Laps())
    assert record["skipped"]["torch"] == judging.IN_TIME and prepared == ["softmax", "softmax"]
    (said,) = report._not_prepared([record, judged("tuned", 0.0)])
    assert said == "torch: not compiled ahead in 1 of 2 cells"
    assert said in report.markdown([record, judged("tuned", 0.0)], 0, "A device")
    record = judging.judge(unprepared, cell, Laps(), f"{judging.NOT_PREPARED}: no such template")
    assert record["skipped"]["torch"] == "not compiled ahead: no such template"


def test_what_is_quicker_than_the_choice_must_give_the_same(judging: ModuleType, report: ModuleType) -> None:
    op = ops.softmax.primitive
    args = (torch.randn(3, 5, dtype=torch.bfloat16),)

    def contender(name: str, seconds: float, factor: float) -> Contender:
        def call_of(given: tuple[Any, ...]) -> Any:
            if factor < 0:
                raise ValueError("no such shape")
            return lambda: given[0].float().softmax(-1).to(torch.bfloat16) * factor

        return Contender(name, "ours", call_of, trials=[seconds])

    choice, right, slow = contender("a", 2.0, 1.0), contender("b", 1.0, 1.0), contender("c", 3.0, 0.5)
    assert judging._contradicting(op, args, [choice, right, slow], "a") == []
    wrong, broken = contender("d", 1.0, 0.5), contender("e", 1.0, -1.0)
    first, second = judging._contradicting(op, args, [choice, right, wrong, broken], "a")
    assert first.startswith("d does not agree with a: y is 0.5 away") and "it fails: ValueError" in second
    cell = judged("tuned", 1.0, untrusted=[first])
    assert report.standing(cell) == "untrusted"
    assert f"not trusted: softmax c: {first}" in report.markdown([cell, judged("tuned", 0.0)], 0, "A device")


def test_processes_that_compile_take_each_cell_once_and_say_what_failed(
    drawing: ModuleType, plan: runner.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[str] = []

    def kernels(plan: runner.Plan, op: Primitive, case: Any) -> str | None:
        launched.append(case.name)
        if len(launched) == 1:
            raise RuntimeError("out of memory\nand more")
        ahead.compile_cells(tmp_path, "second", plan, todo) if len(launched) == 2 else None
        return None

    monkeypatch.setattr(ahead, "_kernels", kernels)
    monkeypatch.setattr(ahead, "_prepared", lambda plan, op, case: "torch.flex: no such template")
    monkeypatch.setattr(ahead, "wants_preparing", lambda plan, op, case: case.name == todo[2][2].name)
    drawn = drawing.cells([ops.softmax.primitive], 4, "small", CPU, 0)
    todo: Sequence[Any] = [(10 + i, cell.op, cell.case) for i, cell in enumerate(drawn)]
    ahead.compile_cells(tmp_path, "first", plan, todo)
    assert sorted(launched) == sorted(cell.case.name for cell in drawn)
    said = ahead.done(tmp_path)
    assert ahead.ready(said, "kernels") == {11, 12, 13} and ahead.ready(said, "prepared") == set()
    (failed,) = [one for one in said if one.part == "prepared"]
    assert failed.cell == 12 and failed.failed == "torch.flex: no such template" and failed.wants_preparing
    with (tmp_path / "second.jsonl").open("a") as file:
        file.write('{"part": "kern')  # killed while it wrote
    assert ahead.done(tmp_path) == said


def test_ahead_runs_what_is_compiled_for_a_call_and_not_what_pytorch_brings(
    plan: runner.Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[str] = []

    def implementations(plan: runner.Plan, op: Primitive, args: Any) -> list[Any]:
        assert not plan.prepares

        def call_of(name: str) -> Any:
            def call() -> None:
                called.append(name)
                if name == "triton":
                    raise RuntimeError("no shared memory")

            return lambda args: call

        names = {"torch": None, "triton": None, "cuda": "refused"}
        return [SimpleNamespace(name=n, skipped=why, call_of=call_of(n)) for n, why in names.items()]

    monkeypatch.setattr(runner, "implementations", implementations)
    case = grid.cases(ops.softmax.primitive, "small", CPU)[0]
    ahead.compile_cells(tmp_path, "one", plan, [(0, ops.softmax.primitive, case)])
    (done,) = ahead.done(tmp_path)
    assert called == ["triton"] and done.failed == "triton: RuntimeError: no shared memory"
    assert not ahead.wants_preparing(plan, ops.softmax.primitive, case)


def test_attention_that_flex_could_serve_is_known_without_data() -> None:
    from ferryman.device_profiles import profile

    op = ops.attention.primitive
    plan = runner.Plan(CUDA, profile("h100-sxm"), torch.bfloat16, (), (), (), 0)
    case = grid.cases(op, "small", CUDA)[0]
    assert ahead.wants_preparing(plan, op, case)
    assert preparing.preparable(op, grid.on_meta(op, case, torch.bfloat16), plan.profile, ["triton"]) == ()
    import dataclasses

    assert not ahead.wants_preparing(dataclasses.replace(plan, dtype=torch.float32), op, case)


def test_processes_compile_until_all_is_done_or_time_is_up(
    regret: ModuleType,
    processes: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ("--device", "cpu", "--dtype", "f32", "--op", "softmax", "--cells", "3", "--seed", "0", "--ahead", "2")
    monkeypatch.setattr(sys, "argv", ["regret.py", *arguments])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT / "src"), str(ROOT)]))
    given = asked_of(lockfile=settings.NO_LOCKFILE, ahead=2, ahead_seconds=50.0)
    said = processes._ahead(given, tmp_path, processes._environment(given), [0, 2])
    assert ahead.ready(said, "kernels") == {0, 2} and len(said) == 2
    assert "regret: compiled ahead in " in capsys.readouterr().err
    given.ahead_seconds = 0.0
    (tmp_path / "late").mkdir()
    assert processes._ahead(given, tmp_path / "late", processes._environment(given), [0, 2]) == []
    monkeypatch.setattr(sys, "argv", ["regret.py", "--op", "softmx"])
    given.ahead, given.ahead_seconds = 1, 50.0
    assert processes._ahead(given, tmp_path / "late", processes._environment(given), [0, 2]) == []
    assert (
        "a process that compiles ended with code 1: " in (complaint := capsys.readouterr().err)
        and "softmx" in complaint
    )


def test_laps_add_up() -> None:
    now = iter([10.0, 11.0, 11.5, 13.5])
    laps = Laps(lambda: next(now))
    for part in ("inputs", "trials", "inputs"):
        laps.end(part)
    assert laps.seconds == {"inputs": 3.0, "trials": 0.5}


def test_one_place_keeps_what_triton_compiles(processes: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRYMAN_BACKEND", "torch")
    monkeypatch.delenv("TRITON_CACHE_DIR", raising=False)
    environment = processes._environment(asked_of(lockfile=settings.NO_LOCKFILE))
    assert environment["TRITON_CACHE_DIR"].endswith(".triton/cache") and "FERRYMAN_BACKEND" not in environment
    assert environment["FERRYMAN_LOCKFILE"] == "none" and environment["TORCHINDUCTOR_COMPILE_THREADS"] == "1"
    monkeypatch.setenv("TRITON_CACHE_DIR", "/elsewhere")
    assert processes._environment(asked_of())["TRITON_CACHE_DIR"] == "/elsewhere"


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
        (["--ahead-seconds", "-1"], "--ahead-seconds is -1.0; required: at least 0, finite"),
        (["--prepare-seconds", "nan"], "--prepare-seconds is nan"),
        (["--op", "softmx"], "unknown op 'softmx'; nearest: softmax"),
        (["--grid", "huge"], "unknown grid 'huge'"),
        (["--again", "/nonexistent.json"], "--again /nonexistent.json: required: a document of benchmarks/regret.py"),
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
    monkeypatch.setattr(regret, "supervise", lambda given, todo, before, keep: ([judged("untuned", 0.0)], 0))
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
        monkeypatch.setattr(regret, "supervise", lambda given, todo, before, keep: (list(cells), 0))
        return run(regret, monkeypatch, "--lockfile", lock, "--require", "--op", "softmax", "--json", out)

    out = tmp_path / "regret.json"
    good = [judged("tuned", 0.01), judged("untuned", 0.02)]
    assert of(*good) == 0
    message = "regret: tuned: median 2.00%; required: at most 1%; untuned: p95 13.00%; required: at most 10%"
    assert of(judged("tuned", 0.02), *3 * [judged("untuned", 0.0)], judged("untuned", 0.13)) == message
    assert len(json.loads(out.read_text())["cells"]) == 5  # what was measured is written
    assert of(good[0], judged("untuned", 0.0, noise=0.5)) == "regret: untuned: no cell counts; required: at least one"
    assert of() == 2  # nothing was judged
    monkeypatch.setattr(regret, "supervise", lambda given, todo, before, keep: ([judged("tuned", 0.5)], 0))
    assert run(regret, monkeypatch, "--lockfile", lock, "--op", "softmax") == 0  # nothing is required
