"""How long an implementation takes on one standard case, against the least time its device profile allows."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ferryman.device_profiles import Profile, floor_seconds
from ferryman.dispatch import registry
from ferryman.dispatch.select import View, refusals, target_of
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.inputs.cases import cases_of, materialise
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.results import WITH_LAUNCHES, Cell, Clock, Timing
from ferryman.porting.running.process import device_lost

_BUDGET_MS = 100.0  # of measured time per cell; with warm-up and flushing one of short calls stays under 0.2 s
_WARM = 3
_MOST = 30
_FLUSH_BYTES = 256 * 2**20  # as much as the largest cache in the catalogue: inputs are read from memory
_MOST_FLUSHES = 64  # 4 ms and more


def standard_case(primitive: Primitive) -> Case | None:
    """The case that is timed: the op's first standard one that is no exact probe; its first where all are exact."""
    known = cases_of(primitive, "standard")
    return next((case for case in known if not case.exact), known[0] if known else None)


def measure(
    primitive: Primitive,
    implementation: Implementation,
    dtype: torch.dtype,
    device: torch.device,
    profile: Profile,
    seed: int = 0,
    args: tuple[Any, ...] | None = None,
    kernel: Callable[..., Any] | None = None,
) -> Timing | None:
    """Median of repeats by device events, caches flushed between them; None where the implementation cannot run it.

    ``kernel`` replaces the implementation's own launcher. A kernel's own exceptions rise.
    """
    case = standard_case(primitive)
    if case is None or device.type != "cuda":
        return None
    args = args if args is not None else materialise(case, primitive, dtype, seed, device)
    if kernel is None and refusals(implementation, View.of(primitive, args, profile), profile):
        return None
    kernel, target = kernel or registry.launcher(implementation), target_of(profile)
    with torch.no_grad(), torch.cuda.device(device):
        over = [args[place] for place, _ in primitive.overwritten]
        seconds, clock = events(lambda: kernel(*args, target), device, over)
    return against_roofline(primitive, implementation.name, dtype, device, case.name, seconds, clock, profile, args)


def events(call: Callable[[], Any], device: torch.device, over: Sequence[torch.Tensor] = ()) -> tuple[float, Clock]:
    """Median seconds of a call, and what they count. ``over``: what it writes over, and gets back before each repeat.

    The caches are flushed before each repeat, which takes 60 us and more, so that the host runs ahead and its own time
    does not enter. Where the device was at the call before the host had launched all of it, the repeat does not count
    and the next ones are flushed longer. A call that waits for the device stays behind it however long that is: its
    time counts its launches.
    """
    pristine = [x.clone() for x in over]
    for _ in range(_WARM):
        call()
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    by_clock: dict[Clock, list[float]] = {"device events": [], WITH_LAUNCHES: []}
    spent, flushes = 0.0, 1
    while max(map(len, by_clock.values())) < _MOST and spent < _BUDGET_MS:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for x, was in zip(over, pristine, strict=True):
            x.copy_(was)
        for _ in range(flushes):
            flush.zero_()
        start.record()
        call()
        end.record()
        overtaken = start.query()
        end.synchronize()
        taken = start.elapsed_time(end)
        spent += taken
        if overtaken and flushes < _MOST_FLUSHES and spent < _BUDGET_MS:
            flushes *= 2
        else:
            by_clock[WITH_LAUNCHES if overtaken else "device events"].append(taken)
    for x, was in zip(over, pristine, strict=True):
        x.copy_(was)
    clock: Clock = "device events" if by_clock["device events"] else WITH_LAUNCHES
    return statistics.median(by_clock[clock]) / 1e3, clock


def against_roofline(
    primitive: Primitive,
    implementation: str,
    dtype: torch.dtype,
    device: torch.device,
    case: str,
    seconds: float,
    clock: Clock,
    profile: Profile,
    args: tuple[Any, ...],
) -> Timing:
    cost = primitive.cost(*args)
    floor = floor_seconds(profile, cost.flops, cost.bytes, dtype)
    return Timing(
        op=primitive.name,
        implementation=implementation,
        device=str(device),
        dtype=dtype_name(dtype),
        case=case,
        seconds=seconds,
        clock=clock,
        floor_seconds=floor.seconds,
        bound_by=floor.bound,
        source=floor.source,
        percent_of_roofline=None if floor.seconds is None or seconds <= 0 else 100 * floor.seconds / seconds,
    )


def slowest(cells: list[Cell]) -> list[Timing]:
    """Where there are no device events: per op, implementation and dtype, the case that took longest, time only."""
    longest: dict[tuple[str, str, str], Cell] = {}
    for cell in cells:
        if cell.seconds is None:
            continue
        key = (cell.op, cell.implementation, cell.dtype)
        if key not in longest or cell.seconds > (longest[key].seconds or 0.0):
            longest[key] = cell
    return [
        Timing(
            op=c.op,
            implementation=c.implementation,
            device=c.device,
            dtype=c.dtype,
            case=c.case,
            seconds=c.seconds or 0.0,
            clock="host clock",
            source="one thread; no roofline on this device",
        )
        for c in longest.values()
    ]


def of_right_ones(
    primitive: Primitive,
    lines: Sequence[Implementation],
    dtypes: Sequence[torch.dtype],
    device: torch.device,
    profile: Profile,
    seed: int,
    cells: Sequence[Cell],
    kernels: Mapping[tuple[str, str], Callable[..., Any]] | None = None,
) -> list[Timing]:
    """Timings of the implementations that were right on every case that ran: a wrong kernel's speed means nothing.

    kernels: (op, implementation) -> what runs in the place of its launcher.
    """
    if device.type != "cuda" or device_lost(device):
        return []
    verdicts: dict[tuple[str, str], set[str]] = {}
    for c in cells:
        if c.op == primitive.name:
            verdicts.setdefault((c.implementation, c.dtype), set()).add(c.verdict)
    timings: list[Timing] = []
    case = standard_case(primitive)
    if case is None:
        return timings
    for dtype in dtypes:
        right = [line for line in lines if _right_everywhere(verdicts.get((line.name, dtype_name(dtype)), set()))]
        if not right:
            continue
        args: tuple[Any, ...] = ()  # frees the last dtype's
        try:
            args = materialise(case, primitive, dtype, seed, device)
            for line in right:
                kernel = (kernels or {}).get((primitive.name, line.name))
                one = measure(primitive, line, dtype, device, profile, seed, args, kernel)
                if one is not None:
                    timings.append(one)
        except torch.OutOfMemoryError as error:
            why = str(error).splitlines()[0][:200]
            warnings.warn(f"{primitive.name} {dtype_name(dtype)} has no times: out of memory: {why}", stacklevel=2)
    return timings


def _right_everywhere(verdicts: set[str]) -> bool:
    return "PASS" in verdicts and verdicts <= {"PASS", "UNIMPLEMENTED", "NOT_RUN"}
