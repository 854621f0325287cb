"""Linear layers: a matrix and perhaps a vector, in either order of the matrix's dimensions; convolutions of one place
whose caller turns channels to the end.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ferryman.ops.matmul.definition import linear as op_linear
from ferryman.ops.recognition import Block, Candidate, Graph, Layer, Leaf, Served, Traced

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


def blocks(block: Block) -> Iterator[Layer]:
    """A weight (columns of the result, columns, 1), and a bias or none."""
    weights = [n for n, shape in block.tensors.items() if len(shape) == 3 and shape[2] == 1]
    others = [n for n in block.tensors if n not in weights]
    if len(weights) != 1 or len(others) > 1 or block.inputs != 1 or block.run is None:
        return
    rows, columns, _ = block.tensors[weights[0]]
    if min(rows, columns) < 2 or (others and block.tensors[others[0]] != (rows,)):
        return
    sizes = {1: 1, rows: _ROWS, columns: _ROWS if rows == columns else _COLUMNS}
    outcome = block.run(sizes, _draw(sizes[columns], 0))
    if outcome is None or not isinstance(outcome[0], Tensor) or outcome[0].shape != (*_SIZES[0][:2], _ROWS):
        return
    weight, bias = f"self.{weights[0]}", f"self.{others[0]}" if others else "None"
    guard = f"a0.dim() == 3 and a0.dtype is {weight}.dtype and a0.dtype.itemsize < 8 and {weight}.shape[2] == 1"
    guard += f" and a0.shape[2] == {weight}.shape[1]" + f" and {bias}.dtype is a0.dtype" * len(others)
    expression = f"ops.linear(a0, {weight}.squeeze(2), {bias})"
    yield Layer("linear", expression, sizes, functools.partial(_draw, sizes[columns]), len(_SIZES), guard, axis=1)


_ROWS, _COLUMNS = 24, 40  # short sides
_SIZES = ((2, 5, 1.0), (1, 9, 2.0), (3, 1, 8.0), (2, 7, 300.0), (1, 3, 1e-3))  # (batch, tokens, magnitude) of a seed


def _draw(columns: int, seed: int) -> tuple[Tensor, ...]:
    batch, tokens, size = _SIZES[seed]
    generator = torch.Generator().manual_seed(seed)
    return (size * torch.randn(batch, tokens, columns, generator=generator, dtype=torch.float64),)


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
