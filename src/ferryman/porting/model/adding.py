"""``norm(a + b)`` in a ported forward: one op, which gives the sum too, where the norm's role was proven with it.

Two spellings are found. A norm of a sum, and a local that is a sum and whose next reader is a norm: only other names
for it stand between, or an ``if`` whose two sides both lead there. The sum is then moved into the sides, and what
follows the ``if``, up to the norm, is written at the end of each.
"""

from __future__ import annotations

import ast
import copy
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import state
from ferryman.porting.model import source
from ferryman.porting.model.proof import prove
from ferryman.porting.model.repeated import Served
from ferryman.porting.model.serving import little
from ferryman.porting.model.sums import alias, sum_of, terms_of
from ferryman.porting.model.trees import copied

ATTRIBUTE = "ferryman_added"  # of a ported norm's class: a method (x, addend) -> (result, sum)
HOME = "ferryman_home"  # the class that has that method; another class over it may have another forward
IN_PLACE = "ferryman_in_place"  # of a sum that the program writes over its first term
CALL, CALL_IN_LIST = "ferryman_added", "ferryman_held"  # what the changed tree calls
_PURE = (ast.Name, ast.Attribute, ast.Constant, ast.Compare, ast.BoolOp, ast.UnaryOp, ast.expr_context, ast.operator)
_LEAVES = (ast.Return, ast.Break, ast.Continue, ast.Yield, ast.YieldFrom)


# What a changed forward calls --------------------------------------------------------------------------------


def added(module: Any, a: Any, b: Any, method: bool | None = False) -> tuple[Any, Any]:
    """(module(a + b), a + b), where the program says ``a + b``, ``a.add(b)`` (method), or ``a += b`` (None). Apart
    where the module is not
    ported, has hooks or another forward, and under autocast, which adds in another dtype than a norm is computed in."""
    if torch.compiler.is_dynamo_compiling() and not state.requests:  # Inductor fuses the two, with less to guard
        if method is None:
            a += b
        total = a if method is None else a.add(b) if method else a + b
        return module(total), total
    if method is None and not _alike(a, b):
        a += b
        return module(a), a
    if method and not isinstance(a, Tensor):
        total = a.add(b)
        return module(total), total
    known = getattr(module, ATTRIBUTE, None)
    if known is None or not unaltered(module, HOME) or _little(a, b):
        total = a + b
        return module(total), total
    if not _alike(a, b):
        if not _fit(a, b):
            total = a + b
            return module(total), total
        if a.dtype is not b.dtype:
            common = torch.promote_types(a.dtype, b.dtype)
            a, b = a.to(common), b.to(common)
        if _covers(a.shape, b.shape):
            b = b.expand_as(a)  # of the other autograd learns nothing
        elif _covers(b.shape, a.shape):
            a = a.expand_as(b)
        else:
            a, b = torch.broadcast_tensors(a, b)
    pair: tuple[Any, Any] = known(a, b)
    return pair


def _little(a: Any, b: Any) -> bool:
    return isinstance(a, Tensor) and isinstance(b, Tensor) and little(a, None, b)


def added_in_a_list(module: Any, a: Any, b: Any, method: bool | None = False) -> tuple[list[Any], Any]:
    """`added`, with the result in a list that its one reader empties: no local keeps it alive."""
    y, total = added(module, a, b, method)
    return [y], total


def unaltered(module: Any, home: str) -> bool:
    """Whether a call of a ported module would run its class's forward, and nothing around it."""
    return getattr(module, home) is type(module) and source.untouched(module)


def method(body: Served, parameter: str, known: Mapping[str, Any]) -> types.FunctionType:
    """The method of a ported norm at `ATTRIBUTE`; calls for which its role does not hold go to the norm itself."""
    lines, names_in_it = body.lines(f"{ATTRIBUTE}_apart(self, x, addend)")
    lines = [*([] if parameter == "x" else [f"{parameter} = x"]), *lines]
    text = f"def {ATTRIBUTE}(self, x, addend):\n" + "".join(f"    {line}\n" for line in lines)
    text += f"    return {ATTRIBUTE}_apart(self, x, addend)\n"
    namespace = {**known, **names_in_it, f"{ATTRIBUTE}_apart": _apart}
    exec(compile(text, "<ferryman added>", "exec"), namespace)  # noqa: S102 - our own text, their identifiers
    function: types.FunctionType = namespace[ATTRIBUTE]
    return function


def _apart(module: Any, x: Tensor, addend: Tensor) -> tuple[Any, Tensor]:
    total = x + addend
    return module(total), total


def proven(
    original: Callable[..., Any],
    candidate: Callable[..., Any],
    inputs: Sequence[tuple[Any, ...]],
    wide: frozenset[int] = frozenset(),
    runs: dict[int, Any] | None = None,
) -> bool:
    """Whether ``candidate(x, addend, ..)`` is (original(x + addend, ..), x + addend). runs: as `prove` has them."""

    def apart(x: Tensor, addend: Tensor, *given: Tensor) -> tuple[Any, Any]:
        total = x + addend
        return original(total, *given), total

    both = [(x, torch.roll(x, 1, -1) * 0.5, *given) for x, *given in inputs]
    return prove(apart, candidate, both, wide=wide, runs=runs).ok


def _alike(a: Any, b: Any) -> bool:
    """What `_fit` says of most calls, in a third of its time. Whether they are floating, the norm's role asks."""
    return (
        type(a) is type(b) is Tensor
        and a.dtype is b.dtype
        and a.shape == b.shape
        and a.dim() > 0
        and a.device == b.device
        and not torch.compiler.is_dynamo_compiling()
        and not torch._C._is_any_autocast_enabled()
    )


def _covers(shape: Sequence[int], other: Sequence[int]) -> bool:
    """Whether what has the other shape is broadcast to this one."""
    return len(shape) >= len(other) and all(m in (1, n) for n, m in zip(reversed(shape), reversed(other), strict=False))


def _fit(a: Any, b: Any) -> bool:
    return (
        isinstance(a, Tensor)
        and isinstance(b, Tensor)
        and a.dim() > 0
        and b.dim() > 0
        and a.device == b.device
        and a.is_floating_point()
        and b.is_floating_point()
        and not a.is_meta  # which autocast does not know
        and not torch.is_autocast_enabled(a.device.type)
    )


# Finding them in a tree --------------------------------------------------------------------------------------


def fused(tree: ast.FunctionDef, self_name: str | None, norms: frozenset[str]) -> tuple[ast.FunctionDef, bool]:
    """(a copy of a method's tree with calls of `CALL` and `CALL_IN_LIST`, whether a sum is computed later than there).
    norms: attributes, dotted, that take an addition."""
    fused_tree = copied(tree)
    if self_name and norms:
        finder = _Finder(self_name, norms)
        fused_tree.body = finder.block(fused_tree.body)
        finder.visit(fused_tree)
        return fused_tree, finder.sunk
    return fused_tree, False


def in_place(tree: ast.FunctionDef, self_name: str, norms: frozenset[str], fresh: frozenset[str]) -> bool:
    """Make additions in place to what only their local has, and a norm reads next, sums that norms take; whether there
    are any. fresh: attributes whose results nothing else has."""
    finder, body, before = _Finder(self_name, norms), tree.body, len(tree.body)
    changed = False
    for i in range(1, before - 1):
        name, term = _written_over(body[i])
        assigned = body[i - 1]
        if term is None or not isinstance(assigned, ast.Assign) or ast.unparse(assigned.targets[0]) != name:
            continue
        call = assigned.value
        own = isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        child = own and ast.unparse(call.func).partition(".") in [(self_name, ".", f) for f in fresh]  # type: ignore[attr-defined]
        cloned = own and call.func.attr == "clone" and not call.args and not call.keywords  # type: ignore[attr-defined]
        first = finder._first(body[i + 1], {name}) if len(assigned.targets) == 1 and (child or cloned) else None
        if first is None or name in {n.id for n in ast.walk(term) if isinstance(n, ast.Name)}:
            continue
        total = ast.BinOp(ast.Name(name, ast.Load()), ast.Add(), term)
        setattr(total, IN_PLACE, True)
        body[i] = ast.fix_missing_locations(
            ast.copy_location(ast.Assign([ast.Name(name, ast.Store())], ast.copy_location(total, body[i])), body[i])
        )
        finder.count = i
        body[:] = finder._put(body, i, i + 1, first)
        changed = True
    return changed


def _written_over(statement: ast.stmt) -> tuple[str, ast.expr | None]:
    """h and x of ``h += x`` or ``h.add_(x)``."""
    if (
        isinstance(statement, ast.AugAssign)
        and isinstance(statement.op, ast.Add)
        and isinstance(statement.target, ast.Name)
    ):
        return statement.target.id, statement.value
    call = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute) or call.func.attr != "add_":
        return "", None
    own = call.func.value
    plain = isinstance(own, ast.Name) and len(call.args) == 1 and not call.keywords
    return (own.id, call.args[0]) if plain and isinstance(own, ast.Name) else ("", None)


def alone(tree: ast.FunctionDef, self_name: str | None, norms: frozenset[str]) -> set[str]:
    """The norms that a tree of `fused` reads for something else than a call with an addition."""
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    ours = {id(n.args[0]) for n in calls if isinstance(n.func, ast.Name) and n.func.id in (CALL, CALL_IN_LIST)}
    read = {ast.unparse(n) for n in ast.walk(tree) if isinstance(n, ast.Attribute) and id(n) not in ours}
    return {norm for norm in norms if f"{self_name}.{norm}" in read}


def norm_of(node: ast.Call) -> str:
    """The dotted attribute of the norm that a call of `CALL` or `CALL_IN_LIST` is of."""
    return ast.unparse(node.args[0]).partition(".")[2]


def outer(node: ast.AST) -> int | None:
    """How many of the ``if`` around a call it stands at the end of both sides of; None for the second such call."""
    depth: int | None = getattr(node, "ferryman_outer", 0)
    return depth


class _Finder(ast.NodeTransformer):
    def __init__(self, self_name: str, norms: frozenset[str]) -> None:
        self.self_name, self.norms, self.count = self_name, norms, 0
        self.sunk = False  # whether a sum was moved into both sides of a choice

    def _norm(self, node: ast.AST) -> ast.expr | None:
        """The one argument of a call of a norm."""
        if not isinstance(node, ast.Call) or len(node.args) != 1 or node.keywords:
            return None
        prefix, _, dotted = ast.unparse(node.func).partition(".")
        return node.args[0] if prefix == self.self_name and dotted in self.norms else None

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        argument = self._norm(node)
        terms = None if argument is None else terms_of(argument)
        if terms is None:
            return node
        whole = ast.Call(ast.Name(CALL, ast.Load()), [node.func, *terms], [])
        ast.copy_location(whole, node)
        normed = ast.Subscript(whole, ast.Constant(0), ast.Load())
        return ast.fix_missing_locations(ast.copy_location(normed, node))

    # Locals

    def block(self, body: list[ast.stmt]) -> list[ast.stmt]:
        body = list(body)
        i = 0
        while i < len(body):  # which gets shorter
            if sum_of(body[i]) is not None:
                body = self._local(body, i)
            i += 1
        for statement in body:
            for name in ("body", "orelse", "finalbody"):
                inner = getattr(statement, name, None)
                if isinstance(inner, list) and not isinstance(statement, ast.FunctionDef | ast.ClassDef):
                    setattr(statement, name, self.block(inner))
        return body

    def _local(self, body: list[ast.stmt], i: int) -> list[ast.stmt]:
        """The block with the sum at ``i`` fused into the norm that reads it next, if one does."""
        statement = body[i]
        assert isinstance(statement, ast.Assign) and isinstance(statement.targets[0], ast.Name)
        names = {statement.targets[0].id}
        for j in range(i + 1, len(body)):
            if alias(body[j], names):
                continue
            call = self._first(body[j], names)
            if call is not None:
                return self._put(body, i, j, call)
            if isinstance(body[j], ast.If):
                return self._sunk(body, i, j, names) or body
            break
        return body

    def _first(self, statement: ast.stmt, names: set[str]) -> ast.Call | None:
        """The call that a statement makes first, if it is a norm's of one of the names, and always made."""
        if not isinstance(statement, ast.Assign | ast.Return | ast.Expr) or statement.value is None:
            return None
        calls = [n for n in _in_order(statement.value) if isinstance(n, ast.Call)]
        if not calls or any(not isinstance(n, _PLAIN) for n in ast.walk(statement.value)):
            return None
        argument = self._norm(calls[0])
        return calls[0] if isinstance(argument, ast.Name) and argument.id in names else None

    def _put(self, body: list[ast.stmt], i: int, j: int, call: ast.Call) -> list[ast.stmt]:
        statement, value = body[i], sum_of(body[i])
        assert isinstance(statement, ast.Assign) and value is not None
        name = f"ferryman_y{self.count}"
        self.count += 1
        given = [copy.deepcopy(call.func), value.left, value.right]
        given += [ast.Constant(None)] if hasattr(value, IN_PLACE) else []
        fused_call = ast.Call(ast.Name(CALL_IN_LIST, ast.Load()), given, [])
        target = ast.Tuple([ast.Name(name, ast.Store()), statement.targets[0]], ast.Store())
        whole = ast.Assign([target], ast.copy_location(fused_call, value))
        if hasattr(statement, "ferryman_outer"):
            fused_call.ferryman_outer = statement.ferryman_outer  # type: ignore[attr-defined]
        body = [*body]
        body[i] = ast.fix_missing_locations(ast.copy_location(whole, statement))
        taken = ast.Call(ast.Attribute(ast.Name(name, ast.Load()), "pop", ast.Load()), [], [])
        body[j] = ast.fix_missing_locations(_replaced(body[j], call, ast.copy_location(taken, call)))
        return body

    def _sunk(self, body: list[ast.stmt], i: int, j: int, names: set[str]) -> list[ast.stmt] | None:
        """The sum at ``i`` at the head of both sides of the ``if`` at ``j``, whose ends both lead to one norm."""
        branch = body[j]
        assert isinstance(branch, ast.If)
        reads = {n.id for n in ast.walk(branch.test) if isinstance(n, ast.Name)}
        sides = [*branch.body, *branch.orelse]
        if reads & names or any(not isinstance(n, _PURE) and not _is_test(n) for n in ast.walk(branch.test)):
            return None
        if any(isinstance(n, _LEAVES) for s in sides for n in ast.walk(s)):
            return None
        end = j + 1
        aliases = set(names)
        while end < len(body) and alias(body[end], aliases):
            end += 1
        call = self._first(body[end], aliases) if end < len(body) else None
        if call is None:
            return None
        tail, head = body[j + 1 : end + 1], body[i:j]
        bodies = []
        for k, side in enumerate((branch.body, branch.orelse)):
            own = copy.deepcopy([*head, *(s for s in side if not isinstance(s, ast.Pass)), *tail])
            last = max((n for n, s in enumerate(own[: len(own) - len(tail)]) if sum_of(s) is not None), default=None)
            if last is None:
                return None
            # the two sides make one call between them: the first one's is counted, as if it stood outside
            before = getattr(body[i], "ferryman_outer", 0)
            if hasattr(own[0], "ferryman_outer"):
                del own[0].ferryman_outer
            own[last].ferryman_outer = None if k or before is None else before + 1  # type: ignore[attr-defined]
            bodies.append(self.block(own))
            if not any(isinstance(n, ast.Call) and _is_held(n, call, k) for s in bodies[-1] for n in ast.walk(s)):
                return None
        self.sunk = True
        changed = ast.copy_location(ast.If(branch.test, bodies[0], bodies[1]), branch)
        return [*body[:i], changed, *body[end + 1 :]]


_PLAIN = (
    ast.Call,
    ast.Name,
    ast.Attribute,
    ast.Constant,
    ast.BinOp,
    ast.UnaryOp,
    ast.Tuple,
    ast.Subscript,
    ast.keyword,
    ast.expr_context,
    ast.operator,
    ast.unaryop,
)


def _is_test(node: ast.AST) -> bool:
    return isinstance(node, ast.cmpop | ast.boolop | ast.unaryop)


def _is_held(node: ast.Call, call: ast.Call, side: int) -> bool:
    """Whether a call is the fused one that a tail was written again for."""
    if not (isinstance(node.func, ast.Name) and node.func.id == CALL_IN_LIST and hasattr(node, "ferryman_outer")):
        return False
    return ast.unparse(node.args[0]) == ast.unparse(call.func) and (node.ferryman_outer is None) == bool(side)


def _in_order(node: ast.AST) -> Iterator[ast.AST]:
    """Nodes as they are evaluated."""
    for child in ast.iter_child_nodes(node):
        yield from _in_order(child)
    yield node


def _replaced(statement: ast.stmt, old: ast.AST, new: ast.expr) -> ast.stmt:
    class Swap(ast.NodeTransformer):
        def visit(self, node: ast.AST) -> Any:
            return new if node is old else self.generic_visit(node)

    changed: ast.stmt = Swap().visit(statement)
    return changed
