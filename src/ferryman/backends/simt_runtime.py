"""The launcher of SIMT kernels for a device's vendor, started when a kernel is first launched."""

from __future__ import annotations

from ferryman.backends import redirect
from ferryman.backends.base import Target
from ferryman.backends.simt import Runtime
from ferryman.errors import BackendUnavailable


def runtime(target: Target) -> Runtime:
    """The launcher for this vendor. Raises BackendUnavailable for one that has none."""
    route = redirect.current()
    if route is not None:
        return route
    launcher = _RUNTIMES.get(target.vendor)
    return launcher if launcher is not None else _start_runtime(target.vendor)


_RUNTIMES: dict[str, Runtime] = {}


def _start_runtime(vendor: str) -> Runtime:
    started: Runtime
    if vendor == "nvidia":
        from ferryman.backends.cuda import CudaRuntime

        started = CudaRuntime()
    elif vendor == "amd":
        from ferryman.backends.hip import HipRuntime

        started = HipRuntime()
    else:
        raise BackendUnavailable(f"SIMT kernels run on vendors nvidia and amd; this device's vendor is {vendor!r}")
    return _RUNTIMES.setdefault(vendor, started)  # a second thread gets the first one's
