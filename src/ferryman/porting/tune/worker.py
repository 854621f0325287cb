"""A tuner's worker process: times the candidates of one cell after another, so that one that hangs or crashes is alone.

It reads one JSON job, a line, from stdin, and writes one JSON object per line: {"start": candidate} before each thing
that could end it (null for the inputs), {"cell": {..}} with all trials of a cell, {"done": true} last. A candidate's
name is its implementation's, and its configuration's where that is not the implementation's own plan
("cuda wide_128_64_8_1_2").
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferryman.device_profiles import Profile
from ferryman.dispatch import cost, lockfile, rank, registry, select
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import grid, rotation, runner
from ferryman.porting.bench.condition import watch
from ferryman.porting.bench.contender import Contender, close, prepare, promising, steady_trials
from ferryman.porting.inputs.fills import DTYPES, dtype_name
from ferryman.porting.running.process import end_with_parent, quiet
from ferryman.porting.tune import right

MOST_CANDIDATES = 8
BEHIND = 1.5  # times its implementation's own plan, predicted: such a configuration is not measured
Start = Callable[[str | None], None]


def measure(
    plan: runner.Plan, op: Primitive, case: Case, names: list[str], errors: dict[str, str], starting: Start
) -> dict[str, Any]:
    """The trials of the most promising candidates on one cell, in turns.

    names: implementations in order of preference. errors: candidates that are known to fail, and how.
    """
    sets, _ = runner.rotated(plan, op, case)
    work = cost.work_of(op, sets[0])
    seen, candidates, judged = watch(plan.device), [], []
    again = rotation.restoring(op, sets)
    right.standard(op.name, plan.dtype, plan.seed, plan.device)  # no candidate's work, if it ends the worker
    for contender in contenders(plan, op, sets[0], names):
        candidates.append(contender)
        contender.skipped = errors.get(contender.name, contender.skipped)
        if contender.skipped is None:
            starting(contender.name)
            if right.judge(plan, op, contender):
                judged.append(contender.name)
            prepare(contender, sets, plan.device, seen.sample, again)
    if again is not None:
        again()
    right.compare(plan, op, sets[0], [c for c in candidates if c.timer is not None], judged, starting)
    for contender in candidates:
        if contender.skipped is not None:
            close(contender)
    racing = [c for c in candidates if c.timer is not None]
    assert len(candidates) <= MOST_CANDIDATES, f"{len(candidates)} candidates of {op.name} were taken"
    kept = promising(racing, starting)
    for _ in range(2):  # the one that is timed twice, for the noise, may fail in between
        for contender in kept:
            contender.trials.clear()
        noise, untrusted = steady_trials(kept, seen, starting)
        if noise is not None or all(c.skipped is not None for c in kept):
            break
    else:
        untrusted = [*untrusted, "the noise is not known: the candidate that was timed twice failed"]
    for contender in racing:
        close(contender)
    return {
        "op": op.name,
        "case": case.name,
        "dtype": dtype_name(plan.dtype),
        "key": lockfile.region(op, sets[0]),
        "bytes": work.bytes,
        "flops": work.flops,
        "noise": noise,
        "trials": {c.name: c.trials for c in racing},
        "errors": {c.name: str(c.skipped) for c in candidates if c.skipped is not None},
        "untrusted": untrusted,
    }


@torch.no_grad()
def run_once(plan: runner.Plan, op: Primitive, case: Case, names: list[str]) -> None:
    """Every candidate once, for what it compiles; what fails is left to the measurement, which records it."""
    args = grid.inputs(op, case, plan.dtype, plan.seed, plan.device)
    for contender in contenders(plan, op, args, names):
        if contender.skipped is None:
            with contextlib.suppress(Exception):
                right.judge(plan, op, contender)
                contender.call_of(rotation.spared(op, args))()


def candidates(
    op: Primitive, args: Sequence[Any], profile: Profile, names: Sequence[str] | None = None
) -> list[rank.Ranked]:
    """What is measured of a call: the most promising, MOST_CANDIDATES at most."""
    return [r for r in rank.rank(op, args, profile, names) if r.own or r.behind < BEHIND][:MOST_CANDIDATES]


def contenders(plan: runner.Plan, op: Primitive, args: tuple[Any, ...], names: list[str]) -> list[Contender]:
    """The candidates, ready to be timed; then the implementations that refuse the call, with their reasons."""
    ready, known = [], runner.implementations(plan, op, args)  # first: it prepares what serves prepared calls only
    for one in candidates(op, args, plan.profile, names):
        line = registry.implementation(op.name, one.implementation)
        contender = runner.configured(plan, op, line, "" if one.own else one.configuration)
        contender.name = one.label
        ready.append(contender)
    refused = [c for c in known if c.skipped is not None and c.name in names]
    return [*ready, *(c for c in refused if c.name not in {f.name for f in ready})][:MOST_CANDIDATES]


def _end_with_the_tuner() -> None:
    """It holds the other end of stdin for as long as it lives, however it ends."""
    while os.read(0, 4096):  # not sys.stdin, whose lock a thread that waits would hold when the interpreter ends
        pass
    os._exit(1)


def main() -> int:
    """The worker's own side. What kernels print goes to stderr: stdout carries the protocol."""
    end_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    job = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_the_tuner, daemon=True).start()
    device = torch.device(job["device"])
    profile = select.profile_for(device)
    with quiet():
        for op_name, case_name, names, errors in job["cells"]:
            op = registry.primitive(op_name)
            case = next(c for c in grid.cases(op, job["grid"], device) if c.name == case_name)
            plan = runner.Plan(device, profile, DTYPES[job["dtype"]], (), tuple(names), (), job["seed"])
            if job.get("ahead"):
                run_once(plan, op, case, names)
            else:
                say(start=None)
                say(cell=measure(plan, op, case, names, errors, lambda name: say(start=name)))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    say(done=True)
    return 0
