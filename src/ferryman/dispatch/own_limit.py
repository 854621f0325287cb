"""How large the tensors are for which a device's profile prefers PyTorch's own differentiable call, read quickly."""

from __future__ import annotations

import torch

from ferryman import settings
from ferryman.backends import redirect
from ferryman.dispatch import select


def _bytes_of(device: torch.device) -> int | None:
    return select.profile_for(device).thresholds.get(select.AUTOGRAD_BYTES)


remembered = settings.Remembered(_bytes_of)  # `plan.drop_plans` forgets it


def bytes_of(device: torch.device) -> int | None:
    """At most so many bytes; None where the profile has no such rule. A ported module asks in every call."""
    if redirect.current() is not None:
        return _bytes_of(device)
    limit: int | None = remembered(device)
    return limit
