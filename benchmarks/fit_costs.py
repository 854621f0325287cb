"""Fit the cost model's coefficients (`ferryman.dispatch.cost`) of one device to measured times.

    python benchmarks/fit_costs.py h200 h200.lock.json results/h200/linear.json [--write]

It reads what `ferryman bench` and `ferryman tune` write, the table of `benchmarks/linear.py`, and what
`benchmarks/regret.py` measured (with another seed than the run that judges). For each op, width of the storage dtype,
kind of call and implementation: the three coefficients that have the least error of the logarithm (Huber's: one bad
cell does not turn them), drawn a little towards what any sound kernel does, so that one cell is enough to say
something; then what they miss, as a Gaussian process with an exponential kernel has it. It prints the regret of the
choices that the model makes for cells that were left out of the fit, one by one and by whole families (an op at one
width, one weight, one number of heads), beside the profile's preference alone. --write puts the file beside the device
profile.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.util
import json
import math
import re
import statistics
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import numpy as np
import torch

from ferryman.cli import calls
from ferryman.device_profiles import Profile
from ferryman.device_profiles import profile as profile_of
from ferryman.dispatch import cost, lockfile, lockfile_document, near, registry
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.porting.bench import document, grid
from ferryman.porting.cases import forward_of

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


def cells(path: Path, profile: Profile) -> Iterator[Measured]:
    """What a file holds of a device, as far as its cases are known."""
    raw = json.loads(path.read_text(encoding="utf-8"))
    if raw.get("kind") == document.KIND:
        found = document.parse(raw, str(path))
        if found.environment.profile != profile.name:
            raise SystemExit(f"{path} is of {found.environment.profile}, not of {profile.name}")
        for cell in found.cells:
            case = _case(cell.op, cell.case)
            if case is None or cell.untrusted:
                continue
            work, region = _work(cell.op, case, getattr(torch, cell.dtype))
            for times in cell.times:
                if times.role == "implementation" and times.seconds is not None and times.note is None:
                    yield Measured(cell.op, cell.case, times.name, times.seconds, work, region)
        return
    if raw.get("kind") == "ferryman-lockfile":
        if raw["stamp"]["profile"] != profile.name:
            raise SystemExit(f"{path} is of {raw['stamp']['profile']}, not of {profile.name}")
        for op, entries in lockfile_document.load(path).choices.items():
            for entry in entries.values():
                name, _, dtype = entry.case.rpartition(" ")
                case = _case(op, name)
                if case is not None and lockfile_document.stale(op, entry) is None:
                    work, region = _work(op, case, getattr(torch, dtype))
                    for implementation, seconds in entry.times.items():
                        yield Measured(op, name, implementation, seconds, work, region)
        return
    if raw.get("kind") == "ferryman-regret":
        if raw["environment"]["profile"] != profile.name:
            raise SystemExit(f"{path} is of {raw['environment']['profile']}, not of {profile.name}")
        for cell in raw["cells"]:
            if "failed" not in cell and not cell["untrusted"]:
                case = _case(cell["op"], cell["case"]) or drawn_case(cell["op"], cell["case"])
                work, region = _work(cell["op"], case, calls.dtype_of(raw["dtype"]))
                for name, seconds in (cell["seconds"] | cell["hopeless"]).items():
                    if "," not in name:  # an implementation's own plan beside its tuned configuration
                        yield Measured(cell["op"], cell["case"], name, seconds, work, region)
        return
    if raw["device"] not in profile.identity.names:
        raise SystemExit(f"{path} is of {raw['device']}, not of {profile.name} ({', '.join(profile.identity.names)})")
    for row in raw["rows"]:
        m, n, k = row["m"], row["n"], row["k"]
        case = Case(f"{m}x{n}x{k}", {"x": TensorSpec((m, k)), "weight": TensorSpec((n, k)), "bias": None})
        work, region = _work("linear", case, torch.bfloat16)
        yield Measured("linear", case.name, "cuda", row["us"] * 1e-6, work, region)
        yield Measured("linear", case.name, "torch", row["cublas_us"] * 1e-6, work, region)


def _case(op: str, name: str) -> Case | None:
    known = registry.primitive(op)
    for size in GRIDS:
        for case in grid.cases(known, size, torch.device("cuda")):
            if case.name == name:
                return case
    return None


@lru_cache(maxsize=1)
def _regret() -> ModuleType:
    """`benchmarks/regret.py`, which knows the names of the shapes that it draws."""
    specification = importlib.util.spec_from_file_location("regret", Path(__file__).with_name("regret.py"))
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def drawn_case(op: str, name: str) -> Case:
    known = registry.primitive(op)
    made: Case = _regret().named((forward_of(known) or known).name, name)
    return made


def _work(op: str, case: Case, dtype: torch.dtype) -> tuple[cost.Work, str]:
    known = registry.primitive(op)
    args = calls.of_case(known, case, dtype)
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
    found = cost.parts(work, profile)
    if found is None:
        raise SystemExit(f"{profile.name} lacks the bandwidth, or the peak of {work.dtype}: nothing can be fitted")
    return found


def _fit(measured: Sequence[Measured], profile: Profile) -> Any:
    """Damped Gauss-Newton on the logarithms; shares of a peak are at most 1."""
    drawn = math.sqrt(DRAWN)

    at_peak = np.array([_parts(m.work, profile) for m in measured])
    times = np.log([m.seconds for m in measured])

    def residuals(log: Any) -> Any:  # the formula of `Coefficients.seconds`, for all cells at once
        fixed, memory, compute = np.exp(log)
        predicted = fixed + np.maximum(at_peak[:, 0] / memory, at_peak[:, 1] / compute)
        return np.concatenate([np.log(predicted) - times, drawn * (log - START)])

    def loss(found: Any) -> float:
        size = np.abs(found)
        return float(np.sum(np.where(size < OUTLIER, size**2 / 2, OUTLIER * (size - OUTLIER / 2))))

    log, damping = START.copy(), 1e-3
    now = residuals(log)
    for _ in range(40):
        slope = np.stack([(residuals(log + step) - now) / 1e-5 for step in np.eye(3) * 1e-5], axis=1)
        weight = np.minimum(1.0, OUTLIER / np.maximum(np.abs(now), 1e-12))
        step = np.linalg.solve(slope.T @ (slope * weight[:, None]) + damping * np.eye(3), -slope.T @ (weight * now))
        tried = np.minimum(log + step, [math.inf, 0.0, 0.0])
        found = residuals(tried)
        if loss(found) < loss(now):
            done = loss(now) - loss(found) < 1e-9
            log, now, damping = tried, found, damping / 3
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
    found: Table = {}
    for group, kinds in sorted(by.items()):
        for kind in [k for k in kinds if cost.general(k) != k]:
            if len({m.case for m in kinds[kind]}) < ENOUGH_ROWS and cost.general(kind) in kinds:
                kinds[cost.general(kind)] += kinds.pop(kind)
        found[group] = {kind: _lines(kinds[kind], profile) for kind in sorted(kinds)}
    return found


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


def family(op: str, case: str) -> str:
    """What cells of an op share that are left out together: the weight of a product, the numbers of heads, their size
    and whether there is one query; else the width."""
    if op.startswith(("attention", "rope")):
        return " ".join(w for w in case.split() if w[0] in "HD" or w == "Q1")
    return case.partition("x")[2]


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
        families[group, family(group.partition(" ")[0], case) if whole else case].append(here)
    found: dict[str, dict[str, list[float]]] = {}
    for (group, _), left_out in families.items():
        gone = {next(iter(cell.values())).case for cell in left_out}
        rest = [m for m in measured if m.group == group and m.case not in gone]
        fitted = table(rest, profile).get(group, {})
        others = [cell for (g, case), cell in cells_of.items() if g == group and case not in gone]
        for cell in left_out:
            if len(cell) > 1:
                _judge(cell, others, fitted, profile, found.setdefault(group, {c: [] for c in CHOOSERS}))
    return found


def _judge(
    here: Cell, others: Sequence[Cell], fitted: Mapping[str, Mapping[str, cost.Coefficients]], profile: Profile,
    into: dict[str, list[float]],
) -> None:  # fmt: skip
    one = next(iter(here.values()))
    names = [n for n in dict.fromkeys([*profile.preference(one.op), "torch", *here]) if n in here]
    lines = fitted.get(one.work.kind) or fitted.get(cost.general(one.work.kind)) or {}
    predicted = {
        name: (seconds, known.error if known.cells >= cost.ENOUGH else math.inf)
        for name, known in lines.items()
        if name in here and known.covers(one.work) and (seconds := known.seconds(one.work, profile)) is not None
    }
    modelled = cost.ranked(names, predicted)[0]
    entries = {next(iter(cell.values())).region: _entry(cell) for cell in others}
    entries.pop(one.region, None)
    beside = near.predict(one.region, one.work, profile, entries)
    nearest = names[0] if beside is None else beside.ranked(names)[0]
    judged = {name for name, (_, error) in predicted.items() if error < math.inf}
    near_by = beside is not None and beside.goes_before(judged)
    taken = (names[0], modelled, nearest, nearest if near_by else modelled)
    least = min(m.seconds for m in here.values())
    for chooser, name in zip(CHOOSERS, taken, strict=True):
        into[chooser].append(here[name].seconds / least - 1)


def _entry(cell: Mapping[str, Measured]) -> lockfile_document.Entry:
    best = min(cell.values(), key=lambda m: m.seconds)
    return lockfile_document.Entry(
        implementation=best.implementation, seconds=best.seconds, kernels=lockfile_document.digest(best.op),
        bytes=best.work.bytes, flops=best.work.flops,
        candidates=[lockfile_document.Candidate(implementation=n, seconds=m.seconds) for n, m in cell.items()],
    )  # fmt: skip


def written(fitted: Table, profile: Profile, stamp: Any) -> str:
    """The file's text, which `cost.load` must take."""
    ops = {group: {kind: _group(lines) for kind, lines in kinds.items()} for group, kinds in fitted.items()}
    made = {"kind": "ferryman-costs", "version": cost.VERSION, "profile": profile.name, "stamp": stamp, "ops": ops}
    return _tight(json.dumps(made, indent=1)) + "\n"


def _group(lines: Mapping[str, cost.Coefficients]) -> dict[str, Any]:
    return {
        "places": [[round(n, 2) for n in place] for place in next(iter(lines.values())).places],
        "implementations": {
            name: {
                "fixed": float(f"{c.fixed:.4g}"), "memory": float(f"{c.memory:.4g}"),
                "compute": float(f"{c.compute:.4g}"), "error": float(f"{c.error:.3g}"), "cells": c.cells,
                "weights": [round(w, 3) for w in c.weights],
                "sizes": {n: [[round(b[0], 3), round(b[2], 3)], [round(b[1], 3), round(b[3], 3)]]
                          for n, b in c.sizes.items()},
            }
            for name, c in lines.items()
        },
    }  # fmt: skip


def _tight(text: str) -> str:
    """Lists of numbers on one line, and pairs of them."""
    flat = re.sub(r"\[\s+(-?[\d.][^\[\]{}]*?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    return re.sub(r"\[\s+(\[[^\[\]]*\]),\s+(\[[^\[\]]*\])\s+\](?=,?\n\s+[\"}])", r"[\1, \2]", flat)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("profile")
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--write", action="store_true", help="put the file beside the profile")
    given = parser.parse_args()
    profile = profile_of(given.profile)
    measured, sources = [], []
    for path in given.files:
        found = list(cells(path, profile))
        measured += found
        sources.append(
            {"file": path.name, "sha256": hashlib.sha256(path.read_bytes()).hexdigest(), "times": len(found)}
        )
    fitted = table(measured, profile)
    for group, kinds in fitted.items():
        for kind, lines in kinds.items():
            told = f"{group}{' one' if kind.startswith(cost.ONE) else ''}"
            for name, c in lines.items():
                print(f"{told:30} {name:8} fixed {c.fixed * 1e6:6.2f} us  memory {c.memory:.3f}  "
                      f"compute {c.compute:.3f}  error {c.error:.3f}  {c.cells} cells")  # fmt: skip
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
        (DATA / f"{profile.name}.costs.json").write_text(text, encoding="utf-8")


def _told(values: Sequence[float]) -> str:
    if not values:
        return "none"
    p95 = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    return f"{statistics.median(values):.1%}, {statistics.fmean(values):.1%}, {p95:.1%}"


if __name__ == "__main__":
    main()
