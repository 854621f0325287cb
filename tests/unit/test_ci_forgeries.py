"""More planted situations for the gate: forgeries that are consistent in most words, and honest ones that look odd."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ferryman.porting.ci import commands, evidence, expected
from ferryman.porting.ci import matrix as matrices
from ferryman.porting.ci.junit import junit as read_junit
from ferryman.porting.ci.merged import Merged
from ferryman.porting.ci.row import MatrixError
from ferryman.porting.judging import results
from tests.unit.ci_world import JUNIT, MATRIX, World, ago, codes, digest, state
from tests.unit.ci_world import repository as make
from tests.unit.test_ci_honesty import Jobs, Situation, cells, device, out, raw_cells, record

L4 = """  - {id: l4, vendor: nvidia, device: l4, backend: triton, how: hardware, labels: [l4],
     suite: pytest, tests: [tests]}
"""
BENCH = "  - {id: bench, vendor: nvidia, device: h200, backend: torch, how: hardware, suite: bench, labels: [h200]}\n"
COMPILE = "  - {id: compile, vendor: amd, device: mi300x, backend: hip, how: compile}\n"
UTF16 = '<?xml version="1.0" encoding="utf-16"?><!DOCTYPE x [<!ENTITY a "aa">]>' + JUNIT
TWO = '<testcase classname="suite" name="a"/><testcase classname="suite" name="b"/>'
SUITE = '<testsuite name="s" {}>' + TWO + "</testsuite>"


def junit(text: str) -> Callable[[Jobs, World], None]:
    def change(jobs: Jobs, world: World) -> None:
        jobs["gtest"].files["junit.xml"] = text

    return change


def case(attributes: str = "", inner: str = "") -> Callable[[Jobs, World], None]:
    """JUnit whose second case has more attributes and children."""
    return junit(JUNIT.replace('name="b" time="0.1"/>', f'name="b" {attributes}>{inner}</testcase>'))


def hidden_cases(jobs: Jobs, world: World) -> None:
    """The file says failed; the record says passed in cases of its own."""
    case(inner='<failure message="no"/>')(jobs, world)
    run_record = jobs["gtest"].record
    run_record["cases"] = [{"id": name, "outcome": "passed", "launches": None} for name in run_record["collected"]]


def edited(jobs: Jobs, world: World) -> None:
    """A failure is gone from the record; the file that the plugin wrote still has it."""
    job = jobs["h200"]
    job.record["cases"][0]["outcome"] = "failed"
    job.files["tests.json"] = job.plugin_record("edited")
    job.record["cases"][0]["outcome"] = "passed"


def no_launches(jobs: Jobs, world: World) -> None:
    for one in jobs["h200"].record["cases"]:
        one["launches"] = None


def negative(jobs: Jobs, world: World) -> None:
    jobs["h200"].record["cases"][0]["launches"] = -2
    jobs["h200"].record["launches"] = 2


def crashed_first(jobs: Jobs, world: World) -> None:
    """A kernel crashed the first run; the second went well."""
    jobs["first"] = world.job("h200").copied(folder="h200-first")
    run_record = jobs["first"].record
    run_record.update(exit_code=-11, started=ago(minutes=40), finished=ago(minutes=30), launches=2)
    run_record["cases"] = run_record["cases"][:1]


def pruned(jobs: Jobs, world: World) -> None:
    """Facts that tell the devices apart are gone."""
    del jobs["h200"].record["numerics"][1:]


def fewer_bits(jobs: Jobs, world: World) -> None:
    finding = next(f for f in jobs["h200"].record["numerics"] if f["stated"] == "fp32")
    finding["measured"] = 14


def bare_pass(raw: dict[str, Any]) -> None:
    for cell in raw["cells"]:
        cell.update(gates={}, ratio=None)


def lookalike(raw: dict[str, Any]) -> None:
    raw["cells"].append(raw["cells"][0] | {"case": "profile of nothing"})


def timed(raw: dict[str, Any]) -> None:
    raw["environment"]["time"] = ago(days=400)


def dropped_kernels(jobs: Jobs, world: World) -> None:
    compiled(jobs, world, lambda ids: ids[:10])


def renamed_kernel(jobs: Jobs, world: World) -> None:
    compiled(jobs, world, lambda ids: [ids[0].rpartition("|")[0] + "|easy", *ids[1:]])


def compiled(jobs: Jobs, world: World, change: Callable[[list[str]], list[str]] = lambda ids: ids) -> None:
    """A compile row's document, of the kernels that it has to compile."""
    row, job = world.matrix.row("compile"), jobs["compile"]
    ids = change(sorted(name.rpartition(" (")[0] for name in expected.compiled(row) or ()))
    raw = json.loads(jobs["sim"].files["check-simulated.json"])
    first = raw["cells"][0] | {"device": "none", "verdict": "COMPILED_ONLY", "gates": {}, "ratio": None}
    raw["cells"] = []
    for i, name in enumerate(ids):
        op, backend, dtype, kernel = name.split("|")
        raw["cells"].append(
            first | {"op": op, "implementation": backend, "dtype": dtype, "case": f"{i}: {kernel}(N=1)"}
        )
    kernel_cells = [results.Cell.model_validate(cell) for cell in raw["cells"]]
    raw["summary"] = [row.model_dump() for row in results.summarise(kernel_cells)]
    raw["environment"].update(device="none", tier="compile")
    raw["provenance"].update(manifest=[results.cell_id(cell) for cell in kernel_cells], row="compile", kernels={})
    job.files = {"check.json": json.dumps(raw)}
    job.record["collected"] = raw["provenance"]["manifest"]


def benched(jobs: Jobs, world: World, change: Callable[[dict[str, Any]], None] = lambda raw: None) -> None:
    """A bench row's document."""
    facts = json.loads(jobs["check"].files["check.json"])["environment"]
    times = {"name": "torch", "role": "implementation", "method": "device events", "trials": [1e-5, 1.1e-5]}
    cell = {"op": "rope", "case": "a", "dtype": "bfloat16", "bytes": 1.0, "flops": 1.0, "sets": 1, "rotated_bytes": 1}
    raw = {
        "schema_version": 1,
        "kind": "ferryman-benchmark",
        "environment": facts,
        "ceilings": {"copy_bytes_per_s": 1.0, "copy_bytes": 1, "product_flops_per_s": 1.0, "product": "p"},
        "cells": [cell | {"times": [times], "condition": {"source": "nobody"}}],
    }
    change(raw)
    job = jobs["bench"]
    job.files = {commands.BENCH: json.dumps(raw), commands.PERF: json.dumps({"changes": [], "baseline_runs": 0})}
    job.record.update(collected=[], launches=2)


def benched_elsewhere(jobs: Jobs, world: World) -> None:
    benched(jobs, world, lambda raw: raw["environment"].update(profile="h100-sxm"))


def slower(jobs: Jobs, world: World) -> None:
    benched(jobs, world)
    jobs["bench"].files[commands.PERF] = json.dumps({"changes": [{"op": "rope", "verdict": "slower"}]})


def nothing_timed(jobs: Jobs, world: World) -> None:
    benched(jobs, world, lambda raw: raw["cells"][0]["times"][0].update(trials=[], skipped="no"))


def stopped_bench(jobs: Jobs, world: World) -> None:
    benched(jobs, world, lambda raw: raw.update(left=3))


def carried_easier(jobs: Jobs, world: World) -> dict[str, Any]:
    """The last success was of an easier row: the sources are the same, what was asked of them was not."""
    del jobs["h200"]
    entry = world.entry("h200", kernels=digest(["0" * 64, world.digests("h200")]))
    return {"history": [entry], "decisions": out(world, "h200")}


def from_the_future(jobs: Jobs, world: World) -> dict[str, Any]:
    del jobs["h200"]
    return {"history": [world.entry("h200", time=ago(days=-300))], "decisions": out(world, "h200")}


def exchanged(jobs: Jobs, world: World) -> None:
    """Two rows' results change places; each record names the other's."""
    for file in ("tests.json",):
        a, b = jobs["h200"].plugin_record("h200"), jobs["mi300x"].plugin_record("mi300x")
        jobs["h200"].files[file], jobs["mi300x"].files[file] = b, a
    jobs["h200"].record["cases"][0]["launches"] = 3
    jobs["h200"].record["launches"] += 1


DISHONEST = [
    Situation("git's commit, and nobody looked for changes", "h200", "dirty", record("h200", dirty=None)),
    Situation("an L40S in an L4's row", "l4", "other-device", device("l4", name="NVIDIA L40S")),
    Situation("a name that only begins as the device's", "h200", "other-device", device("h200", name="NVIDIA H200x")),
    Situation("a fingerprint without the facts that differ", "h200", "no-fingerprint", pruned),
    Situation("a number of the fingerprint edited", "h200", "refuted", fewer_bits),
    Situation("launches of the whole run, and of no case", "h200", "contradictory", no_launches),
    Situation("launches below zero", "h200", "unreadable", negative),
    Situation("a failure edited out of the record alone", "h200", "contradictory", edited),
    Situation(
        "cases without the plugin's file",
        "h200",
        "contradictory",
        lambda j, w: j["h200"].files.pop("tests.json") and None,
    ),
    Situation("two rows' results exchanged", "h200", "contradictory", exchanged),
    Situation("a run that crashed before the good one", "h200", "flaky", crashed_first),
    Situation("cases of the record over a JUnit file that failed", "gtest", "contradictory", hidden_cases),
    Situation("JUnit with fewer cases than it counts", "gtest", "contradictory", junit(SUITE.format('tests="9"'))),
    Situation("JUnit that counts failures", "gtest", "contradictory", junit(SUITE.format('tests="2" failures="1"'))),
    Situation("JUnit that counts skips", "gtest", "contradictory", junit(SUITE.format('tests="2" skipped="2"'))),
    Situation("a case that failed by its status alone", "gtest", "exit-code", case('status="failed"')),
    Situation("a case that crashed by its result alone", "gtest", "exit-code", case('result="CRASHED"')),
    Situation("a case with a status that nobody knows", "gtest", "skipped", case('status="maybe"')),
    Situation("a failure in a namespace", "gtest", "exit-code", case("", '<x:failure xmlns:x="urn:x"/>')),
    Situation("a case that was run again", "gtest", "rerun", case("", "<flakyError/>")),
    Situation(
        "a suite that failed outside of its cases",
        "gtest",
        "contradictory",
        junit(JUNIT.replace("</testsuite>", '<error message="teardown"/></testsuite>')),
    ),
    Situation("PASS that no gate holds", "check", "contradictory", cells(bare_pass)),
    Situation(
        "cells of the CPU in a device's document",
        "check",
        "contradictory",
        cells(lambda raw: raw["cells"][2].update(device="cpu")),
    ),
    Situation("a cell that no op has, named like what is left out", "check", "swapped", cells(lookalike)),
    Situation("a document of another year", "check", "clock", raw_cells(timed)),
    Situation(
        "a document of a time that is none",
        "check",
        "clock",
        raw_cells(lambda raw: raw["environment"].update(time="yesterday")),
    ),
    Situation(
        "a document of a dirty tree",
        "check",
        "contradictory",
        raw_cells(lambda raw: raw["provenance"].update(dirty=True)),
    ),
    Situation(
        "a document that the driver of another card wrote",
        "check",
        "contradictory",
        raw_cells(lambda raw: raw["environment"].update(device_name="NVIDIA H100 80GB HBM3")),
    ),
    Situation(
        "more launches than cells",
        "check",
        "contradictory",
        lambda j, w: j["check"].record.update(launches=1 + len(j["check"].record["collected"])),
    ),
    Situation("most kernels not compiled", "compile", "missing", dropped_kernels),
    Situation("a kernel of another name", "compile", "missing", renamed_kernel),
    Situation("a benchmark of another device", "bench", "contradictory", benched_elsewhere),
    Situation("a benchmark that became slower, and ended with 0", "bench", "contradictory", slower),
    Situation("a benchmark that timed nothing", "bench", "empty", nothing_timed),
    Situation("a benchmark that was stopped", "bench", "partial", stopped_bench),
    Situation("carried from an easier row", "h200", "absent", carried_easier),
    Situation("carried from the future", "h200", "absent", from_the_future),
]


def long_names(jobs: Jobs, world: World) -> None:
    """Ids with every letter that people use."""
    for row in ("h200", "mi300x", "cpu", "l4"):
        run_record = jobs[row].record
        run_record["collected"][0] = run_record["cases"][0]["id"] = "tests/test_k.py::test_µ[fp8 ≤ 2³, naïve-日本]"


def same_settings(jobs: Jobs, world: World) -> None:
    """Each row's command writes the same settings beside its results."""
    for row in ("h200", "mi300x", "gtest"):
        jobs[row].files["settings.json"] = '{"schema_version": 3, "seed": 0}'


HONEST = [
    Situation("a compile row", "compile", "", compiled),
    Situation("a bench row", "bench", "", benched),
    Situation("ids beyond ASCII", "h200", "", long_names),
    Situation("one settings file in every row", "h200", "", same_settings),
    Situation(
        "another tool's JSON with a schema_version",
        "h200",
        "",
        lambda j, w: {"files": {"h200/traces/sbom.json": '{"schema_version": "1.4", "components": []}'}},
    ),
    Situation("an archive beside", "h200", "", lambda j, w: {"files": {"h200/traces/nsys.tar.gz": "x"}}),
    Situation("the driver's name in other letters", "h200", "", device("h200", name="nvidia  H200")),
    Situation(
        "Google Test's words",
        "gtest",
        "",
        junit(
            '<testsuites tests="2" failures="0" disabled="0" errors="0" time="0.1"><testsuite name="suite" tests="2" '
            'failures="0" disabled="0" skipped="0"><testcase name="a" status="run" result="completed" '
            'classname="suite"/><testcase name="b" status="run" result="completed" classname="suite"/></testsuite>'
            "</testsuites>"
        ),
    ),
    Situation("Catch2 counts assertions", "gtest", "", junit(SUITE.format('tests="900" failures="0" hostname="tbd"'))),
    Situation("CTest's words", "gtest", "", case('status="run"', "<system-out>ok</system-out>")),
    Situation(
        "JUnit in a namespace and in UTF-16",
        "gtest",
        "",
        lambda j, w: junit(JUNIT.replace("<testsuites>", '<testsuites xmlns="urn:junit">'))(j, w),
    ),
    Situation(
        "a first try on a machine that was taken away",
        "h200",
        "",
        lambda j, w: crashed_first(j, w) or j["first"].record.update(exit_code=137),
    ),
]


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, World]:
    """By row; the kernels of a compile row are many, and stand in a world of their own."""
    folders = {name: tmp_path_factory.mktemp("forgeries") for name in ("", "compile")}
    return {
        "": World(make(folders[""], MATRIX + L4 + BENCH)),
        "compile": World(make(folders["compile"], MATRIX + COMPILE)),
    }


def judged(world: World, place: Path, situation: Situation) -> tuple[Merged, dict[str, Any]]:
    jobs = world.jobs()
    for name, fill in (("compile", compiled), ("bench", benched)):
        if name in jobs:
            fill(jobs, world)
    more = situation.change(jobs, world)
    given = more if isinstance(more, dict) else {}
    return world.judge(list(jobs.values()), place, **given), {k: v for k, v in given.items() if k != "files"}


@pytest.mark.parametrize("situation", DISHONEST, ids=lambda s: s.name)
def test_nothing_dishonest_is_green(worlds: dict[str, World], tmp_path: Path, situation: Situation) -> None:
    world = worlds.get(situation.row, worlds[""])
    judgement, more = judged(world, tmp_path, situation)
    row = state(judgement, situation.row)
    assert not row.green and not row.met, situation.name
    assert situation.code in codes(judgement, situation.row), (codes(judgement), row.why)
    vendor = next(v for v in judgement.vendors if v.vendor == row.vendor)
    assert not vendor.green or row.how != "hardware"
    assert world.judge([], tmp_path, require=[row.vendor], **more).failures, "the gate passes"


@pytest.mark.parametrize("situation", HONEST, ids=lambda s: s.name)
def test_nothing_honest_is_refused(worlds: dict[str, World], tmp_path: Path, situation: Situation) -> None:
    world = worlds.get(situation.row, worlds[""])
    judgement, more = judged(world, tmp_path, situation)
    row = state(judgement, situation.row)
    assert row.met and not row.why, row.why
    assert judgement.failures == []
    assert world.judge([], tmp_path, require=["nvidia", "amd"], **more).failures == []


def test_a_vendor_that_was_only_timed_is_not_green(tmp_path: Path) -> None:
    """A fast wrong kernel is fast: a benchmark says nothing about what is right."""
    world = World(make(tmp_path / "repository", f"schema: 1\nrows:\n{BENCH}"))
    jobs = {"bench": world.job("bench")}
    jobs["check"] = World(make(tmp_path / "other")).job("check")
    benched(jobs, world)
    judgement = world.judge([jobs["bench"]], tmp_path / "results", require=["nvidia"])
    assert state(judgement, "bench").met
    assert not judgement.vendors[0].green and "timed alone" in judgement.failures[0]


def test_what_is_not_read_is_told(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    (tmp_path / "deep" / "results.zip").write_bytes(b"PK\x03\x04")
    (tmp_path / "deep" / "CHECK.JSON").write_text('{"kind": "ferryman-results"}')
    (tmp_path / "outside").mkdir()
    (tmp_path / "deep" / "link").symlink_to(tmp_path / "outside")
    _, problems = evidence.collect([tmp_path])
    assert [p.file.rpartition("/")[2] for p in problems] == ["link", "CHECK.JSON", "results.zip"]
    assert {p.code for p in problems} == {"alone"}


def test_declarations_are_refused_in_every_encoding(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_bytes(UTF16.encode("utf-16"))
    with pytest.raises(results.ResultError, match="declares a document type"):
        read_junit(path)
    path.write_bytes(JUNIT.encode("utf-16"))
    assert [case.id for case in read_junit(path)[0]] == ["suite::a", "suite::b"]


def test_rows_that_differ_by_case_alone_are_one_folder_on_some_machines(tmp_path: Path) -> None:
    path = tmp_path / "ferryman.yaml"
    path.write_text(MATRIX + MATRIX.splitlines(keepends=True)[4].replace("id: cpu", "id: CPU"))
    with pytest.raises(MatrixError, match="a second row 'CPU'; the first is on line 5 .'cpu': not every"):
        matrices.read(path)


def test_there_are_enough() -> None:
    assert len({s.name for s in DISHONEST}) == len(DISHONEST) >= 30
    assert len({s.name for s in HONEST}) == len(HONEST) >= 8
