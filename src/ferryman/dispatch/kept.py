"""What a caller that calls one op again and again, such as a module, keeps of its calls.

An op tells the calls of all its callers apart by the shapes of two tensors. One caller's weights stay what they are:
the first tensor's shape leads to the guard (`resolver`) that confirms the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from ferryman.dispatch import plan, resolver
from ferryman.ops.primitive import Primitive

MOST = 16  # calls that a caller keeps
ATTEMPTS = 1024  # to keep one: many more than the calls before a replay begins


class Calls(dict[Any, tuple[Callable[..., bool], Callable[..., Any] | None, Any]]):
    """By key: a guard, what runs where it holds, and its last argument; None where the caller's own code does. A copy
    of it is a plain dict, and empty."""

    def __init__(self) -> None:
        super().__init__()
        self.attempts = 0

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, ()

    def keep(self, op: Primitive, key: Any, args: tuple[Any, ...]) -> None:
        """Keep a call that just ran, if dispatch would run it again as it did."""
        if self._may():
            call = plan.runner_of(op).settled(args)
            if call is not None:
                self[key] = call

    def leave(self, key: Any, *tensors: Any) -> None:
        """Keep a call that the caller's own code serves, for what its tensors are."""
        apart = len({id(t) for t in tensors}) == len(tensors)  # a guard compares each tensor once
        if apart and all(type(t) in _PLAIN for t in tensors) and self._may():
            self[key] = (plan.guard_of(tensors), None, None)

    def _may(self) -> bool:
        self.attempts += 1
        if len(self) >= MOST:
            self.clear()
        return self.attempts <= ATTEMPTS


_PLAIN = (Tensor, nn.Parameter)
facts_of = resolver.facts_of


def may(op: Primitive) -> bool:
    """Whether an op's calls can be kept: a guard knows its tensors, and what it returns is all that it does."""
    return resolver.guarded(op) and not op.mutates and not op.lists and resolver.FIRST not in op.namespace
