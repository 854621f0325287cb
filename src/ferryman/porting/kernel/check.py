"""The check of one function that is not ours, in a process of its own: `ferryman check --kernel module:function`.

A kernel that hangs past the limit, or ends its process, costs the case that it was at; a fresh process runs the rest,
at most `MOST_LOST` times.
"""

from __future__ import annotations

import collections
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch

from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, KernelError, UnknownName
from ferryman.ops.menu import Implementation
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import SEED
from ferryman.porting.judging.results import Cell, Results, Timing, environment, results
from ferryman.porting.kernel import adapter
from ferryman.porting.kernel.worker import START
from ferryman.porting.running import timing
from ferryman.porting.running.cells import dtypes_of, tier_cases
from ferryman.porting.running.process import machine_bytes, parentage, resident_bytes
from ferryman.porting.running.runner import Progress

TIMEOUT_SECONDS = 60.0
LOADING_SECONDS = 300.0  # importing torch takes 3 to 20 s, the kernel's own module may compile
PREPARING_SECONDS = 600.0  # the float64 oracle of a standard case on a CPU
MEMORY_SHARE = 0.5  # of the machine's memory: what the kernel's process may take
MOST_LOST = 5  # processes that a kernel may hang or end before the rest is left out
_KEPT = 64  # lines, of at most 4 KiB, of what a kernel prints that are kept


@dataclass(frozen=True)
class Declaration:
    """What the author of a kernel says of it; each widens the bounds by its own term only."""

    accumulation: str = "fp32"
    roundings: tuple[str, ...] = ()
    deterministic: bool = True


class _Ended(Exception):
    """The process is gone; the message says how."""


class _Late(Exception):
    """No message within the limit."""


def run(
    kernel: str,
    op: str,
    *,
    declaration: Declaration | None = None,
    device: torch.device | str | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    tier: str | None = None,
    seed: int = SEED,
    timeout: float = TIMEOUT_SECONDS,
    progress: Progress | None = None,
    command: Sequence[str] | None = None,
    memory: int | None = None,
) -> Results:
    """Check ``module:function`` or ``path.py:function`` on every case of an op, through every gate.

    timeout: seconds that one case may take. memory: bytes that its process may have in use (`MEMORY_SHARE`).
    Raises UnknownName, ArgumentError, and KernelError where the function
    cannot be loaded; whatever the kernel does afterwards is a verdict.
    """
    began = time.perf_counter()
    reference = adapter.parse(kernel)
    primitive = registry.primitive(op)
    facts = declaration or Declaration()
    line = adapter.declared(primitive, reference.name, facts.accumulation, facts.roundings, facts.deterministic)
    if not 0 < timeout < float("inf"):
        raise ArgumentError("check", "--timeout", timeout, "seconds, more than 0")
    profile = detect(device)  # names the devices that are here if this one is not
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place == torch.device("cuda"):
        place = torch.device("cuda", torch.cuda.current_device())
    chosen = dtypes_of(dtypes)
    tier = tier or ("small" if place.type == "cpu" else "standard")
    names = [case.name for case in tier_cases(primitive, tier)]
    wanted = [(dtype_name(d), name) for d in chosen for name in names]
    job = {
        "kernel": kernel,
        "op": primitive.name,
        "device": str(place),
        "tier": tier,
        "seed": seed,
        "accumulation": facts.accumulation,
        "roundings": list(facts.roundings),
        "deterministic": facts.deterministic,
    }
    most = memory or int(machine_bytes() * MEMORY_SHARE)
    checked = _Run(job, line, wanted, place, timeout, most, progress, list(command or [sys.executable, "-c", START]))
    checked.all()
    order = {at: i for i, at in enumerate(wanted)}
    cells = sorted(checked.cells, key=lambda c: order[c.dtype, c.case])
    timings = checked.timings if place.type == "cuda" else timing.slowest(cells)
    known = environment(place, profile, seed, tier, round(time.perf_counter() - began, 3))
    return results(known.model_copy(update={"flags": {**known.flags, "kernel": str(reference)}}), cells, timings)


class _Run:
    """The cells that there are, and those that remain."""

    def __init__(
        self,
        job: dict[str, Any],
        line: Implementation,
        wanted: list[tuple[str, str]],
        device: torch.device,
        timeout: float,
        memory: int,
        progress: Progress | None,
        command: list[str],
    ) -> None:
        self._job, self._line, self._device, self._timeout, self._memory = job, line, device, timeout, memory
        self._remaining, self._total = list(wanted), len(wanted)
        self._progress, self._command = progress, command
        self.cells: list[Cell] = []
        self.timings: list[Timing] = []

    def all(self) -> None:
        for lost in range(MOST_LOST + 1):
            if not self._remaining:
                return
            if lost == MOST_LOST:
                why = f"left out: the kernel had hung or ended its process {lost} times"
                for dtype, case in list(self._remaining):
                    self._add(self._cell(dtype, case, "NOT_RUN", why))
                return
            times = list(dict.fromkeys(d for d, _ in self._remaining)) if lost == 0 else []
            with _Process(
                self._command, {**self._job, "cells": self._remaining, "times": times}, self._memory
            ) as process:
                self._session(process)

    def _session(self, process: _Process) -> None:
        """One process's life: every cell that remains, or all up to the one that it was lost at."""
        at: tuple[str, str] | None = None
        stage, limit, fresh = "loading", LOADING_SECONDS, True
        while True:
            try:
                message = process.message(limit)
            except _Late:
                self._lost(stage, at, f"no result within {limit:g} s (time limit)", fresh)
                return
            except _Large as error:
                self._lost("running" if at is not None else stage, at, str(error), fresh)
                return
            except _Ended as error:
                self._lost(stage, at, str(error), fresh)
                return
            if "failed" in message:
                if message["failed"] == "unknown":
                    raise UnknownName(message["kind"], message["name"], message["known"])
                raise KernelError(message["text"])
            if "at" in message:
                at, stage, limit = (message["at"][0], message["at"][1]), "preparing", PREPARING_SECONDS
            elif "run" in message:
                stage, limit = "running" if at is not None else "timing", self._timeout
            elif "cell" in message:
                self._add(Cell.model_validate(message["cell"]))
                at, stage, limit, fresh = None, "between", PREPARING_SECONDS, False
            elif "timing" in message:
                self.timings.append(Timing.model_validate(message["timing"]))
            elif "lost" in message or "done" in message:
                return

    def _lost(self, stage: str, at: tuple[str, str] | None, why: str, fresh: bool) -> None:
        if stage == "loading":
            raise KernelError(f"{self._job['kernel']} could not be loaded: {why}")
        if at is None:
            return
        if stage == "running":
            self._add(self._cell(*at, "FAIL", why))
        elif fresh:  # nothing of the kernel's ran in this process: the case itself cannot be had here
            self._add(self._cell(*at, "NOT_RUN", f"its inputs could not be made: {why}"))

    def _cell(self, dtype: str, case: str, verdict: str, why: str) -> Cell:
        return adapter.lost(self._line, case, getattr(torch, dtype), self._device, verdict, why)

    def _add(self, cell: Cell) -> None:
        self.cells.append(cell)
        self._remaining.remove((cell.dtype, cell.case))
        if self._progress is not None:
            self._progress(len(self.cells), self._total, f"{cell.op} {cell.implementation}")


class _Large(Exception):
    """The process took more memory than it may."""


class _Process:
    """A worker in a session of its own, so that what the kernel itself started ends with it."""

    def __init__(self, command: list[str], job: dict[str, Any], memory: int) -> None:
        self._memory = memory
        source = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
        self._popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, **parentage(), "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            start_new_session=True,
        )
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._printed: collections.deque[str] = collections.deque(maxlen=_KEPT)
        assert self._popen.stdin is not None and self._popen.stdout is not None and self._popen.stderr is not None
        self._start(self._popen.stdout, -1, self._lines.put)
        self._listener = self._start(self._popen.stderr, 4096, self._printed.append)
        with contextlib.suppress(BrokenPipeError):  # it died at once: `message` says how
            self._popen.stdin.write(json.dumps(job))
            self._popen.stdin.close()

    @staticmethod
    def _start(stream: IO[str], longest: int, keep: Callable[[str], None]) -> threading.Thread:
        def pump() -> None:
            while chunk := stream.readline(longest):
                keep(chunk)

        thread = threading.Thread(target=pump, daemon=True)
        thread.start()
        return thread

    def __enter__(self) -> _Process:
        return self

    def __exit__(self, *exception: object) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # macOS refuses to signal a zombie
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()

    def _death(self) -> str | None:
        """How the process ended, if it did. It stays a zombie, so that its id, which names its group, stays its own."""
        info = os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        if info is None:
            return None
        if info.si_code == os.CLD_EXITED:
            return f"with exit code {info.si_status}"
        return f"with {signal.Signals(info.si_status).name}"

    def message(self, limit: float) -> dict[str, Any]:
        """The next message. Raises _Late after ``limit`` seconds without one, _Ended when the process is gone,
        _Large when it has more memory than it may."""
        deadline = time.monotonic() + limit
        while True:
            death = self._death()
            try:
                # what a process started may hold its pipe open: the pipe's end cannot be waited for
                wait = min(0.2, max(deadline - time.monotonic(), 0.001))
                text = self._lines.get(timeout=wait if death is None else 0.5)
            except queue.Empty:
                if death is not None:
                    raise _Ended(f"its process ended {death}{self._complaint()}") from None
                if time.monotonic() >= deadline:
                    raise _Late from None
                used = resident_bytes(self._popen.pid)
                if used > self._memory:
                    limit_text = f"{self._memory / 2**30:.3g} GiB (memory limit)"
                    raise _Large(f"its process took {used / 2**30:.3g} GiB; required: at most {limit_text}") from None
                continue
            try:
                message = json.loads(text)
            except ValueError:
                message = None
            if not isinstance(message, dict):
                raise _Ended(f"its process wrote what is no message: {text[:80]!r}")
            return message

    def _complaint(self) -> str:
        self._listener.join(timeout=1)
        tail = "".join(list(self._printed))[-300:].strip().replace("\n", " | ")
        return f": {tail}" if tail else ""
