"""`port`: put a model on Ferryman's ops, in place; `unport` takes it back.

A ported module is the same instance with a subclass for its class, so its parameters, buffers, hooks, device, dtype and
mode are untouched, and every reference to it keeps working. What a module computes decides, never its name: a leaf has
a proven role (`recognise`), any other module gets a copy of its forward with served calls (`rewrite`). Libraries whose
models read a registry of attention functions add an `Interface`.
"""

from __future__ import annotations

import contextlib
import inspect
import re
import types
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ferryman.errors import PortError
from ferryman.ops.recognition import Gate
from ferryman.porting.model import blocks, cuts, recognise, rewrite, source, uses
from ferryman.porting.model.branches import trusted
from ferryman.porting.model.classes import Recipe, is_ported, original_of, ported_class
from ferryman.porting.model.proof import alone
from ferryman.porting.model.recognise import Refusal, Role

STATE = "_ferryman_port"


@dataclass(frozen=True)
class Site:
    """A ported module: where it is, what it was, and the ops that one forward of it calls, once each.

    ``maybe``: ops that a pass may call as well, by its input. ``shown``: the proof in words. ``role``: the op that
    stands for the whole module, if one does; ``gradient``: False where it, or one of ``maybe``, serves only what needs
    no gradient.
    """

    path: str
    module: str
    ops: tuple[str, ...]
    maybe: tuple[str, ...] = ()
    shown: str = ""
    role: str = ""
    gradient: bool = True


@dataclass(frozen=True)
class Left:
    """A module, or part of one, that stays as it was, and why."""

    path: str
    module: str
    reason: str


@dataclass(frozen=True)
class PortReport:
    """What `port` did."""

    model: str
    ported: tuple[Site, ...]
    unsupported: tuple[Left, ...]

    def calls(self, steps: int = 1, runs: Mapping[str, int] | None = None, gradients: bool = True) -> dict[str, int]:
        """Calls of each op that ``steps`` forward passes make.

        gradients: False for passes under `torch.no_grad`; what serves there only is counted then.
        runs: how often a pass runs the ported module at a path, where that is not once (`runs_of` counts). What a pass
        may call as well is in `Site.maybe`, and not here; `ferryman.porting.model.account` counts what an input calls.
        """
        counted: Counter[str] = Counter()
        for site in self.ported:
            for op in (*site.ops, *((site.role,) if site.role and not (gradients or site.gradient) else ())):
                counted[op] += 1 if runs is None else runs.get(site.path, 1)
        return {op: n * steps for op, n in sorted(counted.items()) if n}

    def runs_of(self, model: nn.Module, run: Callable[[nn.Module], Any]) -> dict[str, int]:
        """{path: times that ``run(model)`` called it} of the ported modules that it did not call once."""
        paths = {id(model.get_submodule(site.path)): site.path for site in self.ported}
        seen = dict.fromkeys(paths.values(), 0)

        def entered(module: nn.Module, args: Any) -> None:
            if id(module) in paths:
                seen[paths[id(module)]] += 1

        with contextlib.ExitStack() as stack:
            stack.callback(register_module_forward_pre_hook(entered).remove)
            run(model)
        return {path: n for path, n in seen.items() if n != 1}

    def maybe(self) -> frozenset[str]:
        """Ops of which a pass may make more calls than `calls` says, by its input."""
        return frozenset(op for site in self.ported for op in site.maybe)

    def text(self) -> str:
        """One line a kind of module: what serves it, or why it stays."""
        kinds: dict[tuple[str, str], int] = Counter()
        for site in self.ported:
            served = ", ".join(sorted(set(site.ops) | set(site.maybe))) or "served calls"
            kinds[site.module, f"{served}{f' ({site.shown})' if site.shown else ''}"] += 1
        for left in self.unsupported:
            kinds[left.module, f"stays: {left.reason}"] += 1
        return "\n".join(f"{n:5} {module}: {what}" for (module, what), n in sorted(kinds.items()))


class Interface(Protocol):
    """A registry of attention functions that another library's forwards read, and that we are registered with."""

    registry: Any
    doubtful: frozenset[str]  # keywords of a call with which it may be another's
    fixed: frozenset[str | int]  # keywords and places of a call which, if they learn, make it another's

    def switch(self, model: nn.Module, readers: Sequence[tuple[str, nn.Module]]) -> tuple[list[Any], list[Left]]:
        """Make the readers take our function: (what `restore` takes back, readers that keep theirs)."""

    def restore(self, model: nn.Module, switched: list[Any]) -> None: ...


@dataclass
class _State:
    report: PortReport
    switched: list[tuple[int, list[Any]]] = field(default_factory=list)  # (index of the interface, what it switched)
    bound: list[nn.Module] = field(default_factory=list)  # had their class's own forward on the instance


interfaces: list[Interface] = []


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
            report, switched = _port(model)
        undo.pop_all()
    model.__dict__[STATE] = _State(report, switched, bound)
    return report


def _port(model: nn.Module) -> tuple[PortReport, list[tuple[int, list[Any]]]]:
    recipes, left = _survey(model)
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
        raise PortError(f"nothing in {type(model).__name__} can be ported. {reasons}")
    switched: list[tuple[int, list[Any]]] = []
    attending: set[str] = set()
    with contextlib.ExitStack() as undo:
        for index, interface in enumerate(interfaces):
            readers = [
                (path, m)
                for path, m in model.named_modules(remove_duplicate=True)
                if path in recipes and id(interface.registry) in _interfaces_of(m, recipes[path])
            ]
            if readers:
                done, refused = interface.switch(model, readers)
                undo.callback(interface.restore, model, done)
                switched.append((index, done))
                left += refused
                attending |= {path for path, _ in readers} - {item.path for item in refused}
        fused: dict[int, bool] = {}
        for path, recipe in recipes.items():
            for norm, alone in _fused(model.get_submodule(path), recipe):
                fused[norm] = alone or fused.get(norm, False)
        sites = [_site(path, model.get_submodule(path), x, path in attending, fused) for path, x in recipes.items()]
        for path, recipe in recipes.items():
            module = model.get_submodule(path)
            undo.callback(setattr, module, "__class__", type(module))
            module.__class__ = ported_class(type(module), recipe)
        undo.pop_all()
    shown = tuple(site for site in sites if site.ops or site.maybe)
    left = sorted(left, key=lambda item: item.path)
    return PortReport(type(model).__name__, shown, tuple(left)), switched


def unport(model: nn.Module) -> None:
    """Take a model back to what `port` found: classes and attention implementation. An unported one stays."""
    model = getattr(model, "_orig_mod", model)
    state = model.__dict__.pop(STATE, None) if isinstance(model, nn.Module) else None
    if state is None:
        return
    for index, done in state.switched:
        interfaces[index].restore(model, done)
    bound = {id(module) for module in state.bound}
    for module in model.modules():
        again = source.own_forward(module) or (id(module) in bound and "forward" not in module.__dict__)
        if is_ported(module):
            module.__class__ = original_of(module)
        if again:
            module.__dict__["forward"] = types.MethodType(type(module).forward, module)


# Survey -----------------------------------------------------------------------------------------------------


def _survey(model: nn.Module) -> tuple[dict[str, Recipe], list[Left]]:
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
            gate = recognise.gate_of(module)
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
        if recipe.cuts
        for name in _served(model.get_submodule(path), recipe).cut
    }
    return recipes, [item for item in left if item.path not in cut]  # the parent's code serves it


def _takes_addition(module: nn.Module) -> bool:
    if "forward" in module.__dict__ or _plain(module) is not None or _hooked(module) or _bare(module):
        return False
    role = recognise.role_of(module)
    return isinstance(role, Role) and bool(role.added)


def _bare(module: nn.Module) -> bool:
    """A container, or code that is no Python."""
    return type(module).forward is nn.Module.forward or isinstance(module, torch.jit.ScriptModule)


def _recipe(module: nn.Module, known: dict[int, Gate], added: set[int]) -> tuple[Recipe | None, str | None]:
    """(how a module is ported or None, why it, or a part of it, stays or None)."""
    if "forward" in module.__dict__:
        return None, "its forward was replaced on the instance (accelerate's hooks and the kernels hub do so)"
    odd = _plain(module)
    if odd is not None:
        return None, odd
    if _bare(module):
        return None, None
    gates, norms, reason = _named(module, known), _named(module, added), None
    if id(module) in known:
        return Recipe(gate=known[id(module)]), None
    role = recognise.role_of(module)
    if not isinstance(role, Role):
        role = blocks.role_of(module) or role
    if isinstance(role, Role):
        if role.gradient:
            return Recipe(role), None
        return Recipe(role, gates, cuts=_cuts(module), norms=norms, callables=_callables(module)), None
    if isinstance(role, Refusal) and _holds(module):
        reason = role.reason
    cut, held = _cuts(module), _callables(module)
    made = rewrite.rewritten(type(module), gates, cut, norms, held)
    if isinstance(role, Refusal) and trusted(type(module)) and {use.op for use in made.uses} <= role.proposed:
        return None, reason  # PyTorch's own module around a functional whose op it was shown not to be
    ungated = _ungated(module, made.products) or _replaced(made)
    if made.functions or made.interfaces:
        return Recipe(gates=gates, interface=bool(made.interfaces), cuts=cut, norms=norms, callables=held), ungated
    if made.opaque:
        reason = f"the source of its {', '.join(made.opaque)} is not available, or is not what runs"
    if reason is None and ungated is None and _holds(module):
        reason = "no op of the day computes it"
    return None, reason or ungated


def _holds(module: nn.Module) -> bool:
    """Whether a checkpoint has tensors of the module's own: parameters, or buffers such as quantised weights."""
    kept = (b for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
    return any(t is not None for t in (*module._parameters.values(), *kept))


def _multiplied(module: nn.Module, known: dict[int, Gate]) -> Iterator[int]:
    """The ids of known activations whose result a module's forward multiplies."""
    if "forward" in module.__dict__ or _plain(module) is not None or type(module).forward is nn.Module.forward:
        return
    for use in rewrite.rewritten(type(module), _named(module, known)).uses:
        if use.gate:
            yield id(module.get_submodule(use.gate))


def _hooked(module: nn.Module) -> bool:
    return bool(
        module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    )


def _ungated(module: nn.Module, products: frozenset[str]) -> str | None:
    """Why a product with an activation of no tensors stays two ops."""
    for path in sorted(products):
        held: Any = module
        for name in path.split("."):
            held = getattr(held, name, None)
        if isinstance(held, nn.Module) and not any(True for _ in held.parameters()) and not list(held.buffers()):
            if _hooked(held):
                return f"{path} has a hook, which a gated activation would not run"
            return f"its activation {path} is {type(held).__name__}, and no gated op has it"
    return None


def _replaced(made: rewrite.Rewritten) -> str | None:
    """Why a function that a module's code calls is not served."""
    for use in made.uses:
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
    found = set()
    for name, child in module.named_modules():
        if name.count(".") < 2 and id(child) in known and re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)?", name):
            found.add(name)
    return frozenset(found)


def _cuts(module: nn.Module) -> rewrite.Cuts:
    """Children whose result, cut to the length of what they are given, is known."""
    found = set()
    for name, child in module.named_children():
        if name.isidentifier() and _plain(child) is None:
            shown = cuts.shown_of(child)
            if shown is not None:
                found.add((name, shown))
    return frozenset(found)


def _callables(module: nn.Module) -> rewrite.Callables:
    """Attributes that are objects of a class with a __call__ of its own, and no modules, tensors or functions."""
    return frozenset(
        (name, type(held))
        for name, held in vars(module).items()
        if name.isidentifier() and isinstance(getattr(type(held), "__call__", None), types.FunctionType)  # noqa: B004
    )


def _interfaces_of(module: nn.Module, recipe: Recipe) -> frozenset[int]:
    return _served(module, recipe).interfaces if recipe.interface else frozenset()


def _served(module: nn.Module, recipe: Recipe) -> rewrite.Rewritten:
    return rewrite.rewritten(type(module), recipe.gates, recipe.cuts, recipe.norms, recipe.callables)


def _fused(module: nn.Module, recipe: Recipe) -> Iterator[tuple[int, bool]]:
    """The ids of norms that the served copy of a module's methods calls with an addition, and whether also without."""
    if recipe.gate is None and (recipe.role is None or not recipe.role.gradient):
        found = _served(module, recipe)
        for use in found.uses:
            if use.norm:
                yield id(module.get_submodule(use.norm)), use.norm in found.alone


def _site(path: str, module: nn.Module, recipe: Recipe, attending: bool, fused: Mapping[int, bool]) -> Site:
    """Which ops one forward of a module that is still unported will call; ``fused``: what `_fused` found."""
    kind = type(module).__name__
    if recipe.gate is not None or fused.get(id(module)) is False:  # counted where it is multiplied, or added before
        return Site(path, kind, ())
    if recipe.role is not None:
        op, proof = recipe.role.op, recipe.role.proof
        shown = f"float64 error {proof.worst:.1g}, {proof.rounding} rounding points, code {recipe.role.digest}"
        if not recipe.role.gradient:
            inner = {o for found in _uses(module, recipe)[:2] for o in found}
            shown = f"where no gradient is needed: {shown}"
            return Site(path, kind, (), tuple(sorted({op, *inner})), shown, op, gradient=False)
        taken = min(len(recipe.role.inputs), recipe.role.required or len(recognise.inputs_of(type(module))))
        if id(module) in fused or len(inspect.signature(type(module).forward).parameters) > 1 + taken:
            # the role holds while the others are left out, or given
            return Site(path, kind, (), (op, *recipe.role.beside), shown, op)
        return Site(path, kind, (op, *recipe.role.beside), (), shown, op)
    surely, maybe, quiet = _uses(module, recipe)
    shown = f"{', '.join(sorted(quiet))} where no gradient is needed" if quiet else ""
    if attending:
        maybe -= {"attention", "softmax"}
        found = _served(module, recipe)
        read = [i for i in interfaces if id(i.registry) in found.interfaces]
        doubtful, fixed = {k for i in read for k in i.doubtful}, {k for i in read for k in i.fixed}
        if found.passed & doubtful or found.learnt & fixed or found.repeats:
            maybe.add("attention")
        else:
            surely.append("attention")
    return Site(path, kind, tuple(surely), tuple(sorted(maybe)), shown, gradient=not quiet)


def _uses(module: nn.Module, recipe: Recipe) -> tuple[list[str], set[str], set[str]]:
    """(ops that the served copy of a module's methods calls once, those that it may call, those that it only calls
    where no gradient is needed)."""
    surely: list[str] = []
    maybe: set[str] = set()
    quiet: dict[str, bool] = {}
    for use in _served(module, recipe).uses:
        op = use.op
        if use.norm:
            norm = recognise.role_of(module.get_submodule(use.norm))
            op = norm.added_op if isinstance(norm, Role) else ""
        if use.gate:
            gate = recognise.gate_of(module.get_submodule(use.gate))
            op = gate.op if gate is not None else ""
        certain = use.certain(module)
        if op:
            quiet[op] = quiet.get(op, True) and not use.gradient
        if op and certain:
            surely.append(op)
        elif op and certain is None:
            maybe.add(op)
    return surely, maybe, {op for op, only in quiet.items() if only}
