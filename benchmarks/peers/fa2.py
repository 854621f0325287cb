"""FlashAttention-2, through SDPA."""

from __future__ import annotations

import torch
from ferryman_peers import _common, _sdpa
from torch.nn.attention import SDPBackend

NAME = "fa2"


def available() -> str | None:
    return _common.missing("torch")


def version() -> str:
    return f"of torch {torch.__version__}"


OPS = _sdpa.forced(SDPBackend.FLASH_ATTENTION)
