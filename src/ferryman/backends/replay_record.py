"""What one run of a launcher did on tensors without data (`replay`): allocations, views, copies and launches."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_ADDRESSES = 1 << 40  # between the made-up addresses of two tensors


class NotReplayable(Exception):
    """A launcher did what cannot be repeated from the facts of a call alone."""


class Stream:
    """Stands in a step's arguments for the raw handle of the current stream."""


STREAM = Stream()


@dataclass(frozen=True)
class Step:
    """One launch: ``function(*arguments)``, where a tensor or a `Pointer` stands for an address.

    It may be repeated while the lists of ``idle`` are empty and every (object, attribute, value) of ``same`` holds.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    idle: tuple[list[Any], ...] = ()
    same: tuple[tuple[Any, str, Any], ...] = ()


@dataclass(eq=False)
class Memory:
    """Where a recorded tensor lies: in an ``argument``, in an allocation, a contiguous ``copy``, or a ``view``."""

    kind: str
    tensor: Tensor
    name: str
    base: Memory | None = None

    @property
    def root(self) -> Memory:
        return self if self.kind != "view" or self.base is None else self.base.root

    @property
    def offset(self) -> int:
        """Bytes from where its root begins: the recording's own tensors begin their storages."""
        return int(self.tensor.storage_offset()) * self.tensor.element_size()


class Pointer(int):
    """An address of the recording: what it is an address of."""

    memory: Memory


@dataclass
class Recording:
    device: torch.device
    events: list[Memory | Step] = field(default_factory=list)
    memory: dict[int, Memory] = field(default_factory=dict)  # by the tensor's id; `Memory` keeps the tensor alive

    def note(self, kind: str, tensor: Tensor, name: str, base: Memory | None = None) -> Memory:
        memory = self.memory[id(tensor)] = Memory(kind, tensor, name, base)
        if kind in ("empty", "zeros", "copy"):
            self.events.append(memory)
        return memory

    def of(self, tensor: Tensor) -> Memory:
        memory = self.memory.get(id(tensor))
        if memory is None:
            raise NotReplayable("a tensor that is neither an argument nor allocated for this call")
        return memory

    def pointer(self, tensor: Tensor) -> Pointer:
        memory = self.of(tensor)
        number = list(self.memory.values()).index(memory.root)
        pointer = Pointer((number + 1) * _ADDRESSES + memory.offset if tensor.numel() else 0)
        pointer.memory = memory
        return pointer

    def add(self, step: Step) -> None:
        self.events.append(step)
