"""What a replay says: one versioned JSON, beside the result document of the machine that replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from ferryman import files
from ferryman.errors import ResultError, shown
from ferryman.porting.capsule.contents import Machine
from ferryman.porting.judging.printable import printable
from ferryman.porting.judging.results import Cell, Name, Results, Verdict, WorstElement, parse

SCHEMA_VERSION = 1
KIND = "ferryman-replay"
Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
Explanation = Literal[
    "equal",
    "both within bounds",
    "A's declared class explains it",
    "B's declared class explains it",
    "both declared classes explain it",
    "A is wrong",
    "B is wrong",
    "both are wrong",
    "A did not run",
    "B did not run",
    "neither ran",
    "not judged",
]
WRONG: tuple[Explanation, ...] = ("both are wrong", "A is wrong", "B is wrong")
AGREE: tuple[Explanation, ...] = (
    "equal",
    "both within bounds",
    "A's declared class explains it",
    "B's declared class explains it",
    "both declared classes explain it",
)
# From the worst that a row of cells can say to the best.
ORDER: tuple[Explanation, ...] = (*WRONG, "not judged", "neither ran", "A did not run", "B did not run", *AGREE[::-1])


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", frozen=True)


class Side(_Model):
    """One machine's part in a cell. ``ratio`` is its worst error in units of its bound, on the elements that could be
    judged here; ``plain`` the same without what its declared class and roundings add to the bound."""

    verdict: Verdict
    ratio: float | None = None
    plain: float | None = None
    worst: WorstElement | None = None
    hash: Hash | None = None
    declared: str = "fp32"
    reason: str | None = None


class Explained(_Model):
    """A against B in one cell. ``judged`` of A's ``elements`` were stored, and judged again here."""

    op: Name
    implementation: Name
    dtype: Name
    case: str
    explanation: Explanation
    detail: str | None = None
    judged: int = 0
    elements: int = 0
    a: Side
    b: Side


class Replay(_Model):
    """``recorded`` is A's result document as the capsule holds it, ``replayed`` B's, by the same engine, now."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-replay"] = "ferryman-replay"
    capsule: Hash
    name: str
    size: int
    machine: Machine
    recorded: Results
    replayed: Results
    explained: Annotated[list[Explained], FailFast()]


def failed(document: Replay) -> bool:
    """Whether ``ferryman replay`` exits with 1: someone is wrong, or inputs could not be trusted, or nothing ran."""
    if any(e.explanation in WRONG or e.explanation == "not judged" for e in document.explained):
        return True
    bad = any(c.verdict in ("FAIL", "MISTRUSTED") for c in document.replayed.cells)
    return bad or not any(e.explanation in AGREE or e.judged for e in document.explained)


def load(path: str | Path) -> Replay | Results:
    """A replay or a result document from a file. Raises ResultError naming what is wrong."""
    path = Path(path)
    try:
        document = files.document(path)
    except files.Unreadable as error:
        raise ResultError(str(error)) from error
    if isinstance(document, dict) and document.get("kind") == KIND:
        return _replay(document, str(path))
    return parse(document, str(path))


def _replay(raw: dict[str, Any], where: str) -> Replay:
    version = raw.get("schema_version")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ResultError(
            f"{where}: schema_version is {shown(repr(version))}; required: an integer from 1 to {SCHEMA_VERSION}"
        )
    if version > SCHEMA_VERSION:
        raise ResultError(
            f"{where} has schema version {version}; this Ferryman reads up to {SCHEMA_VERSION}. Upgrade ferryman"
        )
    for part in ("recorded", "replayed"):
        parse(raw.get(part), f"{where}: {part}")
    try:
        document = Replay.model_validate(printable(raw))
    except ValidationError as error:
        first = error.errors()[0]
        place = shown(".".join(map(str, first["loc"])))
        raise ResultError(f"{where} is damaged: {place}: {first['msg']} ({error.error_count()} errors)") from error

    fault = _contradiction(document)
    if fault is not None:
        raise ResultError(f"{where} is damaged: {fault}")
    return document


def _contradiction(document: Replay) -> str | None:
    """Where what is explained is not what the two result documents hold."""
    explained = {(e.op, e.implementation, e.dtype, e.case): e for e in document.explained}
    if len(explained) != len(document.explained):
        return "a case is explained twice"
    for who, results in (("a", document.recorded), ("b", document.replayed)):
        for cell in results.cells:
            side = explained.get((cell.op, cell.implementation, cell.dtype, cell.case))
            ran = cell.verdict in ("PASS", "FAIL")
            place = f"{cell.op} {cell.implementation} {cell.dtype} {cell.case}"
            if side is None and ran and (who == "b" or _asked(document, cell)):
                return f"{place} is {cell.verdict} for {who.upper()}, and nothing explains it"
            if side is not None and ran and getattr(side, who).verdict != cell.verdict:
                return f"{place} is {cell.verdict} for {who.upper()}, and explained as {getattr(side, who).verdict}"
    return None


def _asked(document: Replay, cell: Cell) -> bool:
    """Whether B was asked for this cell of A's: a replay may take some ops and implementations only."""
    return any((c.op, c.implementation) == (cell.op, cell.implementation) for c in document.replayed.cells)


def _refused(token: str) -> float:
    raise ValueError(f"{token} is not JSON")
