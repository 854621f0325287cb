"""Cells as shards of about equal cost: measured where a document of an earlier run says, else by the sizes of cases."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from ferryman import files
from ferryman.errors import ResultError
from ferryman.ops.primitive import Case, TensorSpec
from ferryman.porting.judging.results import load

Group = tuple[str, ...]  # (way, op, dtype, case)
KIND = "ferryman-fleet-times"
OVERHEAD = 0.05  # seconds of a cell however small it is
ELEMENTS = 2e-7  # seconds for one element, oracle included, where nothing was measured
RUNS = 6  # a kernel's runs in a cell, and its oracle's
TARGET_SECONDS = 20.0  # of one shard: what a node's death costs
LEAST_EACH = 4  # shards for each worker, so that the last ones end together


def sized(case: Case, implementations: int) -> float:
    """Seconds that a group may take, by the elements of its tensors."""
    elements = 0
    stack: list[Any] = list(case.args.values())
    while stack:
        one = stack.pop()
        if isinstance(one, TensorSpec):
            count = 1
            for n in one.shape:
                count *= n
            elements += count
        elif isinstance(one, list | tuple):
            stack += one
    return (OVERHEAD + ELEMENTS * elements) * implementations


def measured(paths: Iterable[Path]) -> dict[tuple[str, str, str], float]:
    """Seconds by (op, dtype, case): of a fleet's own times, or of a result document's cells. Raises ResultError."""
    by_cell: dict[tuple[str, str, str], float] = {}
    for path in paths:
        try:
            raw = files.document(path)
        except files.Unreadable as error:
            raise ResultError(str(error)) from error
        if isinstance(raw, dict) and raw.get("kind") == KIND:
            times = raw.get("seconds")
            if not isinstance(times, dict) or not all(
                isinstance(v, int | float) and 0 <= v <= sys.float_info.max for v in times.values()
            ):
                raise ResultError(f"{path} is damaged: seconds is no object of times")
            for name, seconds in times.items():
                op, _, rest = name.partition("|")
                dtype, _, case = rest.partition("|")
                by_cell[op, dtype, case] = float(seconds)
            continue
        for cell in load(path).cells:
            if cell.seconds is not None:
                key = cell.op, cell.dtype, cell.case
                by_cell[key] = by_cell.get(key, OVERHEAD) + RUNS * cell.seconds
    return by_cell


def costs(sizes: Mapping[Group, float], known: Mapping[tuple[str, str, str], float]) -> dict[Group, float]:
    """Seconds of every group: those that are known; the others' by size, on the scale that the known ones show."""
    both = [(known[g[1], g[2], g[3]], size) for g, size in sizes.items() if (g[1], g[2], g[3]) in known]
    scale = statistics.median(k / s for k, s in both) if both else 1.0
    return {g: known.get((g[1], g[2], g[3]), scale * size) for g, size in sizes.items()}


def divided(cost: Mapping[Group, float], workers: int) -> list[list[Group]]:
    """Groups as shards, the dearest shard first: each group goes to the shard of its way that has least so far."""
    shards: list[tuple[float, list[Group]]] = []
    total = sum(cost.values())
    for way in dict.fromkeys(g[0] for g in cost):
        mine = sorted((g for g in cost if g[0] == way), key=lambda g: (-cost[g], g))
        seconds = sum(cost[g] for g in mine)
        wanted = max(LEAST_EACH * workers * seconds / total if total else 1, seconds / TARGET_SECONDS, 1)
        bins: list[tuple[float, list[Group]]] = [(0.0, []) for _ in range(min(len(mine), round(wanted)))]
        for group in mine:
            least = min(range(len(bins)), key=lambda i: (bins[i][0], i))
            bins[least] = (bins[least][0] + cost[group], [*bins[least][1], group])
        shards += bins
    return [sorted(groups) for _, groups in sorted(shards, key=lambda one: -one[0])]


def document(times: Mapping[tuple[str, str, str], float]) -> dict[str, Any]:
    """What `measured` reads again."""
    return {"kind": KIND, "seconds": {"|".join(key): round(seconds, 4) for key, seconds in sorted(times.items())}}
