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

from ferryman import ops
from ferryman.device_profiles import profile as profile_of
from ferryman.dispatch import cost, lockfile, lockfile_document

ROOT = Path(__file__).parents[2]
H200 = profile_of("h200")
LINEAR = ops.linear.primitive
SHAPES = [(m, n, 4096) for m in (1, 16, 128, 1024, 8192) for n in (1024, 4096, 14_336)]


@pytest.fixture(scope="module")
def fitting() -> ModuleType:
    spec = importlib.util.spec_from_file_location("fit_costs", ROOT / "benchmarks" / "fit_costs.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def arguments(m: int, n: int, k: int) -> tuple[Any, ...]:
    x, weight = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in ((m, k), (n, k)))
    return x, weight, None


def work(m: int, n: int, k: int) -> cost.Work:
    return cost.work_of(LINEAR, arguments(m, n, k))


def planted(
    fitting: ModuleType, name: str, known: cost.Coefficients, shapes: list[tuple[int, int, int]]
) -> list[object]:
    found = []
    for shape in shapes:
        seconds = known.seconds(work(*shape), H200)
        region = lockfile.region(LINEAR, arguments(*shape))
        found.append(fitting.Measured("linear", "x".join(map(str, shape)), name, seconds, work(*shape), region))
    return found


KNOWN = cost.Coefficients(4e-6, 0.85, 0.6, 0.01, 1, {})


def test_known_coefficients_come_back(fitting: ModuleType) -> None:
    made = fitting.fit(planted(fitting, "torch", KNOWN, SHAPES), H200)
    assert (made.fixed, made.memory, made.compute) == pytest.approx((4e-6, 0.85, 0.6), rel=0.02)
    assert made.cells == 15 and made.error < 0.02
    assert made.sizes["x"] == (0.0, 13.0, 12.0, 12.0) and made.sizes["weight"] == (10.0, math.log2(14_336), 12.0, 12.0)
    assert made.covers(work(4, 4096, 4096)) and not made.covers(work(4, 4096, 16_384))


def test_one_bad_cell_does_not_turn_a_fit(fitting: ModuleType) -> None:
    cells = planted(fitting, "torch", KNOWN, SHAPES)
    bad = fitting.Measured("linear", "bad", "torch", 50 * cells[7].seconds, cells[7].work, "")  # type: ignore[attr-defined]
    made = fitting.fit([*cells[:7], bad, *cells[8:]], H200)
    assert (made.fixed, made.memory, made.compute) == pytest.approx((4e-6, 0.85, 0.6), rel=0.1)


def test_one_cell_is_met_by_what_bounds_it_and_claims_no_small_error(fitting: ModuleType) -> None:
    cells = planted(fitting, "torch", KNOWN, [(8192, 8192, 8192)])
    made = fitting.fit(cells, H200)
    assert made.seconds(cells[0].work, H200) == pytest.approx(cells[0].seconds, rel=0.02)  # type: ignore[attr-defined]
    assert made.error == fitting.FEW_ERROR and made.cells == 1


def test_the_regret_of_cells_left_out_is_that_of_the_planted_times(fitting: ModuleType) -> None:
    """cuda is twice as fast as torch, which preference takes: alone its regret is 1, that of what knows times is 0."""
    fast = cost.Coefficients(2e-6, 0.9, 0.8, 0.01, 1, {})
    slow = cost.Coefficients(4e-6, 0.45, 0.4, 0.01, 1, {})
    cells = planted(fitting, "cuda", fast, SHAPES) + planted(fitting, "torch", slow, SHAPES)
    found = fitting.regret(cells, H200)["linear 16"]
    assert found.pop("preference") == pytest.approx([1.0] * 15)
    assert found["near regions"] == found["dispatch"] == [0.0] * 15
    assert found["cost model"] == [1.0, *[0.0] * 13, 1.0]  # nothing as small, or as large, is left: preference
    # whole weights left out: of those at the edge nothing is known, the one between is predicted
    whole = fitting.regret(cells, H200, whole=True)["linear 16"]["cost model"]
    assert whole == [*[1.0] * 5, *[0.0] * 5, *[1.0] * 5]
    assert {fitting.family("linear", c.case) for c in cells} == {f"{n}x4096" for n in (1024, 4096, 14_336)}
    assert fitting.family("attention", "B4 H4/2 Q1 K764 D64 causal") == "H4/2 Q1 D64"
    assert fitting.family("rope", "B4 H4/2 S764 D64") == "H4/2 D64" and fitting.family("softmax", "8x4096") == "4096"


def test_what_the_formula_misses_is_found_at_its_place(fitting: ModuleType) -> None:
    """A kernel that is 1.5 times as slow at wide weights: the fit says so there."""
    cells = [
        dataclasses.replace(c, seconds=c.seconds * (1.5 if "x14336x" in c.case else 1.0))
        for c in planted(fitting, "torch", KNOWN, SHAPES)
    ]  # fmt: skip
    made = fitting.fit(cells, H200)
    plain = dataclasses.replace(made, places=(), weights=())
    assert len(made.places) == len(made.weights) == 15
    missed = {
        width: [math.log(made.seconds(c.work, H200) / c.seconds) for c in cells if c.case.split("x")[1] == width]
        for width in ("1024", "14336")
    }  # fmt: skip
    formula = [math.log(plain.seconds(c.work, H200) / c.seconds) for c in cells if c.case.split("x")[1] == "14336"]
    assert max(map(abs, missed["14336"] + missed["1024"])) < 0.12 and max(map(abs, formula)) > 0.2


def test_what_is_written_is_what_dispatch_reads(fitting: ModuleType) -> None:
    fitted = fitting.table(planted(fitting, "torch", KNOWN, SHAPES), H200)
    text = fitting.written(fitted, H200, {"fitted": "today"})
    ((group, kinds),) = cost.load(text, "text", "h200").items()
    assert group == "linear 16" and set(kinds) == {"x weight"}  # three calls of one row, and of 16, are too few
    read, made = kinds["x weight"]["torch"], fitted[group]["x weight"]["torch"]
    assert read.memory == pytest.approx(made.memory, rel=1e-3) and len(read.places) == 15
    assert read.sizes["weight"] == pytest.approx(made.sizes["weight"], abs=1e-3)
    for one in planted(fitting, "torch", KNOWN, SHAPES):
        assert read.seconds(one.work, H200) == pytest.approx(made.seconds(one.work, H200), rel=2e-3)  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) < 400 and text.count("\n") < 200  # lists of numbers on one line
    # six are enough
    more = planted(fitting, "torch", KNOWN, [*SHAPES, *((1, n, 4096) for n in (2048, 3072, 5120))])
    assert set(fitting.table(more, H200)[group]) == {"x weight", "one x weight"}


def test_published_results_and_lockfiles_are_read(fitting: ModuleType, tmp_path: Path) -> None:
    results = ROOT / "benchmarks" / "results" / "h200"
    linear = list(fitting.cells(results / "linear.json", H200))
    rows = json.loads((results / "linear.json").read_text())["rows"]
    assert len(linear) == 2 * len(rows) and linear[0].seconds == rows[0]["us"] * 1e-6
    found = list(fitting.cells(results / "full" / "softmax.json", H200))
    softmax = next(c for c in found if (c.case, c.implementation) == ("8192x8192", "cuda"))
    assert softmax.work.bytes == 2 * 2 * 8192 * 8192
    assert {c.implementation for c in found} == {"torch", "triton", "cuda"}  # no peer, no copy
    entry = lockfile_document.Entry(
        implementation="torch", seconds=1e-5, kernels=lockfile_document.digest("softmax"), case="8192x8192 bfloat16",
        candidates=[{"implementation": "torch", "seconds": 1e-5}, {"implementation": "cuda", "error": "no room"}],
    )  # fmt: skip
    path = tmp_path / "lock.json"
    lockfile_document.record(path, H200, {"softmax": {"x=bfloat16[2^4,64]c": entry}})
    (one,) = fitting.cells(path, H200)
    assert (one.op, one.implementation, one.seconds) == ("softmax", "torch", 1e-5) and one.work == softmax.work
    # what regret measured, of shapes that no grid has
    cells = [
        {"op": "rope_backward", "case": "B3 H4/2 S3843 D128", "seconds": {"triton": 1e-5, "cuda, its own plan": 1.0},
         "hopeless": {"torch": 2e-4}, "untrusted": []},
        {"op": "linear", "case": "3x5120x5120", "seconds": {"torch": 1.0}, "hopeless": {}, "untrusted": ["throttled"]},
        {"op": "linear", "case": "4x5120x5120", "failed": "no room"},
    ]  # fmt: skip
    judged = tmp_path / "regret.json"
    document = {"kind": "ferryman-regret", "environment": {"profile": "h200"}, "dtype": "bf16", "cells": cells}
    judged.write_text(json.dumps(document))
    drawn = list(fitting.cells(judged, H200))
    assert [(c.op, c.implementation, c.seconds) for c in drawn] == [
        ("rope_backward", "triton", 1e-5), ("rope_backward", "torch", 2e-4),
    ]  # fmt: skip
    assert drawn[0].work.sizes["grad_q"] == (math.log2(3 * 4 * 3843), 7.0)
    with pytest.raises(SystemExit, match="is of h200, not of mi300x"):
        list(fitting.cells(path, profile_of("mi300x")))
