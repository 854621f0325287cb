"""Other spellings of a product and of a sum: `torch.mul(a, b)` is ``a * b``, and so on."""

from __future__ import annotations

import ast
import copy
import types
from typing import Any

import torch

from ferryman.porting.model import source

_OPERATORS: dict[Any, type[ast.operator]] = {torch.mul: ast.Mult, torch.multiply: ast.Mult, torch.add: ast.Add}


def operators(tree: ast.FunctionDef, function: types.FunctionType) -> ast.FunctionDef:
    """A copy of a function's tree in which such calls of two arguments are operators."""
    changed: ast.FunctionDef = _Operators(function).visit(copy.deepcopy(tree))
    return changed


class _Operators(ast.NodeTransformer):
    def __init__(self, function: types.FunctionType) -> None:
        self.own = function

    def visit_Call(self, node: ast.Call) -> ast.AST:
        self.generic_visit(node)
        plain = len(node.args) == 2 and not node.keywords and not any(isinstance(a, ast.Starred) for a in node.args)
        value = source.resolve(node.func, self.own) if plain and isinstance(node.func, ast.Attribute) else None
        kind = _OPERATORS.get(value) if isinstance(value, types.BuiltinFunctionType) else None
        return node if kind is None else ast.copy_location(ast.BinOp(node.args[0], kind(), node.args[1]), node)
