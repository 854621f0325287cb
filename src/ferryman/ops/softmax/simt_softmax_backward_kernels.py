"""softmax's backward in portable C++ (`softmax_backward.cuh`), for CUDA and HIP: one read of each tensor, one write."""

from __future__ import annotations

import functools
from pathlib import Path

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, as_rows, family_source, runtime, type_name, unit, vectorised
from ferryman.backends.simt.rows import SPREADS, Demand, RowPlan, row_plan, threads_a_row

_FILE = Path(__file__).with_name("softmax_backward.cuh")
_SIZES = {"f32": 4, "f16": 2, "bf16": 2}
# A thread keeps up to 4 packs of 16 bytes of both tensors in 64 registers, up to 8 in 128.
_NEED = Demand(tensors=2, fitting=(1024, 1024, 512))
_WAVE, _THREADS, _MOST_THREADS, _PACKS = 32, 512, 1024, 4


@functools.lru_cache(maxsize=4096)
def plan(n: int, itemsize: int, vector: bool, spread: int, target: Target) -> RowPlan:
    """The layout of rows of ``n`` elements; ``spread``: `threads_a_row` of their number.

    On a device with clusters a wide row takes as many blocks of 512 threads as hold it, 128 bytes a thread in 64
    registers: two blocks an SM, so that one loads while the other reduces.
    """
    packs = n * itemsize // VECTOR_BYTES
    if vector and "clusters" in target.features and packs > _THREADS * _PACKS // 2:
        for cluster, most in ((1, _THREADS), (2, _THREADS), (4, _THREADS), (8, _THREADS), (8, _MOST_THREADS)):
            columns = packs if cluster == 1 else -(-packs // (8 * cluster)) * 8  # `columns_of_block`: whole lines
            lanes = -(-columns // (_PACKS * _WAVE)) * _WAVE
            if lanes <= most:
                fit = "EXACT" if lanes * _PACKS * cluster == packs else "RAGGED"
                width, bound = VECTOR_BYTES // itemsize, _MOST_THREADS // lanes
                return RowPlan((width, lanes, 1, _PACKS, fit, bound, cluster), lanes, 1, 0, 0, 0)
    # Every group of rows has a block of its own: none of them loads the next while it writes this one.
    found = row_plan(n, itemsize, vector, target.wave, target.units, target.shared_memory, _NEED, spread)
    return found._replace(resident=0)


def _ahead(plan: RowPlan, rows: int, units: int) -> int:
    """How many rows ahead L2 is told to fetch the next: half as many as the device works on at a time, for matrices far
    larger than that."""
    together = units * plan.arguments[5] * plan.rows_per_block // plan.cluster
    return together // 2 if rows >= 4 * together else 0


@functools.lru_cache(maxsize=None)
def _unit(kind: str, plan: RowPlan, fetch: bool) -> Unit:
    source = family_source(_FILE, True, fetch)
    found = unit(source, "FERRYMAN_SOFTMAX_BACKWARD", "softmax_backward", kind, *plan.arguments, fetch)
    return found._replace(cluster=plan.cluster)


@functools.lru_cache(maxsize=4096)
def _choose(dtype: torch.dtype, n: int, vector: bool, spread: int, target: Target) -> tuple[Unit, RowPlan]:
    found = plan(n, dtype.itemsize, vector, spread, target)
    return _unit(type_name(dtype), found, _fetches(found)), found


def _fetches(plan: RowPlan) -> bool:
    return plan.cluster > 1


def softmax_backward(grad: Tensor, y: Tensor, target: Target) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    grad, rows, grad_stride = as_rows(grad)
    y, _, stride = as_rows(y)
    n = y.shape[-1]
    first, second, result = grad.data_ptr(), y.data_ptr(), out.data_ptr()
    vector = vectorised(y.element_size(), n | grad_stride | stride if rows > 1 else n, first | second | result)
    chosen, found = _choose(y.dtype, n, vector, threads_a_row(rows, target.units), target)
    blocks = found.blocks(rows)
    runtime(target).launch(
        chosen, y.device, blocks, found.threads, 0,
        (first, grad_stride, second, stride, result, rows, n, _ahead(found, rows, target.units), blocks),
    )  # fmt: skip
    return out


# Of real models and around them, read in words of 16 bytes or one by one.
_WIDTHS = (8, 64, 128, 1000, 1024, 2048, 4096, 5120, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
_RAGGED = (1, 7, 127, 1021, 4099, 8191, 50_257, 151_937)


def units(target: Target) -> list[Unit]:
    """Every kernel of this family: every dtype on every shape of plan."""
    found: dict[str, Unit] = {}
    for kind, size in _SIZES.items():
        for n, vector in [(n, v) for n in _WIDTHS for v in (True, False)] + [(n, False) for n in _RAGGED]:
            for spread in (0, *SPREADS):
                one = plan(n, size, vector, spread, target)
                made = _unit(kind, one, _fetches(one))
                found.setdefault(made.name, made)
    return list(found.values())
