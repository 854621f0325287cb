"""Which pairs of a query and a key dropout keeps: Philox-4x32-10, as `attention` states its counters. In PyTorch, for
what is composed, and in Triton, for a tile of scores."""

from __future__ import annotations

import torch
from torch import Tensor

_WORD = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10


def drop_below(dropout_p: float) -> int:
    """A pair is dropped where its 32-bit word is less than this."""
    return int(dropout_p * 2**32)


def kept_factor(q: Tensor, k: Tensor, dropout_p: float, seed: Tensor | None) -> Tensor | None:
    """(B, H, Sq, Sk) float32: 1 / (1 - p) for a pair that is kept, 0 for one that is dropped; None without dropout."""
    if not dropout_p or seed is None:
        return None
    heads, sq, sk = q.shape[1], q.shape[2], k.shape[2]

    def count(n: int, axis: int) -> Tensor:
        return torch.arange(n, device=q.device).view([n if i == axis else 1 for i in range(4)])

    words = _philox(seed.reshape(-1, 1, 1, 1), count(-(-sk // 4), 3), count(sq, 2), count(heads, 1))
    return (words.flatten(3)[..., :sk] >= drop_below(dropout_p)).float().mul_(1 / (1 - dropout_p))


def _philox(seed: Tensor, first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """The four words of the counter (first, second, third, 0), in a last dimension. A product of two words wraps round
    int64, whose bits are those of the unsigned product."""
    c0, c1, c2, c3 = first, second, third, torch.zeros_like(first)
    k0, k1 = seed & _WORD, seed >> 32 & _WORD
    for _ in range(_ROUNDS):
        even, odd = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = odd >> 32 & _WORD ^ c1 ^ k0, odd & _WORD, even >> 32 & _WORD ^ c3 ^ k1, even & _WORD
        k0, k1 = k0 + _WEYL[0] & _WORD, k1 + _WEYL[1] & _WORD
    return torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), -1)
