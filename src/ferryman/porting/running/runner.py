"""The parity check of everything that can run here: ops x implementations x cases x dtypes, as one result document."""

from __future__ import annotations

import functools
import importlib.util
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

import torch

from ferryman.backends.precision import float32_precision
from ferryman.backends.triton import interpreting
from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.fingerprint.compare import verify
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import SEED
from ferryman.porting.judging.results import Cell, Results, Timing, environment, results
from ferryman.porting.running import timing
from ferryman.porting.running.cells import (
    Turn,
    alone,
    check_op,
    dtypes_of,
    not_run,
    ordered,
    require_lines,
    tier_cases,
    turns,
)
from ferryman.porting.running.process import device_lost, machine_bytes, placed, quiet
from ferryman.porting.running.workers import Job, Workers

Progress = Callable[[int, int, str], None]
MOST_JOBS = 8
JOB_BYTES = 8 << 30
INTERPRETER_BYTES = 2 << 30
INTERRUPTED = "the check was interrupted"
THINNED = "left out: each case runs in one dtype when Triton is interpreted; --full runs it in all"
IN_TURN = "left out: each case runs in one dtype at most, by --turn; without it in all"


class Interrupted(KeyboardInterrupt):
    """A check was interrupted. ``document`` has what was judged, and says of the rest that it did not run."""

    def __init__(self, document: Results) -> None:
        super().__init__(INTERRUPTED)
        self.document = document


def _needs_worker() -> bool:
    return not interpreting() and importlib.util.find_spec("triton") is not None


def absent(line: Implementation, profile: Profile) -> list[str]:
    """Why a backend cannot run here at all."""
    backend = registry.backends()[line.backend]
    if profile.vendor not in backend.vendors:
        return [f"{line.backend} does not serve {profile.vendor} devices"]
    return list(registry.probe(line.backend, profile.vendor))


class Plan:
    """What runs in this process, what an interpreter's process runs, and what cannot run here."""

    def __init__(
        self,
        ops: Iterable[str] | None,
        backends: Iterable[str] | None,
        dtypes: Sequence[torch.dtype],
        tier: str,
        device: torch.device,
        profile: Profile,
        full: bool,
        turn: Turn | None = None,
    ) -> None:
        names = list(registry.primitives()) if ops is None else [registry.primitive(op).name for op in ops]
        wanted = None if backends is None else set(backends)
        for name in wanted or ():
            registry.check_requested(name)
        self.local: list[tuple[Primitive, list[Implementation]]] = []
        self.interpreted: list[str] = []
        self.expected: Counter[tuple[str, str, str]] = Counter()  # cells, by op, implementation and dtype
        self.skipped: list[Cell] = []
        self.turn = turn
        for name in dict.fromkeys(names):
            op = registry.primitive(name)
            count = len(tier_cases(op, tier))
            unjudged = None if count else registry.unjudged(name)
            here = []
            for line in registry.asked(name, wanted):
                if unjudged is not None:
                    self.skipped += [not_run(name, line, device, d, f"left out: {unjudged}") for d in dtypes]
                    continue
                if line.backend == "triton" and profile.vendor == "cpu" and _needs_worker():
                    self.interpreted.append(name)
                    self._take(name, line, device, dtypes, count, None if full else THINNED)
                    continue
                why = absent(line, profile)
                if why:
                    self.skipped += [not_run(name, line, device, d, "; ".join(why), refusals=why) for d in dtypes]
                else:
                    here.append(line)
                    self._take(name, line, device, dtypes, count, None if turn is None else IN_TURN)
            if here:
                self.local.append((op, here))

    def _take(
        self,
        op: str,
        line: Implementation,
        device: torch.device,
        dtypes: Sequence[torch.dtype],
        count: int,
        thinned: str | None,
    ) -> None:
        """Expect the cells of an implementation. thinned: why each of its cases runs in one dtype only."""
        for i, dtype in enumerate(dtypes):
            own = sum(turns(c, i, len(dtypes), thinned is None, self.turn) for c in range(count))
            self.expected[op, line.name, dtype_name(dtype)] = own
            if thinned is not None and own < count:
                self.skipped.append(not_run(op, line, device, dtype, thinned, f"{count - own} of {count} cases"))

    @functools.cached_property
    def total(self) -> int:
        return self.expected.total()

    def left(self, cells: Iterable[Cell], device: torch.device) -> Iterator[Cell]:
        """What is not among these cells."""
        done = Counter((c.op, c.implementation, c.dtype) for c in cells if c.reason not in (THINNED, IN_TURN))
        for key, wanted in self.expected.items():
            if done[key] < wanted:
                op, name, dtype = key
                line, many = registry.implementation(op, name), f"{wanted - done[key]} of {wanted} cases"
                yield not_run(op, line, device, getattr(torch, dtype), INTERRUPTED, many)


def run(
    ops: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    device: torch.device | str | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    tier: str | None = None,
    seed: int = SEED,
    progress: Progress | None = None,
    full: bool = False,
    jobs: int = 1,
    interpreted_jobs: int | None = None,
    turn: Turn | None = None,
) -> Results:
    """Check every requested op x implementation on every case, in every dtype, on one device.

    ops, backends, dtypes: names; None is all. device: None is the accelerator, else the CPU. tier: "small" or
    "standard" (which includes small); None is "standard" on an accelerator. full: also every dtype of every interpreted
    case. jobs: processes that share the cells; 1 runs them here, but for those that are interpreted, which
    ``interpreted_jobs`` processes share (None: `interpreters`). Timings are measured here, alone, afterwards.
    turn: (k, n), the k-th of n turns that are all cells together, a case in one dtype at most; n is a multiple of the
    number of dtypes. None: all, but what is interpreted without ``full``.
    progress(done, total, label) is called after each cell. Raises UnknownName for a name that is not there, Interrupted
    instead of KeyboardInterrupt, ArgumentError as `require_lines`.
    """
    began = time.perf_counter()
    profile = detect(device)  # names the devices that are here if this one is not
    place = placed(device)
    chosen = dtypes_of(dtypes)
    tier = tier or ("small" if place.type == "cpu" else "standard")
    if turn is not None and turn[1] % len(chosen):
        raise ArgumentError("check", "turns", str(turn[1]), f"a multiple of {len(chosen)}, as many as there are dtypes")
    plan = Plan(ops, backends, chosen, tier, place, profile, full, turn)
    require_lines(ops, backends)
    cells = list(plan.skipped)
    done = 0

    def announce(label: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, plan.total, label)

    timings: list[Timing] = []
    lost: str | None = None
    shared = _shares(plan, chosen, tier, seed, place, jobs) if jobs > 1 else []
    asked = Job.interpreted(plan.interpreted, chosen, tier, seed, full, turn)
    count = interpreted_jobs or (jobs if jobs > 1 else interpreters())
    interpreted = [replace(asked, share=(k, count)) for k in range(count)]
    try:
        with quiet(), Workers([*interpreted, *shared]) as workers:
            for op, lines in () if shared else plan.local:
                if lost is not None:
                    cells += [not_run(op.name, line, place, d, lost) for line in lines for d in chosen]
                    continue
                for cell in check_op(op, lines, chosen, tier, seed, place, profile, thin=turn is not None, turn=turn):
                    cells.append(cell)
                    announce(f"{cell.op} {cell.implementation}")
                lost = device_lost(place)
                if lost is None:
                    timings += timing.of_right_ones(op, lines, chosen, place, profile, seed, cells)
                for cell in workers.ready():
                    cells.append(cell)
                    announce(f"{cell.op} {cell.implementation} (interpreted)")
            for cell in workers.remaining():
                cells.append(cell)
                announce(f"{cell.op} {cell.implementation}")
        if shared:  # the workers have ended, and left the device's memory
            with quiet():
                cells = alone(cells, plan.local, tier, seed, place, profile)
                for op, lines in plan.local:
                    timings += timing.of_right_ones(op, lines, chosen, place, profile, seed, cells)
    except KeyboardInterrupt:
        cells += plan.left(cells, place)
        facts = environment(place, profile, seed, tier, round(time.perf_counter() - began, 3))
        raise Interrupted(results(facts, ordered(cells, tier), timings)) from None
    cells = ordered(cells, tier)
    if place.type == "cpu":
        timings = timing.slowest(cells)
    facts = environment(place, profile, seed, tier, round(time.perf_counter() - began, 3))
    document = results(facts, cells, timings)
    return document.model_copy(update={"numerics": [] if lost is not None else verify(profile, place)})


def default_jobs(device: torch.device | str) -> int:
    """Processes that can share an accelerator: each compiles on a core, and holds a context and an oracle's tensors."""
    place = torch.device(device)
    if place.type != "cuda":
        return 1
    memory = torch.cuda.get_device_properties(place).total_memory
    return max(1, min(MOST_JOBS, (os.cpu_count() or 1) // 2, memory // JOB_BYTES))


def interpreters() -> int:
    """Processes that share the cells of interpreted Triton: each is one thread of NumPy."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_JOBS, cores, machine_bytes() // INTERPRETER_BYTES))


def compile_ahead(
    ops: Iterable[str] | None,
    backends: Iterable[str] | None,
    device: torch.device,
    dtypes: Sequence[torch.dtype],
    tier: str,
    seed: int,
    jobs: int,
    progress: Progress | None = None,
) -> None:
    """Run every cell in ``jobs`` processes and drop the results: what they compile lies in the disk caches then."""
    plan = Plan(ops, backends, dtypes, tier, device, detect(device), True)
    with Workers(_shares(plan, dtypes, tier, seed, device, jobs)) as workers:
        for done, _ in enumerate(workers.remaining(), 1):
            if progress is not None:
                progress(done, plan.total, "compiling")


def _shares(
    plan: Plan, dtypes: Sequence[torch.dtype], tier: str, seed: int, device: torch.device, jobs: int
) -> list[Job]:
    lines = {op.name: [line.name for line in here] for op, here in plan.local}
    tf32 = float32_precision() == "tf32"
    names = [dtype_name(d) for d in dtypes]
    one = Job(lines, names, tier, seed, str(device), thin=plan.turn is not None, turn=plan.turn, tf32=tf32)
    return [replace(one, share=(k, jobs)) for k in range(jobs)]
