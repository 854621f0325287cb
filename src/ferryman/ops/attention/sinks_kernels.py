"""What a sink, one logit more in each row's softmax, makes of the results of kernels that know none.

Rows that saw nothing have out 0 and a log-sum-exp of -inf; their sink takes all.
"""

from __future__ import annotations

import torch
from torch import Tensor


def _per_row(sinks: Tensor, lse: Tensor) -> Tensor:
    return sinks.float().unsqueeze(-1).expand(lse.shape)


def with_sinks(out: Tensor, lse: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """(out, lse) with the sinks' column. ``out`` is written over, and rounded a second time (rounding point "o")."""
    if sinks is None:
        return out, lse
    sink = _per_row(sinks, lse)
    kept = torch.sigmoid(lse.masked_fill(lse == float("-inf"), 0.0) - sink)
    return out.mul_(kept.unsqueeze(-1)), torch.logaddexp(lse, sink)


def sinks_share(lse: Tensor, sinks: Tensor) -> Tensor:
    """The probability of the sink's column, (B, H, Sq), from the log-sum-exp that counts it."""
    sink = _per_row(sinks, lse)
    away = (sink - lse).masked_fill(sink == lse, 0.0)  # inf - inf
    return torch.exp(away).masked_fill(lse == float("-inf"), 0.0)


def gradient_of_sinks(delta: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """delta: rowsum(out * grad_out) - grad_lse, (B, H, Sq) float32."""
    return (sinks_share(lse, sinks) * delta).sum((0, 2)).neg().to(sinks.dtype)


def delta_of(grad_out: Tensor, grad_lse: Tensor | None, out: Tensor) -> Tensor:
    """rowsum(out * grad_out) - grad_lse."""
    delta = (grad_out.float() * out.float()).sum(-1)
    return delta if grad_lse is None else delta - grad_lse
