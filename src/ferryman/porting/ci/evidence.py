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
from typing import Any, NamedTuple

from pydantic import ValidationError

from ferryman.errors import ResultError
from ferryman.porting.bench import document as benchmarks
from ferryman.porting.ci import commands
from ferryman.porting.ci import record as records
from ferryman.porting.ci.junit import junit
from ferryman.porting.ci.record import Case, Record
from ferryman.porting.judging import results
from ferryman.porting.judging.printable import printable
from ferryman.porting.judging.results import Cell, Environment, Results, Verdict

FILES_MOST = 10_000
ARCHIVES = (".zip", ".tar", ".tgz", ".gz", ".bz2", ".xz", ".zst", ".7z")
SIGNATURE = ".sig"
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
    facts: Environment | None = None  # of its result document or its benchmark
    shown: set[str] = field(default_factory=set)  # SHA-256 of each file that says what became of its cases
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
    runs: list[Evidence] = []
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
        runs.append(one)
    for path in files:
        if path not in used and path.suffix.lower() in (".json", ".xml", *ARCHIVES):
            problems += _alone(path)
    return runs, problems


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
            linked = [name for name in folders if Path(folder, name).is_symlink()]
            for name in sorted([*names, *linked]):
                path = Path(folder, name)
                count += 1
                if count > FILES_MOST:
                    problems.append(
                        Problem(_shown(place), "unreadable", f"more than {FILES_MOST} files; the rest is left")
                    )
                    return
                if not path.is_symlink():
                    yield path
                elif name in linked or path.suffix.lower() in (".json", ".xml"):
                    problems.append(Problem(_shown(path), "alone", "a link, which is not followed: copy what it names"))


def _shown(path: Path) -> str:
    return "/".join(path.parts[-3:])


def _evidence(path: Path) -> Evidence:
    record = records.parse(records.read_json(path, records.SIZE_LIMIT), _shown(path))
    signature = path.with_name(path.name + SIGNATURE)
    one = Evidence(
        _shown(path),
        record,
        hashlib.sha256(path.read_bytes()).hexdigest(),
        path=path,
        signature=signature if signature.is_file() and not signature.is_symlink() else None,
    )
    said = False
    for name, wanted in record.files.items():
        file = path.parent / name
        if file.is_symlink() or not file.is_file():
            one.problems.append(Problem(_shown(file), "unreadable", "the record names it, and it is not there"))
            continue
        if _sha256(file) != wanted:
            one.problems.append(Problem(_shown(file), "altered", "its SHA-256 is not the one that the record has"))
            continue
        try:
            shows = False
            if name == commands.TESTS:
                shows = _tests(one, file)
            elif name.endswith(".json"):
                shows = _json(one, file)
            elif name.endswith(".xml") and not record.cases:
                cases, fault = junit(file)
                one.items += [_item(case, record) for case in cases]
                one.problems += [] if fault is None else [Problem(_shown(file), "contradictory", fault)]
                shows = True
        except ResultError as error:
            one.problems.append(Problem(_shown(file), "unreadable", str(error)))
            continue
        said = said or shows
        if shows or name == commands.JUNIT:
            one.shown.add(wanted)
    if record.cases:
        one.items += [_item(case, record) for case in record.cases]
    elif not said and not one.problems:
        one.problems.append(Problem(one.file, "empty", "the run wrote no result that says what became of its cases"))
    return one


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _tests(one: Evidence, file: Path) -> bool:
    """What the pytest plugin wrote, of which the record is a copy."""
    raw, record = records.read_json(file, records.SIZE_LIMIT), one.record
    try:
        report = printable(raw)
        cases = [Case.model_validate(case) for case in report["cases"]]
        same = (cases, report["collected"], report["launches"]) == (record.cases, record.collected, record.launches)
    except (KeyError, TypeError, ValidationError) as error:
        raise ResultError(f"{file.name} is not what the pytest plugin writes: {str(error)[:200]}") from error
    if not same:
        one.problems.append(Problem(_shown(file), "contradictory", "the record has other cases than the plugin wrote"))
    return True


def _benchmark(one: Evidence, file: Path) -> None:
    benchmark = benchmarks.load(file)
    one.facts = benchmark.environment
    if not any(times.trials for cell in benchmark.cells for times in cell.times):
        one.problems.append(Problem(_shown(file), "empty", "nothing was timed"))
    if benchmark.left:
        one.problems.append(Problem(_shown(file), "partial", f"{benchmark.left} cells were not timed"))


def _regressions(one: Evidence, file: Path) -> None:
    """perf.json against the exit code that follows from it."""
    raw: Any = records.read_json(file, records.SIZE_LIMIT)
    changes = raw.get("changes", []) if isinstance(raw, dict) else []
    worse = [c for c in changes if isinstance(c, dict) and c.get("verdict") in ("slower", "no longer timed")]
    if worse and one.record.exit_code == 0:
        text = f"{len(worse)} times became worse, and the run ended with 0"
        one.problems.append(Problem(_shown(file), "contradictory", text))


def _json(one: Evidence, file: Path) -> bool:
    """Reads a result document or a benchmark of the run; other files stay what they are."""
    with file.open("rb") as opened:
        head = opened.read(4096)
    if f'"{benchmarks.KIND}"'.encode() in head:
        _benchmark(one, file)
        return True
    if file.name == commands.PERF:
        _regressions(one, file)
    if b'"ferryman-results"' not in head:
        return False
    document = results.load(file)
    one.items += [
        Item(results.cell_id(cell), cell.op, cell.verdict, (cell.reason or "")[:600], None) for cell in document.cells
    ]
    for cell in document.cells:
        fault = _overruled(cell) or _elsewhere(cell, document.environment)
        if fault:
            text = f"{results.cell_id(cell)} is {cell.verdict}, and {fault}"
            one.problems.append(Problem(_shown(file), "contradictory", text))
            break
    one.document = document.model_copy(update={"cells": [], "summary": [], "timings": []})
    one.facts = document.environment
    return True


def _overruled(cell: Cell) -> str | None:
    """Why a cell's own gates and numbers do not allow its verdict; None where they do."""
    if cell.verdict not in ("PASS", "SIMULATED"):
        return None
    for name, gate in cell.gates.items():
        if gate.outcome == "fail":
            return f"its gate {name} does not hold"
    if not any(gate.outcome == "pass" for gate in cell.gates.values()):
        return "no gate holds it to that"
    if cell.ratio is not None and not cell.ratio <= 1:
        return f"its worst error is {cell.ratio:g} bounds"
    return None


def _elsewhere(cell: Cell, facts: Environment) -> str | None:
    """Whether a cell ran on another device than its document; what a check leaves to the CPU did not pass."""
    here, wanted = cell.device.partition(":")[0], facts.device.partition(":")[0]
    return f"it ran on {cell.device}, its document on {facts.device}" if here != wanted else None


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


def _item(case: Case, record: Record) -> Item:
    """A test as a case of its row: what passed is worth what the row's way of running is worth."""
    verdict = _VERDICTS[case.outcome]
    reason = "" if case.outcome == "passed" else f"{case.outcome}: {case.reason}" if case.reason else case.outcome
    if verdict == "PASS":
        if record.device.kind == "compile":
            verdict = "COMPILED_ONLY"
        elif record.interpreted:
            verdict = "SIMULATED"
    return Item(case.id, case.id.split("::")[0], verdict, reason[:600], case.launches)


def _alone(path: Path) -> list[Problem]:
    """What a file is that no record names."""
    if path.suffix.lower() in ARCHIVES:
        return [Problem(_shown(path), "alone", "an archive, which is not opened: unpack it before")]
    if path.suffix.lower() == ".xml":
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
    if records.KIND.encode() in head:
        return [Problem(_shown(path), "unreadable", f"it is called {path.name}, which no record names")]
    return []


def counts(items: Sequence[Item]) -> dict[Verdict, int]:
    by_verdict: dict[Verdict, int] = dict(sorted(Counter(item.verdict for item in items).items()))
    return by_verdict
