"""What the HTML report shows, worked out from a result document: tables of words and numbers, no markup."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ferryman.porting.judging.results import Cell, GateName, Results, Row, Timing, Verdict, number
from ferryman.porting.report.text import (
    ABSENT,
    GATES,
    MEANING,
    WRONG,
    away,
    distance,
    failed_gates,
    place,
    seconds,
    short,
)

FAILURES_SHOWN = 200  # failed cells listed for one op x implementation
CELLS_SHOWN = 6_000  # cells that passed or were simulated, all ops together: about 250 bytes each
NOTES_SHOWN = 100
GROUPS_SHOWN = 100


class Notes:
    """Reasons, each said once and referred to by its number; beyond ``NOTES_SHOWN`` by none."""

    def __init__(self) -> None:
        self.texts: dict[str, int] = {}
        self.left_out: set[str] = set()

    def number(self, text: str) -> int | None:
        if text not in self.texts:
            if len(self.texts) >= NOTES_SHOWN:
                self.left_out.add(text)
                return None
            self.texts[text] = len(self.texts) + 1
        return self.texts[text]


@dataclass(frozen=True)
class Entry:
    """One op x implementation of the overview."""

    verdict: Verdict
    counts: str
    ratio: str
    link: str


@dataclass(frozen=True)
class Overview:
    implementations: list[str]
    rows: list[tuple[str, list[Entry | None]]]


@dataclass
class GateEntry:
    """One gate over the cells of one op x implementation that ran."""

    passed: int = 0
    failed: int = 0
    inapplicable: int = 0
    notes: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class GateRow:
    op: str
    implementation: str
    verdict: Verdict
    declared: str
    ran: int
    cells: int
    entries: list[GateEntry]
    reason: str | None


@dataclass(frozen=True)
class WrongCell:
    verdict: Verdict
    case: str
    dtype: str
    gates: Sequence[tuple[str, str, str]]  # (name, title, reason)
    reason: str | None  # where no gate says it
    place: str
    value: str
    expected: str
    bound: str
    away: str
    further: str  # the reading, and the gates that speak of more than the worst element


@dataclass(frozen=True)
class Group:
    """The wrong cells of one op x implementation, the worst first."""

    op: str
    implementation: str
    verdict: Verdict
    declared: str
    wrong: int
    total: int
    gates: list[tuple[str, int]]
    readings: list[tuple[str, int]]
    example: WrongCell
    cells: list[WrongCell]
    further: bool  # whether some cell has more to say than its element
    link: str


@dataclass(frozen=True)
class Missing:
    verdict: Verdict
    reason: str
    implementations: str
    ops: str
    dtypes: str
    cells: int


@dataclass(frozen=True)
class Line:
    """A cell that is not wrong, in the list of every cell."""

    implementation: str
    case: str
    dtype: str
    verdict: Verdict
    ratio: str
    noise: str
    gates: str
    notes: list[int]
    reduction: str
    seconds: str


@dataclass(frozen=True)
class Listing:
    op: str
    lines: list[Line]
    total: int


@dataclass(frozen=True)
class TimingRow:
    op: str
    implementation: str
    dtype: str
    case: str
    seconds: str
    floor: str
    percent: float | None
    bound_by: str
    clock: str


def link(op: str, implementation: str = "") -> str:
    """A fragment: names have no characters that an id or a URL would have to escape but ":", which both allow."""
    return f"{op}--{implementation}" if implementation else f"op--{op}"


def gates_of(document: Results) -> tuple[list[GateName], list[GateName]]:
    """(the gates that some cell has, those that none has)."""
    seen = {name for cell in document.cells for name in cell.gates}
    return [g for g in GATES if g in seen], [g for g in GATES if g not in seen]


def counted(counts: dict[Verdict, int]) -> str:
    order = list(MEANING)
    return ", ".join(f"{n:,} {v}" for v, n in sorted(counts.items(), key=lambda item: order.index(item[0])))


def tally(cells: Iterable[Cell]) -> dict[Verdict, int]:
    counts: Counter[Verdict] = Counter(cell.verdict for cell in cells)
    return dict(counts)


def overview(document: Results) -> Overview:
    implementations = list(dict.fromkeys(row.implementation for row in document.summary))
    entries: dict[str, dict[str, Entry]] = {}
    for row in document.summary:
        entries.setdefault(row.op, {})[row.implementation] = Entry(
            row.verdict, counted(row.counts), _worst_ratio(row), link(row.op, row.implementation)
        )
    return Overview(implementations, [(op, [of.get(i) for i in implementations]) for op, of in entries.items()])


def _worst_ratio(row: Row) -> str:
    dtype = max(row.ratio, key=lambda d: row.ratio[d], default=None)
    return "" if dtype is None else f"{number(row.ratio[dtype])} ({short(dtype)})"


def grouped(cells: Iterable[Cell]) -> dict[tuple[str, str], list[Cell]]:
    by_implementation: dict[tuple[str, str], list[Cell]] = {}
    for cell in cells:
        by_implementation.setdefault((cell.op, cell.implementation), []).append(cell)
    return by_implementation


def declared(cells: Sequence[Cell]) -> str:
    """What an implementation declares; it widens its bounds, so it is said."""
    accumulation = ", ".join(sorted({c.accumulation for c in cells}))
    roundings = sorted({r for c in cells for r in c.roundings})
    return accumulation + (f"; rounds {', '.join(roundings)}" if roundings else "")


def gate_rows(document: Results, gates: Sequence[GateName], notes: Notes) -> list[GateRow]:
    cells = grouped(document.cells)
    rows = []
    for row in document.summary:
        mine = cells[row.op, row.implementation]
        judged = [c for c in mine if c.gates]
        entries = [_entry(judged, gate, notes) for gate in gates]
        reason = next((c.reason for c in mine if c.reason), None) if not judged else None
        rows.append(
            GateRow(row.op, row.implementation, row.verdict, declared(mine), len(judged), len(mine), entries, reason)
        )
    return rows


def _entry(cells: Sequence[Cell], gate: GateName, notes: Notes) -> GateEntry:
    entry = GateEntry()
    used: set[int] = set()
    for cell in cells:
        cell_gate = cell.gates.get(gate)
        if cell_gate is None:
            continue
        if cell_gate.outcome == "fail":
            entry.failed += 1
            continue  # the failures have a section of their own
        if cell_gate.outcome == "pass":
            entry.passed += 1
        else:
            entry.inapplicable += 1
        note = notes.number(cell_gate.reason) if cell_gate.reason else None
        if note is not None:
            used.add(note)
    entry.notes = sorted(used)
    return entry


def groups(document: Results) -> tuple[list[Group], int]:
    """(the wrong cells by op x implementation, how many groups are left out)."""
    failures = []
    for (op, implementation), cells in grouped(document.cells).items():
        wrong = sorted((c for c in cells if c.verdict in WRONG), key=_badness)
        if wrong:
            failures.append((op, implementation, cells, wrong))
    shown = [_group(*each) for each in failures[:GROUPS_SHOWN]]
    return shown, len(failures) - len(shown)


def _badness(cell: Cell) -> tuple[int, float]:
    """The order of wrong cells: failures first, those with an element to show before those without, worst first."""
    off = away(cell.worst) if cell.worst is not None else (cell.ratio or 0.0)
    infinite = not math.isfinite(off)
    return WRONG.index(cell.verdict), -(1e300 if infinite else off)


def _group(op: str, implementation: str, cells: Sequence[Cell], wrong: Sequence[Cell]) -> Group:
    gates = Counter(name for cell in wrong for name, _ in failed_gates(cell))
    readings = Counter(cell.reading for cell in wrong if cell.reading)
    kinds = Counter(_kind(cell) for cell in wrong)
    common = max(kinds, key=lambda kind: (kinds[kind], kind[0] is not None))
    alike = [cell for cell in wrong if _kind(cell) == common]
    example = alike[len(alike) // 2]
    shown = [_wrong(c) for c in wrong[:FAILURES_SHOWN]]
    return Group(
        op,
        implementation,
        wrong[0].verdict,
        declared(cells),
        len(wrong),
        len(cells),
        sorted(gates.items()),
        readings.most_common(3),
        _wrong(example),
        shown,
        any(cell.further for cell in shown),
        link(op, implementation),
    )


def _kind(cell: Cell) -> tuple[str | None, Verdict, tuple[str, ...]]:
    """What makes wrong cells alike. The example is the commonest kind's median: the extremes are often odd inputs."""
    return cell.reading, cell.verdict, tuple(name for name, _ in failed_gates(cell))


def _wrong(cell: Cell) -> WrongCell:
    gates = [(name, GATES[name][0], gate.reason or "") for name, gate in failed_gates(cell)]
    worst = cell.worst
    return WrongCell(
        verdict=cell.verdict,
        case=cell.case,
        dtype=short(cell.dtype),
        gates=gates,
        reason=None if gates else cell.reason or MEANING[cell.verdict],
        place="" if worst is None else place(worst),
        value="" if worst is None else f"{worst.value:.9g}",
        expected="" if worst is None else f"{worst.expected:.9g}",
        bound="" if worst is None else f"{worst.bound:.3g}",
        away="" if worst is None else distance(worst),
        further="; ".join(
            [
                *([cell.reading] if cell.reading else []),
                *(f"{name}: {why}" for name, _, why in gates if worst and place(worst) not in why),
            ]
        ),
    )


def missing(document: Results) -> tuple[list[Missing], int]:
    """(what did not run, by reason; how many reasons are left out)."""
    by_reason: dict[tuple[Verdict, str], list[Cell]] = {}
    for cell in document.cells:
        if cell.verdict in ABSENT:
            by_reason.setdefault((cell.verdict, cell.reason or "no reason given"), []).append(cell)
    ordered = sorted(by_reason.items(), key=lambda item: -len(item[1]))
    shown = [
        Missing(
            verdict,
            reason,
            _names(c.implementation for c in cells),
            _names(c.op for c in cells),
            _names(short(c.dtype) for c in cells),
            len(cells),
        )
        for (verdict, reason), cells in ordered[:NOTES_SHOWN]
    ]
    return shown, len(ordered) - len(shown)


def _names(values: Iterable[str], most: int = 40) -> str:
    names = list(dict.fromkeys(values))
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def listings(document: Results, notes: Notes) -> list[Listing]:
    """Every cell that is not wrong and was tried on its own, by op. Wrong ones stand with the failures."""
    room = CELLS_SHOWN
    by_op: dict[str, list[Cell]] = {}
    for cell in document.cells:
        if cell.verdict not in WRONG:
            by_op.setdefault(cell.op, []).append(cell)
    listed = []
    for op, cells in by_op.items():
        shown = cells[: max(room, 0)]
        room -= len(shown)
        listed.append(Listing(op, [_line(c, notes) for c in shown], len(cells)))
    return listed


def _line(cell: Cell, notes: Notes) -> Line:
    passed = " ".join(name for name, gate in sorted(cell.gates.items()) if gate.outcome == "pass")
    not_applicable = " ".join(name for name, gate in sorted(cell.gates.items()) if gate.outcome == "n/a")
    reasons = [gate.reason for _, gate in sorted(cell.gates.items()) if gate.reason]
    if not cell.gates and cell.reason:
        reasons.append(cell.reason)
    numbers = {notes.number(reason) for reason in reasons}
    words = [f"pass {passed}"] * bool(passed) + [f"n/a {not_applicable}"] * bool(not_applicable)
    return Line(
        cell.implementation,
        cell.case,
        short(cell.dtype),
        cell.verdict,
        number(cell.ratio),
        number(cell.noise),
        "; ".join(words) or "none judged",
        sorted(n for n in numbers if n is not None),
        "-" if cell.reduction is None else f"{cell.reduction:,}",
        "-" if cell.seconds is None else seconds(cell.seconds),
    )


def timing_rows(timings: Sequence[Timing]) -> list[TimingRow]:
    return [
        TimingRow(
            t.op,
            t.implementation,
            short(t.dtype),
            t.case,
            seconds(t.seconds),
            "-" if t.floor_seconds is None else seconds(t.floor_seconds),
            t.percent_of_roofline,
            t.bound_by,
            t.clock,
        )
        for t in timings
    ]


def sources(timings: Sequence[Timing]) -> list[str]:
    """Where the roofline's numbers come from, each once."""
    return list(dict.fromkeys(t.source for t in timings if t.source))
