"""Calls in a module's code that our ops serve, and what serves a function or a callable object."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Served
from ferryman.porting.model import source

Conditions = tuple[tuple[str, bool, str], ...] | None


@dataclass(frozen=True)
class Use:
    """One served call. ``op``: its name, or "" where an attribute decides: the activation at ``gate``, or the norm at
    ``added``, with an addition before it.

    ``conditions``: the tests that it stands under, as (source, outcome, name of the module in it); None where a pass
    may make it more or less than once, by more than the module's own state. ``gradient``: False where it serves only
    what needs no gradient. ``through``: the module that stands for the function, while its forward is its own.
    """

    op: str
    gate: str
    conditions: tuple[tuple[str, bool, str], ...] | None
    gradient: bool = True
    added: str = ""
    through: Any = None

    def certain(self, module: Any) -> bool | None:
        """Whether one pass through the module makes the call, once; None where that cannot be told from outside."""
        if self.through is not None and not source.untouched(self.through):
            return False
        if self.conditions is None:
            return None
        for text, outcome, name in self.conditions:
            try:
                truth = bool(eval(text, {"__builtins__": {}}, {name: module}))  # noqa: S307 - the module's own test
            except (NameError, AttributeError, TypeError, RuntimeError):
                return None  # it reads more than the module's state
            if truth is not outcome:
                return False
        return True


@functools.cache
def served() -> dict[Any, Served]:
    """Functions of PyTorch -> what serves them."""
    return dict(proposals("functions"))


@functools.cache
def served_methods() -> dict[str, Served]:
    """Names of methods of tensors -> what serves them."""
    return dict(proposals("methods"))


more: dict[Any, Served] = {}  # functions of other libraries -> what serves them (integrations add)
registries: dict[int, Any] = {}  # id -> an object of another library whose readers are of interest (integrations add)
served_calls: dict[type, Any] = {}  # a callable's class -> its served __call__


def called(callee: Any, *args: Any, **options: Any) -> Any:
    """``callee(*args, **options)``, by the served copy of its class's code where that is what it runs."""
    served_call = served_calls.get(type(callee))
    return callee(*args, **options) if served_call is None else served_call(callee, *args, **options)


def standing(module: Any, helper: Any) -> Any:
    """The served function in place of a module that hands on to it, while that runs its own forward."""

    def call(*given: Any, **options: Any) -> Any:
        return helper(*given, **options) if source.untouched(module) else module(*given, **options)

    return call
