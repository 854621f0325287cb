"""What serves a call now, by the plan that dispatch keeps of it, and why that is no replay."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ferryman.backends import replay
from ferryman.backends.replay_record import NotReplayable
from ferryman.dispatch import plan, registry
from ferryman.dispatch.recipe import Plan
from ferryman.ops.primitive import Primitive


@dataclasses.dataclass(frozen=True)
class Serving:
    """line: the name of the menu line. run, extra: a repeated call is ``run(*args, extra)``. why: the reason why its
    launches are not replayed; "" where they are."""

    line: str
    run: Callable[..., Any]
    extra: Any
    why: str


def serving(op: Primitive, args: tuple[Any, ...]) -> Serving | None:
    """The plan of this call, as it is asked for here (`use`, gradients); None before the first such call."""
    runner = plan.runner_of(op)
    needed = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
    kept = runner.plan_of(args, needed)
    if kept is None:
        return None
    run, extra, line = kept
    launch, target = (extra.launch, extra.target) if isinstance(extra, Plan) else (run, extra)
    if replay.is_replay(launch):
        return Serving(line.name, run, extra, "")
    device = next(a.device for a in args if isinstance(a, Tensor))
    if isinstance(extra, plan.Young):
        why = f"it was called {extra.calls} times; a replay begins with call {plan.REPLAY_AFTER}"
    elif line.differentiable is not None and run is line.load_differentiable():
        why = "PyTorch's own call serves it, with nothing of ours around it"
    elif not line.replayable:
        why = f"the menu line {line.name} does not say that it is replayable"
    elif device.type != plan.REPLAYED:
        why = f"launches are replayed on devices of type {plan.REPLAYED}; this one is {device.type}"
    elif not runner.guarded:
        why = "the op takes a list of tensors"
    else:
        why = _refusal(registry.launcher(line), op, args, target, device)
    return Serving(line.name, run, extra, why)


def _refusal(launcher: Callable[..., Any], op: Primitive, args: tuple[Any, ...], target: Any, on: torch.device) -> str:
    try:
        replay.attempt(launcher, op.names, args, target, on, op.name)
    except NotReplayable as error:
        return str(error)
    return "its recording failed then, and would succeed now: call ferryman.reload() to make its plan anew"
