"""What a window comes to where one query reads a cache: the last keys."""

from __future__ import annotations

from torch import Tensor


def last_keys(
    q: Tensor, k: Tensor, v: Tensor, window: int | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, int | None, Tensor | None]:
    """(k, v, window, mask), where of one query a window leaves the last keys, and is none any more."""
    if window is None or q.shape[2] != 1:
        return k, v, window, mask
    first = max(0, k.shape[2] - window)
    if mask is not None and mask.shape[-1] > 1:
        mask = mask[..., first:]
    return k[:, :, first:], v[:, :, first:], None, mask
