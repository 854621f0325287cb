"""Conch's Triton kernels. Its fused add and norm writes over its input; its gates take both halves as one."""

from __future__ import annotations

from typing import Any

from ferryman_peers import _common

NAME = "conch"


def available() -> str | None:
    return _common.missing("conch", "triton")


def version() -> str:
    return _common.version("conch-triton-kernels")


def rms_norm(x: Any, weight: Any, eps: float, cast_before_weight: bool) -> _common.Call:
    from conch.ops.normalization.rms_norm import rms_norm as function

    return lambda: function(x, weight, eps)


OPS = {"rms_norm": rms_norm}
