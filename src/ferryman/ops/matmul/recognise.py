"""Linear layers: a matrix and perhaps a vector, in either order of the matrix's dimensions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ferryman.ops.matmul.definition import linear as op_linear
from ferryman.ops.recognition import Candidate, Graph, Leaf, Served, Traced

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


def modules(leaf: Leaf) -> Iterator[Candidate]:
    if len(leaf.matrices) != 1 or len(leaf.vectors) > 1:
        return
    ((weight, (rows, columns)),) = leaf.matrices.items()
    bias = "None"
    used: tuple[str, ...] = (weight,)
    for name in leaf.vectors:
        bias, used = f"self.{name}", (weight, name)
    yield Candidate("linear", f"ops.linear(x, self.{weight}, {bias})", columns, used)
    yield Candidate("linear", f"ops.linear(x, self.{weight}.t(), {bias})", rows, used)


def linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A bias of one number for all columns, which PyTorch broadcasts, is none of the op's."""
    if (
        (dtype := input.dtype) in _DTYPES
        and weight.dim() == 2
        and dtype is weight.dtype
        and (bias is None or (bias.dtype is dtype and bias.shape == weight.shape[:1]))
        and input.dim() > 0
    ):
        return op_linear(input, weight, bias)
    return functional.linear(input, weight, bias)


def functions() -> Mapping[Any, Served]:
    return {functional.linear: Served("linear", linear)}


def parts() -> tuple[str, ...]:
    """A product in a ported block is judged with it."""
    return ("linear",)


def _traced_linear(
    graph: Graph, x: Any, weight: Any, bias: Any = None
) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]] | None:
    return (x, weight, bias), ()


def _traced_addmm(
    graph: Graph, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]] | None:
    """A weight that lies (K, N), as a Conv1D's of transformers."""
    if beta != 1 or alpha != 1 or out is not None or graph.example(bias).dim() != 1:
        return None
    return (x, graph.view(weight, "t"), bias), ()


def traced() -> Mapping[str, Traced]:
    return {"linear": Traced("linear", _traced_linear), "addmm": Traced("linear", _traced_addmm)}
