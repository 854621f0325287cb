"""Several machines side by side: what is not run is never green, and who is wrong is said."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ferryman.errors import CapsuleError, ResultError
from ferryman.porting.capsule import compare
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule.replay import replay
from ferryman.porting.judging.results import (
    SCHEMA_VERSION,
    Cell,
    Environment,
    Gate,
    Results,
    Timing,
    Verdict,
    dumps,
    results,
)
from tests.unit.capsules import small


def machine(name: str, vendor: str, seed: int = 0) -> Environment:
    return Environment(
        device="cuda:0",
        device_name=name,
        profile=name,
        arch=name,
        vendor=vendor,
        versions={"torch": "2.13"},
        flags={},
        platform="linux",
        time="2026-01-01T00:00:00+00:00",
        seed=seed,
        tier="standard",
    )


def cell(case: str, verdict: Verdict = "PASS", implementation: str = "triton", **fields: Any) -> Cell:
    given = {"op": "softmax", "device": "cuda:0", "dtype": "bfloat16", "ratio": 0.5 if verdict == "PASS" else None}
    return Cell(**{**given, "implementation": implementation, "case": case, "verdict": verdict, **fields})


def timed(percent: float, implementation: str = "triton") -> Timing:
    return Timing(
        op="softmax",
        implementation=implementation,
        device="cuda:0",
        dtype="bfloat16",
        case="scores",
        seconds=1e-5,
        clock="device events",
        floor_seconds=1e-7 * percent,
        percent_of_roofline=percent,
        bound_by="memory",
    )


def written(folder: Path, **documents: Results) -> list[Path]:
    paths = []
    for name, document in documents.items():
        paths.append(folder / f"{name}.json")
        paths[-1].write_text(dumps(document), encoding="utf-8")
    return paths


def test_two_vendors_within_bounds_each_with_its_own_roofline(tmp_path: Path) -> None:
    nvidia = results(machine("h200", "nvidia"), [cell("a"), cell("b")], [timed(80)])
    amd = results(machine("mi300x", "amd"), [cell("a", ratio=0.7), cell("b")], [timed(55)])
    comparison = compare.compare(written(tmp_path, nvidia=nvidia, amd=amd))
    (row,) = comparison.rows
    assert (row.explanation, row.cases, row.common) == ("all within bounds", {"all within bounds": 2}, 2)
    assert [p.percent_of_roofline for p in row.sides] == [80, 55] and [p.ratio for p in row.sides] == [0.5, 0.7]
    assert [s.label for s in comparison.sides] == ["A", "B"] and not compare.failed(comparison)
    assert "made by each side from counters" in comparison.notes[0]


def test_what_a_vendor_did_not_run_is_not_run(tmp_path: Path) -> None:
    nvidia = results(machine("h200", "nvidia"), [cell("a", implementation="cuda"), cell("a")])
    amd = results(
        machine("mi300x", "amd"),
        [
            cell("all", "NOT_RUN", "cuda", reason="cuda does not serve amd devices"),
            cell("a", "SIMULATED"),
        ],
    )
    third = results(machine("b580", "intel"), [])
    comparison = compare.compare(written(tmp_path, nvidia=nvidia, amd=amd, intel=third))
    rows = {row.implementation: row for row in comparison.rows}
    assert [p.verdict for p in rows["cuda"].sides] == ["PASS", "NOT_RUN", "NOT_RUN"]
    assert [p.verdict for p in rows["triton"].sides] == ["PASS", "SIMULATED", "NOT_RUN"]
    assert {row.explanation for row in comparison.rows} == {"did not run"}
    assert rows["cuda"].who == rows["triton"].who == ["B", "C"] and rows["cuda"].common == 0
    assert rows["cuda"].sides[2].reason == "not in its document"
    assert not compare.failed(comparison)


def test_cases_that_ran_on_both_speak_for_the_row_and_the_others_are_counted(tmp_path: Path) -> None:
    nvidia = results(machine("h200", "nvidia"), [cell("a"), cell("b"), cell("c")])
    amd = results(machine("mi300x", "amd"), [cell("a"), cell("b", "UNIMPLEMENTED"), cell("c", "NOT_RUN")])
    (row,) = compare.compare(written(tmp_path, nvidia=nvidia, amd=amd)).rows
    assert row.explanation == "all within bounds" and row.common == 1
    assert row.cases == {"all within bounds": 1, "did not run": 2}


@pytest.mark.parametrize("verdict", ["FAIL", "MISTRUSTED", "QUARANTINED"])
def test_whoever_is_wrong_is_named_and_the_exit_is_not_clean(tmp_path: Path, verdict: Verdict) -> None:
    gates = {"G2": Gate(outcome="fail", reason="far")}
    nvidia = results(machine("h200", "nvidia"), [cell("a"), cell("b")])
    amd = results(machine("mi300x", "amd"), [cell("a"), cell("b", verdict, reason="G2: far", gates=gates)])
    comparison = compare.compare(written(tmp_path, nvidia=nvidia, amd=amd))
    (row,) = comparison.rows
    assert row.explanation == ("wrong" if verdict == "FAIL" else "not judged")
    assert row.who == ["B"] and row.detail == "b: B: G2: far" and row.sides[1].verdict == verdict
    assert compare.failed(comparison)


def test_nothing_ran_anywhere_is_a_failure(tmp_path: Path) -> None:
    idle = [results(machine(n, "amd"), [cell("a", "NOT_RUN")]) for n in ("x", "y")]
    assert compare.failed(compare.compare(written(tmp_path, x=idle[0], y=idle[1])))


def test_a_capsule_and_its_replays_are_proven_to_share_inputs(tmp_path: Path) -> None:
    path = tmp_path / "a.capsule"
    capsule.save(small(), path)
    for name in ("b", "c"):
        document = replay(capsule.load(path), "cpu", backends=["definition"])
        (tmp_path / f"{name}.json").write_text(document.model_dump_json(), encoding="utf-8")
    comparison = compare.compare([path, tmp_path / "b.json", tmp_path / "c.json"])
    assert [s.role for s in comparison.sides] == ["recorded", "replayed", "replayed"], "A's recording counts once"
    assert {row.explanation for row in comparison.rows} == {"equal"} and not compare.failed(comparison)
    assert comparison.notes[0] == "every side had the inputs of one capsule, proven by hash"


def test_seeds_that_differ_are_said(tmp_path: Path) -> None:
    sides = [results(machine(n, "amd", seed), [cell("a")]) for n, seed in (("x", 0), ("y", 1))]
    assert "the seeds differ" in compare.compare(written(tmp_path, x=sides[0], y=sides[1])).notes[0]


def test_a_declared_class_that_explains_a_difference_is_said(tmp_path: Path) -> None:
    path, document = tmp_path / "r.json", replay(capsule.loads(small()), "cpu", backends=["definition"])
    first = document.explained[0]
    beyond = first.a.model_copy(update={"hash": "0" * 64, "plain": 3.0, "declared": "split-k"})
    changed = first.model_copy(update={"a": beyond, "explanation": "A's declared class explains it"})
    document = document.model_copy(update={"explained": [changed, *document.explained[1:]]})
    path.write_text(document.model_dump_json(), encoding="utf-8")
    (row,) = compare.compare([path]).rows
    assert row.explanation == "a declared class explains it" and row.who == ["A"]
    assert row.detail == f"{first.case}: A declares split-k: 3 bounds without"


def test_what_cannot_be_compared_is_refused(tmp_path: Path) -> None:
    one = results(machine("x", "amd"), [cell("a")])
    (path,) = written(tmp_path, one=one)
    with pytest.raises(ResultError, match="1 machines to compare"):
        compare.compare([path])
    with pytest.raises(ResultError, match="17 machines"):
        compare.compare([path] * 17)
    with pytest.raises(ResultError, match="cannot be read"):
        compare.compare([path, tmp_path / "absent.json"])
    newer = tmp_path / "newer.json"
    text = path.read_text().replace(f'"schema_version":{SCHEMA_VERSION}', '"schema_version":99')
    newer.write_text(text, encoding="utf-8")
    with pytest.raises(ResultError, match="schema version 99"):
        compare.compare([path, newer])
    damaged = tmp_path / "damaged.capsule"
    damaged.write_bytes(small()[:-7])
    with pytest.raises(CapsuleError, match="truncated"):
        compare.compare([path, damaged])
