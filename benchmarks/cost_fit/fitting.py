"""The cost model's coefficients that fit times best, and the file of them."""

from __future__ import annotations

import json
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cost_fit.measured import Measured
from ferryman.device_profiles import Profile
from ferryman.dispatch import cost

START = np.log([cost.LAUNCH_SECONDS, 0.75, 0.65])  # fixed seconds, shares of bandwidth and of peak
DRAWN = 0.02  # weight of the start against one cell's
OUTLIER = 0.1  # relative error from which a cell pulls no harder
AMPLITUDE, NOISE = 0.3, 0.1  # of what a fit misses: of that which neighbours share, and of each cell for itself
MOST_ERROR = 0.5  # beyond, a cell tells no more
LEAST_ERROR = 0.01
ENOUGH_ROWS = 6  # cells for calls of few rows to be a kind of their own
FEW_ERROR = 0.05  # with too few cells: what H200's row operations at one size miss at twice or half of it


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
