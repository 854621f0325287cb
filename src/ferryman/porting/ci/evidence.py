"""What jobs brought back: records with the files that they name, found in folders, each read once and checked.

Nothing is dropped silently: a file that cannot be read, or that no record names, is a Problem, which the gate shows.
"""

from __future__ import annotations

import gc
import hashlib
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from xml.etree import ElementTree

from ferryman.errors import ResultError
from ferryman.porting.ci import record as records
from ferryman.porting.ci.record import Case, Record
from ferryman.porting.judging import results
from ferryman.porting.judging.results import Cell, Results, Verdict

FILES_MOST = 10_000
XML_LIMIT = 64 * 2**20
SIGNATURE = ".sig"
_KINDS = ("ferryman-results", records.KIND)
BAD_MOST = 400  # cases that are named one by one


@dataclass(frozen=True)
class Problem:
    """Something among the results that is no evidence. ``code`` is one of judge.REASONS."""

    file: str
    code: str
    text: str


class Item(NamedTuple):
    """One case of a row: its id, the op (or the test's file) that it counts for, and what became of it."""

    id: str
    op: str
    verdict: Verdict
    reason: str = ""
    launches: int | None = None


@dataclass
class Evidence:
    """One run of one row. ``sha256``: of the record. ``items``: every case that was found, also what was left out."""

    file: str
    record: Record
    sha256: str
    items: list[Item] = field(default_factory=list)
    document: Results | None = None  # without its cells, which are the items
    problems: list[Problem] = field(default_factory=list)
    signature: Path | None = None
    path: Path | None = None


@contextmanager
def uncollected() -> Iterator[None]:
    """Without the cyclic garbage collector: a document's 100,000 objects have no cycles, and looking for some took half
    of the time."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


def collect(places: Sequence[Path]) -> tuple[list[Evidence], list[Problem]]:
    """Everything below folders and files, in the order of their names."""
    with uncollected():
        return _collect(places)


def _collect(places: Sequence[Path]) -> tuple[list[Evidence], list[Problem]]:
    found: list[Evidence] = []
    problems: list[Problem] = []
    used: set[Path] = set()
    files = list(_files(places, problems))
    for path in files:
        if path.name != records.NAME:
            continue
        try:
            one = _evidence(path)
        except ResultError as error:
            problems.append(Problem(_shown(path), "unreadable", str(error)))
            used |= {f for f in files if f.parent == path.parent}
            continue
        used |= {path, *(path.parent / name for name in one.record.files)}
        found.append(one)
    for path in files:
        if path not in used and path.suffix in (".json", ".xml"):
            problems += _alone(path)
    return found, problems


def _files(places: Sequence[Path], problems: list[Problem]) -> Iterator[Path]:
    count = 0
    for place in places:
        if not place.exists():
            problems.append(Problem(_shown(place), "unreadable", "it is not there"))
            continue
        if place.is_file():
            yield place
            continue
        for folder, folders, names in os.walk(place):  # follows no links
            folders.sort()
            for name in sorted(names):
                path = Path(folder, name)
                count += 1
                if count > FILES_MOST:
                    problems.append(
                        Problem(_shown(place), "unreadable", f"more than {FILES_MOST} files; the rest is left")
                    )
                    return
                if not path.is_symlink():
                    yield path


def _shown(path: Path) -> str:
    return "/".join(path.parts[-3:])


def _evidence(path: Path) -> Evidence:
    made = records.parse(records.read_json(path, records.SIZE_LIMIT), _shown(path))
    signature = path.with_name(path.name + SIGNATURE)
    one = Evidence(
        _shown(path),
        made,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        path=path,
        signature=signature if signature.is_file() and not signature.is_symlink() else None,
    )
    said = False
    for name, wanted in made.files.items():
        file = path.parent / name
        if file.is_symlink() or not file.is_file():
            one.problems.append(Problem(_shown(file), "unreadable", "the record names it, and it is not there"))
            continue
        if _sha256(file) != wanted:
            one.problems.append(Problem(_shown(file), "altered", "its SHA-256 is not the one that the record has"))
            continue
        try:
            if name.endswith(".json"):
                said = _json(one, file) or said
            elif name.endswith(".xml") and not made.cases:
                one.items += [_item(case, made) for case in junit(file)]
                said = True
        except ResultError as error:
            one.problems.append(Problem(_shown(file), "unreadable", str(error)))
    if made.cases:
        one.items += [_item(case, made) for case in made.cases]
    elif not said and not one.problems:
        one.problems.append(Problem(one.file, "empty", "the run wrote no result that says what became of its cases"))
    return one


def _sha256(path: Path) -> str:
    found = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            found.update(block)
    return found.hexdigest()


def _json(one: Evidence, file: Path) -> bool:
    """Reads a result document of the run; others (a benchmark) stay what they are."""
    with file.open("rb") as opened:
        head = opened.read(4096)
    if b'"ferryman-results"' not in head:
        return False
    document = results.load(file)
    one.items += [
        Item(results.cell_id(cell), cell.op, cell.verdict, (cell.reason or "")[:600], None) for cell in document.cells
    ]
    for cell in document.cells:
        fault = _overruled(cell)
        if fault:
            text = f"{results.cell_id(cell)} is {cell.verdict}, and {fault}"
            one.problems.append(Problem(_shown(file), "contradictory", text))
            break
    one.document = document.model_copy(update={"cells": [], "summary": [], "timings": []})
    return True


def _overruled(cell: Cell) -> str | None:
    """Why a cell's own gates and numbers do not allow its verdict; None where they do."""
    if cell.verdict not in ("PASS", "SIMULATED"):
        return None
    for name, gate in cell.gates.items():
        if gate.outcome == "fail":
            return f"its gate {name} does not hold"
    if cell.ratio is not None and not cell.ratio <= 1:
        return f"its worst error is {cell.ratio:g} bounds"
    return None


_VERDICTS: dict[str, Verdict] = {
    "passed": "PASS",
    "failed": "FAIL",
    "error": "FAIL",
    "rerun": "MISTRUSTED",
    "lost": "NOT_RUN",
    "skipped": "NOT_RUN",
    "xfailed": "NOT_RUN",
    "xpassed": "NOT_RUN",
    "deselected": "NOT_RUN",
}


def _item(case: Case, made: Record) -> Item:
    """A test as a case of its row: what passed is worth what the row's way of running is worth."""
    verdict = _VERDICTS[case.outcome]
    reason = "" if case.outcome == "passed" else f"{case.outcome}: {case.reason}" if case.reason else case.outcome
    if verdict == "PASS":
        if made.device.kind == "compile":
            verdict = "COMPILED_ONLY"
        elif made.interpreted:
            verdict = "SIMULATED"
    return Item(case.id, case.id.split("::")[0], verdict, reason[:600], case.launches)


def _alone(path: Path) -> list[Problem]:
    """What a file is that no record names."""
    if path.suffix == ".xml":
        return [Problem(_shown(path), "alone", "a JUnit file without the record that ferryman ci run writes: NOT_RUN")]
    try:
        with path.open("rb") as file:
            head = file.read(4096)
    except OSError as error:
        return [Problem(_shown(path), "unreadable", str(error.strerror))]
    if b'"ferryman-results"' in head:
        return [
            Problem(_shown(path), "alone", "a result document without the record that ferryman ci run writes: NOT_RUN")
        ]
    if records.KIND.encode() in head or b"schema_version" in head:
        return [Problem(_shown(path), "unreadable", f"it is called {path.name}, which no record names")]
    return []


def junit(path: Path) -> list[Case]:
    """The cases of a JUnit file, by "classname::name". Raises ResultError: too large, no XML, declarations in it."""
    if path.stat().st_size > XML_LIMIT:
        raise ResultError(f"{path.name} is {path.stat().st_size} bytes; required: at most {XML_LIMIT}")
    data = path.read_bytes()
    if b"<!DOCTYPE" in data or b"<!ENTITY" in data:
        raise ResultError(f"{path.name} declares a document type or entities; a JUnit file needs neither")
    try:
        root = ElementTree.fromstring(data)
    except ElementTree.ParseError as error:
        raise ResultError(f"{path.name} is not XML: {error}") from error
    if root.tag not in ("testsuites", "testsuite"):
        raise ResultError(f"{path.name} is not JUnit: its root is {root.tag[:40]!r}")
    return [_junit_case(node) for node in root.iter("testcase")]


def _junit_case(node: ElementTree.Element) -> Case:
    name = results.printable("::".join(p for p in (node.get("classname"), node.get("name")) if p))[:2000]
    told: dict[str, ElementTree.Element] = {child.tag: child for child in node}
    for tag, outcome in (
        ("error", "error"),
        ("failure", "failed"),
        ("rerunFailure", "rerun"),
        ("flakyFailure", "rerun"),
    ):
        if tag in told:
            return Case.model_validate({"id": name, "outcome": outcome, "reason": _message(told[tag])})
    if "skipped" in told:
        kind = "xfailed" if (told["skipped"].get("type") or "").endswith("xfail") else "skipped"
        return Case.model_validate({"id": name, "outcome": kind, "reason": _message(told["skipped"])})
    if node.get("status") in ("notrun", "disabled") or node.get("result") in ("suppressed", "skipped"):
        return Case(id=name, outcome="skipped", reason="the runner left it out")
    return Case(id=name, outcome="passed")


def _message(node: ElementTree.Element) -> str:
    return str(results.printable(node.get("message") or (node.text or "").strip()))[:600]


def counts(items: Sequence[Item]) -> dict[Verdict, int]:
    found: dict[Verdict, int] = dict(sorted(Counter(item.verdict for item in items).items()))
    return found
