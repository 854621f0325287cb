"""Other spellings of a product and of a sum: `torch.mul(a, b)` is ``a * b``, ``t.mul_(u)`` is ``t *= u``, and so on;
``f(input=x)`` is ``f(x)``; what goes over values that are written down is written out (`unrolled`). And what statements
say of the order in which they read and write."""

from __future__ import annotations

import ast
import math
import types
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn import functional

from ferryman.porting.model import source, unrolled
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.trace import trusted
from ferryman.porting.model.trees import copied

_OPERATORS: dict[Any, type[ast.operator]] = {torch.mul: ast.Mult, torch.multiply: ast.Mult, torch.add: ast.Add}


def operators(tree: ast.FunctionDef, function: types.FunctionType) -> ast.FunctionDef:
    """A copy of a function's tree in which such calls of two arguments are operators."""
    changed: ast.FunctionDef = _Operators(function, tree).visit(unrolled.unrolled(copied(tree), function))
    return changed


class _Operators(ast.NodeTransformer):
    def __init__(self, function: types.FunctionType, tree: ast.FunctionDef) -> None:
        self.own, self.entered, self.tensors = function, False, _tensors(tree, function)
        self.modules, self.zeros = _local_modules(tree, function), _new_locals(tree, function)

    def visit_Expr(self, node: ast.Expr) -> ast.AST:
        self.generic_visit(node)
        call = node.value
        if not isinstance(call, ast.Call) or len(call.args) != 1 or call.keywords:
            return node
        function = call.func
        if not isinstance(function, ast.Attribute) or function.attr != "mul_" or isinstance(call.args[0], ast.Starred):
            return node
        name = function.value
        if not isinstance(name, ast.Name) or name.id not in self.own.__code__.co_varnames:
            return node
        target = ast.copy_location(ast.Name(name.id, ast.Store()), name)
        return ast.copy_location(ast.AugAssign(target, ast.Mult(), call.args[0]), node)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        if self.entered:  # its locals are its own
            return node
        self.entered = True
        self.generic_visit(node)
        return node

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        node = _alone(_by_place(_called(node, self.modules, self.own), self.own), self.own, self.zeros)
        owner = node.func.value if isinstance(node.func, ast.Attribute) else None
        if (
            isinstance(owner, ast.Name)
            and owner.id in self.tensors
            and node.func.attr in ("mul", "multiply")  # type: ignore[attr-defined]
            and len(node.args) == 1
            and not node.keywords
            and not isinstance(node.args[0], ast.Starred)
        ):
            return ast.copy_location(ast.BinOp(owner, ast.Mult(), node.args[0]), node)
        whole = all(
            k.arg == "alpha" and isinstance(k.value, ast.Constant) and k.value.value == 1 for k in node.keywords
        )
        plain = len(node.args) == 2 and whole and not any(isinstance(a, ast.Starred) for a in node.args)
        value = source.resolve(node.func, self.own) if plain and isinstance(node.func, ast.Attribute) else None
        kind = _OPERATORS.get(value) if isinstance(value, types.BuiltinFunctionType) else None
        if len(node.args) == 1 and not node.keywords and source.resolve(node.func, self.own) is sum:
            return _added_up(node)
        kind = None if node.keywords and kind is not ast.Add else kind
        return node if kind is None else ast.copy_location(ast.BinOp(node.args[0], kind(), node.args[1]), node)


# PyTorch's modules that call a function with their settings behind what they are given: its name, and how many that are
_CALLS: dict[Any, tuple[str, int]] = {
    torch.nn.Softmax: (torch.nn.functional.softmax.__name__, 1),
    torch.nn.CrossEntropyLoss: (torch.nn.functional.cross_entropy.__name__, 2),
}


_OF_ALL: Any = torch.nn.modules.module
_NEW = (torch.zeros, torch.empty, torch.zeros_like, torch.empty_like)


def _is_new(e: ast.expr, function: types.FunctionType) -> bool:
    if not isinstance(e, ast.Call) or any(k.arg not in ("dtype", "device") for k in e.keywords):
        return False  # out= is of another, and requires_grad= makes it known
    value = source.resolve(e.func, function)
    return any(value is new for new in _NEW)


def _new_locals(tree: ast.FunctionDef, function: types.FunctionType) -> set[str]:
    """Locals that such a tensor is put into, and nothing else."""
    stores = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and _is_new(n.value, function)]
    names = {n.targets[0].id for n in assigned if isinstance(n.targets[0], ast.Name)}
    return {n for n in names if stores[n] == 1} - {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}


def _calls(e: ast.AST) -> bool:
    """Whether anything is called in it, but for a tensor's size."""
    calls = [n for n in ast.walk(e) if isinstance(n, ast.Call | ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom)]
    return any(getattr(getattr(n, "func", None), "attr", "") != "size" for n in calls)


def _alone(node: ast.Call, function: types.FunctionType, zeros: set[str]) -> ast.Call:
    """``torch.baddbmm(new, a, b, beta=0)``, which reads nothing of what is new, as of one number of a's."""
    named = {k.arg: k.value for k in node.keywords}
    beta = named.get("beta")
    nothing = isinstance(beta, ast.Constant) and type(beta.value) in (int, float) and beta.value == 0
    if not nothing or len(node.args) != 3 or not named.keys() <= {"alpha", "beta"}:
        return node
    new, first, _ = node.args
    owner = first.func.value if isinstance(first, ast.Call) and isinstance(first.func, ast.Attribute) else first
    turned = owner is first or first.func.attr in ("transpose", "permute")  # type: ignore[attr-defined]
    here = _is_new(new, function) and not any(_calls(e) for e in ast.iter_child_nodes(new))
    unread = here or (isinstance(new, ast.Name) and new.id in zeros)
    if not (unread and turned and isinstance(owner, ast.Name) and owner.id in function.__code__.co_varnames):
        return node
    if source.resolve(node.func, function) is not torch.baddbmm:
        return node
    none = ast.Call(ast.Attribute(copied(owner), "new_zeros", ast.Load()), [ast.Tuple([], ast.Load())], [])
    call = ast.Call(node.func, [none, *node.args[1:]], node.keywords)
    return ast.fix_missing_locations(ast.copy_location(call, node))


def settled(node: ast.expr | None, function: types.FunctionType) -> bool:
    """Whether it makes one of `_CALLS`, with numbers and words alone."""
    if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
        return False
    given = [*node.args, *(k.value for k in node.keywords)]
    fixed = all(isinstance(n, ast.Constant | ast.UnaryOp | ast.unaryop) for e in given for n in ast.walk(e))
    kind = source.resolve(node.func, function)
    return fixed and all(k.arg for k in node.keywords) and isinstance(kind, type) and kind in _CALLS


def test_of_made(tree: ast.AST, function: types.FunctionType) -> Callable[[], bool] | None:
    """A test that the modules of PyTorch's which code makes as it runs are what they were; None where it makes none."""
    makers = {ast.unparse(n.func): n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and settled(n, function)}
    if not makers:
        return None
    known = [(e, kind, _meaning(kind)) for e in makers.values() if (kind := source.resolve(e, function)) is not None]

    def still() -> bool:
        return all(source.resolve(e, function) is kind and _meaning(kind) == was for e, kind, was in known)

    return still


def _meaning(kind: Any) -> tuple[Any, ...]:
    """What making a module and calling it comes to."""
    kinds = ("forward", "forward_pre", "backward", "backward_pre")
    hooks = (len(getattr(_OF_ALL, f"_global_{when}_hooks")) for when in kinds)
    own = kind.__new__, kind.__init__, kind.__call__, getattr(kind, "_call_impl", None), kind.forward
    return *own, type(kind).__call__, *hooks


def _local_modules(tree: ast.FunctionDef, function: types.FunctionType) -> dict[str, ast.Call]:
    """Locals that such a module is put into, and nothing else."""
    stores = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    arguments = {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    known: dict[str, ast.Call] = {}
    for statement in ast.walk(tree):
        target = statement.targets[0] if isinstance(statement, ast.Assign) and len(statement.targets) == 1 else None
        if not isinstance(target, ast.Name) or stores[target.id] != 1 or target.id in arguments:
            continue
        value = statement.value  # type: ignore[attr-defined]
        if isinstance(value, ast.Call) and settled(value, function):
            known[target.id] = value
    return known


def _called(node: ast.Call, known: dict[str, ast.Call], function: types.FunctionType) -> ast.Call:
    """``nn.Softmax(dim=-1)(x)`` as ``nn.functional.softmax(x, dim=-1)``, also where a local has it."""
    module = known.get(node.func.id) if isinstance(node.func, ast.Name) else node.func
    if not isinstance(module, ast.Call) or not isinstance(module.func, ast.Attribute) or not settled(module, function):
        return node
    name, count = _CALLS[source.resolve(module.func, function)]
    plain = len(node.args) == count and not node.keywords and not any(isinstance(e, ast.Starred) for e in node.args)
    named = ast.Attribute(ast.Attribute(copied(module.func.value), "functional", ast.Load()), name, ast.Load())
    if not plain or source.resolve(named, function) is not getattr(functional, name):
        return node
    own = copied(module)
    call = ast.Call(named, [*node.args, *own.args], own.keywords)
    return ast.fix_missing_locations(ast.copy_location(call, node))


# Of what takes its first argument by the name "input" too, and has no Python signature to tell
_OF_INPUT = {
    *(torch.mul, torch.multiply, torch.add, torch.sigmoid, torch.tanh, torch.erf, torch.exp, torch.softmax),
    *(torch.square, torch.pow, torch.sqrt, torch.rsqrt, functional.gelu, functional.linear, functional.logsigmoid),
}


def _by_place(node: ast.Call, function: types.FunctionType) -> ast.Call:
    """``f(input=x, ..)`` of a function of PyTorch as ``f(x, ..)``; of a sum and a product, the other term as well."""
    names = [k.arg for k in node.keywords]
    if node.args or "input" not in names or None in names:
        return node
    value = source.resolve(node.func, function)
    if isinstance(value, types.FunctionType):
        own = trusted(value) and value.__code__.co_argcount and value.__code__.co_varnames[0] == "input"
    else:
        own = isinstance(value, types.BuiltinFunctionType) and value in _OF_INPUT
    if not own or names[0] != "input":  # what stands before is computed before
        return node
    given = {k.arg: k.value for k in node.keywords}
    taken = ["input", *(["other"] if value in _OPERATORS and names[1:2] == ["other"] else [])]
    rest = [k for k in node.keywords if k.arg not in taken]
    return ast.copy_location(ast.Call(node.func, [given[n] for n in taken], rest), node)


def _tensors(tree: ast.FunctionDef, function: types.FunctionType) -> set[str]:
    """Locals that hold results of activations of PyTorch, whatever puts a value there."""
    arguments = {a.arg for a in ast.walk(tree) if isinstance(a, ast.arg)}
    assigned = [n for n in ast.walk(tree) if isinstance(n, ast.Assign) and len(n.targets) == 1]
    stores = Counter(n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load))
    sure: Counter[str] = Counter()
    for statement in assigned:
        target, value = statement.targets[0], statement.value
        while isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute) and value.func.attr == "mul":
            value = value.func.value
            if isinstance(value, ast.Name) and isinstance(target, ast.Name) and value.id == target.id:
                sure[target.id] += 1
        called = source.resolve(value.func, function) if isinstance(value, ast.Call) else None
        if isinstance(target, ast.Name) and isinstance(called, types.FunctionType | types.BuiltinFunctionType):
            sure[target.id] += called in _GIVE_TENSORS
    return {name for name, count in sure.items() if count == stores[name]} - arguments


_GIVE_TENSORS = {functional.silu, functional.gelu, functional.relu, torch.sigmoid, torch.tanh, torch.relu}


def _added_up(node: ast.Call) -> ast.AST:
    """``sum((a, b))``, which begins with 0, as ``0 + a + b``."""
    terms = node.args[0].elts if isinstance(node.args[0], ast.Tuple | ast.List) else []
    if len(terms) < 2 or any(isinstance(t, ast.Starred) for t in terms):
        return node
    total: ast.expr = ast.copy_location(ast.Constant(0), node)
    for term in terms:
        total = ast.copy_location(ast.BinOp(total, ast.Add(), term), node)
    return total


def taken(node: ast.expr, function: types.FunctionType) -> Any:
    """`source.resolve`, also of ``TABLE["name"]`` of a dictionary of the file, and ``getattr(module, "name")``."""
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        table = source.resolve(node.value, function)
        return table.get(node.slice.value, MISSING) if type(table) is dict else MISSING
    if isinstance(node, ast.Call) and len(node.args) == 2 and not node.keywords:
        asks, name = source.resolve(node.func, function) is getattr, node.args[1]
        if asks and isinstance(name, ast.Constant) and isinstance(name.value, str):
            module = source.resolve(node.args[0], function)
            return getattr(module, name.value, MISSING) if isinstance(module, types.ModuleType) else MISSING
        return MISSING
    return source.resolve(node, function)


# Of what is smooth everywhere, and has no option: drawn inputs tell two such expressions apart.
_SMOOTH = {"sigmoid", "tanh", "erf", "exp", "pow", "square", "sqrt"}


def shares(node: ast.BinOp, function: types.FunctionType) -> Iterator[tuple[str, ast.expr, ast.expr]]:
    """(a local, the product of the factors that read it alone, that of the others) of a product of three or more."""
    factors = list(_factors(node))
    names = [f.id for f in factors if isinstance(f, ast.Name) and f.id in source.locals_of(function)]
    for name in dict.fromkeys(names):
        own = [f for f in factors if isinstance(f, ast.Constant) or _reads(f, function) == {name}]
        rest = [f for f in factors if f not in own]
        inside = [n for f in rest for n in ast.walk(f)]
        fixed = not any(
            in_place(n) or isinstance(n, ast.NamedExpr) or (isinstance(n, ast.Name) and n.id == name) for n in inside
        )
        if len([f for f in own if not isinstance(f, ast.Constant)]) > 1 and rest and fixed:
            yield name, _times(own), _times(rest)


def _factors(node: ast.expr) -> Iterator[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        yield from _factors(node.left)
        yield from _factors(node.right)
    else:
        yield node


def _times(factors: list[ast.expr]) -> ast.expr:
    product = copied(factors[0])
    for factor in factors[1:]:
        product = ast.copy_location(ast.BinOp(product, ast.Mult(), copied(factor)), factor)
    return product


def _reads(node: ast.expr, function: types.FunctionType) -> set[str] | None:
    """The locals that an expression of smooth functions of PyTorch reads; None for any other."""
    if isinstance(node, ast.Name):
        return {node.id} if node.id in source.locals_of(function) else None
    if not isinstance(node, ast.BinOp | ast.UnaryOp | ast.Constant | ast.Call):
        return None
    parts = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr)]
    if isinstance(node, ast.Call):
        if node.keywords or not isinstance(node.func, ast.Attribute) or node.func.attr not in _SMOOTH:
            return None
        value = source.resolve(node.func, function)
        whose = (
            getattr(torch, node.func.attr),
            getattr(math, node.func.attr, value),
            getattr(functional, node.func.attr, value),
        )
        if value is not MISSING and value not in whose:
            return None
        parts = [*([node.func.value] if value is MISSING else []), *node.args]
    inside = [_reads(p, function) for p in parts]
    return None if None in inside else {n for names in inside for n in names or ()}


def in_place(node: ast.AST) -> bool:
    """It may change a tensor that has other names."""
    if isinstance(node, ast.Call):
        named = isinstance(node.func, ast.Attribute) and node.func.attr.endswith("_")
        return named or any(k.arg in ("out", "inplace") for k in node.keywords)
    return isinstance(node, ast.AugAssign) or (isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store))


def computes(statement: ast.stmt, function: types.FunctionType) -> bool:
    """Whether a statement puts somewhere what functions of PyTorch alone give, none of them in place."""
    nodes = [*ast.walk(statement)]
    called = [n.func for n in nodes if isinstance(n, ast.Call)]
    values = [source.resolve(f, function) for f in called]
    known = all(isinstance(v, types.FunctionType | types.BuiltinFunctionType) and trusted(v) for v in values)
    known = known and not any(ast.unparse(f).endswith("_") for f in called)
    return known and isinstance(statement, ast.Assign) and not any(map(in_place, nodes))


def first_named(name: str, body: list[ast.stmt]) -> int:
    """Which statement names a local first; -1 if none does."""
    return next(
        (i for i, s in enumerate(body) if any(isinstance(n, ast.Name) and n.id == name for n in ast.walk(s))), -1
    )


def ends(name: str, body: list[ast.stmt]) -> bool:
    """Whether the first statement that names a local reads it once, in a product, and returns or puts another there."""
    at = first_named(name, body)
    statement = body[at] if at >= 0 else None
    if isinstance(statement, ast.AugAssign):  # in place, of what only this name has
        inside = {n.id for n in ast.walk(statement.value) if isinstance(n, ast.Name)}
        mine = isinstance(statement.target, ast.Name) and statement.target.id == name
        return mine and isinstance(statement.op, ast.Mult) and name not in inside
    if isinstance(statement, ast.Assign):
        target = statement.targets[0] if len(statement.targets) == 1 else None
        if not isinstance(target, ast.Name) or target.id != name:
            return False
    elif not isinstance(statement, ast.Return):
        return False
    value = statement.value
    if value is None or any(
        isinstance(n, ast.Lambda | ast.comprehension | ast.IfExp | ast.BoolOp) for n in ast.walk(value)
    ):
        return False
    sides = [
        s for n in ast.walk(value) if isinstance(n, ast.BinOp) and isinstance(n.op, ast.Mult) for s in (n.left, n.right)
    ]
    read = [n for n in ast.walk(value) if isinstance(n, ast.Name) and n.id == name]
    return len(read) == 1 and any(s is read[0] for s in sides)


def upper(index: ast.expr) -> ast.expr | None:
    """n of ``[..., :n]`` or ``[:, :, :n]``, where n can be evaluated before what it cuts."""
    parts = index.elts if isinstance(index, ast.Tuple) else []
    last = parts[-1] if parts else None
    whole = all(isinstance(p, ast.Slice) and p.lower is p.upper is p.step is None for p in parts[:-1])
    dots = len(parts) == 2 and isinstance(parts[0], ast.Constant) and parts[0].value is Ellipsis
    if not isinstance(last, ast.Slice) or last.lower is not None or last.step is not None or last.upper is None:
        return None
    plain = ast.Name | ast.Attribute | ast.Subscript | ast.Constant | ast.UnaryOp | ast.USub | ast.Load
    if not (dots or (whole and len(parts) == 3)) or not all(isinstance(n, plain) for n in ast.walk(last.upper)):
        return None
    return last.upper
