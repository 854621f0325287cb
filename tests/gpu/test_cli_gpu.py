"""The command on a real device: every implementation that can run there is right, and timed against the roofline."""

from __future__ import annotations

import json

import pytest
import torch

from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from tests.cli.run import ferryman

pytestmark = pytest.mark.gpu


def _usable() -> set[str]:
    vendor = detect("cuda").vendor
    return {n for n, b in registry.backends().items() if vendor in b.vendors and not registry.probe(n, vendor)}


def test_a_row_operation_passes_on_every_backend_and_beats_no_physics() -> None:
    done = ferryman("check", "--op", "rms_norm", "--dtype", "bf16", "--json")
    document = json.loads(done.out)
    assert done.code == 0, document["summary"]
    assert document["environment"]["device"].startswith("cuda:")
    verdicts = {row["implementation"]: row["verdict"] for row in document["summary"]}
    assert {name for name, verdict in verdicts.items() if verdict == "PASS"} == _usable()
    timed = {t["implementation"]: t for t in document["timings"]}
    assert set(timed) == _usable()
    for timing in timed.values():
        assert timing["clock"] == "device events" and timing["seconds"] > 0
        share = timing["percent_of_roofline"]
        assert share is None or 0 < share < 115, timing  # faster than a copy by 15% would mean a wrong measurement


def test_devices_and_doctor_name_the_accelerator() -> None:
    here = json.loads(ferryman("devices", "--json").out)["here"]
    assert [d["device"] for d in here] == [*(f"cuda:{i}" for i in range(torch.cuda.device_count())), "cpu"]
    rows = json.loads(ferryman("doctor", "--json").out)["backends"]  # one for each backend and vendor
    assert {b["backend"] for b in rows if b["verdict"] == "yes"} == _usable() - {"definition"}


def test_explain_for_the_device_here_probes_it() -> None:
    answer = json.loads(ferryman("explain", "rms_norm", "--shape", "8,4096", "--device", "cuda", "--json").out)
    assert answer["here"] and {r["implementation"] for r in answer["rows"] if r["verdict"] != "refused"} == _usable()
