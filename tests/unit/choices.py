"""Judging choices among equals. PyTorch documents no order of equal elements for `topk` and sorts that are not stable,
and gives other ones on other devices. What stands for a module that chooses so is right if the module, with that choice
wherever it is one of its own, gives the same: each row's chosen elements are, rank by rank, the numbers that its own
call gives, and what follows from them is the module's. No tolerance has a part in it."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ferryman import ops


@contextlib.contextmanager
def seen() -> Iterator[list[Tensor]]:
    """Whole numbers that ops of Ferryman's give meanwhile."""
    given: list[Tensor] = []

    def noting(face: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(face)
        def call(*args: Any, **kwargs: Any) -> Any:
            result = face(*args, **kwargs)
            tensors = (t for t in tree_leaves(result) if isinstance(t, Tensor))
            given.extend(t.clone() for t in tensors if t.dtype in (torch.int64, torch.int32))
            return result

        return call

    faces = {name: getattr(ops, name) for name in ops.__all__}
    try:
        for name, face in faces.items():
            setattr(ops, name, noting(face))
        yield given
    finally:
        for name, face in faces.items():
            setattr(ops, name, face)


class Chosen(TorchFunctionMode):
    """Open choices within it are one of ``choices`` in each row in which that is one that the call may make."""

    def __init__(self, choices: list[Tensor]) -> None:
        super().__init__()
        self.choices = [c.long().flatten(0, -2) for c in choices if c.dim() > 1]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outcome = func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name not in ("topk", "sort", "argsort") or kwargs.get("stable"):
            return outcome
        x = args[0] if args else kwargs["input"]
        indices = outcome if isinstance(outcome, Tensor) else outcome[1]
        dim = kwargs.get("dim", args[2 if name == "topk" else 1] if len(args) > (2 if name == "topk" else 1) else -1)
        if dim not in (-1, x.dim() - 1) or x.dim() < 1:
            return outcome
        rows, mine = x.reshape(-1, x.shape[-1]), indices.reshape(-1, indices.shape[-1]).clone()
        loose = name == "topk" and kwargs.get("sorted", True) is False
        for choice in self.choices:
            if choice.shape[0] == rows.shape[0] and choice.shape[1] <= mine.shape[1]:
                for row, own, wanted in zip(rows.detach(), mine, choice, strict=True):
                    _put(row, own, wanted, loose)
        chosen = mine.view_as(indices)
        return chosen if isinstance(outcome, Tensor) else type(outcome)((x.gather(-1, chosen), chosen))


def _put(row: Tensor, own: Tensor, wanted: Tensor, loose: bool) -> None:
    """Write a choice over a row's own, if the row's numbers there are those that its own choice has, in order."""
    names = wanted.tolist()
    if len(set(names)) < len(names) or min(names) < 0 or max(names) >= len(row):
        return
    if len(names) < len(own):
        names += [i for i in own.tolist() if i not in set(names)]
        if len(names) != len(own):
            return
    at, before = row[names], row[own]
    if loose:
        at, before = at.sort().values, before.sort().values
    if torch.equal(at.isnan(), before.isnan()) and torch.equal(at[~at.isnan()], before[~before.isnan()]):
        own.copy_(torch.tensor(names))


def like(module: Any, choices: list[Tensor]) -> Any:
    """The module with choices that were seen, wherever it may make them."""
    return Like(module, choices) if choices else module


class Like:
    """A module with choices that were seen, where it may make them."""

    def __init__(self, module: Any, choices: list[Tensor]) -> None:
        self.module, self.choices = module, choices

    def __call__(self, *given: Any, **named: Any) -> Any:
        with Chosen(self.choices):
            return self.module(*given, **named)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def __deepcopy__(self, memo: Any) -> Like:
        return Like(copy.deepcopy(self.module, memo), self.choices)

    def double(self) -> Like:
        self.module.double()
        return self
