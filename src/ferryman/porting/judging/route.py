"""What a check asks of the route of this thread's launches (`backends.redirect`): a simulator, a device that stands in
for an older one, or none."""

from __future__ import annotations

from ferryman.backends import redirect

_MOST = 5


def active() -> bool:
    return redirect.current() is not None


def slow() -> bool:
    """Whether kernels are executed by this process, some thousand times slower than by a device."""
    route = redirect.current()
    return route is not None and not route.on_device


def vendor() -> str | None:
    """The vendor of the device that the route has, where there is one."""
    route = redirect.current()
    return None if route is None else str(route.target.vendor)


def begin() -> None:
    """What was launched before belongs to another cell."""
    route = redirect.current()
    if route is not None:
        route.begin()


def evidence() -> str | None:
    """What was executed since `begin`, and by what; None where there is no route."""
    route = redirect.current()
    return None if route is None else route.evidence()


def faults() -> list[str]:
    """What the sanitizer found since the last call, the first few of it."""
    route = redirect.current()
    if route is None:
        return []
    findings = route.take()
    more = [f"and {len(findings) - _MOST} more findings"] if len(findings) > _MOST else []
    return [str(f) for f in findings[:_MOST]] + more
