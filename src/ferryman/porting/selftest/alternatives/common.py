"""What an alternative is, and those that every op has: the shipped kernels, and float64 rounded once."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.porting.cases import as_tuple, double
from ferryman.porting.selftest.edits import Edit
from ferryman.porting.selftest.planting import NOTHING, Kernel, edited, finish, right_line, torch_kernel


@dataclass(frozen=True)
class Alternative:
    """One right kernel. backend "triton" runs where Triton does: interpreted in a worker, compiled on a GPU."""

    op: str
    name: str
    note: str
    make: Callable[[], Kernel]
    backend: str = "torch"
    declares: Mapping[str, Any] | None = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.op}.{self.backend}.{self.name}"

    def line(self, device: torch.device) -> Implementation:
        if self.declares is None:
            return right_line(self.op, self.backend, device)
        return Implementation(op=self.op, name="torch", where="selftest:right", **self.declares)


@dataclass
class Rights:
    """The alternatives of one file."""

    found: list[Alternative] = field(default_factory=list)

    def of(self, *ops: str, **declares: Any) -> Callable[[Kernel], Kernel]:
        """``function(*args)`` without the target gives unrounded outputs; they are rounded once, and laid out."""

        def register(function: Kernel) -> Kernel:
            note = (function.__doc__ or function.__name__.replace("_", " ")).strip().rstrip(".")
            for op in ops:
                kernel = functools.partial(_finished, op, function)
                self.found.append(Alternative(op, function.__name__, note, lambda k=kernel: k, declares=declares))  # type: ignore[misc]
            return function

        return register

    def tiles(self, op: str, name: str, note: str, edits: tuple[Edit, ...] = (),
              target: Mapping[str, Any] = NOTHING) -> None:  # fmt: skip
        """The Triton kernel with other tiles: after edits that change no result, or told of another device."""
        make = functools.partial(edited, "triton", op, edits, target)
        self.found.append(Alternative(op, name, note, make, "triton", None))


def _finished(op: str, function: Kernel, *args: Any) -> Any:
    return finish(op, as_tuple(function(*args[:-1])), args[:-1])


RIGHT = Rights()


def _in_float64(op: str, *args: Any) -> Any:
    return finish(op, as_tuple(registry.primitive(op).body(*double(args[:-1]))), args[:-1])


def _own_memory(op: str, *args: Any) -> Any:
    """The right kernel on copies of its inputs, contiguous ones: another layout, another path inside the library."""
    copies = [a.clone(memory_format=torch.contiguous_format) if isinstance(a, Tensor) else a for a in args]
    result = torch_kernel(op)(*copies)
    return finish(op, as_tuple(result), args[:-1]) if registry.primitive(op).mutates else result


for _op in registry.primitives():
    RIGHT.found += [
        Alternative(_op, "shipped", "the torch implementation", functools.partial(torch_kernel, _op), declares=None),
        Alternative(_op, "copied", "the torch implementation on contiguous copies",
                    lambda op=_op: functools.partial(_own_memory, op), declares=None),  # type: ignore[misc]
        Alternative(_op, "float64", "the formula in float64, rounded once",
                    lambda op=_op: functools.partial(_in_float64, op)),  # type: ignore[misc]
    ]  # fmt: skip
