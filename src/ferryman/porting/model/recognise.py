"""What a leaf module or an activation computes, shown by proof.

Proposals come from the ops' own folders (``ops/<family>/recognise.py``). What was shown is kept by the code and the
state that it depends on, so that a model of a hundred equal layers is proven once.
"""

from __future__ import annotations

import functools
import re
import types
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.ops.recognition import Candidate, Definitions, Gate, Leaf, compiled, families
from ferryman.porting.model import adding, serving, source
from ferryman.porting.model.branches import follow_function, follow_module
from ferryman.porting.model.leaf import (
    NARROW,
    class_code,
    class_settings,
    contents_tests,
    digest_of,
    input_of,
    is_setting,
    keep_state,
    leaf_of,
    pair_of,
    state_of,
)
from ferryman.porting.model.proof import Proof, drawn, prove
from ferryman.porting.model.trace import Trace, Unproven

_WIDE = 3  # inputs that a proven candidate is rounded on once more
_LARGEST = 1 << 22  # elements of a twin's matrix that keeps rows which its module names
_DEFINITIONS = Definitions()


@dataclass(frozen=True)
class Role:
    """A proven role of a module: ``expression`` over ``self``, ``inputs``, ``ops``.

    It holds while every test is true and every guard has its outcome. parameters: what the forward calls its inputs.
    gradient: False where it serves only what needs no gradient. added, added_op: of a norm, the expression over
    ``residual`` too that takes an addition before it, proven as well, and its op. beside: ops that
    the expression calls beside ``op``, once each. required: how many inputs a call must give, whatever the forward's
    signature says. tensors: of the module, that the proof drew; absent: its parameters and buffers that were None;
    state: its attributes whose values the proof had; read: those that ``expression`` reads, of which it had the type;
    code: attributes of its class that the forward comes to.
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

    def on(self, module: nn.Module) -> Role:
        """The role with what it needs of a module that it was proven for. Raises Unproven as `contents_tests` does."""
        weights = [*module._parameters.items(), *module._buffers.items()]
        kind, read = type(module), set(re.findall(r"\bself\.(\w+)", f"{self.expression} {self.added}"))
        own = {n for n in (*vars(module), *module._modules) if is_setting(kind, n)} | class_settings(kind)
        return replace(
            self,
            tests=(*self.tests, *contents_tests(module)),
            code=class_code(kind),
            tensors=tuple(n for n, p in weights if p is not None),
            absent=tuple(n for n, p in weights if p is None),
            state=frozenset(own - read),
            read=frozenset(own & read),
        )

    def serving(self, kind: Any, expression: str, inputs: tuple[str, ...]) -> tuple[list[str], str, str]:
        """`serving.condition` of one of its expressions, for modules of a class."""
        current, _ = source.still(kind, self.code)
        return serving.condition(current, self.tests, self.guards, self.tensors, self.absent, inputs, expression)


@dataclass(frozen=True)
class Refusal:
    """Nothing was proven; ``reason`` says what came nearest, ``proposed`` which ops were tried."""

    reason: str
    proposed: frozenset[str] = frozenset()


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
    return _roles[key]


def _role_of(module: nn.Module) -> Role | Refusal | None:
    leaf = leaf_of(module)
    if leaf is None:
        return None
    candidates = [c for family in families() if hasattr(family, "modules") for c in family.modules(leaf)]
    if not candidates:
        return None
    if leaf.inputs == 2 and any(c.gate for c in candidates):
        gated = _shown(module, leaf, [c for c in candidates if c.gate], pair_of(type(module)))
        if isinstance(gated, Role) or input_of(type(module)) is None:
            return gated
    parameter = input_of(type(module))
    candidates = [c for c in candidates if not c.gate]
    if parameter is None or not candidates:
        return None if not (leaf.vectors or leaf.matrices) else Refusal("its forward does not take one tensor")
    return _shown(module, leaf, candidates, (parameter,))


def _shown(
    module: nn.Module, leaf: Leaf, candidates: Sequence[Candidate], parameters: tuple[str, ...]
) -> Role | Refusal:
    """The first candidate that is proven, best one that rounds as the module does."""
    if len(parameters) == 2 and (parameters[1] == "x" or parameters[0] == "gate"):
        return Refusal(f"its forward calls its inputs {' and '.join(parameters)}")
    trace = Trace()
    try:
        followed = follow_module(module, trace)
    except Unproven as error:
        return Refusal(str(error))
    twin = _narrowed(module, leaf)
    names = (*leaf.vectors, *leaf.matrices, *leaf.scalars)
    nearest: tuple[float, str] | None = None
    shown: list[tuple[Candidate, Proof]] = []
    for candidate in candidates:
        proof = _prove(followed, twin, names, candidate)
        if proof.ok:
            shown.append((candidate, proof))
            if proof.rounding == "same":
                break
        elif proof.distance is not None and (nearest is None or proof.distance < nearest[0]):
            nearest = (proof.distance, f"not {candidate.op}, which is nearest: {proof.reason}")
    if not shown:
        tried = frozenset(c.op for c in candidates)
        return Refusal(nearest[1] if nearest else "no op of the day computes it", tried)
    candidate, proof = next((s for s in shown if s[1].rounding == "same"), shown[0])
    added = bool(candidate.added) and _takes_addition(followed, twin, names, candidate)
    try:
        guards = tuple(trace.guards())
    except Unproven as error:
        return Refusal(str(error))
    role = Role(
        candidate.op,
        candidate.expression,
        ("x", "gate") if candidate.gate else ("x",),
        parameters,
        (_gated_tests if candidate.gate else _tests)(followed, twin, names, candidate, added),
        guards,
        proof,
        digest_of(type(module)),
        candidate.gradient,
        candidate.added if added else "",
        candidate.added_op if added else "",
    )
    try:
        return role.on(module)
    except Unproven as error:
        return Refusal(str(error))


def _tests(
    kind: type[nn.Module], state: dict[str, Any], names: Sequence[str], candidate: Candidate, added: bool
) -> tuple[str, ...]:
    """What a call must be for the candidate's expression to hold: x of the tensors' dtype; or in float32 and these
    narrower, where that is shown as well, with an addition before it, too, if it takes one."""
    tests: list[str] = []
    if not candidate.gradient:
        tests.append(no_gradient([*(() if candidate.rows else ("x",)), *(f"self.{n}" for n in names)]))
    if candidate.rows:
        table = f"self.{candidate.rows}"
        tests += ["(x.dtype is torch.int64 or x.dtype is torch.int32)", f"{table}.dtype.itemsize < 8"]
        tests += [f"{table}.dtype is self.{n}.dtype" for n in candidate.uses if n != candidate.rows]
    else:
        ours = [f"self.{n}.dtype" for n in candidate.uses]
        wide = bool(ours) and _prove(kind, state, names, candidate, frozenset({0})).ok
        if wide and (not added or _takes_addition(kind, state, names, candidate, frozenset({0, 1}))):
            tests += [f"{ours[0]} is {dtype}" for dtype in ours[1:]]
            tests.append(f"(x.dtype is {ours[0]} or x.dtype is torch.float32 and {ours[0]}.itemsize < 4)")
        else:
            tests += [f"x.dtype is {dtype}" for dtype in ours]
        tests.append("x.dtype.itemsize < 8 and x.dtype.is_floating_point")
    return tuple(tests)


def _gated_tests(
    kind: type[nn.Module], state: dict[str, Any], names: Sequence[str], candidate: Candidate, added: bool
) -> tuple[str, ...]:
    """A gate of x's shape, all of one dtype; or x in float32 and the others narrower, where that is shown as well."""
    ours = [f"self.{n}.dtype" for n in candidate.uses]
    same = " and ".join(f"gate.dtype is {dtype}" for dtype in ours) or "gate.dtype is x.dtype"
    mixed = _prove(kind, state, names, candidate, frozenset({0})).ok
    wide = "(x.dtype is gate.dtype or x.dtype is torch.float32)" if mixed else "x.dtype is gate.dtype"
    narrow = "gate.dtype.itemsize < 8 and gate.dtype.is_floating_point"
    return "gate is not None", "gate.shape == x.shape", same, wide, narrow


def no_gradient(tensors: Sequence[str]) -> str:
    """A test that no gradient of these is needed."""
    return f"not (torch.is_grad_enabled() and ({' or '.join(f'{t}.requires_grad' for t in tensors)}))"


def _narrowed(module: nn.Module, leaf: Leaf) -> dict[str, Any]:
    """A module's state with sides of matrices cut to a few tens, and the numbers that name them too."""
    sides = {s for shape in leaf.matrices.values() for s in shape}
    state = dict(module.__dict__)
    cut = {size: 24 + 8 * i for i, size in enumerate(sorted(s for s in sides if s > NARROW))}
    # a number that is no side may be that of a row: the row stays, unless the twin gets large
    rows = [v for v in state.values() if isinstance(v, int) and not isinstance(v, bool) and v not in sides]
    kept = {size: max(short, 2 + max((v for v in rows if v < size), default=0)) for size, short in cut.items()}
    if all(kept.get(a, a) * kept.get(b, b) <= _LARGEST for a, b in leaf.matrices.values()):
        cut = kept
    for name, value in state.items():
        if isinstance(value, int) and not isinstance(value, bool) and value in cut:
            state[name] = cut[value]
    state["ferryman_cut"] = cut
    return state


def _prove(
    kind: type[nn.Module],
    state: dict[str, Any],
    names: Sequence[str],
    candidate: Candidate,
    wide: frozenset[int] = frozenset(),
) -> Proof:
    """The instrumented module against the candidate's expression, in both modes. wide: tensors that are float32 where
    the others are narrower, of a candidate that is proven with all of one dtype."""
    cut: dict[int, int] = state["ferryman_cut"]
    weights = {**state["_parameters"], **state["_buffers"]}
    generator = torch.Generator().manual_seed(7)
    tensors = [
        torch.randn([cut.get(s, s) for s in weights[n].shape], generator=generator, dtype=torch.float64) for n in names
    ]
    inputs: list[tuple[Any, ...]]
    if candidate.rows:
        # rows of any length: what bounds a row's norm shows, whatever the bound
        known = [v for v in state.values() if isinstance(v, int) and not isinstance(v, bool)]
        drawn_ids = list(_ids(tensors[names.index(candidate.rows)].shape[0], known))
        inputs = [(ids, *tensors) for ids in drawn_ids]
        inputs += [(drawn_ids[0], *(t * 2.0**power for t in tensors)) for power in (-200, 200)]
    else:
        width = cut.get(candidate.width, candidate.width)
        inputs = [(x, *(_gating(x, i) if candidate.gate else ()), *tensors) for i, x in enumerate(_inputs(width))]
    count = 2 if candidate.gate else 1
    expression = compiled(candidate.expression, ("self", "x", "gate")[: 1 + count], ops=_DEFINITIONS)
    proof = Proof(False)
    for training in (False, True):
        proof = prove(
            functools.partial(original, kind, state, names, training),
            lambda *given: expression(
                types.SimpleNamespace(**(state | dict(zip(names, given[count:], strict=True)))), *given[:count]
            ),
            inputs[: _WIDE if wide else None],
            gradients=candidate.gradient,
            wide=wide,
        )
        if not proof.ok:
            break
    return proof


def _takes_addition(
    kind: type[nn.Module],
    state: dict[str, Any],
    names: Sequence[str],
    candidate: Candidate,
    wide: frozenset[int] = frozenset(),
) -> bool:
    weights = {**state["_parameters"], **state["_buffers"]}
    generator = torch.Generator().manual_seed(9)
    tensors = [torch.randn(weights[n].shape, generator=generator, dtype=torch.float64) for n in names]
    expression = compiled(candidate.added, ("self", "x", "residual"), ops=_DEFINITIONS)
    return adding.proven(
        functools.partial(original, kind, state, names, False),
        lambda x, r, *given: expression(types.SimpleNamespace(**(state | dict(zip(names, given, strict=True)))), x, r),
        [(x, *tensors) for x in _inputs(candidate.width)][: _WIDE if wide else None],
        wide,
    )


def _ids(rows: int, known: Sequence[int]) -> Iterator[Tensor]:
    """Numbers of rows: every one of a short table, those that a module's state names, repeated ones, none."""
    generator = torch.Generator().manual_seed(5)
    edges = [0, rows - 1, *(v for v in known if 0 <= v < rows)]
    every = torch.cat([torch.tensor(edges * 2), torch.randperm(rows, generator=generator)[:64]])
    yield every.unsqueeze(0)
    yield torch.randint(rows, (2, 7), generator=generator, dtype=torch.int32)
    yield torch.randint(rows, (2, 3, 2), generator=generator)
    yield every[:1]
    yield torch.tensor(rows - 1)
    yield torch.empty(2, 0, dtype=torch.int64)


def _inputs(width: int) -> Iterator[Tensor]:
    for shape, seed in (((4, width), 0), ((2, 3, width), 1)):
        for name, x in drawn(*shape, seed=seed):
            if seed == 0 or name == "normal":
                yield x
    generator = torch.Generator().manual_seed(3)
    yield torch.randn(1, width, generator=generator, dtype=torch.float64)
    # one magnitude a row, from 2^-30 to 2^30: a clamp, or an eps in another place, shows somewhere
    sweep = torch.exp2(torch.arange(-30.0, 31.0, 4.0, dtype=torch.float64)).unsqueeze(-1)
    yield torch.randn(len(sweep), width, generator=generator, dtype=torch.float64) * sweep
    # where activations bend; each row has all of the range
    yield torch.linspace(-30, 30, 6 * width, dtype=torch.float64).reshape(width, 6).t().contiguous()
    yield torch.linspace(-4, 4, 2 * width, dtype=torch.float64).reshape(width, 2, 1).permute(2, 1, 0).contiguous()


def _gating(x: Tensor, index: int) -> tuple[Tensor]:
    """What may gate x: plain, all of an activation's range, or small."""
    generator = torch.Generator().manual_seed(11 + index)
    gate = torch.randn(x.shape, generator=generator, dtype=torch.float64)
    return (gate * (2.0, 12.0, 0.1)[index % 3],)


def original(kind: Any, state: dict[str, Any], names: Sequence[str], training: bool, *given: Tensor) -> Any:
    twin = kind.__new__(kind)
    twin.__dict__.update(state)
    count = len(given) - len(names)
    tensors = dict(zip(names, given[count:], strict=True))
    twin.__dict__["_parameters"] = {n: tensors.get(n) for n in state["_parameters"]}
    twin.__dict__["_buffers"] = {n: tensors.get(n) for n in state["_buffers"]}
    twin.__dict__["training"] = training
    return twin.forward(*given[:count])


# Activations ----------------------------------------------------------------------------------------------


_gates: dict[Any, Gate | None] = {}


def gate_of(activation: Any) -> Gate | None:
    """The gated op whose activation a module without tensors, or a function, is proven to compute."""
    module = isinstance(activation, nn.Module)
    if module and (
        next(activation.children(), None)
        or any(True for _ in activation.parameters())
        or any(True for _ in activation.buffers())
    ):
        return None
    key = state_of(activation) if module else activation
    if key not in _gates:
        _gates[key] = _gate_of(activation, module)
        if module:
            keep_state(activation)
    return _gates[key]


def _gate_of(activation: Any, module: bool) -> Gate | None:
    trace = Trace()
    try:
        if module:
            if input_of(type(activation)) is None or contents_tests(activation):
                return None
            call: Any = functools.partial(
                original, follow_module(activation, trace), dict(activation.__dict__), (), False
            )
        else:
            call = activation if _is_torch(activation) else follow_function(activation, trace)
    except Unproven:
        return None
    inputs: list[tuple[Tensor, ...]] = [(x,) for _, x in drawn(4, 96)]
    inputs.append((torch.linspace(-30, 30, 601, dtype=torch.float64).reshape(1, -1),))
    inputs.append((torch.linspace(-2, 2, 96, dtype=torch.float64).reshape(2, 3, 16),))
    for family in families():
        for gate in family.gates() if hasattr(family, "gates") else ():
            if prove(call, gate.activation, inputs).ok:
                try:
                    return gate if not trace.guards() else None
                except Unproven:
                    return None
    return None


def _is_torch(function: Any) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return (getattr(inner, "__module__", None) or "").split(".")[0] in ("torch", "_C") or isinstance(
        inner, types.BuiltinFunctionType
    )


def role_forward(role: Role, kind: Any, served: Any = None) -> types.FunctionType:
    """The forward of a module with a proven role; ``served``, or what its class has then, serves the other calls."""
    before, asked, expression = role.serving(kind, role.expression, role.inputs)
    meaning = serving.known(kind, role.guards, role.code)
    return serving.forward(before, asked, expression, role.parameters, role.inputs, meaning, kind, served)


__all__ = ["Refusal", "Role", "gate_of", "leaf_of", "replace", "role_forward", "role_of"]
