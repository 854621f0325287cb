"""What the caller asked for, per thread of control: requests, strict mode, tracing.

Read inside an op at run time, never while torch.compile traces it (`ContextVar.get` breaks a full graph). What tracing
may read is `requests`: how many requests are in force anywhere, a plain integer that Dynamo guards on.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from ferryman.errors import FerrymanError

Request = Mapping[str | None, tuple[str, ...]]  # op name, or None for every op -> ordered implementations
_lock = threading.Lock()
requests = 0
_of_settings = 0  # how many of them come from settings: 0 or 1


@dataclass
class Trace:
    """What ran while tracing. ``calls`` counts (op, implementation); ``fallbacks`` counts (op, implementation, why).

    ``sources`` counts (op, implementation, what put the order): "lockfile" is measured, "predicted ..." is not.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    fallbacks: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    sources: Counter[tuple[str, str, str]] = field(default_factory=Counter)
    _lock: Any = field(default_factory=threading.Lock, repr=False)

    def record(self, op: str, implementation: str, fallback: str | None, source: str) -> None:
        with self._lock:
            self.calls[op, implementation] += 1
            self.sources[op, implementation, source] += 1
            if fallback is not None:
                self.fallbacks[op, implementation, fallback] += 1


class State:
    """One combination of request and strictness; equal ones are the same object, so that it is a cheap cache key."""

    __slots__ = ("request", "strict", "tracer", "untraced")

    def __init__(self, request: Request, strict: bool, tracer: Trace | None = None, untraced: State | None = None):
        self.request, self.strict, self.tracer = request, strict, tracer
        self.untraced: State = untraced or self

    def allowed(self, op: str) -> tuple[str, ...] | None:
        """The allow-list for an op: its own entry wins over the general one; None when nothing was requested."""
        own = self.request.get(op)
        return self.request.get(None) if own is None else own


_interned: dict[tuple[Any, ...], State] = {}
_current: ContextVar[State | None] = ContextVar("ferryman_state", default=None)
current = _current.get
enter, leave = _current.set, _current.reset  # what `entered` does, without a generator: 1.5 us of each backward


def intern(request: Request, strict: bool) -> State:
    key = (tuple(sorted(request.items(), key=str)), strict)
    with _lock:
        return _interned.setdefault(key, State(dict(request), strict))


def narrowed(state: State, op: str, backend: str) -> State:
    """``state``, with a request for one op in addition."""
    plain = intern({**state.request, op: (backend,)}, state.strict)
    return plain if state.tracer is None else State(plain.request, plain.strict, state.tracer, plain)


def base() -> State:
    """What settings say, where no context manager is in force."""
    from ferryman import settings

    names = settings.get("backend")
    return intern({None: names} if names else {}, settings.get("strict"))


def effective() -> State:
    return current() or base()


def _count(change: int) -> None:
    global requests
    with _lock:
        requests += change


def count_settings() -> None:
    """Let a request that comes from settings as they are now keep torch.compile from lowering ops to their definitions.

    Settings that cannot be read count as a request: importing works, and the first call, compiled or not, raises.
    """
    global requests, _of_settings
    from ferryman import settings

    try:
        asked = bool(settings.get("backend"))
    except FerrymanError:
        asked = True  # every call asks `base`, which raises it again
    with _lock:
        requests += asked - _of_settings
        _of_settings = int(asked)


@contextmanager
def entered(state: State) -> Iterator[None]:
    """Run with ``state``; how a forward's request reaches its backward on autograd's thread."""
    token = _current.set(state)
    try:
        yield
    finally:
        _current.reset(token)


@contextmanager
def requested(request: Request, strict: bool | None = None) -> Iterator[None]:
    before = effective()
    plain = intern({**before.request, **request}, before.strict if strict is None else strict)
    state = plain if before.tracer is None else State(plain.request, plain.strict, before.tracer, plain)
    _count(1 if request else 0)
    try:
        with entered(state):
            yield
    finally:
        _count(-1 if request else 0)


@contextmanager
def trace() -> Iterator[Trace]:
    """Record which implementation serves each call, forward and backward, and every fallback with its reason.

    Ops that torch.compile fused into Inductor's own kernels are not calls and are not recorded.
    """
    before = effective()
    record = Trace()
    with entered(State(before.request, before.strict, record, before.untraced)):
        yield record
