"""What became of each row before: the last real run with its commit, since when it fails, and how often it flipped."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import ResultError
from ferryman.porting.ci.record import Sha, checked, first, moment, read_json
from ferryman.porting.judging.printable import printable
from ferryman.porting.judging.results import Name, Verdict

SCHEMA_VERSION = 1
KIND: Literal["ferryman-ci-history"] = "ferryman-ci-history"
SIZE_LIMIT = 64 * 2**20
KEPT = 50  # runs of one row


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Entry(_Model):
    """One run that counted: its record's SHA-256, and the verdict of each op."""

    row: Name
    sha256: Sha
    commit: str = Field(pattern="^[0-9a-f]{40,64}$")
    time: str
    verdict: Verdict
    met: bool = Field(description="whether the row said the best that it can say")
    kernels: Sha = Field(description="one digest of all that the row reached")
    cases: Sha = Field(description="one digest of the ids of all cases: the same sources give the same ones")
    ops: dict[str, Verdict] = {}
    reason: str = ""


class History(_Model):
    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-ci-history"] = KIND
    entries: Annotated[list[Entry], FailFast()] = []

    def of(self, row: str) -> list[Entry]:
        """A row's runs, oldest first."""
        return sorted((e for e in self.entries if e.row == row), key=lambda e: moment(e.time))


def load(paths: Sequence[Path]) -> tuple[History, list[str]]:
    """Histories as one, and what was odd about them. A file that is not there yet is an empty history.

    Raises ResultError: no history, a newer schema, damaged; two that tell one record in two ways.
    """
    by_record: dict[tuple[str, str], Entry] = {}
    notes: list[str] = []
    for path in paths:
        if not path.exists():
            continue
        for entry in _read(path).entries:
            known = by_record.setdefault((entry.row, entry.sha256), entry)
            if known != entry:
                raise ResultError(
                    f"histories disagree about row {entry.row}, record {entry.sha256[:12]}: {known.verdict} at "
                    f"{known.time} against {entry.verdict} at {entry.time} in {path.name}. One of them was altered"
                )
    history = History(entries=list(by_record.values()))
    for row in dict.fromkeys(e.row for e in history.entries):
        times = [moment(e.time) for e in history.entries if e.row == row]
        if times != sorted(times):
            notes.append(f"row {row}: its history's clock ran backwards; runs are ordered by their times")
    return history, notes


def _read(path: Path) -> History:
    raw: Any = read_json(path, SIZE_LIMIT)
    checked(raw, path.name, KIND, SCHEMA_VERSION)
    try:
        history = History.model_validate(printable(raw))
    except ValidationError as error:
        raise ResultError(f"{path.name} is damaged: {first(error)}") from error
    for entry in history.entries:
        moment(entry.time)
    return history


def extended(history: History, entries: Iterable[Entry]) -> History:
    """With new runs; a record that is there already is not counted again. The last KEPT of each row stay."""
    by_record = {(e.row, e.sha256): e for e in history.entries}
    for entry in entries:
        by_record.setdefault((entry.row, entry.sha256), entry)
    kept: list[Entry] = []
    for row in dict.fromkeys(e.row for e in by_record.values()):
        mine = sorted((e for e in by_record.values() if e.row == row), key=lambda e: moment(e.time))
        kept += mine[-KEPT:]
    return History(entries=kept)


def save(history: History, path: Path) -> None:
    """Whole or not at all. Raises OSError."""
    write_whole(path.resolve(), (json.dumps(history.model_dump(), indent=1) + "\n").encode())


def last_success(entries: Sequence[Entry]) -> Entry | None:
    return next((e for e in reversed(entries) if e.met), None)


def first_failing(entries: Sequence[Entry]) -> Entry | None:
    """The first run since the last success; None where the last run is one, or none ran."""
    failing = None
    for entry in reversed(entries):
        if entry.met:
            break
        failing = entry
    return failing


def flips(entries: Sequence[Entry]) -> int:
    """How often a row changed between met and not, at one and the same state of its kernels: what is flaky."""
    count = 0
    for earlier, later in pairwise(entries):
        count += earlier.met != later.met and earlier.kernels == later.kernels
    return count
