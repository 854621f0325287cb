"""A tuner's worker process: times the candidates of one cell after another, so that one that hangs or crashes is alone.

It reads one JSON job from stdin and writes one JSON object per line: {"start": candidate} before each thing that could
end it (null for the inputs), {"cell": {..}} with all trials of a cell, {"done": true} last.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from typing import Any

import torch

from ferryman.dispatch import cost, lockfile, registry, select
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import grid, peers, runner
from ferryman.porting.bench.condition import distrust, spread, watch
from ferryman.porting.cases import as_tuple
from ferryman.porting.fills import DTYPES, dtype_name
from ferryman.porting.process import quiet

MOST_CANDIDATES = 8
Start = Callable[[str], None]


def measure(
    plan: runner.Plan, op: Primitive, case: Case, names: list[str], errors: dict[str, str], starting: Start
) -> dict[str, Any]:  # fmt: skip
    """The trials of the most promising candidates on one cell, in turns.

    names: in order of preference; what the cost model predicts faster goes before, and of more than MOST_CANDIDATES the
    last are left out. errors: candidates that are known to fail, and how.
    """
    sets, _ = runner.rotated(plan, op, case)
    work = cost.work_of(op, sets[0])
    names = cost.ranked(names, cost.predictions(op, work, plan.profile))[:MOST_CANDIDATES]
    seen, candidates = watch(plan.device), []
    with torch.no_grad():
        exact = as_tuple(op.namespace["_resolve"](*runner.spared(op, sets[0])))
    again = runner.restoring(op, sets)
    found = {c.name: c for c in runner.implementations(plan, op, sets[0])}
    for contender in (found[name] for name in names if name in found):
        candidates.append(contender)
        contender.skipped = errors.get(contender.name, contender.skipped)
        if contender.skipped is None:
            starting(contender.name)
            runner.prepare(contender, sets, plan.device, seen.sample, again)
        if contender.timer is not None:
            with torch.no_grad():
                if again is not None:
                    again()
                result = contender.call_of(runner.spared(op, sets[0]))()
                contender.skipped = peers.wrong(op, sets[0], result, exact, peers.AGREEING)
            if contender.skipped is not None:
                contender.timer.close()
                contender.timer = None
    racing = [c for c in candidates if c.timer is not None]
    assert len(candidates) <= MOST_CANDIDATES, f"{len(candidates)} candidates of {op.name} were taken"
    noise = runner.trials(runner.promising(racing, starting), starting)
    for contender in racing:
        if contender.timer is not None:
            contender.timer.close()
    return {
        "op": op.name, "case": case.name, "dtype": dtype_name(plan.dtype), "key": lockfile.region(op, sets[0]),
        "bytes": work.bytes, "flops": work.flops, "noise": noise, "trials": {c.name: c.trials for c in racing},
        "errors": {c.name: str(c.skipped) for c in candidates if c.skipped is not None},
        "untrusted": distrust(seen.condition(), spread(c.trials for c in racing)),
    }  # fmt: skip


def main() -> int:
    """The worker's own side. What kernels print goes to stderr: stdout carries the protocol."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    job = json.loads(sys.stdin.read())
    device = torch.device(job["device"])
    profile = select.profile_for(device)
    with quiet():
        for op_name, case_name, names, errors in job["cells"]:
            op = registry.primitive(op_name)
            case = next(c for c in grid.cases(op, job["grid"], device) if c.name == case_name)
            plan = runner.Plan(device, profile, DTYPES[job["dtype"]], (), tuple(names), (), job["seed"])
            say(start=None)
            say(cell=measure(plan, op, case, names, errors, lambda name: say(start=name)))
            if device.type == "cuda":
                torch.cuda.empty_cache()
    say(done=True)
    return 0
