"""Capsules between rows: a device's row is green only if another machine has judged what it recorded."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ferryman.errors import ResultError
from ferryman.porting.capsule.record import record
from ferryman.porting.ci import evidence, exchange
from ferryman.porting.ci import matrix as matrices
from ferryman.porting.ci.merged import Merged
from ferryman.porting.ci.row import MatrixError
from tests.unit.capsules import forged
from tests.unit.ci_world import MATRIX, World, codes, repository, state

OP = "cross_entropy"
PLANTED = Path(__file__).parents[1] / "data" / "record_planted.py"
ROW = (
    "  - {id: check, vendor: nvidia, device: h200, backend: torch, how: hardware, labels: [self-hosted, h200],\n"
    "     args: [--op, rope, --dtype, f32, --tier, small]}\n"
)
WITH = ROW.replace("small]}", "small], capsule: true}")


@functools.cache
def recorded(backend: str = "torch") -> bytes:
    return record(ops=[OP], device="cpu", dtypes=["f32"], backends=[backend])


def as_h200(manifest: dict[str, Any]) -> None:
    """A recording that says of itself that it is an H200's."""
    manifest["results"]["environment"] |= {
        "vendor": "nvidia",
        "profile": "h200",
        "arch": "sm_90",
        "device": "cuda:0",
        "device_name": "NVIDIA H200",
    }


def packed(edit: Callable[[dict[str, Any]], None] = as_h200, backend: str = "torch") -> bytes:
    return forged(recorded(backend), edit)


@pytest.fixture
def world(tmp_path: Path) -> World:
    assert ROW in MATRIX
    return World(repository(tmp_path / "r", MATRIX.replace(ROW, WITH)))


def judged(world: World, place: Path, capsule: bytes | None, replay: bool = True, altered: bool = False) -> Merged:
    job = world.job("check")
    if capsule is not None:
        folder = place / "results" / "check"
        folder.mkdir(parents=True)
        (folder / "row.capsule").write_bytes(capsule + b" " * altered)
        job.hashes["row.capsule"] = hashlib.sha256(capsule).hexdigest()
    job.write(place / "results")
    replays = {}
    if replay:
        runs, _ = evidence.collect([place / "results"])
        said = list(exchange.replayed(runs, world.matrix, place / "replays"))
        assert len(said) == (capsule is not None and not altered)
        replays = exchange.replays_of(place / "replays") if said else {}
    return world.judge([], place / "results", replays=replays)


def test_what_another_machine_judged_again_is_green(world: World, tmp_path: Path) -> None:
    merged = judged(world, tmp_path, packed())
    row = state(merged, "check")
    assert row.green, row.why
    (note,) = [n for n in row.notes if "capsule" in n]
    assert "recorded results were judged again" in note and "equal" in note


def test_results_of_a_backend_that_only_the_device_has_are_judged(tmp_path: Path) -> None:
    """A CPU runs no CUDA kernel; it judges what one gave."""

    def by_cuda(manifest: dict[str, Any]) -> None:
        as_h200(manifest)
        for cell in (*manifest["results"]["cells"], *manifest["results"]["summary"]):
            cell["implementation"] = "cuda"

    row = WITH.replace("backend: torch", "backend: cuda").replace("--op, rope", "--op, cross_entropy")
    world = World(repository(tmp_path / "r", MATRIX.replace(ROW, row)))
    merged = judged(world, tmp_path, packed(by_cuda))
    assert not {"not-replayed", "capsule-refuted", "swapped", "no-capsule"} & set(codes(merged, "check"))
    (note,) = [n for n in state(merged, "check").notes if "capsule" in n]
    assert re.search(r": [1-9]\d* recorded results were judged again", note)


@pytest.mark.parametrize(
    ("capsule", "replay", "altered", "code"),
    [
        (lambda: None, True, False, "no-capsule"),
        (packed, False, False, "not-replayed"),
        (lambda: packed(lambda manifest: None), True, False, "contradictory"),  # a CPU's
        (lambda: packed(backend="definition"), True, False, "swapped"),
        (packed, True, True, "altered"),
    ],
)
def test_a_row_without_that_is_not(
    world: World, tmp_path: Path, capsule: Callable[[], bytes | None], replay: bool, altered: bool, code: str
) -> None:
    merged = judged(world, tmp_path, capsule(), replay, altered)
    assert code in codes(merged, "check")
    assert not state(merged, "check").green and not state(merged, "check").met


def test_a_recording_that_the_oracle_refutes_makes_the_row_mistrusted(world: World, tmp_path: Path) -> None:
    """A wrong kernel of rms_norm, recorded as it ran: the row's own cells say nothing of it."""
    spec = importlib.util.spec_from_file_location("record_planted", PLANTED)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    capsule = forged(module.planted("cpu", dtypes=["f32"], backends=["torch"]), as_h200)
    merged = judged(world, tmp_path, capsule)
    row = state(merged, "check")
    assert "capsule-refuted" in codes(merged, "check"), row.why
    assert any("rms_norm|torch|float32" in w.text for w in row.why)
    assert row.verdict == "MISTRUSTED" and not row.green


def test_a_capsule_is_asked_of_devices_alone(tmp_path: Path) -> None:
    (tmp_path / "ferryman.yaml").write_text(
        "schema: 1\nrows:\n  - {vendor: cpu, device: cpu, backend: torch, how: cpu, capsule: true}\n"
    )
    with pytest.raises(MatrixError, match="how hardware"):
        matrices.read(tmp_path / "ferryman.yaml")


def test_replays_are_what_ci_replay_wrote(tmp_path: Path) -> None:
    with pytest.raises(ResultError, match="ci replay"):
        exchange.replays_of(tmp_path / "nowhere")
