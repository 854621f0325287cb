"""Results of several machines side by side: who is right, what differences come from, and how far each is from its own
roofline. Nobody is judged against another: each side's verdicts are against the oracle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from ferryman import files
from ferryman.errors import ResultError
from ferryman.porting.capsule import container
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule.replay_results import Replay, Side
from ferryman.porting.capsule.replay_results import load as load_document
from ferryman.porting.capsule.run import ALL, output_hash
from ferryman.porting.judging.results import Name, Results, Timing, Verdict, row_verdict

SCHEMA_VERSION = 1
MOST_SIDES = 16
Meaning = Literal["wrong", "not judged", "did not run", "a declared class explains it", "all within bounds", "equal"]
# From the worst that one row can say.
ORDER: tuple[Meaning, ...] = (
    "wrong",
    "not judged",
    "a declared class explains it",
    "all within bounds",
    "equal",
    "did not run",
)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings", frozen=True)


class Source(_Model):
    """One side: a machine, by one document. ``role``: what `check` found, what a capsule recorded, what replayed it."""

    label: str
    file: str
    role: Literal["checked", "recorded", "replayed"]
    device_name: str
    profile: str
    arch: str
    vendor: str
    torch: str
    time: str
    seed: int
    capsule: str | None = None


class Part(_Model):
    """One side in one row. Nothing that did not run is ever PASS."""

    verdict: Verdict
    cells: int = 0
    ran: int = 0
    ratio: float | None = None
    declared: str | None = None
    seconds: float | None = None
    percent_of_roofline: float | None = None
    bound_by: str | None = None
    clock: str | None = None
    reason: str | None = None


class RowCompared(_Model):
    """One op x implementation x dtype over all sides. ``who``: the labels that the explanation is about; ``cases``: how
    many cases say what; ``common``: how many ran on every side."""

    op: Name
    implementation: Name
    dtype: Name
    sides: list[Part]
    explanation: Meaning
    who: list[str] = []
    detail: str | None = None
    cases: dict[Meaning, int] = {}
    common: int = 0


class Comparison(_Model):
    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-compare"] = "ferryman-compare"
    sides: list[Source] = Field(min_length=2, max_length=MOST_SIDES)
    rows: list[RowCompared]
    notes: list[str] = []


@dataclass
class _Evidence:
    """What one side says, cell by cell."""

    source: Source
    cells: dict[tuple[str, str, str], dict[str, Side]] = field(default_factory=dict)
    timings: dict[tuple[str, str, str], Timing] = field(default_factory=dict)

    def add(self, key: tuple[str, str, str], case: str, side: Side) -> None:
        self.cells.setdefault(key, {})[case] = side


def compare(paths: Sequence[str | Path]) -> Comparison:
    """Result documents, replays and capsules, in any mixture. A replay brings both of its sides.

    Raises ResultError or CapsuleError for a file that cannot be read, and ResultError for fewer than two sides.
    """
    evidence: list[_Evidence] = []
    for path in paths:
        evidence += _sides(Path(path))
    sides = _merged(evidence)
    if not 2 <= len(sides) <= MOST_SIDES:
        raise ResultError(f"{len(sides)} machines to compare; required: 2 to {MOST_SIDES} documents of different runs")
    for letter, side in zip("ABCDEFGHIJKLMNOP", sides, strict=False):
        side.source = side.source.model_copy(update={"label": letter})
    keys = dict.fromkeys(key for side in sides for key in side.cells)
    rows = [_row(key, sides) for key in keys]
    return Comparison(sides=[side.source for side in sides], rows=rows, notes=_notes(sides))


def failed(document: Comparison) -> bool:
    """Whether ``ferryman compare`` exits with 1: someone is wrong, or is not to be trusted, or nobody ran anything."""
    if any(row.explanation in ("wrong", "not judged") for row in document.rows):
        return True
    return not any(part.ran for row in document.rows for part in row.sides)


def _sides(path: Path) -> list[_Evidence]:
    """A capsule's first eight bytes are a length, whose last ones are zero; JSON has no zero byte."""
    try:
        start = files.read(path, container.SIZE_LIMIT)[:8]
    except OSError as error:
        raise ResultError(f"{path} cannot be read: {error.strerror}") from error
    if b"\0" in start:
        return [_of_capsule(capsule.load(path), path)]
    document = load_document(path)
    if isinstance(document, Results):
        side = _Evidence(_source(document, path, "checked"))
        for cell in document.cells:
            side.add(
                (cell.op, cell.implementation, cell.dtype),
                cell.case,
                Side(
                    verdict=cell.verdict,
                    ratio=cell.ratio,
                    declared=_declared(cell.accumulation, cell.roundings),
                    reason=cell.reason,
                ),
            )
        side.timings = _timings(document)
        return [side]
    return _of_replay(document, path)


def _of_capsule(recording: capsule.Capsule, path: Path) -> _Evidence:
    side = _Evidence(
        _source(recording.results, path, "recorded", recording.sha256), timings=_timings(recording.results)
    )
    runs = {run.cell: output_hash([o.hash for o in run.outputs]) for run in recording.manifest.runs}
    for index, cell in enumerate(recording.results.cells):
        side.add(
            (cell.op, cell.implementation, cell.dtype),
            cell.case,
            Side(
                verdict=cell.verdict,
                ratio=cell.ratio,
                declared=_declared(cell.accumulation, cell.roundings),
                reason=cell.reason,
                hash=runs.get(index),
            ),
        )
    return side


def _of_replay(document: Replay, path: Path) -> list[_Evidence]:
    a = _Evidence(_source(document.recorded, path, "recorded", document.capsule), timings=_timings(document.recorded))
    b = _Evidence(_source(document.replayed, path, "replayed", document.capsule), timings=_timings(document.replayed))
    for each in document.explained:
        key = (each.op, each.implementation, each.dtype)
        # A's verdict is what B's oracle makes of its outputs, whatever A wrote
        wrong = each.explanation in ("A is wrong", "both are wrong")
        a.add(key, each.case, each.a.model_copy(update={"verdict": "FAIL"}) if wrong else each.a)
        b.add(key, each.case, each.b)
    return [a, b]


def _source(
    document: Results, path: Path, role: Literal["checked", "recorded", "replayed"], sha256: str | None = None
) -> Source:
    facts = document.environment
    return Source(
        label="",
        file=path.name,
        role=role,
        device_name=facts.device_name or facts.device,
        profile=facts.profile,
        arch=facts.arch,
        vendor=facts.vendor,
        torch=facts.versions.get("torch", "unknown"),
        time=facts.time,
        seed=facts.seed,
        capsule=sha256,
    )


def _declared(accumulation: str, roundings: Iterable[str]) -> str:
    rounded = ", ".join(sorted(roundings))
    return f"{accumulation} with {rounded} rounded" if rounded else accumulation


def _timings(document: Results) -> dict[tuple[str, str, str], Timing]:
    return {(t.op, t.implementation, t.dtype): t for t in document.timings}


def _merged(evidence: list[_Evidence]) -> list[_Evidence]:
    """Each machine's recording once: several replays bring the same one. What a replay judged anew is worth more."""
    sides: list[_Evidence] = []
    recorded: dict[str, _Evidence] = {}
    for side in evidence:
        sha256 = side.source.capsule
        if side.source.role != "recorded" or sha256 is None:
            sides.append(side)
        elif sha256 not in recorded:
            recorded[sha256] = side
            sides.append(side)
        else:
            for key, cells in side.cells.items():
                for case, cell in cells.items():
                    known = recorded[sha256].cells.setdefault(key, {}).get(case)
                    if known is None or (
                        known.verdict != "FAIL" and (cell.plain is not None or cell.verdict == "FAIL")
                    ):
                        recorded[sha256].cells[key][case] = cell
    return sides


def _row(key: tuple[str, str, str], sides: list[_Evidence]) -> RowCompared:
    cases = list(dict.fromkeys(case for side in sides for case in side.cells.get(key, {})))
    cases = [case for case in cases if case != ALL] or cases  # a cell for all cases stands for each of them below
    meanings: Counter[Meaning] = Counter()
    first: dict[Meaning, tuple[list[str], str | None]] = {}
    common = 0
    for case in cases:
        mine = {side.source.label: side.cells.get(key, {}) for side in sides}
        cells = {label: known.get(case) or known.get(ALL) for label, known in mine.items()}
        meaning, who, detail = _meaning(cells)
        common += all(cell is not None and cell.verdict == "PASS" for cell in cells.values())
        meanings[meaning] += 1
        known = first.setdefault(meaning, ([], f"{case}: {detail}" if detail else None))
        known[0].extend(label for label in who if label not in known[0])
    meaning = next(m for m in ORDER if meanings[m] or m == "did not run")
    who, detail = first.get(meaning, ([], None))
    parts = [_part(key, side) for side in sides]
    if meaning == "did not run":
        idle = [p.source.label for p, part in zip(sides, parts, strict=True) if not part.ran]
        who = idle or who
    return RowCompared(
        op=key[0],
        implementation=key[1],
        dtype=key[2],
        sides=parts,
        explanation=meaning,
        who=sorted(who),
        detail=detail,
        cases=dict(meanings),
        common=common,
    )


def _meaning(cells: dict[str, Side | None]) -> tuple[Meaning, list[str], str | None]:
    """What one case says, whom it is about, and the reason of the first of them."""
    there = {label: cell for label, cell in cells.items() if cell is not None}

    def those(*verdicts: str) -> list[str]:
        return [label for label, cell in there.items() if cell.verdict in verdicts]

    wrong = those("FAIL")
    if wrong:
        return "wrong", wrong, "; ".join(f"{label}: {there[label].reason}" for label in wrong)
    unsure = those("MISTRUSTED", "QUARANTINED")
    if unsure:
        return "not judged", unsure, f"{unsure[0]}: {there[unsure[0]].reason}"
    idle = [label for label in cells if label not in those("PASS")]
    if idle:
        cell = there.get(idle[0])
        why = "not in its document" if cell is None else f"{cell.verdict}{f', {cell.reason}' if cell.reason else ''}"
        return "did not run", idle, f"{idle[0]}: {why}"
    hashes = {cell.hash for cell in there.values()}
    if len(hashes) == 1 and None not in hashes:
        return "equal", [], None
    if len(hashes - {None}) < 2:  # nothing shows that they differ
        return "all within bounds", [], None
    beyond = [label for label, cell in there.items() if cell.plain is not None and cell.plain > 1]
    if beyond:
        text = "; ".join(
            f"{label} declares {there[label].declared}: {there[label].plain:.3g} bounds without" for label in beyond
        )
        return "a declared class explains it", beyond, text
    return "all within bounds", [], None


def _part(key: tuple[str, str, str], side: _Evidence) -> Part:
    cells = side.cells.get(key, {})
    if not cells:
        return Part(verdict="NOT_RUN", reason="not in its document")
    counts: dict[Verdict, int] = dict(Counter(cell.verdict for cell in cells.values()))
    verdict = row_verdict(counts)
    ratios = [cell.ratio for cell in cells.values() if cell.ratio is not None]
    time = side.timings.get(key)
    return Part(
        verdict=verdict,
        cells=len(cells),
        ran=counts.get("PASS", 0) + counts.get("FAIL", 0),
        ratio=max(ratios, default=None),
        declared=next((c.declared for c in cells.values()), None),
        seconds=time.seconds if time else None,
        percent_of_roofline=time.percent_of_roofline if time else None,
        bound_by=time.bound_by if time else None,
        clock=time.clock if time else None,
        reason=next((c.reason for c in cells.values() if c.verdict == verdict and c.reason), None),
    )


def _notes(sides: list[_Evidence]) -> list[str]:
    capsules = {side.source.capsule for side in sides}
    notes = []
    if len(capsules) == 1 and None not in capsules:
        notes.append("every side had the inputs of one capsule, proven by hash")
    elif len({side.source.seed for side in sides}) == 1:
        notes.append("inputs are those of one seed, made by each side from counters; only a capsule proves it by hash")
    else:
        notes.append("the seeds differ: each side is judged against the oracle of its own inputs")
    if all(side.source.vendor == sides[0].source.vendor for side in sides):
        notes.append(f"every side is of one vendor ({sides[0].source.vendor})")
    return notes
