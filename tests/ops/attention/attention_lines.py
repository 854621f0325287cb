"""Attention by the first line of Triton's that serves a call, launched without dispatch's plans."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ferryman.dispatch import registry, select


def _run(op: str, args: tuple[Any, ...]) -> tuple[Tensor, ...]:
    known, target = registry.primitive(op), args[-1]
    given = args[:-1]
    given += tuple(known.added[name] for name in known.names[len(given) :])
    profile = select.profile_for(args[0].device)
    view = select.View.of(known, given, profile)
    line = next(x for x in registry.asked(op, ("triton",)) if not select.refusals(x, view, profile))
    outputs: tuple[Tensor, ...] = registry.launcher(line)(*given, target)
    return outputs


def attention(*args: Any) -> tuple[Tensor, ...]:
    """(out, lse). args: in schema order, then a target."""
    return _run("attention", args)


def attention_backward(*args: Any) -> tuple[Tensor, ...]:
    """The gradients of q, k and v. args: in schema order, maybe without the last ones, then a target."""
    return _run("attention_backward", args)[:3]
