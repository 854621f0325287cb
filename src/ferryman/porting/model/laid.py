"""Results that lie in memory as those of a module's own code.

An op of rows gives a contiguous result. Code that is written out is element-wise at its end, and PyTorch's element-wise
functions keep the order of an input's dimensions: what follows may view the result, or ask how it lies. Of a module
whose code does so the op is called with views that have their dimensions in order, and its result is turned back.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.dispatch.order import back, order_in_memory

NAME = "ferryman_laid"


def laid(run: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """``run(*given)``, whose dimensions are in memory in the order of the first one's. given: tensors of one shape,
    (..., N); run: works on rows of N."""
    order = order_in_memory(given[0])
    if order is None:
        return run(*given)
    if order[-1] == len(order) - 1:
        return run(*(t.permute(order) for t in given)).permute(back(order))
    return run(*given).permute(order).contiguous().permute(back(order))


def expression_of(op: str, expression: str, inputs: Sequence[str]) -> str:
    """An expression over ``inputs`` by `laid`, for an op whose results are contiguous."""
    if registry.primitive(op).elementwise:
        return expression
    # names of its own: what stands for an input may become an expression (`turned`)
    inside = re.sub(rf"(?<![\w.])({'|'.join(inputs)})\b", r"ferryman_\1", expression)
    own, given = ", ".join(f"ferryman_{name}" for name in inputs), ", ".join(inputs)
    return f"({expression} if {inputs[0]}.is_contiguous() else {NAME}(lambda {own}: {inside}, {given}))"


@torch.no_grad()
def keeps(run: Callable[..., Any], width: int, count: int) -> bool:
    """Whether code keeps the order of dimensions of all transposed inputs that it takes. count: of inputs, of one
    shape, whose last dimension is ``width``."""
    kept, generator = [], torch.Generator().manual_seed(9)
    for shape in ((2, width, 3), (2, 4, 3, width)):
        x = torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").transpose(1, 2)
        try:
            result = run(*[x.clone() for _ in range(count)])
        except Exception:  # noqa: BLE001 - foreign code may not take so many dimensions
            continue
        same = isinstance(result, Tensor) and result.shape == x.shape
        kept.append(same and not result.is_contiguous() and order_in_memory(result) == order_in_memory(x))
    return bool(kept) and all(kept)
