"""What a part that is a mean loss of class numbers may have in it."""

from __future__ import annotations

import ast

from ferryman.porting.model.nodes import Node

# What a mean loss of class numbers is made of
LOSSES = {"nll_loss", "logsumexp", "log_softmax"}
OF_LOSSES = {
    *(*LOSSES, "", "gather", "squeeze", "unsqueeze", "view", "reshape", "flatten", "size", "mean", "sum", "neg"),
    *("Sub", "Div", "Add", "Mult", "float", "exp", "log", "take_along_dim", "arange", "masked_fill", "where", "ne"),
    *("to", "type_as", "fill"),
}


def unasked(tree: ast.FunctionDef, own: dict[str, Node]) -> bool:
    """Whether a loss counts every row, or all but those of a number that is no class: nothing else is compared, and no
    number is one of a row that does not count."""
    named = {"weight", "size_average", "ignore_index", "reduce"}
    for node in ast.walk(tree):
        if isinstance(node, ast.BoolOp | ast.IfExp) or (isinstance(node, ast.keyword) and node.arg in named):
            return False
        compared: list[ast.expr] = []
        if isinstance(node, ast.Compare):
            compared = [node.left, *node.comparators]
        elif isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in ("ne", "eq", "gt", "ge", "lt"):
            compared = [*node.args]
        if compared and not any(_negative(e, own) for e in compared):
            return False
        loss = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("nll_loss")
        if loss and len(node.args) > 2:  # type: ignore[attr-defined]
            return False
    return True


def _negative(e: ast.expr, own: dict[str, Node]) -> bool:
    """Whether it is a number below 0, written down or the module's."""
    if isinstance(e, ast.Attribute) and e.attr in own:
        value = own[e.attr].value
        return isinstance(value, int) and value < 0
    return isinstance(e, ast.UnaryOp) and isinstance(e.op, ast.USub) and isinstance(e.operand, ast.Constant)
