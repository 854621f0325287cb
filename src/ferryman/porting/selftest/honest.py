"""Right alternatives on cells of every op, each of which must be let through."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from ferryman.dispatch.select import View, refusals
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import Prepared
from ferryman.porting.selftest.alternatives import alternatives
from ferryman.porting.selftest.cells import Cells
from ferryman.porting.selftest.judging import Setting, look
from ferryman.porting.selftest.report import Alarm, Tally


def right_cells(
    ops: Sequence[str], setting: Setting, seed: int, backend: str, first: int = 0
) -> Iterator[tuple[str, Prepared, int]]:
    """Endless: one cell of every op a round, the dtypes in turn, every case once before the seed moves on."""
    for number in itertools.count(first):
        for i, op in enumerate(ops):
            cells = Cells(op, setting, seed, backend)
            dtypes, count = cells.dtypes, len(cells.cases)
            step = next(s for s in range(max(1, count * 5 // 13), 2 * count + 2) if math.gcd(s, count) == 1)
            turn, dtype = divmod(number + i, len(dtypes))
            cells.seed = now = seed + turn // count
            yield op, cells.prepared(cells.cases[(turn * step + i) % count], dtypes[dtype]), now


def honest(ops: Sequence[str], setting: Setting, seed: int, backend: str, first: int, rounds: int) -> Tally:
    """Every right alternative on ``rounds`` rounds of cells from round ``first`` on."""
    tally = Tally()
    known: dict[str, list[tuple[Any, Any]]] = {op: [] for op in ops}
    for one in alternatives(ops, backend):
        known[one.op].append((one, one.make()))
    served = [op for op in ops if known[op]]
    cells = right_cells(served, setting, seed, backend, first)
    for op, prepared, now in itertools.islice(cells, rounds * len(served)):
        view = View.of(prepared.primitive, prepared.args.values, setting.profile)
        for one, kernel in known[op]:
            if refusals(one.line, view, setting.profile, absent=True):
                continue  # dispatch would not give it this call
            seen = look(kernel, one.line, prepared, setting)
            if not seen.judged:
                continue
            dtype, alarm = dtype_name(prepared.dtype), None
            if seen.flagged:
                alarm = Alarm(
                    alternative=one.key, op=op, case=prepared.case.name, dtype=dtype, seed=now, reason=seen.cell.reason
                )
            tally.add(op, dtype, one.key, seen.accepted, alarm)
    return tally
