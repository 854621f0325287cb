"""One process that interprets Triton, for all tests of a session: it runs a test's program and says what that printed.

Triton decides at its import whether it interprets, so that a test's own process cannot.
"""

from __future__ import annotations

import contextlib
import io
import json
import multiprocessing
import os
import traceback
from multiprocessing.connection import Connection
from typing import Any


def _serve(pipe: Connection) -> None:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
    while True:
        try:
            program = pipe.recv()
        except EOFError:
            return
        printed, fault = io.StringIO(), ""
        try:
            with contextlib.redirect_stdout(printed):
                exec(program, {"__name__": "__main__"})  # noqa: S102 - a test's own text
        except (Exception, SystemExit):  # noqa: BLE001 - whatever it is, the test shows it
            fault = traceback.format_exc()
        pipe.send((printed.getvalue(), fault))


class Interpreter:
    """The process starts with the first program, and again after one that ended it or ran out of time."""

    def __init__(self) -> None:
        self._process: Any = None

    def run(self, program: str, timeout: float = 200.0) -> Any:
        """What a program printed, as JSON. Raises AssertionError where it fails, ends the process, or takes longer."""
        if self._process is None:
            context = multiprocessing.get_context("spawn")
            self._pipe, theirs = context.Pipe()
            self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
            self._process.start()
            theirs.close()
        try:
            self._pipe.send(program)
            assert self._pipe.poll(timeout), f"the program took more than {timeout:g} s"
            printed, fault = self._pipe.recv()
        except BaseException as error:
            process = self._process
            self.close()
            if isinstance(error, EOFError | OSError):
                raise AssertionError(f"the program ended its process: exit code {process.exitcode}") from error
            raise
        assert not fault, fault[-3000:]
        return json.loads(printed)

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None
