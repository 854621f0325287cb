"""How samples of channels lie in memory: channels before their places, or places before their channels."""

from __future__ import annotations

import math

import torch
from torch import Tensor

_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}


def memory_format(x: Tensor) -> torch.memory_format:
    """What a result takes from x: channels last where x lies so without gaps and not in order, too."""
    last = _LAST.get(x.dim())
    if last is None or x.is_contiguous() or not x.is_contiguous(memory_format=last):
        return torch.contiguous_format
    return last


def empty_like(x: Tensor) -> Tensor:
    """A result of x's shape and dtype."""
    return torch.empty(x.shape, dtype=x.dtype, device=x.device, memory_format=memory_format(x))


def sizes(x: Tensor) -> tuple[int, int, int]:
    """Samples, channels, and places of a channel."""
    return x.shape[0], x.shape[1], math.prod(x.shape[2:])


def flat(x: Tensor) -> tuple[Tensor, tuple[int, int, int]]:
    """(x, or a copy; elements from a sample, a channel and a place to the next). A copy where no one step leads from
    place to place."""
    step = _step(x)
    if step is None:
        x = x.contiguous()
        step = 1
    return x, (x.stride(0), x.stride(1), step)


def _step(x: Tensor) -> int | None:
    step: int | None = None
    expected = 0
    for size, stride in zip(reversed(x.shape[2:]), reversed(x.stride()[2:]), strict=True):
        if size == 1:
            continue
        if step is None:
            step = expected = stride
        elif stride != expected:
            return None
        expected *= size
    return 1 if step is None else step


def power(n: int) -> int:
    """The least power of two that is not less."""
    return 1 << max(n - 1, 0).bit_length()


def padded(x: Tensor, num_groups: int) -> int:
    """Elements of a group whose channels and places are padded to powers of two."""
    _, channels, places = sizes(x)
    return power(channels // num_groups) * power(places)


def fits(x: Tensor, num_groups: int, threads: int, arrays: int) -> bool:
    """Whether a block's registers hold ``arrays`` groups, padded: 64 bytes a thread in all."""
    return padded(x, num_groups) * x.element_size() <= 64 * threads // arrays
