"""The parity check of an older NVIDIA device's Triton kernels, executed through their PTX by the device that is here.

The configurations are those that dispatch would choose on the older device. The document is the one of any check; its
device is "stand-in", and no verdict in it is PASS: the instructions are the older device's, the units that execute them
are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from ferryman.backends.precision import float32_precision
from ferryman.backends.triton import interpreting
from ferryman.backends.triton_stand_in import ARCH_SPECIFIC, StandIn, capability
from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.dispatch.plan import drop_plans
from ferryman.dispatch.select import target_of
from ferryman.errors import ArgumentError
from ferryman.porting.fills import dtype_name
from ferryman.porting.parity import SEED
from ferryman.porting.process import placed, quiet
from ferryman.porting.results import Cell, Results, environment, results
from ferryman.porting.runner import alone, default_jobs, dtypes_of, ordered, tier_cases
from ferryman.porting.worker import Job, Workers

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
    found = f"{known.name} ({known.arch}), and the device here is {here.title} ({here.arch})"
    if here.vendor != "nvidia":
        return found, f"an NVIDIA GPU of compute capability {least} or later, which executes its PTX"
    if capability(here.arch) < wanted:
        return found, f"a device of compute capability {least} or later: PTX runs on later ones, never on earlier"
    if wanted >= ARCH_SPECIFIC and here.arch != known.arch:
        return found, f"a device of {known.arch}: from there on Triton's PTX is for one arch alone"
    if here.shared_memory < known.shared_memory:
        memory = f" with {here.shared_memory} bytes of shared memory for a block"
        return found + memory, f"a device with {known.shared_memory} or more, as {known.name} has"
    return None


def require(known: Profile, here: Profile | None, verb: str = "check") -> None:
    """Raises ArgumentError where ``here`` cannot stand in for ``known``; for None, where nothing can."""
    found = obstacle(known, here)
    if found is None and here is not None and interpreting():
        found = f"{known.name}, and TRITON_INTERPRET=1", "a process that compiles Triton: unset TRITON_INTERPRET"
    if found is not None:
        raise ArgumentError(verb, "--as", *found)


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


def run(
    known: Profile,
    ops: Iterable[str] | None = None,
    backends: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    tier: str | None = None,
    seed: int = SEED,
    progress: Callable[[int, int, str], None] | None = None,
    jobs: int | None = None,
) -> Results:
    """Check every requested op in Triton as it would run on ``known``.

    backends: None, or "triton" alone. Other parameters as `runner.run` has them; ``jobs`` None is as many processes as
    share this device. Raises ArgumentError as `require`, and for another backend; UnknownName for a name that is not
    there.
    """
    began = time.perf_counter()
    for name in SERVES if backends is None else tuple(backends):
        registry.check_requested(name)
        if name.partition(".")[0] not in SERVES:
            raise ArgumentError("check", "--backend", name, f"{' or '.join(SERVES)} beside --as: it alone has PTX")
    require(known, detect(device))
    place = placed(device)
    chosen, tier = dtypes_of(dtypes), tier or "standard"
    names = list(registry.primitives()) if ops is None else [registry.primitive(op).name for op in ops]
    wanted = SERVES if backends is None else tuple(backends)
    local = [(registry.primitive(op), list(registry.asked(op, wanted))) for op in dict.fromkeys(names)]
    local = [(op, lines) for op, lines in local if lines]
    total = sum(len(tier_cases(op, tier)) * len(chosen) * len(lines) for op, lines in local)
    count = default_jobs(place) if jobs is None else jobs
    tf32 = float32_precision() == "tf32"
    shares = [
        Job(
            {op.name: [x.name for x in lines] for op, lines in local},
            [dtype_name(d) for d in chosen],
            tier,
            seed,
            str(place),
            share=(k, count),
            tf32=tf32,
            stands_in_for=known.name,
        )
        for k in range(count)
    ]
    cells: list[Cell] = []
    with quiet(), Workers(shares) as workers:
        for cell in workers.remaining():
            cells.append(cell)
            if progress is not None:
                progress(len(cells), total, f"{cell.op} {cell.implementation}")
        with on(known, place):
            cells = alone(cells, local, tier, seed, place, known)
    cells = [cell.model_copy(update={"device": NAME}) for cell in cells]
    facts = environment(place, known, seed, tier, round(time.perf_counter() - began, 3))
    title = f"{known.title}, its {known.arch} PTX on {torch.cuda.get_device_name(place)}"
    return results(facts.model_copy(update={"device": NAME, "device_name": title}), ordered(cells, tier))
