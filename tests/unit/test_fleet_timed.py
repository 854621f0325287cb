"""What a benchmark and a tuning over a cluster run on a node, here without one: plans, merged lockfiles, lost cells."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.device_profiles import detect, profile
from ferryman.dispatch import lockfile_document
from ferryman.dispatch.lockfile_entry import Entry
from ferryman.errors import ArgumentError, FerrymanError, LockfileError, UnknownName
from ferryman.porting.bench import runner
from ferryman.porting.bench.document import parse
from ferryman.porting.fleet import remote_timed, timed
from tests.cli.run import ferryman as command

CPU = detect("cpu")
ASK: dict[str, Any] = {
    "ops": ["silu_mul", "softmax"],
    "implementations": None,
    "grid": "full",
    "dtype": "float32",
    "device": "cpu",
}
LIMITS = {"copy_bytes_per_s": 1e9, "copy_bytes": 1 << 20, "product_flops_per_s": 1e9, "product": "float32 512^3"}


def test_a_plan_has_the_cells_of_a_single_process() -> None:
    planned = remote_timed.plan({**ASK, "lockfile": None}, "cpu")
    pairs = [(op.name, case.name) for op, case in runner.cells_of(ASK["ops"], "full", torch.device("cpu"))]
    assert [(op, case) for op, case, _ in planned["cells"]] == pairs and len(pairs) == 2
    assert planned["ceilings"] is None  # a tuning needs none
    seconds = {(op, case): cost for op, case, cost in planned["cells"]}
    assert min(seconds.values()) >= 2.0 and len(set(seconds.values())) == 2


def _entry(op: str, seconds: float) -> dict[str, Any]:
    one = {"implementation": "torch", "seconds": seconds}
    return {"candidates": [one], **one, "kernels": lockfile_document.digest(op)}


def _written(path: Path, **regions: str) -> str:
    entries = {op: {region: Entry.model_validate(_entry(op, 1e-6))} for op, region in regions.items()}
    lockfile_document.record(path, CPU, entries)
    return path.read_text("utf-8")


GATE = "gate=float32[2^4,64]c up=float32[2^4,64]c"


def test_what_workers_measured_goes_into_the_lockfile_that_there_is(tmp_path: Path) -> None:
    other = GATE.replace("64", "128")
    before = _written(tmp_path / "c", silu_mul=other)
    measured = [
        ["silu_mul", GATE, _entry("silu_mul", 2e-6)],
        ["gelu_mul", f"{GATE} approximate=tanh", _entry("gelu_mul", 1e-6)],
        ["silu_mul", other, _entry("silu_mul", 3e-6)],
    ]
    merged = remote_timed.merge({**ASK, "path": "mine.json"}, before, measured, "cpu")
    assert merged is not None
    (tmp_path / "made").write_text(merged, encoding="utf-8")
    choices, others = lockfile_document.holding(lockfile_document.load(tmp_path / "made"))
    assert not others and {op: len(entries) for op, entries in choices.items()} == {"silu_mul": 2, "gelu_mul": 1}
    assert {region: e.seconds for region, e in choices["silu_mul"].items()} == {GATE: 2e-6, other: 3e-6}
    assert remote_timed.merge(ASK, None, [], "cpu") is None


def test_a_plan_leaves_out_what_no_implementation_that_is_asked_for_serves() -> None:
    asked = {**ASK, "implementations": ["torch"], "lockfile": None}
    assert [op for op, _, _ in remote_timed.plan(asked, "cpu")["cells"]] == ["silu_mul", "softmax"]
    with pytest.raises(FerrymanError, match="nothing to tune: none of the ops"):
        remote_timed.plan({**asked, "implementations": ["cuda"]}, "cpu")
    with pytest.raises(FerrymanError, match="nothing to time: cuda serves none of"):
        remote_timed.plan({**asked, "implementations": ["cuda"], "seed": 0}, "cpu")


def test_a_tuning_on_a_node_gives_what_it_measured_and_not_what_it_held(tmp_path: Path) -> None:
    lockfile = _written(tmp_path / "held", gelu_mul=f"{GATE} approximate=tanh")
    asked = {**ASK, "ops": ["silu_mul"], "again": False, "silence": 60.0, "lockfile": lockfile}
    ((op, case, _),) = remote_timed.plan({**asked, "path": "mine.json"}, "cpu")["cells"]
    tuning = remote_timed.tune(asked, [[op, case]], None, "cpu")
    (outcome,) = tuning["outcomes"]
    written = [name for name, _, _ in tuning["entries"]]
    assert written == (["silu_mul"] if outcome["result"] == "written" else [])  # a noisy machine writes nothing


def test_another_devices_lockfile_is_refused_by_its_own_name(tmp_path: Path) -> None:
    lockfile_document.record(tmp_path / "x", profile("h200"), {})
    text = (tmp_path / "x").read_text("utf-8")
    with pytest.raises(LockfileError, match=r"^mine\.json is not of this machine: profile is 'h200', here 'cpu'"):
        remote_timed.plan({**ASK, "lockfile": text, "path": "mine.json"}, "cpu")


def test_cells_that_workers_died_at_stand_in_the_document_and_among_the_outcomes() -> None:
    pairs = [[op.name, case.name] for op, case in runner.cells_of(["silu_mul"], "full", torch.device("cpu"))]
    bench = remote_timed.lost("bench", {**ASK, "seed": 0}, pairs, LIMITS, "cpu", "3 workers died at it")
    cells = parse(bench["document"], "here").cells
    assert [[c.op, c.case] for c in cells] == pairs
    assert all("3 workers died" in str(t.skipped) for c in cells for t in c.times if t.name == "torch")
    tuned = remote_timed.lost("tune", ASK, pairs, None, "cpu", "3 workers died at it")
    assert [one["result"] for one in tuned["outcomes"]] == ["not measured: 3 workers died at it"] * len(pairs)


def test_bad_use_is_said_before_a_cluster_or_a_file_is_made(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match="softmox"):
        timed.bench("ray", CPU, ["softmox"])
    with pytest.raises(ArgumentError, match="--on"):
        timed.tune("roy", CPU, tmp_path / "lock.json")
    with pytest.raises(UnknownName, match="softmox"):
        timed.tune("ray", CPU, tmp_path / "lock.json", ["softmox"])
    assert list(tmp_path.iterdir()) == []
    for given, message in (
        (("bench", "--jobs", "2"), "--on beside it"),
        (("bench", "--on", "ray", "--peers", "all"), "no --on beside it"),
        (("tune", "--on", "ray", "--check"), "no --on beside it"),
        (("tune", "--jobs", "2"), "--on beside it"),
        (("tune", "--on", "ray", "--grid", "smal"), "smal"),
    ):
        done = command(*given, "--device", "cpu")
        assert done.code == 2 and message in done.err, done.err
