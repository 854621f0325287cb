"""`ferryman check --backend simulated`: what it assumes, and how it refuses bad use."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from ferryman.backends.simulator.numerics import Assumptions
from ferryman.errors import ArgumentError
from ferryman.porting.judging import results
from ferryman.porting.running import simulated_route
from tests.cli.run import ferryman

LINEAR = ("check", "--backend", "simulated", "--backend", "triton", "--op", "linear", "--dtype", "f32", "--jobs", "1")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["mfma=exact"], "--assume is 'mfma=exact'; required: NAME=VALUE with mfma_order=exact|sequential|pairs; "),
        (["mfma_order"], "--assume is 'mfma_order'; required: mfma_order=exact|sequential|pairs"),
        (["xf32=nearer"], "--assume is 'xf32=nearer'; required: xf32=truncate|nearest"),
        ([""], "--assume is ''; required: NAME=VALUE"),
        (["xf32=nearest", "xf32=truncate"], "xf32=nearest and xf32=truncate; required: one of the two"),
    ],
)
def test_a_wrong_assumption_is_refused(given: list[str], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        simulated_route.assumptions_of(given)
    done = ferryman(*LINEAR, *(word for text in given for word in ("--assume", text)))
    assert done.code == 2 and "--assume is" in done.err and "Traceback" not in done.err


def test_assumptions_need_the_simulator() -> None:
    done = ferryman("check", "--op", "softmax", "--assume", "xf32=nearest", "--device", "cpu")
    assert done.code == 2 and "--assume is given; required: --backend simulated beside it" in done.err


def test_assumptions_keep_their_defaults() -> None:
    assumptions = simulated_route.assumptions_of(["estimates=below", "mfma_order=pairs", "estimates=below"])
    assert assumptions == Assumptions(mfma_order="pairs", estimates="below")
    assert simulated_route.flags(assumptions) == {
        "simulator.mfma_order": "pairs",
        "simulator.mfma_subnormals": "kept",
        "simulator.xf32": "truncate",
        "simulator.estimates": "below",
    }


@pytest.mark.slow
def test_a_document_says_what_was_assumed_and_the_worker_computes_so(tmp_path: Path) -> None:
    """float32, whose results are not rounded to fewer bits: errors differ between orders, each within the bound."""
    ratios = {}
    for order in ("exact", "sequential"):
        done = ferryman(*LINEAR, "--assume", f"mfma_order={order}", "--out", str(tmp_path / order))
        assert done.code == 0, done.out + done.err
        assert f"assumed: mfma_order {order}, mfma_subnormals kept" in done.out
        document = results.load(tmp_path / order / "check-simulated.json")
        assert document.environment.flags["simulator.mfma_order"] == order
        assert {c.verdict for c in document.cells} <= {"SIMULATED", "UNIMPLEMENTED"}
        ratios[order] = [c.ratio for c in document.cells if c.verdict == "SIMULATED"]
        text = (tmp_path / order / "check-simulated.json").read_text("utf-8")
        assert json.loads(text)["environment"]["flags"]["simulator.mfma_order"] == order
    assert ratios["exact"] != ratios["sequential"]
