"""The score as a document: counts, the fate of every mutant, every alarm."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Literal

from pydantic import BaseModel, ConfigDict

from ferryman.porting.judging.results import Environment
from ferryman.porting.selftest import baselines

SCHEMA_VERSION = 2
REQUIRED_SHARE = 0.99
MOST_EQUIVALENT = 0.15
DRAWS = 200  # of the op's whole domain, which an equivalent mutant must give the same bits on
Outcome = Literal["caught", "missed", "equivalent", "not run"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", ser_json_inf_nan="strings")


class Record(_Model):
    """What became of one mutant.

    gates: those that failed (the first catching run's, or every run's when all were judged). others: which of the
    other rules rejected one of its runs; others_aligned: one on aligned normal inputs. undecided: not run
    to the end, its time was up. line: of the menu. place: the line of source that
    a short edit is in.
    """

    key: str
    op: str
    name: str
    operator: str
    note: str
    backend: str
    line: str | None = None
    place: str | None = None
    outcome: Outcome = "missed"
    gates: list[str] = []
    case: str | None = None
    reason: str | None = None
    runs: int = 0
    flagged: int = 0
    draws: int = 0
    undecided: bool = False
    others: dict[str, bool] = {}
    others_aligned: dict[str, bool] = {}

    @property
    def kernel(self) -> str:
        """The function that is edited, of a menu line: "op.triton.long.function"; "op.torch" of a rule."""
        return (
            f"{self.op}.torch" if self.backend == "torch" else f"{self.op}.{self.line or self.backend}.{self.function}"
        )

    @property
    def function(self) -> str:
        return self.name.partition(".")[0]

    @property
    def change(self) -> str:
        """The edit as "old -> new in line"; a rule's name."""
        edit = " ".join(self.note.split())
        return self.name if self.backend == "torch" else edit if self.place is None else f"{edit} in {self.place}"


class Mutants(_Model):
    caught: int
    non_equivalent: int
    by_gate: dict[str, int]


class Fates(_Model):
    """What became of one operator's mutants."""

    caught: int = 0
    missed: int = 0
    equivalent: int = 0
    not_run: int = 0


class Baseline(_Model):
    """Another rule on the same runs."""

    meaning: str
    caught: int
    caught_on_aligned_normal: int
    false_alarms: int


class Alarm(_Model):
    """A right kernel that the engine flagged."""

    alternative: str
    op: str
    case: str
    dtype: str
    seed: int
    reason: str | None


class Tally(_Model):
    """Runs of right alternatives, as they are added up."""

    runs: int = 0
    by_op: dict[str, int] = {}
    by_dtype: dict[str, int] = {}
    by_alternative: dict[str, int] = {}
    others: dict[str, int] = {}
    alarms: list[Alarm] = []

    def add(self, op: str, dtype: str, key: str, accepted: Iterable[str], alarm: Alarm | None) -> None:
        self.runs += 1
        for counts, name in ((self.by_op, op), (self.by_dtype, dtype), (self.by_alternative, key)):
            counts[name] = counts.get(name, 0) + 1
        for rule in set(baselines.NAMES) - set(accepted):
            self.others[rule] = self.others.get(rule, 0) + 1
        if alarm is not None:
            self.alarms.append(alarm)

    def merge(self, other: Tally) -> None:
        self.runs += other.runs
        for mine, theirs in (
            (self.by_op, other.by_op),
            (self.by_dtype, other.by_dtype),
            (self.by_alternative, other.by_alternative),
            (self.others, other.others),
        ):
            for name, n in theirs.items():
                mine[name] = mine.get(name, 0) + n
        self.alarms += other.alarms


class SelfTest(_Model):
    """What ``ferryman selftest --json`` prints."""

    kind: Literal["ferryman-selftest"] = "ferryman-selftest"
    schema_version: int = SCHEMA_VERSION
    environment: Environment
    every_run_judged: bool
    mutants: Mutants
    false_alarms: int
    honest_runs: int
    baselines: dict[str, Baseline]
    planted: int
    operators: dict[str, Fates]
    equivalent_share: dict[str, float]
    ops: dict[str, int]
    source_edits: int
    survive_allclose: int
    honest: Tally
    listing: list[Record]

    @property
    def share(self) -> float | None:
        return self.mutants.caught / self.mutants.non_equivalent if self.mutants.non_equivalent else None


def compose(environment: Environment, records: list[Record], tally: Tally, every_run_judged: bool) -> SelfTest:
    """The document of some records; ops count the mutants that ran and are not equivalent."""
    real = [r for r in records if r.outcome in ("caught", "missed")]
    gates = Counter(g for r in real for g in r.gates)
    return SelfTest(
        environment=environment,
        every_run_judged=every_run_judged,
        mutants=Mutants(
            caught=sum(r.outcome == "caught" for r in real),
            non_equivalent=len(real),
            by_gate=dict(sorted(gates.items())),
        ),
        false_alarms=len(tally.alarms),
        honest_runs=tally.runs,
        baselines={
            name: Baseline(
                meaning=baselines.MEANING[name],
                caught=sum(r.others.get(name, False) for r in real),
                caught_on_aligned_normal=sum(r.others_aligned.get(name, False) for r in real),
                false_alarms=tally.others.get(name, 0),
            )
            for name in baselines.NAMES
        },
        planted=len(records),
        operators=_fates(records),
        equivalent_share=_equivalent(records),
        ops=_counts(r.op for r in real),
        source_edits=sum(r.backend != "torch" for r in real),
        survive_allclose=sum(not r.others.get(baselines.ALLCLOSE, False) for r in real),
        honest=tally,
        listing=sorted(records, key=lambda r: (r.op, r.backend, r.name)),
    )


def _counts(names: Iterable[str]) -> dict[str, int]:
    return dict(sorted(Counter(names).items()))


def _fates(records: list[Record]) -> dict[str, Fates]:
    by_operator: dict[str, Fates] = {}
    for record in records:
        fates, name = by_operator.setdefault(record.operator, Fates()), record.outcome.replace(" ", "_")
        setattr(fates, name, getattr(fates, name) + 1)
    return dict(sorted(by_operator.items()))


def _equivalent(records: list[Record]) -> dict[str, float]:
    """Kernel -> the share of its mutants that ran which are equivalent."""
    kernels: dict[str, list[bool]] = {}
    for r in records:
        if r.outcome != "not run":
            kernels.setdefault(r.kernel, []).append(r.outcome == "equivalent")
    return {name: round(sum(fates) / len(fates), 4) for name, fates in sorted(kernels.items())}


def dumps(document: SelfTest) -> str:
    return document.model_dump_json(indent=1)


def markdown(document: SelfTest) -> str:
    """The tables of docs/selftest.md: every rule's score, and what became of each operator's mutants."""
    facts, mutants, runs = document.environment, document.mutants, document.honest_runs
    whole = max(mutants.non_equivalent, 1)
    rules = [("ferryman", mutants.caught, document.false_alarms)]
    rules += [(b.meaning, b.caught, b.false_alarms) for b in document.baselines.values()]
    lines = [
        f"{facts.device_name or facts.device}, torch {facts.versions['torch']}, seed {facts.seed}, {document.planted} "
        f"mutants of {len(document.ops)} ops:",
        "",
        f"| rule | caught of {mutants.non_equivalent} | share |" + (f" alarms in {runs} right runs |" if runs else ""),
        "|---|---|---|" + ("---|" if runs else ""),
        *(f"| {name} | {n} | {n / whole:.1%} |" + (f" {alarms} |" if runs else "") for name, n, alarms in rules),
        "",
        "| operator | caught | missed | equivalent | not run |",
        "|---|---|---|---|---|",
        *(f"| {n} | {f.caught} | {f.missed} | {f.equivalent} | {f.not_run} |" for n, f in document.operators.items()),
    ]
    return "\n".join(lines) + "\n"


def succeeded(document: SelfTest) -> bool:
    """At least 99% of the mutants that are not equivalent caught, no right kernel flagged, and something ran."""
    share = document.share
    return share is not None and share >= REQUIRED_SHARE and document.false_alarms == 0


def survivors(document: SelfTest) -> list[Record]:
    return [r for r in document.listing if r.outcome == "missed"]


def reasons(records: Iterable[Record], outcome: Outcome) -> Mapping[str, list[str]]:
    """Reason -> keys of the mutants with that outcome."""
    by_reason: dict[str, list[str]] = {}
    for record in records:
        if record.outcome == outcome:
            by_reason.setdefault(record.reason or "no reason given", []).append(record.key)
    return by_reason
