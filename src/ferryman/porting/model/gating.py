"""``activation(gate) * up`` in a ported forward: the gated op, where the activation is one whose op is known."""

from __future__ import annotations

import ast
import functools
import itertools
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman import ops
from ferryman.dispatch import state
from ferryman.ops.recognition import Gate
from ferryman.porting.model import activations, source, spelling
from ferryman.porting.model.adding import unaltered
from ferryman.porting.model.trees import blocks

_FUNCTIONS = types.FunctionType | types.BuiltinFunctionType
ATTRIBUTE = "ferryman_gate"  # of a ported activation's class
HOME = "ferryman_gate_home"  # the class that has it; another class over it may have another forward
CURRENT = "ferryman_gate_current"  # of that class: whether the code of the class below is still what was proven


def call_of(gate: Gate) -> Callable[[Tensor, Tensor], Tensor]:
    """``(gate, up)`` to the op's result; the op is looked up in `ferryman.ops` at each call, as model code does."""
    name, extra = gate.op, gate.extra
    if not extra:
        return lambda g, u: getattr(ops, name)(g, u)
    return lambda g, u: getattr(ops, name)(g, u, *extra)


def _fit(g: Any, u: Any) -> bool:
    """Whether the op takes the two. Under torch.compile Inductor fuses them, with less for Dynamo to guard."""
    if torch.compiler.is_dynamo_compiling() and not state.requests:
        return False
    return (
        isinstance(g, Tensor)
        and isinstance(u, Tensor)
        and g.dtype is u.dtype
        and g.shape == u.shape
        and g.dtype.itemsize < 8
    )


functions: dict[Any, Callable[[Tensor, Tensor], Tensor]] = {}  # of PyTorch, with a gated op


def _op_of_function(function: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    return functions.get(function) if isinstance(function, _FUNCTIONS) else None


def _unaltered(function: Any) -> bool:
    return isinstance(function, _FUNCTIONS) or (unaltered(function, HOME) and bool(getattr(function, CURRENT)()))


def _op_of(function: Any, g: Any, u: Any) -> Callable[[Tensor, Tensor], Tensor] | None:
    """The gated op of a module, or of a function that it holds, for these two. Hooks and another forward keep it whole:
    a fused one would not run them."""
    known = _fit(g, u) and (getattr(function, ATTRIBUTE, None) or _op_of_function(function))
    return known if known and _unaltered(function) else None


def gated(function: Any, g: Any, u: Any) -> Any:
    """``function(g) * u``."""
    known = _op_of(function, g, u)
    if known is None:
        return function(g) * u
    return known(g, u)


def gated_last(u: Any, function: Any, g: Any) -> Any:
    """``u * function(g)``."""
    known = _op_of(function, g, u)
    if known is None:
        return u * function(g)
    return known(g, u)


def gated_in_place(function: Any, g: Any, u: Any) -> Any:
    """``t = function(g); t *= u``, and then t."""
    known = _op_of(function, g, u)
    if known is None:
        product = function(g)
        product *= u
        return product
    return known(g, u)


def gated_into(u: Any, function: Any, g: Any) -> Any:
    """``u *= function(g)`` of what nothing else has, and then u."""
    known = _op_of(function, g, u)
    if known is None:
        u *= function(g)
        return u
    return known(g, u)


FRESH = "ferryman_fresh"  # of a product in place to what nothing else has


def in_place(tree: ast.FunctionDef, self_name: str, fresh: frozenset[str]) -> bool:
    """Mark products in place to what a child gave just before; whether there are any. fresh: attributes whose results
    nothing else has."""
    marked = False
    for body in blocks(tree):
        for before, statement in itertools.pairwise(body):
            call = before.value if isinstance(before, ast.Assign) and len(before.targets) == 1 else None
            if not isinstance(statement, ast.AugAssign) or not isinstance(statement.op, ast.Mult):
                continue
            child = isinstance(call, ast.Call) and ast.unparse(call.func).partition(".")
            name = statement.target.id if isinstance(statement.target, ast.Name) else ""
            inside = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
            mine = isinstance(before, ast.Assign) and ast.unparse(before.targets[0]) == name and name not in inside
            if mine and child in [(self_name, ".", f) for f in fresh] and isinstance(statement.value, ast.Call):
                setattr(statement, FRESH, True)
                marked = True
    return marked


@functools.cache
def of_function(gate: Gate, function: Callable[[Any], Any]) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """`gated` and `gated_last` of a function whose gate is known beforehand."""
    known = call_of(gate)

    def first(g: Any, u: Any) -> Any:
        return known(g, u) if _fit(g, u) else function(g) * u

    def last(u: Any, g: Any) -> Any:
        return known(g, u) if _fit(g, u) else u * function(g)

    return first, last


@functools.cache
def gate_of_expression(name: str, text: str, home: types.FunctionType) -> tuple[Gate | None, Any]:
    """(the gated op of an expression of one name with PyTorch's functions, by what their names mean to ``home``; that
    expression as a function)."""
    call = eval(f"lambda {name}: {text}", source.names_read(home, [text]))  # noqa: S307 - the program's own text
    return activations.gate_like(call), call


@functools.cache
def with_options(function: Any, constants: tuple[tuple[str, Any], ...]) -> Any:
    return functools.partial(function, **dict(constants)) if constants else function


def of_call(node: ast.Call, home: types.FunctionType) -> tuple[Gate, Any] | None:
    """(the gated op of the activation that a call in ``home`` names, that function with the call's options)."""
    value = spelling.taken(node.func, home)
    constants = {k.arg: k.value.value for k in node.keywords if k.arg and isinstance(k.value, ast.Constant)}
    if (
        value is source.MISSING
        or not callable(value)
        or isinstance(value, type)
        or len(constants) != len(node.keywords)
    ):
        return None
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return None
    call = with_options(value, tuple(sorted(constants.items())))
    gate = activations.gate_of(call)
    return None if gate is None else (gate, call)
