"""A rule: one way to turn a right kernel into a wrong one, over any op; and the ways to write one.

A rule knows no op. It is skipped where the op has nothing that it could bend: no optional argument, no number, no two
inputs of one shape.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.primitive import Primitive

Kernel = Callable[..., Any]
Named = Iterator[tuple[str, Kernel]]


@dataclass(frozen=True)
class Rule:
    """models: the mistake. make: (op, right kernel) -> (suffix of the name, wrong kernel). gpu: why it needs a GPU.
    real: the suffix names the tensor that it bends, and only a floating one can be bent so."""

    name: str
    operator: str
    models: str
    make: Callable[[Primitive, Kernel], Named]
    gpu: str | None = None
    real: bool = False


class Sometimes:
    """A wrong kernel that leaves most calls to the right one. ``change`` gives None for those. bent: whether there was
    a call that it changed: one that changes none on any case is no mutant."""

    def __init__(self, right: Kernel, change: Callable[..., Any]) -> None:
        self.right, self.change, self.bent = right, change, False

    def __call__(self, *args: Any) -> Any:
        result = self.change(*args)
        self.bent |= result is not None
        return self.right(*args) if result is None else result


def tensors_of(args: Iterable[Any]) -> Iterator[Tensor]:
    """The tensors among arguments, those in lists too."""
    for value in args:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from tensors_of(value)


def mapped(change: Callable[[Tensor], Tensor], value: Any) -> Any:
    """A tensor changed, or each one of a list; another argument as it is."""
    if isinstance(value, list | tuple):
        return [mapped(change, one) for one in value]
    return change(value) if isinstance(value, Tensor) else value


def bent(change: Callable[[Tensor], Tensor], a: Tensor) -> Tensor:
    """A floating tensor changed; through float32 where PyTorch lacks the operation in 8 bits."""
    if not a.numel() or not a.is_floating_point():
        return a
    try:
        return change(a)
    except NotImplementedError:
        return change(a.float()).to(a.dtype)


def results_of(result: Any) -> tuple[Any, ...]:
    return result if isinstance(result, tuple) else (result,)


def like(outputs: tuple[Any, ...], result: Any) -> Any:
    return outputs if isinstance(result, tuple) else outputs[0]


def rule(operator: str, gpu: str | None = None) -> Callable[[Callable[[Primitive, Kernel], Named]], Rule]:
    """The generator's name and documentation are the rule's."""

    def register(make: Callable[[Primitive, Kernel], Named]) -> Rule:
        return Rule(make.__name__, operator, str(make.__doc__).split(".")[0], make, gpu)

    return register


def written(operator: str) -> Callable[[Callable[[Tensor], Tensor]], Rule]:
    """A change of one output's values, made in place: the memory, dtype and strides stay the right kernel's."""

    def register(change: Callable[[Tensor], Tensor]) -> Rule:
        def make(op: Primitive, right: Kernel) -> Named:
            for i, name in enumerate(op.outputs):

                def kernel(*args: Any, i: int = i) -> Any:
                    result = right(*args)
                    y = results_of(result)[i]
                    if y.numel() and y.is_floating_point():
                        changed = change(y.clone())
                        same = (changed == y) | (changed.isnan() & y.isnan())
                        y.copy_(torch.where(same, y, changed))
                    return result

                yield name, kernel

        return Rule(change.__name__, operator, str(change.__doc__).split(".")[0], make, real=True)

    return register


def returned(operator: str) -> Callable[[Callable[[Tensor], Any]], Rule]:
    """Something else in an output's place."""

    def register(change: Callable[[Tensor], Any]) -> Rule:
        def make(op: Primitive, right: Kernel) -> Named:
            def kernel(*args: Any) -> Any:
                result = right(*args)
                first, *rest = results_of(result)
                return like((change(first), *rest), result)

            yield "", kernel

        return Rule(change.__name__, operator, str(change.__doc__).split(".")[0], make)

    return register


def given(operator: str) -> Callable[[Callable[[Tensor], Tensor]], Rule]:
    """The right kernel on a changed floating input, for each such input."""

    def register(change: Callable[[Tensor], Tensor]) -> Rule:
        def make(op: Primitive, right: Kernel) -> Named:
            over = {place for place, _ in op.overwritten}
            for i, name in enumerate(op.names):
                if not op.types[name].startswith("Tensor") or i in over:
                    continue

                def kernel(*args: Any, i: int = i) -> Any:
                    return right(*args[:i], mapped(functools.partial(bent, change), args[i]), *args[i + 1 :])

                yield name, kernel

        return Rule(change.__name__, operator, str(change.__doc__).split(".")[0], make, real=True)

    return register
