"""What adapters share."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib import metadata
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.bench.peers import NotServed

Call = Callable[[], Any]


def missing(*modules: str, device: bool = True) -> str | None:
    """Why a library cannot be used: it is not installed, or there is no accelerator for it."""
    for module in modules:
        if importlib.util.find_spec(module.split(".")[0]) is None:
            return f"{module} is not installed"
    if device and not torch.cuda.is_available():
        return "torch sees no accelerator"
    return None


def version(distribution: str) -> str:
    return metadata.version(distribution)


def flat(x: Tensor) -> Tensor:
    """Rows of the last dimension, for libraries that take matrices; a view."""
    return x.view(-1, x.shape[-1])


def plain(**unserved: object) -> None:
    """Refuse options that the library does not have, by name, unless they are off."""
    for name, value in unserved.items():
        if value is not None and value is not False and value != 0:
            raise NotServed(f"no {name}")


class Saved(SimpleNamespace):
    """In the place of autograd's ctx: a Function's forward leaves in it what its backward takes.

    So a backward is timed by itself, on the current stream, where a graph can capture it.
    """

    saved_tensors: tuple[Tensor, ...] = ()

    def save_for_backward(self, *tensors: Tensor) -> None:
        self.saved_tensors = tensors

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise NotServed("its forward overwrites its input")


class Overwriting:
    """A call that leaves its results in its own arguments: ``kept`` maps each of these, copies that nobody else has, to
    what it held. The tool restores them, untimed, before every sample."""

    def __init__(self, call: Call, kept: Sequence[tuple[Tensor, Tensor]]) -> None:
        self.call, self.kept = call, tuple(kept)

    def __call__(self) -> Any:
        return self.call()

    def restore(self) -> None:
        for own, given in self.kept:
            own.copy_(given)


def autotuners(package: str) -> list[Any]:
    """Triton's autotuners in the modules of a package that were imported, each once."""
    from triton.runtime.autotuner import Autotuner

    known: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] == package:
            for value in list(vars(module).values()):
                while value is not None and not isinstance(value, Autotuner):
                    value = vars(value).get("fn") if hasattr(value, "__dict__") else None
                if value is not None:
                    known[id(value)] = value
    return list(known.values())


def backward(function: Any, forward: Sequence[Any], grads: Sequence[Tensor], take: Sequence[int]) -> Call:
    """The backward of an autograd.Function after one forward: the gradients at ``take``."""
    saved = Saved(needs_input_grad=(True,) * len(forward))
    with torch.no_grad():
        function.forward(saved, *forward)

    def call() -> tuple[Any, ...]:
        gradients = function.backward(saved, *grads)
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return tuple(gradients[i] for i in take)

    return call
