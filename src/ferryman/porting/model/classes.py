"""The classes that `port` gives modules: subclasses made at run time, pickled by the original's name and a recipe."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from ferryman.ops.recognition import Gate
from ferryman.porting.model import gating, recognise, rewrite
from ferryman.porting.model.recognise import Role


@dataclass(frozen=True)
class Recipe:
    """What a ported class is made of: a proven role; or, and beside a role that gives no gradient, a served copy of its
    methods, with the attributes that are known activations, and those whose cut
    result is known; or, for an activation that a gated op takes, its gate."""

    role: Role | None = None
    gates: frozenset[str] = frozenset()
    gate: Gate | None = None
    interface: bool = False
    cuts: rewrite.Cuts = frozenset()

    def __hash__(self) -> int:
        role = None if self.role is None else (self.role.expression, self.role.guards)
        return hash((role, self.gates, self.gate is None))


def ported_class(original: Any, recipe: Recipe) -> type[nn.Module]:
    """The subclass of a module's class that calls ops. It adds nothing to an instance's layout, so an instance can
    change into it and back."""
    return _made(original, recipe)


@functools.cache
def _made(original: Any, recipe: Recipe) -> type[nn.Module]:
    own: dict[str, Any] = {
        "__module__": original.__module__,
        "__doc__": f"{original.__name__} on ferryman.ops.",
        "__reduce_ex__": _reduce,
        "ferryman_original": original,
        "ferryman_recipe": recipe,
    }
    if recipe.gate is None and (recipe.role is None or not recipe.role.gradient):
        own |= rewrite.rewritten(original, recipe.gates, recipe.cuts).functions
    if recipe.role is not None:
        own["forward"] = recognise.role_forward(recipe.role, own.get("forward", original.forward))
    if recipe.gate is not None:
        own[gating.ATTRIBUTE] = staticmethod(gating.call_of(recipe.gate))
    return type(f"Ferryman{original.__name__}", (original,), own)


def is_ported(module: nn.Module) -> bool:
    return hasattr(type(module), "ferryman_original")


def original_of(module: nn.Module) -> type[nn.Module]:
    original: type[nn.Module] = type(module).ferryman_original  # type: ignore[attr-defined]
    return original


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle by the original's name: a class made at run time has none that another process could import."""
    return _rebuild, (self.ferryman_original, self.ferryman_recipe), self.__dict__


def _rebuild(original: Any, recipe: Recipe) -> nn.Module:
    ported = ported_class(original, recipe)
    return ported.__new__(ported)
