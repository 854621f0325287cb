"""The processes that judge, and the one that watches them: who dies costs the cell that was at work."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import gc
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from dispatch_regret.drawing import Cell, cells
from dispatch_regret.judging import IN_TIME, NOT_PREPARED, judge
from ferryman import files, settings
from ferryman.cli import calls
from ferryman.cli.place import place
from ferryman.dispatch import registry, select
from ferryman.errors import FerrymanError, ResultError
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import ahead, clock, grid, peers, rotation, runner
from ferryman.porting.bench.laps import Laps
from ferryman.porting.running.process import bound, device_lost, placed, quiet

SCRIPT = Path(__file__).parents[1] / "regret.py"  # what a judging process runs, too
KEPT_SHARE = 0.4  # of a device's memory, that graphs may keep between cells
PEERS = ["sdpa"]  # PyTorch's own choice stands beside ours
ORDER = "order.json"  # of cells, in the folder that the processes of a run share
TOLD_EVERY = 20.0  # seconds, while kernels are compiled ahead
GRACE_SECONDS = 30.0  # for the cell that is at work when time is up, before its process is killed
# Lighter than the bench's 1024, 9 and 4 ms, for 300 cells in eight minutes.
MOST_SETS, SAMPLES, SAMPLE_SECONDS = 512, 5, 3e-3


def work(given: argparse.Namespace, folder: Path) -> None:
    """The judging process: one JSON line before each cell and one after; what kernels print goes to stderr.

    folder: where `supervise` says which cells, in which order, and of which everything was prepared.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    plan, todo = plan_of(given)
    asked = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    left = math.inf if asked["prepare_seconds"] is None else float(asked["prepare_seconds"])
    rotation.MOST_SETS, clock.SAMPLES, clock.SAMPLE_SECONDS = MOST_SETS, SAMPLES, SAMPLE_SECONDS
    total = torch.cuda.get_device_properties(plan.device).total_memory if plan.device.type == "cuda" else 0
    with quiet():
        for index in asked["order"]:
            print(json.dumps({"start": index}), file=out, flush=True)
            cell, laps = todo[index], Laps()
            compiled = index in asked["prepared"]
            prepares = dataclasses.replace(plan, prepares=compiled or left > 0)
            try:
                record = judge(prepares, cell, laps, asked["unprepared"].get(str(index), IN_TIME))
            except (RuntimeError, FerrymanError) as error:  # out of memory, or refused: a counted cell
                if device_lost(plan.device) is not None:
                    raise  # nothing more can be judged here: another process goes on after this cell
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                record = {"op": cell.op.name, "case": cell.case.name, "failed": why}
            laps.end("other")
            if plan.device.type == "cuda":
                gc.collect()
                gc.freeze()  # what compilers keep is not looked through again: 0.5 s a cell
                torch.cuda.empty_cache()
            laps.end("emptying")
            if not compiled:
                left -= laps.seconds.get("preparing", 0.0)
            print(json.dumps({"cell": record | {"parts": laps.seconds}}), file=out, flush=True)
            if plan.device.type == "cuda" and torch.cuda.memory_reserved(plan.device) > KEPT_SHARE * total:
                return  # graphs keep memory that nothing frees: another process goes on


def plan_of(given: argparse.Namespace) -> tuple[runner.Plan, list[Cell]]:
    device = placed(place(given.device, "regret"))
    names = given.op or list(registry.primitives())
    ops = [registry.primitive(name) for name in names]
    two = ("torch", "definition") if device.type == "cpu" else ()
    own = () if device.type == "cpu" else tuple(peers.adapters(SCRIPT.parent / "peers", PEERS))
    plan = runner.Plan(device, select.profile_for(device), calls.dtype_of(given.dtype), (), two, own, given.seed)
    if given.again is not None:
        return plan, _again(given.again, ops)
    unlike = {pair for path in given.unlike or () for pair in _cells_of(path)}
    return plan, cells(ops, given.cells, grid.grid_of(given.grid), device, given.seed, unlike)


def _cells_of(path: Path, option: str = "--unlike") -> list[tuple[str, str]]:
    """(op, case) of every cell of a document that this script wrote. Raises ResultError."""
    try:
        return [(str(cell["op"]), str(cell["case"])) for cell in files.document(path)["cells"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResultError(f"{option} {path}: required: a document of benchmarks/regret.py; {reason}") from error


def _again(path: Path, ops: Sequence[Primitive]) -> list[Cell]:
    """The cells of a document that are of these ops. Raises ResultError where there is none, or no case of its name."""
    known, judged = {op.name: op for op in ops}, []
    for name, case in _cells_of(path, "--again"):
        if name not in known:
            continue
        named = registry.evidence(known[name]).named
        try:
            judged.append(Cell(known[name], named(case) if named is not None else _unnamed(name)))
        except ValueError as error:
            raise ResultError(f"--again {path}: {name} {case!r}: {error}") from error
    if not judged:
        raise ResultError(f"--again {path}: required: a cell of {', '.join(known)}")
    return judged


def _unnamed(op: str) -> Case:
    raise ValueError(f"{op} has no cases by name (Evidence.named)")


def _environment(given: argparse.Namespace) -> dict[str, str]:
    """Of the processes: the lockfile that is judged, one place for what Triton compiles (Inductor moves it in a process
    where none is named), and no pools of compilers."""
    untuned = given.lockfile == settings.NO_LOCKFILE
    environment = {
        "TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **os.environ,
        "FERRYMAN_LOCKFILE": "none" if untuned else str(given.lockfile.resolve()),
    }
    environment.pop("FERRYMAN_BACKEND", None)
    return environment


def _ahead(
    given: argparse.Namespace, folder: Path, environment: Mapping[str, str], left: Sequence[int]
) -> list[ahead.Done]:
    """Compile what the cells that are left need, in several processes, until all is done or time is up."""
    (folder / ORDER).write_text(json.dumps({"order": list(left)}), encoding="utf-8")
    start = time.monotonic()
    end = start + (given.seconds / 2 if given.ahead_seconds is None else min(given.ahead_seconds, given.seconds))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for k in range(given.ahead):
            command = bound([sys.executable, str(SCRIPT), *sys.argv[1:], "--worker", str(folder), "--compile", str(k)])
            with (folder / f"{k}.err").open("w") as complaints:
                own = {**environment, "OMP_NUM_THREADS": "1"}
                running.append(subprocess.Popen(command, stdout=complaints, stderr=complaints, env=own))
        for process in running:
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, min(TOLD_EVERY, end - time.monotonic())))
                    continue
                _tell(ahead.described(ahead.done(folder), len(left), time.monotonic() - start))
    finally:  # what is missing is compiled when it is timed, or left out
        for process in running:
            process.kill()
            process.wait()
    said = ahead.done(folder)
    _tell(ahead.described(said, len(left), time.monotonic() - start))
    for k, process in enumerate(running):
        if process.returncode not in (0, -signal.SIGKILL):
            tail = (folder / f"{k}.err").read_text(encoding="utf-8", errors="replace")[-300:].strip()
            _tell(f"a process that compiles ended with code {process.returncode}: {tail.replace(chr(10), ' | ')}")
    return said


def compile_ahead(given: argparse.Namespace, folder: Path, number: int) -> None:
    """One of the processes that compile."""
    plan, todo = plan_of(given)
    order = json.loads((folder / ORDER).read_text(encoding="utf-8"))["order"]
    if plan.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1 / given.ahead)
    with quiet():
        ahead.compile_cells(folder, str(number), plan, [(i, todo[i].op, todo[i].case) for i in order])


def ordered(left: Sequence[int], said: Sequence[ahead.Done]) -> list[int]:
    """Cells whose kernels were tried first, those of them first for which everything was prepared that will be. What
    failed, mostly for want of room beside the others, does not come last for it: large cells are judged, too."""
    launched = {one.cell: one for one in said if one.part == "kernels"}
    tried = {one.cell for one in said if one.part == "prepared"}

    def missing(index: int) -> int:
        kernels = launched.get(index)
        return 2 if kernels is None else int(kernels.wants_preparing and index not in tried)

    return sorted(left, key=missing)


def _tell(text: str) -> None:
    sys.stderr.write(f"regret: {text}\n")
    sys.stderr.flush()


def line_of(cell: Mapping[str, Any]) -> str:
    """One line about a cell that was judged, and where its time went."""
    parts = {part: seconds for part, seconds in cell.get("parts", {}).items() if seconds >= 0.01}
    spent = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
    result = f"failed: {cell['failed'][:80]}" if "failed" in cell else f"{cell['choice']} +{cell['regret']:.1%}"
    return f"{cell['op']} {cell['case']}: {result}; {sum(parts.values()):.1f} s: {spent}"


def supervise(
    given: argparse.Namespace,
    todo: Sequence[Cell],
    before: Sequence[dict[str, Any]] = (),
    keep: Callable[[Sequence[dict[str, Any]]], None] = lambda judged: None,
) -> tuple[list[dict[str, Any]], int]:
    """Workers, one after another where one dies, until all is judged or time is up: (cells, how many were left).

    keep: called with all cells after each.
    """
    environment = _environment(given)
    start = time.monotonic()
    end = start + given.seconds
    judged: list[dict[str, Any]] = list(before)
    known = {(cell["op"], cell["case"]) for cell in before}
    left = [i for i, cell in enumerate(todo) if (cell.op.name, cell.case.name) not in known]

    def add(index: int, record: dict[str, Any]) -> None:
        judged.append(record)
        left.remove(index)
        keep(judged)
        _tell(f"{len(judged)} of {len(todo)}, {time.monotonic() - start:.0f} s: {line_of(record)}")

    with tempfile.TemporaryDirectory(prefix="ferryman-regret-") as name:
        folder, said = Path(name), list[ahead.Done]()
        prepare_seconds = given.prepare_seconds
        if left and given.ahead > 0 and place(given.device, "regret").startswith("cuda"):
            said = _ahead(given, folder, environment, left)
            left = ordered(left, said)
            prepare_seconds = prepare_seconds or 0.0
        prepared = sorted(ahead.ready(said, "prepared"))
        failed = (one for one in said if one.part == "prepared" and one.failed is not None)
        unprepared = {one.cell: f"{NOT_PREPARED}: {one.failed}" for one in failed}
        while left and time.monotonic() < end:
            asked = {"order": left, "prepared": prepared, "unprepared": unprepared, "prepare_seconds": prepare_seconds}
            (folder / ORDER).write_text(json.dumps(asked), encoding="utf-8")
            at, why = _worked(given, folder, environment, end, add)
            if left and time.monotonic() < end:
                if at is not None:
                    lost = todo[at]
                    add(at, {"op": lost.op.name, "case": lost.case.name, "failed": why})
                elif why:
                    raise SystemExit(f"{why} outside any cell")
    return judged, len(left)


def _worked(
    given: argparse.Namespace,
    folder: Path,
    environment: Mapping[str, str],
    end: float,
    add: Callable[[int, dict[str, Any]], None],
) -> tuple[int | None, str]:
    """One judging process, to its end or ``end``: (the cell that it was at, why it ended)."""
    command = bound([sys.executable, str(SCRIPT), *sys.argv[1:], "--worker", str(folder)])
    at: int | None = None
    with tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment)
        assert process.stdout is not None
        late = threading.Timer(max(0.0, end - time.monotonic()) + GRACE_SECONDS, process.kill)
        late.start()
        try:
            for line in process.stdout:
                message = json.loads(line)
                at = message.get("start", at)
                if "cell" in message and at is not None:
                    add(at, message["cell"])
                    at = None
                    if time.monotonic() >= end:
                        break
            else:
                process.wait()
        finally:
            process.kill()
            code = process.wait()
            late.cancel()
        complaints.seek(0)
        tail = complaints.read()[-300:].strip().replace("\n", " | ")
    return at, f"its process ended with code {code}: {tail}" if code else ""
