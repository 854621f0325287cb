"""Every implementation of every op on one large case: time, share of a copy's bandwidth or of cuBLAS's rate.

The ceilings are measured in the same process: a device-to-device copy of 4 GiB, and a bf16 product of 8192^3. Inputs
are random; caches are flushed before every run; implementations alternate over three trials; the median and the spread
(largest over smallest trial) are printed. The host's launch cost is hidden behind the flush.

    python benchmarks/ops.py [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from ferryman.device_profiles import detect
from ferryman.dispatch import registry, select
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.porting.cases import materialise

DEVICE, DTYPE = torch.device("cuda", 0), torch.bfloat16
TRIALS, RUNS = 3, 15


def flushed(call: Callable[[], Any], flush: torch.Tensor) -> float:
    """Median seconds of one call on cold caches, by device events."""
    call()
    times = []
    for _ in range(RUNS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return statistics.median(times)


def cases() -> Iterator[tuple[str, Case]]:
    """One model-sized case an op; bytes well above the L2."""
    x, row = TensorSpec((8192, 8192)), TensorSpec((8192,), fill="weight")
    yield "rms_norm", Case("8192x8192", {"x": x, "weight": row, "eps": 1e-6, "cast_before_weight": False})
    yield (
        "add_rms_norm",
        Case("8192x8192", {"x": x, "residual": x, "weight": row, "eps": 1e-6, "cast_before_weight": False}),
    )
    yield "layer_norm", Case("8192x8192", {"x": x, "weight": row, "bias": row, "eps": 1e-5})
    yield "silu_mul", Case("8192x8192", {"gate": x, "up": x})
    yield "gelu_mul", Case("8192x8192", {"gate": x, "up": x, "approximate": "tanh"})
    yield "softmax", Case("8192x8192", {"x": x})
    logits = TensorSpec((4096, 128_256))
    labels = TensorSpec((4096,), dtype="int64", high=128_256)
    yield (
        "cross_entropy",
        Case("4096x128256", {"logits": logits, "target": labels, "ignore_index": -100, "label_smoothing": 0.0}),
    )
    angle = TensorSpec((1, 4096, 128), fill="unit")
    q, k = TensorSpec((4, 32, 4096, 128), layout="heads"), TensorSpec((4, 8, 4096, 128), layout="heads")
    yield "rope", Case("B4 H32/8 S4096 D128", {"q": q, "k": k, "cos": angle, "sin": angle, "interleaved": False})
    for n, m, depth in ((8192, 8192, 8192), (14_336, 4096, 4096), (4096, 16, 4096)):
        yield (
            "linear",
            Case(f"{m}x{n}x{depth}", {"x": TensorSpec((m, depth)), "weight": TensorSpec((n, depth)), "bias": None}),
        )
    options = {"causal": True, "scale": None, "window": None, "softcap": 0.0, "mask": None}
    for name, shape, heads in (
        ("B2 H32 S8192 D128 causal", (2, 32, 8192, 128), 32), ("B2 H32/8 S8192 D128 causal", (2, 32, 8192, 128), 8),
        ("B4 H32 S4096 D64 causal", (4, 32, 4096, 64), 32),
    ):  # fmt: skip
        keys = TensorSpec((shape[0], heads, *shape[2:]), layout="heads")
        yield "attention", Case(name, {"q": TensorSpec(shape, layout="heads"), "k": keys, "v": keys, **options})
    decode = TensorSpec((32, 8, 4096, 128), layout="heads")
    yield (
        "attention",
        Case(
            "decode B32 H32/8 S4096 D128",
            {"q": TensorSpec((32, 32, 1, 128), layout="heads"), "k": decode, "v": decode, **options},
        ),
    )


def ceilings() -> dict[str, float]:
    source = torch.randint(0, 255, (4 << 30,), dtype=torch.uint8, device=DEVICE)
    into = torch.empty_like(source)
    flush = torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    seconds = flushed(lambda: into.copy_(source), flush)
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=DTYPE) for _ in range(2))
    product = flushed(lambda: torch.mm(a, b), flush)
    return {"copy_bytes_per_s": 2 * source.numel() / seconds, "cublas_flops_per_s": 2 * 8192**3 / product}


def arguments(name: str, case: Case) -> dict[str, tuple[Any, ...]]:
    """The forward's arguments, and those of its backward from one real forward."""
    op = registry.primitives()[name]
    values = materialise(case, op, DTYPE, 0, DEVICE)
    found = {name: values}
    if op.backward is not None:
        backward = registry.primitives()[op.backward]
        result = registry.launcher(registry.implementation(name, "triton"))(*values, select.target_of(detect(DEVICE)))
        outputs = result if isinstance(result, tuple) else (result,)
        given = dict(zip(op.names, values, strict=True))
        for out, tensor in zip(op.outputs, outputs, strict=True):
            given[f"out_{out}"] = tensor
            given.setdefault(out, tensor)
        for grad, index in op.gradient_names().items():
            optional = backward.types[grad] == "Tensor?"
            given[grad] = None if optional else torch.randn_like(outputs[index])
        given |= {n: True for n in backward.names if n.startswith("need_")}
        found[op.backward] = tuple(given[n] for n in backward.names)
    return found


def measure() -> dict[str, Any]:
    profile, limits = detect(DEVICE), ceilings()
    target, flush = select.target_of(profile), torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE)
    rows: list[dict[str, Any]] = []
    for name, case in cases():
        for op_name, values in arguments(name, case).items():
            op = registry.primitives()[op_name]
            calls: dict[str, Callable[[], Any]] = {}
            for line in registry.implementations(op_name):
                if line.backend != "definition" and not select.refusals(
                    line, select.View.of(op, values, profile), profile
                ):
                    launch = registry.launcher(line)
                    calls[line.name] = functools.partial(launch, *values, target)
            trials: dict[str, list[float]] = {n: [] for n in calls}
            with torch.no_grad():
                for _ in range(TRIALS):
                    for n, call in calls.items():
                        trials[n].append(flushed(call, flush))
            cost = op.cost(*values)
            floor = max(cost.bytes / limits["copy_bytes_per_s"], cost.flops / limits["cublas_flops_per_s"])
            for n, seconds in trials.items():
                middle = statistics.median(seconds)
                rows.append({
                    "op": op_name, "case": case.name, "implementation": n, "us": middle * 1e6,
                    "spread": max(seconds) / min(seconds), "of_ceiling": floor / middle,
                    "tflops": cost.flops / middle / 1e12, "gb_per_s": cost.bytes / middle / 1e9,
                })  # fmt: skip
        torch.cuda.empty_cache()
    return {"device": torch.cuda.get_device_name(), "profile": profile.name, "torch": torch.__version__,
            "dtype": "bfloat16", "ceilings": limits, "rows": rows}  # fmt: skip


def table(found: dict[str, Any]) -> str:
    limits = found["ceilings"]
    lines = [
        f"{found['device']}, torch {found['torch']}, bfloat16: copy {limits['copy_bytes_per_s'] / 1e12:.2f} TB/s, "
        f"cuBLAS {limits['cublas_flops_per_s'] / 1e12:.0f} TFLOP/s",
        "",
        "| op | case | implementation | us | of ceiling | TFLOP/s | GB/s | spread |",
        "|---|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    lines += [
        f"| {r['op']} | {r['case']} | {r['implementation']} | {r['us']:.1f} | {r['of_ceiling']:.2f} "
        f"| {r['tflops']:.0f} | {r['gb_per_s']:.0f} | {r['spread']:.2f} |" for r in found["rows"]
    ]  # fmt: skip
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Time every implementation of every op on one large case.")
    parser.add_argument("--json", type=Path, help="write the document here, and the table beside it as Markdown")
    options = parser.parse_args()
    found = measure()
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(table(found))
    print(table(found))


if __name__ == "__main__":
    main()
