"""Rules over what a call leaves: the results' structure and memory, its inputs, and what differs between calls."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.ops.primitive import Primitive
from ferryman.porting.mutate.rule import Kernel, Named, Sometimes, bent, like, results_of, returned, rule, tensors_of


@returned("structure")
def other_dtype(y: Tensor) -> Tensor:
    """A result in another dtype."""
    return y.to(torch.float64 if y.dtype == torch.float32 else torch.float32)


@returned("structure")
def another_dimension(y: Tensor) -> Tensor:
    """A result with one dimension more."""
    return y.unsqueeze(0)


@returned("structure")
def other_strides(y: Tensor) -> Tensor:
    """The right values in another order in memory."""
    back = list(reversed(range(y.dim())))
    return y.permute(back).contiguous().permute(back)


@rule("output aliases input")
def computed_in_place(op: Primitive, right: Kernel) -> Named:
    """The result is written over an input, and returned there."""
    over = {place for place, _ in op.overwritten}
    for i, name in enumerate(op.names):
        if op.types[name] == "Tensor" and i not in over:

            def aliased(*args: Any, i: int = i) -> Any:
                result = right(*args)
                first, *rest = results_of(result)
                a = args[i]
                if (a.shape, a.dtype, a.stride()) != (first.shape, first.dtype, first.stride()):
                    return None
                a.copy_(first)
                return like((a, *rest), result)

            yield name, Sometimes(right, aliased)


def _another(a: Tensor) -> Tensor:
    if a.dtype == torch.bool:
        return ~a
    more = a + 1
    return torch.where(more == a, -a, more)  # a large number


@rule("input modified")
def one_input_element_changed(op: Primitive, right: Kernel) -> Named:
    """An input's last element is other afterwards."""
    over = {place for place, _ in op.overwritten}
    for i, name in enumerate(op.names):
        if op.types[name].startswith("Tensor") and i not in over:

            def kernel(*args: Any, i: int = i) -> Any:
                result = right(*args)
                for a in tensors_of([args[i]]):
                    if a.numel():
                        last = a[(-1,) * a.dim()]
                        last.copy_(bent(_another, last) if a.is_floating_point() else _another(last))
                return result

            yield name, kernel


@rule("out of bounds")
def written_past_the_end(op: Primitive, right: Kernel) -> Named:
    """256 bytes behind an input are written: a buffer too small by as many."""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        a = next(tensors_of(args))
        whole = torch.empty(0, dtype=torch.uint8, device=a.device).set_(a.untyped_storage())
        end = a.storage_offset() + sum((n - 1) * s for n, s in zip(a.shape, a.stride(), strict=True)) + 1
        whole[end * a.element_size() :][:256] = 0
        return result

    yield "", kernel


@rule("kept result")
def kept_by_pointer(op: Primitive, right: Kernel) -> Named:
    """A result is kept by the address of the first input."""
    memory: dict[Any, Any] = {}

    def kernel(*args: Any) -> Any:
        first = next(tensors_of(args))
        key = first.data_ptr(), tuple(first.shape), first.dtype
        return memory.setdefault(key, right(*args))

    yield "", kernel


@rule("kept result")
def one_buffer_for_all(op: Primitive, right: Kernel) -> Named:
    """Every call's result lies in one buffer."""
    memory: dict[Any, Tensor] = {}

    def kernel(*args: Any) -> Any:
        result = right(*args)
        first, *rest = results_of(result)
        key = tuple(first.shape), first.dtype, first.stride()
        return like((memory.setdefault(key, torch.empty_like(first)).copy_(first), *rest), result)

    yield "", kernel


@rule("nondeterminism")
def last_bit_at_random(op: Primitive, right: Kernel) -> Named:
    """A result's last bit differs from call to call: sums in any order, a race, a missing barrier."""
    calls = [0]

    def kernel(*args: Any) -> Any:
        result = right(*args)
        y = results_of(result)[0]
        calls[0] += 1
        if y.numel() and y.is_floating_point() and calls[0] % 2 == 0:
            y.copy_(torch.nextafter(y.float(), torch.full_like(y.float(), 2.0)).to(y.dtype) * (1 + 2**-7))
        return result

    yield "", kernel


@rule("batch")
def first_sample_serves_all(op: Primitive, right: Kernel) -> Named:
    """Every sample's result is the first one's."""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        y = results_of(result)[0]
        if y.dim() and y.shape[0] > 1:
            y.copy_(y[:1].clone().expand(y.shape))
        return result

    yield "", kernel
