"""One mutant on the cells of its op: whether it is caught, missed, no other than the right kernel, or not run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ferryman.backends.simt import Unit
from ferryman.errors import CompileError
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import Prepared
from ferryman.porting.mutate import units
from ferryman.porting.selftest import baselines, equivalents
from ferryman.porting.selftest.cells import Cells, Lines
from ferryman.porting.selftest.judging import RAISED, ArgumentLost, Seen, Setting, aligned, call, look, same_bits
from ferryman.porting.selftest.planting import Mutant
from ferryman.porting.selftest.report import DRAWS, Record

PANEL = 4  # cells where it differs that the other rules see of a mutant, beyond those until the engine has caught it
AFTER = 12  # cells that are tried for them once an edit is caught: most may not reach it, or not show it


def _reaches(mutant: Mutant, lines: Lines, arch: str) -> bool:
    edit = mutant.edit
    if edit is None or lines is None:
        return True
    if mutant.backend == "hip":
        return any(units.changes(unit, edit, arch) for unit in lines if isinstance(unit, Unit))
    return any((edit.file, n) in lines for n in range(edit.line, edit.last + 1))


def evaluate(
    mutant: Mutant,
    right: Callable[..., Any],
    cells: Cells,
    setting: Setting,
    every_run_judged: bool,
    first: int | None = None,
) -> Record | None:
    """`_evaluate`, for a mutant that may also take its arguments' memory away, or stay within the bounds by a reason
    that is written."""
    try:
        record = _evaluate(mutant, right, cells, setting, every_run_judged, first)
    except ArgumentLost as error:
        return not_run(mutant, str(error))
    if record is not None and record.outcome == "missed" and equivalents.within(record):
        return record.model_copy(update={"outcome": "equivalent", "reason": "it stays within the bounds"})
    return record


def _evaluate(
    mutant: Mutant,
    right: Callable[..., Any],
    cells: Cells,
    setting: Setting,
    every_run_judged: bool,
    first: int | None,
) -> Record | None:
    """Run a mutant on its cells until everything is known; where no gate fails, compare it with the right kernel.
    None where no gate fails on the ``first`` cells, if so many are given: the others are not tried then.

    An edit is judged on the cells that the right kernel computes and that reach the edit, where its bits differ. Once
    the engine has caught the mutant, further runs are for the other rules (unless every run is judged).
    """
    record = new_record(mutant)
    try:
        kernel = mutant.make()
    except Exception as error:  # noqa: BLE001 - an edited source may fail to load in any way
        return not_run(mutant, f"does not load: {type(error).__name__}: {_first(error)}")
    reached, differs, panel, after, untried = False, False, 0, 0, 0
    for number, (case, dtype) in enumerate(cells.order()):
        caught = record.outcome == "caught"
        if number == first and not caught:
            return None
        over = panel >= PANEL or (mutant.edit is not None and (number == first or after >= AFTER))
        if caught and over and not every_run_judged:
            break
        after += caught
        if mutant.edit is not None and not differs and cells.unknown(case, dtype):
            untried += 1
            continue
        prepared = cells.prepared(case, dtype)
        if mutant.edit is not None:
            outputs, lines = cells.right(right, case, dtype)
            try:
                if outputs is None or not _reaches(mutant, lines, cells.target.arch):
                    continue  # where the right kernel refuses, a mutant says nothing
            except CompileError as error:
                return not_run(mutant, f"does not compile: {_first(error)}", record.runs)
            reached = True
            mine = call(cells.primitive, kernel, prepared.args, setting, cells.target)
            record.runs += 1
            if mine is not None and same_bits(mine, outputs):
                continue
            differs = True
        else:
            reached = True
        panel += 1
        usual = aligned(prepared.primitive, case)
        seen = look(kernel, mutant.line, prepared, setting)
        if not seen.judged:
            record.reason = record.reason or f"{seen.cell.verdict}: {seen.cell.reason}"
            continue
        if seen.gates == (RAISED,) and not caught:
            return not_run(mutant, str(seen.cell.reason), record.runs + 1)
        _count(record, seen, prepared, usual)
        if record.outcome == "missed" and not differs and mutant.edit is None:
            differs = not same_bits(seen.outputs, cells.right(right, case, dtype)[0])
    if record.outcome == "caught":
        return record
    if not differs:
        drawn = _drawn(mutant, kernel, right, cells, setting)
        reached, differs = reached or drawn.reached, drawn.where is not None
        record.draws = drawn.count
        if differs and untried:  # it is no equivalent one: every cell may show it
            cells.budget = math.inf
            return _evaluate(mutant, right, cells, setting, every_run_judged, None)
    if not differs and (untried or (reached and record.draws < DRAWS)):
        why = f"bitwise equal in {record.runs} runs and {record.draws} draws, {untried} cells not tried"
        until = "when its time was up" if untried or cells.budget <= 0 else f"for want of {DRAWS} draws"
        undecided = not_run(mutant, f"undecided {until}: {why}", record.runs)
        return undecided.model_copy(update={"undecided": True})
    if not reached and not differs:
        return not_run(
            mutant, record.reason or "nothing here reaches it: another device's path, or no case and no draw"
        )
    if not differs and not getattr(kernel, "bent", True):
        return not_run(mutant, "no case and no draw has what it bends", record.runs)
    if not differs:
        record.outcome = "equivalent"
        record.reason = f"bitwise equal in all {record.runs} runs and {record.draws} draws"
    elif record.draws:
        record.reason = f"differs on {drawn.where}, and no case of the judge shows it"
    else:
        record.reason = "differs from the unmutated kernel, and no gate failed"
    return record


@dataclass
class _Drawn:
    count: int
    reached: bool
    where: str | None


def _drawn(mutant: Mutant, kernel: Any, right: Any, cells: Cells, setting: Setting) -> _Drawn:
    """Compare with the right kernel on the draws; one that does not reach the edit gives the same bits unseen."""
    draws = cells.draws(right, mutant.line)
    reached = False
    for draw in draws:
        if _reaches(mutant, draw.lines, cells.target.arch):
            reached = True
            if not same_bits(call(cells.primitive, kernel, draw.args, setting, cells.target), draw.right):
                return _Drawn(len(draws), True, draw.name)
    return _Drawn(len(draws), reached, None)


def _count(record: Record, seen: Seen, prepared: Prepared, usual: bool) -> None:
    record.runs += 1
    for rule in set(baselines.NAMES) - set(seen.accepted):
        record.others[rule] = True
        record.others_aligned[rule] |= usual
    if not seen.flagged:
        return
    record.flagged += 1
    record.gates = sorted({*record.gates, *seen.gates})
    if record.outcome != "caught":
        record.outcome, record.reason = "caught", seen.cell.reason
        record.case = f"{prepared.case.name} {dtype_name(prepared.dtype)}"


def new_record(mutant: Mutant) -> Record:
    return Record(
        key=mutant.key,
        op=mutant.op,
        name=mutant.name,
        operator=mutant.operator,
        note=mutant.note,
        backend=mutant.backend,
        line=mutant.line.name,
        place=mutant.place,
        others=dict.fromkeys(baselines.NAMES, False),
        others_aligned=dict.fromkeys(baselines.NAMES, False),
    )


def not_run(mutant: Mutant, reason: str, runs: int = 0) -> Record:
    """Counted apart: it does not load, it raises, or nothing here reaches it."""
    return new_record(mutant).model_copy(update={"outcome": "not run", "reason": reason, "runs": runs})


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"
