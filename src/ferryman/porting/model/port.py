"""`port`: put a model on Ferryman's ops, in place; `unport` takes it back.

A ported module is the same instance with a subclass for its class, so its parameters, buffers, hooks, device, dtype and
mode are untouched, and every reference to it keeps working. What a module computes decides, never its name: a leaf has
a proven role (`recognise`), any other module gets a copy of its forward with served calls (`rewrite`). Libraries whose
models read a registry of attention functions add an `Interface`.
"""

from __future__ import annotations

import contextlib
import types
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from ferryman.errors import PortError
from ferryman.porting.model import rewrite, source, uses
from ferryman.porting.model.classes import is_ported, original_of, ported_class
from ferryman.porting.model.proof import alone
from ferryman.porting.model.repeated import ATTRIBUTE
from ferryman.porting.model.sites import (
    Attribute,
    Interface,
    Left,
    PortReport,
    Site,
    fused_norms,
    interfaces_of,
    site_of,
)
from ferryman.porting.model.survey import STATE, survey


@dataclass
class _State:
    report: PortReport
    switched: list[tuple[int, list[Any]]] = field(default_factory=list)  # (index of the interface, what it switched)
    bound: list[nn.Module] = field(default_factory=list)  # had their class's own forward on the instance
    attributes: list[tuple[int, list[Any]]] = field(default_factory=list)  # (index of the attribute, what it switched)


interfaces: list[Interface] = []
attributes: list[Attribute] = []


def register(interface: Interface) -> None:
    """Integrations call it on import."""
    interfaces.append(interface)
    uses.registries[id(interface.registry)] = interface.registry
    rewrite._cache.clear()


def port(model: nn.Module) -> PortReport:
    """Put a model on Ferryman's ops, in place; `unport` takes it back.

    Porting a ported model changes nothing. Raises PortError if nothing can be ported, if part of the model is ported
    already, or where an interface's switch belongs to another ported model; nothing is half-ported then.
    """
    model = getattr(model, "_orig_mod", model)  # torch.compile's wrapper
    if not isinstance(model, nn.Module):
        raise PortError(f"port: the model is {type(model).__name__}; required: a torch.nn.Module")
    if STATE in model.__dict__:
        state: _State = model.__dict__[STATE]
        return state.report
    with contextlib.ExitStack() as undo:
        bound = [module for module in model.modules() if source.own_forward(module)]
        for module in bound:
            undo.callback(module.__dict__.__setitem__, "forward", module.__dict__.pop("forward"))
        with alone():
            report, switched, replaced = _port(model)
        undo.pop_all()
    model.__dict__[STATE] = _State(report, switched, bound, replaced)
    return report


def _port(model: nn.Module) -> tuple[PortReport, list[tuple[int, list[Any]]], list[tuple[int, list[Any]]]]:
    recipes, left = survey(model)
    for path, recipe in [*recipes.items()]:
        module = model.get_submodule(path)
        try:
            ported_class(type(module), recipe)
        except Exception as error:  # noqa: BLE001 - a class may refuse heirs with whatever it likes
            del recipes[path]
            reason = f"no class can be derived from its own: {type(error).__name__}: {error}"
            left.append(Left(path, type(module).__name__, reason.split("\n", 1)[0][:200]))
    if not recipes:
        reasons = "; ".join(f"{item.path} ({item.module}): {item.reason}" for item in left[:3])
        reasons = reasons or "no module in it has tensors, or calls what an op serves"
        raise PortError(f"nothing in {type(model).__name__} can be ported. {reasons}")
    switched: list[tuple[int, list[Any]]] = []
    attending: set[str] = set()
    with contextlib.ExitStack() as undo:
        for index, interface in enumerate(interfaces):
            readers = [
                (path, m)
                for path, m in model.named_modules(remove_duplicate=True)
                if path in recipes and id(interface.registry) in interfaces_of(m, recipes[path])
            ]
            if readers:
                done, refused = interface.switch(model, readers)
                undo.callback(interface.restore, model, done)
                switched.append((index, done))
                left += refused
                attending |= {path for path, _ in readers} - {item.path for item in refused}
        fused: dict[int, bool] = {}
        for path, recipe in recipes.items():
            for norm, alone in fused_norms(model.get_submodule(path), recipe):
                fused[norm] = alone or fused.get(norm, False)
        sites = [
            site_of(path, model.get_submodule(path), x, path in attending, fused, interfaces)
            for path, x in recipes.items()
        ]
        replaced: list[tuple[int, list[Any]]] = []
        for index, attribute in enumerate(attributes):
            done = attribute.switch(model)
            undo.callback(attribute.restore, model, done)
            replaced.append((index, done))
            sites = _with_op(model, sites, {path for path, _ in done}, attribute.op)
        for path, recipe in recipes.items():
            module = model.get_submodule(path)
            undo.callback(setattr, module, "__class__", type(module))
            module.__class__ = ported_class(type(module), recipe)
        undo.pop_all()
    shown = tuple(site for site in sites if site.ops or site.maybe)
    left = sorted(left, key=lambda item: item.path)
    return PortReport(type(model).__name__, shown, tuple(left)), switched, replaced


def _with_op(model: nn.Module, sites: list[Site], paths: set[str], op: str) -> list[Site]:
    """The sites, where a pass of the modules at ``paths`` may call ``op`` as well."""
    known = {site.path for site in sites}
    sites = [replace(s, maybe=tuple(sorted({*s.maybe, op}))) if s.path in paths else s for s in sites]
    return sites + [Site(p, type(model.get_submodule(p)).__name__, (), (op,)) for p in sorted(paths - known)]


def unport(model: nn.Module) -> None:
    """Take a model back to what `port` found: classes and attention implementation. An unported one stays."""
    model = getattr(model, "_orig_mod", model)
    state = model.__dict__.pop(STATE, None) if isinstance(model, nn.Module) else None
    if state is None:
        return
    for index, done in state.switched:
        interfaces[index].restore(model, done)
    for index, done in state.attributes:
        attributes[index].restore(model, done)
    bound = {id(module) for module in state.bound}
    for module in model.modules():
        again = source.own_forward(module) or (id(module) in bound and "forward" not in module.__dict__)
        if is_ported(module):
            module.__class__ = original_of(module)
            module.__dict__.pop(ATTRIBUTE, None)
        if again:
            module.__dict__["forward"] = types.MethodType(type(module).forward, module)
