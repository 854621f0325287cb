"""Runs calls of Triton and HIP kernels on the simulated device, in a process that compiles Triton; JSON on both sides.

stdin: {"profile", "calls": [{"op", "implementation", "shapes", "dtype", "extra", "units", "assumptions"}]}; stdout: one
line a call, {"outputs": [hex of float64 sums and values], "kernels", "findings", "executed", "seconds"}.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from typing import Any

import torch

from ferryman.backends.simulator.device import Simulator
from ferryman.backends.simulator.numerics import Assumptions
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.dispatch.select import target_of


def one(known: Any, call: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(call.get("seed", 0))
    target = target_of(known)
    if call.get("units"):  # fewer units: the launcher takes larger tiles for the same shape
        target = dataclasses.replace(target, units=call["units"])
    dtype = getattr(torch, call["dtype"])
    tensors = [None if s is None else torch.randn(s, dtype=torch.float64).to(dtype) for s in call["shapes"]]
    simulator = Simulator(target, Assumptions(**call.get("assumptions", {})))
    run = simulator.wrap(registry.launcher(registry.implementation(call["op"], call["implementation"])))
    with torch.no_grad():
        outputs = run(*tensors, *call["extra"], target)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    reports = list(simulator.reports)
    values = tuple(None if t is None else t.double() for t in tensors)
    oracle = registry.primitive(call["op"]).body(*values, *call["extra"])
    oracle = oracle if isinstance(oracle, tuple) else (oracle,)
    apart = [
        float(((o.double() - e) / (e.abs().mean() + 1e-30)).abs().max()) for o, e in zip(outputs, oracle, strict=True)
    ]
    return {
        "outputs": [o.double().flatten().tolist() for o in outputs],
        "apart": apart,
        "kernels": [name for name, _ in reports],
        "findings": [str(f) for f in simulator.take()],
        "executed": sum(r.executed for _, r in reports),
        "steps": sum(r.steps for _, r in reports),
        "seconds": sum(r.seconds for _, r in reports),
    }


def main() -> None:
    job = json.loads(sys.stdin.read())
    torch.set_num_threads(1)
    known = profile(job["profile"])
    for call in job["calls"]:
        sys.stdout.write(json.dumps(one(known, call)) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
