"""Drawn cases, judged as an op's own are: the one way, for `ferryman fuzz` and for the tests that fuzz."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import torch

from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.results import Cell
from ferryman.porting.running.cells import Starting, check_case, not_run

_WRONG = ("FAIL", "MISTRUSTED", "QUARANTINED")


def is_wrong(cell: Cell) -> bool:
    """Whether a drawn case shows a fault. A refusal is none, nor is what could not run here."""
    return cell.verdict in _WRONG


def fault(cell: Cell, case: Case, dtype: torch.dtype, seed: int) -> str:
    """What is wrong, and the case as Python that makes it again."""
    return f"{cell.op} {cell.implementation} {cell.verdict} {cell.reason}, seed {seed}: {fuzz.described(case, dtype)}"


def check_drawn(
    op: Primitive,
    lines: Sequence[Implementation],
    numbers: Sequence[int],
    seed: int,
    device: torch.device,
    profile: Profile,
    *,
    skip: Collection[tuple[str, ...]] = (),
    times: int = 3,
    simulate: Profile | None = None,
    starting: Starting | None = None,
) -> Iterator[Cell]:
    """The cases that ``seed`` draws at these numbers, through every implementation, but those in ``skip``: (op, dtype,
    case, implementation). ``starting`` hears of each cell before it runs."""
    for number in numbers:
        drawn, dtype, reason = _drawn(op, number, seed)
        key = op.name, dtype_name(dtype), fuzz.name_of(number)
        wanted = [line for line in lines if (*key, line.name) not in skip]
        if drawn is None:
            for line in wanted:
                yield not_run(op.name, line, device, dtype, reason, fuzz.name_of(number), verdict="MISTRUSTED")
            continue
        yield from check_case(
            op, wanted, drawn, dtype, device, profile, seed=seed, times=times, simulate=simulate, starting=starting
        )


def _drawn(op: Primitive, number: int, seed: int) -> tuple[Case | None, torch.dtype, str]:
    try:
        return *fuzz.numbered(op, number, seed), ""
    except Exception as error:  # noqa: BLE001 - another package's domain may be wrong itself
        first = registry.evidence(op).dtypes[0]
        return None, first, f"its domain raised {type(error).__name__}: {str(error)[:300]}"
