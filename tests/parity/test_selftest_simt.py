"""Mutants of the portable C++ kernels: many in one library that the host's compiler makes, chosen by an index, run by
the emulation of `tests/unit/simt_host.py`.

A GPU has no part in it. The edits are those of the published survey; FERRYMAN_SELFTEST_DATE=YYYYMMDD draws others.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from ferryman.porting.selftest import report
from tests.unit import simt_host as host
from tests.unit import simt_survey as survey

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package"),
]
DRAWN_BY = int(os.environ.get("FERRYMAN_SELFTEST_DATE", "0"))


@pytest.mark.parametrize("op", survey.OPS)
def test_mutants_of_the_portable_kernels_are_caught(op: str, tmp_path: Path) -> None:
    """On every small case, and on 200 draws: only what gives the right bits on all is left out."""
    runtime = host.EmulatedRuntime(survey.WAVE, tmp_path)
    with host.in_force(runtime):
        records = list(survey.survey(op, runtime, survey.EDITS, 0, DRAWN_BY))
    fates = Counter(r.outcome for r in records)
    missed = [(r.operator, r.change, r.reason) for r in records if r.outcome == "missed"]
    assert fates["caught"] >= 4, (op, DRAWN_BY, fates)
    assert fates["caught"] >= report.REQUIRED_SHARE * (fates["caught"] + fates["missed"]), missed
