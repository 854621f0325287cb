"""The fingerprint document: versioned JSON, one fact for each thing measured by each route."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from ferryman import files
from ferryman.errors import ResultError, shown
from ferryman.porting.judging.printable import printable
from ferryman.porting.judging.results import Environment, Finding

SCHEMA_VERSION = 1
SIZE_LIMIT = 16 * 2**20  # a full one is about 300 KiB


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", frozen=True)


class Fact(_Model):
    """One measured property. Facts of several routes under one key describe the same unit."""

    key: str = Field(pattern=r"^[a-z0-9_.]{1,80}$", description="the path below numerics.arithmetic in a profile")
    route: str = Field(description="torch (the vendor's library), triton, simt; with what distinguishes it")
    format: str = Field(default="", description="the input format of a matrix unit, or of a conversion's result")
    value: str | int | float | None = None
    reason: str | None = Field(default=None, description="why there is no value")
    detail: dict[str, Any] = Field(default={}, description="what the value was read from")


class Fingerprint(_Model):
    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-fingerprint"] = "ferryman-fingerprint"
    environment: Environment
    facts: Annotated[list[Fact], FailFast()]
    findings: Annotated[list[Finding], FailFast()] = Field(
        default=[], description="what the profile states, against the facts"
    )

    def values(self, key: str) -> dict[str, str | int | float]:
        """What was measured under a key, by route and format."""
        return {f"{f.route} {f.format}".strip(): f.value for f in self.facts if f.key == key and f.value is not None}


def dumps(document: Fingerprint) -> str:
    return document.model_dump_json(indent=1)


def schema() -> dict[str, Any]:
    return Fingerprint.model_json_schema()


def load(path: str | Path) -> Fingerprint:
    """A fingerprint from a file. Raises ResultError: too large, not JSON, from a newer schema, or damaged."""
    path = Path(path)
    try:
        raw = printable(files.document(path, SIZE_LIMIT))
    except files.Unreadable as error:
        raise ResultError(str(error)) from error
    if not isinstance(raw, dict) or raw.get("kind") != "ferryman-fingerprint":
        raise ResultError(f"{path} is not a fingerprint: its kind is not 'ferryman-fingerprint'")
    version = raw.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or not 1 <= version <= SCHEMA_VERSION:
        raise ResultError(
            f"{path} has schema version {shown(repr(version))}; this Ferryman reads 1 to {SCHEMA_VERSION}. "
            "Upgrade ferryman"
        )
    try:
        return Fingerprint.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = shown(".".join(map(str, first["loc"])))
        raise ResultError(f"{path} is damaged: {place}: {first['msg']} ({error.error_count()} errors)") from error
