"""Linear layers: a matrix and perhaps a vector, in either order of the matrix's dimensions; convolutions of one place
whose caller turns channels to the end.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ferryman.ops.matmul.definition import linear as op_linear
from ferryman.ops.recognition import Block, Candidate, Graph, Layer, Leaf, Served, Traced

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


def modules(leaf: Leaf) -> Iterator[Candidate]:
    """A matrix, whose bias may be a vector with sides of one; or what has one row or one column."""
    matrices = leaf.wholes or (leaf.matrices if len(leaf.matrices) == 1 else {})
    vectors = {n: text for n, (_, text) in leaf.lines.items() if n not in matrices}
    if len(matrices) != 1 or len(vectors) > 1:
        return
    ((weight, (rows, columns)),) = matrices.items()
    bias = "None"
    used: tuple[str, ...] = (weight,)
    for name, plain in vectors.items():
        bias, used = plain, (weight, name)
    yield Candidate("linear", f"ops.linear(x, self.{weight}, {bias})", columns, used)
    yield Candidate("linear", f"ops.linear(x, self.{weight}.t(), {bias})", rows, used)


def blocks(block: Block) -> Iterator[Layer]:
    """Weights of three dimensions: a convolution's of one place, or one that heads have apart."""
    yield from _of_one_place(block)
    yield from _by_heads(block)


def _of_one_place(block: Block) -> Iterator[Layer]:
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


def _by_heads(block: Block) -> Iterator[Layer]:
    """A weight (width, heads, head), (heads, width, head) or (heads, head, width), from a row to heads or back, and a
    bias or none. Heads stand after tokens or before them."""
    weights = [n for n, shape in block.tensors.items() if len(shape) == 3]
    others = [n for n in block.tensors if n not in weights]
    if len(weights) != 1 or len(others) > 1 or block.inputs != 1 or min(block.tensors[weights[0]]) < 2:
        return
    own, shape = f"self.{weights[0]}", block.tensors[weights[0]]
    bias = f"self.{others[0]}" if others else "None"
    for at, apart in itertools.product((0, 2, 1), (True, False)):
        width, (heads, head) = shape[at], (n for i, n in enumerate(shape) if i != at)
        if others and block.tensors[others[0]] != ((heads, head) if apart else (width,)):
            continue
        sizes = {heads: _HEADS}
        sizes.setdefault(head, _HEAD)
        sizes.setdefault(width, sizes[heads] * sizes[head] if width == heads * head else _COLUMNS)
        for before, dims in ((False, 3), (True, 3), (False, 2)):  # heads before tokens; batches, tokens
            rows, pair = (sizes[width],), (sizes[heads], sizes[head])
            given, wanted = (rows, pair) if apart else (pair, rows)
            draw = functools.partial(_draw_heads, given, before and not apart, dims)
            outcome = None if block.run is None else block.run(sizes, draw(0))
            result = _draw_heads(wanted, before and apart, dims, 0)[0].shape
            if outcome is None or not isinstance(outcome[0], Tensor) or outcome[0].shape != result:
                continue
            x = "a0.transpose(1, 2)" if before and not apart else "a0"
            last = f"{own}.transpose(1, 2)" if at == 1 else own  # (heads, head, width)
            width_of, pair_of = (
                (f"{own}.shape[:1]", f"{own}.shape[1:]") if at == 0 else (f"{last}.shape[2:]", f"{last}.shape[:2]")
            )
            flat = f"{own}.flatten(1)" if at == 0 else f"{last}.flatten(0, 1)"
            flat += ".t()" * ((at == 0) is apart)
            if apart:
                call = f"ops.linear(a0, {flat}, {bias}{'.flatten()' * len(others)}).unflatten(-1, tuple({pair_of}))"
                call += ".transpose(1, 2)" * before
                call += ".contiguous()" * (before and outcome[0].is_contiguous())
            else:
                call = f"ops.linear({x}.flatten(-2), {flat}, {bias})"
            guard = f"a0.dim() == {dims + (not apart)} and a0.dtype is {own}.dtype and a0.dtype.itemsize < 8"
            guard += f" and {x}.shape[{'-1:' if apart else '-2:'}] == {width_of if apart else pair_of}"
            guard += f" and {own}.is_contiguous()" + f" and {bias}.dtype is a0.dtype" * len(others)
            axis = dims - 2 + (before and not apart)
            yield Layer("linear", call, sizes, draw, len(_SIZES), guard, axis=axis)


_HEADS, _HEAD = 3, 8  # short sides


def _draw_heads(last: tuple[int, ...], before: bool, dims: int, seed: int) -> tuple[Tensor, ...]:
    """Tokens, of batches or alone, of what stands last: a row, or heads, which may stand before tokens."""
    batch, tokens, size = _SIZES[seed]
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn((*(batch, tokens)[3 - dims :], *last), generator=generator, dtype=torch.float64)
    return (x.transpose(1, 2).contiguous() if before else x,)


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
