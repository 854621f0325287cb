"""PyTorch as its users write it, operation by operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from ferryman_peers import _functions
from torch import Tensor

NAME = "torch-eager"


def available() -> str | None:
    return None


def version() -> str:
    return str(torch.__version__)


def _bound(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    return lambda *args: functools.partial(function, *args)


def _kv_append(
    k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: None, v_scale: None
) -> Callable[[], Any]:
    """Tokens that are skipped are left out before: their number would have to be asked of the device."""
    inside = (slots >= 0) & (slots < k_cache.shape[0] * k_cache.shape[1])
    at, caches = slots[inside], (k_cache, v_cache)
    pairs = [(cache.view(-1, *cache.shape[2:]), new[inside]) for new, cache in zip((k, v), caches, strict=True)]

    def call() -> Any:
        for rows, new in pairs:
            rows.index_put_((at,), new)
        return caches

    return call


STEPS = _functions.FORWARD
OPS = {name: _bound(function) for name, function in _functions.FORWARD.items()} | {"kv_append": _kv_append}
