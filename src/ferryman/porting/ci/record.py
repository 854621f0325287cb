"""The record that `ferryman ci run` writes beside what a row's command wrote: of what, where, when, and which cases.

A result file counts only beside its record, which names it by SHA-256.
"""

from __future__ import annotations

import datetime
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from ferryman import files
from ferryman.errors import ResultError
from ferryman.porting.judging.printable import printable
from ferryman.porting.judging.results import Finding, Name

SCHEMA_VERSION = 1
KIND: Literal["ferryman-ci-record"] = "ferryman-ci-record"
NAME = "record.json"
SIZE_LIMIT = 64 * 2**20
OUT = "{out}"  # in a command: the folder of this run
_FILE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
Sha = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
Outcome = Literal["passed", "failed", "error", "skipped", "xfailed", "xpassed", "deselected", "rerun", "lost"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Device(_Model):
    """What the run saw: the profile that was detected, and what the driver calls the device."""

    vendor: Name
    profile: Name
    arch: str = Field(max_length=64)
    name: str = Field(max_length=300)
    kind: Literal["hardware", "simulated", "stand-in", "compile", "cpu"]


class Case(_Model):
    """One test. ``launches``: kernels that the device ran meanwhile; None where nobody counted."""

    id: str = Field(max_length=2000)
    outcome: Outcome
    launches: int | None = Field(default=None, ge=0)
    seconds: float | None = None
    reason: str | None = None


class Record(_Model):
    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-ci-record"] = KIND
    row: Name
    row_digest: Sha = Field(description="of the row as the matrix had it")
    commit: str | None = Field(pattern="^[0-9a-f]{40,64}$", description="of the tested repository")
    commit_from: Literal["git", "given"] = Field(description="given: there was no repository, --commit named it")
    dirty: bool | None
    kernels: dict[str, Sha] = Field(description="every file that the row reaches, or every op of Ferryman's")
    started: str
    finished: str
    command: list[str]
    exit_code: int
    device: Device
    interpreted: bool = Field(description="whether Triton was interpreted")
    toolchain: dict[str, str]
    collected: list[str] = Field(description="ids of all cases that were found, before any was left out")
    cases: Annotated[list[Case], FailFast()] = []
    launches: int | None = Field(default=None, ge=0, description="kernels that ran on the device; null: nobody counted")
    numerics: Annotated[list[Finding], FailFast()] = Field(
        default=[], description="the profile's numeric facts, verified on this device"
    )
    files: dict[str, Sha] = Field(description="what the command wrote, by name in the record's folder")


def now() -> str:
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def moment(text: str) -> datetime.datetime:
    """A time of a document. Raises ResultError for a text that is none, or has no time zone."""
    try:
        time = datetime.datetime.fromisoformat(text.replace("Z", "+00:00"))
        time.astimezone(datetime.timezone.utc)
    except (ValueError, OverflowError) as error:
        raise ResultError(f"{text[:60]!r} is no time; required: ISO 8601 with a time zone") from error
    if time.tzinfo is None:
        raise ResultError(f"{text[:60]!r} has no time zone; required: ISO 8601 with one")
    return time.astimezone(datetime.timezone.utc)


def dumps(record: Record) -> str:
    return record.model_dump_json(indent=1) + "\n"


def schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Record.model_json_schema()}


def read_json(path: Path, most: int) -> Any:
    """JSON of a file. Raises ResultError: no regular file, too large, truncated, no JSON."""
    if path.is_symlink():
        raise ResultError(f"{path.name} is no regular file")
    try:
        return files.parse(files.read(path, most))
    except OSError as error:
        raise ResultError(f"{path.name} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ResultError(f"{path.name} is not JSON: {str(error)[:200]}") from error


def parse(raw: Any, where: str) -> Record:
    """A record from parsed JSON. Raises ResultError: another kind, a newer schema, damaged."""
    checked(raw, where, KIND, SCHEMA_VERSION)
    try:
        record = Record.model_validate(printable(raw))
    except ValidationError as error:
        raise ResultError(f"{where} is damaged: {first(error)}") from error
    for name in record.files:
        if not _FILE.fullmatch(name):
            raise ResultError(f"{where} is damaged: {name[:60]!r} is no file's name in its folder")
    for text in (record.started, record.finished):
        moment(text)
    return record


def checked(raw: Any, where: str, kind: str, version: int) -> None:
    """Raises ResultError unless it is a document of that kind that this Ferryman reads."""
    if not isinstance(raw, dict) or raw.get("kind") != kind:
        raise ResultError(f"{where} is no {kind}")
    given = raw.get("schema_version")
    if not isinstance(given, int) or isinstance(given, bool) or given < 1:
        raise ResultError(f"{where}: schema_version is {str(given)[:40]!r}; required: an integer from 1 to {version}")
    if given > version:
        raise ResultError(f"{where} has schema version {given}; this Ferryman reads up to {version}. Upgrade ferryman")


def first(error: ValidationError) -> str:
    """The first fault of a document, and how many there are."""
    one = error.errors()[0]
    return f"{'.'.join(map(str, one['loc']))[:200]}: {one['msg'][:200]} ({error.error_count()} errors)"
