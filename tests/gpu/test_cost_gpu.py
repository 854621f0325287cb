"""On a real device: predicted times are near measured ones, near misses are predicted, and regret is judged afresh."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import ferryman
from ferryman import ops
from ferryman.device_profiles import detect
from ferryman.dispatch import cost, registry
from ferryman.porting import bench
from ferryman.porting import tune as tuning
from ferryman.porting.bench import grid

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
GPU = torch.device("cuda", 0)


def test_what_is_shipped_for_this_device_predicts_what_it_takes() -> None:
    profile = detect(GPU)
    examples = ("rms_norm", "linear")
    if not all(cost.knows(op, profile) for op in examples):
        pytest.skip(f"no costs are shipped for {profile.name}")
    benchmark = bench.run(ops=examples, device="cuda")
    near = 0
    for cell in benchmark.cells:
        if not cell.case.startswith("8192x8192"):
            continue
        op = registry.primitive(cell.op)
        case = next(case for case in grid.cases(op, "small", GPU) if case.name == cell.case)
        predicted = cost.predictions(op, cost.work_of(op, grid.on_meta(op, case, torch.bfloat16)), profile)
        for times in cell.times:
            if times.name in predicted and times.seconds is not None:
                assert predicted[times.name][0] == pytest.approx(times.seconds, rel=0.3), (cell.op, times.name)
                near += 1
    assert near >= 4


@pytest.fixture(scope="module")
def lock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lock") / "lock.json"
    outcomes = tuning.tune(path, ["softmax", "silu_mul"], grid_name="full", device="cuda")
    # A region whose clocks never held still is not written, and that is right: no other is left out.
    assert not [(o.op, o.case, o.result) for o in outcomes if o.entry is None and "the SM clock moved" not in o.result]
    return path


def test_a_shape_beside_those_that_were_tuned_is_predicted(lock: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(lock))
    ferryman.reload()
    with ferryman.trace() as seen:
        ops.softmax(torch.randn(2, 3000, 6144, device=GPU, dtype=torch.bfloat16))
        ops.softmax(torch.randn(256, 8192, device=GPU, dtype=torch.bfloat16))
    sources = sorted(source for _, _, source in seen.sources)
    assert sources[0] == "lockfile" and sources[1].startswith("predicted from ")
    monkeypatch.undo()
    ferryman.reload()


def test_regret_is_judged_in_a_process_of_its_own(lock: Path, tmp_path: Path) -> None:
    out = tmp_path / "regret.json"
    arguments = ("--lockfile", lock, "--op", "softmax", "--op", "silu_mul", "--cells", "12", "--json", out)
    subprocess.run(
        [sys.executable, "benchmarks/regret.py", *map(str, arguments)],
        cwd=ROOT,
        check=True,
        timeout=240,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT), *filter(None, sys.path)])},
    )
    report = json.loads(out.read_text())
    assert len(report["cells"]) == 12 and not [c for c in report["cells"] if "failed" in c]
    tuned = [c for c in report["cells"] if c["half"] == "tuned"]
    assert 4 <= len(tuned) <= 5 and {c["source"] for c in tuned} == {"lockfile"}
    for half in ("tuned", "untuned"):
        assert report["halves"][half]["counts"] >= 1 and report["halves"][half]["regret"]["median"] <= 0.05
