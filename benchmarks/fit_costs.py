"""Fit the cost model's coefficients (`ferryman.dispatch.cost`) of one device to measured times.

    python benchmarks/fit_costs.py h200 h200.lock.json results/h200/linear.json [--write]

It reads what `ferryman bench` and `ferryman tune` write, and the table of `benchmarks/linear.py`. For
each op, implementation and width of the storage dtype, the three coefficients that have the least error of the
logarithm (Huber's: one bad cell does not turn them), drawn a little towards what any sound kernel does, so that one
cell is enough to say something. It prints the regret of the choices that the model makes for cells that were left out
of the fit, beside the profile's preference alone. --write puts the file beside the device profile.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import json
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from ferryman.cli import calls
from ferryman.device_profiles import Profile
from ferryman.device_profiles import profile as profile_of
from ferryman.dispatch import cost, lockfile, lockfile_document, near, registry
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.porting.bench import document, grid

DATA = Path(__file__).parents[1] / "src" / "ferryman" / "device_profiles" / "data"
START = np.log([cost.LAUNCH_SECONDS, 0.75, 0.65])  # fixed seconds, shares of bandwidth and of peak
DRAWN = 0.02  # weight of the start against one cell's
OUTLIER = 0.1  # relative error from which a cell pulls no harder
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
                    for tried in entry.candidates:
                        if tried.seconds is not None:
                            yield Measured(op, name, tried.implementation, tried.seconds, work, region)
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


def _work(op: str, case: Case, dtype: torch.dtype) -> tuple[cost.Work, str]:
    known = registry.primitive(op)
    args = calls.of_case(known, case, dtype)
    return cost.work_of(known, args), lockfile.region(known, args)


def fit(measured: Sequence[Measured], profile: Profile) -> cost.Coefficients:
    """The coefficients of one implementation. Its error is that of its cells, each left out once."""
    boxes = {}
    for name in {n for m in measured for n in m.work.sizes}:
        rows, widths = zip(*(m.work.sizes[name] for m in measured if name in m.work.sizes), strict=True)
        boxes[name] = (min(rows), max(rows), min(widths), max(widths))
    missed = []
    for index, one in enumerate(measured if len(measured) >= cost.ENOUGH else ()):
        made = coefficients([*measured[:index], *measured[index + 1 :]], profile, boxes)
        missed.append(math.log((made.seconds(one.work, profile) or math.nan) / one.seconds))
    error = math.sqrt(statistics.fmean(m * m for m in missed)) if missed else FEW_ERROR
    return coefficients(measured, profile, boxes, error)


def coefficients(
    measured: Sequence[Measured], profile: Profile, boxes: Mapping[str, tuple[float, float, float, float]],
    error: float = FEW_ERROR,
) -> cost.Coefficients:  # fmt: skip
    fixed, memory, compute = (float(value) for value in _fit(measured, profile))
    return cost.Coefficients(fixed, memory, compute, error, len(measured), dict(sorted(boxes.items())))


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


def table(measured: Sequence[Measured], profile: Profile) -> dict[str, dict[str, cost.Coefficients]]:
    """Coefficients by "op bits" and implementation."""
    by: dict[str, dict[str, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for one in measured:
        by[one.group][one.implementation].append(one)
    return {group: {name: fit(lines[name], profile) for name in sorted(lines)} for group, lines in sorted(by.items())}


CHOOSERS = ("preference", "cost model", "near regions", "nearest region")


def regret(measured: Sequence[Measured], profile: Profile) -> dict[str, dict[str, list[float]]]:
    """By op, for every cell left out: the regret of each of CHOOSERS.

    The profile's preference alone; the cost model without a lockfile; what regions near it predict (`near`); and the
    nearest one's choice as it stands (the mean over those that are equally near).
    """
    cells_of: dict[tuple[str, str], dict[str, Measured]] = defaultdict(dict)
    for one in measured:
        cells_of[one.group, one.case][one.implementation] = one
    whole = table(measured, profile)
    found: dict[str, dict[str, list[float]]] = {}
    for (group, case), here in cells_of.items():
        if len(here) < 2:
            continue
        op, cell = group.partition(" ")[0], next(iter(here.values()))
        predicted = {}
        for name, known in whole[group].items():
            others = [m for m in measured if m.group == group and m.implementation == name and m.case != case]
            if others:
                seconds = coefficients(others, profile, {}).seconds(cell.work, profile)
                predicted[name] = (seconds or math.nan, known.error)
        names = [n for n in dict.fromkeys([*profile.preference(op), "torch", *here]) if n in here]
        entries = {
            other.region: _entry(group_of) for (g, _), group_of in cells_of.items()
            if g == group and (other := next(iter(group_of.values()))).region != cell.region
        }  # fmt: skip
        beside = near.predict(cell.region, cell.work, profile, entries)
        apart = {r: near.distance(cell.region, r, e) for r, e in entries.items()}
        nearest = [] if beside is None else [
            entry.implementation for r, entry in entries.items() if apart[r] == beside.distance
        ]  # fmt: skip
        first = {
            "preference": [names[0]], "cost model": [cost.ranked(names, predicted)[0]],
            "near regions": names[:1] if beside is None else beside.ranked(names)[:1],
            "nearest region": [n for n in nearest if n in here] or names[:1],
        }  # fmt: skip
        least = min(m.seconds for m in here.values())
        for chooser, taken in first.items():
            values = found.setdefault(group, {c: [] for c in CHOOSERS})[chooser]
            values.append(statistics.fmean(here[name].seconds / least - 1 for name in taken))
    return found


def _entry(cell: Mapping[str, Measured]) -> lockfile_document.Entry:
    best = min(cell.values(), key=lambda m: m.seconds)
    return lockfile_document.Entry(
        implementation=best.implementation, seconds=best.seconds, kernels=lockfile_document.digest(best.op),
        bytes=best.work.bytes, flops=best.work.flops,
        candidates=[lockfile_document.Candidate(implementation=n, seconds=m.seconds) for n, m in cell.items()],
    )  # fmt: skip


def written(fitted: Mapping[str, Mapping[str, cost.Coefficients]], profile: Profile, stamp: Any) -> str:
    """The file's text, which `cost.load` must take."""
    ops = {
        group: {
            name: {
                "fixed": float(f"{c.fixed:.4g}"), "memory": float(f"{c.memory:.4g}"),
                "compute": float(f"{c.compute:.4g}"), "error": float(f"{c.error:.3g}"), "cells": c.cells,
                "sizes": {n: [[round(b[0], 3), round(b[2], 3)], [round(b[1], 3), round(b[3], 3)]]
                          for n, b in c.sizes.items()},
            }
            for name, c in lines.items()
        }
        for group, lines in fitted.items()
    }  # fmt: skip
    made = {"kind": "ferryman-costs", "version": cost.VERSION, "profile": profile.name, "stamp": stamp, "ops": ops}
    lines = json.dumps(made, indent=1).split("\n")
    return _tight("\n".join(lines)) + "\n"


def _tight(text: str) -> str:
    """Innermost lists on one line."""
    import re

    return re.sub(r"\[\s+\[\s+([^\[\]]+?)\s+\],\s+\[\s+([^\[\]]+?)\s+\]\s+\]",
                  lambda m: f"[[{_flat(m[1])}], [{_flat(m[2])}]]", text)  # fmt: skip


def _flat(text: str) -> str:
    return " ".join(text.split())


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
    for group, lines in fitted.items():
        for name, c in lines.items():
            print(f"{group:26} {name:8} fixed {c.fixed * 1e6:6.2f} us  memory {c.memory:.3f}  compute {c.compute:.3f}  "
                  f"error {c.error:.3f}  {c.cells} cells")  # fmt: skip
    every: dict[str, list[float]] = {c: [] for c in CHOOSERS}
    print(f"\nregret of cells left out: median, mean, p95\n{'':26} cells  " + "".join(f"{c:24}" for c in CHOOSERS))
    for group, by in {**regret(measured, profile), "all": every}.items():
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
