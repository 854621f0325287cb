"""Host cost of a cached call of each op on a small tensor, against the least that a launch of its kernels can cost.

    python benchmarks/launch.py [--op rms_norm ...] [--line triton.rows ...] [--sample 8 --seed 1] [--seconds 200]
                                [--json FILE]

An op is called on its own small cases. Of each backend that runs here its first replayable line that serves one of them
is measured, or what --line names. Beside the op: its replay, its launcher (which runs where
no replay can), PyTorch's own call where the op has one, and baselines that launch the same kernels with everything
bound before. Triton: `empty_like` of each result and the compiled kernels' own ``run``. CUDA: `empty_like` and
cuLaunchKernel through ctypes, arguments packed before. Baselines pass one fixed stream and write to memory of before,
so they do less than any op can. Each figure is the median over batches of calls, by ``time.perf_counter_ns``, with
nothing waited for inside a batch; trials alternate, and the spread is that of trials.

A line that the plan does not replay has a row with the reason (`ferryman.dispatch.serving`). Ops
that --seconds leave no time for are listed. Exits with 1 where no line was measured.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ferryman
import small_calls
from ferryman.backends import replay, simt_runtime
from ferryman.device_profiles import Profile
from ferryman.dispatch import plan, registry, select
from ferryman.dispatch.serving import Serving, serving
from ferryman.errors import UnknownName
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.running.process import failure
from small_calls import device_of

TRIALS, BATCHES, CALLS = 3, 150, 40
OP, REPLAY, LAUNCHER, OWN, BASELINE = "the op", "its replay alone", "its launcher alone", "torch's own call", "baseline"
DTYPE = torch.bfloat16
Call = Callable[[], Any]


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stream_of(device: torch.device) -> int:
    return int(torch._C._cuda_getCurrentRawStream(device.index)) if device.type == "cuda" else 0


def seconds(call: Call, device: torch.device) -> float:
    """Median over batches of one call's host time; the device catches up between batches."""
    times = []
    gc.disable()
    for _ in range(BATCHES):
        start = time.perf_counter_ns()
        for _ in range(CALLS):
            call()
        times.append((time.perf_counter_ns() - start) / CALLS)
        wait(device)
    gc.enable()
    return statistics.median(times) * 1e-9


def measure(calls: dict[str, Call], device: torch.device) -> dict[str, list[float]]:
    """Seconds of each call in each trial, alternating."""
    for call in calls.values():
        for _ in range(CALLS):
            call()
    wait(device)
    trials: dict[str, list[float]] = {name: [] for name in calls}
    for trial in range(TRIALS):
        for name in list(calls)[:: 1 if trial % 2 == 0 else -1]:
            trials[name].append(seconds(calls[name], device))
    return trials


def parts(x: Tensor) -> dict[str, Call]:
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


# -------------------------------------------------------------------------------------------------------- one line


def warm(op: Primitive, args: tuple[Any, ...]) -> Serving:
    """Call the op until its plan would be a replay. What serves it then."""
    call = op.namespace["_resolve"]
    for _ in range(plan.REPLAY_AFTER + 4):
        call(*args)
    now = serving(op, args)
    assert now is not None, f"{op.name} has no plan after {plan.REPLAY_AFTER} calls"
    return now


def op_calls(op: Primitive, line: Implementation, args: tuple[Any, ...], now: Serving) -> dict[str, Call]:
    """The op, its parts, and what else computes it."""
    resolve, launcher = op.namespace["_resolve"], registry.launcher(line)
    calls: dict[str, Call] = {
        OP: lambda: resolve(*args),
        REPLAY: lambda: now.run(*args, now.extra),
        LAUNCHER: lambda: launcher(*args, now.extra),
    }
    own = small_calls.torch_call(op, args)
    return calls if own is None else {**calls, OWN: own}


def new_results(args: Sequence[Any], result: Any) -> list[Tensor]:
    """The results that are no arguments: the least that a call must allocate."""
    given = {a.data_ptr() for a in args if isinstance(a, Tensor)}
    results = result if isinstance(result, tuple | list) else (result,)
    return [r for r in results if isinstance(r, Tensor) and r.data_ptr() not in given]


def allocating(results: Sequence[Tensor], launch: Callable[[], None]) -> Call:
    def call() -> None:
        for result in results:
            torch.empty_like(result)
        launch()

    return call


def triton_calls(launcher: Callable[..., Any], args: tuple[Any, ...], target: Any) -> dict[str, Call]:
    """`CompiledKernel.run`, with tensors as users pass them and with addresses; Triton's own way beside."""
    from triton.runtime.jit import JITFunction

    launches: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = []
    run = JITFunction.run

    def seen(kernel: Any, *given: Any, **meta: Any) -> Any:
        launches.append((kernel, given, meta))
        return run(kernel, *given, **meta)

    JITFunction.run = seen
    try:
        results = new_results(args, launcher(*args, target))
    finally:
        JITFunction.run = run
    stream = stream_of(device_of(args))
    bound = []
    for kernel, given, meta in launches:
        compiled = kernel.run(*given, **meta)
        place = (*(*meta["grid"], 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None)
        values = dict(zip(kernel.arg_names, given, strict=False)) | meta
        tensors = [values.get(p.name, p.default) for p in kernel.params]
        addresses = [v.data_ptr() if isinstance(v, Tensor) else v for v in tensors]
        bound.append((compiled.run, (*place, *tensors), (*place, *addresses)))

    def with_tensors() -> None:
        for start, tensors, _ in bound:
            start(*tensors)

    def with_addresses() -> None:
        for start, _, addresses in bound:
            start(*addresses)

    def jit() -> None:
        for kernel, given, meta in launches:
            kernel.run(*given, **meta)

    return {
        f"{BASELINE}: CompiledKernel.run(tensors) + empty_like": allocating(results, with_tensors),
        f"{BASELINE}: CompiledKernel.run(addresses) + empty_like": allocating(results, with_addresses),
        "Triton's kernel[grid] + empty_like": allocating(results, jit),
        "CompiledKernel.run(addresses)": with_addresses,
    }


def cuda_calls(launcher: Callable[..., Any], args: tuple[Any, ...], target: Any) -> dict[str, Call]:
    """cuLaunchKernel through ctypes, and CuPy's own call."""
    runtime: Any = simt_runtime.runtime(target)
    launches: list[tuple[Any, ...]] = []
    launch = runtime.launch

    def seen(*given: Any) -> None:
        launches.append(given)
        launch(*given)

    runtime.launch = seen
    try:
        results = new_results(args, launcher(*args, target))
    finally:
        del runtime.launch
    device, submit = device_of(args), ctypes.CDLL("libcuda.so.1").cuLaunchKernel
    stream, index = stream_of(device), device.index or 0
    bound, loaded = [], []
    for unit, _, blocks, threads, shared, given in launches:
        function = runtime._functions[unit.name, index]
        slots = [ctypes.c_float(a) if isinstance(a, float) else ctypes.c_int64(a) for a in given]
        packed = (ctypes.c_void_p * max(1, len(slots)))(*[ctypes.addressof(s) for s in slots])
        packed.kept = slots  # type: ignore[attr-defined]  # an address keeps nothing alive
        handle = ctypes.c_void_p(function.ptr)
        bound.append((handle, blocks, 1, 1, threads, 1, 1, shared, ctypes.c_void_p(stream), packed, None))
        loaded.append((function, stream, index, blocks, threads, shared, given))

    def prepacked() -> None:
        for one in bound:
            submit(*one)

    def cupy() -> None:
        for one in loaded:
            runtime.start(*one)

    return {
        f"{BASELINE}: ctypes cuLaunchKernel + empty_like": allocating(results, prepacked),
        "CuPy's call + empty_like": allocating(results, cupy),
        "ctypes cuLaunchKernel": prepacked,
    }


BASELINES = {"triton": triton_calls, "cuda": cuda_calls}


# ------------------------------------------------------------------------------------------------------ what to measure


def lines_of(op: Primitive, asked: Sequence[str], vendor: str) -> Iterator[tuple[str, list[Implementation]]]:
    """(what was asked for, the lines that may be measured for it): by default the replayable ones of each backend."""
    menu = registry.implementations(op.name)
    for name in asked or BASELINES:
        here = [x for x in menu if x.answers(name) and x.backend in BASELINES]
        if not asked:
            here = [x for x in here if x.replayable and not registry.probe(x.backend, vendor)]
        if here:
            yield name, here


def rows_of(op: Primitive, asked: Sequence[str], device: torch.device) -> Iterator[dict[str, Any]]:
    """A row of each line: its times, or why there are none."""
    calls = list(small_calls.calls(op, DTYPE, device))
    profile = select.profile_for(device)
    for name, lines in lines_of(op, asked, profile.vendor):
        served = first_served(op, lines, calls, profile)
        if isinstance(served, str):
            yield {"op": op.name, "case": "-", "line": name, "why": served}
            continue
        line, case, args = served
        row: dict[str, Any] = {"op": op.name, "case": case, "line": line.name}
        try:
            with torch.no_grad(), ferryman.use(line.name):
                row |= measured(op, line, args)
        except Exception as error:  # noqa: BLE001 - a row says what went wrong; a lost device rises
            row["why"] = failure(error, device)
        yield row


def first_served(
    op: Primitive, lines: Sequence[Implementation], calls: Sequence[tuple[str, tuple[Any, ...]]], profile: Profile
) -> tuple[Implementation, str, tuple[Any, ...]] | str:
    """(line, case, arguments) of the first line that serves one of the op's small calls, or why none does."""
    why = ["the op has no small case"]
    for line in lines:
        for case, args in calls:
            reasons = select.refusals(line, select.View.of(op, args, profile), profile)
            if not reasons:
                return line, case, args
            why = [f"{line.name}, {case}: {reason}" for reason in reasons]
    return "; ".join(why)


def measured(op: Primitive, line: Implementation, args: tuple[Any, ...]) -> dict[str, Any]:
    """The times of one line's call, or why its plan is no replay."""
    now = warm(op, args)
    if now.why:
        return {"line": now.line, "why": f"the plan is no replay: {now.why}"}
    device = device_of(args)
    baselines = BASELINES[line.backend](registry.launcher(line), args, now.extra)
    trials = measure(baselines | op_calls(op, line, args, now), device)
    against = [name for name in trials if name.startswith(BASELINE)]
    ratios = [ours / min(trials[name][i] for name in against) for i, ours in enumerate(trials[OP])]
    return {
        "calls": rendered(trials),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "dispatch_us": 1e6 * (statistics.median(trials[OP]) - statistics.median(trials[REPLAY])),
    }


def rendered(trials: dict[str, list[float]]) -> dict[str, dict[str, float]]:
    return {
        name: {"us": statistics.median(times) * 1e6, "spread": max(times) / min(times)}
        for name, times in trials.items()
    }


def table(document: dict[str, Any]) -> str:
    """A row a line, then those that were not measured with their reasons, then what every launch is made of."""
    lines = [
        f"{document['device']}, torch {document['torch']}, {document['dtype']}, host microseconds of a cached call "
        "(`benchmarks/launch.py`). The ratio is the op's time over that of the fastest baseline, and its range over "
        "trials; the replay, the launcher and PyTorch's call stand alone.",
        "",
        "| op | call | line | op | baseline | ratio | replay | dispatch | launcher | torch |",
        "|" + "---|" * 10,
    ]
    for row in (r for r in document["rows"] if "calls" in r):
        calls = row["calls"]
        least = min(call["us"] for name, call in calls.items() if name.startswith(BASELINE))
        own = f"{calls[OWN]['us']:.2f}" if OWN in calls else "-"
        cells = (
            row["op"],
            row["case"],
            row["line"],
            f"{calls[OP]['us']:.2f}",
            f"{least:.2f}",
            f"{row['ratio']:.2f} ({min(row['ratios']):.2f} to {max(row['ratios']):.2f})",
            f"{calls[REPLAY]['us']:.2f}",
            f"{row['dispatch_us']:.2f}",
            f"{calls[LAUNCHER]['us']:.2f}",
            own,
        )
        lines.append(f"| {' | '.join(cells)} |")
    lines.append("")
    lines += [f"- {r['op']} ({r['line']}): {' '.join(r['why'].split())}" for r in document["rows"] if "why" in r]
    lines += [f"- {name}: {call['us']:.2f} us" for name, call in document["parts"].items()]
    if document.get("left"):
        lines.append(f"- no time was left for: {', '.join(document['left'])}")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    small_calls.add_options(parser)
    parser.add_argument("--line", nargs="+", default=[], metavar="NAME", help="these lines, or backends")
    parser.add_argument("--seconds", type=float, help="begin no op later than this")
    parser.add_argument("--json", type=Path, help="write the document here, and the table beside it as Markdown")
    options = parser.parse_args()
    begun = time.monotonic()
    if not torch.cuda.is_available():
        sys.exit("benchmarks/launch.py needs an NVIDIA or AMD device; torch sees none")
    device = torch.device("cuda", torch.cuda.current_device())
    try:
        for name in options.line:
            registry.check_requested(name)
    except UnknownName as error:
        sys.stderr.write(f"{error}\n")
        raise SystemExit(2) from None
    document: dict[str, Any] = {
        "device": torch.cuda.get_device_name(device),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "dtype": str(DTYPE).removeprefix("torch."),
        "trials": TRIALS,
        "batches": BATCHES,
        "calls": CALLS,
        "parts": rendered(measure(parts(torch.randn(4, 1024, device=device, dtype=DTYPE)), device)),
        "rows": [],
        "left": [],
    }
    for op in small_calls.ops_of(options):
        if options.seconds is not None and time.monotonic() - begun > options.seconds:
            document["left"].append(op.name)
        else:
            document["rows"] += rows_of(op, options.line, device)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(table(document))
    print(table(document))
    if not any("calls" in row for row in document["rows"]):
        sys.exit("no line was measured: the list above says why")


if __name__ == "__main__":
    main()
