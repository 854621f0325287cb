"""The self-test on a device: Triton edits compiled, work left on other streams."""

from __future__ import annotations

import pytest

from ferryman.porting.selftest import run
from ferryman.porting.selftest.report import survivors

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(1800)]


def test_a_sample_is_caught_on_the_device() -> None:
    document = run(ops=("rms_norm", "softmax", "silu_mul"), honest_runs=300, device="cuda", most=8)
    missed = [r.key for r in survivors(document)]
    assert document.mutants.caught >= 0.95 * document.mutants.non_equivalent, missed
    assert document.false_alarms == 0, document.honest.alarms
    side = [r for r in document.listing if r.name.startswith("written_on_a_side_stream")]
    assert side and all(r.outcome == "caught" for r in side)
