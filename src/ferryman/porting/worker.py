"""Interpreted Triton runs in a process of its own: a process either interprets Triton or compiles it.

The worker reads one JSON job from stdin and writes one JSON object per line: {"start": [op, dtype, case]} before each
case, {"cell": ...} after it. A worker that dies or falls silent costs the case it was at, never the run.
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
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ferryman.dispatch import registry
from ferryman.porting.fills import dtype_name
from ferryman.porting.results import Cell

SILENCE_SECONDS = 120.0  # the slowest interpreted cell takes 4 s on one shared core
OP_SECONDS = 600.0
SIMULATED = "h200"  # a CPU has no tiles of its own: the interpreter runs those that this device would
_START = "from ferryman.porting.worker import main; raise SystemExit(main())"
_RUNS = 2  # the interpreter is one thread of NumPy: a third run would show nothing new


class Interpreter:
    """The worker's cells, as a context: started at once, read while the caller works, stopped at the end."""

    def __init__(
        self, ops: Sequence[str], dtypes: Sequence[torch.dtype], tier: str, seed: int, full: bool,
        *, silence: float = SILENCE_SECONDS, op_limit: float = OP_SECONDS, command: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self._job: dict[str, Any] = {
            "dtypes": [dtype_name(d) for d in dtypes],
            "tier": tier,
            "seed": seed,
            "full": full,
        }
        self._ops = list(ops)
        self._silence, self._op_limit = silence, op_limit
        self._command = list(command or [sys.executable, "-c", _START])
        self._cells: queue.SimpleQueue[Cell | BaseException | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._drive, name="ferryman-interpreter", daemon=True)

    def __enter__(self) -> Interpreter:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        self._thread.join(timeout=30)

    def ready(self) -> Iterator[Cell]:
        """The cells that have arrived."""
        while not self._cells.empty():
            got = self._cells.get()
            if got is None:
                self._cells.put(None)
                return
            yield self._cell(got)

    def remaining(self) -> Iterator[Cell]:
        """All other cells, waiting for them."""
        while (got := self._cells.get()) is not None:
            yield self._cell(got)

    @staticmethod
    def _cell(got: Cell | BaseException) -> Cell:
        if isinstance(got, BaseException):
            raise got
        return got

    def _drive(self) -> None:
        try:
            remaining, skip = list(self._ops), set[tuple[str, str, str]]()
            while remaining and not self._stopping:
                remaining, lost = self._session(remaining, skip)
                skip |= lost
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._cells.put(error)
        finally:
            self._cells.put(None)

    def _session(self, ops: list[str], skip: set[tuple[str, str, str]]) -> tuple[list[str], set[tuple[str, str, str]]]:
        """One worker's life. Returns the ops still to finish, and the cells that must not run again."""
        source = str(Path(__file__).resolve().parents[2])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
        env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, env=env, text=True
            )
            if self._stopping:  # the caller left while the process was being made
                process.kill()
            lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            assert process.stdin is not None and process.stdout is not None
            threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
            try:
                process.stdin.write(json.dumps({**self._job, "ops": ops, "skip": sorted(skip)}))
                process.stdin.close()
            except BrokenPipeError:
                pass  # it died at start: its silence is handled below, its complaints are kept
            at: tuple[str, str, str] | None = None
            seen, why, overdue = set[tuple[str, str, str]](), None, False
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
                    seen.add((cell.op, cell.dtype, cell.case))
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
            why = why or f"the interpreting process ended with code {code}: {tail or 'it said nothing'}"
            if overdue:
                self._cells.put(_lost(*(at or (spent_on, str(self._job["dtypes"][0]), "all")), why=why))
                return [op for op in ops if op != spent_on], seen
            if at is not None:
                self._cells.put(_lost(*at, why=why))
                return ops, seen | {at}
            if seen:  # it died between cases: the rest may do better
                return ops, seen
            for op in ops:
                self._cells.put(_lost(op, self._job["dtypes"][0], "all", why))
            return [], seen


def _lost(op: str, dtype: str, case: str, why: str) -> Cell:
    return Cell(op=op, implementation="triton", device="cpu", dtype=dtype, case=case, verdict="FAIL", reason=why)


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main() -> int:
    """The worker's own side. What kernels print goes to stderr: stdout carries the protocol."""
    from ferryman.device_profiles import detect, profile
    from ferryman.porting.runner import check_op, dtypes_of

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # NumPy, which computes for the interpreter, warns of every planted NaN
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.read())
    skip = {tuple(s) for s in job["skip"]}

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    device = torch.device("cpu")
    for name in job["ops"]:
        lines = [line for line in registry.implementations(name) if line.backend == "triton"]
        for cell in check_op(
            registry.primitive(name), lines, dtypes_of(job["dtypes"]), job["tier"], job["seed"], device, detect(device),
            thin=not job["full"], times=_RUNS, skip=skip, simulate=profile(SIMULATED),
            starting=lambda case, dtype, name=name: say(start=[name, dtype_name(dtype), case.name]),  # type: ignore[misc]
        ):  # fmt: skip
            say(cell=json.loads(cell.model_dump_json()))
        say(done=name)
    return 0
