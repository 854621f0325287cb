"""The gate: no planted dishonest situation is green, each with its reason; no honest one is refused."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ferryman.porting.ci import expected
from ferryman.porting.ci.changes import Decision
from ferryman.porting.ci.merged import Merged
from ferryman.porting.ci.row import Row, Skip
from tests.unit.ci_world import (
    COMMIT,
    JUNIT,
    MATRIX,
    NOW,
    OTHER,
    TESTS,
    Job,
    World,
    ago,
    codes,
    document,
    numerics,
    state,
)
from tests.unit.ci_world import repository as make

Jobs = dict[str, Job]


@dataclass(frozen=True)
class Situation:
    """What comes back, changed; the row that must not be green (or must be), and the reason that must be named."""

    name: str
    row: str
    code: str
    change: Callable[[Jobs, World], dict[str, Any] | None]


def record(row: str, **values: Any) -> Callable[[Jobs, World], None]:
    def change(jobs: Jobs, world: World) -> None:
        jobs[row].record.update(values)

    return change


def device(row: str, **values: Any) -> Callable[[Jobs, World], None]:
    def change(jobs: Jobs, world: World) -> None:
        jobs[row].record["device"].update(values)

    return change


def outcome(row: str, what: str, index: int = 1, **values: Any) -> Callable[[Jobs, World], None]:
    def change(jobs: Jobs, world: World) -> None:
        run_record = jobs[row].record
        run_record["cases"][index].update(outcome=what, **values)
        counts = [c["launches"] for c in run_record["cases"] if c["launches"] is not None]
        run_record["launches"] = sum(counts) if counts else None

    return change


def cells(change: Callable[[dict[str, Any]], None]) -> Callable[[Jobs, World], None]:
    """The result document of `check` and its record, changed together with the document's own summary and manifest."""

    def apply(jobs: Jobs, world: World) -> None:
        from ferryman.porting.judging import results

        def whole(raw: dict[str, Any]) -> None:
            change(raw)
            changed_cells = [results.Cell.model_validate(cell) for cell in raw["cells"]]
            raw["summary"] = [row.model_dump() for row in results.summarise(changed_cells)]
            raw["provenance"]["manifest"] = sorted(map(results.cell_id, changed_cells))
            jobs["check"].record["collected"] = raw["provenance"]["manifest"]

        jobs["check"].files["check.json"] = document(world.matrix.row("check"), jobs["check"].record, whole)
        document_cells = json.loads(jobs["check"].files["check.json"])["cells"]
        jobs["check"].record["launches"] = sum(cell["verdict"] == "PASS" for cell in document_cells)

    return apply


def raw_cells(change: Callable[[dict[str, Any]], None]) -> Callable[[Jobs, World], None]:
    def apply(jobs: Jobs, world: World) -> None:
        jobs["check"].files["check.json"] = document(world.matrix.row("check"), jobs["check"].record, change)

    return apply


def renamed(jobs: Jobs, world: World) -> None:
    """An H200's record, called an MI300X's in every word; its numbers stay."""
    jobs["mi300x"] = world.job("h200")
    run_record = jobs["mi300x"].record
    mine = world.job("mi300x").record
    run_record.update({k: mine[k] for k in ("row", "row_digest", "device", "kernels", "command")})
    jobs["mi300x"].files["tests.json"] = "another"


def renamed_document(jobs: Jobs, world: World) -> None:
    """The document of check says MI300X, its record H200."""

    def change(raw: dict[str, Any]) -> None:
        raw["environment"].update(profile="mi300x", arch="gfx942", vendor="amd")

    raw_cells(change)(jobs, world)


def twice(jobs: Jobs, world: World) -> None:
    jobs["again"] = jobs["h200"].copied(folder="h200-again")


def shared(jobs: Jobs, world: World) -> None:
    """One row's tests, handed in as another's too."""
    jobs["h200"].files["junit.xml"] = JUNIT
    jobs["gtest"].files["junit.xml"] = JUNIT


def retried(jobs: Jobs, world: World) -> None:
    """Failed, run again until it passed: both are here."""
    jobs["first"] = world.job("h200").copied(folder="h200-first")
    run_record = jobs["first"].record
    run_record.update(exit_code=1, started=ago(minutes=40), finished=ago(minutes=30))
    run_record["cases"][0]["outcome"] = "failed"
    jobs["first"].files["tests.json"] = "another"


def picked(jobs: Jobs, world: World) -> dict[str, Any]:
    """A run of this commit failed after the one that is handed in."""
    return {"history": [world.entry("h200", commit=COMMIT, time=ago(minutes=1), verdict="FAIL", met=False)]}


def fewer(jobs: Jobs, world: World) -> None:
    """A test is gone from the collection of the device alone."""
    run_record = jobs["h200"].record
    run_record["collected"], run_record["cases"] = run_record["collected"][:2], run_record["cases"][:2]
    run_record["launches"] = 4


def swapped(jobs: Jobs, world: World) -> None:
    """As many cases as must be, and one of them is another."""
    run_record = jobs["h200"].record
    run_record["collected"][2] = run_record["cases"][2]["id"] = "tests/test_k.py::test_easy"


def other_ids(jobs: Jobs, world: World) -> None:
    jobs["h200"].record["cases"][2]["id"] = "tests/test_k.py::test_easy"


def history_ids(jobs: Jobs, world: World) -> dict[str, Any]:
    """All rows lost the same test; the same sources had it yesterday."""
    for name in ("cpu", "h200", "mi300x"):
        run_record = jobs[name].record
        run_record["collected"], run_record["cases"] = run_record["collected"][:2], run_record["cases"][:2]
        if run_record["launches"]:
            run_record["launches"] = 4
    return {"history": [world.entry("h200")]}


def gone(row: str) -> Callable[[Jobs, World], None]:
    def change(jobs: Jobs, world: World) -> None:
        del jobs[row]

    return change


def nothing(jobs: Jobs, world: World) -> None:
    jobs.clear()


def alone(jobs: Jobs, world: World) -> dict[str, Any]:
    del jobs["gtest"]
    return {"files": {"gtest/junit.xml": JUNIT}}


def bare(jobs: Jobs, world: World) -> dict[str, Any]:
    text = jobs.pop("check").files["check.json"]
    return {"files": {"check/check.json": text}}


def altered(jobs: Jobs, world: World) -> None:
    jobs["gtest"].files["junit.xml"] = JUNIT.replace('name="b"', 'name="bb"')
    jobs["gtest"].hashes["junit.xml"] = "0" * 64


def truncated(jobs: Jobs, world: World) -> None:
    jobs["h200"].raw = json.dumps(jobs["h200"].record)[:200]


def newer(jobs: Jobs, world: World) -> None:
    jobs["h200"].raw = json.dumps({**jobs["h200"].record, "schema_version": 9})


def kernels(jobs: Jobs, world: World) -> None:
    jobs["h200"].record["kernels"]["kernels/k.py"] = "0" * 64


def carried_changed(jobs: Jobs, world: World) -> dict[str, Any]:
    """Out of the plan, but the sources of the last success were others."""
    del jobs["h200"]
    return {"history": [world.entry("h200", kernels="d" * 64)], "decisions": out(world, "h200")}


def carried_old(jobs: Jobs, world: World) -> dict[str, Any]:
    del jobs["h200"]
    return {"history": [world.entry("h200", time=ago(days=30))], "decisions": out(world, "h200")}


def carried_failed(jobs: Jobs, world: World) -> dict[str, Any]:
    del jobs["h200"]
    past = [world.entry("h200"), world.entry("h200", sha256="e" * 64, time=ago(hours=2), met=False, verdict="FAIL")]
    return {"history": past, "decisions": out(world, "h200")}


def out(world: World, row: str) -> dict[str, Decision]:
    return {row: Decision(world.matrix.row(row), False, "nothing that it reaches")}


def failing_gate(raw: dict[str, Any]) -> None:
    raw["cells"][0]["gates"] = {"G2": {"outcome": "fail", "reason": "far off", "measure": 9.0}}
    raw["cells"][0]["ratio"] = 9.0


DISHONEST = [
    Situation("no results at all", "h200", "absent", nothing),
    Situation("a hardware job was skipped", "h200", "absent", gone("h200")),
    Situation("a JUnit file alone", "gtest", "alone", alone),
    Situation("a result document alone", "check", "alone", bare),
    Situation("an H200 renamed MI300X", "mi300x", "refuted", renamed),
    Situation("an H200's document renamed beside its record", "check", "contradictory", renamed_document),
    Situation("the driver names another device", "h200", "other-device", device("h200", name="NVIDIA L4")),
    Situation("another profile", "h200", "other-device", device("h200", profile="h100-sxm")),
    Situation("another vendor", "mi300x", "other-device", device("mi300x", vendor="nvidia")),
    Situation("another arch", "h200", "other-device", device("h200", arch="sm_89")),
    Situation("simulated, handed in as hardware", "mi300x", "other-device", device("mi300x", kind="simulated")),
    Situation("no fingerprint", "h200", "no-fingerprint", record("h200", numerics=[])),
    Situation("a fingerprint of another device", "h200", "refuted", record("h200", numerics=numerics("mi300x"))),
    Situation(
        "a word of the fingerprint edited",
        "h200",
        "refuted",
        lambda j, w: next(
            f
            for f in j["h200"].record["numerics"]
            if f["path"].startswith("numerics.arith") and isinstance(f["stated"], str)
        ).update(measured="up"),
    ),
    Situation("Triton interpreted on a machine with a device", "h200", "interpreted", record("h200", interpreted=True)),
    Situation(
        "launched nothing",
        "h200",
        "nothing-launched",
        lambda j, w: [c.update(launches=0) for c in j["h200"].record["cases"]] and record("h200", launches=0)(j, w),
    ),
    Situation(
        "nobody counted launches",
        "h200",
        "nothing-launched",
        lambda j, w: (
            [c.update(launches=None) for c in j["h200"].record["cases"]] and record("h200", launches=None)(j, w)
        ),
    ),
    Situation("launches that its cases did not make", "h200", "contradictory", record("h200", launches=600)),
    Situation(
        "dated 2020",
        "h200",
        "too-old",
        record("h200", started="2020-01-01T00:00:00+00:00", finished="2020-01-01T00:10:00+00:00"),
    ),
    Situation("from the future", "h200", "clock", record("h200", finished=ago(days=-2))),
    Situation("ended before it began", "h200", "clock", record("h200", started=ago(minutes=1))),
    Situation("of another commit", "h200", "other-commit", record("h200", commit=OTHER)),
    Situation("of no commit", "h200", "no-commit", record("h200", commit=None)),
    Situation("a dirty work tree", "h200", "dirty", record("h200", dirty=True)),
    Situation("another kernel", "h200", "other-kernels", kernels),
    Situation("no kernel digests", "h200", "other-kernels", record("h200", kernels={})),
    Situation("an easier row when it ran", "h200", "other-row", record("h200", row_digest="0" * 64)),
    Situation("another command", "h200", "other-command", record("h200", command=["true"])),
    Situation("one document twice", "h200", "twice", twice),
    Situation("one result for two rows", "h200", "twice", shared),
    Situation("a skipped test", "h200", "skipped", outcome("h200", "skipped", launches=None, reason="no GPU")),
    Situation(
        "all tests skipped",
        "mi300x",
        "empty",
        lambda j, w: (
            [c.update(outcome="skipped", launches=None) for c in j["mi300x"].record["cases"]]
            and record("mi300x", launches=None)(j, w)
        ),
    ),
    Situation("an xfailed test", "h200", "xfailed", outcome("h200", "xfailed", launches=2)),
    Situation("an xpassed test", "h200", "xfailed", outcome("h200", "xpassed", launches=2)),
    Situation("a deselected test", "h200", "deselected", outcome("h200", "deselected", launches=2)),
    Situation(
        "a failed test",
        "h200",
        "failed",
        lambda j, w: outcome("h200", "failed")(j, w) or record("h200", exit_code=1)(j, w),
    ),
    Situation("a failed test with exit code 0", "h200", "exit-code", outcome("h200", "failed")),
    Situation("a crash with all tests green", "h200", "exit-code", record("h200", exit_code=139)),
    Situation("run again until it passed", "h200", "rerun", outcome("h200", "rerun")),
    Situation("a whole row run again until it passed", "h200", "flaky", retried),
    Situation("an earlier success of a commit that failed since", "h200", "superseded", picked),
    Situation("a case missing on the device alone", "h200", "missing", fewer),
    Situation("a case swapped for an easier one", "h200", "missing", swapped),
    Situation("a case that was not collected", "h200", "swapped", other_ids),
    Situation("a case that all rows lost", "h200", "missing", history_ids),
    Situation(
        "a partial run",
        "h200",
        "partial",
        lambda j, w: j["h200"].record["cases"].pop() and record("h200", launches=4)(j, w),
    ),
    Situation(
        "a case twice",
        "h200",
        "contradictory",
        lambda j, w: j["h200"].record["cases"].append(dict(j["h200"].record["cases"][0], launches=None)),
    ),
    Situation("no case at all", "h200", "empty", lambda j, w: record("h200", cases=[], collected=[], launches=5)(j, w)),
    Situation("a file altered after its record", "gtest", "altered", altered),
    Situation("a truncated record", "h200", "unreadable", truncated),
    Situation("a record of a newer schema", "h200", "unreadable", newer),
    Situation(
        "a row that the matrix does not have",
        "h200",
        "unknown-row",
        lambda j, w: j.update(x=j.pop("h200").copied(record=j["mi300x"].record | {"row": "h300"}, folder="x")),
    ),
    Situation("cells dropped from check", "check", "missing", cells(lambda raw: raw["cells"].pop(3))),
    Situation("a cell of check swapped", "check", "missing", cells(lambda raw: raw["cells"][3].update(case="easy"))),
    Situation("PASS over a gate that does not hold", "check", "contradictory", cells(failing_gate)),
    Situation(
        "cells of another backend",
        "check",
        "swapped",
        cells(lambda raw: raw["cells"].append(raw["cells"][0] | {"implementation": "triton"})),
    ),
    Situation(
        "check on a CPU, handed in as hardware",
        "check",
        "other-device",
        raw_cells(lambda raw: raw["environment"].update(device="cpu")),
    ),
    Situation(
        "check of another commit beside a record of this",
        "check",
        "contradictory",
        raw_cells(lambda raw: raw["provenance"].update(commit=OTHER)),
    ),
    Situation(
        "check of an older Ferryman, without provenance",
        "check",
        "no-commit",
        raw_cells(lambda raw: raw.update(provenance=None)),
    ),
    Situation(
        "check with a summary that does not follow",
        "check",
        "unreadable",
        raw_cells(lambda raw: raw.update(summary=[])),
    ),
    Situation(
        "PASS of a simulated row",
        "sim",
        "overclaimed",
        lambda j, w: j["sim"].files.update(
            {"check-simulated.json": j["sim"].files["check-simulated.json"].replace('"SIMULATED"', '"PASS"')}
        ),
    ),
    Situation("carried over other sources", "h200", "absent", carried_changed),
    Situation("carried from too long ago", "h200", "absent", carried_old),
    Situation("carried past a failure", "h200", "absent", carried_failed),
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(make(tmp_path_factory.mktemp("repository")))


def judged(world: World, place: Path, situation: Situation) -> Merged:
    jobs = world.jobs()
    more = situation.change(jobs, world)
    return world.judge(list(jobs.values()), place, **(more if isinstance(more, dict) else {}))


@pytest.mark.parametrize("situation", DISHONEST, ids=lambda s: s.name)
def test_nothing_dishonest_is_green(world: World, tmp_path: Path, situation: Situation) -> None:
    judgement = judged(world, tmp_path, situation)
    row = state(judgement, situation.row)
    assert not row.green and not row.met, situation.name
    assert situation.code in codes(judgement, situation.row), (codes(judgement), row.why)
    vendor = next(v for v in judgement.vendors if v.vendor == row.vendor)
    assert not vendor.green or row.how != "hardware"
    required = [row.vendor] if row.how == "hardware" else []
    again = world.judge([], tmp_path, require=[*required], **_more(world, situation))
    assert again.failures, "the gate passes"


def _more(world: World, situation: Situation) -> dict[str, Any]:
    more = situation.change(world.jobs(), world)
    return {k: v for k, v in more.items() if k != "files"} if isinstance(more, dict) else {}


def test_there_are_enough() -> None:
    assert len({s.name for s in DISHONEST}) == len(DISHONEST) >= 40
    assert len({s.name for s in HONEST}) == len(HONEST) >= 20


def older(jobs: Jobs, world: World) -> None:
    """A run of another commit lies beside."""
    jobs["old"] = world.job("h200").copied(folder="h200-old")
    jobs["old"].record["commit"] = OTHER
    jobs["old"].files["tests.json"] = "another"


def broken_off(jobs: Jobs, world: World) -> None:
    """The machine went away in the first try; the second is whole."""
    jobs["first"] = world.job("h200").copied(folder="h200-first")
    run_record = jobs["first"].record
    run_record.update(exit_code=-15, started=ago(minutes=40), finished=ago(minutes=30), launches=2)
    run_record["cases"] = run_record["cases"][:1]
    jobs["first"].files["tests.json"] = "another"


def twice_good(jobs: Jobs, world: World) -> None:
    jobs["first"] = world.job("h200").copied(folder="h200-first")
    jobs["first"].record.update(started=ago(minutes=40), finished=ago(minutes=30))
    jobs["first"].files["tests.json"] = "another"


def refused(raw: dict[str, Any]) -> None:
    raw["cells"][0].update(
        verdict="UNIMPLEMENTED", reason="x.dtype is float32", refusals=["x.dtype"], ratio=None, gates={}
    )


HONEST = [
    Situation("everything ran", "h200", "", lambda j, w: None),
    Situation("a CPU suite", "cpu", "", lambda j, w: None),
    Situation("a command with JUnit", "gtest", "", lambda j, w: None),
    Situation("ferryman check on the device", "check", "", lambda j, w: None),
    Situation("ferryman check simulated", "sim", "", lambda j, w: None),
    Situation("the other vendor", "mi300x", "", lambda j, w: None),
    Situation("an old run of another commit beside", "h200", "", older),
    Situation("a first try that broke off", "h200", "", broken_off),
    Situation("two good runs", "h200", "", twice_good),
    Situation("a check that refuses a case", "check", "", cells(refused)),
    Situation("a commit that was given, without git", "h200", "", record("h200", commit_from="given", dirty=None)),
    Situation("a clock two minutes ahead", "h200", "", record("h200", finished=ago(minutes=-2))),
    Situation(
        "a run of six days ago", "h200", "", record("h200", started=ago(days=6, minutes=9), finished=ago(days=6))
    ),
    Situation("a history with the same cases", "h200", "", lambda j, w: {"history": [w.entry("h200")]}),
    Situation(
        "a failure of another commit before",
        "h200",
        "",
        lambda j, w: {"history": [w.entry("h200", met=False, verdict="FAIL", time=ago(days=2))]},
    ),
    Situation(
        "a failure of this commit, run anew since",
        "h200",
        "",
        lambda j, w: {"history": [w.entry("h200", commit=COMMIT, met=False, verdict="FAIL", time=ago(hours=5))]},
    ),
    Situation(
        "a test of the host beside those of the device",
        "h200",
        "",
        lambda j, w: j["h200"].record["cases"][0].update(launches=0) or record("h200", launches=4)(j, w),
    ),
    Situation("a virtual function of the card", "mi300x", "", device("mi300x", name="AMD Instinct MI300X VF")),
    Situation("an arch with its features", "mi300x", "", device("mi300x", arch="gfx942:sramecc+:xnack-")),
    Situation(
        "a fact that could not be measured",
        "h200",
        "",
        lambda j, w: j["h200"].record["numerics"][0].update(outcome="not measured", measured=None, reason="no route"),
    ),
    Situation(
        "extra files beside", "h200", "", lambda j, w: {"files": {"h200/log.txt": "text", "h200/trace.json": "[]"}}
    ),
    Situation(
        "carried: the change does not reach it",
        "mi300x",
        "",
        lambda j, w: j.pop("mi300x") and {"history": [w.entry("mi300x")], "decisions": out(w, "mi300x")},
    ),
    Situation(
        "a history whose clock ran backwards",
        "h200",
        "",
        lambda j, w: {
            "history": [w.entry("h200", time=ago(days=2)), w.entry("h200", sha256="e" * 64, time=ago(days=3))]
        },
    ),
    Situation(
        "a JUnit file of another tool beside its own", "cpu", "", lambda j, w: {"files": {"coverage/junit.xml": JUNIT}}
    ),
]


@pytest.mark.parametrize("situation", HONEST, ids=lambda s: s.name)
def test_nothing_honest_is_refused(world: World, tmp_path: Path, situation: Situation) -> None:
    judgement = judged(world, tmp_path, situation)
    row = state(judgement, situation.row)
    assert row.met and not row.why, row.why
    assert row.green == (row.best == "PASS")
    assert judgement.failures == []
    again = world.judge([], tmp_path, require=["nvidia", "amd"], **_more(world, situation))
    assert again.failures == [] and all(v.green for v in again.vendors if v.vendor != "cpu")


def test_a_vendor_that_only_simulated_is_not_green(world: World, tmp_path: Path) -> None:
    jobs = world.jobs("cpu", "gtest", "sim", "h200", "check")
    judgement = world.judge(list(jobs.values()), tmp_path)
    assert judgement.failures == [], "amd is not required"
    states = {v.vendor: v for v in judgement.vendors}
    assert (states["amd"].verdict, states["amd"].green) == ("NOT_RUN", False)
    assert states["nvidia"].green and states["cpu"].green
    again = world.judge([], tmp_path, require=["nvidia", "amd"])
    assert any(text.startswith("amd is required") for text in again.failures)


def test_a_missing_case_may_be_excused_by_the_matrix(tmp_path: Path) -> None:
    """By name and reason, for one row; another test that is skipped there still keeps it from green."""
    excuse = f"tests: [tests], skips: [{{match: '{TESTS[2]}', reason: needs fp8}}], labels: [self-hosted, mi300x]"
    text = MATRIX.replace("tests: [tests], labels: [self-hosted, mi300x]", excuse)
    assert text != MATRIX
    world = World(make(tmp_path / "repository", text))
    jobs = world.jobs()
    outcome("mi300x", "skipped", 2, launches=None)(jobs, world)
    record("mi300x", launches=4)(jobs, world)
    judgement = world.judge(list(jobs.values()), tmp_path / "a")
    assert state(judgement, "mi300x").green and state(judgement, "mi300x").excused == 1
    outcome("mi300x", "skipped", 1, launches=None)(jobs, world)
    record("mi300x", launches=2)(jobs, world)
    assert not state(world.judge(list(jobs.values()), tmp_path / "b"), "mi300x").met


@pytest.mark.parametrize(("because", "excused"), [("*skipped*", True), ("*fp8*", False)])
def test_an_excuse_may_ask_for_what_the_run_says_of_the_case(because: str, excused: bool, tmp_path: Path) -> None:
    """A case that did not run for another reason, or that nobody speaks of, keeps the row from green."""
    excuse = f"skips: [{{match: 'tests/*', reason: needs fp8, because: '{because}'}}], labels: [self-hosted, mi300x]"
    text = MATRIX.replace("labels: [self-hosted, mi300x]", excuse)
    assert text != MATRIX
    world = World(make(tmp_path / "repository", text))
    jobs = world.jobs()
    outcome("mi300x", "skipped", 2, launches=None)(jobs, world)
    record("mi300x", launches=4)(jobs, world)
    assert state(world.judge(list(jobs.values()), tmp_path / "a"), "mi300x").green is excused
    row = Row("id", "amd", "mi300x", "hip", "hardware", skips=(Skip("*", "why", because),))
    assert expected.excused(row, "tests/a") is None, "nobody says anything of a case that is not there"


def test_quarantine_is_never_green_and_ends(tmp_path: Path) -> None:
    asked = "quarantine: {until: 2026-12-01, reason: 'driver fault'}, labels: [self-hosted, mi300x]"
    world = World(make(tmp_path / "r", MATRIX.replace("labels: [self-hosted, mi300x]", asked)))
    jobs = world.jobs()
    outcome("mi300x", "failed")(jobs, world)
    record("mi300x", exit_code=1)(jobs, world)
    judgement = world.judge(list(jobs.values()), tmp_path / "a")
    row = state(judgement, "mi300x")
    assert (row.verdict, row.green, row.quarantine) == ("QUARANTINED", False, "2026-12-01")
    assert judgement.failures == [] and not next(v for v in judgement.vendors if v.vendor == "amd").green
    assert world.judge([], tmp_path / "a", require=["amd"]).failures
    later = world.judge([], tmp_path / "a", now=NOW + datetime.timedelta(days=8))
    assert "expired-quarantine" in codes(later, "mi300x") and later.failures


def test_the_digest_of_a_row_is_of_what_it_asks_for(world: World) -> None:
    digests = {row.digest for row in world.matrix.rows}
    assert len(digests) == len(world.matrix.rows)
