"""The fit of the cost model: known coefficients come back, outliers do not turn them, each document form is read."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import math
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ferryman import files, ops
from ferryman.device_profiles import profile as profile_of
from ferryman.dispatch import cost, kernel_code, lockfile, lockfile_document, lockfile_entry, registry
from ferryman.errors import ResultError
from ferryman.porting.bench import grid
from ferryman.porting.inputs.cases import forward_of

ROOT = Path(__file__).parents[2]
H200 = profile_of("h200")
LINEAR = ops.linear.primitive
SHAPES = [(m, n, 4096) for m in (1, 16, 128, 1024, 8192) for n in (1024, 4096, 14_336)]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    """The script, which finds the modules beside it as it does when it is run."""
    path = ROOT / "benchmarks" / "fit_costs.py"
    spec = importlib.util.spec_from_file_location("fit_costs", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(path.parent)
        spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def fitting(script: ModuleType) -> ModuleType:
    return sys.modules["cost_fit.fitting"]


@pytest.fixture(scope="module")
def judging(script: ModuleType) -> ModuleType:
    return sys.modules["cost_fit.judging"]


@pytest.fixture(scope="module")
def measured(script: ModuleType) -> ModuleType:
    return sys.modules["cost_fit.measured"]


def arguments(m: int, n: int, k: int) -> tuple[Any, ...]:
    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((m, k), (n, k)))
    return x, weight, None


def work(m: int, n: int, k: int) -> cost.Work:
    return cost.work_of(LINEAR, arguments(m, n, k))


def planted(name: str, known: cost.Coefficients, shapes: list[tuple[int, int, int]]) -> list[Any]:
    form, cells = sys.modules["cost_fit.measured"].Measured, []
    for shape in shapes:
        seconds = known.seconds(work(*shape), H200)
        region = lockfile.region(LINEAR, arguments(*shape))
        cells.append(form("linear", "x".join(map(str, shape)), name, seconds, work(*shape), region))
    return cells


KNOWN = cost.Coefficients(4e-6, 0.85, 0.6, 0.01, 1, {})


def test_known_coefficients_come_back(fitting: ModuleType) -> None:
    coefficients = fitting.fit(planted("torch", KNOWN, SHAPES), H200)
    assert (coefficients.fixed, coefficients.memory, coefficients.compute) == pytest.approx((4e-6, 0.85, 0.6), rel=0.02)
    assert coefficients.cells == 15 and coefficients.error < 0.02
    assert coefficients.sizes["x"] == (0.0, 13.0, 12.0, 12.0)
    assert coefficients.sizes["weight"] == (10.0, math.log2(14_336), 12.0, 12.0)
    assert coefficients.covers(work(4, 4096, 4096)) and not coefficients.covers(work(4, 4096, 16_384))


@pytest.mark.parametrize("name", ["linear", "attention_backward", "rms_norm_backward"])
def test_what_is_fitted_is_the_call_that_was_timed_and_that_dispatch_sees(measured: ModuleType, name: str) -> None:
    """An optional gradient that nobody has makes a call of another kind, of which a fit says nothing."""
    op = registry.primitive(name)
    device = "meta" if forward_of(op) is None else "cpu"  # a backward's facts come from a forward that ran
    (case,) = grid.cases(op, "full", torch.device("cpu"))
    timed = grid.inputs(op, case, torch.float32, 0, torch.device(device))
    known, region = measured.work_of(name, case, torch.float32)
    assert region == lockfile.region(op, timed) and known.kind == cost.work_of(op, timed).kind


def test_one_bad_cell_does_not_turn_a_fit(fitting: ModuleType) -> None:
    cells = planted("torch", KNOWN, SHAPES)
    bad = dataclasses.replace(cells[7], case="bad", seconds=50 * cells[7].seconds, region="")
    coefficients = fitting.fit([*cells[:7], bad, *cells[8:]], H200)
    assert (coefficients.fixed, coefficients.memory, coefficients.compute) == pytest.approx((4e-6, 0.85, 0.6), rel=0.1)


def test_one_cell_is_met_by_what_bounds_it_and_claims_no_small_error(fitting: ModuleType) -> None:
    cells = planted("torch", KNOWN, [(8192, 8192, 8192)])
    coefficients = fitting.fit(cells, H200)
    assert coefficients.seconds(cells[0].work, H200) == pytest.approx(cells[0].seconds, rel=0.02)
    assert coefficients.error == fitting.FEW_ERROR and coefficients.cells == 1


def test_the_regret_of_cells_left_out_is_that_of_the_planted_times(judging: ModuleType) -> None:
    """cuda is twice as fast as torch, which preference takes: alone its regret is 1, that of what knows times is 0."""
    fast = cost.Coefficients(2e-6, 0.9, 0.8, 0.01, 1, {})
    slow = cost.Coefficients(4e-6, 0.45, 0.4, 0.01, 1, {})
    cells = planted("cuda", fast, SHAPES) + planted("torch", slow, SHAPES)
    regrets = judging.regret(cells, H200)["linear 16"]
    assert regrets.pop("preference") == pytest.approx([1.0] * 15)
    assert regrets["near regions"] == regrets["dispatch"] == [0.0] * 15
    assert regrets["cost model"] == [1.0, *[0.0] * 13, 1.0]  # nothing as small, or as large, is left: preference
    # whole weights left out: of those at the edge nothing is known, the one between is predicted
    whole = judging.regret(cells, H200, whole=True)["linear 16"]["cost model"]
    assert whole == [*[1.0] * 5, *[0.0] * 5, *[1.0] * 5]
    assert {judging.family(c.case) for c in cells} == {f"{n}x4096" for n in (1024, 4096, 14_336)}
    assert judging.family("B4 H4/2 Q1 K764 D64 causal") == "H4/2 Q1 D64"
    assert judging.family("B4 H4/2 S764 D64") == "H4/2 D64" and judging.family("8x4096") == "4096"


def test_what_the_formula_misses_is_found_at_its_place(fitting: ModuleType) -> None:
    """A kernel that is 1.5 times as slow at wide weights: the fit says so there."""
    cells = [
        dataclasses.replace(c, seconds=c.seconds * (1.5 if "x14336x" in c.case else 1.0))
        for c in planted("torch", KNOWN, SHAPES)
    ]
    coefficients = fitting.fit(cells, H200)
    plain = dataclasses.replace(coefficients, places=(), weights=())
    assert len(coefficients.places) == len(coefficients.weights) == 15
    missed = {
        width: [
            math.log(coefficients.seconds(c.work, H200) / c.seconds) for c in cells if c.case.split("x")[1] == width
        ]
        for width in ("1024", "14336")
    }
    formula = [math.log(plain.seconds(c.work, H200) / c.seconds) for c in cells if c.case.split("x")[1] == "14336"]
    assert max(map(abs, missed["14336"] + missed["1024"])) < 0.12 and max(map(abs, formula)) > 0.2


def test_what_is_written_is_what_dispatch_reads(fitting: ModuleType) -> None:
    fitted = fitting.table(planted("torch", KNOWN, SHAPES), H200)
    text = fitting.written(fitted, H200, {"fitted": "today"})
    ((group, kinds),) = cost.load(text, "text", "h200").items()
    assert group == "linear 16" and set(kinds) == {"x weight"}  # three calls of one row, and of 16, are too few
    read, coefficients = kinds["x weight"]["torch"], fitted[group]["x weight"]["torch"]
    assert read.memory == pytest.approx(coefficients.memory, rel=1e-3) and len(read.places) == 15
    assert read.sizes["weight"] == pytest.approx(coefficients.sizes["weight"], abs=1e-3)
    for one in planted("torch", KNOWN, SHAPES):
        assert read.seconds(one.work, H200) == pytest.approx(coefficients.seconds(one.work, H200), rel=2e-3)
    assert max(map(len, text.splitlines())) < 400 and text.count("\n") < 200  # lists of numbers on one line
    # six are enough
    more = planted("torch", KNOWN, [*SHAPES, *((1, n, 4096) for n in (2048, 3072, 5120))])
    assert set(fitting.table(more, H200)[group]) == {"x weight", "one x weight"}


def test_published_results_and_lockfiles_are_read(measured: ModuleType, tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results" / "h200"
    linear = list(measured.cells(results / "linear.json.gz", H200))
    rows = files.document(results / "linear.json.gz")["rows"]
    assert len(linear) == 2 * len(rows) and linear[0].seconds == rows[0]["us"] * 1e-6
    softmax_cells = list(measured.cells(results / "full" / "softmax.json.gz", H200))
    softmax = next(c for c in softmax_cells if (c.case, c.implementation) == ("8192x8192", "cuda"))
    assert softmax.work.bytes == 2 * 2 * 8192 * 8192
    ours = {"torch", "triton.rows", "triton.long", "cuda"}  # no peer, no copy; it was measured as "triton"
    assert {c.implementation for c in softmax_cells} == ours
    widths = {n: {int(c.case.split("x")[1]) for c in softmax_cells if c.implementation == n} for n in ours}
    assert max(widths["triton.rows"]) <= 32_768 < min(widths["triton.long"])
    entry = lockfile_entry.Entry(
        implementation="torch",
        seconds=1e-5,
        kernels=kernel_code.digest("softmax"),
        case="8192x8192 bfloat16",
        candidates=[{"implementation": "torch", "seconds": 1e-5}, {"implementation": "cuda", "error": "no room"}],
    )
    path = tmp_path / "lock.json"
    lockfile_document.record(path, H200, {"softmax": {"x=bfloat16[2^4,64]c": entry}})
    (one,) = measured.cells(path, H200)
    assert (one.op, one.implementation, one.seconds) == ("softmax", "torch", 1e-5) and one.work == softmax.work
    # what regret measured, of shapes that no grid has
    cells = [
        {
            "op": "rope_backward",
            "case": "B3 H4/2 S3843 D128",
            "seconds": {"triton": 1e-5, "cuda, its own plan": 1.0},
            "hopeless": {"torch": 2e-4},
            "untrusted": [],
        },
        {"op": "linear", "case": "3x5120x5120", "seconds": {"torch": 1.0}, "hopeless": {}, "untrusted": ["throttled"]},
        {"op": "linear", "case": "4x5120x5120", "failed": "no room"},
    ]
    judged = tmp_path / "regret.json"
    document = {"kind": "ferryman-regret", "environment": {"profile": "h200"}, "dtype": "bf16", "cells": cells}
    judged.write_text(json.dumps(document))
    drawn = list(measured.cells(judged, H200))
    assert [(c.op, c.implementation, c.seconds) for c in drawn] == [
        ("rope_backward", "triton", 1e-5),
        ("rope_backward", "torch", 2e-4),
    ]
    assert drawn[0].work.sizes["grad_q"] == (math.log2(3 * 4 * 3843), 7.0)
    with pytest.raises(ResultError, match="is of h200, not of mi300x"):
        list(measured.cells(path, profile_of("mi300x")))


# ---------------------------------------------------------------------------------------------------- command line


def run(script: ModuleType, monkeypatch: pytest.MonkeyPatch, *arguments: object) -> object:
    """Its exit code, or the message that it exits with 1 by."""
    monkeypatch.setattr(sys, "argv", ["fit_costs.py", *map(str, arguments)])
    try:
        script.main()
    except SystemExit as stopped:
        return stopped.code
    return 0


def locked(path: Path, kernels: str | None = None, case: str = "8192x8192 bfloat16") -> Path:
    """A lockfile of one entry with two times."""
    entry = lockfile_entry.Entry(
        implementation="torch",
        seconds=1e-5,
        kernels=kernels or kernel_code.digest("softmax"),
        case=case,
        candidates=[{"implementation": "torch", "seconds": 1e-5}, {"implementation": "cuda", "seconds": 2e-5}],
    )
    lockfile_document.record(path, H200, {"softmax": {"x=bfloat16[2^13,8192]c": entry}})
    return path


@pytest.fixture
def data(script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of profiles' data that holds a costs file of two ops."""
    folder = tmp_path / "data"
    folder.mkdir()
    monkeypatch.setattr(script, "DATA", folder)
    (folder / "h200.costs.json.gz").write_text('{"ops": {"linear 16": {}, "softmax 16": {}}}')
    return folder / "h200.costs.json.gz"


def test_a_file_without_times_fails_and_says_what_was_left_out(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = data.read_text()
    stale = locked(tmp_path / "stale.json", kernels="0" * 64)
    message = run(script, monkeypatch, "h200", stale, "--write", "--drop")
    assert "no times in" in str(message) and "stale.json (2 stale)" in str(message) and data.read_text() == before
    unknown = locked(tmp_path / "unknown.json", case="3x3 bfloat16")
    assert "unknown.json (2 of unknown cases)" in str(run(script, monkeypatch, "h200", unknown))
    assert "unknown.json: 0 times; left out: 2 of unknown cases" in capsys.readouterr().out
    drawn = tmp_path / "drawn.json"
    strange = [{"op": op, "case": "1x2x3", "seconds": {"torch": 1.0}} for op in ("softmax", "no_such_op")]
    hot = {"op": "softmax", "case": "3x4096", "seconds": {"torch": 1.0}, "untrusted": ["hot"]}
    document = {"kind": "ferryman-regret", "environment": {"profile": "h200"}, "dtype": "bf16"}
    drawn.write_text(json.dumps({**document, "cells": [*strange, hot]}))
    assert "(2 of unknown cases, 1 not to be trusted)" in str(run(script, monkeypatch, "h200", drawn))


def test_an_op_vanishes_from_the_costs_only_where_that_is_asked_for(
    script: ModuleType, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, file = data.read_text(), locked(tmp_path / "lock.json")
    message = run(script, monkeypatch, "h200", file, "--write")
    assert "would vanish: linear 16 (op" in str(message) and data.read_text() == before
    assert run(script, monkeypatch, "h200", file) == 0 and data.read_text() == before
    data.write_text("[")
    assert run(script, monkeypatch, "h200", file, "--write") == 2
    assert run(script, monkeypatch, "h200", file, "--write", "--drop") == 0
    assert set(cost.load(files.unpacked(data.read_bytes()).decode(), "text", "h200")) == {"softmax 16"}
    assert run(script, monkeypatch, "h200", file, "--write") == 0  # nothing vanishes
    assert [path.name for path in data.parent.iterdir()] == [data.name]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "cannot be read"),
        ('{"kind": "ferryman-lock', "is not JSON"),
        ("[]", "holds a list; required: a document"),
        ('{"x": 1}', "none of a document of ferryman bench, a lockfile"),
        ('{"device": "NVIDIA H200", "rows": [{}]}', "rows.0.m"),
        ('{"kind": "ferryman-regret", "environment": {"profile": "h200"}}', "dtype"),
        ('{"kind": "ferryman-lockfile"}', "required: a ferryman-lockfile"),
        ('{"device": "A", "rows": []}', "is of A, not of"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_line(
    script: ModuleType,
    text: str | None,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "given.json"
    if text is not None:
        path.write_text(text)
    assert run(script, monkeypatch, "h200", path) == 2
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.startswith("fit_costs: ") and complaint.count("\n") == 1


def test_an_unknown_profile_is_one_line(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(script, monkeypatch, "h20000", "x.json") == 2
    assert capsys.readouterr().err.startswith("fit_costs: unknown ")
