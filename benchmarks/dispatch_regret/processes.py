"""The processes that judge, and the one that watches them: who dies costs the cell that was at work."""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dispatch_regret.drawing import Cell, cells
from dispatch_regret.judging import judge
from ferryman import settings
from ferryman.cli import calls
from ferryman.cli.place import place
from ferryman.dispatch import registry, select
from ferryman.errors import FerrymanError, ResultError
from ferryman.porting.bench import clock, grid, peers, rotation, runner
from ferryman.porting.running.process import device_lost, placed, quiet

SCRIPT = Path(__file__).parents[1] / "regret.py"  # what a judging process runs, too
KEPT_BYTES = 16 << 30  # of device memory between cells
PEERS = ["sdpa"]  # PyTorch's own choice stands beside ours
GRACE_SECONDS = 30.0  # for the cell that is at work when time is up, before its process is killed
# Lighter than the bench's 1024, 9 and 4 ms, for 300 cells in eight minutes.
MOST_SETS, SAMPLES, SAMPLE_SECONDS = 512, 5, 3e-3


def work(given: argparse.Namespace, start: int) -> None:
    """The judging process: one JSON line before each cell and one after; what kernels print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    plan, todo = plan_of(given)
    rotation.MOST_SETS, clock.SAMPLES, clock.SAMPLE_SECONDS = MOST_SETS, SAMPLES, SAMPLE_SECONDS
    with quiet():
        for index in range(start, len(todo)):
            print(json.dumps({"start": index}), file=out, flush=True)
            cell = todo[index]
            try:
                record = judge(plan, cell)
            except (RuntimeError, FerrymanError) as error:  # out of memory, or refused: a counted cell
                if device_lost(plan.device) is not None:
                    raise  # nothing more can be judged here: another process goes on after this cell
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                record = {"op": cell.op.name, "case": cell.case.name, "failed": why}
            if plan.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            print(json.dumps({"cell": record}), file=out, flush=True)
            if plan.device.type == "cuda" and torch.cuda.memory_reserved(plan.device) > KEPT_BYTES:
                return  # graphs keep memory that nothing frees: another process goes on


def plan_of(given: argparse.Namespace) -> tuple[runner.Plan, list[Cell]]:
    device = placed(place(given.device, "regret"))
    names = given.op or list(registry.primitives())
    ops = [registry.primitive(name) for name in names]
    two = ("torch", "definition") if device.type == "cpu" else ()
    own = () if device.type == "cpu" else tuple(peers.adapters(SCRIPT.parent / "peers", PEERS))
    plan = runner.Plan(device, select.profile_for(device), calls.dtype_of(given.dtype), (), two, own, given.seed)
    unlike = {pair for path in given.unlike or () for pair in _cells_of(path)}
    return plan, cells(ops, given.cells, grid.grid_of(given.grid), device, given.seed, unlike)


def _cells_of(path: Path) -> set[tuple[str, str]]:
    """(op, case) of every cell of a document that this script wrote. Raises ResultError."""
    try:
        return {(str(cell["op"]), str(cell["case"])) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResultError(f"--unlike {path}: required: a document of benchmarks/regret.py; {reason}") from error


def _ahead(given: argparse.Namespace, start: int, environment: dict[str, str], seconds: float) -> None:
    """Every kernel of the cells once, in several processes: what Triton compiles it keeps on disk."""
    command = [sys.executable, str(SCRIPT), *sys.argv[1:], "--worker", str(start), "--warm"]
    running = [
        subprocess.Popen(
            [*command, f"{k}/{given.ahead}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        for k in range(given.ahead)
    ]
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # what is missing is compiled when it is timed
            process.kill()
            process.wait()


def warm(given: argparse.Namespace, turn: int, turns: int) -> None:
    """Run each implementation of every ``turns``-th cell once."""
    plan, todo = plan_of(given)
    torch.cuda.set_per_process_memory_fraction(1 / turns)
    with quiet():
        for index in range(given.worker + turn, len(todo), turns):
            cell = todo[index]
            try:
                args = grid.inputs(cell.op, cell.case, plan.dtype, plan.seed, plan.device)
                for contender in runner.implementations(plan, cell.op, args):
                    if contender.skipped is None:
                        contender.call_of(rotation.spared(cell.op, args))()
            except RuntimeError:  # it has no room beside the others, or fails: its own turn tells
                torch.cuda.empty_cache()


def supervise(
    given: argparse.Namespace, todo: Sequence[Cell], before: Sequence[dict[str, Any]] = ()
) -> tuple[list[dict[str, Any]], int]:
    """Workers, one after another where one dies, until all is judged or time is up: (cells, how many were left)."""
    untuned = given.lockfile == settings.NO_LOCKFILE
    environment = {**os.environ, "FERRYMAN_LOCKFILE": "none" if untuned else str(given.lockfile.resolve())}
    environment.pop("FERRYMAN_BACKEND", None)
    end = time.monotonic() + given.seconds
    judged: list[dict[str, Any]] = list(before)
    if given.ahead > 0 and torch.cuda.is_available():
        _ahead(given, len(judged), environment, given.seconds / 2)
    while len(judged) < len(todo) and time.monotonic() < end:
        command = [sys.executable, str(SCRIPT), *sys.argv[1:], "--worker", str(len(judged))]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment)
            assert process.stdout is not None
            late = threading.Timer(max(0.0, end - time.monotonic()) + GRACE_SECONDS, process.kill)
            late.start()
            at = None
            for line in process.stdout:
                message = json.loads(line)
                at = message.get("start", at)
                if "cell" in message:
                    judged.append(message["cell"])
                    at = None
                    if time.monotonic() >= end:
                        process.kill()
                        break
            code = process.wait()
            late.cancel()
            complaints.seek(0)
            tail = complaints.read()[-300:].strip().replace("\n", " | ")
        if len(judged) < len(todo) and time.monotonic() < end:
            if at is None and code == 0:
                continue
            if at is None:
                raise SystemExit(f"the judging process ended with code {code} outside any cell: {tail}")
            lost = todo[at]
            why = f"its process ended with code {code}: {tail}"
            judged.append({"op": lost.op.name, "case": lost.case.name, "failed": why})
    return judged, len(todo) - len(judged)
