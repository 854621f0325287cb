"""Errors planted in the assembly of our own kernels are all found, and the kernels as they are show nothing."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")
pytest.importorskip("ziglang")

from tests import families
from tests.unit.simulator.planted import (
    F32,
    NUMBERS,
    RACE,
    WAIT,
    Outcome,
    Plant,
    PlantError,
    Subject,
    run,
    run_planted,
)

FAMILIES = families.modules("plants")
PLANTS: list[Plant] = [plant for family in FAMILIES.values() for plant in family.PLANTS]
SUBJECTS = tuple(dict.fromkeys(plant.subject for plant in PLANTS))
SOFTMAX = Subject("softmax", "triton.rows", F32, "wide")
LEAST = 48


@pytest.mark.parametrize("subject", SUBJECTS, ids=str)
def test_the_kernel_as_it_is_shows_nothing(subject: Subject) -> None:
    assert run(subject) == Outcome((), None)


@pytest.mark.daily(7)
@pytest.mark.parametrize("plant", PLANTS, ids=str)
def test_a_planted_error_is_found(plant: Plant) -> None:
    outcome = run_planted(plant)
    assert outcome.refused is None, outcome.refused
    if plant.shows == NUMBERS:
        assert outcome.reason is not None, f"the numbers pass; the sanitizer says {outcome.kinds or 'nothing'}"
        return
    assert outcome.kinds & set(plant.shows), f"found {outcome.kinds or 'nothing'}; of the numbers: {outcome.reason}"
    finding = next(f for f in outcome.findings if f.kind in plant.shows)
    assert finding.instruction
    assert finding.line > 0
    assert finding.source, "our kernels have line tables"


def test_there_are_enough_of_every_kind() -> None:
    assert len({(p.subject, p.old, p.new, p.which, p.kernel, p.after) for p in PLANTS}) == len(PLANTS) >= LEAST
    assert len({str(p) for p in PLANTS}) == len(PLANTS)
    assert len(FAMILIES) >= 6 and len(SUBJECTS) >= 16 and len({s.op for s in SUBJECTS}) >= 9
    for sign in (NUMBERS, RACE, WAIT):
        assert sum(p.shows == sign for p in PLANTS) >= 8


STALE = {
    "no such line": Plant(SOFTMAX, "stale", "v_frobnicate_b32 .*", "s_nop 0", NUMBERS),
    "too few such lines": Plant(SOFTMAX, "stale", "s_endpgm", "s_nop 0", NUMBERS, which=7),
    "no such line to begin at": Plant(SOFTMAX, "stale", "s_barrier", "s_nop 0", RACE, after="v_frobnicate"),
    "nothing changes": Plant(SOFTMAX, "stale", "s_barrier", "s_barrier", RACE),
    "no such kernel": Plant(SOFTMAX, "stale", "s_barrier", "s_nop 0", RACE, kernel="^frobnicate$"),
}


@pytest.mark.parametrize("why", STALE)
def test_an_edit_that_no_longer_fits_raises(why: str) -> None:
    with pytest.raises(PlantError, match="stale"):
        run_planted(STALE[why])
