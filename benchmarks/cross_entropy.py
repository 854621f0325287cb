"""A step of the loss, forward and backward of its mean, over bf16 logits: in place and not, beside peers and a copy.

Contenders take turns on the same sets of logits (4 times the L2 or more), restored before each sample of those that
write over them; median and spread (largest over smallest) of three trials. "copy" reads and writes the same bytes as a
step in place must: the logits once, the gradient once. A step that is not in place must read the logits twice, where
they do not stay in the cache. Peers are used where they are installed; what could not run says why.

One op has a script of its own because no cell of `ferryman bench` compares these: Liger computes the gradient in its
forward, ours and QuACK in two passes, torch.compile through autograd. Only both passes together are the same work.

    python benchmarks/cross_entropy.py [--json FILE] [--shapes 4096x128256,...]
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from ferryman import ops
from ferryman.porting.bench.clock import timer
from ferryman.porting.running.process import failure

DEVICE, TRIALS, BYTES = torch.device("cuda", 0), 3, 250e6
SHAPES = "512x32000,4096x50257,4096x128256,8192x152064"
Call = Callable[[], Any]


def _through_autograd(loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Callable[..., Call]:
    def prepare(logits: torch.Tensor, target: torch.Tensor) -> Call:
        leaf = logits.detach().requires_grad_()
        return lambda: torch.autograd.grad(loss(leaf, target), leaf)

    return prepare


def ours_in_place(logits: torch.Tensor, target: torch.Tensor) -> Call:
    one = torch.ones((), device=logits.device)

    def call() -> Any:
        loss = ops.cross_entropy_inplace_grad(logits, target)
        return loss, ops.cross_entropy_inplace_grad_backward(one, logits)

    return call


def ours(logits: torch.Tensor, target: torch.Tensor) -> Call:
    return _through_autograd(ops.cross_entropy)(logits, target)


def liger(logits: torch.Tensor, target: torch.Tensor) -> Call:
    """Its forward, which writes the mean's gradient over the logits and reads counts back; a backward of 1 keeps it."""
    from liger_kernel.ops.cross_entropy import cross_entropy_forward

    leaf = logits.detach().requires_grad_()  # where none is asked for, none is computed

    @torch.no_grad()
    def call() -> Any:
        return cross_entropy_forward(leaf, target, None, -100, 0.0, 0.0, "mean", None, False)

    return call


def liger_called(logits: torch.Tensor, target: torch.Tensor) -> Call:
    """As a training script calls it: its backward waits for the device, to see whether the gradient is 1."""
    from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction as Function

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return Function.apply(x, y, None, -100, 0.0, 0.0, "mean", None, False)[0]

    return _through_autograd(loss)(logits, target)


def _quack(in_place: bool) -> Callable[..., Call]:
    def prepare(logits: torch.Tensor, target: torch.Tensor) -> Call:
        from quack.cross_entropy import cross_entropy_bwd, cross_entropy_fwd

        each = torch.full(target.shape, 1 / target.numel(), device=logits.device)

        def call() -> Any:
            loss, lse = cross_entropy_fwd(logits, target, return_lse=True)[:2]
            return loss.mean(), cross_entropy_bwd(logits, target, each, lse, inplace_backward=in_place)

        return call

    return prepare


def compiled(logits: torch.Tensor, target: torch.Tensor) -> Call:
    """Each shape by itself, autotuned; the loss in float32, as a training script writes it, which Inductor fuses."""
    torch._dynamo.reset()

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return functional.cross_entropy(x.float(), y)

    return _through_autograd(torch.compile(loss, mode="max-autotune-no-cudagraphs", dynamic=False, fullgraph=True))(
        logits, target
    )


def eager(logits: torch.Tensor, target: torch.Tensor) -> Call:
    return _through_autograd(functional.cross_entropy)(logits, target)


@dataclass(frozen=True)
class Contender:
    name: str
    prepare: Callable[..., Call]
    writes_over: bool


CONTENDERS = (
    Contender("ferryman, in place", ours_in_place, True),
    Contender("liger, in place", liger, True),
    Contender("liger, in place, through autograd", liger_called, True),
    Contender("quack, in place", _quack(True), True),
    Contender("ferryman", ours, False),
    Contender("quack", _quack(False), False),
    Contender("torch.compile", compiled, False),
    Contender("torch eager", eager, False),
)


def measure(rows: int, classes: int) -> dict[str, Any]:
    """Microseconds of a step of each contender, and of the copy."""
    sets = max(2, math.ceil(BYTES / (rows * classes * 2)))
    given = [torch.randn(rows, classes, device=DEVICE, dtype=torch.bfloat16) for _ in range(sets)]
    scratch = [x.clone() for x in given]
    targets = [torch.randint(classes, (rows,), device=DEVICE) for _ in range(sets)]

    def restore() -> None:
        for x, from_ in zip(scratch, given, strict=True):
            x.copy_(from_)

    into = torch.empty_like(given[0])
    timers: dict[str, Any] = {"copy": timer([functools.partial(into.copy_, x) for x in given], DEVICE)}
    refused: dict[str, str] = {}
    for one in CONTENDERS:
        restore()
        inputs = scratch if one.writes_over else given
        try:
            calls = [one.prepare(x, y) for x, y in zip(inputs, targets, strict=True)]
            timers[one.name] = timer(calls, DEVICE, restore=restore if one.writes_over else None)
        except Exception as error:  # noqa: BLE001 - a peer may do anything; its row says what it did
            refused[one.name] = failure(error, DEVICE)
    trials: dict[str, list[float]] = {name: [] for name in timers}
    for trial in range(TRIALS):
        for name in list(timers)[:: 1 if trial % 2 == 0 else -1]:
            trials[name].append(timers[name].cold() * 1e6)
    contenders = {
        name: {
            "us": statistics.median(own),
            "spread": max(own) / min(own),
            "method": timers[name].method,
            "note": timers[name].note,
        }
        for name, own in trials.items()
    }
    for clock in timers.values():
        clock.close()
    return {"rows": rows, "classes": classes, "contenders": contenders, "refused": refused}


def table(cells: list[dict[str, Any]]) -> str:
    names = ["copy", *(one.name for one in CONTENDERS)]
    lines = [
        "| us (spread of trials), x the time of ferryman's | "
        + " | ".join(f"{c['rows']} x {c['classes']}" for c in cells)
        + " |",
        "|---" * (len(cells) + 1) + "|",
    ]
    beside = {one.name: "ferryman, in place" if one.writes_over else "ferryman" for one in CONTENDERS}
    for name in names:
        shown = []
        for cell in cells:
            own = cell["contenders"].get(name)
            if own is None:
                shown.append(cell["refused"].get(name, "not run").partition(":")[0])
                continue
            mine = cell["contenders"].get(beside.get(name, ""))
            ratio = f", {own['us'] / mine['us']:.2f}" if mine and beside[name] != name else ""
            gaps = "" if own["method"] == "graph replay" else " e"
            shown.append(f"{own['us']:.1f} ({own['spread']:.2f}){gaps}{ratio}")
        lines.append(f"| {name} | " + " | ".join(shown) + " |")
    lines += ["", "e: eager calls between events, whose launch gaps count; the others are graph replays."]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description="Steps of the cross entropy loss, beside peers.")
    parser.add_argument("--json", type=Path, help="write the document here, and the table beside it as Markdown")
    parser.add_argument("--shapes", default=SHAPES, help=f"rows x classes, separated by commas ({SHAPES})")
    options = parser.parse_args()
    cells = []
    for shape in options.shapes.split(","):
        rows, classes = (int(number) for number in shape.split("x"))
        cells.append(measure(rows, classes))
        torch.cuda.empty_cache()
    document = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "cells": cells}
    if options.json:
        options.json.write_text(json.dumps(document, indent=1) + "\n")
        options.json.with_suffix(".md").write_text(table(cells))
    print(table(cells))


if __name__ == "__main__":
    main()
