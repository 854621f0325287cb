"""silu_mul and gelu_mul in portable C++ (`activation.cuh`), for CUDA and HIP."""

from __future__ import annotations

import functools
from pathlib import Path

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
_THREADS = 256
# Two 16-byte loads of each tensor in flight a thread: 128 KiB an SM at 2048 threads.
_VECTOR_PACKS, _SCALAR_PACKS = 2, 8
_SHAPES = tuple((lanes, _THREADS // lanes) for lanes in (8, 32, 64, 128, 256))


@functools.lru_cache(maxsize=None)
def _unit(function: str, kind: str, width: int, lanes: int, rows_per_block: int) -> Unit:
    packs = _VECTOR_PACKS if width > 1 else _SCALAR_PACKS
    stem = {"Silu": "silu_mul", "GeluTanh": "gelu_mul", "GeluErf": "gelu_mul"}[function]
    return unit(
        family_source(_FILE, False), "FERRYMAN_GATED", stem, function, kind, width, lanes, rows_per_block, packs
    )


@functools.lru_cache(maxsize=4096)
def _choose(function: str, dtype: torch.dtype, one_row: bool, n: int, vector: bool) -> tuple[Unit, int, int]:
    """(unit, rows a block takes, chunks of a row)."""
    width = VECTOR_BYTES // dtype.itemsize if vector else 1
    packs = _VECTOR_PACKS if vector else _SCALAR_PACKS
    needed = -(-n // (width * packs))
    lanes, rows_per_block = next((s for s in _SHAPES if s[0] >= needed and not one_row), _SHAPES[-1])
    chunks = max(1, -(-(n // width) // (lanes * packs)))
    return _unit(function, TYPE_NAMES[dtype], width, lanes, rows_per_block), rows_per_block, chunks


def _gated(function: str, gate: Tensor, up: Tensor, target: Target) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    if y.numel() == 0:
        return y
    if gate.is_contiguous() and up.is_contiguous():  # one row, whatever the shape
        rows, n, gate_stride, up_stride = 1, gate.numel(), 0, 0
    else:
        gate, rows, gate_stride = as_rows(gate)
        up, _, up_stride = as_rows(up)
        n = gate.shape[-1]
    first, second, result = gate.data_ptr(), up.data_ptr(), y.data_ptr()
    # one row may end within a vector: its tail is done element by element
    lengths = 0 if rows == 1 else n | gate_stride | up_stride
    chosen, rows_per_block, chunks = _choose(
        function, gate.dtype, rows == 1, n, vectorised(gate.element_size(), lengths, first | second | result)
    )
    blocks = grid_of(-(-rows // rows_per_block) * chunks, _THREADS)
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
    widths = {"f32": (1, 4), "f16": (1, 8), "bf16": (1, 8)}
    return [
        _unit(function, kind, width, *shape)
        for function in ("Silu", "GeluTanh", "GeluErf")
        for kind, pair in widths.items()
        for width in pair
        for shape in _SHAPES
    ]
