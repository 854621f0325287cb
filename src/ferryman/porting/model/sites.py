"""What `port` did: each ported module with the ops that a pass of it calls, and what stays, with the reason."""

from __future__ import annotations

import contextlib
import inspect
import operator
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ferryman.porting.model import activations, recognise, source
from ferryman.porting.model.classes import Recipe
from ferryman.porting.model.leaf import inputs_of
from ferryman.porting.model.recognise import Role


@dataclass(frozen=True)
class Site:
    """A ported module: where it is, what it was, and the ops that one forward of it calls, once each.

    ``maybe``: ops that a pass may call as well, by its input. ``shown``: the proof in words. ``role``: the op that
    stands for the whole module, if one does; ``gradient``: False where it, or one of ``maybe``, serves only what needs
    no gradient. ``remark``: what a user should know of it, such as that it chooses another one of equal experts.
    """

    path: str
    module: str
    ops: tuple[str, ...]
    maybe: tuple[str, ...] = ()
    shown: str = ""
    role: str = ""
    gradient: bool = True
    remark: str = ""


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
            stack.callback(register_module_forward_pre_hook(source.watching(entered)).remove)
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
            shown = "; ".join(filter(None, (site.shown, site.remark)))
            kinds[site.module, f"{served}{f' ({shown})' if shown else ''}"] += 1
        for left in self.unsupported:
            kinds[left.module, f"stays: {left.reason}"] += 1
        return "\n".join(f"{n:5} {module}: {what}" for (module, what), n in sorted(kinds.items()))


class Interface(Protocol):
    """A registry of functions that another library's forwards read, and that we are registered with. What is registered
    calls ``op`` in the place of ``composed``, which the library's own functions may come to."""

    registry: Any
    op: str
    composed: frozenset[str]
    doubtful: frozenset[str]  # keywords of a call with which it may be another's
    fixed: frozenset[str | int]  # keywords and places of a call which, if they learn, make it another's

    def switch(self, model: nn.Module, readers: Sequence[tuple[str, nn.Module]]) -> tuple[list[Any], list[Left]]:
        """Make the readers take our function: (what `restore` takes back, readers that keep theirs)."""

    def restore(self, model: nn.Module, switched: list[Any]) -> None: ...


class Attribute(Protocol):
    """A function that modules of another library hold as an attribute, and their forwards call: ours calls ``op``."""

    op: str

    def switch(self, model: nn.Module) -> list[tuple[str, Any]]:
        """Set ours where it is proven: [(path of the module, what `restore` takes back)]."""

    def restore(self, model: nn.Module, done: list[tuple[str, Any]]) -> None: ...


def interfaces_of(module: nn.Module, recipe: Recipe) -> frozenset[int]:
    return recipe.served(type(module)).interfaces if recipe.interface else frozenset()


def fused_norms(module: nn.Module, recipe: Recipe) -> Iterator[tuple[int, bool]]:
    """The ids of norms that the served copy of a module's methods calls with an addition, and whether also without."""
    if recipe.gate is None and (recipe.role is None or not recipe.role.gradient):
        served = recipe.served(type(module))
        for use in served.uses:
            if use.added:
                yield id(module.get_submodule(use.added)), use.added in served.alone


def site_of(
    path: str,
    module: nn.Module,
    recipe: Recipe,
    attending: bool,
    fused: Mapping[int, bool],
    interfaces: Sequence[Interface],
) -> Site:
    """Which ops one forward of a module that is still unported will call; ``fused``: what `fused_norms` found."""
    kind = type(module).__name__
    if recipe.gate is not None or fused.get(id(module)) is False:  # counted where it is multiplied, or added before
        return Site(path, kind, ())
    if recipe.role is not None:
        op, proof = recipe.role.op, recipe.role.proof
        shown = f"float64 error {proof.worst:.1g}, {proof.rounding} rounding points, code {recipe.role.digest}"
        if not recipe.role.gradient:
            inner = {o for ops in _uses(module, recipe)[:2] for o in ops}
            shown = f"where no gradient is needed: {shown}"
            return Site(path, kind, (), tuple(sorted({op, *inner})), shown, op, gradient=False)
        taken = min(len(recipe.role.inputs), recipe.role.required or len(inputs_of(type(module))))
        if id(module) in fused or len(inspect.signature(type(module).forward).parameters) > 1 + taken:
            # the role holds while the others are left out, or given
            return Site(path, kind, (), (op, *recipe.role.beside), shown, op, remark=recipe.role.remark)
        return Site(path, kind, (op, *recipe.role.beside), (), shown, op, remark=recipe.role.remark)
    surely, maybe, quiet = _uses(module, recipe)
    shown = f"{', '.join(sorted(quiet))} where no gradient is needed" if quiet else ""
    served = recipe.served(type(module))
    for interface in (i for i in interfaces if attending and id(i.registry) in served.interfaces):
        maybe -= {interface.op, *interface.composed}
        if served.passed & interface.doubtful or served.learnt & interface.fixed or served.repeats:
            maybe.add(interface.op)
        else:
            surely.append(interface.op)
    remarks = {part.remark for _, _, parts, _ in recipe.parted.functions for part in parts if part.remark}
    remark = "; ".join(sorted(remarks))
    return Site(path, kind, tuple(surely), tuple(sorted(maybe)), shown, gradient=not quiet, remark=remark)


def _uses(module: nn.Module, recipe: Recipe) -> tuple[list[str], set[str], set[str]]:
    """(ops that the served copy of a module's methods calls once, those that it may call, those that it only calls
    where no gradient is needed)."""
    surely: list[str] = []
    maybe: set[str] = set()
    quiet: dict[str, bool] = {}
    for use in recipe.served(type(module)).uses:
        op = use.op
        if use.added:
            norm = recognise.role_of(module.get_submodule(use.added))
            op = norm.added_op if isinstance(norm, Role) else ""
        if use.gate:
            gate = activations.gate_of(operator.attrgetter(use.gate)(module))
            op = gate.op if gate is not None else ""
        certain = use.certain(module)
        if op:
            quiet[op] = quiet.get(op, True) and not use.gradient
        if op and certain:
            surely.append(op)
        elif op and certain is None:
            maybe.add(op)
    return surely, maybe, {op for op, only in quiet.items() if only}
