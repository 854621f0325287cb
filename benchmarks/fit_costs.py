"""Fit the cost model's coefficients (`ferryman.dispatch.cost`) of one device to measured times.

    python benchmarks/fit_costs.py h200 h200.lock.json results/h200/linear.json.gz [--write]

It reads what `ferryman bench` and `ferryman tune` write, the table of `benchmarks/linear.py`, and what
`benchmarks/regret.py` measured (with another seed than the run that judges). For each op, width of the storage dtype,
kind of call and implementation: the three coefficients that have the least error of the logarithm (Huber's: one bad
cell does not turn them), drawn a little towards what any sound kernel does, so that one cell is enough to say
something; then what they miss, as a Gaussian process with an exponential kernel has it. It prints the regret of the
choices that the model makes for cells that were left out of the fit, one by one and by whole families (an op at one
width, one weight, one number of heads), beside the profile's preference alone. --write puts the file beside the device
profile, unless an op that stands in the present one would vanish (--drop says that it may).

It says of each file what was left out: times of kernels that changed since (stale), of cases that nobody knows, and of
cells that are not to be trusted. Exits with 1 if a file gives no times or --write is refused, with 2 if a file cannot
be read.
"""

from __future__ import annotations

import argparse
import datetime
import gzip
import hashlib
import json
import math
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import torch
from pydantic import BaseModel, Field, ValidationError

from ferryman import files
from ferryman.cli import calls
from ferryman.device_profiles import Profile
from ferryman.device_profiles import profile as profile_of
from ferryman.dispatch import (
    cost,
    kernel_code,
    lockfile,
    lockfile_document,
    lockfile_entry,
    lockfile_migrate,
    near,
    registry,
    select,
)
from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import FerrymanError, ResultError
from ferryman.ops.primitive import Case
from ferryman.porting.bench import document, grid

DATA = Path(__file__).parents[1] / "src" / "ferryman" / "device_profiles" / "data"
START = np.log([cost.LAUNCH_SECONDS, 0.75, 0.65])  # fixed seconds, shares of bandwidth and of peak
DRAWN = 0.02  # weight of the start against one cell's
OUTLIER = 0.1  # relative error from which a cell pulls no harder
AMPLITUDE, NOISE = 0.3, 0.1  # of what a fit misses: of that which neighbours share, and of each cell for itself
MOST_ERROR = 0.5  # beyond, a cell tells no more
LEAST_ERROR = 0.01
ENOUGH_ROWS = 6  # cells for calls of few rows to be a kind of their own
FEW_ERROR = 0.05  # with too few cells: what H200's row operations at one size miss at twice or half of it
GRIDS: tuple[Literal["small", "full"], ...] = ("small", "full")
STALE, UNKNOWN, UNTRUSTED = "stale", "of unknown cases", "not to be trusted"
READ = "a document of ferryman bench, a lockfile, or a table of benchmarks/linear.py or benchmarks/regret.py"


@dataclass(frozen=True)
class Measured:
    op: str
    case: str
    implementation: str
    seconds: float
    work: cost.Work
    region: str

    @property
    def group(self) -> str:
        return f"{self.op} {self.work.dtype.itemsize * 8}"


Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class _Row(BaseModel):
    m: int
    n: int
    k: int
    us: Positive
    cublas_us: Positive


class _LinearTable(BaseModel):
    """What `benchmarks/linear.py` writes, in a file of the op's name."""

    device: str
    rows: list[_Row]


class _Place(BaseModel):
    profile: str


class _Judged(BaseModel):
    op: str
    case: str
    failed: str | None = None
    seconds: dict[str, Positive] = {}
    hopeless: dict[str, Positive] = {}
    untrusted: list[str] = []


class _RegretTable(BaseModel):
    """What `benchmarks/regret.py` writes, as far as it is read here."""

    environment: _Place
    dtype: str
    cells: list[_Judged]


Form = TypeVar("Form", bound=BaseModel)


def _read(path: Path) -> dict[str, Any]:
    try:
        raw = files.document(path)
    except files.Unreadable as error:
        raise ResultError(str(error)) from error
    if not isinstance(raw, dict):
        raise ResultError(f"{path} holds a {type(raw).__name__}; required: {READ}")
    return raw


def _parsed(form: type[Form], raw: dict[str, Any], path: Path) -> Form:
    try:
        return form.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ResultError(f"{path} is damaged, or none of {READ}: {place}: {first['msg']}") from error


def _require(path: Path, stated: object, profile: Profile) -> None:
    if stated != profile.name:
        raise ResultError(f"{path} is of {stated}, not of {profile.name}")


def cells(path: Path, profile: Profile, left_out: Counter[str] | None = None) -> Iterator[Measured]:
    """What a file holds of a device. ``left_out`` counts the times that are not given, by why.

    Raises FerrymanError for a file that cannot be read, is damaged, or is of another device.
    """
    gone: Counter[str] = Counter() if left_out is None else left_out
    raw = _read(path)
    if raw.get("kind") == document.KIND:
        benchmark = document.parse(raw, str(path))
        _require(path, benchmark.environment.profile, profile)
        for timed in benchmark.cells:
            case = _case(timed.op, timed.case)
            known = {
                times.name: times.seconds
                for times in timed.times
                if times.role == "implementation" and times.seconds is not None and times.note is None
            }
            if case is None or timed.untrusted:
                gone[UNKNOWN if case is None else UNTRUSTED] += len(known)
                continue
            yield from _of(timed.op, case, calls.dtype_of(timed.dtype), known, profile)
    elif raw.get("kind") == "ferryman-lockfile":
        locked = lockfile_document.load(path)
        _require(path, locked.stamp.get("profile"), profile)
        for op, entries in locked.choices.items():
            for region, entry in entries.items():
                name, _, dtype = entry.case.rpartition(" ")
                case = _case(op, name)
                if case is None or lockfile_document.stale(op, entry, region) is not None:
                    gone[UNKNOWN if case is None else STALE] += len(entry.times)
                    continue
                yield from _of(op, case, calls.dtype_of(dtype), entry.times, profile)
    elif raw.get("kind") == "ferryman-regret":
        table = _parsed(_RegretTable, raw, path)
        _require(path, table.environment.profile, profile)
        for cell in table.cells:
            case = _case(cell.op, cell.case) or drawn_case(cell.op, cell.case)
            # not an implementation's own plan beside its tuned configuration
            known = {name: s for name, s in (cell.seconds | cell.hopeless).items() if "," not in name}
            if case is None or cell.failed is not None or cell.untrusted:
                gone[UNKNOWN if case is None else UNTRUSTED] += len(known)
                continue
            yield from _of(cell.op, case, calls.dtype_of(table.dtype), known, profile)
    else:
        products = _parsed(_LinearTable, raw, path)
        if products.device not in profile.identity.names:
            names = ", ".join(profile.identity.names)
            raise ResultError(f"{path} is of {products.device}, not of {profile.name} ({names})")
        op = path.name.partition(".")[0]
        for row in products.rows:
            case = drawn_case(op, f"{row.m}x{row.n}x{row.k}")
            known = {"cuda": row.us * 1e-6, "torch": row.cublas_us * 1e-6}
            if case is None:
                gone[UNKNOWN] += len(known)
                continue
            yield from _of(op, case, torch.bfloat16, known, profile)


def _of(op: str, case: Case, dtype: torch.dtype, times: Mapping[str, float], profile: Profile) -> Iterator[Measured]:
    """Results of an earlier version have its names of implementations."""
    work, region = _work(op, case, dtype)
    known = registry.primitive(op)
    args, names = grid.on_meta(known, case, dtype), {line.name for line in registry.implementations(op)}
    for name, seconds in times.items():
        today = name if name in names else lockfile_migrate.line_of(known, args, name, profile)
        yield Measured(op, case.name, today, seconds, work, region)


def _case(op: str, name: str) -> Case | None:
    known = registry.primitives().get(op)
    if known is None:
        return None
    for size in GRIDS:
        for case in grid.cases(known, size, torch.device("cuda")):
            if case.name == name:
                return case
    return None


def drawn_case(op: str, name: str) -> Case | None:
    """None where `benchmarks/regret.py` draws no shape of that name."""
    known = registry.primitives().get(op)
    named = None if known is None else registry.evidence(known).named
    if named is None:
        return None
    try:
        return named(name)
    except ValueError:  # another number of sizes
        return None


def _work(op: str, case: Case, dtype: torch.dtype) -> tuple[cost.Work, str]:
    known = registry.primitive(op)
    args = grid.on_meta(known, case, dtype)
    return cost.work_of(known, args), lockfile.region(known, args)


def fit(measured: Sequence[Measured], profile: Profile, places: Sequence[tuple[float, ...]] = ()) -> cost.Coefficients:
    """The coefficients of one implementation, and its weights at ``places`` (by default its own cells').

    Its error is that of its cells, each left out once of what is averaged.
    """
    boxes = {}
    for name in {n for m in measured for n in m.work.sizes}:
        rows, widths = zip(*(m.work.sizes[name] for m in measured if name in m.work.sizes), strict=True)
        boxes[name] = (min(rows), max(rows), min(widths), max(widths))
    fixed, memory, compute = (float(value) for value in _fit(measured, profile))
    plain = cost.Coefficients(fixed, memory, compute, FEW_ERROR, len(measured), dict(sorted(boxes.items())))
    missed = np.log([m.seconds / (plain.seconds(m.work, profile) or math.nan) for m in measured])
    own = [m.work.place for m in measured]
    inverse = np.linalg.inv(
        AMPLITUDE**2 * np.array([[cost.nearness(a, b) for b in own] for a in own]) + NOISE**2 * np.eye(len(own))
    )
    values = inverse @ missed
    by_place: dict[tuple[float, ...], float] = defaultdict(float)
    for place, value in zip(own, values, strict=True):
        by_place[place] += float(AMPLITUDE**2 * value)
    places = places or list(by_place)
    left_out = np.minimum(np.abs(values / np.diag(inverse)), MOST_ERROR)
    error = math.sqrt(float(np.mean(left_out**2))) if len(measured) >= cost.ENOUGH else FEW_ERROR
    weights = tuple(by_place.get(place, 0.0) for place in places)
    return replace(plain, error=max(error, LEAST_ERROR), places=tuple(places), weights=weights)


def _parts(work: cost.Work, profile: Profile) -> tuple[float, float]:
    parts = cost.parts(work, profile)
    if parts is None:
        raise SystemExit(f"{profile.name} lacks the bandwidth, or the peak of {work.dtype}: nothing can be fitted")
    return parts


def _fit(measured: Sequence[Measured], profile: Profile) -> Any:
    """Damped Gauss-Newton on the logarithms; shares of a peak are at most 1."""
    drawn = math.sqrt(DRAWN)

    at_peak = np.array([_parts(m.work, profile) for m in measured])
    times = np.log([m.seconds for m in measured])

    def residuals(log: Any) -> Any:  # the formula of `Coefficients.seconds`, for all cells at once
        fixed, memory, compute = np.exp(log)
        predicted = fixed + np.maximum(at_peak[:, 0] / memory, at_peak[:, 1] / compute)
        return np.concatenate([np.log(predicted) - times, drawn * (log - START)])

    def loss(errors: Any) -> float:
        size = np.abs(errors)
        return float(np.sum(np.where(size < OUTLIER, size**2 / 2, OUTLIER * (size - OUTLIER / 2))))

    log, damping = START.copy(), 1e-3
    now = residuals(log)
    for _ in range(40):
        slope = np.stack([(residuals(log + step) - now) / 1e-5 for step in np.eye(3) * 1e-5], axis=1)
        weight = np.minimum(1.0, OUTLIER / np.maximum(np.abs(now), 1e-12))
        step = np.linalg.solve(slope.T @ (slope * weight[:, None]) + damping * np.eye(3), -slope.T @ (weight * now))
        tried = np.minimum(log + step, [math.inf, 0.0, 0.0])
        after = residuals(tried)
        if loss(after) < loss(now):
            done = loss(now) - loss(after) < 1e-9
            log, now, damping = tried, after, damping / 3
            if done:
                break
        else:
            damping *= 5
            if damping > 1e8:
                break
    return np.exp(log)


Table = dict[str, dict[str, dict[str, cost.Coefficients]]]


def table(measured: Sequence[Measured], profile: Profile) -> Table:
    """Coefficients by "op bits", kind of call, and implementation. Calls of one row are a kind of their own where there
    are enough of them, else they stand among the others."""
    by: dict[str, dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for one in measured:
        by[one.group][one.work.kind].append(one)
    fitted: Table = {}
    for group, kinds in sorted(by.items()):
        for kind in [k for k in kinds if cost.general(k) != k]:
            if len({m.case for m in kinds[kind]}) < ENOUGH_ROWS and cost.general(kind) in kinds:
                kinds[cost.general(kind)] += kinds.pop(kind)
        fitted[group] = {kind: _lines(kinds[kind], profile) for kind in sorted(kinds)}
    return fitted


def _lines(measured: Sequence[Measured], profile: Profile) -> dict[str, cost.Coefficients]:
    places = sorted({m.work.place for m in measured})
    if len({len(place) for place in places}) > 1:
        raise SystemExit(f"{measured[0].op}: cells of one kind have tensors of different numbers of dimensions")
    by: dict[str, list[Measured]] = defaultdict(list)
    for one in measured:
        by[one.implementation].append(one)
    return {name: fit(by[name], profile, places) for name in sorted(by)}


CHOOSERS = ("preference", "cost model", "near regions", "dispatch")
Cell = dict[str, Measured]  # by implementation


def family(case: str) -> str:
    """What cells of an op share that are left out together: the numbers of heads, their size and whether there is one
    query; where a case has none of these, all sizes but the first: the weight of a product, or the width."""
    return " ".join(w for w in case.split() if w[0] in "HD" or w == "Q1") or case.partition("x")[2]


def regret(measured: Sequence[Measured], profile: Profile, whole: bool = False) -> dict[str, dict[str, list[float]]]:
    """By op, for every cell left out (or, with ``whole``, each family of cells): the regret of each of CHOOSERS.

    The profile's preference alone; the cost model without a lockfile; what regions near it predict, else preference;
    and as dispatch has it with a lockfile of what is left: regions close to it, else the cost model, else regions near.
    """
    cells_of: dict[tuple[str, str], Cell] = defaultdict(dict)
    for one in measured:
        cells_of[one.group, one.case][one.implementation] = one
    families: dict[tuple[str, str], list[Cell]] = defaultdict(list)
    for (group, case), here in cells_of.items():
        families[group, family(case) if whole else case].append(here)
    regrets: dict[str, dict[str, list[float]]] = {}
    for (group, _), left_out in families.items():
        gone = {next(iter(cell.values())).case for cell in left_out}
        rest = [m for m in measured if m.group == group and m.case not in gone]
        fitted = table(rest, profile).get(group, {})
        others = [cell for (g, case), cell in cells_of.items() if g == group and case not in gone]
        for cell in left_out:
            if len(cell) > 1:
                _judge(cell, others, fitted, profile, regrets.setdefault(group, {c: [] for c in CHOOSERS}))
    return regrets


def _judge(
    here: Cell,
    others: Sequence[Cell],
    fitted: Mapping[str, Mapping[str, cost.Coefficients]],
    profile: Profile,
    into: dict[str, list[float]],
) -> None:
    one = next(iter(here.values()))
    names = select.preferred(registry.primitive(one.op), profile)
    menu = {line.name: line for line in registry.implementations(one.op)}
    modelled = cost.predictions_of(fitted, one.work, profile)
    entries = {next(iter(cell.values())).region: _entry(cell) for cell in others}
    entries.pop(one.region, None)
    beside = near.predict(one.region, one.work, profile, entries)
    orders = (
        names,
        select.foreseen(names, menu, None, modelled)[0],
        names if beside is None else beside.ranked([*names, *menu]),
        select.foreseen(names, menu, beside, modelled)[0],
    )
    least = min(m.seconds for m in here.values())
    for chooser, order in zip(CHOOSERS, orders, strict=True):
        taken = next((n for n in order if n in here), None)  # what is not here refused the call
        if taken is not None:
            into[chooser].append(here[taken].seconds / least - 1)


def _entry(cell: Mapping[str, Measured]) -> lockfile_entry.Entry:
    best = min(cell.values(), key=lambda m: m.seconds)
    return lockfile_entry.Entry(
        implementation=best.implementation,
        seconds=best.seconds,
        kernels=kernel_code.digest(best.op),
        bytes=best.work.bytes,
        flops=best.work.flops,
        candidates=[lockfile_entry.Candidate(implementation=n, seconds=m.seconds) for n, m in cell.items()],
    )


def written(fitted: Table, profile: Profile, stamp: Any) -> str:
    """The file's text, which `cost.load` must take."""
    ops = {group: {kind: _group(lines) for kind, lines in kinds.items()} for group, kinds in fitted.items()}
    costs = {"kind": "ferryman-costs", "version": cost.VERSION, "profile": profile.name, "stamp": stamp, "ops": ops}
    return _tight(json.dumps(costs, indent=1)) + "\n"


def _group(lines: Mapping[str, cost.Coefficients]) -> dict[str, Any]:
    return {
        "places": [[round(n, 2) for n in place] for place in next(iter(lines.values())).places],
        "implementations": {
            name: {
                "fixed": float(f"{c.fixed:.4g}"),
                "memory": float(f"{c.memory:.4g}"),
                "compute": float(f"{c.compute:.4g}"),
                "error": float(f"{c.error:.3g}"),
                "cells": c.cells,
                "weights": [round(w, 3) for w in c.weights],
                "sizes": {
                    n: [[round(b[0], 3), round(b[2], 3)], [round(b[1], 3), round(b[3], 3)]] for n, b in c.sizes.items()
                },
            }
            for name, c in lines.items()
        },
    }


def _tight(text: str) -> str:
    """Lists of numbers on one line, and pairs of them."""
    flat = re.sub(r"\[\s+(-?[\d.][^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    return re.sub(r"\[\s+(\[[^\[\]]*\]),\s+(\[[^\[\]]*\])\s+\](?=,?\n\s+[\"}])", r"[\1, \2]", flat)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="put the file beside the profile")
    parser.add_argument("--drop", action="store_true", help="ops of the present file may vanish")
    given = parser.parse_args()
    try:
        _run(given)
    except FerrymanError as error:
        sys.stderr.write(f"fit_costs: {error}\n")
        raise SystemExit(2) from None


def _run(given: argparse.Namespace) -> None:
    profile = profile_of(given.profile)
    measured, sources = _gathered(given.files, profile)
    fitted = table(measured, profile)
    target = DATA / f"{profile.name}{cost.FILE}"
    if given.write and not given.drop:
        _require_all(target, fitted)
    for group, kinds in fitted.items():
        for kind, lines in kinds.items():
            label = f"{group}{' one' if kind.startswith(cost.ONE) else ''}"
            for name, c in lines.items():
                print(
                    f"{label:30} {name:8} fixed {c.fixed * 1e6:6.2f} us  memory {c.memory:.3f}  "
                    f"compute {c.compute:.3f}  error {c.error:.3f}  {c.cells} cells"
                )
    for title, whole in (("cells left out one by one", False), ("whole families of cells left out", True)):
        every: dict[str, list[float]] = {c: [] for c in CHOOSERS}
        print(f"\nregret, {title}: median, mean, p95\n{'':26} cells  " + "".join(f"{c:24}" for c in CHOOSERS))
        for group, by in {**regret(measured, profile, whole), "all": every}.items():
            print(f"{group:26} {len(by['preference']):5}  " + "".join(f"{_told(by[c]):24}" for c in CHOOSERS))
            for chooser in CHOOSERS if by is not every else ():
                every[chooser] += by[chooser]
    if given.write:
        stamp = {"fitted": datetime.date.today().isoformat(), "by": "benchmarks/fit_costs.py", "from": sources}
        text = written(fitted, profile, stamp)
        cost.load(text, "the fitted file", profile.name)
        try:
            write_whole(target, gzip.compress(text.encode(), mtime=0))
        except OSError as error:
            raise FerrymanError(f"{target} cannot be written: {error.strerror}") from error


def _gathered(files: Sequence[Path], profile: Profile) -> tuple[list[Measured], list[dict[str, Any]]]:
    """The times of all files, and what the stamp says of them. Exits with 1 where a file gives none."""
    measured: list[Measured] = []
    sources: list[dict[str, Any]] = []
    empty = []
    for path in files:
        left_out: Counter[str] = Counter()
        times = list(cells(path, profile, left_out))
        measured += times
        sources.append(
            {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "times": len(times)}
        )
        why = ", ".join(f"{left_out[reason]} {reason}" for reason in (STALE, UNKNOWN, UNTRUSTED) if left_out[reason])
        print(f"{path}: {len(times)} times{'; left out: ' if why else ''}{why}")
        if not times:
            empty.append(f"{path} ({why or 'it holds none'})")
    if empty:
        raise SystemExit(f"fit_costs: no times in {'; '.join(empty)}: measure again, or leave the file out")
    return measured, sources


def _require_all(target: Path, fitted: Table) -> None:
    """Exits with 1 where an op of the present file has no times any more."""
    if not target.exists():
        return
    present = _read(target).get("ops")
    if not isinstance(present, dict):
        raise ResultError(f"{target} is damaged: it has no ops; --drop replaces it")
    gone = [group for group in present if group not in fitted]
    if gone:
        raise SystemExit(
            f"fit_costs: {target} was not written, as these would vanish: {', '.join(gone)} (op, bits of its dtype); "
            "give files that have times of them, or --drop"
        )


def _told(values: Sequence[float]) -> str:
    if not values:
        return "none"
    p95 = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    return f"{statistics.median(values):.1%}, {statistics.fmean(values):.1%}, {p95:.1%}"


if __name__ == "__main__":
    main()
