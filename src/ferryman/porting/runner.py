"""The parity check of everything that can run here: ops x implementations x cases x dtypes, as one result document."""

from __future__ import annotations

import importlib.util
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from ferryman.backends.precision import float32_precision
from ferryman.backends.triton import interpreting
from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.errors import UnknownName
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import STORAGE_DTYPES, Case, Primitive
from ferryman.porting import timing
from ferryman.porting.cases import TIERS, cases_of
from ferryman.porting.fills import DTYPES, dtype_name
from ferryman.porting.fingerprint.compare import verify
from ferryman.porting.parity import SEED, Prepared, check_cell, prepare
from ferryman.porting.process import device_lost, placed, quiet
from ferryman.porting.results import Cell, Results, Timing, Verdict, environment, results
from ferryman.porting.worker import Job, Workers

Progress = Callable[[int, int, str], None]
_SHORT = {"f32": "float32", "fp32": "float32", "f16": "float16", "fp16": "float16", "bf16": "bfloat16"}
MOST_JOBS = 8
JOB_BYTES = 8 << 30
ALL = "all"  # the case of a cell that stands for every case
THINNED = "left out: each case runs in one dtype when Triton is interpreted; --full runs it in all"


def dtypes_of(names: Iterable[str | torch.dtype] | None) -> tuple[torch.dtype, ...]:
    """Storage dtypes by name ("bfloat16", "bf16"). Raises UnknownName."""
    if names is None:
        return STORAGE_DTYPES
    known = {dtype_name(d): d for d in STORAGE_DTYPES}
    found = []
    for name in names:
        text = dtype_name(name) if isinstance(name, torch.dtype) else _SHORT.get(name, name)
        if text not in known:
            raise UnknownName("dtype", text, known)
        found.append(known[text])
    return tuple(dict.fromkeys(found))


def tier_cases(primitive: Primitive, tier: str) -> list[Case]:
    """The cases of a tier and of the tiers before it."""
    if tier not in TIERS:
        raise UnknownName("tier", tier, TIERS)
    return [case for t in TIERS[: TIERS.index(tier) + 1] for case in cases_of(primitive, t)]


def turns(case: int, dtype: int, dtypes: int, full: bool) -> bool:
    """Whether an interpreted case runs in this dtype: all of them, or each case in one, in turn."""
    return full or case % dtypes == dtype


def check_op(
    primitive: Primitive,
    lines: Sequence[Implementation],
    dtypes: Sequence[torch.dtype],
    tier: str,
    seed: int,
    device: torch.device,
    profile: Profile,
    *,
    thin: bool = False,
    times: int = 3,
    skip: Collection[tuple[str, ...]] = (),
    simulate: Profile | None = None,
    share: tuple[int, int] = (0, 1),
    only: Collection[tuple[str, ...]] | None = None,
    starting: Callable[[str, str, str, str], None] | None = None,
) -> Iterator[Cell]:
    """Every cell of one op, but those in ``skip``: (op, dtype, case, implementation).

    share: (k, n), of the cases and dtypes every n-th, from k. only: (op, dtype, case); None is all. ``starting`` hears
    of each cell before it runs.
    """
    cases = tier_cases(primitive, tier)
    for d, dtype in enumerate(dtypes):
        for c, case in enumerate(cases):
            key = primitive.name, dtype_name(dtype), case.name
            if only is not None and key not in only:
                continue
            wanted = [line for line in lines if (*key, line.name) not in skip]
            if (thin and not turns(c, d, len(dtypes), False)) or (c * len(dtypes) + d) % share[1] != share[0]:
                continue
            prepared: Prepared | None = None
            for line in wanted:
                if starting is not None:
                    starting(*key, line.name)
                if line is wanted[0]:
                    prepared, verdict, reason = _prepared(primitive, case, dtype, device, seed)
                if prepared is None:
                    yield _not_run(primitive.name, line, device, dtype, reason, case.name, verdict=verdict)
                else:
                    yield check_cell(
                        primitive,
                        line,
                        case,
                        dtype,
                        device,
                        profile,
                        prepared=prepared,
                        times=times,
                        simulate=simulate,
                    )


def _prepared(
    primitive: Primitive, case: Case, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Prepared | None, Verdict, str]:
    try:
        return prepare(primitive, case, dtype, device, seed), "PASS", ""
    except torch.OutOfMemoryError as error:
        return None, "NOT_RUN", f"the oracle ran out of memory: {str(error).splitlines()[0][:300]}"
    except Exception as error:  # noqa: BLE001 - an op from another package may be wrong itself; the others are still judged
        return None, "MISTRUSTED", f"the definition or its bound raised {type(error).__name__}: {str(error)[:300]}"


def _not_run(
    op: str,
    line: Implementation,
    device: torch.device,
    dtype: torch.dtype,
    reason: str,
    case: str = ALL,
    refusals: Sequence[str] = (),
    verdict: Verdict = "NOT_RUN",
) -> Cell:
    return Cell(
        op=op,
        implementation=line.name,
        device=str(device),
        dtype=dtype_name(dtype),
        case=case,
        verdict=verdict,
        reason=reason,
        refusals=list(refusals),
        accumulation=line.accumulation,
        roundings=sorted(line.roundings),
    )


def _needs_worker() -> bool:
    return not interpreting() and importlib.util.find_spec("triton") is not None


def _absent(line: Implementation, profile: Profile) -> list[str]:
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
    ) -> None:
        names = list(registry.primitives()) if ops is None else [registry.primitive(op).name for op in ops]
        wanted = None if backends is None else set(backends)
        for name in wanted or ():
            registry.check_requested(name)
        self.local: list[tuple[Primitive, list[Implementation]]] = []
        self.interpreted: list[str] = []
        self.skipped: list[Cell] = []
        self.total = 0
        for name in dict.fromkeys(names):
            op = registry.primitive(name)
            count = len(tier_cases(op, tier))
            here = []
            for line in registry.asked(name, wanted):
                if line.backend == "triton" and profile.vendor == "cpu" and _needs_worker():
                    self.interpreted.append(name)
                    self.total += count * (len(dtypes) if full else 1)
                    if not full and len(dtypes) > 1:
                        self.skipped += [
                            self._thinned(name, line, device, d, i, count, len(dtypes)) for i, d in enumerate(dtypes)
                        ]
                    continue
                why = _absent(line, profile)
                if why:
                    self.skipped += [_not_run(name, line, device, d, "; ".join(why), refusals=why) for d in dtypes]
                else:
                    here.append(line)
            if here:
                self.local.append((op, here))
                self.total += count * len(dtypes) * len(here)

    @staticmethod
    def _thinned(
        op: str, line: Implementation, device: torch.device, dtype: torch.dtype, index: int, count: int, dtypes: int
    ) -> Cell:
        left = sum(1 for c in range(count) if not turns(c, index, dtypes, False))
        return _not_run(op, line, device, dtype, THINNED, f"{left} of {count} cases")


def run(
    ops: Iterable[str] | None = None,
    backends: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    tier: str | None = None,
    seed: int = SEED,
    progress: Progress | None = None,
    full: bool = False,
    jobs: int = 1,
) -> Results:
    """Check every requested op x implementation on every case, in every dtype, on one device.

    ops, backends, dtypes: names; None is all. device: None is the accelerator, else the CPU. tier: "small" or
    "standard" (which includes small); None is "standard" on an accelerator. full: also every dtype of every interpreted
    case. jobs: processes that share the cells; 1 runs them here. Timings are measured here, alone, afterwards.
    progress(done, total, label) is called after each cell. Raises UnknownName for a name that is not there.
    """
    began = time.perf_counter()
    profile = detect(device)  # names the devices that are here if this one is not
    place = placed(device)
    chosen = dtypes_of(dtypes)
    tier = tier or ("small" if place.type == "cpu" else "standard")
    plan = Plan(ops, backends, chosen, tier, place, profile, full)
    cells = list(plan.skipped)
    done = 0

    def told(label: str) -> None:
        nonlocal done
        done += 1
        if progress is not None:
            progress(done, plan.total, label)

    timings: list[Timing] = []
    lost: str | None = None
    shared = _shares(plan, chosen, tier, seed, place, jobs) if jobs > 1 else []
    interpreted = Job.interpreted(plan.interpreted, chosen, tier, seed, full)
    with quiet(), Workers([interpreted, *shared]) as workers:
        for op, lines in () if shared else plan.local:
            if lost is not None:
                cells += [_not_run(op.name, line, place, d, lost) for line in lines for d in chosen]
                continue
            for cell in check_op(op, lines, chosen, tier, seed, place, profile):
                cells.append(cell)
                told(f"{cell.op} {cell.implementation}")
            lost = device_lost(place)
            if lost is None:
                timings += timing.of_right_ones(op, lines, chosen, place, profile, seed, cells)
            for cell in workers.ready():
                cells.append(cell)
                told(f"{cell.op} {cell.implementation} (interpreted)")
        for cell in workers.remaining():
            cells.append(cell)
            told(f"{cell.op} {cell.implementation}")
    if shared:  # the workers have ended, and left the device's memory
        with quiet():
            cells = alone(cells, plan.local, tier, seed, place, profile)
            for op, lines in plan.local:
                timings += timing.of_right_ones(op, lines, chosen, place, profile, seed, cells)
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
    return [Job(lines, names, tier, seed, str(device), share=(k, jobs), tf32=tf32) for k in range(jobs)]


def alone(
    cells: list[Cell],
    local: Iterable[tuple[Primitive, Sequence[Implementation]]],
    tier: str,
    seed: int,
    device: torch.device,
    profile: Profile,
) -> list[Cell]:
    """Cells that found no memory beside the other processes, once more without them."""
    short = {
        (c.op, c.dtype, c.case, c.implementation)
        for c in cells
        if c.verdict == "NOT_RUN" and "out of memory" in (c.reason or "")
    }
    found = [c for c in cells if (c.op, c.dtype, c.case, c.implementation) not in short]
    for op, lines in local:
        for case in tier_cases(op, tier):
            for name in dict.fromkeys(d for o, d, c, _ in short if (o, c) == (op.name, case.name)):
                mine = [line for line in lines if (op.name, name, case.name, line.name) in short]
                prepared, verdict, reason = _prepared(op, case, DTYPES[name], device, seed)
                for line in mine:
                    if prepared is None:
                        found.append(_not_run(op.name, line, device, DTYPES[name], reason, case.name, verdict=verdict))
                    else:
                        found.append(check_cell(op, line, case, DTYPES[name], device, profile, prepared=prepared))
    return found


def ordered(cells: Iterable[Cell], tier: str) -> list[Cell]:
    """By op, implementation and dtype as they are listed; what stands for many cases first, then case by case."""
    ops = {name: i for i, name in enumerate(registry.primitives())}
    lines = {(op, x.name): i for op in ops for i, x in enumerate(registry.implementations(op))}
    dtypes = {dtype_name(d): i for i, d in enumerate(STORAGE_DTYPES)}
    cases = {(op, case.name): i for op in ops for i, case in enumerate(tier_cases(registry.primitive(op), tier))}

    def place(c: Cell) -> tuple[int, int, int, int]:
        return ops[c.op], lines[c.op, c.implementation], dtypes[c.dtype], cases.get((c.op, c.case), -1)

    once: dict[tuple[str, str, str, str], Cell] = {}
    for cell in cells:  # several workers may have lost the same op as a whole
        key = (cell.op, cell.implementation, cell.dtype, cell.case)
        if key not in once or cell.verdict == "FAIL":
            once[key] = cell
    return sorted(once.values(), key=place)
