"""Runs the command: in this process (importing torch for each call would take most of the tests' time), or alone."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

from ferryman.cli.main import main


@dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


def ferryman(*arguments: str, **environment: str) -> Done:
    """The command with stdout and stderr that are no terminals. What it does not handle itself rises."""
    out, err = io.StringIO(), io.StringIO()
    code: object = 0
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "argv", ["ferryman", *arguments]),
    ):
        try:
            main()
        except SystemExit as stopped:
            code = stopped.code or 0
    assert isinstance(code, int)
    return Done(code, out.getvalue(), err.getvalue())


def alone(*arguments: str, cwd: Path | None = None, timeout: float = 240) -> Done:
    """The command as a user starts it."""
    source = str(Path(__file__).resolve().parents[2] / "src")
    path = os.pathsep.join(p for p in (source, os.environ.get("PYTHONPATH")) if p)
    given = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-m", "ferryman", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env=given,
    )
    return Done(done.returncode, done.stdout, done.stderr)
