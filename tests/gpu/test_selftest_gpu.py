"""The self-test on a device: Triton edits compiled, C++ edits through NVRTC or hipRTC, work left on other streams."""

from __future__ import annotations

import pytest
import torch

from ferryman.porting.selftest import SelfTest, run
from ferryman.porting.selftest.report import survivors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]
# One family of each backend: every edit of every op compiles a kernel of its own, and takes minutes
# (`ferryman selftest --device cuda`, docs/selftest.md).
OPS = ("rms_norm", "softmax", "silu_mul")


@pytest.fixture(scope="module")
def document() -> SelfTest:
    return run(ops=OPS, honest_runs=1500, device="cuda")


def test_the_score_holds_on_the_device(document: SelfTest) -> None:
    missed = [r.key for r in survivors(document)]
    assert document.mutants.caught >= 0.95 * document.mutants.non_equivalent, missed
    assert document.false_alarms == 0, document.honest.alarms


def test_what_only_a_device_can_do_wrong_is_caught(document: SelfTest) -> None:
    fates = {(r.op, r.name): r for r in document.listing}
    for op in OPS:
        side = fates[op, "written_on_a_side_stream"]
        assert side.outcome == "caught" and "G5" in side.gates, side
    assert fates["rms_norm", "graph_replayed_on_old_inputs"].outcome == "caught"
    assert fates["softmax", "result_on_the_host"].gates == ["G0"]


def test_edits_of_both_toolchains_ran(document: SelfTest) -> None:
    ran = [r for r in document.listing if r.outcome != "not run"]
    assert {"torch", "triton"} <= {r.backend for r in ran}
    if torch.version.cuda:
        assert {r.op for r in ran if r.backend == "simt"} == set(OPS)


def test_the_device_is_still_there(document: SelfTest) -> None:
    lost = [r.reason for r in document.listing if r.outcome == "not run" and "lost the device" in str(r.reason)]
    assert not lost
    torch.cuda.synchronize()
