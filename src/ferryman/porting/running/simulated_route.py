"""The route of a check through the simulator: CPU tensors stand for a device that is not here.

`on` makes this thread's dispatch take them for that device: what is asked of Triton or HIP is compiled for its arch,
and the code is executed by `backends.simulator`. A verdict of this route is SIMULATED at best.
"""

from __future__ import annotations

import typing
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from ferryman.device_profiles import Profile
from ferryman.dispatch.select import target_of
from ferryman.errors import ArgumentError

if typing.TYPE_CHECKING:  # the simulator needs NumPy, which only its own verbs may ask for
    from ferryman.backends.simulator.device import Simulator
    from ferryman.backends.simulator.numerics import Assumptions

NAME = "simulated"
SERVES = ("triton", "hip")


def require(known: Profile, verb: str = "check") -> None:
    """Raises ArgumentError for a device that the simulator has no model of."""
    from ferryman.backends.simulator.program import ARCHES

    if known.arch not in ARCHES:
        required = f"a device of {' or '.join(ARCHES)}: mi300x, mi355x"
        raise ArgumentError(verb, "--device", f"{known.name} ({known.arch})", required)


def assumptions_of(given: Iterable[str], verb: str = "check") -> Assumptions:
    """Assumptions from texts like "mfma_order=sequential"; the others keep their defaults.

    Raises ArgumentError for a name, a value or a text that is none, and for one that is given two values.
    """
    from ferryman.backends.simulator.numerics import Assumptions

    known = {name: typing.get_args(hint) for name, hint in typing.get_type_hints(Assumptions).items()}
    chosen: dict[str, str] = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in known:
            required = "NAME=VALUE with " + "; ".join(f"{n}={'|'.join(values)}" for n, values in known.items())
            raise ArgumentError(verb, "--assume", repr(text), required)
        if value not in known[name]:
            raise ArgumentError(verb, "--assume", repr(text), f"{name}={'|'.join(known[name])}")
        if chosen.setdefault(name, value) != value:
            raise ArgumentError(verb, "--assume", f"{name}={chosen[name]} and {name}={value}", "one of the two")
    return Assumptions(**typing.cast("typing.Any", chosen))


def flags(assumptions: Assumptions) -> dict[str, str | bool]:
    """What a document says of the assumptions that its verdicts hold under, in its environment's flags."""
    return {f"simulator.{name}": value for name, value in asdict(assumptions).items()}


@contextmanager
def on(known: Profile, assumptions: Assumptions | None = None, *, count: bool = False) -> Iterator[Simulator]:
    """Launches of this thread run on a simulated device until the end of the block."""
    from ferryman.backends.simulator.device import Simulator

    simulator = Simulator(target_of(known), assumptions, count=count, profile=known)
    with simulator:
        yield simulator
