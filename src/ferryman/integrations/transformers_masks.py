"""Whether a model's own code works on the attention mask that it hands on.

Our mask function leaves the mask out wherever causality and a window say it all. Code that joins, pads or adds to one
wants the mask that its implementation has always made.
"""

from __future__ import annotations

import ast
import functools
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from ferryman.porting.model import source
from ferryman.porting.model.trace import trusted

_HOME = "transformers.masking_utils"
_NAME = "attention_mask"
_MASK_MAKERS = ("sdpa", "eager")


_known: dict[Any, str] = {}  # a config's class -> the implementation whose masks code beside it expects, "" for none


def note(model: nn.Module, path: str, config: Any, before: str | None) -> None:
    """Remember the implementation that made masks for an attention module, if it, or a module around it that makes the
    mask, does more with one than to hand it on."""
    parts = path.split(".") if path else []
    kinds: list[Any] = [type(model.get_submodule(".".join(parts[:n]))) for n in range(len(parts) + 1)]
    kind: Any = type(config)
    if any(map(_class_works, kinds)):
        _known[kind] = before if before in _MASK_MAKERS else "sdpa"
    _known.setdefault(kind, _of_class(kind))


def expected(config: Any) -> str:
    """The implementation whose masks a config's model expects as they are; "" where it only hands them on.

    By the config's class, whose copies and whose models in another process are the same: the library keeps the code of
    a model in a module beside its config's.
    """
    kind: Any = type(config)
    if kind not in _known and not torch.compiler.is_compiling():
        _known[kind] = _of_class(kind)
    return _known.get(kind, "")


@functools.cache
def _of_class(kind: Any) -> str:
    name = kind.__module__.replace(".configuration_", ".modeling_")
    members = vars(sys.modules[name]).values() if name in sys.modules else ()
    kinds: list[Any] = [k for k in members if isinstance(k, type) and k.__module__ == name and issubclass(k, nn.Module)]
    if not any(map(_class_works, kinds)):
        return ""
    return "sdpa" if any(getattr(k, "_supports_sdpa", False) is True for k in kinds) else "eager"


@functools.cache
def _class_works(kind: Any) -> bool:
    for function in source.methods(kind).values():
        inner = source.innermost(function)
        tree = source.parsed(inner) if isinstance(inner, types.FunctionType) and _names_any(inner) else None
        if tree is not None and any(_worked_on(use, inner) for use in _uses(tree, inner)):
            return True
    return False


def _names_any(function: types.FunctionType) -> bool:
    """Whether code names what looks attention up, or what makes a mask: no other has a use, and a tree costs more."""
    names = {name for code in source.codes_of(function) for name in code.co_names}
    pending = [function.__globals__.get(name) for name in names]
    pending += [*map(source.content, function.__closure__ or ()), *(function.__defaults__ or ())]
    modules = set[int]()
    while pending:
        value = pending.pop()
        if value is ALL_ATTENTION_FUNCTIONS or getattr(value, "__module__", None) == _HOME:
            return True
        if isinstance(value, types.ModuleType) and id(value) not in modules:
            modules.add(id(value))
            makes = type(value) is not types.ModuleType or "__getattr__" in vars(value)  # what it is asked for
            if makes and (value.__package__ or "").partition(".")[0] != torch.__package__:
                return True
            pending += [vars(value).get(name) for name in names]
    return False


def _uses(tree: ast.FunctionDef, function: types.FunctionType) -> Iterator[list[ast.AST]]:
    """Each place that reads a mask of queries by keys, with the nodes around it, the nearest first: one that the
    function makes, from there on, or, where it looks attention up, the one that it is given."""
    names, first, nodes = set[str](), 0, list(ast.walk(tree))
    read = {n.id: n for n in nodes if isinstance(n, ast.Name)}
    if any(source.resolve(n, function) is ALL_ATTENTION_FUNCTIONS for n in read.values()):
        names.add(_NAME)
    else:
        assignments = [n for n in nodes if isinstance(n, ast.Assign) and _makes(n.value, function)]
        names |= {t.id for node in assignments for t in node.targets if isinstance(t, ast.Name)}
        first = min((node.end_lineno or 0 for node in assignments), default=0)
    if not names:
        return
    for node in nodes:
        alias = isinstance(node, ast.Assign) and isinstance(node.value, ast.Name) and node.value.id in names
        if isinstance(node, ast.Assign) and alias and node.lineno > first:
            names |= {t.id for t in node.targets if isinstance(t, ast.Name)}
    for use, line in _loads(tree, [], names):
        if line > first:
            yield use


def _loads(node: ast.AST, around: list[ast.AST], names: set[str]) -> Iterator[tuple[list[ast.AST], int]]:
    if isinstance(node, ast.Name) and node.id in names and isinstance(node.ctx, ast.Load):
        yield around, node.lineno
    for child in ast.iter_child_nodes(node):
        yield from _loads(child, [node, *around], names)


def _makes(value: ast.AST, function: types.FunctionType) -> bool:
    return any(_home(n.func, function) == _HOME for n in ast.walk(value) if isinstance(n, ast.Call))


def _home(node: ast.AST, function: types.FunctionType) -> str:
    return getattr(source.resolve(node, function), "__module__", None) or ""


def _worked_on(around: list[ast.AST], function: types.FunctionType) -> bool:
    """Whether what stands around a mask makes another tensor of it. A slice does not: it is read as it is, or None."""
    if isinstance(around[0], ast.Attribute | ast.BinOp | ast.UnaryOp):
        return True
    call = next((n for n in around if isinstance(n, ast.Call)), None)
    if call is None or not all(isinstance(n, ast.keyword | ast.List | ast.Tuple) for n in around[: around.index(call)]):
        return False
    called: Any = source.resolve(call.func, function)
    return called not in (isinstance, len) and trusted(called)
