"""record, replay and compare as a user calls them."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from tests.cli.run import alone, ferryman

QUICK = ("--op", "silu_mul", "--dtype", "bf16", "--backend", "torch", "--device", "cpu")


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("capsule") / "a.capsule"
    done = ferryman("record", "--out", str(path), *QUICK, "--json")
    assert done.code == 0
    said = json.loads(done.out)
    assert said["bytes"] == path.stat().st_size < 200_000
    assert said["verdicts"] == {"PASS": said["cells"]} and said["outputs_whole"] <= said["outputs"]
    assert "cuda_matmul_tf32" in said["machine"]["flags"] and said["environment"]["seed"] == 0
    assert len(said["sha256"]) == 64
    return path


def test_replay_and_compare(recorded: Path, tmp_path: Path) -> None:
    done = ferryman("replay", str(recorded), "--device", "cpu", "--backend", "torch", "--out", str(tmp_path / "r"))
    assert done.code == 0
    assert "A recorded a.capsule" in done.out and "were stored, and judged again here" in done.out
    assert sorted(os.listdir(tmp_path / "r")) == ["replay.json", "replayed.json"]
    assert " equal" in done.out and "WRONG" not in done.out
    both = ferryman("compare", str(recorded), str(tmp_path / "r" / "replay.json"))
    assert both.code == 0 and "proven by hash" in both.out and "equal (" in both.out
    comparison = json.loads(ferryman("compare", str(recorded), str(tmp_path / "r" / "replay.json"), "--json").out)
    assert comparison["kind"] == "ferryman-compare" and len(comparison["sides"]) == 2
    plain = ferryman("compare", str(tmp_path / "r" / "replayed.json"), str(tmp_path / "r" / "replay.json"))
    assert plain.code == 0 and "all within bounds" in plain.out


def test_replay_as_json_writes_nothing(recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = ferryman("replay", str(recorded), "--device", "cpu", "--backend", "torch", "--json")
    replay = json.loads(done.out)
    assert done.code == 0 and replay["kind"] == "ferryman-replay" and replay["schema_version"] == 1
    assert {e["explanation"] for e in replay["explained"]} == {"equal"}
    assert os.listdir(tmp_path) == []


def test_a_damaged_capsule_is_one_message_and_nothing_is_written(recorded: Path, tmp_path: Path) -> None:
    raw = recorded.read_bytes()
    for name, content in (("cut", raw[:-100]), ("flipped", raw[:900] + bytes([raw[900] ^ 4]) + raw[901:])):
        bad = tmp_path / f"{name}.capsule"
        bad.write_bytes(content)
        done = ferryman("replay", str(bad), "--out", str(tmp_path / "r"))
        assert done.code == 2 and done.out == ""
        assert done.err.startswith("ferryman: ") and done.err.count("\n") == 1 and bad.name in done.err
        assert ferryman("compare", str(bad), str(recorded)).code == 2
    assert sorted(os.listdir(tmp_path)) == ["cut.capsule", "flipped.capsule"]


def test_bad_use(recorded: Path, tmp_path: Path) -> None:
    for arguments, says in (
        (("replay", str(tmp_path / "absent.capsule")), "cannot be read"),
        (("replay", str(recorded), "--op", "soft_max"), "softmax"),
        (("replay", str(recorded), "--device", "mi300x"), "a device that is here"),
        (("record", "--out", str(tmp_path)), "the name of a file"),
        (("record", "--out", str(tmp_path / "x"), "--op", "soft_max"), "softmax"),
        (("record", "--out", str(tmp_path / "x"), "--tier", "huge", "--device", "cpu"), "huge"),
        (("compare", str(recorded)), "1 machines to compare"),
    ):
        done = ferryman(*arguments)
        assert done.code == 2 and says in done.err, (arguments, done)
    assert os.listdir(tmp_path) == []


def test_the_commands_by_themselves(recorded: Path, tmp_path: Path) -> None:
    done = alone("replay", str(recorded), "--device", "cpu", "--backend", "torch", "--out", "r", cwd=tmp_path)
    assert done.code == 0, done.err
    assert os.listdir(tmp_path) == ["r"]
