"""What a leaf module or an activation computes, shown by proof.

Proposals come from the ops' own folders (``ops/<family>/recognise.py``). What was shown is kept by the code and the
state that it depends on, so that a model of a hundred equal layers is proven once.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Candidate, Leaf
from ferryman.porting.model import beyond, laid, scalars, serving, source, turned
from ferryman.porting.model.branches import follow_module
from ferryman.porting.model.distance import Disagreement
from ferryman.porting.model.leaf import (
    class_code,
    class_settings,
    contents_tests,
    digest_of,
    input_of,
    is_setting,
    keep_state,
    leaf_of,
    names_reached,
    pair_of,
    state_of,
)
from ferryman.porting.model.module_proof import Runs, prove, refuted, takes_addition
from ferryman.porting.model.proof import First, Proof
from ferryman.porting.model.repeated import Served
from ferryman.porting.model.trace import Read, Trace, Unproven
from ferryman.porting.model.twin import dimensions, left_out, narrowed, original, own_numbers, shaped, tensors_of


@dataclass(frozen=True)
class Role:
    """A proven role of a module: ``expression`` over ``self``, ``inputs``, ``ops``.

    It holds while every test is true and every guard has its outcome. parameters: what the forward calls its inputs.
    gradient: False where it serves only what needs no gradient. added, added_op: of a norm, the expression over
    ``addend`` too that takes an addition before it, proven as well, and its op. beside: ops that
    the expression calls beside ``op``, once each. required: how many inputs a call must give, whatever the forward's
    signature says. tensors: of the module, that the proof drew; absent: its parameters and buffers that were None;
    state: its attributes whose values the proof had; read: those that ``expression`` reads, of which it had the type;
    code: attributes of its class that the forward comes to; reads: names of files that it reads. alone: a test of
    calls that go to the module's own code, where that is one call (`serving.little`). remark: what a user should know
    of it. kept: settings that ``expression`` reads and that must have the values that the proof had, too.
    """

    op: str
    expression: str
    inputs: tuple[str, ...]
    parameters: tuple[str, ...]
    tests: tuple[str, ...]
    guards: tuple[tuple[str, bool], ...]
    proof: Proof
    digest: str = ""
    gradient: bool = True
    added: str = ""
    added_op: str = ""
    beside: tuple[str, ...] = ()
    required: int = 0
    tensors: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()
    state: frozenset[str] = frozenset()
    read: frozenset[str] = frozenset()
    code: tuple[str, ...] = ()
    reads: tuple[Read, ...] = ()
    alone: str = ""
    remark: str = ""
    kept: frozenset[str] = frozenset()

    def on(self, module: nn.Module) -> Role:
        """The role with what it needs of a module that it was proven for. Raises Unproven as `contents_tests` does."""
        weights = [*module._parameters.items(), *module._buffers.items()]
        kind, read = type(module), read_in(self.expression, self.added) - self.kept
        own = {n for n in (*vars(module), *module._modules) if is_setting(kind, n)} | class_settings(kind)
        # a name that its code reads may become an attribute of the instance
        own |= {n for n in names_reached(kind) if is_setting(kind, n)} - {"forward", *(n for n, _ in weights)}
        return replace(
            self,
            tests=(*self.tests, *contents_tests(module)),
            code=class_code(kind),
            tensors=tuple(n for n, p in weights if p is not None),
            absent=tuple(n for n, p in weights if p is None),
            state=frozenset(own - read),
            read=frozenset(own & read),
        )

    def serving(self, kind: Any, expression: str, inputs: tuple[str, ...]) -> Served:
        """`serving.served` of one of its expressions, for modules of a class."""
        current, _ = source.still(kind, self.code)
        current += [read.test(i) for i, read in enumerate(self.reads)]
        return serving.served(current, self.tests, self.guards, self.tensors, self.absent, inputs, expression)


@dataclass(frozen=True)
class Refusal:
    """Nothing was proven; ``reason`` says what came nearest, ``proposed`` which ops were tried."""

    reason: str
    proposed: frozenset[str] = frozenset()


def read_in(*expressions: str) -> set[str]:
    """Attributes of the module that expressions read."""
    return set(re.findall(r"\bself\.(\w+)", " ".join(expressions)))


def _tied(
    module: nn.Module, kind: type[nn.Module], twin: dict[str, Any], names: Sequence[str], candidate: Candidate
) -> frozenset[str]:
    """Numbers of a module that a candidate reads and of which another value shows that the module reads it elsewhere,
    too, or not there: two settings may have one value today."""
    tied = set()
    for name in read_in(candidate.expression):
        value = getattr(module, name, None)
        if type(value) is not float:
            continue
        other = twin | {name: value * 1.25 or 0.01}
        if candidate.rows:
            agrees = prove(kind, other, names, candidate).ok
        else:
            first = First(functools.partial(original, kind, other, names, False))
            agrees = refuted(first, other, names, candidate) is None
        tied |= set() if agrees else {name}
    return frozenset(tied)


NARROW = "x.dtype.itemsize < 8 and x.dtype.is_floating_point"
_roles: dict[tuple[Any, ...], Role | Refusal] = {}


def role_of(module: nn.Module) -> Role | Refusal | None:
    """The proven role of a leaf module; a Refusal if a role was proposed and not shown; None if none was proposed."""
    key = state_of(module)
    if key not in _roles:
        role = _role_of(module)
        if role is None:
            return None
        _roles[key] = role
        keep_state(module)
    role = _roles[key]
    fixed = {} if isinstance(role, Role) else scalars.fixed_of(module)
    if fixed:
        numbers = (*key, tuple(fixed.items()))
        if numbers not in _roles:
            other = _role_of(module, fixed)
            _roles[numbers] = other if isinstance(other, Role) else role
        role = _roles[numbers]
    return role


def _role_of(module: nn.Module, fixed: Mapping[str, float] | None = None) -> Role | Refusal | None:
    leaf = leaf_of(module, fixed)
    if fixed:
        leaf = None if leaf is None or leaf.wholes or leaf.scalars else leaf
    if leaf is None:
        return None
    candidates = proposals("modules", leaf)
    if not candidates:
        return None
    if leaf.inputs == 2 and any(c.gate for c in candidates):
        gated = _shown(module, leaf, [c for c in candidates if c.gate], pair_of(type(module)), fixed)
        if isinstance(gated, Role) or input_of(type(module)) is None:
            return gated
    parameter = input_of(type(module))
    candidates = [c for c in candidates if not c.gate]
    if parameter is None or not candidates:
        return None if not (leaf.vectors or leaf.matrices) else Refusal("its forward does not take one tensor")
    role = _shown(module, leaf, candidates, (parameter,), fixed)
    if fixed or leaf.wholes or not leaf.lines or 3 in turned.dims_of(role):
        return role
    other = _shown(turned.module_of(module), leaf, candidates, ("x",))
    return turned.role_of(other, module, parameter) if isinstance(other, Role) else role


def _shown(
    module: nn.Module,
    leaf: Leaf,
    candidates: Sequence[Candidate],
    parameters: tuple[str, ...],
    fixed: Mapping[str, float] | None = None,
) -> Role | Refusal:
    """The first candidate that is proven, best one that rounds as the module does."""
    if len(parameters) == 2 and (parameters[1] == "x" or parameters[0] == "gate"):
        return Refusal(f"its forward calls its inputs {' and '.join(parameters)}")
    trace = Trace()
    try:
        contents_tests(module)  # before it runs: what an object of another's does when it is read may last
        followed = follow_module(module, trace)
    except Unproven as error:
        return Refusal(str(error))
    numbers = frozenset(trace.numbers | own_numbers(module))
    twin = narrowed(module, leaf, numbers)
    own = {n: getattr(module, n) for n in fixed or {}}
    twin["ferryman_fixed"] = {n: scalars.drawn(t, (fixed or {})[n]) for n, t in own.items()}
    shaped = (n for n in (*leaf.rows, *leaf.columns) if n not in leaf.matrices)
    names = (*leaf.vectors, *leaf.matrices, *leaf.scalars, *shaped)
    # of what takes numbers of rows, the rows themselves, and channels before their places
    kinds = {(c.kind, c.width): c for c in candidates}
    dims = {kind: dimensions(followed, twin, names, c) for kind, c in kinds.items()}
    # a row may be channels of one place: an op of rows would serve those calls alone
    candidates = sorted((c for c in candidates if dims[c.kind, c.width]), key=lambda c: c.axis == -1)
    for test in trace.tests:  # what was refused covers nothing
        test.seen.clear()
    nearest: tuple[float, str] | None = None
    shown: list[tuple[Candidate, Proof]] = []
    wide: list[Candidate] = []  # that float64 shows, and that storage dtypes do not take
    first = First(functools.partial(original, followed, twin, names, False))
    runs: Runs = {}
    agreed: dict[int, list[int]] = {}
    for i, candidate in enumerate(candidates):
        for counts in _counts(dims[candidate.kind, candidate.width], candidate):
            twin["ferryman_dims"] = agreed[i] = counts
            proof = refuted(first, twin, names, candidate) or prove(followed, twin, names, candidate, runs=runs)
            if proof.ok:
                break
        wide += [candidate] if not (proof.narrow or candidate.rows or candidate.gate) else []
        if proof.ok:
            shown.append((candidate, proof))
            if proof.rounding == "same":
                break
        elif proof.distance is not None and (nearest is None or proof.distance < nearest[0]):
            nearest = (proof.distance, f"not {candidate.op}, which is nearest: {proof.reason}")
    if not shown and wide:
        twin["ferryman_dims"], twin["ferryman_wide"] = dims[wide[0].kind, wide[0].width], True
        shown = [(c, proof) for c in wide[:1] if (proof := prove(followed, twin, names, c)).ok]
    if not shown:
        tried = frozenset(c.op for c in candidates)
        return Refusal(nearest[1] if nearest else "no op of the day computes it", tried)
    candidate, proof = next((s for s in shown if s[1].rounding == "same"), shown[0])
    dims[candidate.kind, candidate.width] = agreed[candidates.index(candidate)]
    if candidate.rows and trace.computed() - numbers:  # rows that code computes the numbers of
        twin = narrowed(module, leaf, numbers | trace.computed()) | {"ferryman_fixed": twin["ferryman_fixed"]}
        proof = prove(followed, twin, names, candidate)
        if not proof.ok:
            return Refusal(f"not {candidate.op}, which is nearest: {proof.reason}", frozenset({candidate.op}))
    twin["ferryman_dims"] = dims[candidate.kind, candidate.width]
    try:
        more = left_out(followed, twin, names, candidate, numbers, trace)
    except Disagreement as error:
        return Refusal(f"not {candidate.op}, which is nearest: {error}", frozenset({candidate.op}))
    except Exception as error:  # noqa: BLE001 - foreign code ran: what it raises is the reason
        return Refusal(f"not {candidate.op}, which is nearest: {type(error).__name__}: {error}".split("\n", 1)[0][:300])
    known = runs if "ferryman_wide" not in twin and not candidate.rows else {}
    again = [scalars.test_of(n, t, (fixed or {})[n]) for n, t in own.items()]
    sums: dict[int, Any] = {}
    added = bool(candidate.added) and takes_addition(followed, twin, names, candidate, sums)
    try:
        guards = tuple(trace.guards())
    except Unproven as error:
        return Refusal(str(error))
    run, inputs = functools.partial(original, followed, twin, names, False), ("x", "gate")[: 1 + candidate.gate]
    role = Role(
        candidate.op,
        _laid(run, twin, names, candidate, inputs),
        inputs,
        parameters,
        (
            *(_gated_tests if candidate.gate else _tests)(
                followed, twin, names, candidate, known, sums if added else None
            ),
            *more,
            *again,
        ),
        guards,
        proof,
        digest_of(type(module)),
        candidate.gradient,
        candidate.added if added else "",
        candidate.added_op if added else "",
        reads=tuple(trace.reads),
        alone=_alone(run, twin, names, candidate),
        kept=_tied(module, followed, twin, names, candidate),
    )
    try:
        return role.on(module)
    except Unproven as error:
        return Refusal(str(error))


def _counts(dims: list[int], candidate: Candidate) -> list[list[int]]:
    """The numbers of dimensions to prove a candidate in: all, or those with places beside channels, of which a group
    may be one that has no more than one value."""
    rest = [n for n in dims if n > candidate.axis + 1]
    return [dims, rest] if candidate.axis != -1 and rest and rest != dims else [dims]


def _laid(
    run: Callable[..., Any], twin: dict[str, Any], names: Sequence[str], candidate: Candidate, inputs: tuple[str, ...]
) -> str:
    """A candidate's expression, whose result lies as the module's own code's does, and may be written over where that
    may (`laid`)."""
    width = twin["ferryman_cut"].get(candidate.width, candidate.width)
    tensors = [t.float() if t.is_floating_point() else t for t in tensors_of(twin, names, 5)]
    own, expression = (lambda *given: run(*given, *tensors)), candidate.expression
    if not candidate.rows and candidate.axis == -1 and laid.keeps(own, width, len(inputs)):
        expression = laid.expression_of(candidate.op, expression, inputs)
    return laid.apart_of(candidate.op, expression, own, width, len(inputs))


def _alone(run: Callable[..., Any], twin: dict[str, Any], names: Sequence[str], candidate: Candidate) -> str:
    """`serving.little` of a call, where the module's own code is one call of PyTorch's; empty where it is more."""
    tensors = tensors_of(twin, names, 5)
    if candidate.rows:
        given = next(iter(beyond.ids(tensors[names.index(candidate.rows)].shape[0], ())))
    else:
        width = twin["ferryman_cut"].get(candidate.width, candidate.width)
        given = next(shaped(beyond.inputs_of(width, candidate.axis), twin, candidate))
    if candidate.gate or not serving.is_one_call(run, given, *tensors):
        return ""
    table = f"ferryman_own_{candidate.rows}" if candidate.rows else "None"
    return f"ferryman_little({', '.join(['x', table, *(f'ferryman_own_{n}' for n in names if n != candidate.rows)])})"


def _tests(
    kind: type[nn.Module],
    state: dict[str, Any],
    names: Sequence[str],
    candidate: Candidate,
    known: Runs,
    sums: dict[int, Any] | None,
) -> tuple[str, ...]:
    """What a call must be for the candidate's expression to hold: x of the tensors' dtype; or in float32 and these
    narrower, where that is shown as well, with an addition before it, too, if it takes one."""
    tests: list[str] = []
    if not candidate.gradient:
        tests.append(no_gradient([*(() if candidate.rows else ("x",)), *(f"self.{n}" for n in names)]))
    if candidate.rows:
        table = f"self.{candidate.rows}"
        run, tensors = functools.partial(original, kind, state, names, False), tensors_of(state, names, 7)
        tests += beyond.taken(beyond.ids(tensors[names.index(candidate.rows)].shape[0], ()), run, tensors)[1]
        tests += ["(x.dtype is torch.int64 or x.dtype is torch.int32)", f"{table}.dtype.itemsize < 8"]
        tests += [f"{table}.dtype is self.{n}.dtype" for n in candidate.uses if n != candidate.rows]
    else:
        ours = [f"self.{n}.dtype" for n in candidate.uses]
        only = "ferryman_wide" in state
        tests += ["x.dtype is torch.float32"] * only
        wide = not only and bool(ours) and prove(kind, state, names, candidate, frozenset({0}), known).ok
        if wide and (sums is None or takes_addition(kind, state, names, candidate, sums, frozenset({0, 1}))):
            tests += [f"{ours[0]} is {dtype}" for dtype in ours[1:]]
            tests.append(f"(x.dtype is {ours[0]} or x.dtype is torch.float32 and {ours[0]}.itemsize < 4)")
        else:
            tests += [f"x.dtype is {dtype}" for dtype in ours]
        tests.append(NARROW)
    return tuple(tests)


def _gated_tests(
    kind: type[nn.Module],
    state: dict[str, Any],
    names: Sequence[str],
    candidate: Candidate,
    known: Runs,
    sums: dict[int, Any] | None,
) -> tuple[str, ...]:
    """A gate of x's shape, all of one dtype; or x in float32 and the others narrower, where that is shown as well."""
    ours = [f"self.{n}.dtype" for n in candidate.uses]
    same = " and ".join(f"gate.dtype is {dtype}" for dtype in ours) or "gate.dtype is x.dtype"
    mixed = prove(kind, state, names, candidate, frozenset({0}), known).ok
    wide = "(x.dtype is gate.dtype or x.dtype is torch.float32)" if mixed else "x.dtype is gate.dtype"
    narrow = "gate.dtype.itemsize < 8 and gate.dtype.is_floating_point"
    return "gate is not None", "gate.shape == x.shape", same, wide, narrow


def no_gradient(tensors: Sequence[str]) -> str:
    """A test that no gradient of these is needed."""
    return f"not (torch.is_grad_enabled() and ({' or '.join(f'{t}.requires_grad' for t in tensors)}))"


def role_forward(role: Role, kind: Any, served: Any = None) -> types.FunctionType:
    """The forward of a module with a proven role; ``served``, or what its class has then, serves the other calls."""
    body = role.serving(kind, role.expression, role.inputs)
    meaning = serving.known(kind, role.guards, role.code, role.reads)
    few = ""
    if len(role.tensors) == 1:
        few = f"{role.parameters[0]}.numel() < {serving.FEW_IDS} * len(self.{role.tensors[0]})"
    left = serving.left([role.op], kind, role.code, few)
    if role.alone:
        body = replace(body, little=role.alone)
    return serving.forward(body, role.parameters, role.inputs, meaning, kind, served, left)


__all__ = ["Refusal", "Role", "leaf_of", "original", "own_numbers", "replace", "role_forward", "role_of"]
