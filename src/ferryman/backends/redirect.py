"""Where launches go instead of to the tensors' device, for the thread that asked for it: to a simulator, or to a
device that stands in for an older one."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Mapping
from typing import Any, Protocol

from ferryman.backends.base import Target


class Route(Protocol):
    """What takes launches over. Dispatch takes ``profile`` for the device of every tensor where it is not None.

    ``on_device``: the code is executed by a GPU, at its speed; else by this process.
    """

    target: Target
    profile: Any
    on_device: bool

    def probe(self, backend: str, vendor: str) -> tuple[str, ...] | None:
        """Why a backend cannot run for a vendor under this route, () where it can; None: as without the route."""
        ...

    def wrap(self, launcher: Callable[..., Any], over: Collection[int] = ()) -> Callable[..., Any]:
        """The launcher as a function of the same arguments whose launches come here; ``over``: places of those that it
        may write."""
        ...

    def launch_triton(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
        """A Triton launch, as `backends.triton.launch` was given it."""
        ...

    def launch(self, unit: Any, device: Any, grid: int, block: int, shared: int, args: tuple[int | float, ...]) -> None:
        """A launch of a SIMT unit, as `simt.Runtime` has it."""
        ...

    def begin(self) -> None:
        """Forget what was launched so far: `take` and `evidence` are about what follows."""
        ...

    def take(self) -> list[Any]:
        """Faults of the launches since the last call."""
        ...

    def evidence(self) -> str:
        """What was executed since `begin`, and by what: the reason of a verdict."""
        ...


class _Redirect(threading.local):
    route: Route | None = None


_redirect = _Redirect()


def current() -> Route | None:
    """What this thread's launches go to, or None."""
    return _redirect.route


def to(route: Route) -> Route | None:
    """Send this thread's launches to ``route``; returns what `back` restores."""
    before, _redirect.route = _redirect.route, route
    return before


def back(before: Route | None) -> None:
    _redirect.route = before
