"""What dispatch and a launch cost the host: `benchmarks/dispatch.py` and `benchmarks/launch.py` measure every op."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from tests.bounded import off

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[Path]:
    folder = ROOT / "benchmarks"
    sys.path.insert(0, str(folder))
    yield folder
    sys.path.remove(str(folder))


@pytest.fixture
def dispatch(benchmarks: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    module = importlib.import_module("dispatch")
    assert Path(str(module.__file__)).parent == benchmarks
    for name, value in {"BATCH": 4, "TRIALS": 16, "ROUNDS": 2}.items():
        monkeypatch.setattr(module, name, value)
    return module


@pytest.mark.parametrize("op", registry.primitives())
def test_every_op_has_a_small_call(op: str, benchmarks: Path) -> None:
    small = importlib.import_module("small_calls")
    primitive = registry.primitive(op)
    name, args = next(small.calls(primitive, torch.bfloat16, CPU))
    places = [t.untyped_storage().data_ptr() for t in small.tensors(args)]
    assert name and len(args) == len(primitive.names) and len(set(places)) == len(places)
    primitive.check(*args)


def test_a_row_has_both_menus_and_leaves_dispatch_as_it_was(dispatch: ModuleType) -> None:
    before = registry.implementations, registry.launcher
    row = dispatch.row_of(registry.primitive("layer_norm"), CPU)
    assert (registry.implementations, registry.launcher) == before
    ways = {"positional", "keywords", "with a gradient"}
    for menu in ("own", "of_30"):
        assert set(row[menu]["overhead_us"]) == ways
        assert 0 < row[menu]["third_us"] < row[menu]["second_us"] < row[menu]["first_us"]
    assert row["call_us"] > 0 and row["torch_us"] is not None  # the norm of small rows is PyTorch's own call
    backward = dispatch.row_of(registry.primitive("layer_norm_backward"), CPU)
    assert set(backward["own"]["overhead_us"]) == ways - {"with a gradient"} and backward["torch_us"] is None
    table = dispatch.markdown({**dispatch.measure([], CPU), "rows": [row, backward]})
    assert "| layer_norm |" in table and "30 lines: a cached call's dispatch is" in table
    x = torch.randn(2, 8)
    assert off(ops.layer_norm.primitive, (x, None, None, 1e-5), [ops.layer_norm(x, None, None)], torch.float32) <= 1


def test_an_overhead_is_the_time_between_the_call_and_what_it_ends_in(
    dispatch: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a clock that stands still but for what the two calls take, and what drifts from call to call."""
    now = 0.0

    def passes(us: float) -> None:
        nonlocal now
        now += (us + now) * 1e-6

    monkeypatch.setattr(dispatch.time, "perf_counter", lambda: now)
    median, spread = dispatch.overhead(lambda: passes(300), lambda: passes(100))
    assert median == pytest.approx(200, rel=1e-3) and spread < 1


def test_a_menu_of_30_lines_is_chosen_from(dispatch: ModuleType) -> None:
    """The copies are lines that serve: a request by name runs one of them."""
    op = registry.primitive("layer_norm")
    with dispatch.menu_of("layer_norm", 30):
        lines = registry.implementations("layer_norm")
        copy = next(line for line in lines if line.name.startswith("torch.copy"))
        assert len(lines) == 30 == len({line.name for line in lines}) and copy.op == op.name
        with ferryman.use(copy.name), ferryman.trace() as seen:
            ops.layer_norm(torch.randn(2, 8), None, None)
        assert seen.calls == {("layer_norm", copy.name): 1}
    assert len(registry.implementations("layer_norm")) < 30


def test_its_command_writes_the_document_and_the_table(
    dispatch: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "dispatch.json"
    command = ["dispatch.py", "--op", "softmax", "rope", "layer_norm", "--sample", "2", "--seed", "3"]
    rows = []
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", [*command, "--json", str(path)])
        dispatch.main()
        rows.append([row["op"] for row in json.loads(path.read_text())["rows"]])
        assert path.with_suffix(".md").read_text() in capsys.readouterr().out
    assert rows[0] == rows[1] and len(rows[0]) == 2  # a seed draws the same
    monkeypatch.setattr(sys, "argv", ["dispatch.py", "--op", "sofmax"])
    with pytest.raises(SystemExit, match="2"):
        dispatch.main()
    assert "nearest: softmax" in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------------- launch.py


def launched(lines: str, names: str) -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("launch_worker.py")), lines, names]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def test_a_launch_is_measured_as_its_replay_or_says_why_it_is_none() -> None:
    """Triton's own binder, a driver that launches nothing, a device that is said to be an H200."""
    pytest.importorskip("triton")
    report = launched("", "rms_norm,linear_backward,paged_attention")
    rows = {(row["op"], row["line"]): row for row in report["rows"]}
    names = {"the op", "its replay alone", "its launcher alone", "torch's own call"}
    for line in ("triton.rows", "cuda"):
        row = rows["rms_norm", line]
        against = [name for name in row["calls"] if name.startswith("baseline")]
        assert names <= set(row["calls"]) and len(against) == (2 if line == "triton.rows" else 1)
        assert len(row["ratios"]) == 2 and row["ratio"] > 0
    assert report["submitted"] > 0  # the CUDA baseline's
    assert {op for op, _ in rows} == {"rms_norm", "linear_backward", "paged_attention"}
    assert all(("calls" in row) != ("why" in row) for row in rows.values())
    assert f"| {rows['rms_norm', 'cuda']['case']} | cuda |" in report["table"]


def test_a_line_by_name_that_is_no_replay_has_a_row_with_the_reason() -> None:
    pytest.importorskip("triton")
    (row,) = launched("triton", "moe_permute")["rows"]
    assert row["line"] == "triton.ranks" and "calls" not in row
    assert row["why"] == "the plan is no replay: the menu line triton.ranks does not say that it is replayable"
