"""The parity check on a simulated device: the cells that hardware would run, on code compiled for its arch.

Worker processes share the cells; each compiles and executes. The document is the one of any check, its device is
"simulated", and no verdict in it is PASS.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import torch

from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import SEED
from ferryman.porting.judging.results import Cell, Results, environment, results
from ferryman.porting.running.cells import dtypes_of, ordered, require_lines, tier_cases
from ferryman.porting.running.process import quiet
from ferryman.porting.running.simulated_route import NAME, SERVES, assumptions_of, flags, require
from ferryman.porting.running.workers import Job, Workers

if TYPE_CHECKING:
    from ferryman.backends.simulator.numerics import Assumptions


def default_jobs() -> int:
    return max(1, min(8, os.cpu_count() or 1))


def run(
    known: Profile,
    ops: Sequence[str] | None = None,
    backends: Iterable[str] | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    tier: str | None = None,
    seed: int = SEED,
    progress: Callable[[int, int, str], None] | None = None,
    jobs: int | None = None,
    assumptions: Assumptions | None = None,
    thin: bool = False,
    share: tuple[int, int] = (0, 1),
) -> Results:
    """Check every requested op x implementation in Triton or HIP on a device of ``known``'s arch that is not here.

    backends: of those two; None is both. assumptions: about arithmetic that AMD does not document; the document's flags
    record them. thin: each case in one dtype, in turn. share: (k, n), every n-th of the cells
    from k. Other parameters as `runner.run` has them; ``tier`` None is "small".
    Raises ArgumentError for a device that has no simulator, and as `require_lines`; UnknownName for a name that is not
    there.
    """
    began = time.perf_counter()
    require(known)
    wanted = tuple(backends) if backends is not None else SERVES
    for name in wanted:
        registry.check_requested(name)
        if name.partition(".")[0] not in SERVES:
            raise ArgumentError("check", "--backend", name, f"{' or '.join(SERVES)} beside {NAME}")
    require_lines(ops, wanted)
    assumed = assumptions or assumptions_of(())
    chosen, tier = dtypes_of(dtypes), tier or "small"
    names = list(registry.primitives()) if ops is None else [registry.primitive(op).name for op in ops]
    lines = {op: [x.name for x in registry.asked(op, wanted)] for op in dict.fromkeys(names)}
    lines = {op: served for op, served in lines.items() if served}
    each = 1 if thin else len(chosen)
    cells_of = {op: len(tier_cases(registry.primitive(op), tier)) * each for op in lines}
    total = sum(-(-cells_of[op] // share[1]) * len(served) for op, served in lines.items())
    count = jobs or default_jobs()
    shares = [
        Job(
            lines,
            [dtype_name(d) for d in chosen],
            tier,
            seed,
            "cpu",
            thin=thin,
            share=(share[0] + k * share[1], count * share[1]),
            simulated=known.name,
            assume=asdict(assumed),
        )
        for k in range(count)
    ]
    cells: list[Cell] = []
    with quiet(), Workers(shares) as workers:
        for cell in workers.remaining():
            cells.append(cell.model_copy(update={"device": NAME}))
            if progress is not None:
                progress(len(cells), total, f"{cell.op} {cell.implementation}")
    facts = environment(torch.device("cpu"), known, seed, tier, round(time.perf_counter() - began, 3))
    facts = facts.model_copy(
        update={"device": NAME, "device_name": f"{known.title}, simulated", "flags": facts.flags | flags(assumed)}
    )
    return results(facts, ordered(cells, tier))
