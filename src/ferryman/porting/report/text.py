"""Words and numbers that the renderings share."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from ferryman.porting.judging.results import Cell, Gate, GateName, Results, Verdict, WorstElement, number, row_verdict

MEANING: dict[Verdict, str] = {
    "PASS": "ran on this device, and every gate that applies holds",
    "FAIL": "ran, and a gate does not hold",
    "MISTRUSTED": "ran, but the check itself could not judge it",
    "QUARANTINED": "its toolchain could not compile it",
    "SIMULATED": "ran elsewhere: interpreted, in the simulator, or on a newer GPU (its reason says which)",
    "COMPILED_ONLY": "compiled for a device that is not here; did not run",
    "UNIMPLEMENTED": "refused: one of its conditions does not hold",
    "NOT_RUN": "did not run",
}
WRONG: tuple[Verdict, ...] = ("FAIL", "MISTRUSTED", "QUARANTINED")
ABSENT: tuple[Verdict, ...] = ("NOT_RUN", "UNIMPLEMENTED", "COMPILED_ONLY")
GATES: dict[GateName, tuple[str, str]] = {
    "G0": ("structure", "shape, dtype, device and strides as declared; NaN and Inf exactly where the oracle has them"),
    "G1": ("exact probes", "inputs whose every partial result is representable: equal to the oracle bit for bit"),
    "G2": ("componentwise", "the error of every element is at most its derived bound"),
    "G3": ("noise", "the RMS error is at most 1.25 times that of the low-precision reference"),
    "G4": ("bias", "the signed errors have no drift: their mean is within what chance or the device profile allows"),
    "G5": ("hygiene", "inputs and guard bytes untouched, nothing stale or aliased, runs bitwise equal where declared"),
    "G6": ("batch invariance", "a row alone equals the same row inside a batch, as the op declares"),
    "G7": ("gradients", "vector-Jacobian products hold to the same gates"),
}
SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def plain(text: str) -> str:
    """Without control characters, which XML and HTML cannot hold, and direction overrides, which disguise text."""
    return "".join(c if c.isprintable() else " " for c in text)


def table_row(values: Sequence[str]) -> str:
    """A row of a Markdown table: what stands in a cell begins no other cell and no other row."""
    cells = [re.sub(r"(\\*)\|", lambda match: match[1] * 2 + r"\|", " ".join(v.splitlines())) for v in values]
    return f"| {' | '.join(cells)} |"


def short(dtype: str) -> str:
    return SHORT.get(dtype, dtype)


def verdict(document: Results) -> Verdict:
    """What the whole document says: as bad as its worst cell, and PASS only if something ran and passed."""
    counts: dict[Verdict, int] = {}
    for cell in document.cells:
        counts[cell.verdict] = counts.get(cell.verdict, 0) + 1
    return row_verdict(counts)


def failed_gates(cell: Cell) -> list[tuple[GateName, Gate]]:
    return [(name, gate) for name, gate in sorted(cell.gates.items()) if gate.outcome == "fail"]


def place(worst: WorstElement) -> str:
    return f"{worst.output}[{', '.join(map(str, worst.index))}]"


def away(worst: WorstElement) -> float:
    """How many bounds the element is off; infinite where one side is not finite or the bound is zero."""
    error = abs(worst.value - worst.expected)
    if not math.isfinite(error) or worst.bound <= 0:
        return 0.0 if worst.value == worst.expected else math.inf
    return error / worst.bound


def distance(worst: WorstElement) -> str:
    """The error in words: in bounds, or that it is no number."""
    off = away(worst)
    return f"{number(off)} bounds" if math.isfinite(off) else "not finite"


def element(worst: WorstElement) -> str:
    """The worst element in one line."""
    return (
        f"{place(worst)} is {worst.value:.9g}, expected {worst.expected:.9g}, bound {worst.bound:.3g}, "
        f"error {distance(worst)}"
    )


def seconds(value: float) -> str:
    """A time with the unit that fits it."""
    for unit, factor in (("s", 1.0), ("ms", 1e3), ("us", 1e6)):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e9:.3g} ns"
