"""Mutants and right alternatives of one process, run after another."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ferryman.dispatch import registry
from ferryman.dispatch.select import target_of
from ferryman.ops.primitive import STORAGE_DTYPES, Case
from ferryman.porting.cases import cases_of
from ferryman.porting.fills import dtype_name
from ferryman.porting.parity import Prepared, prepare
from ferryman.porting.selftest import baselines
from ferryman.porting.selftest.alternatives import alternatives
from ferryman.porting.selftest.judging import Seen, Setting, aligned, call, look, same_bits
from ferryman.porting.selftest.planting import Mutant
from ferryman.porting.selftest.report import Alarm, Record, Tally

# Cells that every rule sees of an edit of the source, whose runs are dear; of a Python mutant, all.
PANEL, COMPILED_PANEL = 8, 3
MULTIPLIES_TILES = ("linear", "attention")  # Triton's interpreter multiplies bfloat16 tiles as raw integers
_UNREACHED = "no case reaches the edit"


class Cells:
    """The cells of one op at one seed, each made ready once."""

    def __init__(self, op: str, setting: Setting, seed: int, backend: str) -> None:
        self.primitive, self.setting, self.seed, self.backend = registry.primitive(op), setting, seed, backend
        self.cases = cases_of(self.primitive)
        self._ready: dict[tuple[str, torch.dtype], Prepared] = {}

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """bfloat16 first, where most bugs show."""
        if self.backend == "triton" and self.setting.simulate and self.primitive.name.startswith(MULTIPLIES_TILES):
            return (torch.float16, torch.float32)
        return tuple(reversed(STORAGE_DTYPES))

    def prepared(self, case: Case, dtype: torch.dtype) -> Prepared:
        key = case.name, dtype
        if key not in self._ready:
            self._ready[key] = prepare(self.primitive, case, dtype, self.setting.device, self.seed)
        return self._ready[key]

    def order(self, first: Sequence[str]) -> list[tuple[Case, torch.dtype]]:
        """Every cell for a Python mutant. For an edit: ``first`` in every dtype, an aligned case in every dtype, then
        each case in one dtype, in turn."""
        dtypes = self.dtypes
        if self.backend == "torch":
            return [(case, dtype) for dtype in dtypes for case in self.cases]
        by_name = {case.name: case for case in self.cases}
        missing = [name for name in first if name not in by_name]
        if missing:
            raise ValueError(f"{self.primitive.name} has no case {', '.join(missing)}")
        usual = next((c for c in self.cases if aligned(self.primitive, c)), self.cases[0])
        chosen = dict.fromkeys((*first, usual.name))
        cells = [(by_name[name], dtype) for name in chosen for dtype in dtypes]
        rest = [case for case in self.cases if case.name not in chosen]
        return cells + [(case, dtypes[i % len(dtypes)]) for i, case in enumerate(rest)]


def evaluate(mutant: Mutant, cells: Cells, setting: Setting, every_run_judged: bool) -> Record:
    """Run a mutant on its cells until everything is known.

    The other rules see the same runs: the whole panel, and what the engine needs beyond it. Once the engine has caught
    the mutant, further runs are for them alone (unless every run is judged).
    """
    record = Record(
        key=mutant.key, op=mutant.op, name=mutant.name, kind=mutant.kind, note=mutant.note, backend=mutant.backend,
        others=dict.fromkeys(baselines.NAMES, False), others_aligned=dict.fromkeys(baselines.NAMES, False),
    )  # fmt: skip
    kernel, right, line = mutant.make(), mutant.right(), mutant.line(setting.device)
    target = target_of(setting.simulate or setting.profile)
    order = cells.order(mutant.first)
    edited_panel = COMPILED_PANEL if setting.device.type == "cuda" else PANEL
    panel = len(order) if mutant.backend == "torch" else edited_panel
    differs = False
    for number, (case, dtype) in enumerate(order):
        caught = record.outcome == "caught"
        if caught and number >= panel:
            break
        prepared = cells.prepared(case, dtype)
        usual = aligned(prepared.primitive, case)
        if caught and not every_run_judged:
            undecided = [r for r in baselines.NAMES if not (record.others_aligned if usual else record.others)[r]]
            if undecided:
                outputs = call(kernel, prepared, setting, target)
                for rule in undecided:
                    if outputs is None or not baselines.accepts(rule, outputs, prepared, frozenset(line.roundings)):
                        _reject(record, rule, usual)
                record.runs += 1
            continue
        seen = look(kernel, line, prepared, setting)
        if not seen.judged:
            record.reason = record.reason or f"{seen.cell.verdict}: {seen.cell.reason}"
            continue
        _count(record, seen, prepared, usual)
        if record.outcome == "missed" and not differs:
            differs = not same_bits(seen.outputs, call(right, prepared, setting, target))
    if record.runs == 0:
        record.outcome = "not run"
    elif record.outcome == "missed" and not differs:
        record.outcome = "equivalent"
        why = mutant.harmless or _UNREACHED
        record.reason = f"bitwise equal to the unmutated kernel in all {record.runs} runs: {why}"
    elif record.outcome == "missed":
        record.reason = "differs from the unmutated kernel, and no gate failed"
    return record


def _reject(record: Record, rule: str, usual: bool) -> None:
    record.others[rule] = True
    record.others_aligned[rule] |= usual


def _count(record: Record, seen: Seen, prepared: Prepared, usual: bool) -> None:
    record.runs += 1
    for rule in baselines.NAMES:
        if rule not in seen.accepted:
            _reject(record, rule, usual)
    if not seen.flagged:
        return
    record.flagged += 1
    record.gates = sorted({*record.gates, *seen.gates})
    if record.outcome != "caught":
        record.outcome, record.reason = "caught", seen.cell.reason
        record.case = f"{prepared.case.name} {dtype_name(prepared.dtype)}"


def each_mutant(mutants: Sequence[Mutant], setting: Setting, seed: int, every_run_judged: bool,
                starting: Callable[[Mutant], None] | None = None) -> Iterator[Record]:  # fmt: skip
    """Every mutant's record, op by op. On a GPU that is lost, the rest is not run."""
    grouped: dict[tuple[str, str], list[Mutant]] = {}
    for mutant in mutants:
        grouped.setdefault((mutant.op, mutant.backend), []).append(mutant)
    lost: str | None = None
    for (op, backend), group in grouped.items():
        cells = Cells(op, setting, seed, backend)
        for mutant in group:
            if lost is not None:
                yield not_run(mutant, lost)
                continue
            if starting is not None:
                starting(mutant)
            yield evaluate(mutant, cells, setting, every_run_judged)
            lost = _lost(setting.device, mutant.key)


def not_run(mutant: Mutant, reason: str) -> Record:
    return Record(key=mutant.key, op=mutant.op, name=mutant.name, kind=mutant.kind, note=mutant.note,
                  backend=mutant.backend, outcome="not run", reason=reason)  # fmt: skip


def _lost(device: torch.device, key: str) -> str | None:
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"{key} lost the device: {str(error).splitlines()[0][:200]}"
    return None


def right_cells(ops: Sequence[str], setting: Setting, seed: int, backend: str) -> Iterator[tuple[str, Prepared, int]]:
    """Endless: one cell of every op a round, the dtypes in turn, every case once before the seed moves on."""
    for number in itertools.count():
        for i, op in enumerate(ops):
            cells = Cells(op, setting, seed, backend)
            dtypes, count = cells.dtypes, len(cells.cases)
            step = next(s for s in range(max(1, count * 5 // 13), 2 * count + 2) if math.gcd(s, count) == 1)
            turn, dtype = divmod(number + i, len(dtypes))
            cells.seed = now = seed + turn // count
            yield op, cells.prepared(cells.cases[(turn * step + i) % count], dtypes[dtype]), now


def honest(ops: Sequence[str], count: int, setting: Setting, seed: int, backend: str,
           told: Callable[[Tally], None] | None = None) -> Tally:  # fmt: skip
    """At least ``count`` runs of right alternatives, every alternative of an op on each cell."""
    tally = Tally()
    known: dict[str, list[tuple[Any, Any, Any]]] = {op: [] for op in ops}
    for one in alternatives():
        if one.op in known and one.backend == backend:
            known[one.op].append((one, one.make(), one.line(setting.device)))
    served = [op for op in ops if known[op]]
    if count <= 0 or not served:
        return tally
    for op, prepared, now in right_cells(served, setting, seed, backend):
        for one, kernel, line in known[op]:
            seen = look(kernel, line, prepared, setting)
            if not seen.judged:
                continue
            dtype = dtype_name(prepared.dtype)
            alarm = None
            if seen.flagged:
                alarm = Alarm(alternative=one.key, op=op, case=prepared.case.name, dtype=dtype, seed=now,
                              reason=seen.cell.reason)  # fmt: skip
            tally.add(op, dtype, one.key, seen.accepted, alarm)
        if told is not None:
            told(tally)
        if tally.runs >= count:
            break
    return tally
