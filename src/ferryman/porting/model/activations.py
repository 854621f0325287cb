"""Which gated op has an activation: what a function, or a module without tensors, is proven to compute."""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Gate
from ferryman.porting.model import beyond
from ferryman.porting.model.branches import follow_function, follow_module
from ferryman.porting.model.leaf import contents_tests, input_of, keep_state, state_of
from ferryman.porting.model.proof import drawn, prove
from ferryman.porting.model.trace import Trace, Unproven
from ferryman.porting.model.twin import original, own_numbers

_gates: dict[Any, Gate | None] = {}


def gate_of(function: Any) -> Gate | None:
    """The gated op whose activation a module without tensors, or a function, is proven to compute."""
    module = isinstance(function, nn.Module)
    if module and (
        next(function.children(), None)
        or any(True for _ in function.parameters())
        or any(True for _ in function.buffers())
    ):
        return None
    try:
        key = (state_of(function), contents_tests(function)) if module else function
    except Unproven:
        return None
    if key not in _gates:
        _gates[key] = _gate_of(function, module)
        if module:
            keep_state(function)
    return _gates[key]


def _gate_of(function: Any, module: bool) -> Gate | None:
    trace = Trace()
    try:
        if module:
            if input_of(type(function)) is None:
                return None
            call: Any = functools.partial(original, follow_module(function, trace), dict(function.__dict__), (), False)
        else:
            call = function if _is_torch(function) else follow_function(function, trace)
    except Unproven:
        return None
    gate = gate_like(call)
    numbers = trace.numbers | (own_numbers(function) if module else set())
    try:
        shown = gate is not None and beyond.everywhere(call, gate.function, numbers, trace)
        return gate if shown and not trace.guards() and not trace.reads else None
    except Unproven:
        return None


def gate_like(call: Any) -> Gate | None:
    inputs: list[tuple[Tensor, ...]] = [(x,) for _, x in drawn(4, 96)]
    inputs.append((torch.linspace(-30, 30, 601, dtype=torch.float64).reshape(1, -1),))
    inputs.append((torch.linspace(-2, 2, 96, dtype=torch.float64).reshape(2, 3, 16),))
    return next((gate for gate in proposals("gates") if prove(call, gate.function, inputs).ok), None)


def _is_torch(function: Any) -> bool:
    inner = function.func if isinstance(function, functools.partial) else function
    return (getattr(inner, "__module__", None) or "").split(".")[0] in ("torch", "_C") or isinstance(
        inner, types.BuiltinFunctionType
    )
