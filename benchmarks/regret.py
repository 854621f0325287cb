"""Regret of dispatch: how much slower its choice is than the best implementation that is available.

    ferryman tune --grid full --lockfile h200.lock.json
    python benchmarks/regret.py --lockfile h200.lock.json --cells 300 --json regret.json
    python benchmarks/regret.py --lockfile none --cells 300 --json untuned.json
    python benchmarks/regret.py --resume regret.json --json regret.json        # what the first sitting left

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
"""

from __future__ import annotations

import argparse
import datetime
import gc
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from ferryman import settings
from ferryman.cli import calls, documents
from ferryman.cli.place import place
from ferryman.device_profiles import Profile
from ferryman.dispatch import lockfile, lockfile_document, preparing, registry, select
from ferryman.dispatch.state import State
from ferryman.errors import ArgumentError, FerrymanError, LockfileError, ResultError
from ferryman.ops.evidence import Sampler
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import clock, grid, peers, rotation, runner
from ferryman.porting.bench.condition import watch
from ferryman.porting.bench.contender import Contender, close, prepare, promising, steady_trials
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging import results
from ferryman.porting.running.process import device_lost, placed, quiet

NOISE_LIMIT = 0.03
KEPT_BYTES = 16 << 30  # of device memory between cells
_LIMITED = ("median", "p95", "most")
PEERS = ["sdpa"]  # PyTorch's own choice stands beside ours
GRACE_SECONDS = 30.0  # for the cell that is at work when time is up, before its process is killed
LIMITS = {"tuned": (0.01, 0.05, 0.30), "untuned": (0.02, 0.10, 0.30)}  # median, p95 and the worst that are allowed
NOT_SLOWER = 0.95  # of a peer's speed
PLAIN = State({}, False)
WIDTHS = 8  # of rows, drawn anew by each seed. Few, as a kernel is compiled for each
UNTUNED = 0.55  # of the cells: half of those that count, too, where throttled clocks leave some out
# Lighter than the bench's 1024, 9 and 4 ms, for 300 cells in eight minutes.
MOST_SETS, SAMPLES, SAMPLE_SECONDS = 512, 5, 3e-3


@dataclass(frozen=True)
class Cell:
    op: Primitive
    case: Case


def cells(
    ops: Sequence[Primitive],
    count: int,
    size: grid.Grid,
    device: torch.device,
    seed: int,
    unlike: Collection[tuple[str, str]] = (),
) -> list[Cell]:
    """Shapes of the tuner's grid, and UNTUNED of all drawn, ``unlike`` (op, case) pairs; op by op in turns. Equal for
    equal arguments."""
    draw = random.Random(seed)
    queues: dict[str, Iterator[Case]] = {}
    for op in ops:
        known = grid.cases(op, size, device)
        shuffled = draw.sample(known, len(known))
        queues[f"tuned {op.name}"] = iter(shuffled)
        shape_seed = draw.randrange(1 << 30)
        names = {case.name for case in known} | {case for name, case in unlike if name == op.name}
        queues[f"untuned {op.name}"] = drawn(op, device, random.Random(shape_seed), names, widths_of(seed))
    picked: list[Cell] = []
    left = {"untuned": math.ceil(UNTUNED * count)}
    left["tuned"] = count - left["untuned"]
    while queues and len(picked) < count:
        for op in ops:
            for half in ("untuned", "tuned"):
                queue = queues.get(f"{half} {op.name}")
                case = next(queue, None) if queue is not None and left[half] else None
                if case is None:
                    queues.pop(f"{half} {op.name}", None)
                    continue
                left[half] -= 1
                picked.append(Cell(op, case))
        if not any(name.startswith("tuned") for name in queues):  # the grid is at its end
            left["untuned"] += left["tuned"]
            left["tuned"] = 0
    return picked[:count]


def drawn(
    op: Primitive, device: torch.device, draw: random.Random, known: Collection[str], widths: Sequence[int]
) -> Iterator[Case]:
    """Random shapes of real models with other names; small ones on a CPU. None for an op whose evidence has none."""
    evidence = registry.evidence(op)
    if evidence.sampled is None or evidence.named is None:
        return
    seen = set(known)
    sampler = Sampler(draw, 64 if device.type == "cpu" else 1, widths)
    for _ in range(10_000):
        name = evidence.sampled(sampler)
        if name not in seen:
            seen.add(name)
            yield evidence.named(name)


def widths_of(seed: int) -> tuple[int, ...]:
    """WIDTHS multiples of 64 from 256 to 65,536, none of them a power of two, as the grid's are; each scale alike."""
    draw, widths = random.Random(f"widths {seed}"), set[int]()
    while len(widths) < WIDTHS:
        width = 64 * round(2 ** draw.uniform(2, 10))
        if width & (width - 1):
            widths.add(width)
    return tuple(sorted(widths))


def judge(plan: runner.Plan, cell: Cell) -> dict[str, Any]:
    """What dispatch chooses for a cell, and what every implementation takes."""
    op, profile, name = cell.op, plan.profile, f"{cell.case.name} {dtype_name(plan.dtype)}"
    sets, _ = runner.rotated(plan, op, cell.case)
    preparing.ready(op, sets[0], profile)  # what serves prepared calls only may be the choice, where it was measured
    decision = select.select(op, sets[0], profile, PLAIN)
    chosen = decision.implementation.name
    entries = lockfile.entries(op.name, profile)
    record: dict[str, Any] = {
        "op": op.name,
        "case": cell.case.name,
        "region": lockfile.region(op, sets[0]),
        "choice": chosen,
        "half": "tuned" if any(entry.case == name for entry in entries.values()) else "untuned",
        "source": decision.source,
    }
    seen, again = watch(plan.device), rotation.restoring(op, sets)
    contenders = sorted(
        runner.implementations(plan, op, sets[0]), key=lambda c: c.name != chosen
    )  # the noise is the first's
    fused = [c for c in contenders if not _composed(op, c)]
    if any(c.skipped is None for c in fused):  # nobody would choose what writes its scores to memory
        contenders = [c for c in contenders if c in fused or c.name == chosen]
    contenders += _own_plans(plan, op, sets[0])
    contenders += runner.peer_contenders(plan, op, sets[0])
    for contender in contenders:
        prepare(contender, sets, plan.device, seen.sample, again)
    racing = [c for c in contenders if c.timer is not None]
    record["skipped"] = {c.name: str(c.skipped) for c in contenders if c.timer is None}
    if chosen not in {c.name for c in racing}:
        return record | {"failed": f"the choice could not be timed: {record['skipped'].get(chosen, 'not on the menu')}"}
    kept = promising(racing)
    if chosen not in {c.name for c in kept}:  # its noise is wanted all the same
        kept = [next(c for c in racing if c.name == chosen), *kept]
        kept[0].trials.clear()
    noise, untrusted = steady_trials(kept, seen)
    for contender in racing:
        close(contender)
    record["skipped"] |= {c.name: str(c.skipped) for c in racing if not c.trials}  # they broke in a trial
    if chosen in record["skipped"]:
        return record | {"failed": f"the choice could not be timed: {record['skipped'][chosen]}"}
    racing, kept = [c for c in racing if c.trials], [c for c in kept if c.trials]
    outside = {c.name: statistics.median(c.trials) for c in racing if c.role == "peer"}
    every = {c.name: statistics.median(c.trials) for c in racing if c.role != "peer"}
    seconds = {c.name: every[c.name] for c in kept if c.role != "peer"}
    order = select.preferred(op, profile)
    preferred = next((n for n in order if n in every), chosen)
    return record | {
        "seconds": seconds,
        "hopeless": {n: s for n, s in every.items() if n not in seconds},
        "noise": noise,
        "regret": every[chosen] / min(every.values()) - 1,
        "preferred": preferred,
        "regret_of_preference": every[preferred] / min(every.values()) - 1,
        "predicted_seconds": decision.seconds.get(chosen),
        "peers": outside,
        "untrusted": untrusted,
    }


def _composed(op: Primitive, contender: Contender) -> bool:
    return registry.implementation(op.name, contender.name).composed


def _own_plans(plan: runner.Plan, op: Primitive, args: tuple[Any, ...]) -> list[Contender]:
    """What `runner.implementations` has in a tuned configuration, as it would run without a lockfile."""
    contenders, view = [], select.View.of(op, args, plan.profile)
    for line in registry.implementations(op.name):
        if not select.refusals(line, view, plan.profile) and select.configuration_of(op, args, plan.profile, line):
            contenders.append(runner.configured(plan, op, line))
            contenders[-1].name += ", its own plan"
    return contenders


def work(given: argparse.Namespace, start: int) -> None:
    """The judging process: one JSON line before each cell and one after; what kernels print goes to stderr."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    plan, todo = _plan(given)
    rotation.MOST_SETS, clock.SAMPLES, clock.SAMPLE_SECONDS = MOST_SETS, SAMPLES, SAMPLE_SECONDS
    with quiet():
        for index in range(start, len(todo)):
            print(json.dumps({"start": index}), file=out, flush=True)
            cell = todo[index]
            try:
                record = judge(plan, cell)
            except (RuntimeError, FerrymanError) as error:  # out of memory, or refused: a counted cell
                if device_lost(plan.device) is not None:
                    raise  # nothing more can be judged here: another process goes on after this cell
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                record = {"op": cell.op.name, "case": cell.case.name, "failed": why}
            if plan.device.type == "cuda":
                gc.collect()
                torch.cuda.empty_cache()
            print(json.dumps({"cell": record}), file=out, flush=True)
            if plan.device.type == "cuda" and torch.cuda.memory_reserved(plan.device) > KEPT_BYTES:
                return  # graphs keep memory that nothing frees: another process goes on


def _plan(given: argparse.Namespace) -> tuple[runner.Plan, list[Cell]]:
    device = placed(place(given.device, "regret"))
    names = given.op or list(registry.primitives())
    ops = [registry.primitive(name) for name in names]
    two = ("torch", "definition") if device.type == "cpu" else ()
    own = () if device.type == "cpu" else tuple(peers.adapters(Path(__file__).parent / "peers", PEERS))
    plan = runner.Plan(device, select.profile_for(device), calls.dtype_of(given.dtype), (), two, own, given.seed)
    unlike = {pair for path in given.unlike or () for pair in _cells_of(path)}
    return plan, cells(ops, given.cells, grid.grid_of(given.grid), device, given.seed, unlike)


def _cells_of(path: Path) -> set[tuple[str, str]]:
    """(op, case) of every cell of a document that this script wrote. Raises ResultError."""
    try:
        return {(str(cell["op"]), str(cell["case"])) for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]}
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise ResultError(f"--unlike {path}: required: a document of benchmarks/regret.py; {reason}") from error


def _ahead(given: argparse.Namespace, start: int, environment: dict[str, str], seconds: float) -> None:
    """Every kernel of the cells once, in several processes: what Triton compiles it keeps on disk."""
    command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(start), "--warm"]
    running = [
        subprocess.Popen(
            [*command, f"{k}/{given.ahead}"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env=environment
        )
        for k in range(given.ahead)
    ]
    end = time.monotonic() + seconds
    for process in running:
        try:
            process.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:  # what is missing is compiled when it is timed
            process.kill()
            process.wait()


def warm(given: argparse.Namespace, turn: int, turns: int) -> None:
    """Run each implementation of every ``turns``-th cell once."""
    plan, todo = _plan(given)
    torch.cuda.set_per_process_memory_fraction(1 / turns)
    with quiet():
        for index in range(given.worker + turn, len(todo), turns):
            cell = todo[index]
            try:
                args = grid.inputs(cell.op, cell.case, plan.dtype, plan.seed, plan.device)
                for contender in runner.implementations(plan, cell.op, args):
                    if contender.skipped is None:
                        contender.call_of(rotation.spared(cell.op, args))()
            except RuntimeError:  # it has no room beside the others, or fails: its own turn tells
                torch.cuda.empty_cache()


def supervise(
    given: argparse.Namespace, todo: Sequence[Cell], before: Sequence[dict[str, Any]] = ()
) -> tuple[list[dict[str, Any]], int]:
    """Workers, one after another where one dies, until all is judged or time is up: (cells, how many were left)."""
    untuned = given.lockfile == settings.NO_LOCKFILE
    environment = {**os.environ, "FERRYMAN_LOCKFILE": "none" if untuned else str(given.lockfile.resolve())}
    environment.pop("FERRYMAN_BACKEND", None)
    end = time.monotonic() + given.seconds
    judged: list[dict[str, Any]] = list(before)
    if given.ahead > 0 and torch.cuda.is_available():
        _ahead(given, len(judged), environment, given.seconds / 2)
    while len(judged) < len(todo) and time.monotonic() < end:
        command = [sys.executable, __file__, *sys.argv[1:], "--worker", str(len(judged))]
        with tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment)
            assert process.stdout is not None
            late = threading.Timer(max(0.0, end - time.monotonic()) + GRACE_SECONDS, process.kill)
            late.start()
            at = None
            for line in process.stdout:
                message = json.loads(line)
                at = message.get("start", at)
                if "cell" in message:
                    judged.append(message["cell"])
                    at = None
                    if time.monotonic() >= end:
                        process.kill()
                        break
            code = process.wait()
            late.cancel()
            complaints.seek(0)
            tail = complaints.read()[-300:].strip().replace("\n", " | ")
        if len(judged) < len(todo) and time.monotonic() < end:
            if at is None and code == 0:
                continue
            if at is None:
                raise SystemExit(f"the judging process ended with code {code} outside any cell: {tail}")
            lost = todo[at]
            why = f"its process ended with code {code}: {tail}"
            judged.append({"op": lost.op.name, "case": lost.case.name, "failed": why})
    return judged, len(todo) - len(judged)


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
    """Median and p95 of the regret for groups of cells, what preference alone would have cost, what was left out."""
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
        for key in ("regret", "regret_of_preference", "noise") if counted else ():
            values = [cell[key] for cell in counted]
            row[key] = {"median": statistics.median(values), "p95": percentile(values, 0.95), "most": max(values)}
        rows[name] = row
    return rows


def _half(cell: dict[str, Any]) -> str:
    return str(cell.get("half", "failed"))


def _source(cell: dict[str, Any]) -> str:
    source = str(cell.get("source", "failed"))
    return "predicted from regions near" if source.startswith("predicted from") else source


def markdown(judged: Sequence[dict[str, Any]], left: int, title: str) -> str:
    lines = [title, ""]
    for head, of in (("shapes", _half), ("order from", _source), ("op", lambda cell: str(cell["op"]))):
        lines += [
            f"| {head} | cells | count | noisy | no choice | failed or untrusted | regret: median | p95 | most "
            "| preference alone: median | p95 | noise: median | p95 |",
            "|---" * 13 + "|",
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
                    ("regret_of_preference", "median"),
                    ("regret_of_preference", "p95"),
                    ("noise", "median"),
                    ("noise", "p95"),
                )
            ]
            lines.append(f"| {name} | {' | '.join(map(str, numbers))} | {' | '.join(shares)} |")
        lines.append("")
    for half, limits in LIMITS.items():
        regret = summary(judged, _half).get(half, {}).get("regret")
        measured = "nothing to judge" if regret is None else ", ".join(f"{regret[k]:.1%}" for k in _LIMITED)
        lines.append(
            f"{half}: median, p95 and worst {measured}; allowed: {', '.join(f'{limit:.0%}' for limit in limits)}"
        )
    lines += _beside_peers(judged)
    if left:
        lines.append(f"{left} cells were left when time was up")
    worst = sorted((c for c in judged if standing(c) == "counts"), key=lambda c: -c["regret"])[:10]
    lines += ["", "| worst cells | case | choice | best | regret | order from |", "|---|---|---|---|---|---|"]
    for cell in worst:
        best = min(cell["seconds"], key=lambda name: cell["seconds"][name])
        columns = f"{cell['choice']} | {best} | {cell['regret']:.1%} | {cell['source']}"
        lines.append(f"| {cell['op']} | {cell['case']} | {columns} |")
    return "\n".join(lines) + "\n"


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


def unmet(judged: Sequence[dict[str, Any]]) -> list[str]:
    """What of `LIMITS` does not hold, or could not be judged."""
    halves, failures = summary(judged, _half), []
    for half, limits in LIMITS.items():
        regret = halves.get(half, {}).get("regret")
        if regret is None:
            failures.append(f"{half}: no cell counts; required: at least one")
            continue
        for name, limit in zip(_LIMITED, limits, strict=True):
            if regret[name] > limit:
                failures.append(f"{half}: {name} {regret[name]:.2%}; required: at most {limit:.0%}")
    return failures


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lockfile", type=Path, help="default: the setting, else the one that ships")
    parser.add_argument("--cells", type=int, default=300)
    parser.add_argument("--seconds", type=float, default=440.0, help="of judging, then what is done is reported")
    parser.add_argument("--op", action="append", help="only this op; repeatable")
    parser.add_argument("--grid", default="full", help="the grid that was tuned")
    parser.add_argument("--device")
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--seed", type=int, default=int(f"{datetime.date.today():%Y%m%d}"), help="default: the date")
    parser.add_argument("--resume", type=Path, metavar="JSON", help="go on with the cells that this document left")
    parser.add_argument("--ahead", type=int, default=8, help="processes that run every kernel once before, on a GPU")
    parser.add_argument("--warm", help=argparse.SUPPRESS)
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
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.warm is not None:
        warm(given, *map(int, given.warm.split("/")))
        return
    if given.worker is not None:
        work(given, given.worker)
        return
    try:
        _run(given)
    except FerrymanError as error:
        sys.stderr.write(f"regret: {error}\n")
        raise SystemExit(2) from None


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


def _resumed(given: argparse.Namespace, todo: Sequence[Cell]) -> list[dict[str, Any]]:
    """The cells of an earlier sitting. Raises ResultError where they are not the first ones of this draw."""
    if given.resume is None:
        return []
    known = [(cell.op.name, cell.case.name) for cell in todo]
    try:
        judged: list[dict[str, Any]] = json.loads(given.resume.read_text(encoding="utf-8"))["cells"]
        same = [(cell["op"], cell["case"]) for cell in judged] == known[: len(judged)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(
            f"--resume {given.resume}: required: a document of benchmarks/regret.py; {error!r}"
        ) from error
    if not same:
        raise ResultError(f"--resume {given.resume} is of another draw; name its --seed, --cells, --op and --grid")
    return judged


def _run(given: argparse.Namespace) -> None:
    if given.cells < 1:
        raise ArgumentError("regret", "--cells", given.cells, "at least 1")
    if not 0 < given.seconds < math.inf:
        raise ArgumentError("regret", "--seconds", given.seconds, "more than 0, finite")
    plan, todo = _plan(given)
    profile = plan.profile
    given.lockfile, document = _locked(given.lockfile, profile)
    for option, path in (("--markdown", given.markdown), ("--json", given.json)):
        if path is not None:
            documents.require_writable(path, option)
    start = time.monotonic()
    before = _resumed(given, todo)
    judged, left = supervise(given, todo, before)
    seconds = time.monotonic() - start
    if not judged:
        raise ArgumentError(
            "regret", "--seconds", given.seconds, f"enough for one of {len(todo)} cells; none was judged"
        )
    environment = results.environment(plan.device, profile, given.seed, given.grid, seconds)
    title = (
        f"{environment.device_name} ({profile.name}), torch {torch.__version__}, {given.dtype}: {len(judged)} cells in "
        f"{seconds:.0f} s, seed {given.seed}, {regions(document)}"
    )
    text = markdown(judged, left, title)
    print(text)
    if given.markdown is not None:
        documents.write(given.markdown, text, "--markdown")
    if given.json is not None:
        report = {
            "kind": "ferryman-regret",
            "version": 1,
            "environment": environment.model_dump(mode="json"),
            "dtype": given.dtype,
            "noise_limit": NOISE_LIMIT,
            "left": left,
            "halves": summary(judged, _half),
            "sources": summary(judged, _source),
            "ops": summary(judged, lambda c: str(c["op"])),
            "cells": judged,
        }
        documents.write(given.json, json.dumps(report, indent=1), "--json")
    if given.require and (failures := unmet(judged)):
        raise SystemExit("regret: " + "; ".join(failures))


if __name__ == "__main__":
    main()
