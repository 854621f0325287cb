"""Products whose weight is computed of several tensors of the module's, such as a direction and its length, what is
added to another, or what is joined: proven as those of a module that has it, and given it as a value. Of one tensor
that is changed, it stays what it is: nearly a layer of that tensor."""

from __future__ import annotations

import ast
import re
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.model import recognise
from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part import Part
from ferryman.porting.model.part_shape import PRODUCTS
from ferryman.porting.model.recognise import Role

_PRODUCTS = PRODUCTS | {f.__name__ for f in (torch.mm, torch.addmm, torch.tensordot, torch.nn.functional.linear)}


def of_weights(
    proving: Any, root: Node, leaves: tuple[Node, ...], mine: tuple[Node, ...], plain: ast.FunctionDef
) -> Part | None:
    """A part of one value that flows and of ``mine``, which do not."""
    labels = {n.label for n in root.inside(frozenset(leaves))}
    if not labels & _PRODUCTS or not any(_of_several(n) for n in mine):
        return None
    alone = tuple(n for n in leaves if n not in mine)
    names = [f"ferryman_w{i}" for i in range(len(mine))]
    me = ast.Name(proving.self_name or "ferryman_self", ast.Load())
    read = {node: ast.Attribute(me, name, ast.Load()) for node, name in zip(mine, names, strict=True)}
    tree, own = proving.function_of(root, alone, True, read)
    for node, name in zip(mine, names, strict=True):
        value = _value(proving, node)
        if value is None or not value.is_floating_point() or not 0 < value.dim() < 3:
            return None
        own[name] = Node("self", read[node], value=value)
    module = proving.module_of(tree, own, (0,))
    role = None if module is None else recognise.role_of(module)
    if module is None or not isinstance(role, Role):
        return None
    given = iter(names)
    called = [next(given) if n in mine else role.inputs[0] for n in leaves]
    guards = (f"bool({text}) is {outcome}" for text, outcome in role.guards)
    same = proving.same(module, {alias: n for alias, n in own.items() if alias not in names})
    tests = (*same, *role.tests, *(re.sub(rf"\b{role.parameters[0]}\b", role.inputs[0], text) for text in guards))
    forms = [(tests, role.expression)]
    part: Part | None = proving.part_of(
        role.op, plain, own, called, forms, role.gradient, module, role.reads, frozenset(names)
    )
    return part


def _of_several(node: Node) -> bool:
    """Of floating tensors alone: what is packed stays a quantised layer's."""
    tensors = {ast.unparse(n.tree): n.value for n in node.inside(frozenset()) if isinstance(n.value, Tensor)}
    return len(tensors) > 1 and all(t.is_floating_point() for t in tensors.values())


def _value(proving: Any, node: Node) -> Tensor | None:
    """What is computed of the module's tensors, now."""
    tree, own = proving.function_of(node, (), True)
    module = proving.module_of(tree, own, ())
    with torch.no_grad():
        value = None if module is None else module()
    return value.detach() if isinstance(value, Tensor) else None
