"""Worker processes with a time limit for each request: one that dies or hangs costs the kernel it was at, no more."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from ferryman import files
from ferryman.porting.aot.worker import COMMAND
from ferryman.porting.running.process import parentage

START_SECONDS = 120.0  # importing torch beside other work; 3 s on an idle core


class Lost(Exception):
    """A worker died or ran out of time; its text says which, with the end of what it printed."""


class Worker:
    """One process, started at its first request and again after it was lost. Not for several threads at once.

    ``listed``: groups whose kernels this process has listed, so that compiling one is all that its time limit is for.
    """

    def __init__(self, command: Sequence[str] | None = None) -> None:
        self._command = list(command or COMMAND)
        self._process: subprocess.Popen[str] | None = None
        self._complaints: IO[str] | None = None
        self._answers: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        self._folder: files.OwnFolder | None = None
        self.listed: set[Any] = set()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer. Raises Lost."""
        process = self._start()
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps(request) + "\n")
            process.stdin.flush()
        except BrokenPipeError:
            pass  # it died since its last answer: below, its silence is read
        return self._answer(seconds)

    def _answer(self, seconds: float) -> dict[str, Any]:
        process = self._process
        assert process is not None
        try:
            text = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.stop()
            raise Lost(f"no result within {seconds:.0f} s (time limit); its process was killed") from None
        if text is None:
            code, said = process.wait(), self._said()
            self.stop()
            raise Lost(f"its process ended with code {code}: {said or 'it said nothing'}")
        answer: dict[str, Any] = json.loads(text)
        return answer

    def _start(self) -> subprocess.Popen[str]:
        if self._process is not None:
            return self._process
        source = str(Path(__file__).resolve().parents[3])
        path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH", "")) if p)
        self._folder = files.OwnFolder("ferryman-compile-")
        # A process of its own group, so that the compilers that it starts end with it. A Triton cache of its own: what
        # lies in the user's was never checked.
        env = {
            **os.environ,
            **parentage(),
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": path,
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": str(self._folder.path),
        }
        env.pop("FERRYMAN_ARTEFACTS", None)
        self._complaints = tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace")  # noqa: SIM115
        self._answers = queue.SimpleQueue()
        self._process = subprocess.Popen(
            self._command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._complaints,
            env=env,
            text=True,
            start_new_session=True,
        )
        threading.Thread(target=_pump, args=(self._process.stdout, self._answers), daemon=True).start()
        process = self._process
        self._answer(START_SECONDS)  # it is ready
        return process

    def _said(self) -> str:
        assert self._complaints is not None
        self._complaints.seek(0)
        return self._complaints.read()[-2000:].strip()

    def stop(self) -> None:
        process, self._process = self._process, None
        self.listed.clear()
        if process is not None:
            with suppress(ProcessLookupError):  # it has ended, and all that it started
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            for stream in (process.stdin, self._complaints):
                if stream is not None:
                    with suppress(BrokenPipeError):  # a request that it did not live to read
                        stream.close()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None


def _pump(stream: IO[str], answers: queue.SimpleQueue[str | None]) -> None:
    for line in stream:
        answers.put(line)
    answers.put(None)


class Pool:
    """Workers, as a context: all of them, and what they started, end with it."""

    def __init__(self, jobs: int, command: Sequence[str] | None = None) -> None:
        self._workers = [Worker(command) for _ in range(jobs)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._executor = ThreadPoolExecutor(jobs, thread_name_prefix="ferryman-compile")

    def each(self, tasks: Sequence[Any], do: Callable[[Worker, Any], Any]) -> Iterator[Any]:
        """``do(worker, task)`` of every task, as they finish."""

        def run(task: Any) -> Any:
            worker = self._idle.get()
            try:
                return do(worker, task)
            finally:
                self._idle.put(worker)

        for done in as_completed([self._executor.submit(run, task) for task in tasks]):
            yield done.result()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:  # a thread that waits for one would otherwise wait for its time limit
            worker.stop()
        self._executor.shutdown(wait=True)
