"""What became of a compiled model's graphs: each region that is an op, and what is Inductor's."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

PLACED, SIMPLER, LEFT, REFUSED, STAYED = "placed", "simpler", "left", "refused", "stayed"
WORDS = {
    PLACED: "called as an op",
    SIMPLER: "PyTorch's own call, without its mask",
    LEFT: "the op's meaning, left to Inductor",
    REFUSED: "looks like the op, and is not proven",
    STAYED: "looks like the op, and cannot be replaced where it stands",
}


@dataclass(frozen=True)
class Entry:
    """One region. where: its last node. error: float64's worst difference, relative; None where nothing was run.
    flops, bytes: the least that the call needs, at the sizes that the graph was made with."""

    op: str
    where: str
    verdict: str
    reason: str
    implementation: str = ""
    error: float | None = None
    flops: float = 0.0
    bytes: float = 0.0


@dataclass
class GraphReport:
    """One graph. others: nodes of no region that compute, by function: Inductor's."""

    entries: list[Entry] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def count(self, verdict: str) -> Counter[str]:
        return Counter(e.op for e in self.entries if e.verdict == verdict)


@dataclass
class Report:
    """All graphs of one model, or of all that were compiled since it was made."""

    graphs: list[GraphReport] = field(default_factory=list)

    @property
    def entries(self) -> list[Entry]:
        return [entry for graph in self.graphs for entry in graph.entries]

    def calls(self) -> dict[str, int]:
        """Calls of each op that one pass through every graph makes."""
        return dict(sorted(sum((g.count(PLACED) for g in self.graphs), Counter[str]()).items()))

    def share(self, what: str = "bytes") -> float:
        """Of the flops or bytes of all regions that are ops, the part that placed ops do."""
        total = sum(getattr(e, what) for e in self.entries)
        placed = sum(getattr(e, what) for e in self.entries if e.verdict == PLACED)
        return placed / total if total else 0.0

    def lines(self) -> Iterator[str]:
        """One line for each op, verdict and reason; then what belongs to no op."""
        groups = Counter((e.op, e.verdict, e.reason) for e in self.entries)
        for (op, verdict, reason), times in sorted(groups.items()):
            yield f"{op} x{times}: {WORDS[verdict]}. {reason}"
        rest = sum((g.others for g in self.graphs), Counter[str]())
        if rest:
            yield "Inductor's: " + ", ".join(f"{name} x{n}" for name, n in rest.most_common())

    def __str__(self) -> str:
        return "\n".join(self.lines())


_lock = threading.Lock()
_MOST = 256
_latest = Report()


def last_report() -> Report:
    """What became of the graphs that were compiled since `forget`, at most the last 256."""
    with _lock:
        return Report(list(_latest.graphs))


def forget() -> None:
    """Begin a new report."""
    with _lock:
        _latest.graphs.clear()


def enter(graph: GraphReport) -> None:
    with _lock:
        _latest.graphs.append(graph)
        del _latest.graphs[:-_MOST]
