"""`ferryman check --kernel module:function --op ..`: a function that we did not write, through every gate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ferryman.cli import output
from ferryman.errors import ArgumentError
from ferryman.porting.judging.results import Results
from ferryman.porting.kernel import check as kernel


def run(
    function: str,
    ops: Sequence[str] | None,
    declaration: kernel.Declaration,
    place: str,
    dtypes: Sequence[str] | None,
    tier: str | None,
    seed: int,
    timeout: float,
    rejected: dict[str, Any],
) -> Results:
    """The result document. ``rejected``: options that mean nothing beside --kernel, with their values."""
    for option, value in rejected.items():
        if value:
            raise ArgumentError("check", option, "given", "no --kernel beside it")
    if ops is None or len(ops) != 1:
        given = "missing" if not ops else ", ".join(ops)
        raise ArgumentError("check", "--op", given, "one op beside --kernel: the one that the function computes")
    with output.progress("checking") as advance:
        return kernel.run(
            function,
            ops[0],
            declaration=declaration,
            device=place,
            dtypes=dtypes,
            tier=tier,
            seed=seed,
            timeout=timeout,
            progress=advance,
        )
