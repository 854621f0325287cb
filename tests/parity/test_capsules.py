"""The capsules that were recorded on an H200, replayed on this CPU."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from ferryman.dispatch import registry
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule.replay import replay
from ferryman.porting.capsule.replay_results import WRONG, failed

DATA = Path(__file__).resolve().parents[1] / "data"
H200, PLANTED = DATA / "h200.capsule", DATA / "h200-planted.capsule"
recorded = pytest.mark.skipif(not (H200.exists() and PLANTED.exists()), reason="not recorded on an H200 yet")


@pytest.mark.slow
@recorded
def test_the_h200_and_this_cpu_agree_with_the_oracle() -> None:
    recording = capsule.load(H200)
    assert recording.size <= 16 * 2**20
    assert recording.results.environment.vendor == "nvidia" and recording.manifest.machine.driver
    recorded_ops = {case.op for case in recording.manifest.cases}
    assert recorded_ops <= set(registry.primitives()) and len(recorded_ops) >= 23, "what came later is in the next one"
    ran = {c.implementation for c in recording.results.cells if c.verdict == "PASS"}
    assert {"torch", "triton", "cuda", "definition"} <= ran
    document = replay(recording, "cpu")
    said = Counter(each.explanation for each in document.explained)
    wrong = [(e.op, e.implementation, e.dtype, e.case, e.detail) for e in document.explained if e.explanation in WRONG]
    assert wrong == [] and said["not judged"] == 0 and not failed(document)
    agreed = said["equal"] + said["both within bounds"]
    assert agreed > 1000 and any(t.percent_of_roofline for t in document.recorded.timings)
    again = [e for e in document.explained if e.implementation in ("triton", "cuda") and e.judged]
    assert len(again) > 1000, "A's kernels that no CPU runs are judged by their stored outputs"


@recorded
def test_the_error_that_was_planted_on_the_h200_is_named() -> None:
    document = replay(capsule.load(PLANTED), "cpu")
    wrong = [e for e in document.explained if e.explanation in WRONG]
    assert {(e.op, e.implementation) for e in wrong} == {("rms_norm", "torch")}
    assert {e.explanation for e in wrong} == {"A is wrong"} and failed(document)
    shapes = {c.case: c.args["x"].shape for c in capsule.load(PLANTED).manifest.cases if c.op == "rms_norm"}  # type: ignore[union-attr]
    judged = [e for e in wrong if e.judged]
    assert len(judged) > 30
    for e in judged:
        assert e.a.worst is not None and e.a.worst.output == "y" and e.detail is not None and "y[" in e.detail
        assert e.a.worst.index[-1] == shapes[e.case][-1] - 1, "the last column"
