"""The process that runs a kernel that is not ours: it may raise, hang or die there, and the check goes on.

It reads one JSON job from stdin and writes one JSON object per line: {"loaded"} once the function is found and its
signature fits, or {"failed"} with the error; then for each case {"at"} before its inputs are made, {"run"} before the
kernel, {"cell"} after it; {"lost"} where the device serves nothing more; {"timing"}; {"done"}.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from typing import Any

import torch

from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from ferryman.errors import FerrymanError, UnknownName
from ferryman.porting.inputs.fills import DTYPES
from ferryman.porting.judging.parity import prepare
from ferryman.porting.judging.prepared import unprepared
from ferryman.porting.kernel import adapter as kernel_adapter
from ferryman.porting.running import timing
from ferryman.porting.running.cells import tier_cases
from ferryman.porting.running.process import end_with_parent

START = "from ferryman.porting.kernel.worker import main; raise SystemExit(main())"


def main() -> int:
    """What kernels print goes to stderr: stdout carries the protocol."""
    end_with_parent()
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # an oracle on planted NaN and Inf warns about them
    warnings.simplefilter("ignore", RuntimeWarning)
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.read())

    def say(**message: Any) -> None:
        out.write(json.dumps(message) + "\n")
        out.flush()

    device = torch.device(job["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    op = registry.primitive(job["op"])
    try:
        reference = kernel_adapter.parse(job["kernel"])
        line = kernel_adapter.declared(op, reference.name, job["accumulation"], job["roundings"], job["deterministic"])
        function, numerics = kernel_adapter.load_apart(reference)
        adapter = kernel_adapter.Adapter(function, op, str(reference), numerics)
    except UnknownName as error:
        say(failed="unknown", kind=error.kind, name=error.name, known=list(error.nearest))
        return 0
    except FerrymanError as error:
        say(failed="kernel", text=str(error))
        return 0
    say(loaded=line.name)
    cases = {case.name: case for case in tier_cases(op, job["tier"])}
    wrong = set[str]()
    for dtype, name in job["cells"]:
        say(at=[dtype, name])
        cell = _cell(
            adapter,
            line,
            cases[name],
            DTYPES[dtype],
            device,
            job["seed"],
            lambda dtype=dtype, name=name: say(run=[dtype, name]),
        )
        say(cell=json.loads(cell.model_dump_json()))
        if cell.verdict not in ("PASS", "UNIMPLEMENTED"):
            wrong.add(dtype)
        gone = _gone(device)
        if gone is not None:
            say(lost=gone)
            out.close()
            os._exit(0)  # the context is broken: an orderly end may hang in it
    for dtype in job["times"]:
        if device.type == "cuda" and dtype not in wrong:
            say(run=[dtype, "the timing"])
            try:
                measured = timing.measure(op, line, DTYPES[dtype], device, detect(device), job["seed"], kernel=adapter)
            except Exception:  # noqa: BLE001 - it refuses the timed case, or memory ran out; its cell says so
                continue
            if measured is not None:
                say(timing=json.loads(measured.model_dump_json()))
    say(done=True)
    return 0


def _cell(
    adapter: kernel_adapter.Adapter,
    line: Any,
    case: Any,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
    starting: Any,
) -> Any:
    try:
        prepared = prepare(registry.primitive(line.op), case, dtype, device, seed)
    except torch.OutOfMemoryError as error:
        why = f"the oracle ran out of memory: {str(error).splitlines()[0][:300]}"
        return kernel_adapter.lost(line, case.name, dtype, device, "NOT_RUN", why)
    except Exception as error:  # noqa: BLE001 - an op from another package may be wrong itself
        why = unprepared(error)
        return kernel_adapter.lost(line, case.name, dtype, device, "MISTRUSTED", why)
    starting()
    return kernel_adapter.check(adapter, line, prepared)


def _gone(device: torch.device) -> str | None:
    """After an illegal access a CUDA context serves nothing more."""
    if device.type != "cuda":
        return None
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return str(error).splitlines()[0][:300]
    return None
