"""Regret of dispatch: how much slower its choice is than the best implementation that is available.

    ferryman tune --grid full --lockfile h200.lock.json
    python benchmarks/regret.py --lockfile h200.lock.json --cells 300 --json regret.json
    python benchmarks/regret.py --lockfile none --cells 300 --json untuned.json
    python benchmarks/regret.py --resume regret.json --json regret.json        # what the first sitting left
    python benchmarks/regret.py --again earlier.json --json now.json           # the same cells, by today's code

Without --lockfile, of the lockfile that ships for the device; "none" judges untuned dispatch. Shapes are drawn from
each op's whole domain, anew each day: the seed is the date, unless --seed names one. PyTorch's own choice (SDPA) is
timed beside, and the tables say where ours is slower. --require exits with 1 where a median, a 95th percentile or the
worst cell is more than is allowed, or a half of the shapes has no cell that counts. Bad use exits with 2.

A process of its own, which timed nothing before, has the lockfile in force, asks dispatch what it would run, and times
every implementation that can serve the cell, in turns, on rotated inputs (as `ferryman bench` does); the choice twice.
More than half of the cells are shapes that were never tuned, none of which stands in a document that --unlike names (as
what the cost model was fitted to). A cell counts if it has two implementations to choose from
and the two times of the choice differ by at most 3%; the others are counted beside. What is twice as slow as the best
in its first timing is timed no further. Cells are taken from all ops in turns, so that a run that the time limit ends
is as broad.

On a GPU --ahead processes compile first, for --ahead-seconds at most: every cell's kernels, then what serves prepared
calls only (FlexAttention). Cells whose kernels are ready are judged first. What was not prepared in that time is left
out of its cell, and said. --json is written after every cell: a run that is stopped leaves what it judged.
"""

from __future__ import annotations

import argparse
import datetime
import math
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dispatch_regret.drawing import Cell
from dispatch_regret.processes import compile_ahead, plan_of, supervise, work
from dispatch_regret.report import as_json, markdown, unmet
from ferryman import files, settings
from ferryman.cli import documents
from ferryman.device_profiles import Profile
from ferryman.dispatch import lockfile, lockfile_document
from ferryman.errors import ArgumentError, FerrymanError, LockfileError, ResultError
from ferryman.porting.judging import results


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lockfile", type=Path, help="default: the setting, else the one that ships")
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=440.0, help="in all, then what is done is reported")
    parser.add_argument("--op", action="append", help="only this op; repeatable")
    parser.add_argument("--grid", default="full", help="the grid that was tuned")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--seed", type=int, default=int(f"{datetime.date.today():%Y%m%d}"), help="default: the date")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on with the cells that this document left")
    parser.add_argument("--again", type=Path, metavar="JSON", help="the cells of this document, instead of drawn ones")
    parser.add_argument("--ahead", type=int, default=8, help="processes that compile before, on a GPU")
    parser.add_argument("--ahead-seconds", type=float, help="of --seconds, for them at most; default: half")
    parser.add_argument(
        "--prepare-seconds",
        type=float,
        help="of each judging process, for FlexAttention where --ahead made none; default: 0, without --ahead any",
    )
    parser.add_argument("--compile", type=int, help=argparse.SUPPRESS)
    parser.add_argument(
        "--unlike",
        type=Path,
        action="append",
        metavar="JSON",
        help="draw none of the shapes that stand in this document; repeatable",
    )
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--require", action="store_true", help="exit with 1 where the regret is more than is asked for")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker is not None:
        if given.compile is None:
            work(given, given.worker)
        else:
            compile_ahead(given, given.worker, given.compile)
        return
    try:
        _run(given)
    except FerrymanError as error:
        sys.stderr.write(f"regret: {error}\n")
        raise SystemExit(2) from None


def _terminated(number: int, frame: Any) -> None:
    """SIGTERM ends the run through its contexts, which end its processes."""
    raise SystemExit(128 + number)


def _locked(path: Path | None, profile: Profile) -> tuple[Path, lockfile_document.Lockfile | None]:
    """The lockfile to judge; none of it where untuned dispatch is judged.

    Raises LockfileError where there is none, or it does not hold here.
    """
    path = path or settings.get("lockfile") or lockfile.shipped(profile)
    if path is None:
        raise LockfileError(
            f"no lockfile ships for {profile.name}: name one that ferryman tune wrote, or --lockfile none"
        )
    if path == settings.NO_LOCKFILE:
        return path, None
    document = lockfile_document.load(path)
    other = lockfile_document.differing(document, profile)
    if other:
        raise LockfileError(f"{path} does not hold here: {'; '.join(other)}")
    return path, document


def regions(document: lockfile_document.Lockfile | None) -> str:
    """How many regions are tuned, and how many entries do not hold, if any."""
    if document is None:
        return "untuned"
    valid, others = lockfile_document.holding(document)
    text = f"{sum(map(len, valid.values()))} tuned regions"
    return f"{text} ({len(others)} more do not hold any longer)" if others else text


def _resumed(given: argparse.Namespace, todo: Sequence[Cell], profile: Profile, tuned: str) -> list[dict[str, Any]]:
    """The cells of an earlier sitting. Raises ResultError where they are not of this draw, device and lockfile."""
    if given.resume is None:
        return []
    known = {(cell.op.name, cell.case.name) for cell in todo}
    try:
        document: dict[str, Any] = files.document(given.resume)
        judged: list[dict[str, Any]] = document["cells"]
        earlier = [(cell["op"], cell["case"]) for cell in judged]
        facts = document["environment"]
        asked = {"seed": given.seed, "profile": profile.name, "dtype": given.dtype, "lockfile": tuned}
        was = {
            "seed": facts["seed"],
            "profile": facts["profile"],
            "dtype": document["dtype"],
            "lockfile": document["tuned"],
        }
        other = {name: (was[name], asked[name]) for name in asked if was[name] != asked[name]}
        same = known.issuperset(earlier) and len(set(earlier)) == len(earlier)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(
            f"--resume {given.resume}: required: a document of benchmarks/regret.py; {error!r}"
        ) from error
    if other:
        differing = "; ".join(f"{name} {before}, asked for {now}" for name, (before, now) in other.items())
        raise ResultError(f"--resume {given.resume} is of another run: {differing}")
    if not same:
        raise ResultError(f"--resume {given.resume} is of another draw; name its --seed, --cells, --op and --grid")
    return judged


def _run(given: argparse.Namespace) -> None:
    if given.cells < 1:
        raise ArgumentError("regret", "--cells", given.cells, "at least 1")
    if not 0 < given.seconds < math.inf:
        raise ArgumentError("regret", "--seconds", given.seconds, "more than 0, finite")
    for option, seconds in (("--ahead-seconds", given.ahead_seconds), ("--prepare-seconds", given.prepare_seconds)):
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ArgumentError("regret", option, seconds, "at least 0, finite")
    plan, todo = plan_of(given)
    profile = plan.profile
    given.lockfile, document = _locked(given.lockfile, profile)
    for option, path in (("--markdown", given.markdown), ("--json", given.json)):
        if path is not None:
            documents.require_writable(path, option)
    start = time.monotonic()
    before = _resumed(given, todo, profile, regions(document))

    def environment() -> results.Environment:
        return results.environment(plan.device, profile, given.seed, given.grid, time.monotonic() - start)

    def keep(judged: Sequence[dict[str, Any]]) -> None:
        if given.json is not None:
            facts = environment().model_dump(mode="json")
            documents.write(
                given.json, as_json(facts, given.dtype, judged, len(todo) - len(judged), regions(document)), "--json"
            )

    judged, left = supervise(given, todo, before, keep)
    if not judged:
        raise ArgumentError(
            "regret", "--seconds", given.seconds, f"enough for one of {len(todo)} cells; none was judged"
        )
    facts = environment()
    title = (
        f"{facts.device_name} ({profile.name}), torch {torch.__version__}, {given.dtype}: {len(judged)} cells in "
        f"{facts.seconds:.0f} s, seed {given.seed}, {regions(document)}"
    )
    text = markdown(judged, left, title)
    print(text)
    if given.markdown is not None:
        documents.write(given.markdown, text, "--markdown")
    if given.json is not None:
        documents.write(
            given.json, as_json(facts.model_dump(mode="json"), given.dtype, judged, left, regions(document)), "--json"
        )
    if given.require and (failures := unmet(judged)):
        raise SystemExit("regret: " + "; ".join(failures))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    main()
