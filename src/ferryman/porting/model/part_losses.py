"""What a part that is a mean loss of class numbers may have in it."""

from __future__ import annotations

import ast

# What a mean loss of class numbers is made of, and nothing that asks which numbers they are
LOSSES = {"nll_loss", "logsumexp", "log_softmax"}
OF_LOSSES = {
    *(*LOSSES, "", "gather", "squeeze", "unsqueeze", "view", "reshape", "flatten", "size", "mean", "sum", "neg"),
    *("Sub", "Div", "Add", "Mult", "float", "exp", "log", "take_along_dim", "arange"),
}


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
