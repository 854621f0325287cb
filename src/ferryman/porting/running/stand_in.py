"""The parity check of an older NVIDIA device's Triton kernels, executed through their PTX by the device that is here.

The configurations are those that dispatch would choose on the older device. The document is the one of any check; its
device is "stand-in", and no verdict in it is PASS: the instructions are the older device's, the units that execute them
are not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

import torch

from ferryman.backends.precision import float32_precision
from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import SEED
from ferryman.porting.judging.results import Cell, Results, environment, results
from ferryman.porting.running.cells import alone, dtypes_of, ordered, require_lines, tier_cases
from ferryman.porting.running.process import placed, quiet
from ferryman.porting.running.runner import default_jobs
from ferryman.porting.running.stand_in_route import NAME, SERVES, on, require
from ferryman.porting.running.workers import Job, Workers


def run(
    known: Profile,
    ops: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    tier: str | None = None,
    seed: int = SEED,
    progress: Callable[[int, int, str], None] | None = None,
    jobs: int | None = None,
) -> Results:
    """Check every requested op in Triton as it would run on ``known``.

    backends: None, or "triton" alone. Other parameters as `runner.run` has them; ``jobs`` None is as many processes as
    share this device. Raises ArgumentError as `require` and `require_lines`, and for another backend; UnknownName for
    a name that is not there.
    """
    began = time.perf_counter()
    for name in SERVES if backends is None else tuple(backends):
        registry.check_requested(name)
        if name.partition(".")[0] not in SERVES:
            raise ArgumentError("check", "--backend", name, f"{' or '.join(SERVES)} beside --as: it alone has PTX")
    require(known, detect(device))
    require_lines(ops, SERVES if backends is None else tuple(backends))
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
