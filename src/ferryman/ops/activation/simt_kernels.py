"""silu_mul, gelu_mul and their backward in portable C++ (`activation.cuh`), for CUDA and HIP."""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import TYPE_NAMES, VECTOR_BYTES, Unit, as_rows, family_source, grid_of, unit, vectorised
from ferryman.backends.simt_runtime import runtime

_FILE = Path(__file__).with_name("activation.cuh")
_STEMS = {"Silu": "silu_mul", "GeluTanh": "gelu_mul", "GeluErf": "gelu_mul"}
_THREADS = 256
_SCALAR_PACKS = 8
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


# Few elements wait for one thread's work, and not for memory: they are spread over all threads that fit at once. Many
# have two 16-byte loads of each tensor in flight a thread, 128 KiB an SM at 2048 threads. Backward, of three tensors,
# one load of each does.
_FEW = _Flat(VECTOR_BYTES // 2, 128, 1, 1024 * VECTOR_BYTES // 2)
_FORMS = {
    "": (_FEW, _Flat(VECTOR_BYTES, 128, 1, 2048 * VECTOR_BYTES), _Flat(VECTOR_BYTES, _THREADS, 2)),
    "_backward": (_FEW, _Flat(VECTOR_BYTES, 128, 1)),
}
_LONE = _Flat(0, _THREADS, _SCALAR_PACKS)


def _built(function: str, dtype: torch.dtype, way: str, *args: object) -> Unit:
    """``way``: "", "_backward", or one of them and "_flat"."""
    source = family_source(_FILE, False)
    kernel = unit(source, f"FERRYMAN_GATED{way.upper()}", _STEMS[function] + way, function, TYPE_NAMES[dtype], *args)
    return kernel._replace(overlapping=True)


@functools.lru_cache(maxsize=None)
def _flat_unit(function: str, dtype: torch.dtype, way: str, form: _Flat, exact: bool) -> Unit:
    return _built(function, dtype, f"{way}_flat", form.width(dtype), form.threads, form.packs, exact)


@functools.lru_cache(maxsize=4096)
def _choose_flat(
    function: str, dtype: torch.dtype, way: str, n: int, vector: bool, units: int
) -> tuple[Unit, int, int]:
    """(unit, blocks, threads of a block) for tensors of ``n`` elements without gaps."""
    form = next(f for f in _FORMS[way] if n * dtype.itemsize <= units * f.most) if vector else _LONE
    tile = form.threads * form.packs * form.width(dtype)
    blocks = grid_of(-(-n // tile), form.threads)
    return _flat_unit(function, dtype, way, form, vector and blocks * tile == n), blocks, form.threads


@functools.lru_cache(maxsize=None)
def _rows_unit(
    function: str, dtype: torch.dtype, way: str, width: int, lanes: int, rows_per_block: int, packs: int
) -> Unit:
    return _built(function, dtype, way, width, lanes, rows_per_block, packs)


@functools.lru_cache(maxsize=4096)
def _choose_rows(
    function: str, dtype: torch.dtype, way: str, rows: int, n: int, vector: bool, units: int
) -> tuple[Unit, int, int]:
    """(unit, blocks, chunks of a row) for ``rows`` of ``n`` elements with gaps between them."""
    width, packs = 1, _SCALAR_PACKS
    if vector:
        width = VECTOR_BYTES // dtype.itemsize
        packs = next(f.packs for f in _FORMS[way] if rows * n * dtype.itemsize <= units * f.most)
    needed = -(-n // (width * packs))
    lanes, rows_per_block = next((s for s in _SHAPES if s[0] >= needed), _SHAPES[-1])
    chunks = -(-needed // lanes)
    chosen = _rows_unit(function, dtype, way, width, lanes, rows_per_block, packs)
    return chosen, grid_of(-(-rows // rows_per_block) * chunks, _THREADS), chunks


def _launch(function: str, way: str, inputs: Sequence[Tensor], outputs: Sequence[Tensor], target: Target) -> None:
    """All of one shape and dtype, outputs contiguous. Without gaps, or of one row, they are one run of elements (lines
    "cuda.flat" and "hip.flat"), else rows ("cuda.rows", "hip.rows"): the menu's clauses ask the same."""
    y = outputs[0]
    n = y.numel()
    if n == 0:
        return
    rows, strides = 1, [0] * len(inputs)
    if not all(t.is_contiguous() for t in inputs):
        views = [as_rows(t) for t in inputs]
        inputs, rows, strides = [v[0] for v in views], views[0][1], [v[2] for v in views]
    sources, results = [t.data_ptr() for t in inputs], [t.data_ptr() for t in outputs]
    addresses = functools.reduce(operator.or_, (*sources, *results))
    if rows == 1:  # whatever the shape; it may end within a vector: its tail is done element by element
        vector = vectorised(y.element_size(), 0, addresses)
        chosen, blocks, threads = _choose_flat(function, y.dtype, way, n, vector, target.units)
        runtime(target).launch(chosen, y.device, blocks, threads, 0, (*sources, *results, n, blocks))
        return
    n = y.shape[-1]
    vector = vectorised(y.element_size(), functools.reduce(operator.or_, strides, n), addresses)
    chosen, blocks, chunks = _choose_rows(function, y.dtype, way, rows, n, vector, target.units)
    pairs = itertools.chain.from_iterable(zip(sources, strides, strict=True))
    runtime(target).launch(chosen, y.device, blocks, _THREADS, 0, (*pairs, *results, rows, n, chunks, blocks))


def _forward(function: str, gate: Tensor, up: Tensor, target: Target) -> Tensor:
    y = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(function, "", (gate, up), (y,), target)
    return y


def _backward(function: str, grad: Tensor, gate: Tensor, up: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    grad_up = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
    _launch(function, "_backward", (grad, gate, up), (grad_gate, grad_up), target)
    return grad_gate, grad_up


def _gelu(approximate: str) -> str:
    return "GeluTanh" if approximate == "tanh" else "GeluErf"


def silu_mul(gate: Tensor, up: Tensor, target: Target) -> Tensor:
    return _forward("Silu", gate, up, target)


def silu_mul_backward(grad: Tensor, gate: Tensor, up: Tensor, target: Target) -> tuple[Tensor, Tensor]:
    return _backward("Silu", grad, gate, up, target)


def gelu_mul(gate: Tensor, up: Tensor, approximate: str, target: Target) -> Tensor:
    return _forward(_gelu(approximate), gate, up, target)


def gelu_mul_backward(
    grad: Tensor, gate: Tensor, up: Tensor, approximate: str, target: Target
) -> tuple[Tensor, Tensor]:
    return _backward(_gelu(approximate), grad, gate, up, target)


def units(target: Target) -> list[Unit]:
    """Every kernel of this family; the target's limits do not matter here."""
    kernels = []
    for function, dtype, way in itertools.product(_STEMS, TYPE_NAMES, ("", "_backward")):
        for form, exact in (*itertools.product(_FORMS[way], (True, False)), (_LONE, False)):
            kernels.append(_flat_unit(function, dtype, way, form, exact))
        packs = [(1, _SCALAR_PACKS)]
        packs += [(VECTOR_BYTES // dtype.itemsize, count) for count in sorted({f.packs for f in _FORMS[way]})]
        for (width, count), shape in itertools.product(packs, _SHAPES):
            kernels.append(_rows_unit(function, dtype, way, width, *shape, count))
    return kernels
