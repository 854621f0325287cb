"""Every implementation that serves drawn cases here, under the gates of the parity check: `ferryman fuzz`.

Worker processes run the cells, so that a kernel that crashes costs its case. The document counts them by op and
implementation, and says of each failure how it is repeated alone.
"""

from __future__ import annotations

import importlib.util
import math
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from ferryman.backends.precision import float32_precision
from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, UnknownName
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import SEED
from ferryman.porting.judging.results import Cell, Environment, Name, Verdict, environment
from ferryman.porting.running.cells import ALL, dtypes_of
from ferryman.porting.running.drawn import is_wrong
from ferryman.porting.running.process import placed, quiet
from ferryman.porting.running.runner import Progress, absent, default_jobs, interpreters
from ferryman.porting.running.workers import Job, Workers

SCHEMA_VERSION = 1
CASES, ACCELERATOR_CASES = 300, 60  # a CPU: about a minute for attention; an accelerator compiles for most cases
_MOST_LOST = 5
_RAN = ("PASS", "SIMULATED")


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Row(_Model):
    """One implementation of one op."""

    op: Name
    implementation: Name
    cases: int = Field(description="that were drawn for it")
    right: int = Field(description="cases that every gate let pass")
    refused: int = Field(description="cases that one of its conditions refuses")
    not_run: int = Field(description="cases that it could not run here, such as for want of memory")
    failed: int


class Failure(_Model):
    """One implementation that is wrong on one case."""

    op: Name
    implementation: Name
    dtype: Name
    number: int | None = Field(description="of the case; None: no case can be blamed")
    verdict: Verdict
    reason: str
    case: str = Field(description="as Python that makes it again")
    command: str = Field(description="that repeats it alone")


class NotRun(_Model):
    """What did not run, by its reason."""

    op: Name | None
    implementation: Name | None
    cases: int | None = Field(description="None: all of them")
    reason: str


class Fuzzed(_Model):
    """The document of `ferryman fuzz`."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-fuzz"] = "ferryman-fuzz"
    environment: Environment
    seed: int
    rows: list[Row]
    failures: list[Failure]
    not_run: list[NotRun]

    @property
    def ran(self) -> int:
        """How many cells a kernel's results were judged in."""
        return sum(row.right + row.failed for row in self.rows)


def run(
    ops: Iterable[str] | None = None,
    implementations: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    cases: int | None = None,
    number: int | None = None,
    seed: int = SEED,
    progress: Progress | None = None,
) -> Fuzzed:
    """Draw ``cases`` cases of each op, and judge every requested implementation on them.

    ops, implementations, dtypes: names; None is all. An op that nothing can be drawn for is left out where it was not
    named. number: the case of this number alone. progress(done, total, label) is called after each cell. Raises
    UnknownName, and ArgumentError for a count below 1, a number below 0, and a named op that nothing can be drawn for.
    """
    began = time.perf_counter()
    profile, place = detect(device), placed(device)
    if cases is None:
        cases = CASES if place.type == "cpu" else ACCELERATOR_CASES
    _require(cases, number, dtypes)
    chosen = None if dtypes is None else dtypes_of(dtypes)
    primitives, not_run = primitives_of(ops)
    served, interpreted = _lines(primitives, implementations, profile, not_run)
    numbers = {op.name: fuzz.numbers(op, cases, seed, chosen) if number is None else [number] for op in primitives}
    total = sum(len(numbers[op]) * len(names) for lines in (served, interpreted) for op, names in lines.items())
    cells: list[Cell] = []
    jobs = [
        *_jobs(interpreted, numbers, seed, "cpu", interpreters(), interpret=True),
        *_jobs(served, numbers, seed, str(place), default_jobs(place)),
    ]
    with quiet(), Workers(jobs, op_limit=math.inf) as workers:
        for cell in workers.remaining():
            cells.append(cell)
            if progress is not None:
                progress(len(cells), total, f"{cell.op} {cell.implementation}")
    facts = environment(place, profile, seed, "drawn", round(time.perf_counter() - began, 3))
    rows = [
        _row(op.name, line.name, numbers[op.name], cells)
        for op in primitives
        for line in registry.implementations(op.name)
        if line.name in (*served.get(op.name, ()), *interpreted.get(op.name, ()))
    ]
    failures = sorted((_failure(cell, seed) for cell in cells if is_wrong(cell)), key=_place(rows))
    return Fuzzed(
        environment=facts, seed=seed, rows=rows, failures=failures, not_run=[*not_run, *_reasons(rows, cells)]
    )


def _require(cases: int, number: int | None, dtypes: object) -> None:
    if cases < 1:
        raise ArgumentError("fuzz", "--cases", cases, "1 or more")
    if number is not None and number < 0:
        raise ArgumentError("fuzz", "--case", number, "0 or more")
    if number is not None and dtypes:
        raise ArgumentError("fuzz", "--dtype", "given", "no --case beside it: the number says the dtype")


def primitives_of(names: Iterable[str] | None) -> tuple[list[Primitive], list[NotRun]]:
    """The ops, and why others are left out."""
    everything = list(registry.primitives()) if names is None else list(dict.fromkeys(names))
    primitives, left_out = [], []
    for name in everything:
        op = registry.primitive(name)
        reason = fuzz.undrawable(op)
        if reason is None:
            primitives.append(op)
        elif names is not None:
            raise ArgumentError("fuzz", "--op", name, f"an op that cases can be drawn for; {reason}")
        else:
            left_out.append(NotRun(op=name, implementation=None, cases=None, reason=reason))
    return primitives, left_out


def _lines(
    primitives: Sequence[Primitive], names: Iterable[str] | None, profile: Profile, not_run: list[NotRun]
) -> tuple[dict[str, list[str]], dict[str, list[str]]]:
    """Implementations by op: those that run here, and those that an interpreter's process runs. What cannot run here
    goes to ``not_run``."""
    wanted = None if names is None else tuple(names)
    for name in wanted or ():
        registry.check_requested(name)
        if not any(registry.asked(op.name, (name,)) for op in primitives):
            known = {line.name for op in primitives for line in registry.implementations(op.name)}
            raise UnknownName(f"implementation of {', '.join(op.name for op in primitives)}", name, known)
    triton = profile.vendor == "cpu" and importlib.util.find_spec("triton") is not None
    served: dict[str, list[str]] = {}
    interpreted: dict[str, list[str]] = {}
    for op in primitives:
        for line in registry.asked(op.name, wanted):
            reasons = [] if triton and line.backend == "triton" else absent(line, profile)
            if reasons:
                reason = "; ".join(reasons)
                not_run.append(NotRun(op=op.name, implementation=line.name, cases=None, reason=reason))
            else:
                lines = interpreted if triton and line.backend == "triton" else served
                lines.setdefault(op.name, []).append(line.name)
    return served, interpreted


def _jobs(
    lines: dict[str, list[str]],
    numbers: dict[str, list[int]],
    seed: int,
    device: str,
    count: int,
    interpret: bool = False,
) -> list[Job]:
    """The work of ``count`` processes: each has every so manieth case of each op."""
    jobs = []
    for k in range(count):
        share = {op: numbers[op][k::count] for op in lines if numbers[op][k::count]}
        jobs.append(
            Job(
                {op: lines[op] for op in share},
                sorted({dtype_name(d) for op in share for d in registry.evidence(registry.primitive(op)).dtypes}),
                "small",
                seed,
                device,
                tf32=float32_precision() == "tf32",
                drawn=share,
                most_lost=_MOST_LOST,
                interpret=interpret,
            )
        )
    return jobs


def _row(op: str, implementation: str, numbers: Sequence[int], cells: Sequence[Cell]) -> Row:
    mine = [c for c in cells if (c.op, c.implementation) == (op, implementation)]
    failed = sum(map(is_wrong, mine))
    right, refused = sum(c.verdict in _RAN for c in mine), sum(c.verdict == "UNIMPLEMENTED" for c in mine)
    return Row(
        op=op,
        implementation=implementation,
        cases=len(numbers),
        right=right,
        refused=refused,
        not_run=len(numbers) - right - refused - failed,
        failed=failed,
    )


def _failure(cell: Cell, seed: int) -> Failure:
    number = None if cell.case == ALL else int(cell.case.rpartition("_")[2])
    command = f"ferryman fuzz --op {cell.op} --implementation {cell.implementation} --seed {seed}"
    text = ""
    if number is not None:
        command += f" --case {number} --device {cell.device}"
        text = python(registry.primitive(cell.op), number, seed)
    return Failure(
        op=cell.op,
        implementation=cell.implementation,
        dtype=cell.dtype,
        number=number,
        verdict=cell.verdict,
        reason=cell.reason or "no reason given",
        case=text,
        command=command,
    )


def python(op: Primitive, number: int, seed: int) -> str:
    """A case as Python that makes it again; nothing where its domain raises."""
    try:
        return fuzz.described(*fuzz.numbered(op, number, seed))
    except Exception:  # noqa: BLE001 - another package's domain may be wrong itself, which the cell's reason says
        return ""


def _place(rows: Sequence[Row]) -> Callable[[Failure], tuple[int, int]]:
    order = {(row.op, row.implementation): i for i, row in enumerate(rows)}
    return lambda f: (order[f.op, f.implementation], -1 if f.number is None else f.number)


def _reasons(rows: Sequence[Row], cells: Sequence[Cell]) -> list[NotRun]:
    """Why cases did not run, with how many. A cell for all cases stands for those that no other cell counts."""
    reasons = []
    for row in rows:
        mine = [c for c in cells if (c.op, c.implementation, c.verdict) == (row.op, row.implementation, "NOT_RUN")]
        counts = Counter(c.reason or "no reason given" for c in mine if c.case != ALL)
        rest = row.not_run - counts.total()
        why = next((c.reason for c in mine if c.case == ALL and c.reason), "its process ended before them")
        counts.update({why: rest} if rest > 0 else {})
        reasons += [
            NotRun(op=row.op, implementation=row.implementation, cases=n, reason=reason) for reason, n in counts.items()
        ]
    return reasons
