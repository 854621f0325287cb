"""Sets of equal inputs that together outgrow the last cache, and what gives a mutating op its inputs back."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.device_profiles import Profile
from ferryman.ops.primitive import Primitive

CACHES = 4
MOST_SETS = 1024  # of tiny inputs: beyond, a graph of as many launches takes longer to capture than to replay
_MOST_OF_FREE = 0.3
_HOST_CACHE = 32 << 20  # where the profile states none
_HOST_SETS = 4


def cache_of(profile: Profile) -> int:
    """Bytes of the last cache."""
    return profile.l3_bytes or profile.l2_bytes or _HOST_CACHE


def sets_of(args: Sequence[Any], device: torch.device, cache: int) -> tuple[list[tuple[Any, ...]], int]:
    """Copies of the arguments that together fill ``cache`` bytes CACHES times, and the bytes of them all."""
    first = tuple(own(a) for a in args)
    size = sum(a.numel() * a.element_size() for a in first if isinstance(a, Tensor))
    number = _number(device, size, cache)
    return [first, *(tuple(own(a) for a in first) for _ in range(number - 1))], size * number


def own(value: Any) -> Any:
    """A tensor of its own with the same strides and content; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device).copy_(value)


def spared(op: Primitive, args: tuple[Any, ...]) -> tuple[Any, ...]:
    """The arguments, with copies of those that are written over."""
    over = {place for place, _ in op.overwritten}
    return tuple(own(a) if i in over else a for i, a in enumerate(args))


def restoring(op: Primitive, sets: Sequence[tuple[Any, ...]]) -> Callable[[], None] | None:
    """What gives a mutating op its inputs back, all sets alike; None for an op that leaves them as they are."""
    pristine = {place: own(sets[0][place]) for place, _ in op.overwritten}
    if not pristine:
        return None

    def restore() -> None:
        for one in sets:
            for place, value in pristine.items():
                one[place].copy_(value)

    return restore


def _number(device: torch.device, size: int, cache: int) -> int:
    if device.type != "cuda":
        return _HOST_SETS
    room = int(torch.cuda.mem_get_info(device)[0] * _MOST_OF_FREE) // max(1, size)
    return max(1, min(MOST_SETS, room, max(2, math.ceil(CACHES * cache / max(1, size)))))
