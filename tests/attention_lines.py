"""Attention by the first line of Triton's that serves a call, launched without dispatch's plans."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ferryman.dispatch import registry, select


def _run(op: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    known, target = registry.primitive(op), args[-1]
    profile = select.profile_for(args[0].device)
    view = select.View.of(known, args[:-1], profile)
    line = next(x for x in registry.asked(op, ("triton",)) if not select.refusals(x, view, profile))
    found: tuple[Tensor, ...] = registry.launcher(line)(*args[:-1], target)
    return found


def attention(*args: Any) -> tuple[Tensor, ...]:
    """(out, lse). args: in schema order, then a target."""
    return _run("attention", args)


def attention_backward(*args: Any) -> tuple[Tensor, ...]:
    """The gradients. args: in schema order, then a target."""
    return _run("attention_backward", args)
