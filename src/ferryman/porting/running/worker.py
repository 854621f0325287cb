"""The process that checks a job's cells (`workers` starts it and says what it reads and writes)."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import warnings
from typing import Any

import torch

from ferryman.device_profiles import detect, profile
from ferryman.dispatch import registry
from ferryman.porting.running import simulated_route, stand_in_route
from ferryman.porting.running.cells import check_op, dtypes_of
from ferryman.porting.running.drawn import check_drawn
from ferryman.porting.running.process import device_lost, end_with_parent
from ferryman.porting.running.workers import SIMULATED

KEPT_BYTES = 2 << 30
LOST = 75  # exit code of a worker whose device serves nothing more
_RUNS = 2  # the interpreter is one thread of NumPy: a third run would show nothing new


def main() -> int:
    """What kernels print goes to stderr: stdout carries the protocol."""
    end_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # NumPy, which computes for the interpreter, warns of every planted NaN
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.read())
    skip = {tuple(s) for s in job["skip"]}
    only = None if job["only"] is None else {tuple(one) for one in job["only"]}
    device = torch.device(job["device"])
    torch.backends.cuda.matmul.allow_tf32 = job["tf32"]

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    more: dict[str, Any] = {"times": _RUNS, "simulate": profile(SIMULATED)} if job["interpret"] else {}
    known, route = detect(device), contextlib.ExitStack()
    if job["simulated"] is not None:
        known, more = profile(job["simulated"]), {"times": _RUNS}
        assumed = simulated_route.assumptions_of(f"{name}={value}" for name, value in job["assume"].items())
        route.enter_context(simulated_route.on(known, assumed))
    elif job["stands_in_for"] is not None:
        known = profile(job["stands_in_for"])
        route.enter_context(stand_in_route.on(known, device))
    with route:
        for op in job["ops"]:
            primitive = registry.primitive(op)
            lines = [registry.implementation(op, name) for name in job["lines"][op]]
            more["starting"] = lambda *key: say(start=key)
            if job["drawn"] is None:
                cells = check_op(
                    primitive,
                    lines,
                    dtypes_of(job["dtypes"]),
                    job["tier"],
                    job["seed"],
                    device,
                    known,
                    thin=job["thin"],
                    turn=job["turn"] and tuple(job["turn"]),
                    share=tuple(job["share"]),
                    skip=skip,
                    only=only,
                    **more,
                )
            else:
                cells = check_drawn(primitive, lines, job["drawn"][op], job["seed"], device, known, skip=skip, **more)
            for cell in cells:
                say(cell=json.loads(cell.model_dump_json()))
                if cell.verdict == "FAIL" and device_lost(device):
                    os._exit(LOST)  # the context's own clean-up would raise
                if device.type == "cuda" and torch.cuda.memory_reserved(device) > KEPT_BYTES:
                    torch.cuda.empty_cache()  # the other workers want it too
            say(done=op)
    return 0
