"""The speed of a device against its own past: a baseline of several runs, whose own noise says what a regression is.

A time regressed when it is longer than the baseline's median by more than the noise, in this run and in one fresh run.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, FailFast, Field, ValidationError

from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import ResultError
from ferryman.porting import bench
from ferryman.porting.bench.compare import LEAST_NOISE
from ferryman.porting.bench.document import Benchmark, require_whole
from ferryman.porting.bench.document import load as load_bench
from ferryman.porting.ci import commands
from ferryman.porting.ci.record import checked, first, read_json
from ferryman.porting.ci.row import Row
from ferryman.porting.inputs.fills import DTYPES
from ferryman.porting.judging.printable import printable

SCHEMA_VERSION = 1
KIND: Literal["ferryman-ci-baseline"] = "ferryman-ci-baseline"
SIZE_LIMIT = 64 * 2**20
KEPT = 20
ENOUGH = 3  # runs; before, a time is only noted
# A median absolute deviation is 1 / 1.48 of a normal standard deviation; three of those are chance once in
# 370 times, and a fresh run must say the same: once in 137,000.
_SIGMAS = 3 * 1.4826
Key = tuple[str, str, str, str]
Verdict = Literal["slower", "faster", "same", "not confirmed", "new", "no longer timed", "untrusted", "calibrating"]


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Sample(_Model):
    """One contender's time in one run, and what that run said of its own noise."""

    op: str
    case: str
    dtype: str
    name: str
    seconds: float = Field(gt=0, allow_inf_nan=False)
    noise: float = Field(ge=0, allow_inf_nan=False)

    @property
    def key(self) -> Key:
        return self.op, self.case, self.dtype, self.name


class Past(_Model):
    time: str
    samples: Annotated[list[Sample], FailFast()]


class Baseline(_Model):
    """Runs on one device, oldest first."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-ci-baseline"] = KIND
    device_name: str
    profile: str
    runs: Annotated[list[Past], FailFast()] = []


@dataclass(frozen=True)
class Change:
    """One time against the baseline. ``ratio``: now over the median; ``allowed``: the noise that it had to exceed."""

    key: Key
    verdict: Verdict
    ratio: float | None = None
    allowed: float | None = None
    confirmed: float | None = None

    def to_dict(self) -> dict[str, Any]:
        op, case, dtype, name = self.key
        return {
            "op": op,
            "case": case,
            "dtype": dtype,
            "name": name,
            "verdict": self.verdict,
            "ratio": self.ratio,
            "allowed": self.allowed,
            "confirmed": self.confirmed,
        }


def load(path: Path) -> Baseline:
    """A baseline. Raises ResultError: another kind, a newer schema, damaged."""
    raw = read_json(path, SIZE_LIMIT)
    checked(raw, path.name, KIND, SCHEMA_VERSION)
    try:
        return Baseline.model_validate(printable(raw))
    except ValidationError as error:
        raise ResultError(f"{path.name} is damaged: {first(error)}") from error


def samples(document: Benchmark) -> list[Sample]:
    """Our own times of a benchmark; those that it calls untrusted are left out."""
    timed = []
    for cell in document.cells:
        for times in cell.times:
            if times.role == "implementation" and times.seconds is not None and not cell.untrusted:
                noise = max(LEAST_NOISE, ((times.spread or 1.0) - 1) / 2, cell.noise or 0.0)
                timed.append(
                    Sample(
                        op=cell.op,
                        case=cell.case,
                        dtype=cell.dtype,
                        name=times.name,
                        seconds=times.seconds,
                        noise=noise,
                    )
                )
    return timed


def calibrated(baseline: Baseline) -> dict[Key, tuple[float, float, int]]:
    """By key: the median time, what is noise beside it (a fraction), and from how many runs."""
    grouped: dict[Key, list[Sample]] = {}
    for run in baseline.runs:
        for sample in run.samples:
            grouped.setdefault(sample.key, []).append(sample)
    calibration = {}
    for key, several in grouped.items():
        middle = statistics.median(s.seconds for s in several)
        between = _SIGMAS * statistics.median(abs(s.seconds - middle) for s in several) / middle
        within = statistics.median(s.noise for s in several)
        calibration[key] = (middle, max(LEAST_NOISE, between, within), len(several))
    return calibration


def judge(baseline: Baseline, now: Benchmark, again: Callable[[frozenset[tuple[str, str]]], Benchmark]) -> list[Change]:
    """Every time of ours against the baseline; what is slower is timed afresh, once. ResultError: another device."""
    facts = now.environment
    if (baseline.device_name, baseline.profile) != (facts.device_name, facts.profile):
        raise ResultError(
            f"the baseline is of {baseline.device_name} ({baseline.profile}), this run of {facts.device_name} "
            f"({facts.profile}): speeds compare on one device"
        )
    known, here = calibrated(baseline), {s.key: s for s in samples(now)}
    untrusted = {(c.op, c.case, c.dtype) for c in now.cells if c.untrusted}
    changes = [_change(key, known.get(key), here.get(key), key[:3] in untrusted) for key in {**known, **here}]
    suspects = frozenset(c.key[:2] for c in changes if c.verdict == "slower")
    if suspects:
        fresh = {s.key: s for s in samples(again(suspects))}
        changes = [_confirmed(c, known, fresh) if c.verdict == "slower" else c for c in changes]
    return sorted(changes, key=lambda c: -(c.ratio or 0.0))


def _change(key: Key, past: tuple[float, float, int] | None, now: Sample | None, untrusted: bool) -> Change:
    if now is None:
        return Change(key, "untrusted" if untrusted else "no longer timed")
    if past is None:
        return Change(key, "new")
    middle, between, runs = past
    ratio, allowed = now.seconds / middle, between + now.noise
    if runs < ENOUGH:
        return Change(key, "calibrating", ratio, allowed)
    verdict: Verdict = "slower" if ratio > 1 + allowed else "faster" if ratio < 1 / (1 + allowed) else "same"
    return Change(key, verdict, ratio, allowed)


def _confirmed(change: Change, known: dict[Key, tuple[float, float, int]], fresh: dict[Key, Sample]) -> Change:
    if change.key not in fresh:
        return Change(change.key, "no longer timed", change.ratio, change.allowed)
    again = _change(change.key, known[change.key], fresh[change.key], False)
    verdict: Verdict = "slower" if again.verdict == "slower" else "not confirmed"
    return Change(change.key, verdict, change.ratio, change.allowed, again.ratio)


def extended(baseline: Baseline | None, now: Benchmark, changes: Sequence[Change]) -> Baseline:
    """With this run, but for what is slower: a regression must not become what later runs are measured by."""
    facts = now.environment
    base = baseline or Baseline(device_name=facts.device_name, profile=facts.profile)
    slower = {c.key for c in changes if c.verdict in ("slower", "not confirmed")}
    run = Past(time=facts.time, samples=[s for s in samples(now) if s.key not in slower])
    return base.model_copy(update={"runs": [*base.runs, run][-KEPT:]})


def regressed(changes: Sequence[Change]) -> bool:
    return any(c.verdict in ("slower", "no longer timed") for c in changes)


def judge_run(folder: Path, path: Path | None, row: Row) -> int:
    """Judges the benchmark that a row wrote; gives the exit code, and writes perf.json and the new baseline."""
    now = load_bench(folder / commands.BENCH)
    require_whole(now, commands.BENCH)
    baseline = load(path) if path is not None and path.is_file() else None

    def again(pairs: frozenset[tuple[str, str]]) -> Benchmark:
        sys.stderr.write(f"ferryman: {len(pairs)} cases are slower than the baseline: timed once afresh\n")
        return bench.run(
            implementations=[row.backend],
            dtype=DTYPES[now.cells[0].dtype],
            only=pairs,
            seed=now.environment.seed,
            grid_name=now.environment.tier,
            device=now.environment.device,
        )

    changes = judge(baseline, now, again) if baseline is not None else []
    document = {
        "changes": [c.to_dict() for c in changes],
        "baseline_runs": 0 if baseline is None else len(baseline.runs),
    }
    write_whole(folder / commands.PERF, (json.dumps(document, indent=1) + "\n").encode())
    if path is not None:
        write_whole(path.resolve(), extended(baseline, now, changes).model_dump_json(indent=1).encode())
    return int(regressed(changes))
