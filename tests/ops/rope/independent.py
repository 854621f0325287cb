"""Each element times its cosine, and its partner, by place and sign, times its sine."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.independent import Source


def turned(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    width = cos.shape[-1]
    apart = 1 if interleaved else width // 2
    first = [i % 2 == 0 if interleaved else i < apart for i in range(width)]
    partner = [i + apart if before else i - apart for i, before in enumerate(first)]
    sign = torch.tensor([-1.0 if before else 1.0 for before in first], dtype=x.dtype)
    whole = x[..., :width] * cos[:, None] + sign * x[..., partner] * sin[:, None]
    return torch.cat((whole, x[..., width:]), -1)


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    return turned(q, cos, sin, interleaved), turned(k, cos, sin, interleaved)


SOURCES = {"rope": Source(rope), "rope_": Source(rope)}
