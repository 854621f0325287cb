"""Which cells count, what the regret is over groups of them, in tables, and which limits do not hold."""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Sequence
from typing import Any, Literal

from dispatch_regret.judging import NOT_PREPARED

NOISE_LIMIT = 0.03
LIMITS = {"tuned": (0.01, 0.05, 0.30), "untuned": (0.02, 0.10, 0.30)}  # median, p95 and the worst that are allowed
_LIMITED = ("median", "p95", "most")
WITHOUT = "regret_without_lockfile"
NOT_SLOWER = 0.95  # of a peer's speed
Why = Literal["counts", "failed", "no choice", "noisy", "untrusted"]


def standing(cell: dict[str, Any]) -> Why:
    """Whether a cell counts, or why it does not."""
    if "failed" in cell:
        return "failed"
    if len(cell["seconds"]) + len(cell["hopeless"]) < 2:
        return "no choice"
    if cell["untrusted"]:
        return "untrusted"
    return "noisy" if cell["noise"] > NOISE_LIMIT else "counts"


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least ``share`` of them do not exceed."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)]


def summary(judged: Sequence[dict[str, Any]], of: Callable[[dict[str, Any]], str]) -> dict[str, dict[str, Any]]:
    """Median, p95 and the worst regret of groups of cells, with the lockfile and without it, what was left out."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for cell in judged:
        groups.setdefault(of(cell), []).append(cell)
    rows = {}
    for name, members in sorted(groups.items()):
        by: dict[str, int] = {}
        for cell in members:
            by[standing(cell)] = by.get(standing(cell), 0) + 1
        counted = [cell for cell in members if standing(cell) == "counts"]
        row: dict[str, Any] = {"cells": len(members), **by}
        for key in ("regret", WITHOUT, "noise"):
            values = [cell[key] for cell in counted if cell.get(key) is not None]
            if not values:
                continue
            row[key] = {"median": statistics.median(values), "p95": percentile(values, 0.95), "most": max(values)}
        rows[name] = row
    return rows


def half_of(cell: dict[str, Any]) -> str:
    return str(cell.get("half", "failed"))


def source_of(cell: dict[str, Any]) -> str:
    source = str(cell.get("source", "failed"))
    return "predicted from regions near" if source.startswith("predicted from") else source


def markdown(judged: Sequence[dict[str, Any]], left: int, title: str) -> str:
    lines = [title, ""]
    for head, of in (("shapes", half_of), ("order from", source_of), ("op", lambda cell: str(cell["op"]))):
        lines += [
            f"| {head} | cells | count | noisy | no choice | failed or untrusted | regret: median | p95 | most "
            "| without a lockfile: median | p95 | most | noise: median | p95 |",
            "|---" * 14 + "|",
        ]
        for name, row in summary(judged, of).items():
            numbers = [
                row["cells"],
                *(row.get(k, 0) for k in ("counts", "noisy", "no choice")),
                row.get("failed", 0) + row.get("untrusted", 0),
            ]
            shares = [
                f"{row[k][s]:.1%}" if k in row else ""
                for k, s in (
                    ("regret", "median"),
                    ("regret", "p95"),
                    ("regret", "most"),
                    (WITHOUT, "median"),
                    (WITHOUT, "p95"),
                    (WITHOUT, "most"),
                    ("noise", "median"),
                    ("noise", "p95"),
                )
            ]
            lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {' | '.join(shares)} |")
        lines.append("")
    for half, limits in LIMITS.items():
        regret = summary(judged, half_of).get(half, {}).get("regret")
        measured = "nothing to judge" if regret is None else ", ".join(f"{regret[k]:.1%}" for k in _LIMITED)
        lines.append(
            f"{half}: median, p95 and worst {measured}; allowed: {', '.join(f'{limit:.0%}' for limit in limits)}"
        )
    without = summary(judged, lambda cell: "all").get("all", {}).get(WITHOUT)
    if without is not None:
        lines.append(
            "all, by what dispatch takes without a lockfile: median, p95 and worst "
            f"{', '.join(f'{without[k]:.1%}' for k in _LIMITED)}; allowed: "
            f"{', '.join(f'{limit:.0%}' for limit in LIMITS['untuned'])}"
        )
    lines += _beside_peers(judged)
    lines += _not_prepared(judged)
    for cell in judged:
        lines += [f"not trusted: {cell['op']} {cell['case']}: {why}" for why in cell.get("untrusted", ())]
    if left:
        lines.append(f"{left} cells were left when time was up")
    worst = sorted((c for c in judged if standing(c) == "counts"), key=lambda c: -c["regret"])[:10]
    lines += ["", "| worst cells | case | choice | best | regret | order from |", "|---|---|---|---|---|---|"]
    for cell in worst:
        best = min(cell["seconds"], key=lambda name: cell["seconds"][name])
        columns = f"{cell['choice']} | {best} | {cell['regret']:.1%} | {cell['source']}"
        lines.append(f"| {cell['op']} | {cell['case']} | {columns} |")
    return "\n".join(lines) + "\n"


def _not_prepared(judged: Sequence[dict[str, Any]]) -> list[str]:
    """In how many cells something was left out for want of time to compile it."""
    cells = [[n for n, why in cell.get("skipped", {}).items() if why.startswith(NOT_PREPARED)] for cell in judged]
    names = sorted({name for own in cells for name in own})
    return [f"{name}: {NOT_PREPARED} in {sum(name in own for own in cells)} of {len(cells)} cells" for name in names]


def _beside_peers(judged: Sequence[dict[str, Any]]) -> list[str]:
    """How fast the choices are beside each peer's own, by op, and where one is slower."""
    ratios: dict[tuple[str, str], list[tuple[float, dict[str, Any]]]] = {}
    for cell in judged:
        if standing(cell) in ("counts", "no choice"):
            for peer, seconds in cell.get("peers", {}).items():
                times = cell["seconds"] | cell["hopeless"]
                ratios.setdefault((peer, cell["op"]), []).append((seconds / times[cell["choice"]], cell))
    if not ratios:
        return []
    lines = [
        "",
        f"| peer | op | cells | speed beside it: geomean | least | below {NOT_SLOWER} |",
        "|---|---|---|---|---|---|",
    ]
    slow: list[tuple[float, dict[str, Any]]] = []
    for (peer, op), members in sorted(ratios.items()):
        speeds = [ratio for ratio, _ in members]
        mean = math.exp(statistics.fmean(map(math.log, speeds)))
        below = [m for m in members if m[0] < NOT_SLOWER]
        slow += below
        lines.append(f"| {peer} | {op} | {len(speeds)} | {mean:.2f} | {min(speeds):.2f} | {len(below)} |")
    lines += ["", "| slower than a peer | case | choice | speed |", "|---|---|---|---|"] if slow else []
    for ratio, cell in sorted(slow, key=lambda m: m[0])[:20]:
        lines.append(f"| {cell['op']} | {cell['case']} | {cell['choice']} | {ratio:.2f} |")
    return lines


def as_json(environment: dict[str, Any], dtype: str, judged: Sequence[dict[str, Any]], left: int, tuned: str) -> str:
    """The document. left: cells that were not judged (yet). tuned: what `regions` says of the lockfile."""
    whole = {
        "kind": "ferryman-regret",
        "version": 1,
        "environment": environment,
        "dtype": dtype,
        "tuned": tuned,
        "noise_limit": NOISE_LIMIT,
        "left": left,
        "halves": summary(judged, half_of),
        "sources": summary(judged, source_of),
        "ops": summary(judged, lambda c: str(c["op"])),
        "cells": list(judged),
    }
    return json.dumps(whole, indent=1)


def unmet(judged: Sequence[dict[str, Any]]) -> list[str]:
    """What of `LIMITS` does not hold, or could not be judged."""
    halves, failures = summary(judged, half_of), []
    for half, limits in LIMITS.items():
        regret = halves.get(half, {}).get("regret")
        if regret is None:
            failures.append(f"{half}: no cell counts; required: at least one")
            continue
        for name, limit in zip(_LIMITED, limits, strict=True):
            if regret[name] > limit:
                failures.append(f"{half}: {name} {regret[name]:.2%}; required: at most {limit:.0%}")
    return failures
