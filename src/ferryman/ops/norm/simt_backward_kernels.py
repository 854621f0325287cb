"""Gradients of the norms over wide rows in CUDA C++ (`norm_backward.cuh`): clusters that stay for many rows."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, as_rows, family_source, pointer, type_name, unit
from ferryman.backends.simt_runtime import runtime
from ferryman.ops.norm.implementations import WIDE_BYTES, WIDE_SHARED_MEMORY

_FILE = Path(__file__).with_name("norm_backward.cuh")
_TYPES = ("f32", "f16", "bf16")
_SIZES = {"f32": 4, "f16": 2, "bf16": 2, "none": 0}
_WAVE = 32
_LINE_PACKS = 8
_MOST_THREADS, _MOST_CLUSTER = 512, 8
_SUM_WAVES, _SUM_COLUMNS = 8, 128
# A cluster lies in one group of SMs. Of the 132 of an H200, those of 4 and 8 leave 12 (cuOccupancyMaxActiveClusters).
# One cluster more than fit runs after all others.
_LEFT = 11


class Form(NamedTuple):
    """``cluster``: blocks that share a row, each alone on its SM. A thread takes ``packs`` of 16 bytes of a row;
    ``stages``: rows that shared memory holds; ``lag``: 1 where a row's sums are taken one row early; ``in_registers``:
    packs of weights there."""

    cluster: int
    packs: int
    stages: int
    lag: int
    in_registers: int

    def lanes(self, n: int, itemsize: int) -> int:
        """Threads of a block."""
        columns = -(-n * itemsize // (VECTOR_BYTES * _LINE_PACKS * self.cluster)) * _LINE_PACKS
        return -(-columns // (self.packs * _WAVE)) * _WAVE

    def exact(self, n: int, itemsize: int) -> bool:
        """Whether all threads have as many packs."""
        return n * itemsize == self.cluster * self.lanes(n, itemsize) * self.packs * VECTOR_BYTES

    def clusters(self, rows: int, units: int) -> int:
        """Clusters of one launch, all of which run at once."""
        together = units if self.cluster <= 2 else units - units // _LEFT
        return max(1, min(rows, together // self.cluster))

    def shared(self, lanes: int, itemsize: int, tensors: int, weight: int) -> int:
        """Dynamic shared memory of a block. ``weight``: bytes of an element of it."""
        of_weights = (self.packs - self.in_registers) * VECTOR_BYTES // itemsize * weight
        return lanes * (self.stages * tensors * self.packs * VECTOR_BYTES + of_weights)

    def fixed(self, lanes: int) -> int:
        """Static shared memory of a block, at most."""
        waves = lanes // _WAVE
        return waves * self.cluster * (2 * 16 + 8) + 8 * (waves * (self.stages + 1) + 2) + 16

    def fits(self, n: int, itemsize: int, tensors: int, weight: int, shared_memory: int) -> bool:
        lanes = self.lanes(n, itemsize)
        return lanes <= _MOST_THREADS and (
            self.shared(lanes, itemsize, tensors, weight) + self.fixed(lanes) <= shared_memory
        )


# The first that holds a row is taken; 10 to 25% above a copy of as many bytes on an H200 (16384 to 131072 columns).
# `_WIDER`: for weights of more bytes than the row's elements.
_WIDER = (Form(2, 4, 2, 0, 0), Form(4, 4, 2, 0, 0), Form(8, 4, 2, 0, 0))
FORMS = {
    "scaled": (Form(2, 2, 3, 0, 0), Form(2, 4, 3, 1, 1), Form(8, 2, 6, 1, 0), Form(8, 4, 3, 1, 1)),
    "added": (Form(2, 2, 3, 1, 0), Form(4, 2, 4, 1, 0), Form(8, 2, 4, 1, 0), Form(8, 4, 2, 1, 1), Form(8, 4, 2, 0, 4)),
    "centred": (
        Form(2, 2, 4, 1, 0),
        Form(2, 4, 3, 1, 0),
        Form(2, 4, 3, 1, 1),
        Form(4, 4, 3, 1, 0),
        Form(4, 4, 3, 1, 1),
        Form(8, 4, 3, 1, 0),
        Form(8, 4, 3, 1, 1),
    ),
}


@functools.lru_cache(maxsize=4096)
def choose(kind: str, n: int, itemsize: int, weight: int, few: bool, shared_memory: int) -> Form:
    """The form for rows of ``n`` elements that the menu admits. ``few``: all rows can have 8 blocks at once."""
    tensors = 3 if kind == "added" else 2
    forms = FORMS[kind] if kind == "added" or weight <= itemsize else (FORMS[kind][0], *_WIDER)
    wide = [form for form in forms if form.cluster == _MOST_CLUSTER]
    return next(f for f in (*(wide if few else ()), *forms) if f.fits(n, itemsize, tensors, weight, shared_memory))


@functools.lru_cache(maxsize=None)
def _unit(
    kind: str, weight: str, centred: bool, biased: bool, added: bool, lanes: int, exact: bool, form: Form
) -> Unit:
    source = family_source(_FILE, True, True)
    kernel = unit(
        source,
        "FERRYMAN_NORM_BACKWARD",
        "norm_backward",
        kind,
        weight,
        centred,
        biased,
        added,
        lanes,
        form.packs,
        form.stages,
        form.lag,
        form.in_registers,
        exact,
        form.cluster,
    )
    return kernel._replace(cluster=form.cluster, overlapping=True)


@functools.lru_cache(maxsize=None)
def _sum_unit(weight: str, bias: str) -> Unit:
    kernel = unit(
        family_source(_FILE, True, True), "FERRYMAN_SUM_CLUSTERS", "norm_sum_clusters", weight, bias, _SUM_WAVES
    )
    return kernel._replace(overlapping=True)


def _whole_words(x: Tensor) -> tuple[Tensor, int, int]:
    """`as_rows`, copied where rows do not begin on multiples of 16 bytes."""
    rows = as_rows(x)
    if (rows[2] * x.element_size() if rows[1] > 1 else 0) % VECTOR_BYTES or rows[0].data_ptr() % VECTOR_BYTES:
        return as_rows(rows[0].clone(memory_format=torch.contiguous_format))
    return rows


def _gradients(
    grad: Tensor,
    extra: Tensor | None,
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    centred: bool,
    target: Target,
    form: Form | None,
) -> tuple[Tensor, Tensor, Tensor]:
    n, device, itemsize = x.shape[-1], x.device, x.element_size()
    out = torch.empty(x.shape, dtype=x.dtype, device=device)
    grads = [
        torch.empty(0, dtype=x.dtype, device=device) if p is None else torch.empty(n, dtype=p.dtype, device=device)
        for p in (weight, bias)
    ]
    if x.numel() == 0:
        return out, grads[0].zero_(), grads[1].zero_()
    x, rows, x_stride = _whole_words(x)
    grad, _, grad_stride = _whole_words(grad)
    extra_stride, tensors = 0, 2
    if extra is not None:
        extra, _, extra_stride = _whole_words(extra)
        tensors = 3
    weight = None if weight is None else _whole_words(weight)[0]
    kinds = [type_name(None if p is None else p.dtype) for p in (weight, bias)]
    wanted = sum(kind != "none" for kind in kinds)
    kind = "centred" if centred else "scaled" if extra is None else "added"
    few = rows * _MOST_CLUSTER <= target.units
    form = form or choose(kind, n, itemsize, _SIZES[kinds[0]], few, target.shared_memory)
    lanes, clusters = form.lanes(n, itemsize), form.clusters(rows, target.units)
    partial = torch.empty(wanted, clusters, n, dtype=torch.float32, device=device) if wanted else None
    run = runtime(target).launch
    run(
        _unit(
            type_name(x.dtype),
            kinds[0],
            centred,
            kinds[1] != "none",
            extra is not None,
            lanes,
            form.exact(n, itemsize),
            form,
        ),
        device,
        clusters * form.cluster,
        lanes,
        form.shared(lanes, itemsize, tensors, _SIZES[kinds[0]]),
        (
            grad.data_ptr(),
            grad_stride,
            x.data_ptr(),
            x_stride,
            pointer(extra),
            extra_stride,
            pointer(weight),
            out.data_ptr(),
            pointer(partial),
            rows,
            n,
            clusters,
            float(eps),
        ),
    )
    if partial is not None:
        blocks = -(-n // _SUM_COLUMNS)
        run(
            _sum_unit(kinds[0], kinds[1]),
            device,
            blocks * wanted,
            _SUM_WAVES * _WAVE,
            0,
            (partial.data_ptr(), grads[0].data_ptr(), grads[1].data_ptr(), clusters, n, blocks),
        )
    return out, grads[0], grads[1]


def launch(op: str, args: Sequence[Any], target: Target, form: Form | None = None) -> tuple[Tensor, ...]:
    """The op's results by one form, or by the one that suits."""
    if op == "layer_norm_backward":
        grad, x, weight, bias, eps = args
        return _gradients(grad, None, x, weight, bias, eps, True, target, form)
    *given, weight, eps = args
    grad, x, extra = (given[0], given[2], given[1]) if op == "add_rms_norm_backward" else (*given, None)
    return _gradients(grad, extra, x, weight, None, eps, False, target, form)[:2]


def rms_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    return _gradients(grad, None, x, weight, None, eps, False, target, None)[:2]


def add_rms_norm_backward(
    grad_y: Tensor, grad_residual: Tensor, residual_out: Tensor, weight: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor]:
    return _gradients(grad_y, grad_residual, residual_out, weight, None, eps, False, target, None)[:2]


def layer_norm_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    return _gradients(grad, None, x, weight, bias, eps, True, target, None)


# Of real models, and between.
_WIDTHS = (12_288, 16_384, 20_480, 32_768, 53_248, 65_536, 98_304, 131_072)


def units(target: Target) -> list[Unit]:
    """Every kernel of this family: equal dtypes on every width, the others, and few rows, on each form. None where the
    device is not what the menu asks for."""
    if "clusters" not in target.features or target.shared_memory < WIDE_SHARED_MEMORY:
        return []
    kernels: dict[str, Unit] = {}
    for x, weight, kind, biased, few in itertools.product(_TYPES, _SIZES, FORMS, (False, True), (False, True)):
        seen: set[Form] = set()
        for n in _WIDTHS:
            size = _SIZES[x]
            if n * size > WIDE_BYTES or (biased and kind != "centred"):
                continue
            form = choose(kind, n, size, _SIZES[weight], few, target.shared_memory)
            if (few or x != weight) and form in seen:
                continue
            seen.add(form)
            lanes, exact = form.lanes(n, size), form.exact(n, size)
            kernel = _unit(x, weight, kind == "centred", biased, kind == "added", lanes, exact, form)
            kernels[kernel.name] = kernel
    for weight, bias in itertools.product(_SIZES, _SIZES):
        if (weight, bias) != ("none", "none"):
            kernel = _sum_unit(weight, bias)
            kernels[kernel.name] = kernel
    # ptxas takes a word or more beyond the launch bounds, which sm_90 decides, of some kernels on sm_100
    allowed = 24 if target.arch == "sm_100" else 0
    return [u._replace(spills_allowed=allowed) for u in kernels.values()]
