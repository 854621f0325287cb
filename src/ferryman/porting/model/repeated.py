"""What a served forward does in a call like one of before: it runs what served that one, without tests and look-up.

The guard of such a call compares each tensor's type, dtype, device, sizes, strides and whether it asks for a gradient:
what tests of these alone said then holds now. What a test reads beside them is asked again.
"""

from __future__ import annotations

import ast
import inspect
import re
from dataclasses import dataclass, field
from typing import Any

import torch

from ferryman import ops
from ferryman.dispatch import kept, plan, registry, resolver
from ferryman.errors import CompileError
from ferryman.ops.primitive import Primitive

ATTRIBUTE = "_ferryman_calls"  # of a ported module's instance


@dataclass(frozen=True)
class Served:
    """Code of a forward that an op serves: what stands before; tests, of which ``current`` are those that the module's
    code is what it was; the op's call. little: a test that the module's own code is quicker; "": it never is."""

    before: tuple[str, ...]
    current: tuple[str, ...]
    tests: tuple[str, ...]
    expression: str
    little: str = ""

    def lines(self, otherwise: str) -> tuple[list[str], dict[str, Any]]:
        """Lines that return what the op gives where the tests hold and it takes the call; and what their names mean.
        otherwise: what lines after these return."""
        again = self._again(otherwise)
        tried = ["try:", f"    ferryman_result = {self.expression}", "except ferryman_refused:", "    pass", "else:"]
        tried += [f"    {line}" for line in (*again.keep, "return ferryman_result")]
        if self.little:
            tried = [f"if ferryman_compiling() or not {self.little}:", *(f"    {line}" for line in tried)]
        asked = " and ".join((*self.current, *self.tests)) or "True"
        lines = [*self.before, *again.run, f"if {asked}:", *(f"    {line}" for line in (*tried, *again.leave))]
        return lines, again.meaning

    def _again(self, otherwise: str) -> _Again:
        call, condition = _call_of(self.expression)
        if call is None or not kept.may(call.op):
            return _Again()
        op, names = call.op, _Names(call)
        key = [repr(op.name), "ferryman_plans.generation", *map(names.of, resolver.facts_of(op))]
        guard = ", ".join(names.of(f"no_{n}" if call.given[n] == "None" else n) for n in op.tensors)
        arguments = ", ".join(map(names.of, op.names))
        compared = frozenset(call.given[n] for n in op.tensors)
        lasting = [*self.current, *(test for test in self.tests if not _seen(test, compared))]
        asked = " and ".join(["ferryman_call is not None", *lasting, f"ferryman_call[0]({guard})"])
        run = [
            "ferryman_key = None",
            "if not ferryman_compiling():",
            f"    ferryman_calls = self.__dict__.get({ATTRIBUTE!r})",
            "    if type(ferryman_calls) is not ferryman_new_calls: ferryman_calls = ferryman_new_calls()",
            "    try:",
            *(f"        {names.own[n]} = {call.given[n]}" for n in names.own),
            f"        ferryman_key = ({', '.join(key)})",
            "        ferryman_call = ferryman_calls.get(ferryman_key)",
            # what is no tensor, sizes that are symbols, a nested tensor, which has no sizes
            "    except (AttributeError, TypeError, RuntimeError):",
            "        ferryman_key = ferryman_call = None",
            f"    if {asked}:",
            f"        if ferryman_call[1] is None: return {otherwise}",
            "        try:",
            f"            return ferryman_call[1]({arguments}, ferryman_call[2])",
            "        except (ferryman_unbuilt, ferryman_refused):",  # the op itself says so below
            "            pass",
        ]
        storing = f"self.__dict__[{ATTRIBUTE!r}] = ferryman_calls"
        keep = [
            f"if {' and '.join(['ferryman_key is not None', *condition])}:",
            f"    {storing}",
            f"    ferryman_calls.keep(ferryman_called, ferryman_key, ({arguments},))",
        ]
        leave = ["if ferryman_key is not None:", f"    {storing}", f"    ferryman_calls.leave(ferryman_key, {guard})"]
        meaning = {
            "ferryman_compiling": torch.compiler.is_dynamo_compiling,
            "ferryman_new_calls": kept.Calls,
            "ferryman_plans": plan,
            "ferryman_unbuilt": CompileError,
            "ferryman_called": op,
        }
        return _Again(run, keep, leave, meaning | names.meaning)


@dataclass(frozen=True)
class _Again:
    """Lines that return the result of a call of before; that keep one which the op served; that keep one which the
    module's own code does. None where the expression is no plain call of an op whose calls can be kept."""

    run: list[str] = field(default_factory=list)
    keep: list[str] = field(default_factory=list)
    leave: list[str] = field(default_factory=list)
    meaning: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class _Call:
    """An op's plain call: the text of each argument."""

    op: Primitive
    given: dict[str, str]


def _call_of(expression: str) -> tuple[_Call | None, list[str]]:
    """The call, and conditions under which it is what the expression gives: of a tensor's strides (`laid`)."""
    call: ast.expr = ast.parse(expression, mode="eval").body
    condition: list[str] = []
    if isinstance(call, ast.IfExp) and re.fullmatch(r"\w+\.is_contiguous\(\)", ast.unparse(call.test)):
        condition, call = [ast.unparse(call.test)], call.body
    if not (isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)):
        return None, []
    if ast.unparse(call.func.value) != "ops" or not all(map(_plain, (*call.args, *(k.value for k in call.keywords)))):
        return None, []
    op = registry.primitive(call.func.attr)
    try:
        bound = inspect.signature(getattr(ops, op.name)).bind(
            *call.args, **{str(k.arg): k.value for k in call.keywords}
        )
    except TypeError:  # the op itself says what it misses
        return None, []
    bound.apply_defaults()
    given = {n: ast.unparse(v) if isinstance(v, ast.AST) else repr(v) for n, v in bound.arguments.items()}
    return (_Call(op, given), condition) if tuple(given) == tuple(op.names) else (None, [])


def _plain(argument: ast.expr) -> bool:
    """Whether an argument is read in no time: a name, an attribute, a number, a matrix turned round."""
    if isinstance(argument, ast.Call):
        return isinstance(argument.func, ast.Attribute) and argument.func.attr == "t" and not argument.args
    return isinstance(argument, ast.Name | ast.Constant | ast.Attribute)


class _Names(ast.NodeTransformer):
    """An op's expressions in a forward: with names for arguments that have none there, and for what the op calls."""

    def __init__(self, call: _Call) -> None:
        self.given, self.known = call.given, plan.runner_of(call.op).op.namespace
        self.own = {
            n: f"ferryman_arg_{n}" for n, text in call.given.items() if not text.isidentifier() or text in _FIXED
        }
        self.meaning: dict[str, Any] = {}

    def of(self, text: str) -> str:
        return ast.unparse(self.visit(ast.parse(text, mode="eval")))

    def visit_Name(self, node: ast.Name) -> ast.Name:
        if node.id in self.given:
            return ast.Name(self.own.get(node.id, self.given[node.id]), node.ctx)
        name = f"ferryman_op_{node.id}"
        self.meaning[name] = self.known[node.id]
        return ast.Name(name, node.ctx)


_FIXED = ("None", "True", "False")
# What a guard compares of a tensor; and functions of that alone, or of what stands in a call's key
_COMPARED = frozenset(("dtype", "shape", "ndim", "device", "requires_grad"))
_OF_THESE = frozenset(("itemsize", "is_floating_point"))  # of a dtype
_CALLED = frozenset(("type", "torch.is_grad_enabled"))


def _seen(test: str, tensors: frozenset[str]) -> bool:
    """Whether a test reads nothing but what a guard of these tensors compares, and what stands in a call's key."""
    read: set[int] = set()  # names of tensors where only that is read of them
    for node in ast.walk(ast.parse(test, mode="eval")):
        if isinstance(node, ast.Call):
            if ast.unparse(node.func) not in _CALLED or node.keywords:
                return False
            read |= {id(argument) for argument in (node.func, *node.args)}
        elif isinstance(node, ast.Attribute):
            text = ast.unparse(node)
            of_torch = text == "torch.is_grad_enabled" or isinstance(getattr(torch, node.attr, None), torch.dtype)
            if not (node.attr in _COMPARED | _OF_THESE or (ast.unparse(node.value) == "torch" and of_torch)):
                return False
            read.add(id(node.value))
        elif isinstance(node, ast.Compare):
            alike = all(isinstance(o, ast.Is | ast.IsNot | ast.In) for o in node.ops)
            nothing = [ast.unparse(c) in ("None", "ferryman_plain") for c in node.comparators]
            read |= {id(side) for side in (node.left, *node.comparators)} if alike and all(nothing) else set()
        elif isinstance(node, ast.Name):
            if id(node) not in read or node.id not in tensors | _CALLED | {"torch", "ferryman_plain"}:
                return False
        elif isinstance(node, ast.Subscript | ast.NamedExpr | ast.Lambda | ast.comprehension):
            return False
    return True
