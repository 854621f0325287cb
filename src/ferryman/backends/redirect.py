"""Where launches go instead of to a device: to a simulator, for the thread that asked for it."""

from __future__ import annotations

import threading
from typing import Any


class _Redirect(threading.local):
    simulator: Any = None


_redirect = _Redirect()


def current() -> Any:
    """The simulator that this thread's launches go to, or None."""
    return _redirect.simulator


def to(simulator: Any) -> Any:
    """Send this thread's launches to ``simulator``; returns what `back` restores."""
    before, _redirect.simulator = _redirect.simulator, simulator
    return before


def back(before: Any) -> None:
    _redirect.simulator = before
