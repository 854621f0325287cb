"""What the proofs of parts ask of expressions, and of what these read of a module."""

from __future__ import annotations

import ast
import math
import re
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.model import flow
from ferryman.porting.model.nodes import Node


def named(text: str, names: dict[str, str]) -> str:
    """An expression with other names."""
    return re.sub(r"\bferryman_a\d+", lambda match: names[match[0]], text)


def tensors(own: dict[str, Node]) -> bool:
    return any(isinstance(n.value, Tensor) for n in own.values())


def child(call: ast.expr) -> str:
    """The path of a child that is called."""
    path = ast.unparse(call.func).partition(".")[2] if isinstance(call, ast.Call) else ""
    return re.sub(r"\[['\"]?(\w+)['\"]?\]", r".\1", path)


def reads_methods(tree: ast.FunctionDef, self_name: str | None, own: dict[str, Node]) -> bool:
    for node in ast.walk(tree):
        mine = isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == self_name
        if mine and node.attr not in own:  # type: ignore[attr-defined]
            return True
        if isinstance(node, ast.Name) and node.id == "super":
            return True
    return False


def is_plain(value: Any) -> bool:
    parts = value if isinstance(value, tuple) else (value,)
    return not isinstance(value, Tensor) and all(isinstance(p, flow.PLAIN) for p in parts)


def value_text(value: Any) -> str | None:
    """Code that gives a value again; None for what has none, such as a number of NumPy's or an enumeration's."""
    if type(value) is tuple:
        parts = [value_text(part) for part in value]
        return None if None in parts else f"({''.join(f'{part}, ' for part in parts)})"
    if type(value) is float and not math.isfinite(value):
        return f"float('{value}')"
    return repr(value) if type(value) in (bool, int, float, str, type(None), torch.dtype) else None
