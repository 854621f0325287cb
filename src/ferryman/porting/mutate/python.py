"""Mutation operators for kernels written in Python (Triton, Gluon): rules over the syntax tree of jitted functions.

Every operator takes a node and its surroundings and yields (node to replace, new text). None knows an op or a file.
"""

from __future__ import annotations

import ast
import copy
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ferryman.porting.mutate.edits import Edit, Operator

Places = Iterator[tuple[ast.AST, str]]
_REDUCTIONS = ("sum", "max", "min", "reduce", "associative_scan", "cumsum", "xor_sum")
_ROUNDED = ("load", "store")
_WAITS = ("wait", "barrier", "fence", "sync", "arrive", "expect")
PLAIN = (
    "arange",
    "program_id",
    "num_programs",
    "constexpr",
    "static_range",
    "range",
    "cdiv",
    "full",
    "zeros",
)
ROUNDINGS = ("accumulator narrowed", "cast early")  # operators that give floating-point numbers
_BLOCKS = (ast.If, ast.Try, ast.With, ast.ExceptHandler)
_LESS = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
}


@dataclass(frozen=True)
class Scope:
    """The jitted function around a node: its parameters, and each node's parent."""

    parameters: tuple[str, ...]
    parents: dict[ast.AST, ast.AST]

    def like(self, name: str) -> str | None:
        """The next parameter of the same kind (``x_stride``, ``y_stride``): what an author may confuse it with."""
        kind = name.rpartition("_")[2]
        same = [p for p in self.parameters if p.rpartition("_")[2] == kind and "_" in p]
        return same[(same.index(name) + 1) % len(same)] if name in same and len(same) > 1 else None

    def inside(self, node: ast.AST, *kinds: type[ast.AST]) -> bool:
        parent = self.parents.get(node)
        while parent is not None:
            if isinstance(parent, kinds):
                return True
            parent = self.parents.get(parent)
        return False


def called(node: ast.AST) -> str:
    """The last name of what is called: "load" for ``tl.load(..)``; "" for what is no call."""
    if not isinstance(node, ast.Call):
        return ""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def _with(node: Any, **fields: Any) -> str:
    copied = copy.copy(node)
    for name, value in fields.items():
        setattr(copied, name, value)
    return ast.unparse(copied)


def _text(node: ast.AST) -> str:
    return ast.unparse(node)


def _masks(node: ast.AST, scope: Scope) -> Places:
    if called(node) in _ROUNDED and isinstance(node, ast.Call):
        kept = [k for k in node.keywords if k.arg not in ("mask", "other")]
        if len(kept) < len(node.keywords):
            yield node, _with(node, keywords=kept)


def _conjunct(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
        yield node, f"({_text(node.left)})"
        yield node, f"({_text(node.right)})"


def _short_by_one(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.Compare) and isinstance(node.ops[0], (ast.Lt, ast.LtE)):
        right = node.comparators[0]
        if not isinstance(right, ast.Constant):
            yield right, f"({_text(right)} - 1)"


def _turned(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.Compare) and type(node.ops[0]) in _LESS:
        for side in (node.left, node.comparators[0]):
            if isinstance(side, ast.Constant) and side.value is None:
                return
        yield node, f"({_with(node, ops=[_LESS[type(node.ops[0])]()])})"


def _other(node: ast.AST, scope: Scope) -> Places:
    if called(node) == "load" and isinstance(node, ast.Call):
        for word in node.keywords:
            if word.arg == "other":
                zero = isinstance(word.value, ast.Constant) and word.value.value == 0
                yield word.value, "1.0" if zero else "0.0"


def _narrow_sum(node: ast.AST, scope: Scope) -> Places:
    narrow = "({}).to(tl.float16).to(tl.float32)"
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and isinstance(node.target, ast.Name):
        name = node.target.id
        if scope.inside(node, ast.For, ast.While) and not name.endswith(("ptr", "ptrs")):
            yield node, f"{name} = {narrow.format(f'{name} + {_text(node.value)}')}"
    if called(node) == "dot" and isinstance(node, ast.Call):
        yield node, narrow.format(_text(node))
    if called(node) == "sum" and isinstance(node, ast.Call) and node.args:
        rest = [f"({_text(node.args[0])}).to(tl.float16)", *map(_text, node.args[1:])]
        yield node, f"{_text(node.func)}({', '.join(rest)}).to(tl.float32)"


def _cast_dropped(node: ast.AST, scope: Scope) -> Places:
    """Not one to 64-bit integers, which shows beyond 2^31 elements: no run of a self-test has so many."""
    if not isinstance(node, ast.Call) or not node.args:
        return
    if isinstance(node.func, ast.Attribute) and node.func.attr == "to" and "int64" not in _text(node.args[0]):
        yield node, f"({_text(node.func.value)})"


def _cast_early(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)) and _real(node):
        parent = scope.parents.get(node)
        if isinstance(parent, (ast.Assign, ast.BinOp, ast.Call, ast.Return)) and not scope.inside(node, ast.Subscript):
            yield node, f"({_text(node)}).to(tl.float16).to(tl.float32)"


def _left_out(node: ast.AST, scope: Scope) -> Places:
    """``f(x, ..)`` becomes ``x``: a function of one value that was forgotten."""
    skip = (*_REDUCTIONS, *_ROUNDED, *PLAIN, "to", "where", "dot", "print", "len", "max", "min", "int", "float")
    if isinstance(node, ast.Call) and node.args and called(node) not in skip and not called(node).startswith("static"):
        plain = not isinstance(node.args[0], ast.Starred)
        if plain and isinstance(scope.parents.get(node), (ast.BinOp, ast.Assign)):
            yield node, f"({_text(node.args[0])})"


def _maximum(node: ast.AST, scope: Scope) -> Places:
    if called(node) in ("max", "min") and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        yield node, f"({_text(node)} * 0.0)"
    if called(node) in ("maximum", "minimum") and isinstance(node, ast.Call):
        yield node, f"({_text(node.args[0])})"
        yield node, f"({_text(node.args[1])})"


def _term(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and not _zero(node.right):
        yield node, f"({_text(node.left)})"
        if isinstance(node.op, ast.Add) and not isinstance(node.right, ast.Constant):
            yield node, f"({_text(node.right)})"


def _factor(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Mult, ast.Div)):
        yield node, f"({_text(node.left)})"
        if isinstance(node.op, ast.Mult):
            yield node, f"({_text(node.right)})"
    if isinstance(node, ast.AugAssign) and isinstance(node.op, (ast.Mult, ast.Div)):
        yield node, "pass"


def _sign(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Add, ast.Sub)) and not _zero(node.right):
        yield node, f"({_with(node, op=ast.Sub() if isinstance(node.op, ast.Add) else ast.Add())})"
    if isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Add) and not _text(node.target).endswith("ptr"):
        yield node, _with(node, op=ast.Sub())
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) and not isinstance(node.operand, ast.Constant):
        yield node, f"({_text(node.operand)})"


def _swapped(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod)):
        yield node, f"({_with(node, left=node.right, right=node.left)})"
    if isinstance(node, ast.Call) and called(node) in ("where", "div_rn", "fdiv") and len(node.args) >= 2:
        yield node, _with(node, args=[*node.args[:-2], node.args[-1], node.args[-2]])


def _stride(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
        other = scope.like(node.id)
        if other is not None and not isinstance(scope.parents.get(node), ast.Compare):
            yield node, other


def _program(node: ast.AST, scope: Scope) -> Places:
    if called(node) == "program_id" and isinstance(node, ast.Call) and node.args:
        axis = node.args[0].value if isinstance(node.args[0], ast.Constant) else 0
        yield node, f"{_text(node.func)}({1 if axis == 0 else 0})"


def _constant(node: ast.AST, scope: Scope) -> Places:
    if not isinstance(node, ast.Constant) or isinstance(node.value, bool) or not isinstance(node.value, (int, float)):
        return
    parent = scope.parents.get(node)
    if isinstance(node.value, float):
        neutral = isinstance(parent, ast.keyword) and parent.arg == "other"
        added = isinstance(parent, ast.BinOp) and isinstance(parent.op, (ast.Add, ast.Sub)) and not node.value
        if not neutral and not added:
            yield node, "1.0" if node.value == 0 else repr(node.value * 2)
    elif isinstance(parent, ast.BinOp) and not scope.inside(node, ast.Subscript):
        yield node, str(node.value + 1)


def _wait(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.Expr) and any(w in called(node.value) for w in _WAITS):
        yield node, "pass"


def _part(node: ast.AST, scope: Scope) -> Places:
    """Half of the last dimension is left out of a reduction; the first or the last step of a loop over blocks is."""
    if called(node) in ("sum", "max") and isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        x = _text(node.args[0])
        empty = "0.0" if called(node) == "sum" else "float('-inf')"
        half = f"tl.where(tl.arange(0, ({x}).shape[-1]) < (({x}).shape[-1] + 1) // 2, {x}, {empty})"
        yield node.args[0], half
    if isinstance(node, ast.For) and called(node.iter) == "range" and isinstance(node.iter, ast.Call):
        args = node.iter.args
        if len(args) == 3:
            yield args[0], f"({_text(args[0])} + {_text(args[2])})"
            yield args[1], f"({_text(args[1])} - {_text(args[2])})"


def _statement(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.Expr) and called(node.value) == "store":
        yield node, "pass"
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        name = node.targets[0].id
        if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(node.value)):
            yield node, "pass"
    if isinstance(node, ast.AugAssign):
        yield node, "pass"


def _branch(node: ast.AST, scope: Scope) -> Places:
    if isinstance(node, ast.If) and "INTERPRET" not in _text(node.test):
        yield node.test, f"(not ({_text(node.test)}))"
    if isinstance(node, ast.Call):
        for word in node.keywords:
            if word.arg == "propagate_nan":
                yield node, _with(node, keywords=[k for k in node.keywords if k is not word])


def _real(node: ast.AST) -> bool:
    """Whether an expression looks like floating-point work: not an address, a size, or a constant of the compiler."""
    names = [n.id for n in ast.walk(node) if isinstance(n, ast.Name)]
    return bool(names) and not any(
        n.isupper() or n.endswith(("ptr", "stride", "width", "rows", "first")) for n in names
    )


def _zero(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value == 0


OPERATORS = (
    Operator("mask dropped", "a load or a store without its bounds", _masks),
    Operator("mask in part", "one condition of several is forgotten", _conjunct),
    Operator("one short", "a bound one too small: the last element, row, key or column is left out", _short_by_one),
    Operator("comparison turned", "< for <=, == for !=: one too many, or a causal mask off by one", _turned),
    Operator("other changed", "what a masked load gives outside is not the neutral element", _other),
    Operator("accumulator narrowed", "sums and products of tiles are kept in 16 bits", _narrow_sum),
    Operator("cast dropped", "a conversion is forgotten", _cast_dropped),
    Operator("cast early", "an intermediate is rounded to 16 bits", _cast_early),
    Operator("function left out", "exp, a root, a rounding or a helper is forgotten", _left_out),
    Operator("maximum left out", "softmax without its maximum; one side of a maximum", _maximum),
    Operator("term left out", "a summand is forgotten: eps, a bias, an offset, a mean", _term),
    Operator("factor left out", "a factor is forgotten: a rescaling, a scale, a weight, a count", _factor),
    Operator("sign", "+ for -, or a sign lost", _sign),
    Operator("operands swapped", "a - b, a / b, or the branches of a choice the wrong way round", _swapped),
    Operator("parameter swapped", "a stride or a pointer taken for its neighbour", _stride),
    Operator("program swapped", "the wrong axis of the grid: one program's work is done by all", _program),
    Operator("constant changed", "a wrong literal", _constant),
    Operator("wait removed", "a barrier, a fence or a wait is forgotten", _wait),
    Operator(
        "reduction in part", "half of a reduction's elements, or a loop's first or last block, is left out", _part
    ),
    Operator("statement left out", "a store, an update or a correction is forgotten", _statement),
    Operator("branch turned", "a condition the wrong way round; NaN not passed on", _branch),
)


def statements(block: ast.AST) -> Iterator[ast.stmt]:
    """A module's own statements: those inside of an ``if``, a ``try`` or a ``with`` are a module's, too."""
    for name in ("body", "handlers", "orelse", "finalbody"):
        for node in getattr(block, name, ()):
            if isinstance(node, ast.stmt):
                yield node
            if isinstance(node, _BLOCKS):
                yield from statements(node)


def _decorated(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef) and any("jit" in _text(d) for d in node.decorator_list)


def jitted(tree: ast.Module) -> set[str]:
    """Names of a module's functions that a compiler for devices takes: decorated, or given to ``jit`` by a call."""
    names = {n.name for n in statements(tree) if isinstance(n, ast.FunctionDef) and _decorated(n)}
    for node in statements(tree):
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call) and "jit" in ast.unparse(node.value.func):
            names |= {a.id for a in node.value.args if isinstance(a, ast.Name)}
    return names


def reachable(tree: ast.Module, start: Iterable[str]) -> set[str]:
    """What ``start`` names of a module, directly or through others: functions, assigned and imported names."""
    names: dict[str, set[str]] = {}
    for node in statements(tree):
        used = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            names[node.name] = used | names.get(node.name, set())
        elif isinstance(node, ast.Assign):
            names |= {t.id: used | names.get(t.id, set()) for t in node.targets if isinstance(t, ast.Name)}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: set() for a in node.names}
    reached, left = set[str](), list(start)
    while left:
        name = left.pop()
        if name in names and name not in reached:
            reached.add(name)
            left += names[name]
    return reached


def _compiled(node: ast.AST) -> Iterator[ast.AST]:
    """A statement's nodes, without documentation and without what only the interpreter executes."""
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return
    yield node
    for child in ast.iter_child_nodes(node):
        hidden = isinstance(node, ast.If) and "INTERPRET" in _text(node.test) and child not in node.orelse
        if not hidden:
            yield from _compiled(child)


def edits(
    text: str,
    file: str,
    functions: set[str] | None = None,
    operators: Sequence[Operator] = OPERATORS,
    everything: bool = False,
) -> list[Edit]:
    """Every edit of a source's jitted functions (``everything``: of all functions) of those names; None: of all."""
    tree = ast.parse(text)
    compiled, decorated = jitted(tree), {getattr(n, "name", "") for n in statements(tree) if _decorated(n)}
    starts = [0]
    for line in text.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    lines = text.splitlines(keepends=True)

    def place(line: int, column: int) -> int:
        return starts[line - 1] + len(lines[line - 1].encode()[:column].decode())

    distinct: dict[tuple[int, str, str], Edit] = {}
    for function in statements(tree):
        if not isinstance(function, ast.FunctionDef) or (functions is not None and function.name not in functions):
            continue
        fallback = function.name in decorated and not _decorated(function)  # the other side of a choice
        if not everything and (function.name not in compiled or fallback):
            continue
        arguments = [a.arg for a in (*function.args.args, *function.args.kwonlyargs)]
        parents: dict[ast.AST, ast.AST] = {}
        for node in ast.walk(function):
            parents |= dict.fromkeys(ast.iter_child_nodes(node), node)
        scope = Scope(tuple(arguments), parents)
        for statement in function.body:
            for node in _compiled(statement):
                for operator in operators:
                    for where, new in operator.make(node, scope):
                        place_of: Any = where
                        start = place(place_of.lineno, place_of.col_offset)
                        old = text[start : place(place_of.end_lineno, place_of.end_col_offset)]
                        edit = Edit(
                            file, start, old, new, operator.name, function.name, place_of.lineno, place_of.end_lineno
                        )
                        if " ".join(old.split()) != new.strip("()"):
                            distinct.setdefault((start, old, new), edit)
    return sorted(distinct.values(), key=lambda e: (e.start, e.operator, e.new))
