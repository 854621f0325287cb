"""PyTorch as its users write it, operation by operation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from ferryman_peers import _functions

NAME = "torch-eager"


def available() -> str | None:
    return None


def version() -> str:
    return str(torch.__version__)


def _bound(function: Callable[..., Any]) -> Callable[..., Callable[[], Any]]:
    return lambda *args: functools.partial(function, *args)


OPS = {name: _bound(function) for name, function in _functions.FORWARD.items()}
