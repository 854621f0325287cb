"""The result document: a round trip, refusals of what is damaged or newer, and renderings that never claim too much."""

from __future__ import annotations

import json
import math
import xml.etree.ElementTree as ET
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman import files
from ferryman.device_profiles import detect
from ferryman.errors import ResultError
from ferryman.porting.judging import results
from ferryman.porting.judging.results import SCHEMA_VERSION, Cell, Gate, Results, Timing, WorstElement
from ferryman.porting.report import junit, markdown


def cell(verdict: str, op: str = "rms_norm", implementation: str = "torch", **more: Any) -> Cell:
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "case": "prime", "verdict": verdict} | more
    return Cell(op=op, implementation=implementation, **given)


def document(*cells: Cell, timings: tuple[Timing, ...] = ()) -> Results:
    cpu = torch.device("cpu")
    return results.results(results.environment(cpu, detect(cpu), 0, "small", 1.5), cells, timings)


FULL = document(
    cell("PASS", ratio=0.5, noise=0.8, seconds=1e-5, gates={"G2": Gate(outcome="pass", measure=0.5)}),
    cell(
        "FAIL",
        case="fill_nonfinite",
        ratio=math.inf,
        reason="G0: y[1] is nan, expected 0 | or so",
        worst=WorstElement(output="y", index=[1], value=math.nan, expected=0.0, bound=1e-7),
        gates={"G0": Gate(outcome="fail", reason="y[1] is nan, expected 0")},
    ),
    cell("SIMULATED", implementation="triton", ratio=0.25),
    cell("NOT_RUN", implementation="triton", case="2 of 3 cases", reason="left out"),
    cell("NOT_RUN", implementation="cuda", case="all", reason="cuda does not serve cpu devices", refusals=["cuda"]),
    cell("UNIMPLEMENTED", op="softmax", implementation="hip", reason="x.stride[-1] is 2; required: 1", refusals=["x"]),
    timings=(
        Timing(
            op="rms_norm",
            implementation="torch",
            device="cpu",
            dtype="float32",
            case="prime",
            seconds=2e-5,
            clock="host clock",
            percent_of_roofline=61.0,
            bound_by="memory",
        ),
    ),
)


def test_round_trip_keeps_everything_and_is_strict_json(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    results.save(FULL, path)
    again = results.load(path)
    assert results.dumps(again) == results.dumps(FULL)

    def constant(token: str) -> float:
        raise AssertionError(f"{token} is not JSON")

    raw = json.loads(path.read_text(), parse_constant=constant)
    assert raw["schema_version"] == SCHEMA_VERSION and raw["kind"] == "ferryman-results"
    assert {"op", "implementation", "device", "dtype", "case", "verdict", "ratio", "gates"} <= set(raw["cells"][0])
    assert raw["cells"][1]["worst"]["value"] == "NaN" and math.isnan(again.cells[1].worst.value)  # type: ignore[union-attr]
    assert {"torch", "python"} <= set(raw["environment"]["versions"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda d: d.update(schema_version=SCHEMA_VERSION + 1),
            f"schema version {SCHEMA_VERSION + 1}; this Ferryman reads up to {SCHEMA_VERSION}",
        ),
        (lambda d: d.update(schema_version="1"), "schema_version is '1'"),
        (lambda d: d.update(schema_version=True), "schema_version is True"),
        (lambda d: d.update(kind="other"), "not a Ferryman result document"),
        (lambda d: d.update(surprise=1), "surprise"),
        (lambda d: d["cells"][0].update(verdict="GREEN"), "cells.0.verdict"),
        (lambda d: d["cells"][0].update(op="../../etc/passwd"), "cells.0.op"),
        (lambda d: d["cells"][0].pop("case"), "cells.0.case"),
        (lambda d: d["cells"][1].update(verdict="PASS"), "summary does not follow"),
        (lambda d: d["summary"].pop(), "summary does not follow"),
        (lambda d: d["cells"][0]["gates"].update(G9={"outcome": "pass"}), "gates"),
    ],
)
def test_damaged_or_newer_documents_are_refused(tmp_path: Path, change: Any, message: str) -> None:
    raw = json.loads(results.dumps(FULL))
    change(raw)
    path = tmp_path / "r.json"
    path.write_text(json.dumps(raw))
    with pytest.raises(ResultError, match=message):
        results.load(path)


@pytest.mark.parametrize("text", ["", "{", '{"kind": NaN}', "[" * 200_000, "\x00", "[]", "null"])
def test_what_is_not_a_document_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(ResultError, match=r"r\.json"):
        results.load(path)
    with pytest.raises(ResultError, match="cannot be read"):
        results.load(tmp_path / "none.json")


def test_a_document_over_the_size_limit_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    with path.open("wb") as file:
        file.truncate(files.MOST_BYTES + 1)
    with pytest.raises(ResultError, match=f"at most {files.MOST_BYTES}"):
        results.load(path)


def test_a_row_is_as_bad_as_its_worst_cell_and_green_only_if_something_ran() -> None:
    rows = {(r.op, r.implementation): r for r in FULL.summary}
    assert rows["rms_norm", "torch"].verdict == "FAIL" and rows["rms_norm", "torch"].counts == {"PASS": 1, "FAIL": 1}
    assert rows["rms_norm", "triton"].verdict == "SIMULATED"
    assert rows["rms_norm", "cuda"].verdict == "NOT_RUN" and rows["rms_norm", "cuda"].refusals == 1
    assert rows["softmax", "hip"].verdict == "UNIMPLEMENTED"
    assert results.row_verdict({}) == "NOT_RUN"
    assert results.row_verdict({"PASS": 9, "MISTRUSTED": 1}) == "MISTRUSTED"


def test_only_wrong_and_untrustworthy_cells_fail_the_check() -> None:
    assert results.failed(FULL)
    assert results.failed(document(cell("MISTRUSTED")))
    assert not results.failed(document(cell("PASS"), cell("NOT_RUN"), cell("SIMULATED"), cell("QUARANTINED")))


def test_markdown_states_verdicts_failures_and_reasons() -> None:
    text = markdown(FULL)
    assert "| `rms_norm` | torch | FAIL | 1 PASS, 1 FAIL | - | inf | 20 us (f32 prime) | 61% (memory) |" in text
    assert "case `fill_nonfinite`: FAIL. G0: y[1] is nan" in text
    assert "- cuda: NOT_RUN, 1 cells: cuda does not serve cpu devices" in text
    assert "x.stride[-1] is 2" in text and "**SIMULATED**: ran elsewhere: interpreted," in text
    for line in text.splitlines():
        if "NOT_RUN" in line or "SIMULATED" in line:
            assert "passed" not in line.lower()


def test_junit_passes_only_what_passed() -> None:
    root = ET.fromstring(junit(FULL))
    cases = {(c.get("classname"), c.get("name")): c for c in root.iter("testcase")}
    assert len(cases) == 6
    outcome = {key: [child.tag for child in c] for key, c in cases.items()}
    assert outcome["rms_norm.torch", "prime[float32]"] == []
    assert outcome["rms_norm.torch", "fill_nonfinite[float32]"] == ["failure"]
    skipped = [k for k, tags in outcome.items() if tags == ["skipped"]]
    assert len(skipped) == 4
    message = next(cases["rms_norm.cuda", "all[float32]"].iter("skipped")).get("message")
    assert message == "NOT_RUN: cuda does not serve cpu devices"
    assert root.get("failures") == "1" and root.get("skipped") == "4" and root.get("tests") == "6"


def test_junit_survives_control_characters() -> None:
    text = junit(document(cell("QUARANTINED", reason="ptxas: \x1b[31merror\x00")))
    error = next(ET.fromstring(text).iter("error"))
    assert "ptxas" in (error.get("message") or "")


def test_the_schema_is_exported_and_has_room_for_the_other_gates() -> None:
    schema = results.schema()
    text = json.dumps(schema)
    assert all(f'"G{i}"' in text for i in range(8)) and "capsule" in text
