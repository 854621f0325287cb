"""G6, batch invariance: a sample alone against the same sample inside its batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.ops.menu import Implementation
from ferryman.porting.inputs.cases import as_tuple
from ferryman.porting.inputs.fills import Buffer
from ferryman.porting.judging import gates
from ferryman.porting.judging.metrics import Bound, Declared
from ferryman.porting.judging.prepared import Prepared
from ferryman.porting.judging.results import Gate, number


def _na(reason: str) -> Gate:
    return Gate(outcome="n/a", reason=reason)


def samples(prepared: Prepared) -> int | str:
    """How many independent samples the case holds; or why it has no such axis."""
    batch = prepared.primitive.limits.batch
    if isinstance(batch, str):
        return batch
    sizes = {
        value.shape[0]
        for name, value in zip(prepared.primitive.names, prepared.args.values, strict=True)
        if name in batch and isinstance(value, Tensor) and value.dim() > batch[name]
    }
    sizes.discard(1)  # shared by every sample
    if len(sizes) > 1:
        return f"the leading axes of its inputs differ: {sorted(sizes)}"
    if not sizes or sizes == {0}:
        return "the batch has fewer than two samples"
    return sizes.pop()


def alone(prepared: Prepared, index: int) -> tuple[Any, ...]:
    """The arguments of one sample, each in memory of its own, with the strides and the alignment it had."""
    batch = prepared.primitive.limits.batch
    assert not isinstance(batch, str)
    arguments: list[Any] = []
    for name, value in zip(prepared.primitive.names, prepared.args.values, strict=True):
        if name in batch and isinstance(value, Tensor) and value.dim() > batch[name] and value.shape[0] > 1:
            value = Buffer.holding(value[index : index + 1], value.device, value).tensor
        arguments.append(value)
    return tuple(arguments)


def judge(
    prepared: Prepared,
    implementation: Implementation,
    outputs: tuple[Tensor, ...],
    kernel: Callable[..., Any],
    target: Target,
    declared: Declared,
    refused: Callable[[tuple[Any, ...]], list[str]],
) -> Gate:
    """``outputs``: the whole batch's, already within their bounds. What the kernel raises is the gate's reason."""
    count = samples(prepared)
    if isinstance(count, str):
        return _na(count)
    index = count - 1  # the last sample is in a tile that need not be full
    args = alone(prepared, index)
    why = refused(args)
    if why:
        return _na(f"one sample alone is refused: {'; '.join(why)}")
    try:
        with torch.no_grad():
            single = as_tuple(kernel(*args, target))
    except torch.OutOfMemoryError:
        return _na("out of memory")
    except Exception as error:  # noqa: BLE001 - whatever a kernel raises on one sample is its verdict
        return Gate(outcome="fail", reason=f"one sample alone raised {type(error).__name__}: {str(error)[:200]}")
    batch = prepared.primitive.limits.batch
    assert not isinstance(batch, str)
    bounds, largest = prepared.bounds(declared), 0.0
    same, compared = True, 0
    for i, name in enumerate(prepared.primitive.outputs):
        if name not in batch or outputs[i].dim() <= batch[name] or outputs[i].shape[0] != count:
            continue
        whole = outputs[i][index : index + 1]
        if i >= len(single) or not isinstance(single[i], Tensor) or single[i].shape != whole.shape:
            return Gate(outcome="fail", reason=f"{name} of one sample alone has another structure than in its batch")
        compared += whole.numel()
        if bool(gates.differing(single[i], whole.double()).any()):
            same = False
            judgement = gates.Judgement.of(
                name,
                single[i].to(prepared.oracle[i].device),
                prepared.oracle[i][index : index + 1],
                _sample(bounds[i], prepared.oracle[i], index),
            )
            if judgement.wrong is not None:
                return Gate(outcome="fail", reason=f"sample {index} alone: {gates.element(judgement.wrong)}")
            apart = (single[i].double() - whole.double()).abs().to(judgement.bound.total.device) / judgement.bound.total
            largest = max(largest, float(apart[judgement.judged].max()) if bool(judgement.judged.any()) else 0.0)
    if not compared:
        return _na("no output has this axis")
    if same:
        return Gate(outcome="pass", measure=0.0)
    if implementation.batch_invariant:
        text = f"sample {index} alone differs from itself in its batch by up to {number(largest)} bounds"
        return Gate(outcome="fail", reason=f"declared batch-invariant, but {text}")
    return Gate(
        outcome="pass", measure=largest / 2, reason="bounded: a sample alone is not bitwise itself in its batch"
    )


def _sample(bound: Bound, like: Tensor, index: int) -> Bound:
    def part(t: Tensor | None) -> Tensor | None:
        return None if t is None else t.expand_as(like)[index : index + 1]

    total, variance = part(bound.total), part(bound.variance)
    assert total is not None and variance is not None
    return Bound(total, variance, part(bound.ambiguous), part(bound.systematic))
