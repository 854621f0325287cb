"""Tests of the kind of device that a tensor is on, in methods and functions that a module without tensors comes to.

A proof runs on one kind of device, and saw such a test come out one way. All that such a module computes with lies
where its inputs do, or where PyTorch makes tensors of itself: a call asks of both that the test comes out that way.
"""

from __future__ import annotations

import ast
from typing import Any

from torch import nn

from ferryman.porting.model import source
from ferryman.porting.model.leaf import inputs_of

_PLACES = ("{}.device.type", "torch.get_default_device().type")


def guards(node: ast.expr, module: nn.Module | None, parameters: set[str], stored: dict[str, int]) -> list[str]:
    """What a call asks in the place of a test, each to come out as that did; none where it is no such test. parameters:
    of the function that it stands in; stored: the lines from which a name has another value."""
    kind = _asked(node)
    if module is None or kind is None or kind not in parameters or kind in stored:
        return []
    forward: Any = type(module).forward
    if any(True for _ in (*module.parameters(), *module.buffers())) or "torch" in source.locals_of(
        source.innermost(forward)
    ):
        return []
    inputs = inputs_of(type(module))
    assert isinstance(node, ast.Compare)
    rest = ast.unparse(ast.Compare(ast.Name("_", ast.Load()), node.ops, node.comparators)).removeprefix("_")
    return [place.format(inputs[0]) + rest for place in _PLACES] if inputs else []


def _asked(node: ast.expr) -> str | None:
    """The name whose device's kind is compared with a word, or with words; None of any other test."""
    left: Any = node.left if isinstance(node, ast.Compare) and len(node.ops) == 1 else None
    of = left.value if isinstance(left, ast.Attribute) and left.attr == "type" else None
    owner = of.value if isinstance(of, ast.Attribute) and of.attr == "device" else None
    if not isinstance(owner, ast.Name) or not isinstance(node, ast.Compare):
        return None
    given = node.comparators[0]
    several = isinstance(node.ops[0], ast.In | ast.NotIn) and isinstance(given, ast.Tuple | ast.List)
    words = given.elts if several else [given]  # type: ignore[attr-defined]
    plain = several or isinstance(node.ops[0], ast.Eq | ast.NotEq)
    known = plain and all(isinstance(w, ast.Constant) and isinstance(w.value, str) for w in words)
    return owner.id if known else None
