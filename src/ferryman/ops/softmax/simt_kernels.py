"""softmax in portable C++ (`softmax.cuh`), for CUDA and HIP."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import Unit, as_rows, family_source, type_name, unit, vectorised
from ferryman.backends.simt.rows import (
    Demand,
    RowPlan,
    Whole,
    fitting,
    plan_for,
    representative_plans,
    threads_a_row,
    widest,
)
from ferryman.backends.simt_runtime import runtime

_FILE = Path(__file__).with_name("softmax.cuh")


@functools.lru_cache(maxsize=None)
def _unit(kind: str, plan: RowPlan) -> Unit:
    source = family_source(_FILE, True, plan.on_hopper)
    return unit(source, "FERRYMAN_SOFTMAX", "softmax", kind, *plan.arguments)._replace(
        cluster=plan.cluster, overlapping=True
    )


def demand(wave: int, itemsize: int) -> Demand:
    """The largest with which no kernel spills registers (gfx90a, gfx942, gfx950, sm_80, sm_90): ptxas keeps the
    exponentials from pass to pass. The forms of whole rows were measured on an H200."""
    if wave == 64:
        return Demand()
    whole = (Whole(256, 4, cluster=4), *widest(itemsize))
    return Demand(1, 24, largest=512 if itemsize == 2 else 256, fitting=fitting(itemsize), whole=whole)


@functools.lru_cache(maxsize=4096)
def _choose(dtype: torch.dtype, n: int, vector: bool, spread: int, target: Target) -> tuple[Unit, RowPlan]:
    plan = plan_for(n, dtype.itemsize, vector, target, demand(target.wave, dtype.itemsize), spread)
    return _unit(type_name(dtype), plan), plan


def softmax(x: Tensor, target: Target) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, rows, stride = as_rows(x)
    n = x.shape[-1]
    source, result = x.data_ptr(), y.data_ptr()
    vector = vectorised(x.element_size(), n | stride if rows > 1 else n, source | result)
    chosen, plan = _choose(x.dtype, n, vector, threads_a_row(rows, target.units), target)
    blocks = plan.blocks(rows)
    runtime(target).launch(
        chosen,
        x.device,
        blocks,
        plan.threads,
        plan.shared,
        (source, stride, result, rows, n, plan.slots, blocks),
    )
    return y


def units(target: Target) -> list[Unit]:
    """Every kernel of this family: every dtype on every shape of plan."""
    sizes = {"f32": 4, "f16": 2, "bf16": 2}
    return [
        _unit(kind, plan)
        for kind, size in sizes.items()
        for plan in representative_plans(size, target, demand(target.wave, size))
    ]
