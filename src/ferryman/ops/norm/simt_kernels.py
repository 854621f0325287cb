"""rms_norm, add_rms_norm and layer_norm in portable C++ (`norm.cuh`), for CUDA and HIP."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import Unit, as_rows, family_source, pointer, type_name, unit, vectorised
from ferryman.backends.simt.rows import (
    MAX_WORDS,
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

_FILE = Path(__file__).with_name("norm.cuh")
_TYPES = ("f32", "f16", "bf16")
_SIZES = {"f32": 4, "f16": 2, "bf16": 2, "none": 0}


@functools.lru_cache(maxsize=None)
def _unit(op: str, types: tuple[str, ...], cast: bool | None, plan: RowPlan) -> Unit:
    middle = types if cast is None else (*types, cast)
    source = family_source(_FILE, True, plan.on_hopper)
    return unit(source, f"FERRYMAN_{op.upper()}", op, *middle, *plan.arguments)._replace(
        cluster=plan.cluster, overlapping=True
    )


def demand(op: str, wave: int, itemsize: int, weights: tuple[int, ...] = (0,)) -> Demand:
    """What an op takes on an architecture; ``weights``: bytes an element of its weight and bias, 0 where absent. These
    are the largest with which no kernel spills registers (gfx90a, gfx942, gfx950, sm_80, sm_90). The forms of whole
    rows were measured on an H200 at 8192 to 131072 columns of bfloat16, with the weights that models have."""
    wide, a_column, half = max(weights) > itemsize, sum(weights), itemsize == 2
    whole: tuple[Whole, ...]
    tensors = 2 if op == "add_rms_norm" else 1
    if wave == 64:
        return Demand(tensors, {"layer_norm": 32, "add_rms_norm": 56}.get(op, MAX_WORDS))
    if op == "layer_norm":
        # float rows with weights of 16 bits would spill at 80 registers
        most, _, least = fitting(itemsize, wide, heavy=True)
        whole = (
            Whole(128, 4, resident=768),
            Whole(256, 4),
            Whole(256, 8, resident=512, ahead=2),
            Whole(512, 8, resident=512),
        )
        words, bound = (12 if wide else 16) if half else 24, (most, 256 if wide else 512, least)
        return Demand(tensors, words, lone=8, fitting=bound, weights=a_column, whole=whole, turns=2)
    if op == "add_rms_norm":
        whole = (Whole(512, 2), Whole(512, 4), Whole(1024, 4))
        return Demand(tensors, 24 if half else 32, fitting=fitting(itemsize, wide), weights=a_column, whole=whole)
    whole = (Whole(256, 4), *widest(itemsize))
    return Demand(
        tensors, 16 if half else 32, fitting=fitting(itemsize, wide), weights=a_column, alone=2048, whole=whole
    )


@functools.lru_cache(maxsize=4096)
def _choose(
    op: str,
    dtypes: tuple[torch.dtype | None, ...],
    cast: bool | None,
    n: int,
    vector: bool,
    spread: int,
    target: Target,
) -> tuple[Unit, RowPlan]:
    itemsize, *weights = [0 if d is None else d.itemsize for d in dtypes]
    plan = plan_for(n, itemsize, vector, target, demand(op, target.wave, itemsize, tuple(weights)), spread)
    return _unit(op, tuple(type_name(d) for d in dtypes), cast, plan), plan


def _flat(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.contiguous()


def rms_norm(x: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, rows, stride = as_rows(x)
    weight = _flat(weight)
    n = x.shape[-1]
    source, scale, result = x.data_ptr(), pointer(weight), y.data_ptr()
    vector = vectorised(x.element_size(), n | stride if rows > 1 else n, source | scale | result)
    dtypes = (x.dtype, None) if weight is None else (x.dtype, weight.dtype)
    chosen, plan = _choose(
        "rms_norm",
        dtypes,
        cast_before_weight and weight is not None,
        n,
        vector,
        threads_a_row(rows, target.units),
        target,
    )
    blocks = plan.blocks(rows)
    runtime(target).launch(
        chosen,
        x.device,
        blocks,
        plan.threads,
        plan.shared,
        (source, stride, scale, result, rows, n, plan.slots, blocks, float(eps)),
    )
    return y


def add_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, cast_before_weight: bool, target: Target
) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    sums = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y, sums
    x, rows, stride = as_rows(x)
    residual, _, residual_stride = as_rows(residual)
    weight = _flat(weight)
    n = x.shape[-1]
    source, other, scale, result, total = (
        x.data_ptr(),
        residual.data_ptr(),
        pointer(weight),
        y.data_ptr(),
        sums.data_ptr(),
    )
    lengths = n | stride | residual_stride if rows > 1 else n
    vector = vectorised(x.element_size(), lengths, source | other | scale | result | total)
    dtypes = (x.dtype, None) if weight is None else (x.dtype, weight.dtype)
    chosen, plan = _choose(
        "add_rms_norm",
        dtypes,
        cast_before_weight and weight is not None,
        n,
        vector,
        threads_a_row(rows, target.units),
        target,
    )
    blocks = plan.blocks(rows)
    runtime(target).launch(
        chosen,
        x.device,
        blocks,
        plan.threads,
        plan.shared,
        (source, stride, other, residual_stride, scale, result, total, rows, n, plan.slots, blocks, float(eps)),
    )
    return y, sums


def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target) -> Tensor:
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if y.numel() == 0:
        return y
    x, rows, stride = as_rows(x)
    weight, bias = _flat(weight), _flat(bias)
    n = x.shape[-1]
    source, scale, shift, result = x.data_ptr(), pointer(weight), pointer(bias), y.data_ptr()
    vector = vectorised(x.element_size(), n | stride if rows > 1 else n, source | scale | shift | result)
    dtypes = (x.dtype, None if weight is None else weight.dtype, None if bias is None else bias.dtype)
    chosen, plan = _choose("layer_norm", dtypes, None, n, vector, threads_a_row(rows, target.units), target)
    while rows > 0:
        blocks = plan.blocks(rows)
        taken = min(rows, plan.rows_of(blocks)) if plan.on_hopper else rows
        runtime(target).launch(
            chosen,
            x.device,
            blocks,
            plan.threads,
            plan.shared,
            (source, stride, scale, shift, result, taken, n, plan.slots, blocks, float(eps)),
        )
        rows -= taken
        source += taken * stride * x.element_size()
        result += taken * n * x.element_size()
    return y


def units(target: Target) -> list[Unit]:
    """Kernels of this family: every combination of dtypes on each kind of plan, every plan on equal dtypes."""
    kernels: dict[str, Unit] = {}
    optional = (*_TYPES, "none")
    for x, few in itertools.product(_TYPES, (True, False)):
        others = optional if few else (x,)

        def plans(op: str, *weights: str, x: str = x, few: bool = few) -> list[RowPlan]:
            need = demand(op, target.wave, _SIZES[x], tuple(_SIZES[w] for w in weights))
            return representative_plans(_SIZES[x], target, need, few=few)

        for op, w, cast in itertools.product(("rms_norm", "add_rms_norm"), others, (False, True)):
            if w != "none" or not cast:
                kernels.update((u.name, u) for u in (_unit(op, (x, w), cast, plan) for plan in plans(op, w)))
        for w, b in itertools.product(others, others):
            layer_norms = [_unit("layer_norm", (x, w, b), None, plan) for plan in plans("layer_norm", w, b)]
            kernels.update((u.name, u) for u in layer_norms)
    # On sm_100 ptxas takes a word or two more for layer_norm than the launch bounds leave, which sm_90 decides.
    allowed = 8 if target.arch == "sm_100" else 0
    return [u._replace(spills_allowed=allowed) for u in kernels.values()]
