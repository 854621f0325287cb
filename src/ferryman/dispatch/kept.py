"""What a caller that calls one op again and again, such as a module, keeps of its calls.

An op tells the calls of all its callers apart by the shapes of two tensors. One caller's weights stay what they are:
the first tensor's shape leads to the guard (`resolver`) that confirms the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.dispatch import plan, resolver, state
from ferryman.ops.primitive import Primitive

MOST = 16  # calls that a caller keeps at once
TURNS = 256  # how often it keeps one, until plans are dropped: a sequence that grows would never end
_PLAIN = (Tensor, nn.Parameter)


class Calls(dict[Any, tuple[Callable[..., bool], Callable[..., Any] | None, Any]]):
    """By key: a guard, what runs where it holds, and its last argument; None where the caller's own code does.

    A copy, or what is unpickled, is a plain dict, and empty: neither needs this package.
    """

    def __init__(self) -> None:
        super().__init__()
        self.turns, self.generation = 0, plan.generation

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return dict, ()

    def keep(self, op: Primitive, key: Any, args: tuple[Any, ...]) -> None:
        """Keep a call that just ran, if dispatch would run it again as it did."""
        if self._may([x for x in args if isinstance(x, Tensor)]):
            call = plan.runner_of(op).settled(args)
            if call is not None:
                self._put(key, call)

    def leave(self, key: Any, *tensors: Tensor) -> None:
        """Keep a call that the caller's own code serves, for what its tensors are."""
        if self._may(tensors):
            self._put(key, (plan.guard_of(tensors), None, None))

    def _may(self, tensors: Sequence[Tensor]) -> bool:
        """Whether a guard can tell these tensors, each another, and nothing around the call is of this call alone."""
        if plan.generation != self.generation:
            self.clear()
            self.turns, self.generation = 0, plan.generation
        asked = state.current()
        return (
            self.turns < TURNS
            and (asked is None or asked.tracer is None)
            and not torch._C._is_any_autocast_enabled()
            and not torch._C._len_torch_dispatch_stack()
            and torch._C._get_tracing_state() is None
            and all(type(t) in _PLAIN and t.layout is torch.strided and not t.is_nested for t in tensors)
            and len({id(t) for t in tensors}) == len(tensors)
        )

    def _put(self, key: Any, call: tuple[Callable[..., bool], Callable[..., Any] | None, Any]) -> None:
        self.turns += 1
        if len(self) >= MOST:
            self.clear()
        self[key] = call


def may(op: Primitive) -> bool:
    """Whether an op's calls can be kept: a guard knows its tensors, and what it returns is all that it does."""
    return resolver.guarded(op) and not op.mutates and not op.lists and resolver.FIRST not in op.namespace
