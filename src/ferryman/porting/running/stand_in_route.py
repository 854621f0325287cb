"""A stand-in as a route: an older NVIDIA device's Triton kernels, executed by the device that is here.

`on` makes this thread's Triton launches those of the older device: compiled for its arch, with its configurations, and
assembled from their PTX for the device here. A verdict of this route is never PASS: the units that execute the
instructions are not the older device's.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ferryman.backends.triton import interpreting
from ferryman.backends.triton_stand_in import ARCH_SPECIFIC, StandIn, capability
from ferryman.device_profiles import Profile, detect
from ferryman.dispatch.plan import drop_plans
from ferryman.dispatch.select import target_of
from ferryman.errors import ArgumentError
from ferryman.porting.running.process import placed

NAME = "stand-in"
SERVES = ("triton",)
_REQUIRED = (
    "an NVIDIA device of the catalogue, whose Triton kernels have PTX: a100-sxm-80, orin-agx, l4, rtx4090 "
    "(AMD devices: --backend simulated)"
)


def obstacle(known: Profile, here: Profile | None) -> tuple[str, str] | None:
    """(what is there, what is required) where ``here`` cannot stand in for ``known``; for None, where nothing can."""
    if known.vendor != "nvidia" or known.generic:
        kind = "a generic profile, of no one size" if known.vendor == "nvidia" else f"of vendor {known.vendor}"
        return f"{known.name}, {kind}", _REQUIRED
    if here is None:
        return None
    wanted, least = capability(known.arch), f"{capability(known.arch) / 10:.1f}"
    devices = f"{known.name} ({known.arch}), and the device here is {here.title} ({here.arch})"
    if here.vendor != "nvidia":
        return devices, f"an NVIDIA GPU of compute capability {least} or later, which executes its PTX"
    if capability(here.arch) < wanted:
        return devices, f"a device of compute capability {least} or later: PTX runs on later ones, never on earlier"
    if wanted >= ARCH_SPECIFIC and here.arch != known.arch:
        return devices, f"a device of {known.arch}: from there on Triton's PTX is for one arch alone"
    if here.shared_memory < known.shared_memory:
        memory = f" with {here.shared_memory} bytes of shared memory for a block"
        return devices + memory, f"a device with {known.shared_memory} or more, as {known.name} has"
    return None


def require(known: Profile, here: Profile | None, verb: str = "check") -> None:
    """Raises ArgumentError where ``here`` cannot stand in for ``known``; for None, where nothing can."""
    mismatch = obstacle(known, here)
    if mismatch is None and here is not None and interpreting():
        mismatch = f"{known.name}, and TRITON_INTERPRET=1", "a process that compiles Triton: unset TRITON_INTERPRET"
    if mismatch is not None:
        raise ArgumentError(verb, "--as", *mismatch)


@contextmanager
def on(known: Profile, device: torch.device | str | None = None, verb: str = "check") -> Iterator[StandIn]:
    """Triton launches of this thread are those of ``known``, executed by ``device``, until the end of the block.

    Plans made before know another device, and are dropped at both ends. Raises ArgumentError as `require`.
    """
    place, here = placed(device), detect(device)
    require(known, here, verb)
    drop_plans()
    try:
        with StandIn(target_of(known), place, here.arch, torch.cuda.get_device_name(place), known) as stand_in:
            yield stand_in
    finally:
        drop_plans()
