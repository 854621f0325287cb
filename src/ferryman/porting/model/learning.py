"""Which locals of a method may need a gradient, by its syntax tree: those made of its first argument or of a child's
result. What it is given beside (masks, lengths) is taken to need none."""

from __future__ import annotations

import ast
from collections.abc import Collection

_FACTS = {"shape", "dtype", "device", "ndim"}  # of a tensor, not its numbers
_STORES = ast.Assign | ast.AugAssign | ast.AnnAssign | ast.NamedExpr
_ASKED = {"size", "dim", "detach", "numel"}


def learnt(
    tree: ast.FunctionDef, self_name: str | None, methods: Collection[str], holder: bool = False
) -> frozenset[str]:
    """Names of locals. methods: attributes of self that are methods of its class, whose result is what they are given;
    any other attribute that is called is a child. holder: the first argument is a module that holds children, and the
    one behind it counts as the first."""
    arguments = [a.arg for a in (*tree.args.posonlyargs, *tree.args.args) if a.arg != self_name]
    names = set(arguments[1:2] if holder else arguments[:1])
    before = -1
    while len(names) != before:
        before = len(names)
        for node in ast.walk(tree):
            if not isinstance(node, _STORES) or node.value is None:
                continue
            if learns(node.value, names, self_name, methods):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {n.id for t in targets for n in ast.walk(t) if isinstance(n, ast.Name)}
    return frozenset(names - {self_name or ""})


def learns(value: ast.expr, names: Collection[str], self_name: str | None, methods: Collection[str]) -> bool:
    """Whether an expression's value may need a gradient. names: those whose value does."""
    if isinstance(value, ast.Name):
        return value.id in names
    if isinstance(value, ast.Attribute) and value.attr in _FACTS:
        return False
    if isinstance(value, ast.Compare | ast.Constant | ast.Lambda):
        return False
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        if value.func.attr in _ASKED:
            return False
        owner = value.func.value
        if isinstance(owner, ast.Name) and owner.id == self_name and value.func.attr not in methods:
            return True
    return any(
        learns(n, names, self_name, methods) for n in ast.iter_child_nodes(value) if isinstance(n, ast.expr)
    ) or (isinstance(value, ast.Call) and any(learns(k.value, names, self_name, methods) for k in value.keywords))
