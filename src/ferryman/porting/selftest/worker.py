"""Edited Triton kernels are interpreted in a process of their own, beside the Python mutants.

The worker reads one JSON job and writes one JSON object a line. A mutant that kills its process is tried once more,
alone: only if it dies again is that its own doing.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from ferryman.porting.process import parentage
from ferryman.porting.selftest.edits import EditError
from ferryman.porting.selftest.judging import RAISED, Setting
from ferryman.porting.selftest.mutants import catalogue
from ferryman.porting.selftest.report import Alarm, Record, Tally
from ferryman.porting.selftest.session import each_mutant, honest, not_run

SIMULATED = "h200"  # a CPU has no tiles of its own
RUNS = 2  # the interpreter is one thread of NumPy: a third run would show nothing new
SILENCE_SECONDS = 180.0
_START = "from ferryman.porting.selftest.worker import main; raise SystemExit(main())"


class Interpreted:
    """The worker's results, as a context: started at once, read while the caller works, stopped at the end."""

    def __init__(self, keys: Sequence[str], ops: Sequence[str], honest: int, seed: int, every_run_judged: bool, *,
                 silence: float = SILENCE_SECONDS, command: Sequence[str] | None = None) -> None:  # fmt: skip
        self._keys, self._silence = list(keys), silence
        self._job: dict[str, Any] = {
            "ops": list(ops), "honest": honest, "seed": seed, "every_run_judged": every_run_judged,
        }  # fmt: skip
        self._command = list(command or [sys.executable, "-c", _START])
        self._found: queue.SimpleQueue[Record | Tally | BaseException | None] = queue.SimpleQueue()
        self._process: subprocess.Popen[str] | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._drive, name="ferryman-selftest", daemon=True)

    def __enter__(self) -> Interpreted:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stopping = True
        process = self._process
        if process is not None and process.poll() is None:
            process.kill()
        self._thread.join(timeout=30)

    def __iter__(self) -> Iterator[Record | Tally]:
        """Everything, waiting for it. What went wrong in the worker's supervision is raised here."""
        while (got := self._found.get()) is not None:
            if isinstance(got, BaseException):
                raise got
            yield got

    def _drive(self) -> None:
        try:
            left, alone = list(self._keys), list[str]()
            honest = int(self._job["honest"])
            while (left or honest) and not self._stopping:
                at, left, why, finished = self._process_of(left, honest)
                honest = 0 if finished else honest
                if at is None and why is not None and not finished and not left:
                    alarm = Alarm(
                        alternative="triton", op="all", case="all", dtype="all", seed=self._job["seed"], reason=why
                    )
                    self._found.put(Tally(alarms=[alarm]))
                    honest = 0
                elif at is None and why is not None and left:
                    raise RuntimeError(f"the self-test's interpreter does not work: {why}")
                elif at is not None:
                    alone.append(at)
                    left = [key for key in left if key != at]
            for key in alone:
                if self._stopping:
                    break
                at, _, why, _ = self._process_of([key], 0)
                if at == key:
                    mutant = next(m for m in catalogue() if m.key == key)
                    record = not_run(mutant, why or "its process died")
                    self._found.put(record.model_copy(update={"outcome": "caught", "gates": [RAISED], "runs": 1}))
        except BaseException as error:  # noqa: BLE001 - raised again in the caller's thread
            self._found.put(error)
        finally:
            self._found.put(None)

    def _process_of(self, keys: list[str], honest: int) -> tuple[str | None, list[str], str | None, bool]:
        """One worker's life: (the mutant that it died of, what is left, why it ended early, whether it finished)."""
        source = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
        env = {**os.environ, **parentage(), "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
        with tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
            process = self._process = subprocess.Popen(
                self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=complaints, env=env, text=True
            )
            if self._stopping:
                process.kill()
            lines: queue.SimpleQueue[str | None] = queue.SimpleQueue()
            if process.stdin is None or process.stdout is None:
                raise RuntimeError("the worker has no pipes")
            threading.Thread(target=_pump, args=(process.stdout, lines), daemon=True).start()
            try:
                process.stdin.write(json.dumps({**self._job, "mutants": keys, "honest": honest}))
                process.stdin.close()
            except BrokenPipeError:
                pass  # it died at start: that shows below, and its complaints are kept
            at: str | None = None
            left, why, finished = list(keys), None, False
            while True:
                try:
                    text = lines.get(timeout=self._silence)
                except queue.Empty:
                    why = f"no result within {self._silence:.0f} s (time limit)"
                    process.kill()
                    break
                if text is None:
                    break
                message = json.loads(text)
                if "start" in message:
                    at = message["start"]
                elif "record" in message:
                    record = Record.model_validate(message["record"])
                    left.remove(record.key)
                    self._found.put(record)
                    at = None
                elif "error" in message:
                    kind = EditError if message["kind"] == "EditError" else RuntimeError
                    raise kind(f"{at or 'a right alternative'}: {message['error']}")
                elif "tally" in message:
                    self._found.put(Tally.model_validate(message["tally"]))
                    finished = True
            code = process.wait()
            if finished and code == 0:
                return None, [], None, True
            complaints.seek(0)
            tail = complaints.read()[-600:].strip().replace("\n", " | ")
            return at, left, why or f"the process ended with code {code}: {tail or 'it said nothing'}", finished


def _pump(stream: IO[str], lines: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        lines.put(line)
    lines.put(None)


def main() -> int:
    """The worker's own side. What kernels print goes to stderr: stdout carries the protocol."""
    from ferryman.device_profiles import detect, profile
    from ferryman.porting.process import end_with_parent

    end_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore", RuntimeWarning)  # NumPy warns of every planted NaN
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.read())

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    device = torch.device("cpu")
    setting = Setting(device, detect(device), RUNS, profile(SIMULATED))
    wanted = set(job["mutants"])
    chosen = [m for m in catalogue() if m.key in wanted]
    try:
        for record in each_mutant(chosen, setting, job["seed"], job["every_run_judged"], lambda m: say(start=m.key)):
            say(record=record.model_dump(mode="json"))
        # a sign of life after each cell: thousands of runs take minutes
        tally = honest(job["ops"], job["honest"], setting, job["seed"], "triton", lambda so_far: say(runs=so_far.runs))
    except Exception as error:
        # what a mutant raises is its verdict already; this is an edit that no longer fits, or a fault of the self-test
        say(error=f"{type(error).__name__}: {error}", kind=type(error).__name__)
        raise
    say(tally=tally.model_dump(mode="json"))
    return 0
