"""What a row's job executes: one command, without a shell, the same on a laptop."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ferryman.porting.ci.record import OUT
from ferryman.porting.ci.row import Row

PYTHON = "python"
TESTS, JUNIT, CHECK, BENCH, PERF = "tests.json", "junit.xml", "check.json", "bench.json", "perf.json"
CAPSULE = "row.capsule"


def shown(row: Row) -> list[str]:
    """The command as records have it: whatever Python and folder it runs with."""
    if row.suite == "pytest":
        counted = ["--ferryman-launches"] if row.how == "hardware" else []
        return [
            PYTHON,
            "-m",
            "pytest",
            "-p",
            "pytest_ferryman",
            f"--ferryman-record={OUT}/{TESTS}",
            f"--junitxml={OUT}/{JUNIT}",
            *counted,
            *row.args,
            *row.tests,
        ]
    if row.suite == "command":
        return [*row.command, *row.args]
    if row.suite == "bench":
        return [
            PYTHON,
            "-m",
            "ferryman",
            "bench",
            "--implementation",
            row.backend,
            "--out",
            f"{OUT}/{BENCH}",
            *row.args,
        ]
    if row.how == "compile":
        return [PYTHON, "-m", "ferryman.porting.ci.compiled", row.device, row.backend, f"{OUT}/{CHECK}", *row.args]
    base = [PYTHON, "-m", "ferryman", "check", "--backend", row.backend]
    if row.how == "simulated":
        base += ["--backend", "simulated", "--device", row.device]
    elif row.how == "stand-in":
        base += ["--as", row.device]
    elif row.how == "cpu":
        base += ["--device", "cpu"]
    return [*base, "--out", OUT, *row.args]


def recording(row: Row) -> list[str]:
    """The second command of a row with a capsule, which is small: its outputs travel."""
    base = [PYTHON, "-m", "ferryman", "record", "--backend", row.backend, "--tier", "small"]
    return [*base, "--out", f"{OUT}/{CAPSULE}", *row.args]


def real(command: Sequence[str], out: str) -> list[str]:
    """A command as it is started."""
    words = [word.replace(OUT, out) for word in command]
    return [sys.executable, *words[1:]] if words[0] == PYTHON else words


def document(row: Row) -> str:
    """The name of the result document that the suite ferryman writes."""
    stem = {"simulated": "check-simulated", "stand-in": f"check-as-{row.device}"}.get(row.how, "check")
    return f"{stem}.json"


def environment(row: Row) -> dict[str, str]:
    """What a row sets for its command: Triton on a CPU is interpreted."""
    return {"TRITON_INTERPRET": "1"} if row.how == "cpu" and row.backend == "triton" and row.suite != "ferryman" else {}
