"""softmax's backward in portable C++ (`softmax_backward.cuh`), for CUDA and HIP: one read of each tensor, one write."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, as_rows, family_source, type_name, unit, vectorised
from ferryman.backends.simt.rows import SPREADS, Demand, RowPlan, row_plan, threads_a_row
from ferryman.backends.simt_runtime import runtime

_FILE = Path(__file__).with_name("softmax_backward.cuh")
_SIZES = {"f32": 4, "f16": 2, "bf16": 2}
# A thread keeps up to 4 packs of 16 bytes of both tensors in 64 registers, up to 8 in 128.
_NEED = Demand(tensors=2, fitting=(1024, 1024, 512))
_WAVE = 32


class _Form(NamedTuple):
    """``packs`` of 16 bytes of each tensor that a thread keeps; most ``threads`` of a block; ``cluster``: blocks
    that share a row; ``fitting``: threads that should fit an SM (the launch bound: 40 registers each at 1536)."""

    packs: int
    threads: int
    cluster: int
    fitting: int

    def plan(self, n: int, itemsize: int) -> RowPlan | None:
        packs = n * itemsize // VECTOR_BYTES
        columns = packs if self.cluster == 1 else -(-packs // (8 * self.cluster)) * 8  # `columns_of_block`: whole lines
        lanes = -(-columns // (self.packs * _WAVE)) * _WAVE
        if lanes > self.threads:
            return None
        exact = self.cluster == 1 and lanes * self.packs == packs  # of a cluster, it would spill 4 bytes
        fit, bound = "EXACT" if exact else "RAGGED", self.fitting // lanes
        arguments = (VECTOR_BYTES // itemsize, lanes, 1, self.packs, fit, bound, self.cluster)
        return RowPlan(arguments, lanes, 1, 0, 0, 0)


# Measured on one H200, 16 bits: one pack a thread, 1536 threads an SM, is at the memory's speed up to 4096 elements,
# two up to 32768. Twice as many packs cost 1%, and rows fetched ahead to the second cache 2 to 3%.
_MANY = (
    _Form(1, 512, 1, 1536),
    _Form(2, 512, 1, 1536),
    _Form(2, 512, 2, 1536),
    _Form(2, 512, 4, 1536),
    _Form(4, 512, 4, 1024),
    _Form(4, 512, 8, 1024),
    _Form(4, 1024, 8, 1024),
)
# Of few rows, wide ones, where all blocks run at once.
_FEW = (_Form(1, 256, 8, 1024), _Form(2, 256, 8, 1024), _Form(4, 512, 8, 1024))
_FEW_ABOVE = 16_384  # bytes of a row


@functools.lru_cache(maxsize=4096)
def plan(n: int, itemsize: int, vector: bool, spread: int, target: Target) -> RowPlan:
    """The layout of rows of ``n`` elements; ``spread``: `threads_a_row` of their number."""
    if vector and "clusters" in target.features and n * itemsize > _WAVE * VECTOR_BYTES * 2:
        few = _FEW if spread and n * itemsize > _FEW_ABOVE else ()
        for form in (*few, *_MANY):
            layout = form.plan(n, itemsize)
            if layout is not None and (form not in few or layout.threads * form.cluster <= spread):
                return layout
    # Every group of rows has a block of its own: none of them loads the next while it writes this one.
    layout = row_plan(n, itemsize, vector, target.wave, target.units, target.shared_memory, _NEED, spread)
    return layout._replace(resident=0)


@functools.lru_cache(maxsize=None)
def _unit(kind: str, plan: RowPlan, early: bool) -> Unit:
    source = family_source(_FILE, True, plan.cluster > 1)
    kernel = unit(source, "FERRYMAN_SOFTMAX_BACKWARD", "softmax_backward", kind, *plan.arguments, early)
    return kernel._replace(cluster=plan.cluster, overlapping=early)


@functools.lru_cache(maxsize=4096)
def _choose(dtype: torch.dtype, n: int, vector: bool, spread: int, target: Target) -> tuple[Unit, RowPlan]:
    layout = plan(n, dtype.itemsize, vector, spread, target)
    return _unit(type_name(dtype), layout, _early(spread, target)), layout


def _early(spread: int, target: Target) -> bool:
    """Whether blocks may start before the kernel ahead of them has ended: those of few rows, on sm_90 and newer."""
    return spread > 0 and "clusters" in target.features


def softmax_backward(grad: Tensor, y: Tensor, target: Target) -> Tensor:
    out = torch.empty(y.shape, dtype=y.dtype, device=y.device)
    if out.numel() == 0:
        return out
    grad, rows, grad_stride = as_rows(grad)
    y, _, stride = as_rows(y)
    n = y.shape[-1]
    first, second, result = grad.data_ptr(), y.data_ptr(), out.data_ptr()
    vector = vectorised(y.element_size(), n | grad_stride | stride if rows > 1 else n, first | second | result)
    chosen, layout = _choose(y.dtype, n, vector, threads_a_row(rows, target.units), target)
    blocks = rows * layout.cluster if layout.cluster > 1 else layout.blocks(rows)
    runtime(target).launch(
        chosen,
        y.device,
        blocks,
        layout.threads,
        0,
        (first, grad_stride, second, stride, result, rows, n, blocks),
    )
    return out


# Of real models and around them, read in words of 16 bytes or one by one.
_WIDTHS = (8, 64, 128, 1000, 1024, 2048, 4096, 5120, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)
_RAGGED = (1, 7, 127, 1021, 4099, 8191, 50_257, 151_937)


def units(target: Target) -> list[Unit]:
    """Every kernel of this family: every dtype on every shape of plan."""
    kernels: dict[str, Unit] = {}
    for kind, size in _SIZES.items():
        for n, vector in [(n, v) for n in _WIDTHS for v in (True, False)] + [(n, False) for n in _RAGGED]:
            for spread in (0, *SPREADS):
                kernel = _unit(kind, plan(n, size, vector, spread, target), _early(spread, target))
                kernels.setdefault(kernel.name, kernel)
    return list(kernels.values())
