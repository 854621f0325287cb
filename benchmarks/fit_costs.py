"""Fit the cost model's coefficients (`ferryman.dispatch.cost`) of one device to measured times.

    python benchmarks/fit_costs.py h200 h200.lock.json results/h200/linear.json.gz [--write]

It reads what `ferryman bench` and `ferryman tune` write, the H200's table of products, and what
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
import math
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cost_fit.fitting import Table, table, written
from cost_fit.judging import CHOOSERS, regret
from cost_fit.measured import STALE, UNKNOWN, UNTRUSTED, Measured, cells, read
from ferryman.device_profiles import Profile
from ferryman.device_profiles import profile as profile_of
from ferryman.dispatch import cost
from ferryman.dispatch.whole_file import write_whole
from ferryman.errors import FerrymanError, ResultError

DATA = Path(__file__).parents[1] / "src" / "ferryman" / "device_profiles" / "data"


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
            print(f"{group:26} {len(by['preference']):5}  " + "".join(f"{_words(by[c]):24}" for c in CHOOSERS))
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
    present = read(target).get("ops")
    if not isinstance(present, dict):
        raise ResultError(f"{target} is damaged: it has no ops; --drop replaces it")
    gone = [group for group in present if group not in fitted]
    if gone:
        raise SystemExit(
            f"fit_costs: {target} was not written, as these would vanish: {', '.join(gone)} (op, bits of its dtype); "
            "give files that have times of them, or --drop"
        )


def _words(values: Sequence[float]) -> str:
    if not values:
        return "none"
    p95 = sorted(values)[math.ceil(0.95 * len(values)) - 1]
    return f"{statistics.median(values):.1%}, {statistics.fmean(values):.1%}, {p95:.1%}"


if __name__ == "__main__":
    main()
