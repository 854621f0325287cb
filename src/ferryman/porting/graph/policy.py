"""What becomes of a proven region: the op as one opaque call, PyTorch's own call made simpler, or nothing.

An opaque call costs Inductor its fusion. So the rule reads what the op and the device's profile declare:

1. what the user asks for: ``options={"place": ..}`` of torch.compile, or a request (`ferryman.use`);
2. an op that the profile lists under ``compiled`` is called whole;
3. an op that names a lowering stays: Inductor fuses its neighbours into it;
4. any other is called whole where dispatch would choose a kernel that is not the vendor library's, which Inductor calls
   itself and with less work for the host.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from ferryman.device_profiles import Profile
from ferryman.dispatch import select, state
from ferryman.errors import ArgumentError, StrictModeError, UnknownName, Unsupported
from ferryman.ops.primitive import Primitive
from ferryman.porting.graph.nodes import value
from ferryman.porting.graph.region import Argument, Candidate, meta_of

LIBRARY = ("torch", "definition")  # backends whose calls Inductor makes itself
PLACES = ("auto", "all", "none")


@dataclass(frozen=True)
class Choice:
    """opaque: call the op. reason: why, or why not. implementation: what dispatch would choose now, where asked."""

    opaque: bool
    reason: str
    implementation: str = ""


def check_place(place: object, ops: Collection[str]) -> str | tuple[str, ...]:
    """Raises ArgumentError, UnknownName."""
    if isinstance(place, str):
        if place in PLACES:
            return place
        raise ArgumentError(
            "torch.compile(backend='ferryman')",
            "options['place']",
            repr(place),
            f"one of {', '.join(PLACES)}, or a list of ops",
        )
    if not isinstance(place, (list, tuple, set, frozenset)):
        raise ArgumentError(
            "torch.compile(backend='ferryman')",
            "options['place']",
            type(place).__name__,
            f"one of {', '.join(PLACES)}, or a list of ops",
        )
    for name in place:
        if name not in ops:
            raise UnknownName("op", str(name), ops)
    return tuple(place)


def judged_first(op: Primitive, profile: Profile, place: str | tuple[str, ...]) -> Choice | None:
    """What is decided without a proof; None where the call itself must be asked."""
    if place == "none":
        return Choice(False, "nothing is to be placed (options['place'])")
    if place == "all" or (not isinstance(place, str) and op.name in place):
        return Choice(True, "asked for (options['place'])")
    if not isinstance(place, str):
        return Choice(False, "not among options['place']")
    if state.effective().allowed(op.name) is not None:
        return Choice(True, "an implementation is requested")
    if op.name in profile.compiled:
        return Choice(True, f"{profile.name} lists it under 'compiled'")
    if op.lower is not None:
        return Choice(False, "Inductor fuses it with its neighbours")
    return None


def judged(candidate: Candidate, profile: Profile, place: str | tuple[str, ...]) -> Choice:
    """What becomes of a region on a device."""
    first = judged_first(candidate.op, profile, place)
    if first is not None:
        return first
    args = [meta_of(a) if isinstance(a, Argument) else a for a in candidate.args]
    try:
        line = select.select(candidate.op, args, profile, state.effective()).implementation
    except (Unsupported, StrictModeError) as error:
        return Choice(False, str(error))
    if line.backend in LIBRARY:
        return Choice(False, f"{line.name} would serve it, and Inductor calls that itself", line.name)
    return Choice(True, f"{line.name} is preferred on {profile.name}", line.name)


def profile_of(candidate: Candidate) -> Profile:
    return select.profile_for(value(next(iter(candidate.inputs.values())).node).device)
