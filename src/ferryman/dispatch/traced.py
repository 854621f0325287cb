"""What torch.compile traces in an op's place: its definition, a vendor's own call, or the library's op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ferryman.dispatch import registry, select, state
from ferryman.ops.primitive import Primitive


def compiled(op: Primitive, library: Callable[..., Any]) -> Callable[..., Any]:
    """What torch.compile traces: the definition where Inductor can fuse it, unless an implementation is requested."""
    if op.lower is None:
        return library
    lower, check, device_of = op.lower, op.check, _device(op)
    if op.mutates:
        return _compiled_over(op, library)

    def run(*args: Any) -> Any:
        if state.requests or torch.is_autocast_enabled(device_of(args).type):
            return library(*args)
        check(*args)
        return lower(*args)

    if not op.gradient.whole:
        return run
    places = [op.names.index(name) for owners in op.gradient.owners for name in owners]

    def run_whole(*args: Any) -> Any:
        if torch.is_grad_enabled() and any(args[place].requires_grad for place in places):
            return library(*args)
        return run(*args)

    return run_whole


def _device(op: Primitive) -> Callable[[tuple[Any, ...]], torch.device]:
    """Where a call's first tensor lies, which may be the first of a list."""
    place = next(i for i, name in enumerate(op.names) if op.types[name] in ("Tensor", "Tensor[]"))
    if op.types[op.names[place]] == "Tensor":
        return lambda args: args[place].device
    return lambda args: args[place][0].device if args[place] else torch.device("cpu")


def whole(op: Primitive, overload: Callable[..., Any]) -> Callable[..., Any]:
    """The library's op with every output in its place, as the op itself returns them."""

    def library(*args: Any) -> Any:
        outputs = op.whole(args, overload(*args))
        return outputs if len(outputs) > 1 else outputs[0]

    return library


def _compiled_over(op: Primitive, library: Callable[..., Any]) -> Callable[..., Any]:
    """`compiled` of a mutating op: the definition's results, copied over its arguments: Inductor does it in place."""
    lower, check, overwritten, single = op.lower, op.check, op.overwritten, len(op.outputs) == 1
    assert lower is not None
    device_of = _device(op)

    def run(*args: Any) -> Any:
        if state.requests or torch.is_autocast_enabled(device_of(args).type):
            return library(*args)
        check(*args)
        result = lower(*args)
        outputs = [result] if single else list(result)
        for place, output in overwritten:
            outputs[output] = args[place].copy_(outputs[output])
        return outputs[0] if single else tuple(outputs)

    return run


def first(op: Primitive, resolve: Callable[..., Any]) -> Callable[..., Any]:
    """The first output alone, as torch.compile traces it: as the first line whose traced form takes the call."""
    deterministic = torch.are_deterministic_algorithms_enabled
    loaded = {line.name: line.load_traced() for line in registry.implementations(op.name)}
    forms = tuple({form: None for form in loaded.values() if form is not None})
    device_of = _device(op)

    def forms_of(device: str) -> tuple[int, ...]:
        """Places in ``forms`` of what is tried for a device.

        An exported program may run on another vendor's device, so it keeps the op. Dynamo itself traces is_exporting()
        as always true in torch 2.11; what it returns is read here, outside the trace.
        """
        if torch.compiler.is_exporting():
            return ()
        lines = select.traced_lines(op, select.profile_for(torch.device(device)))
        return tuple(dict.fromkeys(forms.index(form) for line in lines if (form := loaded.get(line.name)) is not None))

    def features_of(device: str) -> str:
        return " ".join(sorted(select.target_of(select.profile_for(torch.device(device))).features))

    # Traced as constants, as torch.compiler.assume_constant_result would have it; that imports torch._dynamo here.
    forms_of._dynamo_marked_constant = features_of._dynamo_marked_constant = True  # type: ignore[attr-defined]

    def run(*args: Any) -> Any:
        device = device_of(args)
        if not (state.requests or deterministic() or torch.is_autocast_enabled(device.type)):
            places = forms_of(str(device))
            if places:
                op.check(*args)
            for at in places:
                output = forms[at](*args, features_of(str(device)))
                if output is not None:
                    return output
        return resolve(*args)[0]

    return run
