"""What stands for a call of a module's own: a method of its class or of one above, a function that it holds."""

from __future__ import annotations

import functools
import types
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ferryman.porting.model import source
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.trace import Unproven, bound, numbers_in, trusted

if TYPE_CHECKING:
    from ferryman.porting.model.branches import Follower


def of_self(follower: Follower, where: str, name: str, depth: int) -> Any:
    """``self.name(...)``: a method, or a function that the module holds. What stands for it, if it may not stay."""
    if name in follower.methods:
        follower.method(name, depth + 1)
        return None
    attribute = getattr(follower.module, name, MISSING)
    if name in follower.known and isinstance(attribute, nn.Module):
        return None
    declared = source.members(follower.kind).get(name) if follower.kind is not None else None
    if isinstance(declared, staticmethod) and attribute is declared.__func__:
        return follower.helper(attribute, depth + 1)
    if isinstance(declared, classmethod) and getattr(attribute, "__func__", None) is declared.__func__:
        return functools.partial(follower.helper(declared.__func__, depth + 1), follower.kind)
    if isinstance(attribute, Tensor) or attribute is MISSING:
        raise Unproven(f"{where}: calls self.{name}, which no proof follows")
    if isinstance(attribute, types.FunctionType) and not trusted(attribute):
        return follower.helper(attribute, depth + 1)  # another one ends the role
    if isinstance(attribute, torch.jit.ScriptFunction):
        return follower.helper(source.unscripted(attribute), depth + 1)
    if isinstance(attribute, types.MethodType) and bound(attribute):
        return functools.partial(follower.helper(attribute.__func__, depth + 1), None)
    if isinstance(attribute, functools.partial) and bound(attribute) and not trusted(attribute.func):
        follower.trace.numbers |= numbers_in((*attribute.args, *attribute.keywords.values()))
        return functools.partial(follower.helper(attribute.func, depth + 1), *attribute.args, **attribute.keywords)
    known = trusted(attribute) and not isinstance(attribute, nn.Module)
    if not known and not (isinstance(attribute, functools.partial) and trusted(attribute.func)):
        raise Unproven(f"{where}: calls self.{name}, which it holds, and no proof follows")
    return None


def of_super(follower: Follower, own: types.FunctionType, name: str, depth: int) -> Any:
    """``super().name(...)``: PyTorch's own code may stay as it is (None); any other is followed."""
    cells = dict(zip(own.__code__.co_freevars, own.__closure__ or (), strict=True))
    here = cells["__class__"].cell_contents if "__class__" in cells else None
    order = follower.kind.__mro__ if follower.kind is not None else ()
    for base in order[order.index(here) + 1 :] if here in order else ():
        if name in vars(base):
            if trusted(base):
                return None
            if isinstance(vars(base)[name], types.FunctionType):
                follower.trace.note(base, name, vars(base)[name])
                return follower.function(vars(base)[name], "method", depth + 1)
            break
    raise Unproven(f"{own.__qualname__}: calls super().{name}, which no proof follows")
