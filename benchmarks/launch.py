"""Host cost of `ops.rms_norm` on a small tensor, against the least that a launch of the same kernel can cost.

Triton: `empty_like` and the compiled kernel's own ``run``, everything else bound before. CUDA: `empty_like` and
cuLaunchKernel through ctypes, arguments packed before. Both baselines write to the new tensor's predecessor and pass
one fixed stream, so they do less than any op can. Each figure is the median over batches of calls, by
``time.perf_counter_ns``, with nothing waited for inside a batch; trials alternate, and the spread is that of trials.

    python benchmarks/launch.py [--json FILE] [--rows 4] [--width 1024]
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import importlib
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import ferryman
from ferryman import ops
from ferryman.backends import replay, simt_runtime
from ferryman.dispatch import plan, registry, select
from ferryman.ops.norm import simt_kernels

TRIALS, BATCHES, CALLS = 3, 150, 40
Call = Callable[[], Any]


def seconds(call: Call) -> float:
    """Median over batches of one call's host time; the device catches up between batches."""
    times = []
    gc.disable()
    for _ in range(BATCHES):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / CALLS)
        torch.cuda.synchronize()
    gc.enable()
    return statistics.median(times) * 1e-9


def measure(calls: dict[str, Call]) -> dict[str, list[float]]:
    """Seconds of each call in each trial, alternating."""
    for call in calls.values():
        for _ in range(CALLS):
            call()
    torch.cuda.synchronize()
    trials: dict[str, list[float]] = {name: [] for name in calls}
    for trial in range(TRIALS):
        for name in list(calls)[:: 1 if trial % 2 == 0 else -1]:
            trials[name].append(seconds(calls[name]))
    return trials


def common(x: torch.Tensor) -> dict[str, Call]:
    """What every launch is made of."""
    index = x.device.index
    calls: dict[str, Call] = {
        "empty_like": lambda: torch.empty_like(x),
        "data_ptr": x.data_ptr,
        "current stream": lambda: torch._C._cuda_getCurrentRawStream(index),
        "current device": torch._C._cuda_getDevice,
    }
    direct = getattr(replay._GUARDS, "_empty_strided_cuda", None)
    if direct is not None:
        size, stride = tuple(x.shape), x.stride()
        calls["empty, as replays allocate"] = lambda: direct(size, stride, x.dtype)
    return calls


def op_calls(name: str, x: torch.Tensor, w: torch.Tensor) -> dict[str, Call]:
    """The op, its parts, and the launcher that runs where no replay can."""
    op = ops.rms_norm.primitive  # type: ignore[attr-defined]
    target = select.target_of(select.profile_for(x.device))
    launcher = registry.launcher(registry.asked("rms_norm", (name,))[0])
    for _ in range(plan.REPLAY_AFTER + 4):
        ops.rms_norm(x, w)
    frozen = replay.freeze(launcher, op.names, (x, w, 1e-6, False), target, x.device)
    if frozen is None or not any(run.__code__ == frozen.__code__ for _, run, *_ in plan.runner_of(op).hot.values()):
        sys.exit(f"{name}: the plan is not a replay, so there is nothing to measure")
    return {
        "ops.rms_norm": lambda: ops.rms_norm(x, w),
        "its replay alone": lambda: frozen(x, w, 1e-6, False, target),
        "its launcher alone": lambda: launcher(x, w, 1e-6, False, target),
    }


def triton_calls(x: torch.Tensor, w: torch.Tensor) -> dict[str, Call]:
    """The baseline: `CompiledKernel.run`, with tensors as users pass them and with addresses."""
    triton_kernels: Any = importlib.import_module("ferryman.ops.norm.triton_kernels")
    seen: list[Any] = []
    launch = triton_kernels.launch
    triton_kernels.launch = lambda kernel, grid, *args, device, **meta: seen.append((kernel, grid, args, meta))
    try:
        target = select.target_of(select.profile_for(x.device))
        keep = triton_kernels.rms_norm(x, w, 1e-6, False, target)
    finally:
        triton_kernels.launch = launch
    ((kernel, grid, args, meta),) = seen
    compiled = kernel.run(*args, grid=grid, warmup=False, **meta)
    run, stream = compiled.run, torch._C._cuda_getCurrentRawStream(x.device.index)
    head = (*(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None)
    addresses = tuple(a.data_ptr() if isinstance(a, torch.Tensor) else a for a in args)

    def tensors() -> None:
        torch.empty_like(keep)
        run(*head, *args)

    def pointers() -> None:
        torch.empty_like(keep)
        run(*head, *addresses)

    def jit() -> None:
        torch.empty_like(keep)
        kernel.run(*args, grid=grid, warmup=False, **meta)

    return {
        "baseline: CompiledKernel.run(tensors) + empty_like": tensors,
        "baseline: CompiledKernel.run(addresses) + empty_like": pointers,
        "Triton's kernel[grid] + empty_like": jit,
        "CompiledKernel.run(addresses)": lambda: run(*head, *addresses),
    }


def cuda_calls(x: torch.Tensor, w: torch.Tensor) -> dict[str, Call]:
    """The baseline: cuLaunchKernel through ctypes, and CuPy's own call."""
    target = select.target_of(select.profile_for(x.device))
    runtime: Any = simt_runtime.runtime(target)
    seen: list[Any] = []
    launch = runtime.launch
    runtime.launch = lambda *given: seen.append(given)
    try:
        keep = simt_kernels.rms_norm(x, w, 1e-6, False, target)
    finally:
        runtime.launch = launch
    ((unit, device, grid, block, shared, args),) = seen
    runtime.launch(unit, device, grid, block, shared, args)
    function, stream = runtime._functions[unit.name, device.index], torch._C._cuda_getCurrentRawStream(device.index)
    slots = [ctypes.c_float(a) if isinstance(a, float) else ctypes.c_int64(a) for a in args]
    packed = (ctypes.c_void_p * len(slots))(*[ctypes.addressof(s) for s in slots])
    packed.values = slots  # type: ignore[attr-defined]  # an address keeps nothing alive
    submit, handle, on = (
        ctypes.CDLL("libcuda.so.1").cuLaunchKernel,
        ctypes.c_void_p(function.ptr),
        ctypes.c_void_p(stream),
    )

    def prepacked() -> None:
        torch.empty_like(keep)
        submit(handle, grid, 1, 1, block, 1, 1, shared, on, packed, None)

    def cupy() -> None:
        torch.empty_like(keep)
        runtime.start(function, stream, device.index, grid, block, shared, args)

    addresses = [0, 2, 3]  # x, weight and y, which is where rms_norm's arguments have them
    bound, given = (
        runtime.bind(function, device.index, grid, block, shared, args, addresses),
        [args[i] for i in addresses],
    )
    return {
        "baseline: ctypes cuLaunchKernel + empty_like": prepacked,
        "CuPy's call + empty_like": cupy,
        "ctypes cuLaunchKernel": lambda: submit(handle, grid, 1, 1, block, 1, 1, shared, on, packed, None),
        "bound launch": lambda: bound(stream, *given),
    }


BASELINES = {"triton": triton_calls, "cuda": cuda_calls}


def run(rows: int, width: int, device: torch.device) -> dict[str, Any]:
    x = torch.randn(rows, width, device=device, dtype=torch.bfloat16)
    w = torch.randn(width, device=device, dtype=torch.bfloat16)
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "shape": [rows, width],
        "dtype": "bfloat16",
        "trials": TRIALS,
        "batches": BATCHES,
        "calls": CALLS,
        "parts": rendered(measure(common(x))),
        "backends": {},
    }
    for name, baseline in BASELINES.items():
        reasons = registry.probe(name, select.profile_for(device).vendor)
        if reasons:
            document["backends"][name] = {"not run": list(reasons)}
            continue
        with torch.no_grad(), ferryman.use(name):
            trials = measure(baseline(x, w) | op_calls(name, x, w))
        against = [n for n in trials if n.startswith("baseline")]
        ratios = [ours / min(trials[n][i] for n in against) for i, ours in enumerate(trials["ops.rms_norm"])]
        document["backends"][name] = {
            "calls": rendered(trials),
            "ratio": statistics.median(ratios),
            "ratios": ratios,
            "dispatch_us": 1e6
            * (statistics.median(trials["ops.rms_norm"]) - statistics.median(trials["its replay alone"])),
        }
    return document


def rendered(trials: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"us": statistics.median(times) * 1e6, "spread": max(times) / min(times)}
        for name, times in trials.items()
    }


def table(document: dict[str, Any]) -> str:
    lines = [
        f"{document['device']}, torch {document['torch']}, rms_norm of {document['shape']} bfloat16, host time",
        "",
    ]
    lines += ["| call | us | spread of trials |", "|---|---|---|"]
    groups = [("", document["parts"])] + [
        (f"{n}: ", b["calls"]) for n, b in document["backends"].items() if "calls" in b
    ]
    for prefix, calls in groups:
        lines += [f"| {prefix}{name} | {call['us']:.2f} | {call['spread']:.2f} |" for name, call in calls.items()]
    lines.append("")
    for name, backend in document["backends"].items():
        if "ratio" in backend:
            low, high = min(backend["ratios"]), max(backend["ratios"])
            ratio = f"{name}: {backend['ratio']:.2f} x the fastest baseline ({low:.2f} to {high:.2f})"
            lines.append(f"{ratio}; dispatch {backend['dispatch_us']:.2f} us")
        else:
            lines.append(f"{name}: not run: {'; '.join(backend['not run'])}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the document here, and the table beside it as Markdown")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--width", type=int, default=1024)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/launch.py needs an NVIDIA or AMD device; torch sees none")
    document = run(options.rows, options.width, torch.device("cuda", torch.cuda.current_device()))
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(table(document))
    print(table(document))


if __name__ == "__main__":
    main()
