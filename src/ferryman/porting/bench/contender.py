"""Contenders of one cell: made ready, timed in turns over three trials, and again where clocks moved."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ferryman.porting.bench import clock
from ferryman.porting.bench.condition import Watch, distrust, spread, steadied
from ferryman.porting.bench.document import Method, Role
from ferryman.porting.running.process import failure

TRIALS = 3
ATTEMPTS = 3  # at trials whose clocks hold still
HOPELESS = 2.0  # times the best: no choice, and its trials would take most of a tuner's time
CLEARLY = 2.0 * HOPELESS  # by the round that made it ready: it is not even timed once more


@dataclass
class Contender:
    """Something to time: ``call_of(args)`` is the call for one set of inputs, ``public`` what a user would call."""

    name: str
    role: Role
    call_of: Callable[[tuple[Any, ...]], Callable[[], Any]]
    public: Callable[[tuple[Any, ...]], Callable[[], Any]] | None = None
    trials: list[float] = field(default_factory=list)
    warm: float | None = None
    host: float | None = None
    skipped: str | None = None
    timer: clock.Timer | None = None
    method: Method | None = None
    note: str | None = None


def prepare(
    contender: Contender,
    sets: Sequence[tuple[Any, ...]],
    device: torch.device,
    sample: Any,
    restore: Callable[[], None] | None = None,
    quickest: float | None = None,
) -> None:
    """Compile, warm up and capture; what fails is skipped, with its reason.

    quickest: of the others' times so far. What its first calls put CLEARLY behind keeps that time, and is done.
    """
    if contender.skipped is not None:
        return
    try:
        with torch.no_grad():
            calls = [contender.call_of(args) for args in sets]
            owned = [call.restore for call in calls if hasattr(call, "restore")]
            again = functools.partial(_each, owned) if owned else None if contender.role == "reference" else restore
            longest = None if quickest is None else CLEARLY * quickest
            contender.timer = clock.timer(calls, device, sample, again, longest)
            contender.method, contender.note = contender.timer.method, contender.timer.note
    except Exception as error:  # noqa: BLE001 - a kernel that cannot run this case is a row, not the end of it
        contender.skipped = failure(error, device)


def quickest_of(contenders: Sequence[Contender]) -> float | None:
    """The least of the times that contenders had while they were made ready."""
    return min((c.timer.rough for c in contenders if c.timer is not None and c.timer.rough is not None), default=None)


def _each(functions: Sequence[Callable[[], None]]) -> None:
    for function in functions:
        function()


def promising(contenders: Sequence[Contender], starting: Callable[[str], None] = lambda name: None) -> list[Contender]:
    """Those that a first timing puts within HOPELESS times the best. The others keep that timing as their one trial.

    What was CLEARLY behind when it was made ready keeps the time from then.
    """
    rough = {c.name: c.timer.rough for c in contenders if c.timer is not None and c.timer.rough is not None}
    quickest, first = min(rough.values(), default=0.0), {}
    for contender in contenders:
        known = rough.get(contender.name)
        behind = contender.timer is not None and contender.timer.far_behind
        if known is not None and (behind or known > CLEARLY * quickest):
            first[contender.name] = known
            continue
        starting(contender.name)
        if (seconds := _cold(contender)) is not None:
            first[contender.name] = seconds
    contenders = [c for c in contenders if c.skipped is None]
    least = min(first.values(), default=0.0)
    for contender in contenders:
        if first[contender.name] > HOPELESS * least:
            contender.trials.append(first[contender.name])
    return [c for c in contenders if not c.trials]


def steady_trials(
    contenders: Sequence[Contender], seen: Watch, starting: Callable[[str], None] = lambda name: None
) -> tuple[float | None, list[str]]:
    """(noise, why the trials are not to be trusted): `trials`, repeated where clocks moved.

    A device that was cold at first holds its clocks once it is warm. One at its power cap never does, and what draws
    more runs slower: contenders then take turns sample by sample, so that all meet the same clocks.
    """
    for attempt in range(ATTEMPTS):
        noise = trials(contenders, starting, clock.SAMPLES if attempt else 1)
        untrusted = distrust(seen.condition(), spread(steadied([c.trials for c in contenders if c.trials])))
        if not untrusted or attempt == ATTEMPTS - 1:
            break
        seen.samples.clear()
        for contender in contenders:
            contender.trials.clear()
    return noise, untrusted


def trials(
    contenders: Sequence[Contender], starting: Callable[[str], None] = lambda name: None, turns: int = 1
) -> float | None:
    """All contenders in turn, the order reversed every other time; the first of ours twice: the noise.

    turns: that a trial is divided into, by samples: clocks that move faster than a trial lasts are then met by all.
    """
    twice: list[float] = []
    control = next((c for c in contenders if c.role == "implementation" and c.skipped is None), None)
    for trial in range(TRIALS):
        samples: dict[str, list[float]] = {}
        again: list[float] = []
        for turn in range(trial * turns, (trial + 1) * turns):
            for contender in contenders[:: 1 if turn % 2 == 0 else -1]:
                _sample(contender, turns, samples.setdefault(contender.name, []), starting)
            if control is not None:
                _sample(control, turns, again, starting)
        for contender in contenders:
            if contender.skipped is None:
                contender.trials.append(statistics.median(samples[contender.name]))
        if control is not None and control.skipped is None:
            twice.append(statistics.median(again))
    if control is None or control.skipped is not None:
        return None
    first, second = sorted(control.trials)[TRIALS // 2], sorted(twice)[TRIALS // 2]
    return abs(second / first - 1)


def _sample(contender: Contender, turns: int, into: list[float], starting: Callable[[str], None]) -> None:
    if contender.skipped is None:
        starting(contender.name)
        if (seconds := _cold(contender, max(1, clock.SAMPLES // turns))) is not None:
            into.append(seconds)


@torch.no_grad()
def _cold(contender: Contender, samples: int = clock.SAMPLES) -> float | None:
    """None where it fails, after which it is out."""
    assert contender.timer is not None
    try:
        return contender.timer.cold(samples)
    except Exception as error:  # noqa: BLE001 - as in `prepare`
        drop(contender, failure(error, contender.timer.device))
        return None


def drop(contender: Contender, why: str) -> None:
    """What failed after it was made ready has no times: which of them were right is not known."""
    contender.skipped = why
    contender.trials.clear()
    close(contender)


def close(contender: Contender) -> None:
    if contender.timer is not None:
        contender.timer.close()
        contender.timer = None
