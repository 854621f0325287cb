"""Mutants of the portable C++ kernels: many in one library that the host's compiler makes, chosen by an index, run by
the emulation of `tests/unit/simt_host.py`.

A GPU has no part in it. Which ops are drawn follows from the date (FERRYMAN_SELFTEST_DATE=YYYYMMDD, else today): every
op comes about twice a month. FERRYMAN_SELFTEST_SIMT=all runs them all.
"""

from __future__ import annotations

import datetime
import os
import random
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
EDITS, OPS_A_DAY = 40, 1
TODAY = os.environ.get("FERRYMAN_SELFTEST_DATE") or datetime.datetime.now(datetime.timezone.utc).strftime("%Y%m%d")
EVERY = os.environ.get("FERRYMAN_SELFTEST_SIMT") == "all"
DRAWN = survey.OPS if EVERY else random.Random(TODAY).sample(survey.OPS, OPS_A_DAY)


@pytest.mark.parametrize("op", DRAWN)
def test_mutants_of_the_portable_kernels_are_caught(op: str, tmp_path: Path) -> None:
    """On every small case, and on 200 draws: only what gives the right bits on all is left out."""
    runtime = host.EmulatedRuntime(survey.WAVE, tmp_path)
    with host.in_force(runtime):
        records = list(survey.survey(op, runtime, EDITS, 0, int(TODAY)))
    fates = Counter(r.outcome for r in records)
    missed = [(r.operator, r.change, r.reason) for r in records if r.outcome == "missed"]
    assert fates["caught"] >= 4, (op, TODAY, fates)
    assert fates["caught"] >= report.REQUIRED_SHARE * (fates["caught"] + fates["missed"]), missed
