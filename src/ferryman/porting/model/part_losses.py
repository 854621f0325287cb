"""What a part that is a mean loss of class numbers may have in it."""

from __future__ import annotations

import ast
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.porting.model import source
from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part_shape import PRODUCTS

# What a mean loss of class numbers is made of, and nothing that asks which numbers they are
LOSSES = {"nll_loss", "logsumexp", "log_softmax"}
OF_LOSSES = {
    *(*LOSSES, "", "gather", "squeeze", "unsqueeze", "view", "reshape", "flatten", "size", "mean", "sum", "neg"),
    *("Sub", "Div", "Add", "Mult", "float", "exp", "log", "take_along_dim", "arange"),
}

# Those of PyTorch's that are a whole loss, which a part may have behind the product that gives the scores
WHOLE = {functional.cross_entropy.__name__, "nll_loss"}
_MATRICES = PRODUCTS | {functional.linear.__name__, "mm", "addmm"}
_MOVES = {"", "view", "reshape", "flatten", "size", "squeeze", "unsqueeze", "float", "to", "type_as", "contiguous"}
_OF_JOINED = WHOLE | _MATRICES | _MOVES | {"log_softmax", "t", "transpose", "permute", "Mult", "numel"}


_CASTS = {"float", "to", "type_as"}
# of a loss that is written out with the square of each row's log-sum-exp
SUMS = torch.logsumexp.__name__
_SQUARES = {torch.square.__name__, "pow", "Pow"}
_OF_WRITTEN = _OF_JOINED | OF_LOSSES | _SQUARES


def is_loss(inside: Iterable[Node]) -> bool:
    """Whether a part may be a mean loss of class numbers."""
    labels = {n.label for n in inside}
    return bool(labels & LOSSES) and labels <= OF_LOSSES


def is_any(inside: Iterable[Node]) -> bool:
    """Whether a part may be a loss of either kind, of which arguments may say how it is taken."""
    nodes = list(inside)
    return is_loss(nodes) or joins(nodes)


def joins(inside: Iterable[Node]) -> bool:
    """Whether a part is one product with one matrix of the module's, whose result has their dtype, and a whole loss of
    what that gives, or one that is written out with a square of its log-sum-exp."""
    nodes = list(inside)
    labels = {n.label for n in nodes if n.kind == "op"}
    matrices = {
        ast.unparse(n.tree) for n in nodes if n.kind == "self" and isinstance(n.value, Tensor) and n.value.dim() == 2
    }
    one, whole = (sum(n.label in some for n in nodes) for some in (_MATRICES, WHOLE))
    written = not whole and _squares(labels) and labels <= _OF_WRITTEN
    if one != 1 or len(matrices) != 1 or not (written or (whole == 1 and labels <= _OF_JOINED)):
        return False
    product = next(n for n in nodes if n.label in _MATRICES)
    return not any(n.label in _CASTS for n in product.inside(frozenset()) if n in nodes)


def may_end(root: Node) -> bool:
    """Whether a node may be such a loss."""
    if root.label in WHOLE:
        return True
    sums = root.kind == "op" and root.label in OF_LOSSES and not isinstance(root.tree, ast.Subscript | ast.Tuple)
    return sums and _squares({n.label for n in root.inside(frozenset())})


def _squares(labels: set[str]) -> bool:
    return SUMS in labels and bool(labels & _SQUARES)


def ignored(tree: ast.FunctionDef, own: dict[str, Node]) -> tuple[int, ...] | None:
    """The numbers of rows that do not count, where a part says them; None where it says them otherwise, or elsewhere,
    or says more of its loss by place. One below zero is no length, and may be an axis, too."""
    numbers: list[int] = []
    for call in (n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        given = {k.arg: k.value for k in call.keywords}
        if None in given or (_is_loss(call, own) and len(call.args) > 2):
            return None
        at = given.get("ignore_index")
        value = None if at is None else _number(at, own)
        if at is not None and value is None:
            return None
        numbers += [] if value is None else [value]
    said = [_number(n, own) for n in ast.walk(tree) if isinstance(n, ast.Constant | ast.UnaryOp | ast.Attribute)]
    return None if any(n >= 0 and said.count(n) > 1 for n in numbers) else tuple(numbers)


def called(tree: ast.FunctionDef, function: types.FunctionType) -> dict[str, Node] | None:
    """The functions that a part calls by names of its file, which are to mean at each call what they do; None where
    such a name is none of the file's own."""
    known: dict[str, Node] = {}
    for i, call in enumerate(n for n in ast.walk(tree) if isinstance(n, ast.Call)):
        value = source.resolve(call.func, function)
        if value is not source.MISSING:
            first = next(n.id for n in ast.walk(call.func) if isinstance(n, ast.Name))
            if first not in function.__globals__:
                return None
            known[f"ferryman_called_{i}"] = Node("self", call.func, value=value)
    return known


def _is_loss(call: ast.Call, own: dict[str, Node]) -> bool:
    name: Any = getattr(call.func, "attr", getattr(call.func, "id", ""))
    return name in WHOLE or (name in own and getattr(own[name].value, "__name__", "") in WHOLE)


def _number(e: ast.expr, own: dict[str, Node]) -> int | None:
    value = own[e.attr].value if isinstance(e, ast.Attribute) and e.attr in own else None
    if value is None:
        try:
            value = ast.literal_eval(e)
        except ValueError:
            return None
    return value if type(value) is int else None


def only_numbers(own: dict[str, Node]) -> bool:
    """Whether it reads nothing of the module but such as how much is smoothed."""
    return all(type(node.value) is float for node in own.values())


def unasked(tree: ast.FunctionDef) -> bool:
    """Whether a loss counts every row: nothing is compared, and no number is one of a row that does not count."""
    asks = ast.Compare | ast.BoolOp | ast.IfExp
    named = {"weight", "size_average", "ignore_index", "reduce"}
    for node in ast.walk(tree):
        if isinstance(node, asks) or (isinstance(node, ast.keyword) and node.arg in named):
            return False
        loss = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("nll_loss")
        if loss and len(node.args) > 2:  # type: ignore[attr-defined]
            return False
    return True
