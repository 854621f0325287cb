"""The state as products of exp(g) (I - beta k k^T), each applied to all that came before it."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.independent import Source


def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    state: Tensor | None,
    scale: float | None,
    norm: bool,
    eps: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    width, shared = q.shape[3], v.shape[2] // q.shape[2]
    if norm:
        q, k = (x / (x.pow(2).sum(-1, keepdim=True) + eps).sqrt() for x in (q, k))
    q, k = (x.repeat_interleave(shared, 2) for x in (q, k))
    s = torch.zeros(v.shape[0], v.shape[2], width, v.shape[3], dtype=v.dtype) if state is None else state
    outputs = []
    for t in range(v.shape[1]):
        key, rate = k[:, t, :, :, None], beta[:, t, :, None, None]
        turn = torch.eye(width, dtype=v.dtype) - rate * key @ key.mT
        s = turn @ (s if g is None else g[:, t, :, None, None].exp() * s) + rate * key @ v[:, t, :, None, :]
        outputs.append((q[:, t, :, None, :] @ s).squeeze(2) * (width**-0.5 if scale is None else scale))
    return torch.stack(outputs, 1) if outputs else torch.zeros_like(v), s


SOURCES = {"gated_delta_rule": Source(gated_delta_rule)}
