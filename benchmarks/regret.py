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

On a GPU --ahead processes compile first, for --ahead-seconds at most: every cell's kernels, then what serves prepared
calls only (FlexAttention). Cells whose kernels are ready are judged first. What was not prepared in that time is left
out of its cell, and said. --json is written after every cell: a run that is stopped leaves what it judged.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import gc
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
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
from ferryman.porting.bench import ahead, clock, grid, peers, rotation, runner
from ferryman.porting.bench.condition import watch
from ferryman.porting.bench.contender import Contender, close, prepare, promising, quickest_of, steady_trials
from ferryman.porting.bench.laps import Laps
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging import results
from ferryman.porting.running.process import bound, device_lost, placed, quiet

NOISE_LIMIT = 0.03
KEPT_SHARE = 0.4  # of a device's memory, that graphs may keep between cells
NOT_PREPARED = "not compiled ahead"
IN_TIME = f"{NOT_PREPARED}: no time was left (--ahead-seconds, --prepare-seconds)"
_LIMITED = ("median", "p95", "most")
PEERS = ["sdpa"]  # PyTorch's own choice stands beside ours
ORDER = "order.json"  # of cells, in the folder that the processes of a run share
TOLD_EVERY = 20.0  # seconds, while kernels are compiled ahead
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


def judge(plan: runner.Plan, cell: Cell, laps: Laps, unprepared: str = IN_TIME) -> dict[str, Any]:
    """What dispatch chooses for a cell, and what every implementation takes.

    laps: of the parts of this work. unprepared: why what serves prepared calls only is left out, where it is.
    """
    op, profile, name = cell.op, plan.profile, f"{cell.case.name} {dtype_name(plan.dtype)}"
    sets, _ = runner.rotated(plan, op, cell.case)
    laps.end("inputs")
    if plan.prepares:  # what serves prepared calls only may be the choice, where it was measured
        preparing.ready(op, sets[0], profile)
    laps.end("preparing")
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
    if not plan.prepares:
        served = {line.name for line in preparing.preparable(op, sets[0], profile)}
        for contender in contenders:
            if contender.name in served and contender.skipped is not None:
                contender.skipped = unprepared
    contenders += runner.own_plans(plan, op, sets[0])
    laps.end("choosing")
    contenders += runner.peer_contenders(plan, op, sets[0])
    laps.end("peers' results")
    for contender in contenders:
        prepare(contender, sets, plan.device, seen.sample, again, quickest_of(contenders))
    laps.end("making ready")
    racing = [c for c in contenders if c.timer is not None]
    record["skipped"] = {c.name: str(c.skipped) for c in contenders if c.timer is None}
    if chosen not in {c.name for c in racing}:
        return record | {"failed": f"the choice could not be timed: {record['skipped'].get(chosen, 'not on the menu')}"}
    kept = promising(racing)
    laps.end("first timing")
    if chosen not in {c.name for c in kept}:  # its noise is wanted all the same
        kept = [next(c for c in racing if c.name == chosen), *kept]
        kept[0].trials.clear()
    noise, untrusted = steady_trials(kept, seen)
    laps.end("trials")
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


def work(given: argparse.Namespace, folder: Path) -> None:
    """The judging process: one JSON line before each cell and one after; what kernels print goes to stderr.

    folder: where `supervise` says which cells, in which order, and of which everything was prepared.
    """
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    plan, todo = _plan(given)
    asked = json.loads((folder / ORDER).read_text(encoding="utf-8"))
    left = math.inf if asked["prepare_seconds"] is None else float(asked["prepare_seconds"])
    rotation.MOST_SETS, clock.SAMPLES, clock.SAMPLE_SECONDS = MOST_SETS, SAMPLES, SAMPLE_SECONDS
    total = torch.cuda.get_device_properties(plan.device).total_memory if plan.device.type == "cuda" else 0
    with quiet():
        for index in asked["order"]:
            print(json.dumps({"start": index}), file=out, flush=True)
            cell, laps = todo[index], Laps()
            compiled = index in asked["prepared"]
            prepares = dataclasses.replace(plan, prepares=compiled or left > 0)
            try:
                record = judge(prepares, cell, laps, asked["unprepared"].get(str(index), IN_TIME))
            except (RuntimeError, FerrymanError) as error:  # out of memory, or refused: a counted cell
                if device_lost(plan.device) is not None:
                    raise  # nothing more can be judged here: another process goes on after this cell
                why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
                record = {"op": cell.op.name, "case": cell.case.name, "failed": why}
            laps.end("other")
            if plan.device.type == "cuda":
                gc.collect()
                gc.freeze()  # what compilers keep is not looked through again: 0.5 s a cell
                torch.cuda.empty_cache()
            laps.end("emptying")
            if not compiled:
                left -= laps.seconds.get("preparing", 0.0)
            print(json.dumps({"cell": record | {"parts": laps.seconds}}), file=out, flush=True)
            if plan.device.type == "cuda" and torch.cuda.memory_reserved(plan.device) > KEPT_SHARE * total:
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


def _environment(given: argparse.Namespace) -> dict[str, str]:
    """Of the processes: the lockfile that is judged, one place for what Triton compiles (Inductor moves it in a process
    where none is named), and no pools of compilers."""
    untuned = given.lockfile == settings.NO_LOCKFILE
    environment = {
        "TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache"),
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        **os.environ,
        "FERRYMAN_LOCKFILE": "none" if untuned else str(given.lockfile.resolve()),
    }
    environment.pop("FERRYMAN_BACKEND", None)
    return environment


def _ahead(
    given: argparse.Namespace, folder: Path, environment: Mapping[str, str], left: Sequence[int]
) -> list[ahead.Done]:
    """Compile what the cells that are left need, in several processes, until all is done or time is up."""
    (folder / ORDER).write_text(json.dumps({"order": list(left)}), encoding="utf-8")
    start = time.monotonic()
    end = start + (given.seconds / 2 if given.ahead_seconds is None else min(given.ahead_seconds, given.seconds))
    running: list[subprocess.Popen[bytes]] = []
    try:
        for k in range(given.ahead):
            command = bound([sys.executable, __file__, *sys.argv[1:], "--worker", str(folder), "--compile", str(k)])
            with (folder / f"{k}.err").open("w") as complaints:
                own = {**environment, "OMP_NUM_THREADS": "1"}
                running.append(subprocess.Popen(command, stdout=complaints, stderr=complaints, env=own))
        for process in running:
            while process.poll() is None and time.monotonic() < end:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(max(0.1, min(TOLD_EVERY, end - time.monotonic())))
                    continue
                _tell(ahead.described(ahead.done(folder), len(left), time.monotonic() - start))
    finally:  # what is missing is compiled when it is timed, or left out
        for process in running:
            process.kill()
            process.wait()
    said = ahead.done(folder)
    _tell(ahead.described(said, len(left), time.monotonic() - start))
    for k, process in enumerate(running):
        if process.returncode not in (0, -signal.SIGKILL):
            tail = (folder / f"{k}.err").read_text(encoding="utf-8", errors="replace")[-300:].strip()
            _tell(f"a process that compiles ended with code {process.returncode}: {tail.replace(chr(10), ' | ')}")
    return said


def compile_ahead(given: argparse.Namespace, folder: Path, number: int) -> None:
    """One of the processes that compile."""
    plan, todo = _plan(given)
    order = json.loads((folder / ORDER).read_text(encoding="utf-8"))["order"]
    if plan.device.type == "cuda":
        torch.cuda.set_per_process_memory_fraction(1 / given.ahead)
    with quiet():
        ahead.compile_cells(folder, str(number), plan, [(i, todo[i].op, todo[i].case) for i in order])


def ordered(left: Sequence[int], said: Sequence[ahead.Done]) -> list[int]:
    """Cells whose kernels are ready first, those of them first for which everything was prepared that will be."""
    launched = {one.cell: one for one in said if one.part == "kernels" and one.failed is None}
    tried = {one.cell for one in said if one.part == "prepared"}

    def missing(index: int) -> int:
        kernels = launched.get(index)
        return 2 if kernels is None else int(kernels.wants_preparing and index not in tried)

    return sorted(left, key=missing)


def _tell(text: str) -> None:
    sys.stderr.write(f"regret: {text}\n")
    sys.stderr.flush()


def told(cell: Mapping[str, Any]) -> str:
    """One line about a cell that was judged, and where its time went."""
    parts = {part: seconds for part, seconds in cell.get("parts", {}).items() if seconds >= 0.01}
    spent = ", ".join(f"{part} {seconds:.2f}" for part, seconds in parts.items())
    result = f"failed: {cell['failed'][:80]}" if "failed" in cell else f"{cell['choice']} +{cell['regret']:.1%}"
    return f"{cell['op']} {cell['case']}: {result}; {sum(parts.values()):.1f} s: {spent}"


def supervise(
    given: argparse.Namespace,
    todo: Sequence[Cell],
    before: Sequence[dict[str, Any]] = (),
    keep: Callable[[Sequence[dict[str, Any]]], None] = lambda judged: None,
) -> tuple[list[dict[str, Any]], int]:
    """Workers, one after another where one dies, until all is judged or time is up: (cells, how many were left).

    keep: called with all cells after each.
    """
    environment = _environment(given)
    start = time.monotonic()
    end = start + given.seconds
    judged: list[dict[str, Any]] = list(before)
    known = {(cell["op"], cell["case"]) for cell in before}
    left = [i for i, cell in enumerate(todo) if (cell.op.name, cell.case.name) not in known]

    def add(index: int, record: dict[str, Any]) -> None:
        judged.append(record)
        left.remove(index)
        keep(judged)
        _tell(f"{len(judged)} of {len(todo)}, {time.monotonic() - start:.0f} s: {told(record)}")

    with tempfile.TemporaryDirectory(prefix="ferryman-regret-") as name:
        folder, said = Path(name), list[ahead.Done]()
        prepare_seconds = given.prepare_seconds
        if left and given.ahead > 0 and torch.cuda.is_available():
            said = _ahead(given, folder, environment, left)
            left = ordered(left, said)
            prepare_seconds = prepare_seconds or 0.0
        prepared = sorted(ahead.ready(said, "prepared"))
        failed = (one for one in said if one.part == "prepared" and one.failed is not None)
        unprepared = {one.cell: f"{NOT_PREPARED}: {one.failed}" for one in failed}
        while left and time.monotonic() < end:
            asked = {"order": left, "prepared": prepared, "unprepared": unprepared, "prepare_seconds": prepare_seconds}
            (folder / ORDER).write_text(json.dumps(asked), encoding="utf-8")
            at, why = _worked(given, folder, environment, end, add)
            if left and time.monotonic() < end:
                if at is not None:
                    lost = todo[at]
                    add(at, {"op": lost.op.name, "case": lost.case.name, "failed": why})
                elif why:
                    raise SystemExit(f"{why} outside any cell")
    return judged, len(left)


def _worked(
    given: argparse.Namespace,
    folder: Path,
    environment: Mapping[str, str],
    end: float,
    add: Callable[[int, dict[str, Any]], None],
) -> tuple[int | None, str]:
    """One judging process, to its end or ``end``: (the cell that it was at, why it ended)."""
    command = bound([sys.executable, __file__, *sys.argv[1:], "--worker", str(folder)])
    at: int | None = None
    with tempfile.TemporaryFile("w+", encoding="utf-8") as complaints:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=complaints, text=True, env=environment)
        assert process.stdout is not None
        late = threading.Timer(max(0.0, end - time.monotonic()) + GRACE_SECONDS, process.kill)
        late.start()
        try:
            for line in process.stdout:
                message = json.loads(line)
                at = message.get("start", at)
                if "cell" in message and at is not None:
                    add(at, message["cell"])
                    at = None
                    if time.monotonic() >= end:
                        break
            else:
                process.wait()
        finally:
            process.kill()
            code = process.wait()
            late.cancel()
        complaints.seek(0)
        tail = complaints.read()[-300:].strip().replace("\n", " | ")
    return at, f"its process ended with code {code}: {tail}" if code else ""


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
    lines += _not_prepared(judged)
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


def _resumed(given: argparse.Namespace, todo: Sequence[Cell]) -> list[dict[str, Any]]:
    """The cells of an earlier sitting. Raises ResultError where they are not of this draw."""
    if given.resume is None:
        return []
    known = {(cell.op.name, cell.case.name) for cell in todo}
    try:
        document: dict[str, Any] = json.loads(given.resume.read_text(encoding="utf-8"))
        judged: list[dict[str, Any]] = document["cells"]
        earlier = [(cell["op"], cell["case"]) for cell in judged]
        of_draw = document["environment"]["seed"] == given.seed and known.issuperset(earlier)
        same = of_draw and len(set(earlier)) == len(earlier)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultError(
            f"--resume {given.resume}: required: a document of benchmarks/regret.py; {error!r}"
        ) from error
    if not same:
        raise ResultError(f"--resume {given.resume} is of another draw; name its --seed, --cells, --op and --grid")
    return judged


def report(environment: dict[str, Any], dtype: str, judged: Sequence[dict[str, Any]], left: int) -> str:
    """The document. left: cells that were not judged (yet)."""
    document = {
        "kind": "ferryman-regret",
        "version": 1,
        "environment": environment,
        "dtype": dtype,
        "noise_limit": NOISE_LIMIT,
        "left": left,
        "halves": summary(judged, _half),
        "sources": summary(judged, _source),
        "ops": summary(judged, lambda c: str(c["op"])),
        "cells": list(judged),
    }
    return json.dumps(document, indent=1)


def _run(given: argparse.Namespace) -> None:
    if given.cells < 1:
        raise ArgumentError("regret", "--cells", given.cells, "at least 1")
    if not 0 < given.seconds < math.inf:
        raise ArgumentError("regret", "--seconds", given.seconds, "more than 0, finite")
    for option, seconds in (("--ahead-seconds", given.ahead_seconds), ("--prepare-seconds", given.prepare_seconds)):
        if seconds is not None and not 0 <= seconds < math.inf:
            raise ArgumentError("regret", option, seconds, "at least 0, finite")
    plan, todo = _plan(given)
    profile = plan.profile
    given.lockfile, document = _locked(given.lockfile, profile)
    for option, path in (("--markdown", given.markdown), ("--json", given.json)):
        if path is not None:
            documents.require_writable(path, option)
    start = time.monotonic()
    before = _resumed(given, todo)

    def environment() -> results.Environment:
        return results.environment(plan.device, profile, given.seed, given.grid, time.monotonic() - start)

    def keep(judged: Sequence[dict[str, Any]]) -> None:
        if given.json is not None:
            facts = environment().model_dump(mode="json")
            documents.write(given.json, report(facts, given.dtype, judged, len(todo) - len(judged)), "--json")

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
        documents.write(given.json, report(facts.model_dump(mode="json"), given.dtype, judged, left), "--json")
    if given.require and (failures := unmet(judged)):
        raise SystemExit("regret: " + "; ".join(failures))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _terminated)
    main()
