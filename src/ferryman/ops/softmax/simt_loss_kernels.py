"""Cross entropy in CUDA C++ (`loss.cuh`): a row to a cluster of blocks, read once and, for the gradient, written
once."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, as_rows, family_source, type_name, unit
from ferryman.backends.simt_runtime import runtime

_FILE = Path(__file__).with_name("loss.cuh")
_WAVE = 32
_LINE_BYTES = 128
_COUNTING_THREADS = 1024
_BACKWARD_PACKS, _BACKWARD_THREADS = 4, 256


def _packs(n: int, itemsize: int, shifted: bool) -> int:
    """The most packs of 16 bytes that a row of n elements covers, counted from where its layout begins."""
    return n * itemsize // VECTOR_BYTES + (_LINE_BYTES // VECTOR_BYTES if shifted else 0)


def _shifted(x: Tensor, rows: int, stride: int) -> bool:
    """Whether rows begin in the middle of a line of 128 bytes. They are then laid out from the line's beginning, so
    that waves do not share lines. Replays keep the answer: they serve addresses that are multiples of 16 alone."""
    return (rows > 1 and stride * x.element_size() % _LINE_BYTES != 0) or x.data_ptr() % VECTOR_BYTES != 0


def _line(shifted: bool) -> int:
    return _LINE_BYTES - 1 if shifted else VECTOR_BYTES - 1


class Form(NamedTuple):
    """``packs`` of 16 bytes that a thread keeps; ``cluster``: blocks that share a row; the most ``threads`` of a block,
    and ``blocks`` of so many that an SM should hold (the launch bound: 64 registers a thread at 2 of 512)."""

    packs: int
    cluster: int
    threads: int
    blocks: int

    def waves(self, n: int, itemsize: int, shifted: bool) -> int:
        """Waves of a block for rows of n elements; more than ``threads`` allow where they do not fit."""
        return max(1, -(-_packs(n, itemsize, shifted) // (self.packs * _WAVE * self.cluster)))

    def ahead(self, rows: int, waves: int, units: int) -> int:
        """How many rows ahead L2 is told to fetch the next: half as many as the device works on at a time, for matrices
        far larger than that. 4096 x 128256 in bfloat16 takes 509 us so, 525 us without, 635 us with as many; the loss
        alone 289 against 275."""
        together = units * max(1, self.threads * self.blocks // (waves * _WAVE)) // self.cluster
        return together // 2 if rows >= 4 * together else 0

    def fits(self, n: int, itemsize: int, shifted: bool) -> bool:
        return self.waves(n, itemsize, shifted) * _WAVE <= self.threads


# Measured on one H200 (benchmarks/results/h200/cross_entropy.md): 128 bytes a thread in 64 registers, so that 1024
# threads keep 128 KiB of rows on an SM. Clusters of 1, 2, 4 and 8 blocks are within 2% of each other where several
# blocks share an SM; where one has it alone it is 8% to 46% behind, with 64 bytes a thread 4% to 42%, with 256 bytes 1%
# to 4%.
_FORMS = (Form(8, 2, 512, 2), Form(8, 8, 512, 2), Form(8, 8, 1024, 1))


def forms() -> list[Form]:
    """Every form that `choose` can return."""
    return list(_FORMS)


def choose(n: int, itemsize: int, shifted: bool) -> Form:
    return next(form for form in _FORMS if form.fits(n, itemsize, shifted))


@functools.lru_cache(maxsize=None)
def _unit(form: Form, kind: str, gradient: bool) -> Unit:
    kernel = unit(family_source(_FILE, False, True), "FERRYMAN_LOSS", "loss", kind, *form, gradient)
    return kernel._replace(cluster=form.cluster)


@functools.lru_cache(maxsize=None)
def _backward_unit(kind: str, same: bool) -> Unit:
    family = family_source(_FILE, False, True)
    return unit(family, "FERRYMAN_LOSS_BACKWARD", "loss_backward", kind, _BACKWARD_PACKS, _BACKWARD_THREADS, same)


@functools.lru_cache(maxsize=None)
def _counting() -> Unit:
    return unit(family_source(_FILE, False, True), "FERRYMAN_COUNT_ROWS", "loss_count_rows")


def losses(
    form: Form | None, x: Tensor, labels: Tensor, ignore_index: int, smoothing: float, gradient: bool, target: Target
) -> tuple[Tensor, Tensor]:
    """(loss, log-sum-exp of each row) by one form, or the one that suits; ``gradient`` goes over x, rows of one stride
    apart. Not empty. The kernel that writes is the last launch: a refused one has overwritten nothing."""
    device, n, itemsize = x.device, x.shape[-1], x.element_size()
    labels = labels.contiguous()
    lse = torch.empty(labels.shape, dtype=torch.float32, device=device)
    loss = torch.empty((), dtype=torch.float32, device=device)
    each = torch.empty(labels.shape, dtype=torch.float32, device=device)
    facts = torch.empty(2, dtype=torch.int32, device=device)
    x, rows, stride = as_rows(x)
    shifted = _shifted(x, rows, stride)
    form = form or choose(n, itemsize, shifted)
    waves = form.waves(n, itemsize, shifted)
    ahead = form.ahead(rows, waves, target.units) if gradient else 0
    run = runtime(target).launch
    run(_counting(), device, 1, _COUNTING_THREADS, 0, (labels.data_ptr(), facts.data_ptr(), rows, ignore_index))
    run(
        _unit(form, type_name(x.dtype), gradient),
        device,
        rows * form.cluster,
        waves * _WAVE,
        0,
        (
            x.data_ptr(),
            stride,
            labels.data_ptr(),
            facts.data_ptr(),
            each.data_ptr(),
            lse.data_ptr(),
            loss.data_ptr(),
            rows,
            n,
            ignore_index,
            _line(shifted),
            waves,
            ahead,
            float(smoothing),
        ),
    )
    return loss, lse


def cross_entropy_inplace_grad(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    if logits.numel() == 0:
        return (*_of_nothing(logits, labels), logits)
    work, _, _ = as_rows(logits)
    loss, lse = losses(None, work, labels, ignore_index, label_smoothing, True, target)
    if work is not logits:
        logits.copy_(work)
    return loss, lse, logits


def cross_entropy(
    logits: Tensor, labels: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> tuple[Tensor, Tensor]:
    if logits.numel() == 0:
        return _of_nothing(logits, labels)
    return losses(None, logits, labels, ignore_index, label_smoothing, False, target)


def cross_entropy_backward(
    grad: Tensor, logits: Tensor, labels: Tensor, lse: Tensor, ignore_index: int, label_smoothing: float, target: Target
) -> Tensor:
    device, n, itemsize = logits.device, logits.shape[-1], logits.element_size()
    out = torch.empty(logits.shape, dtype=logits.dtype, device=device)
    if logits.numel() == 0:
        return out
    labels, lse = labels.contiguous(), lse.contiguous()
    logits, rows, stride = as_rows(logits)
    same = (logits.data_ptr() - out.data_ptr() | (stride - n) * itemsize * (rows > 1)) % VECTOR_BYTES == 0
    shifted = _shifted(logits, rows, stride)
    chunks = -(-_packs(n, itemsize, shifted) // (_BACKWARD_PACKS * _BACKWARD_THREADS))
    facts = torch.empty(2, dtype=torch.int32, device=device)
    run = runtime(target).launch
    run(_counting(), device, 1, _COUNTING_THREADS, 0, (labels.data_ptr(), facts.data_ptr(), rows, ignore_index))
    run(
        _backward_unit(type_name(logits.dtype), same),
        device,
        rows * chunks,
        _BACKWARD_THREADS,
        0,
        (
            grad.data_ptr(),
            logits.data_ptr(),
            stride,
            labels.data_ptr(),
            lse.data_ptr(),
            facts.data_ptr(),
            out.data_ptr(),
            n,
            ignore_index,
            _line(shifted),
            chunks,
            float(label_smoothing),
        ),
    )
    return out


def _of_nothing(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    loss = torch.empty((), dtype=torch.float32, device=logits.device)
    lse = torch.empty(labels.shape, dtype=torch.float32, device=logits.device)
    return loss.fill_(float("nan")), lse.fill_(float("-inf"))


def units(target: Target) -> list[Unit]:
    """Every kernel of this family; none but for Hopper, whose clusters they are."""
    if target.arch != "sm_90":
        return []
    kinds = ("f32", "f16", "bf16")
    both = (True, False)
    forwards = [_unit(form, kind, gradient) for form in _FORMS for kind in kinds for gradient in both]
    return [_counting(), *forwards, *[_backward_unit(kind, same) for kind in kinds for same in both]]
