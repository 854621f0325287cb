"""Replay a capsule: its inputs through this machine's implementations, each judged against the oracle, and A's outputs
judged again by the same oracle."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch

from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.errors import UnknownName
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.capsule.cases import OtherBits, Rebuild, case_of, misfit
from ferryman.porting.capsule.container import digest
from ferryman.porting.capsule.contents import Capsule, InputRecord, RunRecord
from ferryman.porting.capsule.replay_judge import Judged, Shown, declared_of, explain, judge, side_a, wording
from ferryman.porting.capsule.replay_results import Explained, Replay, Side
from ferryman.porting.capsule.run import (
    ALL,
    Kernels,
    Run,
    absent,
    not_run,
    output_hash,
    run_line,
)
from ferryman.porting.judging.parity import Prepared, prepare
from ferryman.porting.judging.prepared import unprepared
from ferryman.porting.judging.results import Cell, Timing, Verdict, environment, results
from ferryman.porting.running import timing
from ferryman.porting.running.process import device_lost, placed, quiet
from ferryman.porting.running.runner import Progress

LARGE = "a standard size, whose float64 evaluation takes minutes on a CPU; --full replays it"


def replay(
    capsule: Capsule,
    device: torch.device | str | None = None,
    *,
    ops: Iterable[str] | None = None,
    backends: Iterable[str] | None = None,
    full: bool = False,
    progress: Progress | None = None,
    name: str | Path = "",
    kernels: Kernels | None = None,
) -> Replay:
    """Every case of a capsule on this machine. ops, backends: names; None is all. full: standard sizes on a CPU too.

    Raises CapsuleError for a case that asks for too much, before anything is allocated; UnknownName for a name that is
    not there.
    """
    began = time.perf_counter()
    profile = detect(device)
    place = placed(device)
    wanted = None if ops is None else {registry.primitive(op).name for op in ops}
    allowed = None if backends is None else set(backends)
    for backend in allowed or ():
        registry.check_requested(backend)
    with quiet():
        replayer = _Replayer(capsule, place, profile, full, dict(kernels or {}), allowed, wanted, progress)
        replayer.all()
    timings = timing.slowest(replayer.cells) if place.type == "cpu" else replayer.timings
    seconds = round(time.perf_counter() - began, 3)
    facts = environment(place, profile, capsule.seed, capsule.results.environment.tier, seconds)
    return Replay(
        capsule=capsule.sha256,
        name=Path(name).name,
        size=capsule.size,
        machine=capsule.manifest.machine,
        recorded=capsule.results,
        replayed=results(facts, replayer.cells, timings),
        explained=replayer.explained,
    )


class _Replayer:
    def __init__(
        self,
        capsule: Capsule,
        device: torch.device,
        profile: Profile,
        full: bool,
        kernels: Kernels,
        allowed: set[str] | None,
        wanted: set[str] | None,
        progress: Progress | None,
    ) -> None:
        self.capsule, self.device, self.profile, self.full = capsule, device, profile, full
        self.kernels, self.allowed, self.progress = kernels, allowed, progress
        manifest = capsule.manifest
        self.inputs = [
            (i, record)
            for i, record in enumerate(manifest.inputs)
            if wanted is None or manifest.cases[record.case].op in wanted
        ]
        self.runs = {(run.input, capsule.results.cells[run.cell].implementation): run for run in manifest.runs}
        # A's verdicts where there was nothing to store: refused, absent, out of memory
        self.recorded = {(c.op, c.implementation, c.dtype, c.case): c for c in capsule.results.cells}
        self.cells: list[Cell] = []
        self.timings: list[Timing] = []
        self.explained: list[Explained] = []
        self.misfits: dict[int, str | None] = {}
        self.gone: str | None = None

    def all(self) -> None:
        manifest = self.capsule.manifest
        for index in sorted({record.case for _, record in self.inputs}):
            self.misfits[index] = self._misfit(index)  # all of them before the first runs
        for done, (index, record) in enumerate(self.inputs):
            case = manifest.cases[record.case]
            self._input(index, record)
            if self.progress is not None:
                self.progress(done + 1, len(self.inputs), case.op)
        for name in dict.fromkeys(manifest.cases[record.case].op for _, record in self.inputs):
            if name in registry.primitives():
                primitive = registry.primitive(name)
                dtypes = [getattr(torch, d) for d in dict.fromkeys(r.dtype for _, r in self.inputs)]
                self.timings += timing.of_right_ones(
                    primitive,
                    self._lines(primitive),
                    dtypes,
                    self.device,
                    self.profile,
                    self.capsule.seed,
                    self.cells,
                    self.kernels,
                )

    def _misfit(self, index: int) -> str | None:
        record = self.capsule.manifest.cases[index]
        try:
            primitive = registry.primitive(record.op)
        except UnknownName as error:
            return str(error)
        if record.tier == "standard" and self.device.type == "cpu" and not self.full:
            return LARGE
        return misfit(primitive, case_of(record))

    def _lines(self, primitive: Primitive) -> list[Implementation]:
        return list(registry.asked(primitive.name, self.allowed))

    def _input(self, index: int, record: InputRecord) -> None:
        case = self.capsule.manifest.cases[record.case]
        dtype: torch.dtype = getattr(torch, record.dtype)
        why = self.misfits[record.case]
        if case.op not in registry.primitives():
            self._unjudged(index, record, [], "NOT_RUN", why or "")
            return
        primitive = registry.primitive(case.op)
        lines = self._lines(primitive)
        self.gone = self.gone or device_lost(self.device)
        why = why or self.gone
        if why is not None:
            self._unjudged(index, record, lines, "NOT_RUN", why)
            return
        given = Rebuild(primitive, case_of(case), dtype, self.capsule.seed, record, self.capsule.tensors)
        try:
            prepared = prepare(primitive, given.case, dtype, self.device, self.capsule.seed, given=given)
        except OtherBits as error:
            self._unjudged(index, record, lines, "MISTRUSTED", str(error))
            return
        except torch.OutOfMemoryError as error:
            self._unjudged(index, record, lines, "NOT_RUN", f"out of memory: {str(error).splitlines()[0][:300]}")
            return
        except Exception as error:  # noqa: BLE001 - a case from elsewhere may break a definition; the others are judged
            reason = unprepared(error)
            self._unjudged(index, record, lines, "MISTRUSTED", reason)
            return
        self._judged(index, prepared, lines)

    def _judged(self, index: int, prepared: Prepared, lines: Sequence[Implementation]) -> None:
        primitive, case, dtype = prepared.primitive, prepared.case, prepared.dtype
        here: dict[str, Side] = {}
        for line in lines:
            why = absent(line, self.profile)
            if why:
                cell = self._cell(primitive.name, line, dtype, case.name, "NOT_RUN", "; ".join(why))
                here[line.name] = Side(verdict="NOT_RUN", reason=cell.reason)
            else:
                run = run_line(prepared, line, self.profile, self.kernels.get((primitive.name, line.name)))
                cell = run.cell.model_copy(update={"capsule": self.capsule.sha256})
                here[line.name] = _side_b(prepared, Run(cell, run.outputs, run.tf32))
            self.cells.append(cell)
        self._explain(index, here, prepared)

    def _unjudged(
        self, index: int, record: InputRecord, lines: Sequence[Implementation], verdict: Verdict, why: str
    ) -> None:
        case = self.capsule.manifest.cases[record.case]
        for line in lines:
            self.cells.append(self._cell(case.op, line, getattr(torch, record.dtype), case.case, verdict, why))
        self._explain(index, {line.name: Side(verdict=verdict, reason=why) for line in lines}, None, verdict, why)

    def _cell(self, op: str, line: Implementation, dtype: torch.dtype, case: str, verdict: Verdict, why: str) -> Cell:
        return not_run(op, line.name, self.device, dtype, case, why, verdict, line=line, capsule=self.capsule.sha256)

    def _explain(
        self,
        index: int,
        here: dict[str, Side],
        prepared: Prepared | None,
        verdict: Verdict = "NOT_RUN",
        why: str = "no such implementation here",
    ) -> None:
        record = self.capsule.manifest.inputs[index]
        case = self.capsule.manifest.cases[record.case]
        there = [c.implementation for c in self.capsule.results.cells if (c.op, c.dtype) == (case.op, record.dtype)]
        for implementation in dict.fromkeys([*there, *here]):
            if self.allowed is not None and implementation not in self.allowed:
                continue
            run = self.runs.get((index, implementation))
            a, judgement = side_a(self.capsule, run, self._cell_of_a(run, case.op, implementation, record), prepared)
            b = here.get(implementation) or Side(verdict=verdict, reason=why)
            explanation, detail = explain(a, b, judgement.fault)
            elements = sum(_count(o.shape) for o in run.outputs) if run is not None else 0
            self.explained.append(
                Explained(
                    op=case.op,
                    implementation=implementation,
                    dtype=record.dtype,
                    case=case.case,
                    explanation=explanation,
                    detail=detail,
                    judged=judgement.judged,
                    elements=elements,
                    a=a,
                    b=b,
                )
            )

    def _cell_of_a(self, run: RunRecord | None, op: str, implementation: str, record: InputRecord) -> Cell | None:
        if run is not None:
            return self.capsule.results.cells[run.cell]
        name = self.capsule.manifest.cases[record.case].case
        exact = self.recorded.get((op, implementation, record.dtype, name))
        return exact or self.recorded.get((op, implementation, record.dtype, ALL))


def _count(shape: list[int]) -> int:
    return torch.Size(shape).numel()


def _side_b(prepared: Prepared, run: Run) -> Side:
    declared = declared_of(run.cell, run.tf32, prepared.dtype)
    side = Side(
        verdict=run.cell.verdict,
        ratio=run.cell.ratio,
        worst=run.cell.worst,
        declared=wording(declared),
        reason=run.cell.reason,
    )
    if not run.outputs or run.cell.verdict not in ("PASS", "SIMULATED"):
        return side
    shown = [Shown(n, o) for n, o in zip(prepared.primitive.outputs, run.outputs, strict=True)]
    same = declared == type(declared)()  # nothing is declared: the ratio is the plain one already
    judgement = Judged(plain=run.cell.ratio) if same else judge(prepared, shown, declared)
    return side.model_copy(update={"plain": judgement.plain, "hash": output_hash([digest(o) for o in run.outputs])})
