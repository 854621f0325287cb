"""The gradient of the sinks in one launch, for the lines of Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ferryman.backends.triton import launch

_LOG2E = tl.constexpr(1.4426950408889634)
_BLOCK = 1024


@triton.jit(do_not_specialize=["rows", "queries"])
def sinks_gradient(
    delta,
    lse,
    sinks,
    grad,
    stride_db,
    stride_dh,
    rows,
    queries,
    BLOCK: tl.constexpr,
):
    """grad (H,): the negative sum over sequences and queries of delta times the share of the sink's column.

    delta (B, H, Sq) float32 by its strides, with unit stride in the last; lse (B, H, Sq) float32, contiguous;
    rows: B Sq.
    """
    head = tl.program_id(0)
    heads = tl.num_programs(0)
    sink = tl.load(sinks + head).to(tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    for first in range(0, rows, BLOCK):
        row = first + tl.arange(0, BLOCK)
        inside = row < rows
        batch, query = (row // queries).to(tl.int64), row % queries
        log_sum = tl.load(lse + (batch * heads + head) * queries + query, mask=inside, other=float("-inf"))
        away = tl.where(log_sum == sink, 0.0, sink - log_sum)  # inf - inf
        share = tl.where(log_sum == float("-inf"), 0.0, tl.exp2(away * _LOG2E))
        total += share * tl.load(delta + batch * stride_db + head * stride_dh + query, mask=inside, other=0.0)
    tl.store(grad + head, (-tl.sum(total, 0)).to(grad.dtype.element_ty))


def gradient_of_sinks(delta: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """delta: rowsum(out * grad_out) - grad_lse, (B, H, Sq) float32."""
    grad = torch.empty_like(sinks, memory_format=torch.contiguous_format)
    batch, heads, queries = lse.shape
    launch(
        sinks_gradient,
        (heads,),
        delta,
        lse.contiguous(),
        sinks.contiguous(),
        grad,
        delta.stride(0),
        delta.stride(1),
        batch * queries,
        queries,
        device=lse.device,
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return grad
