"""Mutants and right alternatives of one process, run after another."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ferryman.backends.simt import Unit
from ferryman.dispatch import registry
from ferryman.dispatch.select import View, refusals, target_of
from ferryman.errors import CompileError, UnknownName
from ferryman.ops.domain import Sizes
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import STORAGE_DTYPES, Case, TensorSpec
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.cases import Arguments, arguments, cases_of
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import Prepared, prepare
from ferryman.porting.mutate import sources, units
from ferryman.porting.selftest import baselines
from ferryman.porting.selftest.alternatives import alternatives
from ferryman.porting.selftest.judging import (
    RAISED,
    ArgumentLost,
    Outputs,
    Seen,
    Setting,
    aligned,
    call,
    look,
    same_bits,
)
from ferryman.porting.selftest.planting import Mutant
from ferryman.porting.selftest.report import Alarm, Record, Tally

PANEL = 4  # cells where it differs that the other rules see of a mutant, beyond those until the engine has caught it
AFTER = 12  # cells that are tried for them once an edit is caught: most may not reach it, or not show it
DRAWS = 200  # of the op's whole domain, which an equivalent mutant must give the same bits on
_TEMPLATES = 10  # on a GPU every shape may be a compilation
_DRAWN_BY = 7_310_000  # a seed that no check uses
_MOST_LINES = 3000  # of kernels, that a draw may execute in the interpreter: 200 us each, for every edit that survives
_SMALL = Sizes(  # of draws there
    rows=(0, 1, 2, 3, 5),
    width=(0, 1, 2, 3, 7, 16, 31, 64, 65, 127, 128),
    depth=(0, 1, 2, 5, 16, 37, 64),
    batch=(0, 1, 2),
    groups=(1, 2),
    per_group=(1, 2),
    queries=(0, 1, 2, 7, 16, 17),
    keys=(0, 1, 3, 16, 19),
    head_dim=(1, 2, 8, 16, 37, 64),
)
Lines = frozenset[tuple[str, int]] | units.Units | None  # (file inside the package, line), or what was launched


@dataclass
class Draw:
    """One point of an op's domain that the judge does not use: the arguments, and what the right kernel makes of
    them."""

    name: str
    args: Arguments
    right: Outputs
    lines: Lines


class Cells:
    """The cells of one op at one seed, each made ready once, and the right kernel's results on them."""

    def __init__(self, op: str, setting: Setting, seed: int, backend: str) -> None:
        self.primitive, self.setting, self.seed, self.backend = registry.primitive(op), setting, seed, backend
        self.cases = cases_of(self.primitive)
        self.target = target_of(setting.simulate or setting.profile)
        self._ready: dict[tuple[str, torch.dtype], Prepared] = {}
        self._right: dict[tuple[str, torch.dtype, int], tuple[Outputs, Lines]] = {}
        self._draws: dict[int, list[Draw]] = {}
        self._seconds: dict[tuple[str, torch.dtype], float] = {}
        self.seconds = 0.0  # of the right kernel's runs
        self.budget = math.inf  # process seconds that the right kernel has left for what survivors need

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first, where most bugs show."""
        if self.backend == "triton" and self.setting.simulate and sources.multiplies(self.primitive.name):
            return (torch.float16, torch.float32)
        return tuple(reversed(STORAGE_DTYPES))

    def prepared(self, case: Case, dtype: torch.dtype) -> Prepared:
        key = case.name, dtype
        if key not in self._ready:
            self._ready[key] = prepare(self.primitive, case, dtype, self.setting.device, self.seed)
        return self._ready[key]

    def order(self) -> list[tuple[Case, torch.dtype]]:
        """Every cell: an aligned case, then the others, small ones first, in the first dtype; then in the others. Where
        the right kernel has run on some, these come first, by their cost, then small ones of any dtype."""
        usual = [c for c in self.cases if aligned(self.primitive, c)][:1]
        rest = sorted((c for c in self.cases if c not in usual), key=_elements)
        pairs = [(case, dtype) for dtype in self.dtypes for case in [*usual, *rest]]
        known = self._seconds
        if known:
            last = max(known.values())
            pairs.sort(key=lambda c: known.get((c[0].name, c[1]), last + 1 + _elements(c[0])))
        return pairs

    def unknown(self, case: Case, dtype: torch.dtype) -> bool:
        """Whether the budget did not reach this cell."""
        return self.budget <= 0 and (case.name, dtype) not in self._seconds

    def right(self, kernel: Callable[..., Any], case: Case, dtype: torch.dtype) -> tuple[Outputs, Lines]:
        """(the right kernel's outputs on a cell, the lines of source that it reaches; None where not known)."""
        key = case.name, dtype, id(kernel)
        if key not in self._right:
            args, began = self.prepared(case, dtype).args, time.process_time()
            self._right[key] = self._traced(kernel, args)
            self._spent(began)
            self._seconds.setdefault((case.name, dtype), time.process_time() - began)
        return self._right[key]

    def _spent(self, began: float) -> None:
        self.seconds += time.process_time() - began
        self.budget -= time.process_time() - began

    def _traced(self, kernel: Callable[..., Any], args: Arguments, most: float = math.inf) -> tuple[Outputs, Lines]:
        """A run's outputs, and the lines of watched kernels that it executes. Raises TooLong where those are over
        ``most``."""
        if self.backend == "hip":
            return units.launched(lambda: call(self.primitive, kernel, args, self.setting, self.target))
        seen = sources.Reached(most)
        sources.watch(seen)
        try:
            outputs = call(self.primitive, kernel, args, self.setting, self.target)
        finally:
            sources.watch(None)
        return outputs, frozenset(seen.lines) if self.backend == "triton" and self.setting.simulate else None

    def draws(self, kernel: Callable[..., Any], line: Implementation) -> list[Draw]:
        """DRAWS points of the op's domain that ``line`` serves, none of them too long for an interpreter; fewer where
        fuzzing does not know the op."""
        if id(kernel) not in self._draws:
            began, given = time.process_time(), self.budget
            draws: list[Draw] = []
            op, setting = self.primitive, self.setting
            compiled, small = setting.device.type == "cuda", None if setting.device.type == "cuda" else _SMALL
            try:
                drawn = (
                    fuzz.variants(op, 2 * _TEMPLATES, DRAWS // _TEMPLATES, _DRAWN_BY, small)
                    if compiled or self.backend == "hip"
                    else fuzz.cases(op, 8 * DRAWS, _DRAWN_BY, small)
                )
                for number, (case, dtype) in enumerate(drawn):
                    if time.process_time() - began > given or len(draws) == DRAWS:
                        break
                    if dtype not in self.dtypes:
                        continue
                    args = arguments(case, op, dtype, _DRAWN_BY + number, setting.device)
                    if refusals(line, View.of(op, args.values, setting.profile), setting.profile, absent=True):
                        continue
                    try:
                        outputs, lines = self._traced(kernel, args, _MOST_LINES)
                    except sources.TooLong:
                        continue
                    if outputs is not None:
                        draws.append(Draw(f"draw {number} {dtype_name(dtype)}", args, outputs, lines))
            except UnknownName:
                pass  # an op of another package, which fuzzing has no data about: only its own cases are known
            self._draws[id(kernel)] = draws
            self._spent(began)
        return self._draws[id(kernel)]

    def warm(
        self, kernel: Callable[..., Any], line: Implementation, first: int | None, budget: float = math.inf
    ) -> None:
        """What several mutants of one kernel need: the first cells' results, or (None) every one's, and the draws, as
        far as ``budget`` process seconds go, half of them for either."""
        self.budget = budget / 2
        for case, dtype in self.order()[:first]:
            if self.budget <= 0:
                break
            self.right(kernel, case, dtype)
            if first is not None:
                self.prepared(case, dtype).reference(frozenset(line.roundings))
        if first is None:
            self.budget = max(self.budget, 0.0) + budget / 2
            self.draws(kernel, line)


def _elements(case: Case) -> int:
    return sum(math.prod(a.shape) for a in case.args.values() if isinstance(a, TensorSpec))


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
    """`_evaluate`, for a mutant that may also take its arguments' memory away."""
    try:
        return _evaluate(mutant, right, cells, setting, every_run_judged, first)
    except ArgumentLost as error:
        return not_run(mutant, str(error))


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
    few = record.draws < DRAWS and cells.budget <= 0
    if not differs and (untried or few):
        why = f"bitwise equal in {record.runs} runs and {record.draws} draws, {untried} cells not tried"
        undecided = not_run(mutant, f"undecided when its time was up: {why}", record.runs)
        return undecided.model_copy(update={"undecided": True})
    if not reached and not differs:
        return not_run(
            mutant, record.reason or "nothing here reaches it: another device's path, or no case and no draw"
        )
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
        others=dict.fromkeys(baselines.NAMES, False),
        others_aligned=dict.fromkeys(baselines.NAMES, False),
    )


def not_run(mutant: Mutant, reason: str, runs: int = 0) -> Record:
    """Counted apart: it does not load, it raises, or nothing here reaches it."""
    return new_record(mutant).model_copy(update={"outcome": "not run", "reason": reason, "runs": runs})


def _first(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else "no message"


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
        for one, kernel in known[op]:
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


def judged_alone(
    mutant: Mutant, right: Callable[..., Any], cells: Cells, case: Case, dtype: torch.dtype
) -> Record | None:
    """The record of one cell: caught, missed there, or not run; None where the bits are the right kernel's."""
    prepared = cells.prepared(case, dtype)
    kernel = mutant.make()
    mine = call(cells.primitive, kernel, prepared.args, cells.setting, cells.target)
    if mine is not None and same_bits(mine, call(cells.primitive, right, prepared.args, cells.setting, cells.target)):
        return None
    record, seen = new_record(mutant), look(kernel, mutant.line, prepared, cells.setting)
    if seen.gates == (RAISED,):
        return not_run(mutant, str(seen.cell.reason), 1)
    _count(record, seen, prepared, aligned(prepared.primitive, case))
    return record
