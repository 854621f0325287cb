"""Runs one row, as a job does and as a laptop does, and writes its record."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError

from ferryman.backends.triton import interpreting
from ferryman.device_profiles import Profile, detect, profile
from ferryman.device_profiles.detect import device_facts
from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import FerrymanError, ResultError
from ferryman.porting.bench.document import load as load_bench
from ferryman.porting.ci import commands, perf, provenance, signing
from ferryman.porting.ci import record as records
from ferryman.porting.ci.changes import Tree
from ferryman.porting.ci.junit import junit
from ferryman.porting.ci.matrix import Matrix
from ferryman.porting.ci.record import Case, Device, Record
from ferryman.porting.ci.row import MatrixError, Row
from ferryman.porting.fingerprint import verify
from ferryman.porting.judging import results
from ferryman.porting.judging.printable import printable
from ferryman.porting.judging.results import Finding, Results
from ferryman.porting.running.process import bound

_RAN = ("PASS", "FAIL", "MISTRUSTED")
_SECONDS = 6 * 3600
_ENDING = 10  # seconds that a command has between SIGTERM and SIGKILL


class NotHere(FerrymanError, RuntimeError):
    """The row cannot run on this machine; the message has actual against required."""


@dataclass(frozen=True)
class Ran:
    """A finished run: its record and where it lies."""

    record: Record
    path: Path


def run(
    root: Path,
    matrix: Matrix,
    row: Row,
    out: Path,
    *,
    commit: str | None = None,
    sign_with: Path | None = None,
    seconds: float = _SECONDS,
    baseline: Path | None = None,
) -> Ran:
    """Execute a row's command in ``root`` and write its record below ``out``/ID.

    commit: only where git cannot say it. sign_with: a private ssh key. seconds: the command is ended then. baseline: of
    a bench row. Raises NotHere where this machine has another device, MatrixError for a commit that git knows better.
    """
    here = provenance.state(root)
    if commit is not None and here.commit is not None and commit != here.commit:
        raise MatrixError(f"--commit is {commit[:12]}, and this work tree is at {here.commit[:12]}; leave it out")
    device = _device(row)
    folder = out / row.id
    _emptied(folder)
    kernels = Tree(root, matrix).digests(row)
    numerics = _numerics(row)
    started = records.now()
    there, more = str(folder.resolve()), commands.environment(row)
    code = _execute(commands.real(commands.shown(row), there), root, more, seconds)
    if row.capsule:
        recorded = _execute(commands.real(commands.recording(row), there), root, more, seconds)
        code = code or recorded
    finished = records.now()
    cases, collected, launches, interpreted = _outcomes(row, folder, here, commit, kernels)
    if row.suite == "bench" and code == 0:
        code = perf.judge_run(folder, baseline, row)
        finished = records.now()
    written = sorted(p for p in folder.iterdir() if p.is_file() and p.name != records.NAME)
    record = Record(
        row=row.id,
        row_digest=row.digest,
        commit=here.commit or commit,
        commit_from="git" if here.commit else "given",
        dirty=here.dirty,
        kernels=kernels,
        started=started,
        finished=finished,
        command=commands.shown(row),
        exit_code=code,
        device=device,
        interpreted=interpreted,
        toolchain=provenance.toolchain(),
        collected=collected,
        cases=cases,
        launches=launches,
        numerics=numerics,
        files={p.name: provenance.file_digest(p) for p in written},
    )
    path = folder / records.NAME
    write_whole(path, records.dumps(record).encode())
    if sign_with is not None:
        signing.sign(path, sign_with)
    return Ran(record, path)


def _emptied(folder: Path) -> None:
    """What an earlier run left would be taken for this one's. A folder that is made for results is no part of the
    repository: git is told."""
    fresh = not folder.parent.exists()
    folder.mkdir(parents=True, exist_ok=True)
    if fresh:
        (folder.parent / ".gitignore").write_text("*\n", encoding="utf-8")
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            raise MatrixError(f"{folder} holds a folder, {path.name}; choose another --out")
        path.unlink()


def _device(row: Row) -> Device:
    """What is here, as the driver names it; for a row that needs no device, what stands for it."""
    known = profile(row.device)
    kind: Any = row.how
    if row.how in ("simulated", "compile"):
        how = "simulated" if row.how == "simulated" else "not here"
        return Device(vendor=known.vendor, profile=known.name, arch=known.arch, name=f"{known.title}, {how}", kind=kind)
    if row.how == "cpu":
        return Device(vendor="cpu", profile="cpu", arch=known.arch, name=_processor(), kind=kind)
    if not torch.cuda.is_available():
        raise NotHere(f"row {row.id} needs a {row.device}, and torch sees no accelerator here: NOT_RUN")
    facts, here = device_facts(torch.cuda.current_device()), detect("cuda")
    if row.how == "stand-in":
        return Device(
            vendor=known.vendor, profile=known.name, arch=known.arch, name=f"{known.title} by {facts.name}", kind=kind
        )
    _require(row, here)
    return Device(vendor=here.vendor, profile=here.name, arch=facts.arch.split(":")[0], name=facts.name, kind=kind)


def _require(row: Row, here: Profile) -> None:
    if (here.vendor, here.name) != (row.vendor, row.device):
        raise NotHere(f"row {row.id} needs a {row.device} ({row.vendor}); here is {here.title} ({here.name}): NOT_RUN")


def _processor() -> str:
    return results.environment(torch.device("cpu"), detect("cpu"), 0, "small").device_name


def _numerics(row: Row) -> list[Finding]:
    """The profile's facts, measured here through torch: what ties a record to a kind of device."""
    return verify(detect("cuda"), "cuda") if row.how == "hardware" else []


def _execute(command: Sequence[str], root: Path, more: dict[str, str], seconds: float) -> int:
    """The command's exit code; it is ended with all its children when its time is over, or this process is asked to."""
    try:
        # bytecode that tests leave would be files that the commit does not have
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **more}
        process = subprocess.Popen(bound(command), cwd=root, env=environment, start_new_session=True)
    except OSError as error:
        raise MatrixError(f"{command[0]} cannot be started: {error.strerror}") from error

    def end(*_: object) -> None:
        _signal(process, signal.SIGTERM)

    before = {number: signal.signal(number, end) for number in (signal.SIGTERM, signal.SIGINT)} if _main() else {}
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        sys.stderr.write(f"ferryman: the command is ended after {seconds:.0f} s\n")
        _signal(process, signal.SIGTERM)
        try:
            process.wait(_ENDING)
        except subprocess.TimeoutExpired:
            _signal(process, signal.SIGKILL)
            process.wait()
        return 124
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _main() -> bool:
    return threading.current_thread() is threading.main_thread()


def _signal(process: subprocess.Popen[bytes], number: int) -> None:
    if process.poll() is None:
        os.killpg(process.pid, number)


def _outcomes(
    row: Row, folder: Path, here: provenance.State, commit: str | None, kernels: dict[str, str]
) -> tuple[list[Case], list[str], int | None, bool]:
    """(cases, collected ids, launches on the device, whether Triton was interpreted) from what the command wrote."""
    interpreted = interpreting() or bool(commands.environment(row))
    try:
        if row.suite == "pytest" and (folder / commands.TESTS).is_file():
            return _tests(folder / commands.TESTS)
        if row.suite == "command" and (folder / commands.JUNIT).is_file():
            cases, _ = junit(folder / commands.JUNIT)
            return [], list(dict.fromkeys(case.id for case in cases)), None, interpreted
        if row.suite == "bench" and (folder / commands.BENCH).is_file():
            timed = [t for cell in load_bench(folder / commands.BENCH).cells for t in cell.times]
            return [], [], sum(len(t.trials) for t in timed if t.method != "host clock"), interpreted
        name = commands.document(row)
        if row.suite == "ferryman" and (folder / name).is_file():
            document = results.load(folder / name)
            state = provenance.State(here.commit or commit, here.changed)
            stamped = provenance.stamped(document, row.id, given=state)
            results.save(stamped, folder / name)
            _alone(folder, name)
            ids = [results.cell_id(cell) for cell in stamped.cells]
            return [], ids, _ran(stamped), interpreted and row.how == "hardware"
    except ResultError as error:
        sys.stderr.write(f"ferryman: {error}\n")
    return [], [], None, interpreted


def _alone(folder: Path, name: str) -> None:
    """Renderings of the document can be made again from it; only it travels."""
    for path in folder.iterdir():
        if path.name != name and path.stem == Path(name).stem:
            path.unlink()


def _ran(document: Results) -> int:
    """Cells whose kernel ran on an accelerator, at least once each."""
    return sum(cell.device.startswith("cuda") and cell.verdict in _RAN for cell in document.cells)


def _tests(path: Path) -> tuple[list[Case], list[str], int | None, bool]:
    """What the pytest plugin wrote."""
    try:
        raw = json.loads(path.read_text("utf-8"))
        cases = [Case.model_validate(case) for case in printable(raw["cases"])]
        collected = [str(printable(name)) for name in raw["collected"]]
        return cases, collected, raw["launches"], bool(raw["interpreted"])
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        raise ResultError(f"{path.name} is not what the pytest plugin writes: {str(error)[:200]}") from error
