"""What only hands on what it is called with: a module made of a function, a decorator."""

from __future__ import annotations

import ast
import functools
import types
from typing import Any

from torch import nn

from ferryman.dispatch.proposals import proposals
from ferryman.porting.model import source


def handed_on(module: Any) -> types.FunctionType | None:
    """The function to which a module without tensors or children hands whatever it is called with.

    Libraries make such modules of functions, so that the forward may be replaced on the instance.
    """
    if not isinstance(module, nn.Module) or module._parameters or module._buffers or module._modules:
        return None
    forward = type(module).forward
    tree = source.parsed(forward)
    if tree is None or len(tree.body) != 1 or not isinstance(tree.body[0], ast.Return):
        return None
    call, given = tree.body[0].value, tree.args
    plain = len(given.args) == 1 and not given.posonlyargs and not given.kwonlyargs
    if not isinstance(call, ast.Call) or not plain or given.vararg is None or given.kwarg is None:
        return None
    if ast.unparse(ast.Tuple([*call.args, *(k.value for k in call.keywords)], ast.Load())) != (
        f"(*{given.vararg.arg}, {given.kwarg.arg})"
    ) or [k.arg for k in call.keywords] != [None]:
        return None
    function = source.resolve(call.func, forward) if isinstance(forward, types.FunctionType) else source.MISSING
    return function if isinstance(function, types.FunctionType) else None


def passes_on(wrapper: Any) -> bool:
    """Whether a decorator's function only hands what it is called with to what it wraps."""
    tree = source.parsed(wrapper)
    body = tree.body[-1] if tree is not None and tree.body else None
    if tree is None or not isinstance(body, ast.Return) or not isinstance(body.value, ast.Call):
        return False
    given, call = tree.args, body.value
    said = all(isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant) for s in tree.body[:-1])
    if not said or given.args or given.posonlyargs or given.kwonlyargs or given.vararg is None or given.kwarg is None:
        return False
    wanted = f"{ast.unparse(call.func)}(*{given.vararg.arg}, **{given.kwarg.arg})"
    return ast.unparse(call) == wanted and source.resolve(call.func, wrapper) is wrapper.__wrapped__


def readable(function: types.FunctionType) -> bool:
    """Whether calls in a function's own code may be served: any but PyTorch's, of which ops name those that may."""
    theirs = (function.__module__ or "").split(".")[0] == "torch"
    return not theirs or function in _followed()


def follows(value: Any) -> bool:
    """Whether it is one of PyTorch's functions whose own code may be served."""
    return isinstance(value, types.FunctionType) and value in _followed()


@functools.cache
def _followed() -> frozenset[Any]:
    return frozenset(proposals("followed"))
