"""Which modules of a model are ported, and how: a recipe for each, or why it stays. Nothing is changed."""

from __future__ import annotations

import itertools
import re
import types
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.errors import PortError
from ferryman.ops.recognition import Gate
from ferryman.porting.model import (
    activations,
    blocks,
    child_calls,
    cuts,
    gating,
    parts,
    recognise,
    rewrite,
    source,
    unrolled,
)
from ferryman.porting.model.classes import Recipe, is_ported
from ferryman.porting.model.leaf import contents_tests
from ferryman.porting.model.part import NONE
from ferryman.porting.model.recognise import Refusal, Role
from ferryman.porting.model.sites import Left
from ferryman.porting.model.trace import trusted

STATE = "_ferryman_port"


def survey(model: nn.Module) -> tuple[dict[str, Recipe], list[Left]]:
    """({path: recipe} of what can be ported, what cannot). Raises PortError where a part is ported already."""
    recipes: dict[str, Recipe] = {}
    left: list[Left] = []
    known: dict[int, Gate] = {}
    modules = list(model.named_modules())
    for path, module in modules:
        if is_ported(module) or STATE in module.__dict__:
            raise PortError(
                f"{path or type(module).__name__}: ported already, alone or with a larger model; unport that one first"
            )
        if "forward" not in module.__dict__ and _plain(module) is None and not _hooked(module):
            gate = activations.gate_of(module)
            if gate is not None:
                known[id(module)] = gate
    # an activation that a product takes is part of a gated op; any other has a role of its own
    taken = {i for _, module in modules for i in _multiplied(module, known)}
    known = {i: gate for i, gate in known.items() if i in taken}
    norms = {id(module) for _, module in modules if _takes_addition(module)}
    for path, module in modules:
        recipe, reason = _recipe(module, known, norms)
        if recipe is not None:
            recipes[path] = recipe
        if reason is not None:
            left.append(Left(path, type(module).__name__, reason))
    cut = {
        f"{path}.{name}".lstrip(".")
        for path, recipe in recipes.items()
        if recipe.cuts or recipe.parted.functions
        for name in recipe.served(type(model.get_submodule(path))).cut
    }
    for path in _inside(model, recipes):
        del recipes[path]
    return recipes, [item for item in left if item.path not in cut]  # the parent's code serves it


def _inside(model: nn.Module, recipes: Mapping[str, Recipe]) -> list[str]:
    """Those inside of modules that ops stand for, with gradients and without: only what ops refuse calls them then."""
    paths = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    modules = {path: model.get_submodule(path) for path in recipes}
    roles = {path: r.role for path, r in recipes.items() if modules[path]._modules}
    whole = [f"{path}." if path else "" for path, r in roles.items() if r is not None and r.gradient and not r.guards]
    return [
        path
        for path in recipes
        if paths[id(modules[path])] == 1 and any(path != w[:-1] and path.startswith(w) for w in whole)
    ]


def _takes_addition(module: nn.Module) -> bool:
    if "forward" in module.__dict__ or _plain(module) is not None or _hooked(module) or _bare(module):
        return False
    role = recognise.role_of(module)
    return isinstance(role, Role) and bool(role.added)


def _bare(module: nn.Module) -> bool:
    """A container, or code that is no Python."""
    return isinstance(module, torch.jit.ScriptModule) or type(module).forward is nn.Module.forward


def _recipe(module: nn.Module, known: dict[int, Gate], added: set[int]) -> tuple[Recipe | None, str | None]:
    """(how a module is ported or None, why it, or a part of it, stays or None)."""
    if "forward" in module.__dict__:
        return None, "its forward was replaced on the instance (accelerate's hooks and the kernels hub do so)"
    odd = _plain(module)
    if odd is not None:
        return None, odd
    if _bare(module):
        script = isinstance(module, torch.jit.ScriptModule)
        return None, "its code is TorchScript, which no proof follows" if script else None
    gates, norms, reason = _named(module, known) | _functions(module), _named(module, added), None
    sequences = _sequences(module, known)
    if id(module) in known:
        return Recipe(gate=known[id(module)], tests=contents_tests(module)), None
    role = recognise.role_of(module)
    if not isinstance(role, Role):
        role = blocks.role_of(module) or role
    if isinstance(role, Role):
        if role.gradient:
            return Recipe(role), None
        cut, callables = _cuts(module), _callables(module)
        served = rewrite.rewritten(type(module), gates, cut, norms, callables, NONE, sequences)
        parted = parts.of_module(module, served.gated, norms, sequences)
        return Recipe(role, gates, cuts=cut, norms=norms, callables=callables, parted=parted, sequences=sequences), None
    if isinstance(role, Refusal) and _holds(module):
        reason = role.reason
    cut, callables = _cuts(module), _callables(module)
    served = rewrite.rewritten(type(module), gates, cut, norms, callables, NONE, sequences)
    known_code = trusted(type(module)) and not sequences
    parted = NONE if known_code else parts.of_module(module, served.gated, norms, sequences)
    if parted is not NONE:
        served = rewrite.rewritten(type(module), gates, cut, norms, callables, parted, sequences)
    if isinstance(role, Refusal) and trusted(type(module)) and {use.op for use in served.uses} <= role.proposed:
        return None, reason  # PyTorch's own module around a functional whose op it was shown not to be
    ungated = _ungated(module, served.products) or _replaced(served)
    if served.functions or served.interfaces:
        interface = bool(served.interfaces)
        return Recipe(
            gates=gates,
            interface=interface,
            cuts=cut,
            norms=norms,
            callables=callables,
            parted=parted,
            sequences=sequences,
        ), ungated
    if served.opaque:
        names = ", ".join(served.opaque)
        reason = f"the source of its {names} is not available, is not what runs, or reads its own locals"
    if reason is None and ungated is None and _holds(module):
        reason = "no op of the day computes it"
    return None, reason or ungated


def _holds(module: nn.Module) -> bool:
    """Whether a checkpoint has tensors of the module's own: parameters, or buffers such as quantised weights."""
    kept = (b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
    return any(t is not None for t in (*module._parameters.values(), *kept))


def _multiplied(module: nn.Module, known: dict[int, Gate]) -> Iterator[int]:
    """The ids of known activations whose result a module's forward multiplies."""
    if "forward" in module.__dict__ or _plain(module) is not None or _bare(module):
        return
    for use in rewrite.rewritten(type(module), _named(module, known), sequences=_sequences(module, known)).uses:
        if use.gate:
            yield id(module.get_submodule(use.gate))


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _ungated(module: nn.Module, products: frozenset[str]) -> str | None:
    """Why a product with an activation of no tensors stays two ops."""
    for path in sorted(products):
        activation: Any = module
        for name in path.split("."):
            activation = getattr(activation, name, None)
        if (
            isinstance(activation, nn.Module)
            and not any(True for _ in activation.parameters())
            and not list(activation.buffers())
        ):
            if _hooked(activation):
                return f"{path} has a hook, which a gated activation would not run"
            return f"its activation {path} is {type(activation).__name__}, and no gated op has it"
    return None


def _replaced(served: rewrite.Rewritten) -> str | None:
    """Why a function that a module's code calls is not served."""
    for use in served.uses:
        if use.through is not None and not source.untouched(use.through):
            return f"the {use.op or 'function'} that it calls is a module, whose forward was replaced on the instance"
    return None


def _plain(module: nn.Module) -> str | None:
    """Why a module's own tensors are no plain ones."""
    for name, p in [*module._parameters.items(), *module._buffers.items()]:
        if p is not None and type(p) not in (Tensor, nn.Parameter, nn.Buffer) and not _is_fake(p):
            return f"its {name} is a {type(p).__name__}, not a plain tensor"
    return None


def _is_fake(p: Tensor) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return isinstance(p, FakeTensor) or type(p).__name__ == "Parameter"


def _named(module: nn.Module, known: Collection[int]) -> frozenset[str]:
    """Attributes, at most two deep, that are known by their ids."""
    names = set()
    for name, child in module.named_modules():
        if name.count(".") < 2 and id(child) in known and re.fullmatch(r"[A-Za-z_]\w*(\.\w+)?", name):
            names.add(name)
    return frozenset(names)


def _sequences(module: nn.Module, known: Collection[int]) -> rewrite.Sequences:
    """Children that call others in turn, the last of them a known activation; and the module itself, where it calls a
    convolution in turn."""
    pairs = {
        (name, len(child))
        for name, child in module._modules.items()
        if isinstance(child, nn.Sequential) and 0 < len(child) <= _MOST and unrolled.is_sequence(child, len(child))
        if name.isidentifier() and id(child[-1]) in known
    }
    if isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward and len(module) <= _MOST:
        plain = [child_calls.is_plain_child(child) for child in module._modules.values()]
        pairs |= {("", len(module))} if any(a and b for a, b in itertools.pairwise(plain)) else set()
    return frozenset(pairs)


_MOST = 8  # modules in turn


def _functions(module: nn.Module) -> frozenset[str]:
    """Attributes that are functions of PyTorch with a gated op."""
    kinds = types.FunctionType | types.BuiltinFunctionType
    own = [(n, v) for n, v in vars(module).items() if isinstance(v, kinds) and n.isidentifier() and trusted(v)]
    known = {n: gate for n, v in own if (gate := activations.gate_of(v)) is not None}
    for name, gate in known.items():
        gating.functions.setdefault(getattr(module, name), gating.call_of(gate))
    return frozenset(known)


def _cuts(module: nn.Module) -> rewrite.Cuts:
    """Children whose result, cut to the length of what they are given, is known."""
    pairs = set()
    for name, child in module.named_children():
        if name.isidentifier() and _plain(child) is None:
            shown = cuts.shown_of(child)
            if shown is not None:
                pairs.add((name, shown))
    return frozenset(pairs)


def _callables(module: nn.Module) -> rewrite.Callables:
    """Attributes that are objects of a class with a __call__ of its own, and no modules, tensors or functions."""
    return frozenset(
        (name, type(value))
        for name, value in vars(module).items()
        if name.isidentifier() and isinstance(getattr(type(value), "__call__", None), types.FunctionType)  # noqa: B004
    )
