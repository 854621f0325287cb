"""Children of PyTorch's own whose call is one of a function of what they have, which a part may have in it."""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Mapping, Set
from typing import Any

from torch import Tensor, nn

from ferryman.porting.model import source, spelling
from ferryman.porting.model.trace import trusted

_OF_PYTHON = (len, int, float, bool, tuple, list, range, slice, min, max, abs, sum, enumerate, zip, isinstance)
_MAKES = re.compile(r"(new_)?(empty|zeros|ones|full)(_like)?|clone")
_DRAWS = re.compile(r".*dropout.*|rand.*|.*seed.*|.*rng.*|bernoulli|multinomial|normal|rrelu|gumbel_softmax|poisson")
_OTHERS = {
    "add",
    "sort",
    "backward",
    "register_hook",
    "retain_grad",
}  # a set's, a list's, or that change a tensor's state
DROPS = ".training and {}.p > 0"  # of a dropout, which a part has where it changes nothing


# PyTorch's own modules: the function that each calls of what it is given, and what of its own
CHILDREN: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Conv1d: ("torch.nn.functional.conv1d", ("weight", "bias", "stride", "padding", "dilation", "groups")),
    nn.ConstantPad1d: ("torch.nn.functional.pad", ("padding", "'constant'", "value")),
    nn.ZeroPad1d: ("torch.nn.functional.pad", ("padding", "'constant'", "value")),
    nn.Softmax: (f"torch.nn.functional.{nn.functional.softmax.__name__}", ("dim",)),
    nn.Dropout: ("torch.nn.functional.dropout", ("0.5", DROPS)),
}


def is_own(argument: str) -> bool:
    """Whether an argument in `CHILDREN` is read of the child."""
    return argument.isidentifier() or argument == DROPS


def text_of(child: str, argument: str) -> str:
    return f"{child}{DROPS.format(child)}" if argument == DROPS else f"{child}.{argument}"


def is_plain_child(child: Any) -> bool:
    """Whether a call of a module is one of `CHILDREN`'s functions of what it has, and nothing else."""
    plain = type(child) in CHILDREN and getattr(child, "padding_mode", "zeros") == "zeros"
    return plain and source.untouched(child)


def given_by(owner: Any, name: str) -> Any:
    """A plain attribute; source.MISSING for what a property, or another's `__getattr__`, gives."""
    declared = getattr(type(owner), name, source.MISSING)
    if hasattr(type(declared), "__get__") or isinstance(owner, types.ModuleType | Tensor):
        return source.MISSING
    if isinstance(owner, nn.Module):
        for names in (owner.__dict__, owner._parameters, owner._buffers, owner._modules):
            if name in names:
                return names[name]
        return declared if type(declared) is dict else source.MISSING  # a table of the class
    reads: Any = type(owner).__getattribute__
    if reads is not object.__getattribute__ or hasattr(type(owner), "__getattr__"):
        return source.MISSING
    return vars(owner)[name] if name in getattr(owner, "__dict__", {}) else declared


def is_super(e: ast.expr) -> bool:
    return isinstance(e, ast.Call) and isinstance(e.func, ast.Name) and e.func.id == "super" and not e.args


def reached_from(name: str, members: Mapping[str, Any]) -> set[str]:
    """All names in the code of a method, and of the methods and properties that it comes to."""
    pending, reached = [name], set[str]()
    while pending:
        one = pending.pop()
        if one not in reached:
            reached.add(one)
            codes = source.codes_of(inner) if (inner := _function_of(members.get(one))) is not None else ()
            pending += [n for code in codes for n in code.co_names]
    return reached


def only_computes(name: str, members: Mapping[str, Any], children: frozenset[str], fresh: frozenset[str]) -> bool:
    """Whether a method comes to functions of PyTorch, to children that change nothing, and to nothing else, and writes
    over nothing."""
    reached = reached_from(name, members)
    return reached & children <= fresh and all(
        _computes(members[n], fresh | members.keys()) for n in reached & members.keys()
    )


def _function_of(member: Any) -> types.FunctionType | None:
    inner = source.innermost(getattr(member, "__func__", member)) if callable(member) else None
    return inner if isinstance(inner, types.FunctionType) else None


def _computes(member: Any, own: Set[str]) -> bool:
    function = _function_of(member)
    if function is None:
        return not hasattr(type(member), "__get__")
    tree = source.parsed(function) if function is getattr(member, "__func__", member) else None
    if tree is None:
        return False
    arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args)]
    self_name = "" if isinstance(member, staticmethod) or not arguments else arguments[0]
    mine = _new_here(tree) - set(arguments)
    for node in ast.walk(tree):
        stores = isinstance(node, ast.Attribute | ast.Subscript) and not isinstance(node.ctx, ast.Load)
        if stores and isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name) and node.value.id in mine:
            continue
        if stores or spelling.in_place(node) or isinstance(node, ast.Await | ast.Yield | ast.YieldFrom | ast.Global):
            return False
        if isinstance(node, ast.Call) and not _is_known(node.func, self_name, function, own):
            return False
    return True


def _new_here(tree: ast.FunctionDef) -> set[str]:
    """Locals that are always new tensors."""
    new = dict[str, bool]()
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            new.setdefault(node.id, False)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            call = node.value.func if isinstance(node.value, ast.Call) else None
            makes = isinstance(call, ast.Attribute) and bool(_MAKES.fullmatch(call.attr))
            stored = [n for n in ast.walk(tree) if isinstance(n, ast.Name) and n.id == node.targets[0].id]
            new[node.targets[0].id] = makes and sum(isinstance(n.ctx, ast.Store) for n in stored) == 1
    return {name for name, always in new.items() if always}


def _is_known(func: ast.expr, self_name: str, function: types.FunctionType, own: Set[str]) -> bool:
    """A function of PyTorch or of Python that only computes, a method of a value, or what `reached_from` follows."""
    value = source.resolve(func, function)
    if value is not source.MISSING:
        if not isinstance(value, types.BuiltinFunctionType | types.FunctionType):
            return value in _OF_PYTHON
        home, name = getattr(value, "__module__", None) or "", value.__name__
        plain = trusted(value) and home != "builtins" and not home.startswith("torch.distributed")
        return value in _OF_PYTHON or (plain and not (name.endswith("_") or _DRAWS.fullmatch(name)))
    if not isinstance(func, ast.Attribute) or func.attr.startswith("_"):
        return False
    owner = func.value
    if isinstance(owner, ast.Name) and owner.id == self_name:
        return func.attr in own
    if not hasattr(Tensor, func.attr) or func.attr in _OTHERS or _DRAWS.fullmatch(func.attr):
        return False
    return self_name not in [n.id for n in ast.walk(owner) if isinstance(n, ast.Name)] or isinstance(owner, ast.Call)
