"""In what layout the gradients of q, k and v come: as models store all three, or contiguous."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.ops.attention.arguments import stored_by_rows
from tests.bounded import off

ON_GPU = [
    pytest.param(line, marks=pytest.mark.gpu)
    for line in ("torch.cudnn", "torch.flash", "torch.efficient", "triton.tiled", "triton.decode", "triton.hopper")
]


def _models(batch: int, heads: int, rows: int, dim: int) -> Tensor:
    return torch.randn(batch, rows, heads, dim).transpose(1, 2)


def _fused(batch: int, heads: int, rows: int, dim: int) -> Tensor:
    """A part of the result of one projection to q, k and v."""
    return torch.randn(batch, rows, 3, heads, dim)[:, :, 1].transpose(1, 2)


@pytest.mark.parametrize("line", ["torch.composed", "definition", *ON_GPU])
@pytest.mark.parametrize("make, by_rows", [(_models, True), (_fused, True), (torch.randn, False)])
def test_gradients_come_as_all_three_lie(make: Callable[..., Tensor], by_rows: bool, line: str) -> None:
    on_gpu = line not in ("torch.composed", "definition")
    width, dtype = (64, torch.bfloat16) if on_gpu else (16, torch.float32)
    for batch, heads, kv_heads, rows in ((2, 4, 2, 20), (1, 4, 2, 20), (2, 1, 1, 20), (2, 4, 2, 1), (1, 1, 1, 1)):
        drawn = [make(batch, n, rows, width).to(dtype) for n in (heads, kv_heads, kv_heads)]
        q, k, v = (x.cuda() if on_gpu else x for x in drawn)
        try:
            grads = _gradients(line, q, k, v)
        except ferryman.errors.Unsupported:
            assert on_gpu and (line in ("triton.decode", "triton.hopper") or rows == 1)
            continue
        for grad, x in zip(grads, (q, k, v), strict=True):
            assert grad.transpose(1, 2).is_contiguous() if by_rows else grad.is_contiguous(), x.shape


def test_unlike_layouts_give_contiguous_gradients() -> None:
    q, k, v = _models(2, 4, 9, 16), torch.randn(2, 2, 9, 16), _models(2, 2, 9, 16)
    assert not stored_by_rows(q, k, v)
    assert all(grad.is_contiguous() for grad in _gradients("torch.composed", q, k, v))
    assert all(grad.is_contiguous() for grad in _gradients("definition", q, k, v))


def _gradients(line: str, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Of one line, judged by the definition."""
    op = registry.primitive("attention_backward")
    out, lse = ops.attention(q, k, v, causal=True, return_lse=True)
    args = (torch.randn_like(out), None, q, k, v, out, lse, True, None, None, 0.0, None)
    with ferryman.use(attention_backward=line):
        grads = torch.ops.ferryman.attention_backward(*args)
    assert off(op, args, grads, q.dtype, registry.implementation(op.name, line)) <= 1
    return grads[:3]
