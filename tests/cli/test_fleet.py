"""`ferryman check|bench|tune --on ray`: real clusters of several processes, of which some are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from ferryman.device_profiles import profile
from ferryman.porting.fleet import cluster, pool, remote
from tests.cli.run import alone

ray = pytest.importorskip("ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
ASK = ("check", "--device", "cpu", "--op", "silu_mul", "--backend", "torch")


def cells(folder: Path) -> list[dict[str, Any]]:
    timed_cells = json.loads((folder / "check.json").read_text())["cells"]
    return [{k: v for k, v in one.items() if k != "seconds"} for one in timed_cells]


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A cluster of a head without cores and nodes; its files lie where Ray keeps them, /tmp/ray."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_USAGE_STATS_ENABLED", "0")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    Path("/tmp/ray").mkdir(exist_ok=True)  # Ray notes an address there, whatever its temporary folder is
    ray_cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 0, "include_dashboard": False, "object_store_memory": 100 << 20},
    )
    try:
        yield ray_cluster
    finally:
        ray.shutdown()
        ray_cluster.shutdown()


def add(ray_cluster: Any, **resources: Any) -> Any:
    return ray_cluster.add_node(object_store_memory=100 << 20, **resources)


def busy(name: str, wait: float = 90) -> int:
    """The id of a Ray worker that runs a function of that name, one of this test's own."""
    end = time.monotonic() + wait
    while time.monotonic() < end:
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    said = (entry / "cmdline").read_bytes()
                except OSError:
                    continue
                if said.startswith(f"ray::{name}".encode()):
                    return int(entry.name)
        time.sleep(0.05)
    raise AssertionError(f"no worker runs {name} within {wait} s")


def test_a_killed_worker_and_a_removed_node_cost_no_cell(nodes: Any, tmp_path: Path) -> None:
    add(nodes, num_cpus=1)
    second = add(nodes, num_cpus=1)
    nodes.wait_for_nodes()
    command = [sys.executable, "-m", "ferryman", *ASK, "--on", f"ray@{nodes.address}", "--out", str(tmp_path / "fleet")]
    source = str(Path(__file__).resolve().parents[2] / "src")
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    running = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": path}, stderr=subprocess.PIPE, text=True)
    os.kill(busy("check"), signal.SIGKILL)
    time.sleep(1)
    nodes.remove_node(second, allow_graceful=False)
    _, said = running.communicate(timeout=240)
    assert running.returncode == 0, said
    assert alone(*ASK, "--out", str(tmp_path / "one")).code == 0
    assert cells(tmp_path / "fleet") == cells(tmp_path / "one")
    assert not (tmp_path / "fleet" / "fleet-check.jsonl").exists()


def test_a_gpu_is_claimed_by_vendor_and_profile_and_an_absent_one_is_named(
    nodes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(nodes, num_cpus=1, num_gpus=2, resources={"ferryman:nvidia": 2, "ferryman:h100": 2})
    wanted = add(nodes, num_cpus=2, num_gpus=2, resources={"ferryman:nvidia": 2, "ferryman:h200": 2})
    nodes.wait_for_nodes()
    ray.init(address=nodes.address, log_to_driver=False, logging_level="ERROR")
    claim = cluster.Claim.of(profile("h200"))
    assert cluster.require(ray, claim) == 2

    def place() -> tuple[str, list[int]]:
        import ray

        return ray.get_runtime_context().get_node_id(), ray.get_gpu_ids()

    node, gpus = ray.get(ray.remote(place).options(**claim.options()).remote())
    assert node == wanted.node_id and len(gpus) == 1
    with pytest.raises(cluster.FleetError, match=r"mi300x.*ferryman:h200 2"):
        cluster.require(ray, cluster.Claim.of(profile("mi300x")))
    pool.agree(ray, claim)
    monkeypatch.setattr(remote, "digest", lambda: "0" * 64)  # in this process, not on the nodes
    with pytest.raises(cluster.FleetError, match=rf"node [0-9.]+ .*SHA-256.*required: {'0' * 64}"):
        pool.agree(ray, claim)


def test_our_own_cluster_leaves_nothing(tmp_path: Path) -> None:
    before = set(Path("/tmp").glob("ferryman-*/token"))
    done = alone(*ASK, "--dtype", "f32", "--on", "ray", "--jobs", "1", "--out", str(tmp_path))
    assert done.code == 0, done.err
    assert {one["verdict"] for one in cells(tmp_path)} == {"PASS"}
    assert set(Path("/tmp").glob("ferryman-*/token")) <= before


def test_an_unreachable_address_is_bad_use() -> None:
    done = alone(*ASK, "--on", "ray@127.0.0.1:9")
    assert done.code == 2 and "127.0.0.1:9" in done.err


def test_a_benchmark_and_a_tuning_lose_no_cell_to_a_killed_worker(nodes: Any, tmp_path: Path) -> None:
    add(nodes, num_cpus=1)
    add(nodes, num_cpus=1)
    nodes.wait_for_nodes()
    source = str(Path(__file__).resolve().parents[2] / "src")
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    common = ["--device", "cpu", "--op", "softmax", "--op", "silu_mul", "--on", f"ray@{nodes.address}"]
    out, lock = tmp_path / "bench.json", tmp_path / "lock.json"
    for verb, where in (("bench", ["--out", str(out)]), ("tune", ["--lockfile", str(lock), "--json"])):
        command = [sys.executable, "-m", "ferryman", verb, *common, *where]
        env = {**os.environ, "PYTHONPATH": path}
        running = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        os.kill(busy(verb), signal.SIGKILL)
        output, said = running.communicate(timeout=240)
        if verb == "bench":
            assert running.returncode == 0, said
            cell_keys = [(c["op"], c["case"]) for c in json.loads(out.read_text())["cells"]]
        else:
            assert output.startswith("{"), (output, said)
            outcomes = json.loads(output)["outcomes"]
            cell_keys = [(one["op"], one["case"]) for one in outcomes]
            # a noisy machine writes nothing of a cell, and says so
            assert all(one["entry"] is not None or "noise" in one["result"] for one in outcomes), outcomes
            assert running.returncode == (0 if all(one["entry"] for one in outcomes) else 1), said
        assert cell_keys == [("softmax", cell_keys[0][1]), ("silu_mul", cell_keys[-1][1])] and len(set(cell_keys)) == 2
        assert not list(tmp_path.glob("*.fleet.jsonl"))
