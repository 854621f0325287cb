"""What one node of a PyTorch graph says: its example, its function's plain name, what it keeps, who reads it."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

HALF = (torch.float16, torch.bfloat16)
FLOATS = (*HALF, torch.float32, torch.float64)
_MANTISSA = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
# Functions that move or select values and compute none.
VIEWS = frozenset(
    (
        "getitem",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "chunk",
        "split",
        "narrow",
        "cat",
        "concat",
        "stack",
        "flatten",
        "expand",
        "repeat_interleave",
        "contiguous",
        "view",
        "reshape",
        "mT",
        "T",
        "t",
        "expand_as",
        "unflatten",
        "swapaxes",
    )
)
CASTS = frozenset(["to", "float", "half", "bfloat16", "double", "type", "type_as"])
SAME = frozenset(["contiguous", "identity"])
_ALIASES = {
    "truediv": "div",
    "true_divide": "div",
    "multiply": "mul",
    "subtract": "sub",
    "divide": "div",
    "concat": "cat",
    "concatenate": "cat",
    "swapaxes": "transpose",
    "swapdims": "transpose",
    "negative": "neg",
    "logistic": "sigmoid",
    "expit": "sigmoid",
    "special_expit": "sigmoid",
    "special_erf": "erf",
    "vector_norm": "norm",
    "linalg_vector_norm": "norm",
}
_STATE = {"_set_grad_enabled", "_enter_autocast", "_exit_autocast", "_enter_inference_mode", "inference_mode"}
_IN_PLACE = (operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.setitem, operator.ipow)


def value(node: Any) -> Any:
    """A node's example; the thing itself where it is no node."""
    return node.meta.get("example_value", node.meta.get("val")) if isinstance(node, fx.Node) else node


def name_of(node: fx.Node) -> str:
    """The function's plain name: "mul" for ``a * b``, ``torch.mul`` and ``a.mul(b)``."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        if node.target is getattr and len(node.args) > 1:
            return str(node.args[1])
        name = getattr(node.target, "__name__", "")
        if name == "__get__":  # a property of a tensor
            return str(getattr(getattr(node.target, "__self__", None), "__name__", ""))
    else:
        return ""
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
    name = name.removeprefix("_") if name in ("_softmax",) else name
    return _ALIASES.get(name, name)


def hinted(item: Any) -> float | None:
    """A number: of one that is an argument of the compiled function, what it was when the graph was made."""
    if isinstance(item, torch.SymFloat):
        return float(item.node.hint) if item.node.hint is not None else None
    return float(item) if isinstance(item, (int, float)) and not isinstance(item, bool) else None


def widening(node: fx.Node) -> bool:
    """A cast, or nothing, that keeps every value of a float tensor."""
    if name_of(node) in SAME:
        return True
    if name_of(node) not in CASTS or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    before, after = value(node.args[0]), value(node)
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype or widens(before.dtype, after.dtype)


def widens(before: torch.dtype, after: torch.dtype) -> bool:
    if before not in _MANTISSA or after not in _MANTISSA:
        return False
    return after in (torch.float32, torch.float64) and _MANTISSA[after] >= _MANTISSA[before]


def uses(node: fx.Node) -> int:
    """How often a value is read, casts that keep it counted as itself."""
    total = 0
    for user in node.users:
        if widening(user):
            total += uses(user)
        else:
            total += sum(1 for item in user.all_input_nodes if item is node)
            total += sum(1 for a in user.args if a is node) > 1  # x * x reads it twice
    return total


def disturbs(node: fx.Node) -> bool:
    """Whether a node writes over a tensor, or changes a mode, so that no computation may be moved past it."""
    if node.op == "call_method":
        return str(node.target).endswith("_") and not str(node.target).endswith("__")
    if node.op != "call_function":
        return False
    name = getattr(node.target, "__name__", "")
    if node.target in _IN_PLACE or name in _STATE or node.kwargs.get("inplace") or "out" in node.kwargs:
        return True
    if getattr(node.target, "__module__", "") == "_operator":
        return False  # and_, or_, not_
    schema = getattr(node.target, "_schema", None)
    return (name.endswith("_") and not name.endswith("__")) or bool(schema is not None and schema.is_mutable)
