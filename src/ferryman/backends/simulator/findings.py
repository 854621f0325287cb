"""What the sanitizer reports."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from ferryman.backends.simulator.assembly import Instruction

Kind = Literal["out-of-bounds", "uninitialised", "race", "missing-wait", "divergent-barrier", "wave-width"]


@dataclass(frozen=True)
class Finding:
    """One defect, at the first lane that showed it. ``count``: how many executions of the instruction showed it."""

    kind: Kind
    message: str
    kernel: str
    instruction: str
    line: int
    source: str | None = None
    workgroup: int | None = None
    wave: int | None = None
    lane: int | None = None
    address: int | None = None
    count: int = 1

    def __str__(self) -> str:
        place = f"{self.kernel}, line {self.line}" + (f" ({self.source})" if self.source else "")
        who = [
            f"{n} {v}"
            for n, v in (("workgroup", self.workgroup), ("wave", self.wave), ("lane", self.lane))
            if v is not None
        ]
        where = f", address {self.address:#x}" if self.address is not None else ""
        times = f" ({self.count} times)" if self.count > 1 else ""
        return f"{self.kind}: {self.message}; {self.instruction} in {place}; {', '.join(who)}{where}{times}"


@dataclass
class Findings:
    """One finding for each instruction and kind; the rest are counted."""

    kernel: str
    _findings: dict[tuple[str, int], Finding] = field(default_factory=dict)
    _counts: dict[tuple[str, int], int] = field(default_factory=dict)

    def add(
        self,
        kind: Kind,
        message: str,
        instruction: Instruction,
        *,
        workgroup: int | None = None,
        wave: int | None = None,
        lane: int | None = None,
        address: int | None = None,
    ) -> None:
        key = (kind, instruction.line)
        self._counts[key] = self._counts.get(key, 0) + 1
        if key not in self._findings:
            self._findings[key] = Finding(
                kind,
                message,
                self.kernel,
                instruction.text,
                instruction.line,
                instruction.source,
                workgroup,
                wave,
                lane,
                address,
            )

    def all(self) -> list[Finding]:
        return [Finding(**{**f.__dict__, "count": self._counts[k]}) for k, f in self._findings.items()]
