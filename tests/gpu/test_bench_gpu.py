"""On a real device: graph replay and events agree, cold is colder than warm, and the limits measured are plausible."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import ferryman
from ferryman import ops
from ferryman.device_profiles import detect
from ferryman.porting import bench
from ferryman.porting import tune as tuning
from ferryman.porting.bench import ceilings, clock
from ferryman.porting.bench.document import Benchmark
from ferryman.porting.report import bench as report

pytestmark = pytest.mark.gpu
PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    return bench.run(
        ops=["rms_norm", "rms_norm_backward", "linear"],
        device="cuda",
        peer_names=["torch-eager", "torch-compile"],
        peers_from=PEERS,
    )


def test_ceilings_are_those_of_the_device() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    profile, limits = detect(device), ceilings.measure(device, torch.bfloat16)
    if profile.bandwidth is not None:
        assert 0.5 * profile.bandwidth < limits.copy_bytes_per_s < profile.bandwidth
    if "bf16" in profile.peaks:
        assert 0.3 * profile.peaks["bf16"].rate < limits.product_flops_per_s < profile.peaks["bf16"].rate


def test_every_contender_is_timed_and_no_faster_than_it_can_be(benchmark: Benchmark) -> None:
    assert {p.name: p.reason for p in benchmark.peers} == {"torch-eager": None, "torch-compile": None}
    trusted = [cell for cell in benchmark.cells if not cell.untrusted]
    assert len(trusted) > len(benchmark.cells) / 2, [cell.untrusted for cell in benchmark.cells]
    assert all("clock" in why for cell in benchmark.cells for why in cell.untrusted)  # a card at its power cap
    for cell in trusted:
        times = {t.name: t for t in cell.times}
        assert times["triton"].trials and times["torch"].trials and times["copy"].trials
        for one in cell.times:
            if one.skipped is not None:  # made for wider rows
                made_for = "required: x.shape[-1] >= 8193" in one.skipped and cell.op == "rms_norm_backward"
                assert made_for and one.name == "cuda", (cell.op, cell.case, one.name, one.skipped)
                continue
            assert one.spread is not None and one.spread < 1.5, (cell.op, cell.case, one.name, one.trials)
            assert one.role == "reference" or (one.host_seconds or 0) > 0
    assert "NVML" in report.markdown(benchmark) or torch.version.hip is not None


def test_short_calls_are_replayed_from_graphs(benchmark: Benchmark) -> None:
    small = next(c for c in benchmark.cells if c.op == "rms_norm" and c.case == "16x4096")
    for one in small.times:
        assert one.method == "graph replay" and one.note is None, (one.name, one.note)
        assert (one.seconds or 1) < 20e-6
    ours = next(t for t in small.times if t.name == "triton.rows")
    assert (ours.host_seconds or 0) > (ours.seconds or 1)  # a launch costs the host more than this kernel takes


@pytest.mark.parametrize("more", [0, 256, 4096, 3 << 28])
def test_the_copy_is_as_fast_as_a_copy_can_be_whatever_its_size(more: int) -> None:
    """CUDA's own takes 1.5 times as long at 2^28 bytes and 256, and at 2^30."""
    device = torch.device("cuda", torch.cuda.current_device())
    size = (1 << 28) + more
    copies = ceilings.copies(size, device)
    timer = clock.timer([copies() for _ in range(2)], device)
    assert size / timer.cold() > 0.9 * ceilings.measure(device, torch.bfloat16).copy_bytes_per_s


def test_graph_replay_and_events_agree_on_a_call_that_hides_its_launch() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    sets = [torch.randn(4096, 8192, device=device, dtype=torch.bfloat16) for _ in range(4)]
    replayed = clock.DeviceTimer([lambda x=x: x.mul(2) for x in sets], device)
    assert replayed.method == "graph replay"
    by_graph = replayed.cold()
    replayed.close()
    assert replayed.cold() == pytest.approx(by_graph, rel=0.15)


def test_a_call_of_many_launches_is_replayed_however_long_the_host_takes_for_them() -> None:
    device = torch.device("cuda", torch.cuda.current_device())

    def many(x: torch.Tensor) -> torch.Tensor:
        for _ in range(400):
            x = x + 1
        return x

    x = torch.zeros(64, device=device)
    timer = clock.DeviceTimer([lambda: many(x)] * 4, device)
    assert timer.method == "graph replay" and timer.cold() < clock.host(lambda: many(x), device)


def test_warm_inputs_are_read_faster_than_cold_ones(benchmark: Benchmark) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    cache = detect(device).l2_bytes or 32 << 20
    count = cache // 8  # float32: half of the cache
    sets = [torch.randn(count, device=device) for _ in range(12)]
    timer = clock.DeviceTimer([lambda x=x: x.sum() for x in sets], device)
    assert timer.warm() < 0.9 * timer.cold()


def test_what_cannot_be_captured_is_timed_by_events_and_says_so() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(1024, device=device)
    timer = clock.DeviceTimer([lambda: x.sum().item()], device)
    assert timer.method == "device events" and "launch gaps included" in str(timer.note)
    assert timer.cold() > 0 and torch.ones(3, device=device).sum().item() == 3  # the device is still usable
    assert torch.randn(64, device=device).isfinite().all()
    assert clock.DeviceTimer([lambda: x.mul(2)], device).method == "graph replay"


def test_a_tuned_lockfile_is_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "lock.json"
    outcomes = tuning.tune(path, ["rms_norm"], device="cuda")
    assert [o.result for o in outcomes] == ["written"] * 2, outcomes
    entry = next(o.entry for o in outcomes if o.case == "16x4096")
    assert entry is not None and all(c.seconds for c in entry.candidates), entry
    device = torch.device("cuda", torch.cuda.current_device())
    assert tuning.check(path, detect(device)).holds
    monkeypatch.setenv("FERRYMAN_LOCKFILE", str(path))
    ferryman.reload()
    x, w = torch.randn(16, 4096, device=device, dtype=torch.bfloat16), torch.ones(4096, device=device).bfloat16()
    with ferryman.trace() as seen:
        ops.rms_norm(x, w, eps=1e-6)
    assert seen.calls == {("rms_norm", entry.implementation): 1}
    monkeypatch.undo()
    ferryman.reload()
