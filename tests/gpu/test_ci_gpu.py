"""On a device: what the pytest plugin counts, and the record of a row of real hardware."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from ferryman.device_profiles import detect
from ferryman.porting.ci import evidence, judge, run
from ferryman.porting.ci import matrix as matrices
from ferryman.porting.ci.changes import Tree
from ferryman.porting.ci.judge import Context
from tests.unit.ci_world import commit, git, repository

pytestmark = pytest.mark.gpu
SUITE = """
import torch


def test_launches():
    x = torch.ones(1000, device="cuda")
    assert (x + x).sum().item() == 2000


def test_copies_only():
    assert torch.zeros(4).to("cuda").cpu().sum().item() == 0


def test_host():
    assert torch.ones(4).sum().item() == 4
"""


def test_a_hardware_row_counts_its_launches_and_is_evidence(tmp_path: Path) -> None:
    here = detect("cuda")
    if here.generic or here.partition:
        pytest.skip(f"{here.name} is no whole device of the catalogue")
    text = (
        f"schema: 1\nrows:\n  - {{id: gpu, vendor: {here.vendor}, device: {here.name}, backend: any, how: hardware, "
        "suite: pytest, tests: [tests], labels: [x]}\n"
    )
    root = repository(tmp_path / "r", text)
    (root / "tests" / "test_k.py").write_text(SUITE)
    commit(root)
    known = matrices.read(root / "ferryman.yaml")
    record = run.run(root, known, known.row("gpu"), tmp_path / "out").record
    counts = {case.id.partition("::")[2]: case.launches for case in record.cases}
    assert counts["test_launches"] and counts["test_launches"] >= 3  # ones, add, sum
    assert counts["test_copies_only"] == counts["test_host"] == 0
    assert record.launches == sum(n for n in counts.values() if n is not None)
    assert record.device.name == torch.cuda.get_device_name() and record.numerics
    ((one,), problems) = evidence.collect([tmp_path / "out"])
    import datetime

    now = datetime.datetime.now(datetime.timezone.utc)
    context = Context(known, Tree(root, known), git(root, "rev-parse", "HEAD"), now)
    assert problems == [] and judge.reasons(known.row("gpu"), one, context) == []
    assert json.loads((tmp_path / "out" / "gpu" / "record.json").read_text())["exit_code"] == 0
