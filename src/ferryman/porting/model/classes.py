"""The classes that `port` gives modules: subclasses made at run time, pickled by the original's name and a recipe."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from torch import nn

from ferryman.ops.recognition import Gate
from ferryman.porting.model import adding, gating, recognise, rewrite, serving, source
from ferryman.porting.model.leaf import class_code
from ferryman.porting.model.part import NONE, Parted
from ferryman.porting.model.recognise import Role
from ferryman.porting.model.repeated import ATTRIBUTE


@dataclass(frozen=True)
class Recipe:
    """What a ported class is made of: a proven role; or, and beside a role that gives no gradient, a served copy of its
    methods, with the attributes that are known activations, those whose cut result is known, norms that take an
    addition, callables that are no modules, parts that are proven, and children that are sequences; or, for an
    activation that a gated op takes, its gate, and tests of what it reads."""

    role: Role | None = None
    gates: frozenset[str] = frozenset()
    gate: Gate | None = None
    interface: bool = False
    cuts: rewrite.Cuts = frozenset()
    norms: frozenset[str] = frozenset()
    callables: rewrite.Callables = frozenset()
    tests: tuple[str, ...] = ()
    parted: Parted = NONE
    sequences: rewrite.Sequences = frozenset()

    def served(self, original: Any) -> rewrite.Rewritten:
        """A class's methods with their served calls."""
        given = self.gates, self.cuts, self.norms, self.callables, self.parted, self.sequences
        return rewrite.rewritten(original, *given)

    def __hash__(self) -> int:
        role = None if self.role is None else (self.role.expression, self.role.guards)
        return hash((role, self.gates, self.gate is None, self.cuts, self.norms, self.callables, self.parted))


def ported_class(original: Any, recipe: Recipe) -> type[nn.Module]:
    """The subclass of a module's class that calls ops. It adds nothing to an instance's layout, so an instance can
    change into it and back."""
    return _class_of(original, recipe, source.code_of(original))


@functools.cache
def _class_of(original: Any, recipe: Recipe, code: Any) -> type[nn.Module]:
    own: dict[str, Any] = {
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "_get_name": _shown,
        "__doc__": f"{original.__name__} on ferryman.ops.",
        "__reduce_ex__": _reduce,
        "ferryman_original": original,
        "ferryman_recipe": recipe,
    }
    if recipe.role is not None:
        own["ferryman_current"] = staticmethod(source.current(original, recipe.role.code))
    if recipe.gate is None and (recipe.role is None or not recipe.role.gradient):
        own |= recipe.served(original).functions
    if recipe.role is not None:
        own["forward"] = recognise.role_forward(recipe.role, original, own.get("forward"))
        own |= serving.ending(original, recipe.role.state, recipe.role.read, _without)
        if recipe.role.added:
            own[adding.ATTRIBUTE] = _taking_addition(recipe.role, original)
    if recipe.gate is not None:
        own |= serving.ending(original, None, frozenset(), _without)
        own[gating.ATTRIBUTE] = staticmethod(gating.call_of(recipe.gate))
        own[gating.CURRENT] = source.current(original, class_code(original), recipe.tests)
    # its name stays: libraries find the blocks that they compile, shard or place by the names of their classes
    kind = type(original.__name__, (original,), own)
    if adding.ATTRIBUTE in own:
        setattr(kind, adding.HOME, kind)
    if gating.ATTRIBUTE in own:
        setattr(kind, gating.HOME, kind)
    return kind


def _taking_addition(role: Role, original: Any) -> Any:
    meaning = serving.known(original, role.guards, role.code, role.reads)
    return adding.method(role.serving(original, role.added, ("x", "addend")), role.parameters[0], meaning)


def is_ported(module: nn.Module) -> bool:
    return hasattr(type(module), "ferryman_original")


def original_of(module: nn.Module) -> type[nn.Module]:
    """The class that a ported module had. Where another library has derived its own from ours since (FSDP,
    parametrisations), that one over the class that ours stands for."""
    kind: Any = type(module)
    original: type[nn.Module] = _without(kind)
    return original


@functools.cache
def _without(kind: Any) -> Any:
    own = vars(kind).get("ferryman_original")
    if own is not None:
        return own
    if not hasattr(kind, "ferryman_original"):
        return kind
    namespace = {n: v for n, v in vars(kind).items() if n not in ("__dict__", "__weakref__")}
    return type(kind)(kind.__name__, tuple(map(_without, kind.__bases__)), namespace)


def _shown(self: Any) -> str:
    """What a printed model calls it."""
    return f"Ferryman{type(self).__name__}"


def _reduce(self: Any, protocol: Any) -> tuple[Any, ...]:
    """Pickle by the original's name: a class made at run time has none that another process could import. Where that
    class has other code than what was proven, it is the original's."""
    role, own = self.ferryman_recipe.role, {n: v for n, v in self.__dict__.items() if n != ATTRIBUTE}
    if role is not None and not (self.ferryman_current() and all(read.current() for read in role.reads)):
        return _again, (self.ferryman_original,), own
    return _rebuild, (self.ferryman_original, self.ferryman_recipe), own


def _again(original: Any) -> nn.Module:
    module: nn.Module = original.__new__(original)
    return module


def _rebuild(original: Any, recipe: Recipe) -> nn.Module:
    ported = ported_class(original, recipe)
    return ported.__new__(ported)
