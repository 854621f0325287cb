"""The score that docs/selftest.md promises, over every mutant."""

from __future__ import annotations

import json

import pytest

from ferryman.dispatch import registry
from ferryman.porting.selftest import SelfTest, mutants, run, succeeded
from ferryman.porting.selftest.report import dumps, survivors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
CATALOGUE = mutants.catalogue()


@pytest.fixture(scope="module")
def document() -> SelfTest:
    return run(honest_runs=600, device="cpu")


def test_the_score_is_what_is_promised(document: SelfTest) -> None:
    missed = [r.key for r in survivors(document)]
    assert document.mutants.caught >= 0.95 * document.mutants.non_equivalent, missed
    assert document.false_alarms == 0, document.honest.alarms
    assert succeeded(document)


def test_there_is_enough_to_catch(document: SelfTest) -> None:
    assert document.mutants.non_equivalent >= 150 and len(document.classes) >= 30 and len(document.ops) >= 9
    assert set(document.ops) == set(registry.primitives()), "an op without a mutant"
    assert document.source_edits >= 40
    assert document.survive_allclose >= 75
    kinds = {
        "launch geometry",
        "strides ignored",
        "output aliases input",
        "stale output",
        "input modified",
        "wrong dtype",
    }
    assert kinds <= set(document.classes)


def test_the_other_rules_see_the_same_runs_and_do_worse(document: SelfTest) -> None:
    for name, other in document.baselines.items():
        assert other.caught_on_aligned_normal <= other.caught < document.mutants.caught, name
    assert document.baselines["assert_close"].false_alarms > 0, "honest 16-bit sums differ by more than its defaults"


def test_right_runs_are_spread(document: SelfTest) -> None:
    assert document.honest_runs >= 500 and document.honest_runs == sum(document.honest.by_op.values())
    assert set(document.honest.by_op) == set(registry.primitives())
    assert set(document.honest.by_dtype) == {"float32", "float16", "bfloat16"}
    for op in registry.primitives():
        ran = [key for key in document.honest.by_alternative if key.startswith(f"{op}.")]
        assert len([key for key in ran if not key.endswith((".shipped", ".copied"))]) >= 4, (op, ran)
    assert any(".triton." in key for key in document.honest.by_alternative)


def test_every_mutant_has_a_fate_and_a_reason(document: SelfTest) -> None:
    assert {r.key for r in document.listing} == {m.key for m in CATALOGUE}
    for record in document.listing:
        if record.outcome == "caught":
            assert record.gates and record.case and record.reason, record.key
        else:
            assert record.reason, record.key
    absent = {r.key for r in document.listing if r.outcome == "not run"}
    assert absent == {m.key for m in CATALOGUE if m.gpu}
    assert {"side stream", "stale graph replay", "missing barrier"} <= {m.kind for m in CATALOGUE if m.gpu}


def test_no_mutant_is_caught_by_a_crash_of_its_own_making(document: SelfTest) -> None:
    """A mutant that raises on an empty tensor would be a catch that shows nothing."""
    assert [r.key for r in document.listing if "raised" in r.gates] == ["silu_mul.torch.raises"]


def test_the_json_is_what_others_read(document: SelfTest) -> None:
    text = json.loads(dumps(document))
    assert set(text["mutants"]) == {"caught", "non_equivalent", "by_gate"}
    assert text["false_alarms"] == 0 and text["honest_runs"] == document.honest_runs
    assert set(text["baselines"]) == {"allclose_1e-2", "assert_close", "twice_the_reference"}
    assert SelfTest.model_validate(text) == document
