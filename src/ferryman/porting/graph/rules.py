"""The table of rules: a function's plain name -> how a call of it becomes a term.

A rule knows one function of PyTorch. It gets the normal form so far, the node, and the call's arguments. None, or
`NoRuleError`, says that this call is beyond it. Dimensions are counted from the last one, so that a pattern traced on a
matrix fits tensors of any rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferryman.porting.graph.terms import Term

RULES: dict[str, Callable[..., Term | None]] = {}


class NoRuleError(Exception):
    """A call beyond what its rule knows."""


def rule(*names: str) -> Callable[[Callable[..., Term | None]], Callable[..., Term | None]]:
    def enter(function: Callable[..., Term | None]) -> Callable[..., Term | None]:
        for name in names:
            RULES[name] = function
        return function

    return enter


def axis_of(x: torch.Tensor, dim: Any) -> int:
    if isinstance(dim, (tuple, list)) and len(dim) == 1:
        dim = dim[0]
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise NoRuleError
    return dim - x.dim() if dim >= 0 else dim
