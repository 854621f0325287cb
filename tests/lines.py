"""A backend's line for a call: the first that serves it, as a request for the backend runs it; and what it launches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry, select
from ferryman.ops.menu import Implementation


def serving(op: str, backend: str, args: Sequence[Any] | None = None, known: Profile | None = None) -> Implementation:
    """args: in schema order. Without them the line that serves every call: the last that is not for a part of them."""
    lines = registry.asked(op, (backend,))
    if args is None or len(lines) == 1:
        return next((line for line in reversed(lines) if not line.partial), lines[-1])
    primitive, profile = registry.primitive(op), known or detect("cpu")
    view = select.View.of(primitive, tuple(args), profile)
    return next((x for x in lines if not select.refusals(x, view, profile, absent=True)), lines[-1])


def torch_kernel(op: str) -> Callable[..., Any]:
    """PyTorch's own kernel of an op, which tests plant errors in."""
    return registry.launcher(serving(op, "torch"))


def all_serving(op: str, backend: str, args: Sequence[Any], known: Profile) -> tuple[Implementation, ...]:
    """A backend's lines that serve a call on a device, which need not be here."""
    view = select.View.of(registry.primitive(op), tuple(args), known)
    return tuple(x for x in registry.asked(op, (backend,)) if not select.refusals(x, view, known, absent=True))


def planted(
    put: Callable[[Any, str, Any], None],
    kernels: Mapping[Implementation, Callable[..., Any] | None],
    first: bool = False,
) -> None:
    """Lines of a test's own on the menus of their ops, with ``put(object, name, value)``: after the others, or first
    and alone of their backends. None: what the registry loads for a line."""
    menu, launcher = registry.implementations, registry.launcher
    own = {id(line): kernel for line, kernel in kernels.items() if kernel is not None}

    def lines(op: str) -> tuple[Implementation, ...]:
        mine = tuple(line for line in kernels if line.op == op)
        if not first:
            return (*menu(op), *mine)
        backends = {line.backend for line in mine}
        return (*mine, *(line for line in menu(op) if line.backend not in backends))

    put(registry, "implementations", lines)
    put(registry, "launcher", lambda line: own.get(id(line)) or launcher(line))


def launched(op: str, args: Sequence[Any], known: Profile) -> tuple[str, list[str]]:
    """(Triton's line for a call on a device, the kernels that it launches there). args: on the meta device."""
    from ferryman.backends.triton import recorded

    line = serving(op, "triton", args, known)
    launch, target = registry.launcher(line), select.target_of(known)
    return line.name, [kernel.name for kernel in recorded([lambda: launch(*args, target)])]


def rows_launched(op: str, args: Sequence[Any], known: Profile) -> dict[str, tuple[int, int]]:
    """Configuration -> (rows of a program, warps) that "triton.rows" launches with it. args: on the meta device."""
    from ferryman.backends.triton import recorded

    line = registry.implementation(op, "triton.rows")
    launch, tiles = registry.launcher(line), {}
    for name in ("", *line.ranked_configurations(args, select.target_of(known))):
        target = select.target_of(known, name)
        (one,) = recorded([functools.partial(launch, *args, target)])
        tiles[name] = one.constexprs["ROWS"], one.num_warps
    return tiles
