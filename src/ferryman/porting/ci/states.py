"""The states of a merged run that are counted together: of each vendor, and of each op of a row."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from ferryman.porting.ci.evidence import Item
from ferryman.porting.ci.merged import OpState, RowState, VendorState
from ferryman.porting.judging.results import Verdict, row_verdict

WRONG: tuple[Verdict, ...] = ("FAIL", "MISTRUSTED", "QUARANTINED")


def vendors(rows: Sequence[RowState]) -> list[VendorState]:
    """Each vendor by its rows on the real device, and by those alone."""
    states = []
    for vendor in dict.fromkeys(row.vendor for row in rows):
        real = [
            r for r in rows if r.vendor == vendor and (r.how == "hardware" or (vendor == "cpu" and r.best == "PASS"))
        ]
        judged = any(r.suite != "bench" for r in real)  # what is only timed may be wrong
        counts: dict[Verdict, int] = dict(Counter(r.verdict for r in real))
        verdict: Verdict = next((v for v in (*WRONG, "NOT_RUN") if counts.get(v)), row_verdict(counts))
        green = judged and all(r.green for r in real)
        if verdict == "PASS" and not green:
            verdict = "NOT_RUN"
        states.append(
            VendorState(
                vendor=vendor, verdict=verdict, green=green, rows=len(real), green_rows=sum(r.green for r in real)
            )
        )
    return states


def ops_of(items: Iterable[Item]) -> list[OpState]:
    grouped: dict[str, Counter[Verdict]] = {}
    for item in items:
        grouped.setdefault(item.op, Counter())[item.verdict] += 1
    states = []
    for op, counts in sorted(grouped.items()):
        verdict: Verdict = next((v for v in (*WRONG, "NOT_RUN") if counts[v]), row_verdict(dict(counts)))
        states.append(OpState(op=op, verdict=verdict, counts=dict(sorted(counts.items()))))
    return states
