"""`linear`'s own CUDA kernels beside cuBLAS (`torch.mm`) on a Hopper GPU: decoding, few rows, prefill, large products.

bf16, random data. Calls go over weights of 250 MB in all (4 times the L2), inputs rotate; both sides are timed as
`ferryman bench` times (graph replays, nine samples of several milliseconds a trial, so that long products run at the
power cap) and alternate over three trials; the median, the spread (largest over smallest trial) and the form that ran
are printed. float32 partial sums on both sides (torch's reduced-precision reductions are switched off). Calls follow
each other without a pause, and ours let the next one's blocks start while they end: after other kernels they gain less.

    python benchmarks/linear.py [--json FILE]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import ferryman
from ferryman import ops
from ferryman.device_profiles import detect
from ferryman.ops.matmul.hopper_kernels import choose
from ferryman.porting.bench.clock import timer

DEVICE, TRIALS, BYTES = torch.device("cuda", 0), 3, 250e6
WEIGHTS = (
    (4096, 4096),
    (14_336, 4096),
    (4096, 14_336),
    (6144, 4096),
    (28_672, 4096),
    (1024, 4096),
    (128_256, 4096),
    (8192, 8192),
    (10_240, 8192),
    (28_672, 8192),
    (8192, 28_672),
    (57_344, 8192),
    (5120, 5120),
    (17_408, 5120),
    (5120, 17_408),
    (2048, 2048),
    (8192, 2048),
    (2048, 8192),
    (3072, 3072),
    (16_384, 3072),
)


def shapes() -> Iterator[tuple[int, int, int]]:
    """(rows, outputs, inputs)."""
    yield from ((8192, 8192, 8192), (4096, 14_336, 4096))
    yield from ((m, n, k) for m in (1, 8, 16, 32, 64) for n, k in WEIGHTS)
    yield from ((m, n, k) for m in (128, 256, 512, 1024, 2048) for n, k in WEIGHTS[:4])


def measure(m: int, n: int, k: int, units: int) -> dict[str, Any]:
    sets = min(64, math.ceil(BYTES / (n * k * 2)))
    weights = [torch.randn(n, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(sets)]
    inputs = [torch.randn(m, k, device=DEVICE, dtype=torch.bfloat16) for _ in range(4)]
    out, calls = torch.empty(m, n, device=DEVICE, dtype=torch.bfloat16), range(max(4, min(30, sets)))
    with torch.no_grad():
        with ferryman.use("cuda"):
            ours_each = [functools.partial(ops.linear, inputs[i % 4], weights[i % sets]) for i in calls]
            timers = {"ours": timer(ours_each, DEVICE)}
        each = [functools.partial(torch.mm, inputs[i % 4], weights[i % sets].t(), out=out) for i in calls]
        timers["cublas"] = timer(each, DEVICE)
        trials: dict[str, list[float]] = {name: [] for name in timers}
        for trial in range(TRIALS):
            for name in sorted(timers, reverse=trial % 2 == 1):
                with ferryman.use("cuda"):
                    trials[name].append(timers[name].cold() * 1e6)
    for clock in timers.values():
        clock.close()
    ours, cublas = (statistics.median(trials[name]) for name in ("ours", "cublas"))
    return {
        "m": m,
        "n": n,
        "k": k,
        "form": str(choose(m, n, k, units)),
        "us": ours,
        "cublas_us": cublas,
        "ratio": cublas / ours,
        "spread": max(max(t) / min(t) for t in trials.values()),
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = ["| rows | outputs x inputs | us | cuBLAS us | cuBLAS / ours | spread | form |", "|" + "---|" * 7]
    lines += [
        f"| {r['m']} | {r['n']} x {r['k']} | {r['us']:.1f} | {r['cublas_us']:.1f} | {r['ratio']:.2f} "
        f"| {r['spread']:.2f} | {r['form']} |"
        for r in rows
    ]
    lines += ["", "| rows | products | cuBLAS / ours: geometric mean | smallest |", "|---|---|---|---|"]
    for m in sorted({r["m"] for r in rows}):
        ratios = [r["ratio"] for r in rows if r["m"] == m]
        lines.append(f"| {m} | {len(ratios)} | {statistics.geometric_mean(ratios):.3f} | {min(ratios):.2f} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="linear's CUDA kernels beside cuBLAS.")
    parser.add_argument("--json", type=Path, help="write the document here, and the table beside it as Markdown")
    options = parser.parse_args()
    torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    units = detect(DEVICE).units or 1
    rows = [measure(*shape, units) for shape in shapes()]
    document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "rows": rows}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(table(rows))
    print(table(rows))


if __name__ == "__main__":
    main()
