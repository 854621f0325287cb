"""A benchmark: ceilings, then every cell, its contenders taking turns over three trials on rotated inputs."""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferryman.device_profiles import Profile, floor_seconds
from ferryman.dispatch import preparing, registry, select, use
from ferryman.errors import FerrymanError
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import ceilings, clock, grid, peers, rotation
from ferryman.porting.bench.condition import watch
from ferryman.porting.bench.contender import Contender, close, drop, prepare, steady_trials
from ferryman.porting.bench.document import Benchmark, Ceilings, Cell, Times
from ferryman.porting.inputs.cases import as_tuple, forward_of
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging import results
from ferryman.porting.running.process import failure, placed, quiet
from ferryman.porting.running.timing import standard_case

COPY = "copy"
Advance = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Plan:
    """What is run; `run` makes it from names."""

    device: torch.device
    profile: Profile
    dtype: torch.dtype
    cells: tuple[tuple[Primitive, Case], ...]
    implementations: tuple[str, ...]
    adapters: tuple[peers.Adapter, ...]
    seed: int
    prepares: bool = True  # what serves prepared calls only; else it serves what this process prepared before


def cells_of(
    ops: Sequence[str] | None, grid_name: str, device: torch.device, only: Container[tuple[str, str]] | None = None
) -> tuple[tuple[Primitive, Case], ...]:
    """What `run` times. Raises UnknownName for an op or grid, FerrymanError where nothing is left."""
    size = grid.grid_of(grid_name)
    chosen = [registry.primitive(name) for name in dict.fromkeys(ops or registry.primitives())]
    cells = ((op, case) for op in chosen for case in grid.cases(op, size, device))
    if not (kept := tuple(c for c in cells if only is None or (c[0].name, c[1].name) in only)):
        raise FerrymanError(f"nothing to time: {_missing(chosen, size)}")
    return kept


def _missing(chosen: Sequence[Primitive], size: str) -> str:
    if not any(standard_case(op) for op in chosen):
        return f"no standard case of {', '.join(op.name for op in chosen)}; required: one in the op's evidence"
    return f"no case of the {size} grid is one of those that were asked for"


def run(
    ops: Sequence[str] | None = None,
    implementations: Sequence[str] | None = None,
    grid_name: str = "small",
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.bfloat16,
    peer_names: Sequence[str] | None = (),
    peers_from: Path = peers.DEFAULT,
    seed: int = 0,
    only: frozenset[tuple[str, str]] | None = None,
    advance: Advance = lambda done, total, label: None,
    limits: Ceilings | None = None,
    finished: Callable[[Benchmark], None] = lambda partial: None,
) -> Benchmark:
    """Time every op, or those named, on a grid. ``peer_names``: None is every adapter there is, () is none.

    ``only``: (op, case) pairs of the grid. ``limits``: this device's ceilings, where this is part of a
    larger run that measured them. ``finished``: called after each cell but the last with the document of the cells so
    far, which says how many are left. Raises
    UnknownName for an op, implementation, grid or peer.
    """
    start, place, size = time.monotonic(), placed(device), grid.grid_of(grid_name)
    cells = cells_of(ops, size, place, only)
    for name in implementations or ():
        registry.check_requested(name)
    adapters = [] if peer_names == () else peers.adapters(peers_from, peer_names)
    announced = [adapter.peer() for adapter in adapters]
    profile = select.profile_for(place)
    plan = Plan(
        place,
        profile,
        dtype,
        cells,
        tuple(implementations or ()),
        tuple(a for a, peer in zip(adapters, announced, strict=True) if peer.reason is None),
        seed,
    )
    if limits is None:  # a part of a larger run may have none of its implementations
        require_served(plan)
    with quiet(), _current(place):
        limits = limits or ceilings.measure(place, dtype)
        environment = results.environment(place, profile, seed, size)
        timed: list[Cell] = []

        def document() -> Benchmark:
            facts = environment.model_copy(update={"seconds": time.monotonic() - start})
            left = len(cells) - len(timed)
            return Benchmark(environment=facts, ceilings=limits, peers=announced, cells=list(timed), left=left)

        for number, (op, case) in enumerate(cells):
            advance(number, len(cells), f"{op.name} {case.name}")
            try:
                timed.append(_cell(plan, op, case, limits))
            except Exception as error:  # noqa: BLE001 - no memory for its inputs, mostly: the other cells are timed
                timed.append(not_timed(plan, op, case, failure(error, place)))
            if place.type == "cuda":
                torch.cuda.empty_cache()
            if len(timed) < len(cells):
                finished(document())
        advance(len(cells), len(cells), "")
    return document()


def require_served(plan: Plan) -> None:
    """Raises FerrymanError where none of the implementations that are asked for serves the device."""
    ops = dict.fromkeys(op.name for op, _ in plan.cells)
    served = [line for op in ops for line in _menu(plan, op)]
    if plan.implementations and not any(line.answers(name) for line in served for name in plan.implementations):
        reason = f"{', '.join(plan.implementations)} serves none of {', '.join(ops)} on {plan.device}"
        names = ", ".join(sorted({line.name for line in served}))
        raise FerrymanError(f"nothing to time: {reason}; required: one of {names}")


def _menu(plan: Plan, op: str) -> list[Implementation]:
    """An op's implementations for the device's vendor, whether asked for or not."""
    backends = registry.backends()
    return [x for x in registry.implementations(op) if plan.profile.vendor in backends[x.backend].vendors]


def _current(device: torch.device) -> Any:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


def _cell(plan: Plan, op: Primitive, case: Case, limits: Ceilings) -> Cell:
    device = plan.device
    sets, rotated_bytes = rotated(plan, op, case)
    first, cache = sets[0], rotation.cache_of(plan.profile)
    cost = op.cost(*first)
    contenders = [*implementations(plan, op, first), *peer_contenders(plan, op, first), _copy(cost.bytes, device)]
    seen, again = watch(device), rotation.restoring(op, sets)
    for contender in contenders:
        prepare(contender, sets, device, seen.sample, again)
    noise, untrusted = steady_trials([c for c in contenders if c.timer is not None], seen)
    for contender in contenders:
        _finish(contender, first, device)
    floor = floor_seconds(plan.profile, cost.flops, cost.bytes, plan.dtype)
    copied = next(c for c in contenders if c.name == COPY)
    condition = seen.condition()
    times = [_times(c, copied, cost.flops, limits, floor.seconds) for c in contenders]
    if floor.peak_seconds and rotated_bytes >= rotation.CACHES * cache:
        untrusted += [
            f"{t.name} is faster than the device's peaks allow: the measurement is wrong"
            for t in times
            if t.role != "reference" and t.seconds is not None and t.seconds < floor.peak_seconds
        ]
    return Cell(
        op=op.name,
        case=case.name,
        dtype=dtype_name(plan.dtype),
        bytes=cost.bytes,
        flops=cost.flops,
        floor_seconds=floor.seconds,
        bound_by=floor.bound,
        sets=len(sets),
        rotated_bytes=rotated_bytes,
        rotated_over_cache=rotated_bytes / cache,
        noise=noise,
        times=times,
        condition=condition,
        untrusted=untrusted,
    )


def not_timed(plan: Plan, op: Primitive, case: Case, why: str) -> Cell:
    """A cell that failed as a whole."""
    args = grid.on_meta(op, case, plan.dtype)
    cost = op.cost(*args)
    times = [
        Times(name=c.name, role=c.role, skipped=c.skipped or f"its cell failed: {why}")
        for c in implementations(plan, op, args)
    ]
    return Cell(
        op=op.name,
        case=case.name,
        dtype=dtype_name(plan.dtype),
        bytes=cost.bytes,
        flops=cost.flops,
        sets=0,
        rotated_bytes=0,
        times=times,
        condition=watch(plan.device).condition(),
        untrusted=[f"it failed: {why}"],
    )


def rotated(plan: Plan, op: Primitive, case: Case) -> tuple[list[tuple[Any, ...]], int]:
    """Sets of equal, random inputs that together outgrow the last cache, and the bytes of them all."""
    given = grid.inputs(op, case, plan.dtype, plan.seed, plan.device)
    return rotation.sets_of(given, plan.device, rotation.cache_of(plan.profile))


def implementations(plan: Plan, op: Primitive, args: tuple[Any, ...]) -> list[Contender]:
    """The op's menu on these inputs, or the part of it that the plan names; with the reasons where one refuses.

    Each as dispatch would run it: in the configuration that was measured fastest, where the lockfile has one. What
    serves prepared calls only is prepared for this one, outside any time.
    """
    _, failed = preparing.ready(op, args, plan.profile, plan.implementations) if plan.prepares else ((), {})
    view = select.View.of(op, args, plan.profile)
    contenders = []
    for line in _menu(plan, op.name):
        asked = any(map(line.answers, plan.implementations))
        if (plan.implementations and not asked) or (line.backend == "definition" and not asked):
            continue
        why = select.refusals(line, view, plan.profile)
        if line.name in failed:
            why = [str(failed[line.name])]
        contender = configured(plan, op, line, "" if why else select.configuration_of(op, args, plan.profile, line))
        contender.skipped = "; ".join(why) if why else None
        contenders.append(contender)
    return contenders


def own_plans(plan: Plan, op: Primitive, args: tuple[Any, ...]) -> list[Contender]:
    """What `implementations` has in a tuned configuration, as it would run without a lockfile."""
    contenders, view = [], select.View.of(op, args, plan.profile)
    for line in registry.implementations(op.name):
        if not select.refusals(line, view, plan.profile) and select.configuration_of(op, args, plan.profile, line):
            contenders.append(configured(plan, op, line))
            contenders[-1].name += ", its own plan"
    return contenders


def configured(plan: Plan, op: Primitive, line: Implementation, configuration: str = "") -> Contender:
    """One implementation in one of its configurations; "" is its own plan."""
    target = select.target_of(plan.profile, configuration)
    return Contender(
        line.name, "implementation", functools.partial(_launched, line, target), functools.partial(_public, op)
    )


def _launched(line: Implementation, target: Any, args: tuple[Any, ...]) -> Callable[[], Any]:
    return functools.partial(registry.launcher(line), *args, target)


def _public(op: Primitive, args: tuple[Any, ...]) -> Callable[[], Any]:
    return functools.partial(op.namespace["_resolve"], *args)


def peer_contenders(plan: Plan, op: Primitive, args: tuple[Any, ...]) -> list[Contender]:
    """Adapters that serve the op, once they were right on its standard case and agree with it on these inputs."""
    contenders = []
    for adapter in plan.adapters:
        if op.name not in adapter.ops:
            continue
        contender = Contender(adapter.name, "peer", functools.partial(adapter.call_of, op.name))
        contender.public = contender.call_of
        contender.skipped = _mistaken(plan, op, adapter, args)
        contenders.append(contender)
    return contenders


_standard: dict[tuple[peers.Adapter, str, torch.dtype, torch.device, int], str | None] = {}


@torch.no_grad()
def _mistaken(plan: Plan, op: Primitive, adapter: peers.Adapter, args: tuple[Any, ...]) -> str | None:
    """Why a peer is not timed: it refuses, fails, or computes something else. Its standard case is judged once."""
    call_of = functools.partial(adapter.call_of, op.name)
    key = (adapter, op.name, plan.dtype, plan.device, plan.seed)
    try:
        if key not in _standard:
            _standard[key] = _differing(plan, op, call_of)
        if (difference := _standard[key]) is not None:
            return difference
        ours = as_tuple(op.namespace["_resolve"](*rotation.spared(op, args)))
        difference = peers.wrong(op, args, call_of(rotation.spared(op, args))(), ours, peers.AGREEING)
        return None if difference is None else f"does not agree with ours on these inputs: {difference}"
    except peers.NotServed as error:
        return f"not served: {error}"
    except Exception as error:  # noqa: BLE001 - other libraries raise what they like; a lost device rises next
        return failure(error, plan.device)


def _differing(plan: Plan, op: Primitive, call_of: Callable[[tuple[Any, ...]], Callable[[], Any]]) -> str | None:
    """How a peer's result differs from the op's float64 meaning on its standard case; None where it does not."""
    case = standard_case(forward_of(op) or op)
    if case is None:
        return None
    small = tuple(rotation.own(a) for a in grid.inputs(op, case, plan.dtype, plan.seed, plan.device))
    difference = _judged(op, small, call_of)
    return None if difference is None else f"not equal to the op on {case.name}: {difference}"


def _judged(
    op: Primitive, args: tuple[Any, ...], call_of: Callable[[tuple[Any, ...]], Callable[[], Any]]
) -> str | None:
    try:
        return peers.wrong(op, args, call_of(rotation.spared(op, args))())
    except peers.NotServed:  # not this case; the timed one may be served, and is compared with ours
        return None


def _copy(bytes_moved: float, device: torch.device) -> Contender:
    """A copy of as many bytes as the op must move, rotated as the inputs are."""
    copies = ceilings.copies(bytes_moved, device)
    return Contender(COPY, "reference", lambda args: copies())


@torch.no_grad()
def _finish(contender: Contender, args: tuple[Any, ...], device: torch.device) -> None:
    """The columns beside the trials, and an end to what the timer keeps."""
    if contender.timer is None:
        return
    try:
        contender.warm = contender.timer.warm()
        if contender.public is not None:
            contender.host = _host(contender, args, device)
    except Exception as error:  # noqa: BLE001 - as in `prepare`
        drop(contender, failure(error, device))
    close(contender)


def _host(contender: Contender, args: tuple[Any, ...], device: torch.device) -> float:
    assert contender.public is not None
    if contender.role != "implementation":
        return clock.host(contender.public(args), device)
    with use(contender.name):
        return clock.host(contender.public(args), device)


def _times(contender: Contender, copied: Contender, flops: float, limits: Ceilings, floor: float | None) -> Times:
    if not contender.trials:
        return Times(name=contender.name, role=contender.role, skipped=contender.skipped or "not timed")
    middle = sorted(contender.trials)[len(contender.trials) // 2]
    copy = sorted(copied.trials)[len(copied.trials) // 2] if copied.trials else None
    product = flops / limits.product_flops_per_s
    return Times(
        name=contender.name,
        role=contender.role,
        method=contender.method,
        trials=contender.trials,
        warm_seconds=contender.warm,
        host_seconds=contender.host,
        of_copy=None if copy is None else copy / middle,
        of_product=product / middle if flops else None,
        of_roofline=None if floor is None else floor / middle,
        note=contender.note,
    )
