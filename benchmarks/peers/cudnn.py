"""cuDNN's attention, through SDPA."""

from __future__ import annotations

import torch
from ferryman_peers import _common, _sdpa
from torch.nn.attention import SDPBackend

NAME = "cudnn"


def available() -> str | None:
    if torch.version.hip is not None:
        return "cuDNN is NVIDIA's"
    return _common.missing("torch") or (None if torch.backends.cudnn.is_available() else "torch has no cuDNN")


def version() -> str:
    return str(torch.backends.cudnn.version())


OPS = _sdpa.forced(SDPBackend.CUDNN_ATTENTION)
