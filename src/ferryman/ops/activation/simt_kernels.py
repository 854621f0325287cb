"""silu_mul and gelu_mul in portable C++ (`activation.cuh`), for CUDA and HIP."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import (
    TYPE_NAMES,
    VECTOR_BYTES,
    Unit,
    as_rows,
    family_source,
    grid_of,
    runtime,
    unit,
    vectorised,
)  # fmt: skip

_FILE = Path(__file__).with_name("activation.cuh")
_STEMS = {"Silu": "silu_mul", "GeluTanh": "gelu_mul", "GeluErf": "gelu_mul"}
_THREADS = 256
# Two 16-byte loads of each tensor in flight a thread: 128 KiB an SM at 2048 threads.
_VECTOR_PACKS, _SCALAR_PACKS = 2, 8
_SHAPES = tuple((lanes, _THREADS // lanes) for lanes in (8, 32, 64, 128, 256))


class _Flat(NamedTuple):
    """How contiguous tensors are shared out: ``packs`` of ``bytes`` a thread (0: of one element), for tensors of which
    an SM or CU gets ``most`` bytes."""

    bytes: int
    threads: int
    packs: int
    most: float = float("inf")

    def width(self, dtype: torch.dtype) -> int:
        return max(1, self.bytes // dtype.itemsize)


# Few elements wait for one thread's work, and not for memory: they are spread over all threads that fit at once. On an
# H200 the last form takes 1 x 4096 bf16 1.6 us, the first 1.2; 256 x 8192 5.3 us, the second 4.9.
_FORMS = (
    _Flat(VECTOR_BYTES // 2, 128, 1, 1024 * VECTOR_BYTES // 2),
    _Flat(VECTOR_BYTES, 128, 1, 2048 * VECTOR_BYTES),
    _Flat(VECTOR_BYTES, _THREADS, _VECTOR_PACKS),
)
_LONE = _Flat(0, _THREADS, _SCALAR_PACKS)


def _built(macro: str, function: str, dtype: torch.dtype, *args: object) -> Unit:
    stem = _STEMS[function] + ("_flat" if macro == "FERRYMAN_GATED_FLAT" else "")
    return unit(family_source(_FILE, False), macro, stem, function, TYPE_NAMES[dtype], *args)._replace(overlapping=True)


@functools.lru_cache(maxsize=None)
def _flat_unit(function: str, dtype: torch.dtype, form: _Flat, exact: bool) -> Unit:
    return _built("FERRYMAN_GATED_FLAT", function, dtype, form.width(dtype), form.threads, form.packs, exact)


@functools.lru_cache(maxsize=4096)
def _choose_flat(function: str, dtype: torch.dtype, n: int, vector: bool, units: int) -> tuple[Unit, int, int]:
    """(unit, blocks, threads of a block) for tensors of ``n`` elements without gaps."""
    form = next(f for f in _FORMS if n * dtype.itemsize <= units * f.most) if vector else _LONE
    tile = form.threads * form.packs * form.width(dtype)
    blocks = grid_of(-(-n // tile), form.threads)
    return _flat_unit(function, dtype, form, vector and blocks * tile == n), blocks, form.threads


@functools.lru_cache(maxsize=None)
def _rows_unit(function: str, dtype: torch.dtype, width: int, lanes: int, rows_per_block: int, packs: int) -> Unit:
    return _built("FERRYMAN_GATED", function, dtype, width, lanes, rows_per_block, packs)


@functools.lru_cache(maxsize=4096)
def _choose_rows(
    function: str, dtype: torch.dtype, rows: int, n: int, vector: bool, units: int
) -> tuple[Unit, int, int]:
    """(unit, blocks, chunks of a row) for ``rows`` of ``n`` elements with gaps between them."""
    width, packs = (VECTOR_BYTES // dtype.itemsize, _VECTOR_PACKS) if vector else (1, _SCALAR_PACKS)
    if vector and rows * n * dtype.itemsize <= units * _FORMS[1].most:
        packs = 1
    needed = -(-n // (width * packs))
    lanes, rows_per_block = next((s for s in _SHAPES if s[0] >= needed), _SHAPES[-1])
    chunks = -(-needed // lanes)
    chosen = _rows_unit(function, dtype, width, lanes, rows_per_block, packs)
    return chosen, grid_of(-(-rows // rows_per_block) * chunks, _THREADS), chunks


def _gated(function: str, gate: Tensor, up: Tensor, target: Target) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel() == 0:
        return y
    rows, itemsize, result = 1, gate.element_size(), y.data_ptr()
    if not (gate.is_contiguous() and up.is_contiguous()):
        gate, rows, gate_stride = as_rows(gate)
        up, _, up_stride = as_rows(up)
    first, second = gate.data_ptr(), up.data_ptr()
    if rows == 1:  # whatever the shape; it may end within a vector: its tail is done element by element
        n = y.numel()
        vector = vectorised(itemsize, 0, first | second | result)
        chosen, blocks, threads = _choose_flat(function, gate.dtype, n, vector, target.units)
        runtime(target).launch(chosen, gate.device, blocks, threads, 0, (first, second, result, n, blocks))
        return y
    n = gate.shape[-1]
    vector = vectorised(itemsize, n | gate_stride | up_stride, first | second | result)
    chosen, blocks, chunks = _choose_rows(function, gate.dtype, rows, n, vector, target.units)
    runtime(target).launch(
        chosen, gate.device, blocks, _THREADS, 0,
        (first, gate_stride, second, up_stride, result, rows, n, chunks, blocks),
    )  # fmt: skip
    return y


def silu_mul(gate: Tensor, up: Tensor, target: Target) -> Tensor:
    return _gated("Silu", gate, up, target)


def gelu_mul(gate: Tensor, up: Tensor, approximate: str, target: Target) -> Tensor:
    return _gated("GeluTanh" if approximate == "tanh" else "GeluErf", gate, up, target)


def units(target: Target) -> list[Unit]:
    """Every kernel of this family; the target's limits do not matter here."""
    flat = [
        _flat_unit(function, dtype, form, exact)
        for function in _STEMS
        for dtype in TYPE_NAMES
        for form, exact in (*itertools.product(_FORMS, (True, False)), (_LONE, False))
    ]
    rows = [
        _rows_unit(function, dtype, width, *shape, packs)
        for function in _STEMS
        for dtype in TYPE_NAMES
        for width, packs in ((1, _SCALAR_PACKS), *((VECTOR_BYTES // dtype.itemsize, p) for p in (1, _VECTOR_PACKS)))
        for shape in _SHAPES
    ]
    return flat + rows
