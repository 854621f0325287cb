"""Measures the candidates of each shape region and writes the fastest into a lockfile.

Every cell is written as soon as it is measured, so that a tuner that is stopped goes on where it was, and several may
work on one file. Candidates run in a worker process: one that crashes it twice, or says nothing for the time limit, is
recorded with the reason and left out, and the worker starts again. What a throttled device gave is not written.
On an accelerator several processes run every candidate once before, so that it is compiled when its turn comes.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import queue
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from ferryman.device_profiles import Profile
from ferryman.dispatch import cost, kernel_code, lockfile, lockfile_document, lockfile_entry, rank, registry, select
from ferryman.dispatch.lockfile_entry import LEAST_SECONDS, MOST_NOISE, MOST_SECONDS, Candidate, Entry
from ferryman.errors import FerrymanError
from ferryman.ops.primitive import Primitive
from ferryman.porting.bench import grid
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.printable import printable
from ferryman.porting.running.process import placed

COMMAND = [sys.executable, "-c", "from ferryman.porting.tune.worker import main; raise SystemExit(main())"]
SILENCE_SECONDS = 180.0  # attention's backward compiles for a minute on a busy host
END_SECONDS = 5.0  # for a process that has closed its output
START_SECONDS = 120.0  # for a process to import torch and a toolchain
AHEAD_PROCESSES = 8  # that compile before the measurement begins, on an accelerator
AHEAD_SECONDS = 60.0  # for all of them; what is not compiled then is compiled where it is measured
AHEAD_CELLS = 4  # fewer are not worth the start of a process
QUICK_BYTES = 4 * 2**30
QUICK_SECONDS = 170.0  # of --quick: with the command's own start three minutes
_TIME_IS_OVER = "left: the time was over"
DEATHS = 2  # of a worker at one candidate, before that is to blame: something else may have killed it
_MOST_ERROR = 900
Advance = Callable[[int, int, str], None]


@dataclass
class Outcome:
    """What became of one cell: "written", "kept" (it stood in the lockfile and holds), or why it was not written.

    left: nothing is wrong with it, the time was over.
    """

    op: str
    case: str
    result: str
    entry: Entry | None = None
    left: bool = False


@dataclass
class _Cell:
    op: Primitive
    case: str
    names: list[str]  # in order of preference, which settles a tie
    errors: dict[str, str] = field(default_factory=dict)
    deaths: dict[str | None, int] = field(default_factory=dict)  # candidate (None: outside) -> workers that ended
    bytes: float = 0.0


def tune(
    path: Path,
    ops: Sequence[str] | None = None,
    implementations: Sequence[str] | None = None,
    grid_name: str = "small",
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    again: bool = False,
    silence: float = SILENCE_SECONDS,
    advance: Advance = lambda *_: None,
    command: Sequence[str] | None = None,
    ahead: int | None = None,
    quick: float | None = None,
    only: Container[tuple[str, str]] | None = None,
) -> list[Outcome]:
    """Tune every op, or those named, on a grid. ``again`` measures what the lockfile holds already, too. ``ahead``: how
    many processes compile before; None: half of the cores, AHEAD_PROCESSES at most, on an accelerator. ``quick``: end
    after so many seconds, the largest cell of each op first, and choose what untuned dispatch takes unless something
    else is faster by more than the noise. Cells that one implementation alone can serve are left out then. ``only``:
    (op, case) pairs of the grid.

    Raises UnknownName for a name, LockfileError for a file that is damaged or another machine's.
    """
    end = None if quick is None else time.monotonic() + quick
    place, size = placed(device), grid.grid_of(grid_name)
    profile = select.profile_for(place)
    chosen = [registry.primitive(name) for name in dict.fromkeys(ops or registry.primitives())]
    known_implementations(implementations)
    lockfile_document.writable(path, profile)  # else it would be found after the work
    current = {} if again else _entries_of(path)
    cells, outcomes = [], []
    for op in chosen:
        names = candidates_of(op, profile, implementations)
        if quick is not None:  # what is to be compiled for each call before it is timed is no work of three minutes
            names = [name for name in names if registry.implementation(op.name, name).prepare is None]
        for case in grid.cases(op, size, place) if names else ():
            if only is not None and (op.name, case.name) not in only:
                continue
            args = grid.on_meta(op, case, dtype)
            region = lockfile.region(op, args)
            entry = current.get((op.name, region, f"{case.name} {dtype_name(dtype)}"))
            if entry is not None and set(names) <= {c.implementation for c in entry.candidates}:
                outcomes.append(Outcome(op.name, case.name, "kept", entry))
            elif quick is None:
                cells.append(_Cell(op, case.name, names))
            else:
                cells += _quick_cell(op, case.name, args, names, profile)
    if quick is not None:
        cells = _largest_of_each_op_first(cells)
    if not cells and not outcomes:
        wanted = "a case and a candidate" if quick is None else "a case that two candidates can serve"
        raise FerrymanError(f"nothing to tune: none of the ops has {wanted} on this device")
    job = {"grid": size, "device": str(place), "dtype": dtype_name(dtype), "seed": seed}
    total, waiting = len(cells), list(cells)
    preferred = {(cell.op.name, cell.case): cell.names for cell in cells}
    if ahead is None:
        ahead = min(AHEAD_PROCESSES, (os.cpu_count() or 1) // 2) if place.type == "cuda" else 0
    if ahead and total >= AHEAD_CELLS:
        advance(0, total, "compiling")
        _compile_ahead(job, cells, min(ahead, total), command or COMMAND, AHEAD_SECONDS if quick is None else quick / 4)
    while waiting and (end is None or time.monotonic() < end):
        advance(total - len(waiting), total, f"{waiting[0].op.name} {waiting[0].case}")
        done = _session(
            job,
            waiting,
            silence,
            command or COMMAND,
            lambda report: outcomes.append(_written(path, profile, report, preferred[report["op"], report["case"]])),
            end,
        )
        waiting = waiting[done:]
    outcomes += [Outcome(cell.op.name, cell.case, _TIME_IS_OVER, left=True) for cell in waiting]
    advance(total, total, "")
    return outcomes


def _quick_cell(op: Primitive, case: str, args: Sequence[Any], names: list[str], profile: Profile) -> list[_Cell]:
    """The cell with untuned dispatch's choice as the one that a tie goes to; none where there is nothing to choose."""
    ranked = rank.rank(op, args, profile, names)
    if len({one.implementation for one in ranked}) < 2:
        return []
    untuned = ranked[0].implementation
    ordered = [untuned, *(name for name in names if name != untuned)]
    return [_Cell(op, case, ordered, bytes=cost.work_of(op, args).bytes)]


def _largest_of_each_op_first(cells: list[_Cell]) -> list[_Cell]:
    """Every op's largest cell, then every op's second: whenever the time is over, all ops have had their share. Cells
    of more than QUICK_BYTES come last: drawing their inputs takes as long as measuring many others."""
    ordered: list[_Cell] = []
    for large in (False, True):
        by_op: dict[str, list[_Cell]] = {}
        for cell in sorted(cells, key=lambda c: -c.bytes):
            if (cell.bytes > QUICK_BYTES) is large:
                by_op.setdefault(cell.op.name, []).append(cell)
        turns = itertools.zip_longest(*by_op.values())
        ordered += [cell for turn in turns for cell in turn if cell is not None]
    return ordered


def known_implementations(names: Sequence[str] | None) -> None:
    """Raises UnknownName for one that no op has."""
    for name in names or ():
        registry.check_requested(name)


def _entries_of(path: Path) -> dict[tuple[str, str, str], Entry]:
    """What the lockfile has that still holds, by op, region, and case with dtype."""
    if not path.exists():
        return {}
    current, _ = lockfile_document.holding(lockfile_document.load(path))
    return {(op, region, e.case): e for op, entries in current.items() for region, e in entries.items()}


def candidates_of(op: Primitive, profile: Profile, wanted: Sequence[str] | None) -> list[str]:
    """Implementations that could serve this device, those that the profile prefers first."""
    backends = registry.backends()
    menu = [
        line.name
        for line in registry.asked(op.name, wanted)
        if profile.vendor in backends[line.backend].vendors
        and not registry.probe(line.backend, profile.vendor)
        and (wanted or line.backend != "definition")
    ]
    preferred = [name for name in select.preferred(op, profile) if name in menu]
    return [*preferred, *(name for name in menu if name not in preferred)]


def _compile_ahead(
    job: dict[str, Any], cells: list[_Cell], processes: int, command: Sequence[str], seconds: float
) -> None:
    """Run every candidate once, in several processes at once, which leaves its kernels in the toolchains' caches.

    What fails, crashes or hangs here says nothing: the process that measures meets it again, and records it.
    """
    running = []
    for share in (cells[start::processes] for start in range(processes)):
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env=_environment(),
        )
        running.append(process)
        assert process.stdin is not None
        try:
            asked = [[c.op.name, c.case, c.names, c.errors] for c in share]
            process.stdin.write(json.dumps({**job, "ahead": True, "cells": asked}) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            continue
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.0, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        with contextlib.suppress(BrokenPipeError):
            assert process.stdin is not None
            process.stdin.close()


def _session(
    job: dict[str, Any],
    cells: list[_Cell],
    silence: float,
    command: Sequence[str],
    write: Callable[[dict[str, Any]], None],
    end: float | None = None,
) -> int:
    """One worker's life, until ``end`` at most. Returns how many cells it finished; what ended it before is noted in
    the cell that it was at."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as complaints:
        process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=complaints,
            encoding="utf-8",
            errors="replace",
            env=_environment(),
        )
        assert process.stdin is not None and process.stdout is not None
        lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
        finished, at, why, hung, heard = 0, None, None, False, False
        try:
            asked = [[c.op.name, c.case, c.names, c.errors] for c in cells]
            with contextlib.suppress(BrokenPipeError):  # it died at start: its end and its complaints say why
                process.stdin.write(json.dumps({**job, "cells": asked}) + "\n")
                process.stdin.flush()  # it stays open: a worker whose tuner is gone ends with it
            while True:
                try:
                    patience = silence if heard else max(silence, START_SECONDS)
                    text = lines.get(timeout=patience if end is None else min(patience, _left(end)))
                except queue.Empty:
                    if end is not None and not _left(end):
                        why = _TIME_IS_OVER
                        return finished
                    why, hung = f"nothing within {silence:.0f} s (time limit)", True
                    break
                heard = True
                if text is None:
                    break
                try:
                    message = printable(json.loads(text))
                except ValueError:  # its end cut the line short
                    break
                if "start" in message:
                    at = message["start"]
                elif "cell" in message:
                    write(message["cell"])
                    finished, at = finished + 1, None
        finally:
            if why is None and finished < len(cells):  # it ended by itself: with its own code
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_SECONDS)
            process.kill()
            code = process.wait()
            with contextlib.suppress(BrokenPipeError):
                process.stdin.close()
        if finished >= len(cells):
            return finished
        complaints.seek(0)
        tail = printable(complaints.read()[-400:].strip().replace("\n", " | "))
        why = why or f"its process ended with code {code}: {tail or 'it said nothing'}"
    cell = cells[finished]
    cell.deaths[at] = cell.deaths.get(at, 0) + 1
    if not hung and cell.deaths[at] < DEATHS:
        return finished
    # outside any candidate (the inputs, the definition), or at one that was to be left out: nothing can be measured
    if at is None or at in cell.errors:
        write({"op": cell.op.name, "case": cell.case, "lost": why})
        return finished + 1
    cell.errors[at] = why[:_MOST_ERROR]
    if hung:  # a time limit for every case of the op would take hours
        for other in cells[finished + 1 :]:
            if other.op.name == cell.op.name:
                other.errors[at] = f"left out: on {cell.case} it gave {why}"[:_MOST_ERROR]
    return finished


def _left(end: float) -> float:
    return max(0.0, end - time.monotonic())


def _environment() -> dict[str, str]:
    source = str(Path(__file__).resolve().parents[3])
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
    # a worker obeys no request, of the environment or of a project, and imports nothing from where the tuner runs
    return {**os.environ, "PYTHONPATH": path, "FERRYMAN_BACKEND": "", "PYTHONSAFEPATH": "1"}


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def _written(path: Path, profile: Profile, report: dict[str, Any], names: Sequence[str]) -> Outcome:
    """Choose among the candidates of a cell, ``names`` in order of preference, and write the choice."""
    op, case = report["op"], report["case"]
    if "lost" in report:
        return Outcome(op, case, f"not measured: {report['lost']}")
    if report["untrusted"]:
        return Outcome(op, case, f"not written: {'; '.join(report['untrusted'])}")
    noise = report["noise"] or 0.0
    if noise > MOST_NOISE:
        return Outcome(op, case, f"not written: the noise is {noise:.0%}; required: at most {MOST_NOISE:.0%}")
    measured = {name: statistics.median(values) for name, values in report["trials"].items() if values}
    for name in [n for n, s in measured.items() if not LEAST_SECONDS <= s <= MOST_SECONDS]:
        why = f"its time is {measured.pop(name):.3g} s; required: {LEAST_SECONDS:g} to {MOST_SECONDS:g}"
        report["errors"][name] = why
    # by preference, which settles a tie; an implementation's own plan before its other configurations
    times = {n: measured[n] for n in sorted(measured, key=lambda n: (names.index(n.partition(" ")[0]), " " in n))}
    if not times:
        return Outcome(
            op, case, f"no candidate ran and was right: {'; '.join(f'{n}: {e}' for n, e in report['errors'].items())}"
        )
    winner = lockfile_entry.best(times, noise)
    candidates = [Candidate(**_named(n), seconds=s) for n, s in times.items()]
    candidates += [Candidate(**_named(n), error=e[:_MOST_ERROR]) for n, e in report["errors"].items()]
    entry = Entry(
        **_named(winner),
        seconds=times[winner],
        noise=report["noise"],
        kernels=kernel_code.digest(op),
        bytes=report["bytes"],
        flops=report["flops"],
        case=f"{case} {report['dtype']}",
        time=lockfile_document.now(),
        candidates=candidates,
    )
    written = lockfile_document.record(path, profile, {op: {report["key"]: entry}})
    return Outcome(op, case, "written", written[op][report["key"]])


def _named(candidate: str) -> dict[str, Any]:
    """A worker's name of a candidate, as the lockfile has it."""
    implementation, _, configuration = candidate.partition(" ")
    return {"implementation": implementation, "configuration": {"name": configuration} if configuration else {}}
