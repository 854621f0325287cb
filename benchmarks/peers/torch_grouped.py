"""A layer of experts by PyTorch's grouped product over tokens sorted by expert, as model libraries write it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from ferryman_peers import _experts
from torch import Tensor
from torch.nn import functional as F  # noqa: N812 - PyTorch's own name for it

NAME = "torch-grouped-mm"


def available() -> str | None:
    return None if hasattr(F, "grouped_mm") else "this PyTorch has no functional.grouped_mm"


def version() -> str:
    return str(torch.__version__)


def _product(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return F.grouped_mm(x, weight.mT, offs=ends)


def _forward(*args: Any) -> Callable[[], Any]:
    return functools.partial(_experts.layer, _product, *args)


STEPS = {"moe_experts": functools.partial(_experts.layer, _product)}
OPS = {"moe_experts": _forward}
