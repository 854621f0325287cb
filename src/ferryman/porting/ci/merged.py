"""The merged document: every row of the matrix with its verdict, why it is not better, and what was before."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from ferryman.errors import ResultError
from ferryman.porting.ci.record import checked, first, read_json
from ferryman.porting.judging.printable import printable
from ferryman.porting.judging.results import Name, Verdict

SCHEMA_VERSION = 1
KIND: Literal["ferryman-ci-merged"] = "ferryman-ci-merged"
SIZE_LIMIT = 256 * 2**20


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Why(_Model):
    code: str
    text: str


class Bad(_Model):
    """A case that did not pass."""

    id: str
    verdict: Verdict
    reason: str = ""


class OpState(_Model):
    """One op (or one test file) in a row: as bad as its worst case."""

    op: str
    verdict: Verdict
    counts: dict[Verdict, int]


class Run(_Model):
    """A run of a row in the past."""

    commit: str
    time: str
    verdict: Verdict
    met: bool
    reason: str = ""
    age_days: float


class RowState(_Model):
    """What became of a row. ``met``: it says the best that its way of running can say (``best``).

    ``green``: it is met, and that best is PASS: only a run on the named device is green.
    """

    id: Name
    vendor: Name
    device: Name
    backend: Name
    how: str
    suite: str
    verdict: Verdict
    best: Verdict
    met: bool
    green: bool
    optional: bool = False
    quarantine: str | None = None
    carried: bool = Field(default=False, description="no run of this commit: the change does not reach the row")
    why: Annotated[list[Why], FailFast()] = []
    notes: list[str] = []
    counts: dict[Verdict, int] = {}
    excused: int = Field(default=0, description="cases that the matrix says need not run in this row")
    ops: Annotated[list[OpState], FailFast()] = []
    bad: Annotated[list[Bad], FailFast()] = []
    bad_total: int = 0
    commit: str | None = None
    time: str | None = None
    age_days: float | None = None
    seconds: float | None = None
    device_name: str | None = None
    toolchain: dict[str, str] = {}
    signed: bool = False
    records: list[str] = Field(default=[], description="SHA-256 of each record that was judged")
    kernels: str | None = Field(default=None, description="one digest of all sources that the row reaches")
    last_real: Run | None = Field(default=None, description="the last run that was evidence, this one included")
    last_success: Run | None = None
    first_failing: Run | None = None
    flips: int = 0
    trend: Annotated[list[Run], FailFast()] = Field(default=[], description="oldest first")


class VendorState(_Model):
    """As bad as its worst row on the real device; without such a row nothing ran there: NOT_RUN."""

    vendor: Name
    verdict: Verdict
    green: bool
    rows: int
    green_rows: int


class Fault(_Model):
    """Something among the results that is no evidence."""

    file: str
    code: str
    text: str


class Merged(_Model):
    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-ci-merged"] = KIND
    project: str
    commit: str | None
    time: str
    rows: Annotated[list[RowState], FailFast()]
    vendors: Annotated[list[VendorState], FailFast()]
    faults: Annotated[list[Fault], FailFast()] = []
    notes: list[str] = []
    required: list[str] = []
    failures: list[str] = Field(default=[], description="why `ferryman ci verify` fails; empty: it passes")
    judged: bool = Field(default=False, description="whether `ferryman ci verify` filled `failures`")


def dumps(document: Merged) -> str:
    return document.model_dump_json(indent=1)


def schema() -> dict[str, Any]:
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **Merged.model_json_schema()}


def load(path: Path) -> Merged:
    """A merged document. Raises ResultError: another kind, too large, from a newer schema, damaged."""
    raw = read_json(path, SIZE_LIMIT)
    checked(raw, path.name, KIND, SCHEMA_VERSION)
    try:
        return Merged.model_validate(printable(raw))
    except ValidationError as error:
        raise ResultError(f"{path.name} is damaged: {first(error)}") from error
