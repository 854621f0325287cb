"""Cells that are checked in other processes: interpreted Triton on a CPU, and the shares of an accelerator's cells.

A process either interprets Triton or compiles it, so the interpreter has one of its own. On an accelerator most of the
time goes into compilers, which several processes run at once; and an illegal access costs one process, not the run.

A worker reads one JSON job from stdin and writes one JSON object per line: {"start": [op, dtype, case, implementation]}
before each cell, {"cell": ...} after it. A worker that dies or falls silent costs the cell it was at, never the run.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO

import torch

from ferryman.dispatch import registry
from ferryman.porting.inputs.fills import DTYPES, dtype_name
from ferryman.porting.judging.results import Cell
from ferryman.porting.running.cells import Turn, not_run
from ferryman.porting.running.process import parentage

SILENCE_SECONDS = 120.0  # the slowest interpreted cell takes 4 s on one shared core
COMPILING_SECONDS = 400.0  # the same where kernels are compiled: attention backward, cold, beside seven others
OP_SECONDS = 600.0
SIMULATED = "h200"  # a CPU has no tiles of its own: the interpreter runs those that this device would
COMMAND = [sys.executable, "-c", "from ferryman.porting.running.worker import main; raise SystemExit(main())"]
_Key = tuple[str, str, str, str]  # op, dtype, case, implementation


@dataclass(frozen=True)
class Job:
    """What one worker checks. ``lines``: implementations by op. ``thin``: each case in one dtype, by the ``turn``.
    ``share``: (k, n), every n-th case and dtype from k."""

    lines: dict[str, list[str]]
    dtypes: list[str]
    tier: str
    seed: int
    device: str
    interpret: bool = False
    thin: bool = False
    turn: Turn | None = None
    share: tuple[int, int] = (0, 1)
    tf32: bool = False
    simulated: str | None = None  # the profile of the device that is simulated
    assume: dict[str, str] = field(default_factory=dict)  # the simulator's assumptions, by name
    stands_in_for: str | None = None  # the profile of the older device whose kernels ``device`` executes
    only: list[tuple[str, str, str]] | None = None  # (op, dtype, case); None is all of them
    drawn: dict[str, list[int]] | None = None  # by op, which cases fuzzing draws, in place of the op's own
    most_lost: int | None = None  # processes that one implementation of an op may end before it is left out

    @classmethod
    def interpreted(
        cls, ops: Sequence[str], dtypes: Sequence[torch.dtype], tier: str, seed: int, full: bool, turn: Turn | None
    ) -> Job:
        lines = {op: [x.name for x in registry.asked(op, ("triton",))] for op in ops}
        return cls(lines, [dtype_name(d) for d in dtypes], tier, seed, "cpu", interpret=True, thin=not full, turn=turn)


class Workers:
    """A process for each job, as a context: started at once, read while the caller works, stopped at the end."""

    def __init__(
        self,
        jobs: Sequence[Job],
        *,
        silence: float | None = None,
        op_limit: float = OP_SECONDS,
        command: Sequence[str] | None = None,
    ) -> None:
        self._cells: queue.SimpleQueue[Cell | BaseException | None] = queue.SimpleQueue()
        self._workers = [_Worker(job, self._cells, silence, op_limit, command) for job in jobs if job.lines]
        self._live = len(self._workers)

    def __enter__(self) -> Workers:
        for worker in self._workers:
            worker.thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.thread.join(timeout=30)

    def ready(self) -> Iterator[Cell]:
        """The cells that have arrived."""
        while not self._cells.empty():
            yield from self._next()

    def remaining(self) -> Iterator[Cell]:
        """All other cells, waiting for them."""
        while self._live:
            yield from self._next()

    def _next(self) -> Iterator[Cell]:
        got = self._cells.get()
        if isinstance(got, BaseException):
            raise got
        if got is None:
            self._live -= 1
        else:
            yield got


class _Worker:
    """The thread that keeps one job's process going, and starts another where it ends early."""

    def __init__(
        self,
        job: Job,
        cells: queue.SimpleQueue[Cell | BaseException | None],
        silence: float | None,
        op_limit: float,
        command: Sequence[str] | None,
    ) -> None:
        self._job, self._cells, self._op_limit = job, cells, op_limit
        self._silence = silence or (SILENCE_SECONDS if job.interpret else COMPILING_SECONDS)
        self._command = list(command or COMMAND)
        self._process: subprocess.Popen[str] | None = None
        self._lines = {op: list(names) for op, names in job.lines.items()}  # those that are not left out
        self._lost: Counter[tuple[str, str]] = Counter()
        self._stopping = False
        self.thread = threading.Thread(target=self._drive, name="ferryman-worker", daemon=True)

    def stop(self) -> None:
        self._stopping = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()

    def _drive(self) -> None:
        try:
            remaining, skip = list(self._job.lines), set[_Key]()
            while remaining and not self._stopping:
                remaining, finished = self._session(remaining, skip)
                skip |= finished
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._cells.put(error)
        finally:
            self._cells.put(None)

    def _environment(self) -> dict[str, str]:
        source = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
        env = {**os.environ, **parentage(), "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        routed = self._job.simulated or self._job.stands_in_for
        interprets = "1" if self._job.interpret else "0" if routed else None
        return env if interprets is None else {**env, "TRITON_INTERPRET": interprets}

    def _session(self, ops: list[str], skip: set[_Key]) -> tuple[list[str], set[_Key]]:
        """One process's life. Returns the ops still to finish, and the cells that must not run again."""
        with tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
            process = self._process = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=complaints,
                env=self._environment(),
                text=True,
            )
            if self._stopping:  # the caller left while the process was being made
                process.kill()
            lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            assert process.stdin is not None and process.stdout is not None
            threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
            try:
                job = {**asdict(self._job), "lines": self._lines, "ops": ops, "skip": sorted(skip)}
                process.stdin.write(json.dumps(job))
                process.stdin.close()
            except BrokenPipeError:
                pass  # it died at start: its silence is handled below, its complaints are kept
            at: _Key | None = None
            seen, why, overdue = set[_Key](), None, False
            spent_on, began = ops[0], time.monotonic()
            while True:
                try:
                    text = lines.get(timeout=self._silence)
                except queue.Empty:
                    why = f"no result within {self._silence:.0f} s (time limit)"
                    break
                if text is None:
                    break
                message = json.loads(text)
                if "start" in message:
                    at = tuple(message["start"])
                    if at[0] != spent_on:
                        spent_on, began = at[0], time.monotonic()
                elif "cell" in message:
                    cell = Cell.model_validate(message["cell"])
                    seen.add((cell.op, cell.dtype, cell.case, cell.implementation))
                    self._cells.put(cell)
                    at = None
                elif "done" in message:
                    ops = [op for op in ops if op != message["done"]]
                overdue = time.monotonic() - began > self._op_limit
                if overdue:
                    why = f"{spent_on} took more than {self._op_limit:.0f} s (time limit per op)"
                    break
            if why is not None:
                process.kill()
            code = process.wait()
            if self._stopping or (why is None and code == 0 and not ops):
                return [], seen
            complaints.seek(0)
            tail = complaints.read()[-400:].strip().replace("\n", " | ")
            why = why or f"its process ended with code {code}: {tail or 'it said nothing'}"
            if overdue:
                self._lose(at or self._any(spent_on), why)
                return [op for op in ops if op != spent_on], seen
            if at is not None:
                self._lose(at, why)
                return ops, seen | {at}
            if seen:  # it died between cells: the rest may do better
                return ops, seen
            for op in ops:
                self._lose(self._any(op), why)
            return [], seen

    def _any(self, op: str) -> _Key:
        return op, self._job.dtypes[0], "all", self._job.lines[op][0]

    def _lose(self, key: _Key, why: str) -> None:
        op, dtype, case, name = key
        self._cells.put(
            Cell(
                op=op, implementation=name, device=self._job.device, dtype=dtype, case=case, verdict="FAIL", reason=why
            )
        )
        self._lost[op, name] += 1
        if self._lost[op, name] == self._job.most_lost:
            self._lines[op].remove(name)
            reason = f"the rest is left out: {name} had ended or held up its process {self._job.most_lost} times"
            line, device = registry.implementation(op, name), torch.device(self._job.device)
            self._cells.put(not_run(op, line, device, DTYPES[dtype], reason))


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)
