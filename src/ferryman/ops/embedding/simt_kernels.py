"""Rows of a table in portable C++ (`embedding.cuh`), for CUDA and HIP."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import TYPE_NAMES, VECTOR_BYTES, Unit, family_source, grid_of, unit, vectorised
from ferryman.backends.simt_runtime import runtime

_FILE = Path(__file__).with_name("embedding.cuh")
_THREADS = 128
_PACKS = 4  # of a thread, where the device is full with one
_FULL = 2048  # threads of an SM or CU
_FORMS = ((1, False), (_PACKS, False), (_PACKS, True))  # packs of a thread, whether they are of as many rows


class _Plan(NamedTuple):
    unit: Unit
    blocks: int
    lane_bits: int
    chunks: int


@functools.lru_cache(maxsize=None)
def _unit(kind: torch.dtype, vector: bool, packs: int, rows: bool, scaled: bool) -> Unit:
    width = VECTOR_BYTES // kind.itemsize if vector else 1
    args = (TYPE_NAMES[kind], width, packs, rows, scaled, _THREADS)
    return unit(family_source(_FILE, False), "FERRYMAN_EMBEDDING", "embedding", *args)._replace(overlapping=True)


@functools.lru_cache(maxsize=4096)
def _choose(kind: torch.dtype, count: int, width: int, vector: bool, scaled: bool, units: int) -> _Plan:
    along = -(-width // (VECTOR_BYTES // kind.itemsize if vector else 1))  # packs of a row
    bits = min((along - 1).bit_length(), _THREADS.bit_length() - 1)
    lanes = 1 << bits
    rows = along <= lanes
    packs = _PACKS if count * along > units * _FULL and (rows or along > lanes * (_PACKS // 2)) else 1
    chunks = 1 if rows else -(-along // (lanes * packs))
    side = (_THREADS >> bits) * (packs if rows else 1)
    chosen = _unit(kind, vector, packs, rows and packs > 1, scaled)
    return _Plan(chosen, grid_of(-(-count // side) * chunks, _THREADS), bits, chunks)


def embedding(ids: Tensor, weight: Tensor, scale: float | None, target: Target) -> Tensor:
    height, width = weight.shape
    y = torch.empty((*ids.shape, width), dtype=weight.dtype, device=weight.device)
    if y.numel() == 0:
        return y
    ids, stride = ids.contiguous(), weight.stride(0)
    a, b, c = ids.data_ptr(), weight.data_ptr(), y.data_ptr()
    vector = vectorised(weight.element_size(), width | stride, b | c)
    plan = _choose(weight.dtype, ids.numel(), width, vector, scale is not None, target.units)
    sizes = (int(ids.dtype == torch.int64), ids.numel(), height, width, stride)
    args = (a, b, c, *sizes, plan.lane_bits, plan.chunks, plan.blocks, 1.0 if scale is None else float(scale))
    runtime(target).launch(plan.unit, weight.device, plan.blocks, _THREADS, 0, args)
    return y


def units(target: Target) -> list[Unit]:
    """Every kernel of this family; the target's limits do not matter here."""
    kinds = itertools.product(TYPE_NAMES, (False, True), _FORMS, (False, True))
    return [_unit(kind, vector, *form, scaled) for kind, vector, form, scaled in kinds]
