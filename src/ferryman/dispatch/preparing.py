"""What a call may not wait for is compiled before it: implementations that name a `prepare` serve only then."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.device_profiles import Profile
from ferryman.dispatch import plan, registry, select
from ferryman.dispatch.explanation import bind
from ferryman.errors import ArgumentError, CaptureError, CompileError
from ferryman.ops.clauses import PREPARED
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive


def prepare(op: str | Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, ...]:
    """Compile what calls like this one may run on but never compile themselves, such as PyTorch's FlexAttention.

    op: the op's function or name. args, kwargs: the call's arguments, on the device where calls will be. It takes
    seconds, once in a process for calls that differ in what they are compiled for: with FlexAttention that is heads,
    widths, dtype and which arguments there are, not lengths or contents. Dispatch may choose what was compiled from
    then on, where it was measured to be the fastest (`ferryman tune`) or is asked for (`ferryman.use`). Returns the
    names of the implementations that serve such a call now and were compiled for it, here or before. Raises
    ArgumentError for invalid arguments, UnknownName, CompileError, and CaptureError while a CUDA graph is captured.
    """
    known = registry.primitive(op)
    bound = bind(known, args, {k: v for k, v in kwargs.items() if k in known.names or k != "return_lse"})
    known.check(*bound)
    tensors = [a for a in bound if isinstance(a, Tensor)]
    if not tensors or tensors[0].device.type == "meta":
        raise ArgumentError(known.name, "arguments", "tensors without data", "tensors on the device that calls run on")
    prepared, failed = ready(known, bound, select.profile_for(tensors[0].device))
    for error in failed.values():
        raise error
    return prepared


def preparable(
    op: Primitive, args: Sequence[Any], profile: Profile, names: Sequence[str] = ()
) -> tuple[Implementation, ...]:
    """Implementations that serve a call once they are compiled for it, whether or not that was done. args: on "meta",
    too. names: of lines or backends; none: every line."""
    lines = []
    for line in registry.implementations(op.name):
        if line.prepare is None or (names and not any(map(line.answers, names))):
            continue
        others = tuple(clause for clause in line.when if PREPARED not in clause.facts)
        view = select.View.of(op, args, profile)
        if not select.refusals(dataclasses.replace(line, when=others), view, profile):
            lines.append(line)
    return tuple(lines)


def ready(
    op: Primitive, args: Sequence[Any], profile: Profile, names: Sequence[str] = ()
) -> tuple[tuple[str, ...], dict[str, CompileError]]:
    """(implementations that are prepared for a call, those whose compilation failed). Those that another of their
    conditions refuses are left alone. names: of lines or backends; none: every line."""
    if any(isinstance(a, Tensor) and a.device.type == "meta" for a in args):
        return (), {}
    prepared, failed, changed = [], {}, False
    for line in preparable(op, args, profile, names):
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise CaptureError(f"{op.name}: {line.name} would be compiled while a graph is captured; prepare it before")
        try:
            changed |= bool(line.load_prepare()(*args, select.target_of(profile)))
        except CompileError as error:
            failed[line.name] = error
        else:
            prepared.append(line.name)
    if changed:
        plan.drop_plans()
    return tuple(prepared), failed
