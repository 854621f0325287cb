"""First calls of every op in this process, by every implementation that has kernels, on the bench's full grid in bf16.

Prints what ran and what was compiled, as JSON. Triton says what it compiles; SIMT compilers may not be called at all,
and whether a C compiler is there is the caller's choice (``CC``).
"""

from __future__ import annotations

import json
import sys
import warnings
from collections import Counter
from typing import Any

import torch
import triton

from ferryman.backends import cuda, hip
from ferryman.dispatch import registry
from ferryman.dispatch.select import profile_for
from ferryman.porting.bench import grid, rotation, runner


def forbidden(*args: Any, **more: Any) -> Any:
    raise AssertionError("a SIMT kernel would be compiled")


def main() -> dict[str, Any]:
    device = torch.device("cuda", 0)
    profile = profile_for(device)
    plan = runner.Plan(device, profile, torch.bfloat16, (), (), (), 0)
    backends = ("triton", "cuda" if profile.vendor == "nvidia" else "hip")
    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda **facts: compiled.append(facts["src"].name)
    cuda.CudaBackend.compile = hip.HipBackend.compile = forbidden  # type: ignore[method-assign]
    ran: Counter[str] = Counter()
    failed, idle = {}, {}
    for name, op in registry.primitives().items():
        for case in grid.cases(op, "full", device):
            args = grid.inputs(op, case, plan.dtype, plan.seed, device)
            for one in runner.implementations(plan, op, args):
                if registry.implementation(name, one.name).backend not in backends:
                    continue
                label = f"{name} {one.name}"
                if one.skipped is not None:
                    idle[label] = one.skipped
                    continue
                try:
                    with torch.no_grad():
                        one.call_of(rotation.spared(op, args))()
                    torch.cuda.synchronize()
                    ran[label] += 1
                except Exception as error:  # noqa: BLE001 - all that fail are told
                    failed[f"{label} {case.name}"] = f"{type(error).__name__}: {error}"[:300]
    never = {label: why for label, why in idle.items() if label not in ran}
    return {"ran": ran, "compiled": compiled, "failed": failed, "never": never}


if __name__ == "__main__":
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        report = main()
    report["warnings"] = [str(s.message) for s in said if "artefact" in str(s.message)]
    sys.stdout.write(json.dumps(report) + "\n")
