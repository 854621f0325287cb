"""The route of a check through the simulator: CPU tensors stand for a device that is not here.

`on` makes this thread's dispatch take them for that device: what is asked of Triton or HIP is compiled for its arch,
and the code is executed by `backends.simulator`. A verdict of this route is SIMULATED at best.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ferryman.backends import redirect
from ferryman.backends.simulator.device import Simulator
from ferryman.backends.simulator.numerics import Assumptions
from ferryman.backends.simulator.program import ARCHES
from ferryman.device_profiles import Profile
from ferryman.dispatch.select import target_of
from ferryman.errors import ArgumentError

NAME = "simulated"
SERVES = ("triton", "hip")
_MOST = 5


def require(known: Profile) -> None:
    """Raises ArgumentError for a device that the simulator has no model of."""
    if known.arch not in ARCHES:
        required = f"a device of {' or '.join(ARCHES)}: mi300x, mi355x"
        raise ArgumentError("check", "--device", f"{known.name} ({known.arch})", required)


@contextmanager
def on(known: Profile, assumptions: Assumptions | None = None, *, count: bool = False) -> Iterator[Simulator]:
    """Launches of this thread run on a simulated device until the end of the block."""
    simulator = Simulator(target_of(known), assumptions, count=count, profile=known)
    with simulator:
        yield simulator


def active() -> bool:
    return redirect.current() is not None


def vendor() -> str | None:
    """The simulated device's vendor, where there is one."""
    simulator = redirect.current()
    return None if simulator is None else str(simulator.target.vendor)


def faults() -> list[str]:
    """What the sanitizer found since the last call, the first few of it."""
    simulator = redirect.current()
    if simulator is None:
        return []
    found = simulator.take()
    more = [f"and {len(found) - _MOST} more findings"] if len(found) > _MOST else []
    return [str(f) for f in found[:_MOST]] + more
