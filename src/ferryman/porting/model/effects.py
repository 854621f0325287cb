"""What calls in a function's code may do beside to compute: write over a tensor, draw random numbers, or anything else.

A part stands where its last value is computed; what it is computed of moves there, past what stands between. That may
be where neither writes over what the other reads, and no two of them draw.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.porting.model import filling, holders, source, spelling
from ferryman.porting.model.child_calls import is_plain_child, is_super
from ferryman.porting.model.source import MISSING
from ferryman.porting.model.trace import trusted, unbound
from ferryman.porting.model.trees import around, attribute_of

OVER, DRAWS, ACTS = "over", "draws", "acts"  # a tensor is written over; numbers are drawn; anything may happen
Effects = frozenset[str]
NONE, ALL = Effects(), Effects({OVER, DRAWS, ACTS})
CHANGES = Effects({OVER, ACTS})
_OF_PYTHON = (len, int, float, bool, tuple, list, range, slice, min, max, abs, sum, enumerate, zip, isinstance)
_ASKS = (torch.finfo, torch.iinfo, torch.Size, torch.device)
_DRAWN = re.compile(r".*dropout.*|rand.*|.*seed.*|.*rng.*|bernoulli|binomial|multinomial|normal|.*rrelu.*|poisson")
_DRAWN_TOO = re.compile(
    r"gumbel.*|.*fractional_max_pool.*|.*rnn.*|.*lstm.*|.*gru.*|multi_head_attention.*|trunc.*_normal"
)
_TAKES = re.compile(r"_.*|compile|cond|fork|wait|import_.*|handle_.*|.*with_distance.*|clear_.*|autocast_.*|init_.*")
_OVER = re.compile(r".*(batch|instance)_norm.*|embedding_renorm|set_.*|.*fake_quant.*|manual_.*|use_.*|resize.*")
_HOMES = ("torch", "torch.functional", "torch.nn.functional", "torch.linalg", "torch.special", "torch.fft", "math")
_OF_SETS = {"add", "sort"}  # a set's and a list's as well, whose result nobody reads
_STATES = {"backward", "register_hook", "retain_grad", "share_memory", "record_stream", "map", "apply", "module_load"}
_SCOPES = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.ClassDef
_WAITS = ast.Await | ast.Yield | ast.YieldFrom | ast.Global | ast.Nonlocal | ast.With | ast.AsyncWith | ast.Raise


def of(scan: Any, tree: ast.AST, but: ast.AST | None = None, own: str = "") -> Effects:
    """What runs before an expression gets to a part of it, ``but``, or what it is as a whole. own: a tensor that
    nothing else has, which it may write over."""
    later = around(tree, but) if but is not None else set()
    effects = set[str]()
    statements = () if isinstance(tree, ast.expr) else ast.walk(tree)  # an expression has none inside
    alone = {id(n.value) for n in statements if isinstance(n, ast.Expr)}
    for node in _runs(tree):
        if id(node) not in later:
            effects |= _of_node(scan, node, own, id(node) in alone)
    return Effects(effects)


def _runs(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes of a tree that run where it does: of functions that it only defines, their defaults."""
    yield tree
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, _SCOPES):
            yield from _runs(node)
        elif not isinstance(node, ast.ClassDef):
            for default in (*node.args.defaults, *node.args.kw_defaults):
                yield from () if default is None else _runs(default)


def _of_node(scan: Any, node: ast.AST, own: str, alone: bool) -> Effects:
    if isinstance(node, _WAITS) or (isinstance(node, ast.Name) and node.id in holders.later(scan)):
        return ALL
    if holders.operates(scan, node):
        return ALL
    if isinstance(node, ast.Call):
        return of_call(scan, node, own, alone)
    if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
        return NONE if node.target.id == own else Effects({OVER})
    if isinstance(node, ast.Attribute) and not isinstance(node.ctx, ast.Load):
        return Effects({ACTS})
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load):
        inner = node.value.id if isinstance(node.value, ast.Name) else ""
        return NONE if own and inner == own else Effects({OVER} if inner in scan.locals else {ACTS})
    return _of_attribute(scan, node) if isinstance(node, ast.Attribute) else NONE


def _of_attribute(scan: Any, node: ast.Attribute) -> Effects:
    """Reading an attribute of an object, which may run code."""
    owner = holders.owner(scan, node.value)
    kind: Any = type(owner)
    if owner is MISSING or issubclass(kind, Tensor | types.ModuleType | type):
        return NONE
    declared = inspect.getattr_static(kind, node.attr, None)
    if isinstance(declared, property) and owner is scan.module:
        return of_function(scan, declared.fget, scan.module)
    plain = isinstance(declared, _METHODS) or not hasattr(declared, "__get__") or trusted(declared)
    reads = getattr(kind, "__getattr__", None) in (None, nn.Module.__getattr__) or node.attr in vars(owner)
    return NONE if plain and reads else ALL


_METHODS = types.FunctionType | staticmethod | classmethod | types.MethodDescriptorType | types.MemberDescriptorType


def _is_own(scan: Any, e: ast.expr) -> bool:
    """Whether it is an attribute of the module."""
    return isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name) and e.value.id == scan.self_name


def of_call(scan: Any, call: ast.Call, own: str = "", alone: bool = False) -> Effects:
    effects = _of_keywords(scan, call)
    func, value = call.func, _value(scan, call.func)
    if value not in _OF_PYTHON and any(holders.gives_module(scan, e) for e in [*call.args, *call.keywords]):
        return ALL  # its methods have any name
    if isinstance(func, ast.Name) and func.id in scan.locals:
        inner = source.inner_functions(scan.tree, ()).get(func.id)
        return ALL if inner is None or _enters(scan, inner) else effects | _of_inner(scan, inner)
    if isinstance(value, nn.Module):
        return effects | of_child(scan, func, value)
    if value is not MISSING:
        path = attribute_of(func, scan.self_name)
        scan.relied |= {path} if path is not None else set()
        return effects | _of_value(scan, value, call)
    if isinstance(func, ast.Attribute) and _is_own(scan, func):
        return effects | _of_member(scan, func.attr)
    if isinstance(func, ast.Attribute) and is_super(func.value):
        return effects | _of_above(scan, func.attr)
    if not isinstance(func, ast.Attribute) or is_super(func):
        return effects if is_super(call) else ALL
    if filling.on_fresh(scan, call):
        return effects
    of = holders.owner(scan, func.value)
    if holders.aliases(scan, func.value) or (of is not MISSING and type(of) not in (Tensor, nn.Parameter)):
        return ALL
    return effects | _of_method(func, own, alone)


def _of_method(func: ast.Attribute, own: str, alone: bool) -> Effects:
    """A method of a value, which is a tensor's by its name."""
    name = func.attr
    if name.startswith("_") or not hasattr(Tensor, name) or name in _STATES or (alone and name in _OF_SETS):
        return ALL
    if name.endswith("_"):
        place = func.value.value if isinstance(func.value, ast.Subscript) else func.value
        mine = own and isinstance(place, ast.Name) and place.id == own and name != "set_"  # of another's memory then
        over = NONE if mine else Effects({OVER})
        return over | (Effects({DRAWS}) if _DRAWN.fullmatch(name[:-1]) or name in _FILLED else NONE)
    return Effects({DRAWS}) if _draws(name) else Effects({OVER}) if _OVER.fullmatch(name) else NONE


_FILLED = {"uniform_", "exponential_", "geometric_", "cauchy_", "log_normal_", "random_", "normal_", "bernoulli_"}


def _draws(name: str) -> bool:
    return bool(_DRAWN.fullmatch(name) or _DRAWN_TOO.fullmatch(name))


def _of_keywords(scan: Any, call: ast.Call) -> Effects:
    for keyword in call.keywords:
        if keyword.arg is None or (keyword.arg in ("out", "inplace") and not _is_nothing(scan, keyword.value)):
            return Effects({OVER})
    return NONE


def _is_nothing(scan: Any, e: ast.expr) -> bool:
    """Whether an argument is False or None; in settled code also what the module gives now."""
    value = e.value if isinstance(e, ast.Constant) else _value(scan, e) if scan.settled else MISSING
    return value is None or value is False


def _value(scan: Any, e: ast.expr) -> Any:
    """What a name, or an attribute of the module, means; MISSING for a local and for a method of a value."""
    if scan.module is not None and scan._of_self(e):
        if _is_own(scan, e) and e.attr in scan.members:  # type: ignore[attr-defined]
            return MISSING
        own = scan.path(e)
        inner = scan._at(e) if own is MISSING else own
        return inner if own is not MISSING or isinstance(inner, nn.Module) else MISSING
    root = e
    while isinstance(root, ast.Attribute | ast.Subscript):
        root = root.value
    if not isinstance(root, ast.Name) or root.id == scan.self_name:
        return MISSING
    if root.id in scan.locals:
        return MISSING
    value = source.resolve(e, scan.function)
    if value is MISSING and isinstance(e, ast.Attribute):  # Tensor.matmul
        owner = source.resolve(e.value, scan.function)
        return getattr(Tensor, e.attr, MISSING) if owner is Tensor else MISSING
    return value


def _of_value(scan: Any, value: Any, call: ast.Call) -> Effects:
    """A call of a function, of a class or of another object."""
    known = value in _OF_PYTHON or value in _ASKS if isinstance(value, type | types.BuiltinFunctionType) else False
    if known:
        return ALL if any(k.arg == "key" for k in call.keywords) else NONE
    if spelling.settled(call, scan.function):  # a module of PyTorch's that is a function with settings
        return NONE
    if isinstance(value, torch.jit.ScriptFunction):
        value = source.unscripted(value)
    if type(value) is functools.partial:
        given = [ast.Constant(v) for v in value.args]
        named = [ast.keyword(n, ast.Constant(v)) for n, v in value.keywords.items()]
        whole = ast.Call(call.func, [*given, *call.args], [*named, *call.keywords])
        return _of_keywords(scan, whole) | _of_value(scan, value.func, whole)
    if isinstance(value, types.MethodType):
        value = unbound(value)
    callables = (
        types.FunctionType | types.BuiltinFunctionType | types.MethodDescriptorType | types.WrapperDescriptorType
    )
    if not isinstance(value, callables):
        return ALL
    owner = getattr(value, "__objclass__", None)
    home = getattr(value, "__module__", None) or ("torch" if owner in (Tensor, torch._C.TensorBase) else "")
    if home in _HOMES or home.startswith("torch._C"):
        return _of_torch(scan, value, call)
    if trusted(value) or not isinstance(value, types.FunctionType):
        return ALL
    return of_function(scan, value, None)


def _of_torch(scan: Any, value: Any, call: ast.Call) -> Effects:
    name = value.__name__
    if _TAKES.fullmatch(name):  # what it calls is not known
        return ALL
    if name == "scaled_dot_product_attention":
        named = (k for k in call.keywords if k.arg is None or k.arg.startswith("dropout"))
        given = [*call.args[4:5], *(k.value for k in named)]
        nothing = all(isinstance(e, ast.Constant) and type(e.value) in (int, float) and e.value == 0 for e in given)
        return NONE if nothing and not any(isinstance(a, ast.Starred) for a in call.args) else Effects({DRAWS})
    over = name.endswith("_") or _OVER.fullmatch(name) is not None
    for word in ("inplace", "max_norm"):  # it writes over its input, or over rows of a weight that are too long
        place = _place_of(value, word)
        if place is not None:
            starred = any(isinstance(a, ast.Starred) for a in call.args[: place + 1])
            given = [*call.args[place : place + 1], *(k.value for k in call.keywords if k.arg in (word, None))]
            over = over or starred or any(not _is_nothing(scan, e) for e in given)
    takes = any(isinstance(a, ast.Lambda) for a in call.args)  # functions, which it may call
    return ALL if takes else Effects({OVER} if over else ()) | Effects({DRAWS} if _draws(name.rstrip("_")) else ())


@functools.cache
def _place_of(value: Any, word: str) -> int | None:
    """Where a function takes an argument of this name."""
    code = getattr(value, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return names.index(word) if word in names else None


def of_child(scan: Any, func: ast.expr, child: nn.Module) -> Effects:
    """A call of a module: nothing of one that is proven free of effects, of a dropout that it draws."""
    path = attribute_of(func, scan.self_name)
    free = path is not None and path in scan.free
    if path is None or scan.strict or not (free or ("." not in path and is_plain_child(child))):
        return ALL
    scan.relied.add(path)
    if free or not isinstance(child, nn.Dropout):
        return NONE
    return Effects({DRAWS, OVER} if child.inplace else {DRAWS})


def _of_member(scan: Any, name: str) -> Effects:
    scan.relied.add(name)
    member = scan.members.get(name)
    plain = isinstance(member, staticmethod)
    function = member.__func__ if isinstance(member, staticmethod | classmethod) else member
    if name in getattr(scan.module, "__dict__", {}) or isinstance(member, classmethod):
        return ALL
    return of_function(scan, function, None if plain else scan.module, not plain)


def _of_above(scan: Any, name: str) -> Effects:
    """``super().name``."""
    cells = dict(zip(scan.function.__code__.co_freevars, scan.function.__closure__ or (), strict=True))
    here = source.content(cells["__class__"]) if "__class__" in cells else None
    order = scan.kind.__mro__ if isinstance(scan.kind, type) else ()
    for base in order[order.index(here) + 1 :] if here in order else ():
        if name in vars(base):
            return of_function(scan, vars(base)[name], scan.module, True)
    return ALL


def _enters(scan: Any, inner: ast.AST) -> bool:
    """Whether a function of the block's own calls itself."""
    return id(inner) in scan.entered


def _of_inner(scan: Any, inner: ast.FunctionDef | ast.Lambda) -> Effects:
    scan.entered.add(id(inner))
    try:
        body = inner.body if isinstance(inner.body, list) else [inner.body]
        return Effects().union(*(of(scan, statement) for statement in body))
    finally:
        scan.entered.discard(id(inner))


def of_function(scan: Any, function: Any, module: Any, method: bool | None = None) -> Effects:
    """What another function may do, by its source. module: whose method it is."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return ALL
    method = module is not None if method is None else method
    key = function, method, scan.strict
    if key not in scan.judged:
        scan.judged[key] = ALL, frozenset()  # where it comes to itself
        scan.judged[key] = _judged(scan, function, module, method)
    known: Effects
    known, relied = scan.judged[key]
    scan.relied |= relied
    return known


def _judged(scan: Any, function: types.FunctionType, module: Any, method: bool) -> tuple[Effects, frozenset[str]]:
    """(what it may do, the children that it relies on)."""
    tree = source.parsed(function)
    names = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)] if tree is not None else []
    if tree is None or (method and not names):
        return ALL, frozenset()
    other = scan.within(function, tree, names[0] if method else None, module)
    new = _new_here(other) - {*names}
    may = NONE.union(*(of(other, statement, None, _written_by(statement, new)) for statement in tree.body))
    return may, frozenset(other.relied)


def _written_by(statement: ast.stmt, new: set[str]) -> str:
    """The one new tensor that a statement names, if it names one: what it may write over."""
    named = {n.id for n in ast.walk(statement) if isinstance(n, ast.Name)} & new
    return next(iter(named)) if len(named) == 1 else ""


def _new_here(scan: Any) -> set[str]:
    """Locals that are always new tensors."""
    named = Counter(n.id for n in ast.walk(scan.tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store))
    stores = [n for n in ast.walk(scan.tree) if isinstance(n, ast.Assign) and not _of_own(scan, n.value)]
    names = (filling.name_made(n, scan.function) for n in stores)
    return {name for name in names if name is not None and named[name] == 1}


def _of_own(scan: Any, e: ast.expr) -> bool:
    """Whether it calls something of the module's."""
    return isinstance(e, ast.Call) and scan._of_self(e.func)
