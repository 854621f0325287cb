"""Whole models, ported against unported, eager and under torch.compile, on this device.

    python benchmarks/whole_models.py --json models.json llama qwen3 mixtral          # default: FAMILIES below
    python benchmarks/whole_models.py --how eager bert vit                            # without what is compiled
    python benchmarks/whole_models.py --jobs 6 qwen3_8b/prefill qwen3_8b/static_32    # a server's steps: scenarios.py
    python benchmarks/whole_models.py --show models.json                              # the table of a document
    python benchmarks/whole_models.py --host bert vit whisper gpt2                    # the host's part, on any CPU

Each family has the widths of its library's default config, few layers, random weights and bfloat16. A process of its
own builds it, and a twin that shares its weights is ported. All processes compile side by side; then each is timed
alone, in turns with none. The two sides alternate within a trial, so that clocks and heat hit both. A time is that of a
call, the host's work included. `speed` is the unported median over the ported one: above 1 the ported model is faster.
It is "slower" where the 95% interval of the trials' ratios lies below 1.00. Peak memory is what a step allocates above
the weights. Training is a forward and a backward of a fixed cotangent.

`--host` times widths of 64, so that computing takes next to nothing, eager, each side's best call of many. Without an
accelerator it is the one that `--profile` names, simulated (`simulated_device.py`), in float32, whose products take a
CPU least; attention's own differentiable call is there in bfloat16 only (`--dtype`). The last row is the function that
autograd sees of an op against one that does nothing but launch the same kernels.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import gc
import json
import math
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

import scenarios
from ferryman import files

FAMILIES = (
    "llama",
    "qwen3",
    "mistral",
    "phi3",
    "olmo2",
    "gpt2",
    "mixtral",
    "qwen3_moe",
    "mamba2",
    "bert",
    "modernbert",
    "t5",
    "whisper",
    "vit",
    "dinov2",
)
TRIALS, DROPPED, PASSES = 20, 3, 3
WARM = 3.0  # seconds
TRAINED = 2e9  # bytes of weights: their gradients take as much again, in every process that compiles
LIMITS = {"eager": (1.15, 0.98), "compiled": (1.0, 0.97)}  # geometric mean, worst


def warmed(call: Callable[[], Any]) -> None:
    """Call until compilers and caches are done; ours replays a launch from its 64th call on. The first three may
    compile, and do not count as time."""
    for _ in range(3):
        call()
    begin = time.perf_counter()
    for _ in range(97):
        call()
        if time.perf_counter() - begin > WARM:
            break


def captured(model: nn.Module, run: Callable[[nn.Module], Any], device: torch.device) -> tuple[Any, dict[str, Any]]:
    """What the family's inputs are for this model: drawing them is no part of its time."""
    kept: list[tuple[Any, dict[str, Any]]] = []
    handle = model.register_forward_pre_hook(lambda m, args, kwargs: kept.append((args, kwargs)), with_kwargs=True)
    with torch.no_grad(), device:
        torch.manual_seed(0)
        run(model)
    handle.remove()
    return kept[0]


def forward(model: Any, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    def call() -> Any:
        with torch.no_grad():
            return model(*args, **kwargs)

    return call


def training(model: Any, owner: nn.Module, args: Any, kwargs: dict[str, Any]) -> Callable[[], Any]:
    from ferryman.porting.model.generic import tensors_in

    slopes: list[torch.Tensor] = []

    def call() -> Any:
        owner.zero_grad(set_to_none=True)
        outputs = [t for _, t in tensors_in(model(*args, **kwargs)) if t.requires_grad]
        if not slopes:
            slopes.extend(torch.randn_like(t) for t in outputs)
        torch.autograd.backward(outputs, slopes)

    return call


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(PASSES):
        call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return (time.perf_counter() - begin) / PASSES


def peak(call: Callable[[], Any], owner: nn.Module, device: torch.device) -> int | None:
    """Bytes that one call allocates above what lies there before it."""
    if device.type != "cuda":
        return None
    owner.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated() - before)


def place(model: nn.Module, device: torch.device) -> None:
    """Move the weights, which both sides share; what was compiled keeps referring to them."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(device)
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def compare(sides: Sequence[Callable[[], Any]], device: torch.device) -> dict[str, Any]:
    times: tuple[list[float], list[float]] = ([], [])
    for call in sides:
        warmed(call)  # the weights have moved, and what compiled may have cut the calls before short
    for trial in range(TRIALS + DROPPED):
        for side in (0, 1) if trial % 2 else (1, 0):
            taken = seconds(sides[side], device)
            if trial >= DROPPED:
                times[side].append(taken)
    ratios = sorted(a / b for a, b in zip(*times, strict=True))
    # the interval of a median by order statistics, 95% of 20 trials: from the sixth to the fifteenth
    return {
        "unported_ms": statistics.median(times[0]) * 1e3,
        "ported_ms": statistics.median(times[1]) * 1e3,
        "speed": statistics.median(times[0]) / statistics.median(times[1]),
        "interval": [ratios[5], ratios[-6]],
    }


def worker(name: str, device: torch.device, tiny: bool, layers: int | None, hows: Sequence[str]) -> None:
    """Build, port, compile; then wait for "go" on stdin, time, and print one line of JSON."""
    import transformers  # noqa: F401

    import ferryman.integrations.transformers  # noqa: F401
    from ferryman.porting.model import bundled
    from ferryman.porting.model.port import port

    torch._dynamo.config.recompile_limit = 64
    args: Any = ()
    kwargs: dict[str, Any] = {}
    if name in scenarios.NAMES:
        model = scenarios.build(tiny, layers, device)
        modes = {name.removeprefix(scenarios.PREFIX): scenarios.step_of(name, model, tiny)}
    else:
        with device:
            model = bundled.build(name, tiny, torch.bfloat16, layers).to(device)
        args, kwargs = captured(model, bundled.inputs_of(name, tiny, model), device)
        modes = {"forward": lambda called, owner: forward(called, args, kwargs)}
        if sum(p.numel() * p.element_size() for p in model.parameters()) <= TRAINED:
            modes["training"] = lambda called, owner: training(called, owner, args, kwargs)
    shared = {id(t): t for t in (*model.parameters(), *model.buffers())}
    twin = copy.deepcopy(model, shared)
    begin = time.perf_counter()
    report = port(twin)
    ported_in = time.perf_counter() - begin
    steps: dict[tuple[str, str], list[Callable[[], Any]]] = {}
    failed: dict[str, str] = {}
    for mode, step in modes.items():
        for how in hows:
            sides = []
            for owner in (model, twin):
                called: Any = torch.compile(owner) if how == "compiled" else owner
                sides.append(step(called, owner))
            which = "unported"
            try:
                for side in sides:
                    warmed(side)
                    which = "ported"
            except Exception as error:  # noqa: BLE001 - the model's own code; the row says so
                failed[f"{mode} {how}"] = f"{which}: {type(error).__name__}: {error}".split("\n", 1)[0][:200]
                continue
            finally:
                model.zero_grad(set_to_none=True)
            steps[mode, how] = sides
    place(model, torch.device("cpu"))  # the next one needs the room
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        return
    place(model, device)
    cases = []
    for (mode, how), sides in steps.items():
        memory = [peak(side, model, device) for side in sides]
        cases.append({"mode": mode, "how": how, **compare(sides, device), "peak_bytes": memory})
        model.zero_grad(set_to_none=True)
    row = {
        "family": name,
        "parameters": sum(p.numel() for p in model.parameters()),
        "port_seconds": ported_in,
        "ported": report.calls(1),
        "cases": cases,
        "failed": failed,
        "inputs": {k: list(v.shape) for k, v in kwargs.items() if isinstance(v, torch.Tensor)},
    }
    print(json.dumps(row), flush=True)


class Child:
    """A family's process. ``ready`` is set when it has compiled, or has ended."""

    def __init__(self, name: str, asked: argparse.Namespace) -> None:
        self.name, self.ready, self.lines = name, threading.Event(), list[str]()
        command = [sys.executable, __file__, "--worker", name, "--device", asked.device]
        command += ["--tiny"] if asked.tiny else []
        command += ["--layers", str(asked.layers)] if asked.layers else []
        command += ["--how", *asked.how]
        pipe, alone = subprocess.PIPE, {**os.environ, "OMP_NUM_THREADS": "1"}  # many compile and prove side by side
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, env=alone)
        self.errors: list[str] = []
        self.readers = [threading.Thread(target=f, daemon=True) for f in (self._read, self._complain)]
        for reader in self.readers:
            reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.ready.set() if line.strip() == "ready" else self.lines.append(line)
        self.ready.set()

    def _complain(self) -> None:
        assert self.process.stderr is not None
        self.errors.extend(line for line in self.process.stderr)

    def finish(self, ready: bool, limit: float) -> dict[str, Any]:
        assert self.process.stdin is not None
        try:
            if ready and self.process.poll() is None:
                self.process.stdin.write("go\n")
                self.process.stdin.flush()
            elif not ready:
                self.process.kill()
            self.process.wait(limit)
        except (subprocess.TimeoutExpired, BrokenPipeError):
            self.process.kill()
            self.process.wait()
        for reader in self.readers:
            reader.join(5)
        for line in self.lines:
            if line.startswith("{"):
                return dict(json.loads(line))
        said = [line.strip() for line in self.errors if line.strip() and not line.startswith("ferryman:")]
        why = " | ".join(said[-3:])[:600] or "no result in time" if ready else "not compiled in time"
        return {"family": self.name, "cases": [], "failed": {"all": why}}


def drive(asked: argparse.Namespace) -> dict[str, Any]:
    begin = time.monotonic()
    names = list(asked.families or FAMILIES)
    waiting, children = list(names), list[Child]()
    while waiting or any(not c.ready.is_set() for c in children):
        while waiting and sum(not c.ready.is_set() for c in children) < asked.jobs:
            children.append(Child(waiting.pop(0), asked))
        if time.monotonic() - begin > asked.compile_seconds:
            break
        time.sleep(0.2)
    ready = {c.name: c.ready.is_set() for c in children}
    for child in children:
        if not ready[child.name]:
            child.process.kill()
    families = []
    for child in children:
        left = asked.seconds - (time.monotonic() - begin)
        families.append(child.finish(ready[child.name] and left > 0, max(left, 1)))
        sys.stderr.write(f"{child.name}: {len(families[-1]['cases'])} cases\n")
        if asked.json:
            asked.json.write_text(json.dumps(_document(families, waiting, asked), indent=1) + "\n")
    return _document(families, waiting, asked)


def _document(families: list[dict[str, Any]], waiting: Sequence[str], asked: argparse.Namespace) -> dict[str, Any]:
    import transformers

    from ferryman.device_profiles import detect

    cuda = asked.device.startswith("cuda")
    return {
        "device": torch.cuda.get_device_name() if cuda else "CPU",
        "profile": detect(asked.device).name,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "tiny": asked.tiny,
        "families": families,
        "not_started": list(waiting),
    }


def summary(document: dict[str, Any]) -> list[str]:
    lines = []
    for mode in dict.fromkeys(case["mode"] for family in document["families"] for case in family["cases"]):
        for how, (mean, worst) in LIMITS.items():
            speeds = {
                f["family"]: c for f in document["families"] for c in f["cases"] if (c["mode"], c["how"]) == (mode, how)
            }
            if not speeds:
                continue
            geomean = math.exp(statistics.fmean(math.log(c["speed"]) for c in speeds.values()))
            least = min(speeds, key=lambda n: speeds[n]["speed"])
            slower = [n for n, c in speeds.items() if c["interval"][1] < 1]
            lines.append(
                f"{mode}, {how}: {len(speeds)} families, geometric mean {geomean:.2f} (wanted {mean}), least "
                f"{speeds[least]['speed']:.2f} ({least}; wanted {worst}); slower: {', '.join(slower) or 'none'}"
            )
    return lines


def markdown(document: dict[str, Any]) -> str:
    lines = [
        f"Ported against unported on {document['device']}, bfloat16, torch {document['torch']}, transformers "
        f"{document['transformers']}, default widths, few layers (`benchmarks/whole_models.py`). Speed: unported over "
        "ported time of a call, with the 95% interval of the ratio. Memory: what a call allocates, likewise.",
        "",
        "| family | step | unported ms | ported ms | speed | 95% | memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for f in document["families"]:
        for c in f["cases"]:
            before, after = c["peak_bytes"]
            memory = f"{after / before:.2f}" if before and after is not None else "-"
            lines.append(
                f"| {f['family']} | {c['mode']}, {c['how']} | {c['unported_ms']:.2f} | {c['ported_ms']:.2f} | "
                f"{c['speed']:.3f} | {c['interval'][0]:.3f} to {c['interval'][1]:.3f} | {memory} |"
            )
    lines += ["", *(f"- {line}" for line in summary(document))]
    for f in document["families"]:
        lines += [f"- {f['family']}, {step}, did not run: {why}" for step, why in f["failed"].items()]
    if document["not_started"]:
        lines.append(f"- not started in time: {', '.join(document['not_started'])}")
    return "\n".join(lines)


def best(calls: Sequence[Callable[[], Any]], trials: int) -> list[float]:
    """Each call's least time in us, in turns; the garbage collector waits."""
    times = [math.inf] * len(calls)
    for _ in range(2):
        for call in calls:
            warmed(call)
    gc.collect()
    gc.disable()
    for _ in range(trials):
        for i, call in enumerate(calls):
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            begin = time.perf_counter()
            call()
            times[i] = min(times[i], time.perf_counter() - begin)
    gc.enable()
    return [t * 1e6 for t in times]


def bare(device: torch.device) -> list[Callable[[], Any]]:
    """Forward and backward of `layer_norm` through the op, and through a function that only launches its kernels."""
    import dataclasses

    from ferryman import ops
    from ferryman.device_profiles import Profile
    from ferryman.dispatch import plan, registry, select

    x = torch.randn(2, 17, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight, bias = (torch.nn.Parameter(torch.randn(64, dtype=torch.bfloat16, device=device)) for _ in range(2))
    slope, known = torch.ones_like(x), select.profile_for(device)
    small: dict[str, int] = {k: v for k, v in known.thresholds.items() if k != select.AUTOGRAD_BYTES}
    ours: Profile = dataclasses.replace(known, thresholds=small)  # otherwise PyTorch's own call leads
    select.profile_for = lambda device: ours
    plan.drop_plans()

    def through_op() -> Any:
        return torch.autograd.grad(ops.layer_norm(x, weight, bias), (x, weight, bias), slope)

    warmed(through_op)
    plans = [plan.runner_of(registry.primitive(n)).plans for n in ("layer_norm", "layer_norm_backward")]
    ((_, forward_plan, _),), ((back, target, _),) = (list(p.values()) for p in plans)

    class Launches(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(x, weight, bias)
            y: torch.Tensor = forward_plan.launch(x, weight, bias, 1e-5, forward_plan.target)
            return y

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> Any:
            return back(grad, *ctx.saved_tensors, 1e-5, target)

    apply: Callable[..., torch.Tensor] = Launches.apply
    return [lambda: torch.autograd.grad(apply(x, weight, bias), (x, weight, bias), slope), through_op]


def host(names: Sequence[str], device: torch.device, profile: str, dtype: torch.dtype, trials: int) -> None:
    """Print what a call costs the host, unported and ported."""
    import ferryman
    import ferryman.integrations.transformers
    from ferryman.porting.model import bundled
    from ferryman.porting.model.port import port

    torch.set_num_threads(1)
    if device.type == "cpu":
        from simulated_device import simulated

        print(f"The host's part of a call: {profile} simulated on this CPU, torch {torch.__version__}, {dtype}\n")
    else:
        print(f"The host's part of a call: {torch.cuda.get_device_name()}, torch {torch.__version__}, {dtype}\n")
    print("| call | unported us | ported us | speed | calls of ours |\n|---|---|---|---|---|", flush=True)
    for name in names:
        with device:
            model = bundled.build(name, True, dtype).to(device)
        args, kwargs = captured(model, bundled.inputs_of(name, True, model), device)
        twin = copy.deepcopy(model, {id(t): t for t in (*model.parameters(), *model.buffers())})
        port(twin)
        with simulated(profile) if device.type == "cpu" else contextlib.nullcontext():
            for mode in ("forward", "training"):
                sides = [
                    forward(m, args, kwargs) if mode == "forward" else training(m, m, args, kwargs)
                    for m in (model, twin)
                ]
                with ferryman.trace() as seen:
                    sides[1]()
                before, after = best(sides, trials)
                lines = ", ".join(f"{op} {line} {n}" for (op, line), n in sorted(seen.calls.items()))
                print(f"| {name}, {mode} | {before:.0f} | {after:.0f} | {before / after:.2f} | {lines} |", flush=True)
    with simulated(profile) if device.type == "cpu" else contextlib.nullcontext():
        before, after = best(bare(device), 10 * trials)
    print(f"| layer_norm, launched in a bare function | {before:.1f} | {after:.1f} | {before / after:.2f} | |")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("families", nargs="*", help=f"default: {', '.join(FAMILIES)}")
    parser.add_argument("--json", type=Path, help="write the document here, after each family")
    parser.add_argument("--show", type=Path, help="print the table of this document, and end")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--tiny", action="store_true", help="small widths, to try the benchmark itself")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--how", nargs="+", choices=list(LIMITS), default=list(LIMITS))
    parser.add_argument("--jobs", type=int, default=16, help="families that compile side by side")
    parser.add_argument("--compile-seconds", type=float, default=400, help="what has not compiled by then is left out")
    parser.add_argument("--seconds", type=float, default=3600, help="of all")
    parser.add_argument("--host", action="store_true", help="the host's part of a call, at small widths")
    parser.add_argument("--profile", default="h100", help="of --host on a CPU: the device that is simulated")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32", help="of --host")
    parser.add_argument("--trials", type=int, default=400, help="of --host")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.host:
        names = asked.families or ("bert", "vit", "dinov2", "whisper", "gpt2")
        host(names, torch.device(asked.device), asked.profile, getattr(torch, asked.dtype), asked.trials)
    elif asked.show:
        print(markdown(files.document(asked.show)))
    elif asked.worker:
        worker(asked.worker, torch.device(asked.device), asked.tiny, asked.layers, asked.how)
    else:
        print(markdown(drive(asked)))


if __name__ == "__main__":
    main()
