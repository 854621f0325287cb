"""Calls that reach the tiles of an A100's kernels which no case of the parity check reaches."""

from __future__ import annotations

import dataclasses

from ferryman.ops.primitive import Case
from tests.stand_in_cases import named


def _wide(case: Case) -> Case:
    """With x in float32, as a scan in float32 gives it."""
    x = dataclasses.replace(case.args["x"], dtype="float32")
    return dataclasses.replace(case, name=f"{case.name} float32 x", args={**case.args, "x": x})


_SHORT, _LONG = named("gated_rms_norm", "1731x257 norm", "3x3072")
TILES = {"gated_rms_norm": (_SHORT, _wide(_LONG))}
