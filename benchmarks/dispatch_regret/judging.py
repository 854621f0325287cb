"""One cell: what dispatch chooses, and what every implementation takes."""

from __future__ import annotations

import contextlib
import os
import statistics
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from dispatch_regret.drawing import Cell
from ferryman import settings
from ferryman.dispatch import lockfile, preparing, registry, select
from ferryman.dispatch.state import State
from ferryman.ops.primitive import Primitive
from ferryman.porting.bench import peers, rotation, runner
from ferryman.porting.bench.condition import watch
from ferryman.porting.bench.contender import Contender, close, prepare, promising, quickest_of, steady_trials
from ferryman.porting.bench.laps import Laps
from ferryman.porting.inputs.cases import as_tuple
from ferryman.porting.inputs.fills import dtype_name

PLAIN = State({}, False)
NOT_PREPARED = "not compiled ahead"
CLEARLY_QUICKER = 0.95  # times the choice's: its result is compared
IN_TIME = f"{NOT_PREPARED}: no time was left (--ahead-seconds, --prepare-seconds)"


@contextlib.contextmanager
def without_lockfile() -> Iterator[None]:
    """Dispatch as on a device where nothing was tuned."""
    before = os.environ.get("FERRYMAN_LOCKFILE")
    os.environ["FERRYMAN_LOCKFILE"] = str(settings.NO_LOCKFILE)
    lockfile.forget()
    try:
        yield
    finally:
        os.environ.pop("FERRYMAN_LOCKFILE")
        if before is not None:
            os.environ["FERRYMAN_LOCKFILE"] = before
        lockfile.forget()


def judge(plan: runner.Plan, cell: Cell, laps: Laps, unprepared: str = IN_TIME) -> dict[str, Any]:
    """What dispatch chooses for a cell with its lockfile and without, and what every implementation takes.

    laps: of the parts of this work. unprepared: why what serves prepared calls only is left out, where it is.
    """
    op, profile, name = cell.op, plan.profile, f"{cell.case.name} {dtype_name(plan.dtype)}"
    sets, _ = runner.rotated(plan, op, cell.case)
    laps.end("inputs")
    if plan.prepares:  # what serves prepared calls only may be the choice, where it was measured
        preparing.ready(op, sets[0], profile)
    laps.end("preparing")
    decision = select.select(op, sets[0], profile, PLAIN)
    chosen = decision.implementation.name
    with without_lockfile():
        untuned = select.select(op, sets[0], profile, PLAIN).implementation.name
    entries = lockfile.entries(op.name, profile)
    record: dict[str, Any] = {
        "op": op.name,
        "case": cell.case.name,
        "region": lockfile.region(op, sets[0]),
        "choice": chosen,
        "half": "tuned" if any(entry.case == name for entry in entries.values()) else "untuned",
        "source": decision.source,
    }
    seen, again = watch(plan.device), rotation.restoring(op, sets)
    contenders = sorted(
        runner.implementations(plan, op, sets[0]), key=lambda c: c.name != chosen
    )  # the noise is the first's
    fused = [c for c in contenders if not _composed(op, c)]
    if any(c.skipped is None for c in fused):  # nobody would choose what writes its scores to memory
        contenders = [c for c in contenders if c in fused or c.name in (chosen, untuned)]
    if not plan.prepares:
        served = {line.name for line in preparing.preparable(op, sets[0], profile)}
        for contender in contenders:
            if contender.name in served and contender.skipped is not None:
                contender.skipped = unprepared
    contenders += runner.own_plans(plan, op, sets[0])
    laps.end("choosing")
    contenders += runner.peer_contenders(plan, op, sets[0])
    laps.end("peers' results")
    for contender in contenders:
        prepare(contender, sets, plan.device, seen.sample, again, quickest_of(contenders))
    laps.end("making ready")
    racing = [c for c in contenders if c.timer is not None]
    record["skipped"] = {c.name: str(c.skipped) for c in contenders if c.timer is None}
    if chosen not in {c.name for c in racing}:
        return record | {"failed": f"the choice could not be timed: {record['skipped'].get(chosen, 'not on the menu')}"}
    kept = promising(racing)
    laps.end("first timing")
    if chosen not in {c.name for c in kept}:  # its noise is wanted all the same
        kept = [next(c for c in racing if c.name == chosen), *kept]
        kept[0].trials.clear()
    noise, untrusted = steady_trials(kept, seen)
    laps.end("trials")
    untrusted = untrusted + _contradicting(op, sets[0], [c for c in racing if c.role != "peer" and c.trials], chosen)
    laps.end("results")
    for contender in racing:
        close(contender)
    record["skipped"] |= {c.name: str(c.skipped) for c in racing if not c.trials}  # they broke in a trial
    if chosen in record["skipped"]:
        return record | {"failed": f"the choice could not be timed: {record['skipped'][chosen]}"}
    racing, kept = [c for c in racing if c.trials], [c for c in kept if c.trials]
    outside = {c.name: statistics.median(c.trials) for c in racing if c.role == "peer"}
    every = {c.name: statistics.median(c.trials) for c in racing if c.role != "peer"}
    seconds = {c.name: every[c.name] for c in kept if c.role != "peer"}
    return record | {
        "seconds": seconds,
        "hopeless": {n: s for n, s in every.items() if n not in seconds},
        "noise": noise,
        "regret": every[chosen] / min(every.values()) - 1,
        "untuned_choice": untuned,
        "regret_without_lockfile": every[untuned] / min(every.values()) - 1 if untuned in every else None,
        "predicted_seconds": decision.seconds.get(chosen),
        "peers": outside,
        "untrusted": untrusted,
    }


@torch.no_grad()
def _contradicting(op: Primitive, args: tuple[Any, ...], ours: Sequence[Contender], chosen: str) -> list[str]:
    """Why a cell is not to be trusted: what is quicker than the choice gives something else, or fails."""
    times = {c.name: statistics.median(c.trials) for c in ours}
    quicker = [c for c in ours if chosen in times and times[c.name] < CLEARLY_QUICKER * times[chosen]]
    if not quicker:
        return []
    (choice,) = (c for c in ours if c.name == chosen)
    exact = as_tuple(choice.call_of(rotation.spared(op, args))())
    reasons = []
    for contender in quicker:
        try:
            difference = peers.wrong(op, args, contender.call_of(rotation.spared(op, args))(), exact, peers.AGREEING)
        except Exception as error:  # noqa: BLE001 - a contender that fails now is not one to be chosen
            difference = f"it fails: {type(error).__name__}: {error}"
        reasons += [f"{contender.name} does not agree with {chosen}: {difference}"] if difference else []
    return reasons


def _composed(op: Primitive, contender: Contender) -> bool:
    return registry.implementation(op.name, contender.name).composed
