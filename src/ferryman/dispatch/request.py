"""`use` and `strict`: what a caller asks of dispatch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from ferryman.dispatch import registry, state
from ferryman.errors import ArgumentError


@contextmanager
def use(*backends: str, **ops: str | Sequence[str]) -> Iterator[None]:
    """Ask for implementations: an ordered allow-list for every op, or for one op by keyword.

    A name is a backend's, which asks for any of its implementations, or an implementation's own ("triton.hopper").
    ``with ferryman.use("cuda", "triton"):`` tries cuda, then triton, and raises Unsupported beyond them;
    ``use(attention="triton.hopper")`` asks one of one op only. Inner requests win over outer ones. A forward's request
    also binds its backward, wherever that runs. Also a decorator. Raises UnknownName for unknown ops and backends.
    """
    if not backends and not ops:
        raise ArgumentError("use", "backends", "nothing", "backend names, or op=backend keywords")
    request: dict[str | None, tuple[str, ...]] = {}
    if backends:
        request[None] = backends
    for op, names in ops.items():
        registry.primitive(op)
        request[op] = (names,) if isinstance(names, str) else tuple(names)
    for asked_of, names in request.items():
        for name in names:
            registry.check_requested(name, asked_of)
    with state.requested(request):
        yield


@contextmanager
def strict(on: bool = True) -> Iterator[None]:
    """Raise StrictModeError where a less preferred implementation would stand in."""
    with state.requested({}, strict=on):
        yield
