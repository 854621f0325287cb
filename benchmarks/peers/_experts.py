"""A layer of experts around any product of tokens that are sorted by expert."""

from __future__ import annotations

from collections.abc import Callable

import torch
from ferryman_peers import _functions
from torch import Tensor

from ferryman.porting.bench.peers import NotServed

Product = Callable[[Tensor, Tensor, Tensor], Tensor]  # of rows, weights (E, N, K), and the rows' ends by expert


def layer(
    product: Product,
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    activation: str,
    bias: Tensor | None,
) -> Tensor:
    """Sort, product, activation, product, back to the tokens' order, weighted sum. Every id is an expert's."""
    if bias is not None or activation not in ("silu", "gelu", "gelu_tanh"):
        raise NotServed("no bias, and no clamped activation")
    ids, order = topk_ids.reshape(-1).sort(stable=True)
    experts = torch.arange(len(down), device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ids, experts, right=True).int()
    gate, up = product(x[order // topk_ids.shape[1]], gate_up, ends).chunk(2, -1)
    y = product(_functions.activated(gate, activation) * up, down, ends)
    back = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
    rows = y[back].unflatten(0, topk_ids.shape)
    return (rows * topk_weights.to(y.dtype).unsqueeze(-1)).sum(1)
