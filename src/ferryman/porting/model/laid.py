"""Results that lie in memory as those of a module's own code.

An op of rows gives a contiguous result. Code that is written out is element-wise at its end, and PyTorch's element-wise
functions keep the order of an input's dimensions: what follows may view the result, or ask how it lies. Of a module
whose code does so the op is called with views that have their dimensions in order, and its result is turned back.

Nor may an op's backward need what the code around may write over, where the module's own backward does not: such a
result is given as a copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.dispatch.order import back, order_in_memory

NAME, APART = "ferryman_laid", "ferryman_apart"


def laid(run: Callable[..., Tensor], *given: Tensor) -> Tensor:
    """``run(*given)``, whose dimensions are in memory in the order of the first one's. given: tensors of one shape,
    (..., N); run: works on rows of N."""
    order = order_in_memory(given[0])
    if order is None:
        return run(*given)
    if order[-1] == len(order) - 1:
        return run(*(t.permute(order) for t in given)).permute(back(order))
    return run(*given).permute(order).contiguous().permute(back(order))


def apart(result: Tensor, *dtypes: torch.dtype) -> Tensor:
    """A result that may be written over: a copy where its op's backward needs it. dtypes: those in which the module's
    own backward does not."""
    return result.clone() if result.requires_grad and result.dtype in dtypes else result


def keeps_result(op: str) -> bool:
    """Whether an op's backward needs what the op gave."""
    primitive = registry.primitive(op)
    backward = primitive.gradient.backward
    return backward is not None and not set(primitive.outputs).isdisjoint(primitive.saved(registry.primitive(backward)))


def apart_of(op: str, expression: str, run: Callable[..., Any], width: int, count: int) -> str:
    """An expression whose result may be written over, as that of the code. count: of inputs, as `keeps` has them."""
    if not keeps_result(op):
        return expression
    dtypes = [d for d in (torch.float32, torch.bfloat16, torch.float16) if _written_over(run, width, count, d)]
    return f"{APART}({', '.join([expression, *map(str, dtypes)])})" if dtypes else expression


def _written_over(run: Callable[..., Any], width: int, count: int, dtype: torch.dtype) -> bool:
    """Whether what code gives of an input that it takes may be written over before its gradients are taken."""
    able = []
    for shape in ((2, width), (2, 3, width), (2, 4, 3, width)):
        given = [torch.linspace(-1.0, 1.0, shape[0] * shape[-1]).view(shape[0], *(1,) * (len(shape) - 2), -1)] * count
        leaves = [x.expand(shape).to(dtype).clone().requires_grad_() for x in given]
        try:
            result = run(*(x * 1.0 for x in leaves))
            result.mul_(0.5)
            torch.autograd.grad(result.sum(), leaves, allow_unused=True)
        except Exception:  # noqa: BLE001 - foreign code may not take so many dimensions, or keep its result
            continue
        able.append(result.dtype is dtype)
    return any(able)


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
