"""The fleet without a cluster: shares of equal cost, the journal, claims, and which cells run again."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ferryman.device_profiles import detect, profile
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, ResultError
from ferryman.porting.fleet import cluster, shards
from ferryman.porting.fleet.check import _Cells
from ferryman.porting.fleet.cluster import Claim, FleetError
from ferryman.porting.fleet.journal import Journal
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.results import Cell
from ferryman.porting.running.cells import check_op

PLAN: dict[str, Any] = {
    "lines": {"compiled": {"softmax": ["torch", "definition"]}, "interpreted": {}},
    "groups": [["compiled", "softmax", "float32", "one"], ["compiled", "softmax", "float32", "two"]],
}
JOB = {
    "lines": {"softmax": ["torch", "definition"]},
    "device": "cpu",
    "only": [("softmax", "float32", "one"), ("softmax", "float32", "two")],
}


def cell(name: str, case: str, verdict: Any = "PASS", reason: str | None = None) -> list[Any]:
    record = Cell(
        op="softmax", implementation=name, device="cpu", dtype="float32", case=case, verdict=verdict, reason=reason
    )
    return [record.model_dump_json(), 0.5]


def test_every_group_is_in_one_shard_and_shards_are_of_about_equal_cost() -> None:
    cost = {("compiled", "op", "float32", f"c{i}"): 0.1 + (i % 17) for i in range(300)}
    cost |= {("interpreted", "op", "float32", f"c{i}"): 5.0 for i in range(40)}
    parts = shards.divided(cost, workers=4)
    assert Counter(g for one in parts for g in one) == Counter(list(cost))
    assert all(len({g[0] for g in one}) == 1 for one in parts), "a process interprets Triton or does not"
    loads = [round(sum(cost[g] for g in one), 6) for one in parts]
    assert len(parts) >= 16 and max(loads) <= shards.TARGET_SECONDS + 17.1
    assert loads == sorted(loads, reverse=True)


def test_known_times_go_before_sizes_which_take_their_scale() -> None:
    groups = [("compiled", "op", "float32", name) for name in ("a", "b", "c")]
    cost = shards.costs(dict.fromkeys(groups, 2.0), {("op", "float32", "a"): 10.0, ("op", "float32", "b"): 30.0})
    assert cost == {groups[0]: 10.0, groups[1]: 30.0, groups[2]: 20.0}


def test_times_are_read_again_and_damaged_ones_are_refused(tmp_path: Path) -> None:
    (tmp_path / "times.json").write_text(json.dumps(shards.document({("softmax", "float32", "a|b"): 1.5})))
    assert shards.measured([tmp_path / "times.json"]) == {("softmax", "float32", "a|b"): 1.5}
    (tmp_path / "bad.json").write_text('{"kind": "ferryman-fleet-times", "seconds": {"softmax|float32|a": -1}}')
    for name in ("bad.json", "absent.json"):
        with pytest.raises(ResultError, match=name):
            shards.measured([tmp_path / name])


def test_a_journal_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    first = Journal(path, "request")
    first.add([cell("torch", "one"), cell("definition", "one"), cell("torch", "two")])
    first.add([cell("definition", "two")])
    first.close(done=False)
    path.write_bytes(path.read_bytes()[:-20])  # the machine went down while it wrote
    second = Journal(path, "request")
    collected = _Cells(PLAN, second, None)
    assert collected.resumed == 1 and collected.done == {("compiled", "softmax", "float32", "one")}
    assert sorted((c.implementation, c.case) for c in collected.cells()) == [("definition", "one"), ("torch", "one")]
    second.close(done=False)
    other = Journal(path, "another request")
    assert other.other and other.entries == [] and path.with_suffix(".old.jsonl").exists()
    other.close(done=True)
    assert not path.exists()


def test_a_cell_whose_process_died_runs_once_more_and_then_fails() -> None:
    collected, died = _Cells(PLAN, Journal(None, ""), None), "its process ended with code -9: it said nothing"
    value = {
        "host": "h",
        "cells": [cell("torch", "one"), cell("definition", "one", "FAIL", died), cell("torch", "two")],
    }
    more = collected.take([JOB, "cpu"], value)
    ((again, name),) = more.values()
    assert again["only"] == [("softmax", "float32", "one")] and again["lines"] == {"softmax": ["definition"]}
    assert name == "cpu" and len(collected.cells()) == 2
    assert collected.take([again, "cpu"], {"host": "h", "cells": [cell("definition", "one", "FAIL", died)]}) == {}
    assert Counter(c.verdict for c in collected.cells()) == {"PASS": 2, "FAIL": 1}
    collected.lost([JOB, "cpu"], "3 workers died at it")  # what had arrived stays
    assert Counter(c.verdict for c in collected.cells()) == {"PASS": 2, "FAIL": 1, "NOT_RUN": 1}


def test_a_value_that_comes_twice_counts_once() -> None:
    collected = _Cells(PLAN, Journal(None, ""), None)
    for _ in range(2):
        collected.take([JOB, "cpu"], {"host": "h", "cells": [cell("torch", "one"), cell("torch", "two")]})
    assert len(collected.cells()) == 2


def test_claims_are_by_vendor_and_profile() -> None:
    h200 = Claim.of(profile("h200"))
    assert h200.options() == {
        "num_cpus": 1,
        "num_gpus": 1,
        "max_retries": 0,
        "resources": {"ferryman:nvidia": 1, "ferryman:h200": 1},
    }
    assert h200.fits({"CPU": 8.0, "GPU": 4.0, "ferryman:nvidia": 4.0, "ferryman:h200": 2.0}) == 2
    assert h200.fits({"CPU": 8.0, "GPU": 4.0, "ferryman:nvidia": 4.0, "ferryman:h100": 4.0}) == 0
    assert Claim.of(detect("cpu")).options()["num_gpus"] == 0


@pytest.mark.parametrize("on", ["ray@", "ray@host", "slurm", "ray@host:0", "ray@host:70000", "ray@a b:1"])
def test_what_is_no_address_is_refused(on: str) -> None:
    with pytest.raises(ArgumentError, match="ray@HOST:PORT"):
        cluster.address(on)


def test_an_address_where_nothing_answers_is_named() -> None:
    with pytest.raises(FleetError, match="127.0.0.1:9"):
        cluster._answers("127.0.0.1:9")


def test_only_the_cells_that_are_asked_for_run() -> None:
    import torch

    op, cases = registry.primitive("silu_mul"), [c.name for c in cases_of(registry.primitive("silu_mul"))]
    lines = [x for x in registry.implementations("silu_mul") if x.name == "torch"]
    ask = [(op.name, "float32", cases[0]), (op.name, "bfloat16", cases[2])]
    cells = check_op(
        op, lines, (torch.float32, torch.bfloat16), "small", 0, torch.device("cpu"), detect("cpu"), only=set(ask)
    )
    assert sorted((c.op, c.dtype, c.case) for c in cells) == sorted(ask)
