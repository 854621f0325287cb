"""The parity check on simulated AMD devices, and the kernels that its small cases do not reach."""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

from ferryman.backends.simulator.numerics import Assumptions
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.running import simulated
from tests import families
from tests.bounded import off

ROOT = Path(__file__).resolve().parents[2]
DTYPES = ("bf16", "f16", "f32")
EPSILON = {"bfloat16": 2.0**-8, "float16": 2.0**-11, "float32": 2.0**-22}


def run(calls: list[dict[str, Any]], device: str = "mi300x", path: Iterable[str] = ()) -> list[dict[str, Any]]:
    env = {
        **os.environ,
        "TRITON_INTERPRET": "0",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([*path, str(ROOT / "src"), str(ROOT)]),
    }
    done = subprocess.run(
        [sys.executable, str(ROOT / "tests/parity/simulated_worker.py")],
        input=json.dumps({"profile": device, "calls": calls}),
        capture_output=True,
        text=True,
        env=env,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


def call(op: str, implementation: str, dtype: str, shapes: list[Any], extra: list[Any], **more: Any) -> dict[str, Any]:
    return {"op": op, "implementation": implementation, "dtype": dtype, "shapes": shapes, "extra": extra, **more}


def check(device: str, **more: Any) -> Counter[tuple[str, str, str]]:
    document = simulated.run(profile(device), **more)
    wrong = [
        (c.op, c.implementation, c.dtype, c.case, c.verdict, c.reason)
        for c in document.cells
        if c.verdict not in ("SIMULATED", "UNIMPLEMENTED")
    ]
    assert wrong == []
    assert document.environment.device == "simulated" and document.environment.profile == device
    return Counter((c.op, c.implementation.partition(".")[0], c.verdict) for c in document.cells)


def simulated_by(backend: str, counts: Counter[tuple[str, str, str]]) -> int:
    return sum(n for (_, own, verdict), n in counts.items() if (own, verdict) == (backend, "SIMULATED"))


def test_cells_run_on_the_simulated_device() -> None:
    counts = check("mi300x", ops=["softmax", "rope"], dtypes=["bf16"], jobs=1)
    assert simulated_by("triton", counts) >= 35 and simulated_by("hip", counts) >= 30
    assert not any(verdict == "PASS" for _, _, verdict in counts)


def simulable(backend: str) -> list[str]:
    ops = registry.primitives()
    return [op for op in ops if any(line.backend == backend for line in registry.implementations(op))]


# the simulator has no v_sub_u32 with clamp, which its kernel has on gfx950
LEFT_OUT = {("ssd_scan", "mi355x")}
OPS = sorted({*simulable("triton"), *simulable("hip")})
FAMILY = {op: registry.family_of(registry.primitive(op)).name for op in OPS}
CELLS_OF_A_PART = 170  # about as many seconds of CPU


def parts_of() -> dict[str, int]:
    """In how many parts a family's cells are run: two at least, and no multiple of 3, so that a case has another dtype
    when its part comes again."""
    cells = Counter[str]()
    for op in OPS:
        lines = [line for line in registry.implementations(op) if line.backend in ("triton", "hip")]
        cells[FAMILY[op]] += len(lines) * len(cases_of(registry.primitive(op)))
    parts = {family: max(2, round(count / CELLS_OF_A_PART)) for family, count in cells.items()}
    return {family: n + 1 if n % 3 == 0 else n for family, n in parts.items()}


PARTS = parts_of()
EVERY = [(f, device, part) for f in sorted(PARTS) for device in ("mi300x", "mi355x") for part in range(PARTS[f])]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.alternate("device", "part")
@pytest.mark.parametrize(("family", "device", "part"), EVERY)
def test_every_op_on_the_simulated_device(family: str, device: str, part: int) -> None:
    """MI300X: each case in one dtype, another each week. MI355X: all in bfloat16. CI takes one part of the cases of one
    of both each week: rows of ferryman.yaml run every op in every dtype there, but for HIP's on the MI355X. A family's
    ops share a process, whose start costs as much as a small op, and what it compiled."""
    parts = PARTS[family]
    ops = [op for op in OPS if FAMILY[op] == family and (op, device) not in LEFT_OUT]
    week = datetime.datetime.now(datetime.timezone.utc).isocalendar().week
    dtypes = ("bf16",) if device == "mi355x" else tuple(DTYPES[(i + week) % 3] for i in range(3))
    counts = check(device, ops=ops, dtypes=dtypes, jobs=1, thin=True, share=(part, parts))
    for op in ops:
        cells = sum(
            (c * len(dtypes) + c % len(dtypes)) % parts == part for c in range(len(cases_of(registry.primitive(op))))
        )
        # some refuse a dtype, or odd sizes; where each case has one dtype, what refuses the case's own counts more
        least = cells / (3 if device == "mi355x" else 4)
        for backend in ("triton", "hip"):
            assert op not in simulable(backend) or counts[op, backend, "SIMULATED"] >= least, (week, op, counts)


def test_long_rows_with_their_gradient_on_the_simulated_device() -> None:
    """In two passes, by programs that take several rows each; the cases' own rows fit in registers."""
    import dataclasses

    import torch

    from ferryman.backends.simulator.device import Simulator
    from ferryman.dispatch.select import target_of
    from ferryman.ops.softmax import long_kernels

    op = registry.primitive("cross_entropy_inplace_grad")
    line = registry.implementation(op.name, "triton.long")
    known = profile("mi300x")
    few = dataclasses.replace(target_of(known), max_threads=256, units=2, l2_bytes=1 << 20)
    logits, labels = torch.randn(9, 4099).bfloat16(), torch.randint(0, 4099, (9,))
    labels[4] = -100
    programs, block, _ = long_kernels._long_plan(few, 9, 4099, 2, False)
    assert programs == 4 and block == 8192
    for smoothing in (0.0, 0.1):
        given = logits.clone()
        with Simulator(few, profile=known) as simulator:
            launch = simulator.wrap(long_kernels.cross_entropy_inplace_grad, over=(0,))
            outputs = launch(given, labels, -100, smoothing, few)
            assert simulator.take() == []
        assert outputs[2] is given
        assert off(op, (logits, labels, -100, smoothing), outputs, torch.bfloat16, line) <= 1


def tiles(device: str) -> list[dict[str, Any]]:
    """Calls that take each tile, and rows of any length."""
    known = families.table("simulated", "TILES")
    every = [call(op, *given, units=units) for op, many in known.items() for *given, units in many]
    return [c for c in every if device == "mi300x" or c["implementation"] != "hip"]


@pytest.mark.slow
@pytest.mark.alternate("device")
@pytest.mark.parametrize("device", ["mi300x", "mi355x"])
def test_every_tile_of_products_and_long_rows(device: str) -> None:
    calls = tiles(device)
    assert len(calls) >= 28
    for given, got in zip(calls, run(calls, device), strict=True):
        assert got["findings"] == [], given
        assert got["kernels"] and max(got["apart"]) < 64 * EPSILON[given["dtype"]], (given, got["apart"])


VARIANTS = [
    {"mfma_order": "sequential"},
    {"mfma_order": "pairs"},
    {"mfma_subnormals": "flushed"},
    {"xf32": "nearest"},
    {"estimates": "above"},
    {"estimates": "below"},
]


def part_of(week: int, parts: int) -> int:
    """Another each time that a test of every other week comes."""
    return week // 2 % parts


@pytest.mark.parametrize("first", [1, 2])
def test_every_part_comes_to_a_test_of_every_other_week(first: int) -> None:
    for parts in range(1, 13):
        assert {part_of(week, parts) for week in range(first, 53, 2)} == {*range(parts)}


@pytest.mark.slow
@pytest.mark.alternate()
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(next(iter(v.items()))))
def test_verdicts_hold_under_each_assumption(variant: dict[str, str]) -> None:
    """Each on the ops and dtypes whose instructions it is about, in CI every other week: a part of their cases, another
    each time. One op has few, which are run whole."""
    if "estimates" in variant:
        ops, dtypes = ["rms_norm", "softmax", "silu_mul"], ["bf16", "f32"]
    elif "xf32" in variant:
        ops, dtypes = ["linear"], ["f32"]
    else:
        ops, dtypes = ["linear", "attention"], ["bf16"]
    parts = max(PARTS[FAMILY[op]] for op in ops) if len(ops) > 1 else 1
    share = part_of(datetime.datetime.now(datetime.timezone.utc).isocalendar().week, parts), parts
    counts = check("mi300x", ops=ops, dtypes=dtypes, assumptions=Assumptions(**variant), share=share)
    assert simulated_by("triton", counts) >= 20


def test_triton_and_the_simt_source_agree() -> None:
    small = families.table("simulated", "SMALL")
    assert len(small) >= 3
    calls = [
        call(op, name, d, shapes, extra)
        for op, (line, shapes, extra) in small.items()
        for d in ("bfloat16", "float32")
        for name in (line, next(one.name for one in registry.implementations(op) if one.backend == "hip"))
    ]
    got = run(calls)
    for (left, right), given in zip(zip(got[::2], got[1::2], strict=True), calls[::2], strict=True):
        assert left["kernels"] != right["kernels"]
        for a, b in zip(left["outputs"], right["outputs"], strict=True):
            size = sum(abs(x) for x in a) / len(a)
            # each is within half a unit in the last place of the exact value, and some of float32's own steps
            apart = max(abs(x - y) / max(abs(x), size) for x, y in zip(a, b, strict=True))
            assert apart <= 2 * EPSILON[given["dtype"]], given


@pytest.mark.slow
def test_two_versions_of_triton_agree(tmp_path: Path) -> None:
    """Code that another release of the compiler makes computes the same, within the class of each dtype."""
    other = next(v for v in ("3.7.1", "3.9.0", "3.5.1") if v != version("triton"))
    done = subprocess.run(
        [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(tmp_path), f"triton=={other}"],
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    if done.returncode:
        pytest.skip(f"triton {other} cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    calls = [call(op, *given) for op, given in families.table("simulated", "RELEASES").items()]
    assert len(calls) >= 4
    ours, theirs = run(calls), run(calls, path=[str(tmp_path)])
    for given, left, right in zip(calls, ours, theirs, strict=True):
        assert left["findings"] == right["findings"] == []
        for a, b in zip(left["outputs"], right["outputs"], strict=True):
            size = sum(abs(x) for x in a) / len(a)
            apart = max(abs(x - y) / max(abs(x), size) for x, y in zip(a, b, strict=True))
            assert apart <= 4 * EPSILON[given["dtype"]], given
