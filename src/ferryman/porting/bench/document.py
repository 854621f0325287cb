"""The benchmark document: one versioned JSON of times, of ceilings measured beside them, and the device's condition."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from ferryman import files
from ferryman.errors import ResultError, shown
from ferryman.porting.judging.printable import printable
from ferryman.porting.judging.results import Environment, Name

SCHEMA_VERSION = 1
KIND: Literal["ferryman-benchmark"] = "ferryman-benchmark"
Method = Literal["graph replay", "device events", "host clock"]
Role = Literal["implementation", "peer", "reference"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Condition(_Model):
    """What the device said of itself while it was timed; None where nobody could ask."""

    source: str = Field(description="who was asked, or why nobody could be")
    sm_clock_mhz: tuple[int, int] | None = Field(default=None, description="lowest and highest seen")
    memory_clock_mhz: tuple[int, int] | None = None
    power_w: tuple[float, float] | None = None
    temperature_c: int | None = Field(default=None, description="highest seen")
    throttled_by: list[str] = Field(default=[], description="reasons for lowered clocks, other than being idle")


class Ceilings(_Model):
    """What this device does best, measured in this run; bytes count what is read and what is written."""

    copy_bytes_per_s: float = Field(gt=0)
    copy_bytes: int
    product_flops_per_s: float = Field(gt=0)
    product: str = Field(description="the product that was timed: bfloat16 8192^3")


class Times(_Model):
    """One contender on one cell. ``trials``: median seconds of a call on inputs that no cache holds, trial by trial."""

    name: Name
    role: Role
    method: Method | None = None
    trials: list[float] = []
    warm_seconds: float | None = Field(default=None, description="the same inputs again and again")
    host_seconds: float | None = Field(
        default=None, description="host clock, calls of the public function, waiting last"
    )
    of_copy: float | None = Field(default=None, description="time of a copy of as many bytes over this time")
    of_product: float | None = Field(default=None, description="time at the measured rate of products over this time")
    of_roofline: float | None = Field(default=None, description="the device profile's least time over this time")
    skipped: str | None = Field(default=None, description="why it was not timed")
    note: str | None = None

    @property
    def seconds(self) -> float | None:
        return statistics.median(self.trials) if self.trials else None

    @property
    def spread(self) -> float | None:
        """Slowest over fastest trial."""
        return max(self.trials) / min(self.trials) if self.trials else None


class Cell(_Model):
    """One op on one case. ``bytes`` and ``flops`` are the least possible ones."""

    op: Name
    case: str
    dtype: Name
    bytes: float
    flops: float
    floor_seconds: float | None = None
    bound_by: str = "unknown"
    sets: int = Field(description="how many sets of inputs were rotated")
    rotated_bytes: int = Field(description="bytes of all those sets")
    rotated_over_cache: float | None = Field(default=None, description="those bytes over the last cache's; 4 is cold")
    noise: float | None = Field(
        default=None, ge=0, allow_inf_nan=False, description="one contender timed twice: relative difference"
    )
    times: Annotated[list[Times], FailFast()]
    condition: Condition
    untrusted: list[str] = Field(default=[], description="why these times are not to be trusted")

    @property
    def key(self) -> tuple[str, str, str]:
        return self.op, self.case, self.dtype


class Peer(_Model):
    """Another library: its version, or why it took no part."""

    name: Name
    version: str | None = None
    reason: str | None = None


class Benchmark(_Model):
    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-benchmark"] = KIND
    environment: Environment
    ceilings: Ceilings
    peers: Annotated[list[Peer], FailFast()] = []
    cells: Annotated[list[Cell], FailFast()]
    left: int = Field(default=0, ge=0, description="cells that were not timed when the run was stopped")


def dumps(document: Benchmark) -> str:
    return document.model_dump_json(indent=1)


def load(path: str | Path) -> Benchmark:
    """A benchmark document from a file. Raises ResultError: too large, not JSON, of another version, or damaged."""
    path = Path(path)
    try:
        raw = files.document(path)
    except files.Unreadable as error:
        raise ResultError(str(error)) from error
    return parse(raw, str(path))


def require_whole(document: Benchmark, where: str) -> None:
    """Raises ResultError for a document that a stopped run left."""
    if document.left:
        done = f"{len(document.cells)} of {len(document.cells) + document.left} cells"
        raise ResultError(f"{where} is partial: its run was stopped after {done}; required: a whole run's document")


def parse(raw: Any, where: str) -> Benchmark:
    if not isinstance(raw, dict) or raw.get("kind") != KIND:
        raise ResultError(
            f"{where} is not a Ferryman benchmark: its kind is not {KIND!r}; make one with ferryman bench"
        )
    version = raw.get("schema_version")
    if version != SCHEMA_VERSION or isinstance(version, bool):
        raise ResultError(
            f"{where} has schema version {shown(repr(version))}; this Ferryman reads {SCHEMA_VERSION}. "
            "Run ferryman bench again"
        )
    try:
        document = Benchmark.model_validate(printable(raw))
    except ValidationError as error:
        first = error.errors()[0]
        place = shown(".".join(map(str, first["loc"])))
        raise ResultError(f"{where} is damaged: {place}: {first['msg']} ({error.error_count()} errors)") from error
    for cell in document.cells:
        for times in cell.times:
            if any(not 0 < t < float("inf") for t in times.trials):
                raise ResultError(f"{where} is damaged: {cell.op} {cell.case} {times.name} has a time that is none")
        names = [times.name for times in cell.times]
        if len(set(names)) < len(names):
            raise ResultError(f"{where} is damaged: {cell.op} {cell.case} has a contender twice")
    keys = [cell.key for cell in document.cells]
    if len(set(keys)) != len(keys):
        raise ResultError(f"{where} is damaged: a cell stands twice")
    return document
