"""Children of PyTorch's own whose call is one of a function of what they have, which a part may have in it."""

from __future__ import annotations

import ast
import types
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from ferryman.porting.model import reading, source

DROPS = ".training and {}.p > 0"  # of a dropout, which a part has where it changes nothing


# PyTorch's own modules: the function that each calls of what it is given, and what of its own
CHILDREN: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Conv1d: ("torch.nn.functional.conv1d", ("weight", "bias", "stride", "padding", "dilation", "groups")),
    nn.ConstantPad1d: ("torch.nn.functional.pad", ("padding", "'constant'", "value")),
    nn.ZeroPad1d: ("torch.nn.functional.pad", ("padding", "'constant'", "value")),
    nn.Softmax: (f"torch.nn.functional.{nn.functional.softmax.__name__}", ("dim",)),
    nn.Dropout: ("torch.nn.functional.dropout", ("0.5", DROPS)),
}

# and those whose matrix a part reads where it goes on with what they give
MATRICES: dict[type[nn.Module], tuple[str, tuple[str, ...]]] = {
    nn.Linear: (f"torch.nn.functional.{nn.functional.linear.__name__}", ("weight", "bias")),
}
_FORWARDS = {kind: kind.forward for kind in MATRICES}


def is_own(argument: str) -> bool:
    """Whether an argument in `CHILDREN` is read of the child."""
    return argument.isidentifier() or argument == DROPS


def text_of(child: str, argument: str) -> str:
    return f"{child}{DROPS.format(child)}" if argument == DROPS else f"{child}.{argument}"


def is_plain_child(child: Any) -> bool:
    """Whether a call of a module is one of `CHILDREN`'s functions of what it has, and nothing else."""
    plain = type(child) in CHILDREN and getattr(child, "padding_mode", "zeros") == "zeros"
    return plain and source.untouched(child)


def is_matrix_child(child: Any) -> bool:
    """Whether a call of a module, ported or not, is one of `MATRICES`' functions of what it has, and nothing else."""
    kind = vars(type(child)).get("ferryman_original", type(child))
    plain = kind in MATRICES and kind.forward is _FORWARDS[kind] and kind.__call__ is nn.Module.__call__
    return plain and source.untouched(child)


def function_of(child: Any) -> tuple[str, tuple[str, ...], str]:
    """(the function that such a child calls, of what of its own, the test that it still does)."""
    kind = vars(type(child)).get("ferryman_original", type(child))
    matrix = kind in MATRICES
    function, arguments = (MATRICES if matrix else CHILDREN)[kind]
    return function, arguments, "ferryman_matrix" if matrix else "ferryman_child"


TESTS = {"ferryman_child": is_plain_child, "ferryman_matrix": is_matrix_child}


def given_by(owner: Any, name: str) -> Any:
    """A plain attribute; source.MISSING for what a property, or another's `__getattr__`, gives, and where the class's
    code for reading one may do more than read (`reading`)."""
    declared = getattr(type(owner), name, source.MISSING)
    if hasattr(type(declared), "__get__") or isinstance(owner, types.ModuleType | Tensor):
        return source.MISSING
    if isinstance(owner, nn.Module):
        for names in (owner.__dict__, owner._parameters, owner._buffers, owner._modules):
            if name in names:
                return names[name]
        return declared if type(declared) is dict else source.MISSING  # a table of the class
    kind: Any = type(owner)
    if kind.__getattribute__ is not object.__getattribute__:
        return reading.attribute(owner, name)
    if hasattr(kind, "__getattr__"):
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


def _function_of(member: Any) -> types.FunctionType | None:
    inner = source.innermost(getattr(member, "__func__", member)) if callable(member) else None
    return inner if isinstance(inner, types.FunctionType) else None
