"""Result documents for the tests of renderings: every verdict, planted failures, hostile text."""

from __future__ import annotations

import math
from typing import Any

import torch

from ferryman.device_profiles import detect
from ferryman.porting.judging import results
from ferryman.porting.judging.results import Cell, Finding, Gate, Results, Timing, WorstElement

EDGES = tuple(2.0**e for e in range(-16, 11))
HOSTILE = "<script>alert('x')</script> | `code` ](http://evil.example) \x1b[31m\x00\u202etxt & \"quoted\"\n# heading"


def cell(verdict: str, op: str = "rms_norm", implementation: str = "torch", **more: Any) -> Cell:
    given: dict[str, Any] = {"device": "cpu", "dtype": "float32", "case": "prime", "verdict": verdict} | more
    return Cell(op=op, implementation=implementation, **given)


def document(*cells: Cell, timings: tuple[Timing, ...] = (), edges: tuple[float, ...] = EDGES) -> Results:
    cpu = torch.device("cpu")
    facts = results.environment(cpu, detect(cpu), 0, "small", 1.5)
    report = results.results(facts, cells, timings)
    return report.model_copy(update={"edges": list(edges)})


def counts(ratio: float, elements: int = 10_000) -> list[int]:
    """A distribution of that many elements whose worst is at ``ratio``."""
    bins = [0] * (len(EDGES) + 1)
    last = sum(1 for edge in EDGES if edge <= ratio)
    for i in range(last):
        bins[i] = elements // (2 * last)
    bins[last] += elements - sum(bins)
    return bins


def right(**more: Any) -> Cell:
    ratio = more.pop("ratio", 0.5)
    gates = {
        "G0": Gate(outcome="pass"),
        "G2": Gate(outcome="pass", measure=ratio),
        "G3": Gate(outcome="n/a", reason="too few finite elements for a confidence interval (256)"),
        "G5": Gate(outcome="pass"),
    }
    given: dict[str, Any] = {
        "ratio": ratio,
        "noise": 0.8,
        "seconds": 1e-5,
        "gates": gates,
        "distribution": counts(ratio),
        "reduction": 383,
    }
    return cell(more.pop("verdict", "PASS"), **(given | more))


def stale(**more: Any) -> Cell:
    """A failure with everything that the engine says about one."""
    given: dict[str, Any] = {
        "case": "ragged",
        "ratio": 81.0,
        "reason": "G2: y[3, 127] is 1.5, expected 1.25 within 0.00309: 81 bounds away",
        "worst": WorstElement(output="y", index=[3, 127], value=1.5, expected=1.25, bound=0.25 / 81),
        "gates": {
            "G0": Gate(outcome="pass"),
            "G2": Gate(outcome="fail", reason="y[3, 127] is 1.5", measure=81.0),
            "G3": Gate(outcome="fail", reason="RMS error is 9.5 times what is allowed", measure=9.5),
        },
        "reading": "last column of every row is stale",
        "distribution": counts(81.0),
        "reduction": 4096,
    }
    return cell("FAIL", **(given | more))


def timing(**more: Any) -> Timing:
    given: dict[str, Any] = {
        "op": "rms_norm",
        "implementation": "torch",
        "device": "cpu",
        "dtype": "bfloat16",
        "case": "hidden",
        "seconds": 2e-5,
        "clock": "device events",
        "floor_seconds": 1.2e-5,
        "percent_of_roofline": 60.0,
        "bound_by": "memory",
        "source": "ceilings.copy (measured)",
    }
    return Timing(**(given | more))


FULL = document(
    right(),
    right(dtype="bfloat16", ratio=0.99, reduction=4096),
    stale(),
    cell(
        "FAIL",
        case="fill_nonfinite",
        ratio=math.inf,
        reason="G0: y[1] is nan, expected 0",
        worst=WorstElement(output="y", index=[1], value=math.nan, expected=0.0, bound=1e-7),
        gates={"G0": Gate(outcome="fail", reason="y[1] is nan, expected 0")},
    ),
    right(verdict="SIMULATED", implementation="triton", seconds=None),
    cell("NOT_RUN", implementation="triton", case="2 of 3 cases", reason="left out"),
    cell("NOT_RUN", implementation="cuda", case="all", reason="cuda does not serve cpu devices", refusals=["cuda"]),
    cell("UNIMPLEMENTED", op="softmax", implementation="hip", reason="x.stride[-1] is 2", refusals=["x"]),
    cell("QUARANTINED", op="softmax", implementation="cuda", reason="ptxas: fatal"),
    cell("MISTRUSTED", op="softmax", implementation="triton", reason="the op's bound is not finite"),
    cell("COMPILED_ONLY", op="softmax", implementation="definition", reason="for gfx942"),
    timings=(timing(), timing(implementation="triton", seconds=4e-5, percent_of_roofline=30.0)),
).model_copy(
    update={
        "numerics": [
            Finding(path="numerics.fp8.bits", outcome="contradicted", stated=14, measured=24, reason="at K = 32"),
            Finding(path="numerics.tf32.rounding", outcome="confirmed", stated="rne", measured="rne"),
        ]
    }
)
