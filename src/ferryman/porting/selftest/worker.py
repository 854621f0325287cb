"""One share of the self-test in a process of its own: on a CPU each mutant in a fork of it, which may crash or hang.

The worker reads one JSON job and writes one JSON object a line. Edited Triton kernels are interpreted there. What a
mutant writes out of bounds, and what it kills, is its fork's: the next one starts from clean memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import os
import select
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ferryman.ops.menu import Implementation
from ferryman.porting.mutate import sources
from ferryman.porting.mutate.edits import EditError
from ferryman.porting.running import simulated_route
from ferryman.porting.running.process import end_with_parent
from ferryman.porting.selftest.cells import Cells
from ferryman.porting.selftest.honest import honest
from ferryman.porting.selftest.judging import Setting
from ferryman.porting.selftest.planting import AMD, EDITS, Mutant, catalogue
from ferryman.porting.selftest.report import Record, Tally
from ferryman.porting.selftest.session import evaluate, not_run

SIMULATED = "h200"  # a CPU has no tiles of its own
RUNS = 2  # the interpreter is one thread of NumPy: a third run would show nothing new
LIMIT_SECONDS = 120.0  # of one mutant, by the clock
OWN_SECONDS, SLOWER = 6.0, 10  # of its process: so many, and so many times the right kernel's on what it is tried on
EARLY = 12  # cells that catch most mutants: what only the others need is made ready once one survives these
START = "from ferryman.porting.selftest.worker import main; raise SystemExit(main())"


def forked(work: Callable[[], Record | None], limit: float, own: float | None = None) -> Record | str | None:
    """What ``work`` gives, in a fork of this process; or why there is nothing: it took longer than ``limit`` seconds,
    or its process used more than ``own`` of them."""
    import resource  # Unix alone has it, as it has fork

    read, write = os.pipe()
    here = os.getpid()
    child = os.fork()
    if child == 0:
        end_with_parent(here)
        os.close(read)
        if own is not None:
            resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(own), math.ceil(own)))
        try:
            record = work()
            text = json.dumps({"record": record and record.model_dump(mode="json")})
        except EditError as error:
            text = json.dumps({"edit": str(error)})
        except BaseException as error:  # noqa: BLE001 - a fault of the self-test: told, not swallowed
            text = json.dumps({"fault": "".join(traceback.format_exception(error))[-2000:]})
        with os.fdopen(write, "w", encoding="utf-8") as pipe:
            pipe.write(text)
        os._exit(0)
    os.close(write)
    deadline, parts, why = time.monotonic() + limit, list[bytes](), None
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while True:
            if not select.select([pipe], [], [], max(deadline - time.monotonic(), 0))[0]:
                os.kill(child, signal.SIGKILL)
                why = f"no result within {limit:.0f} s"
                break
            part = pipe.read(1 << 16)
            if not part:
                break
            parts.append(part)
    _, status = os.waitpid(child, 0)
    if own is not None and os.WIFSIGNALED(status) and os.WTERMSIG(status) in (signal.SIGXCPU, signal.SIGKILL):
        why = why or f"no result within {own:.0f} s of its process"
    if why is None and os.WIFSIGNALED(status):
        why = f"its process ended with {signal.Signals(os.WTERMSIG(status)).name}"
    if why is not None:
        return why
    said = json.loads(b"".join(parts))
    if "edit" in said:
        raise EditError(said["edit"])
    if "fault" in said:
        raise RuntimeError(said["fault"])
    return said["record"] and Record.model_validate(said["record"])


def each_mutant(
    mutants: Sequence[Mutant],
    setting: Setting,
    seed: int,
    every_run_judged: bool,
    limit: float = LIMIT_SECONDS,
    budget: float | None = None,
) -> Iterator[Record]:
    """Every mutant's record, kernel by kernel. On a GPU that is lost, the rest is not run.

    budget: process seconds of an op's right kernel for what edits need that survive the first cells. What these cannot
    decide is not run.
    """
    grouped: dict[tuple[str, str, Implementation | None], list[Mutant]] = {}
    for mutant in mutants:
        line = mutant.line if mutant.backend == "triton" else None
        grouped.setdefault((mutant.op, mutant.backend, line), []).append(mutant)
    lost: str | None = None
    for (op, backend, line), group in grouped.items():
        cells = Cells(op, setting, seed, backend, line)
        if setting.device.type != "cuda" and backend != "torch":
            yield from _interpreted(group, cells, every_run_judged, limit, math.inf if budget is None else budget)
            continue
        rights = dict[Any, Any]()
        for mutant in group:
            if lost is not None:
                yield not_run(mutant, lost)
                continue
            key = mutant.line.where
            if key not in rights:
                rights[key] = mutant.right()
            record = evaluate(mutant, rights[key], cells, setting, every_run_judged)
            assert record is not None
            yield record
            lost = _lost(setting.device, mutant.key) if setting.device.type == "cuda" else None


def _interpreted(
    group: Sequence[Mutant], cells: Cells, every_run_judged: bool, limit: float, budget: float
) -> Iterator[Record]:
    """Each mutant of one kernel in a fork: all of them on the first cells, then those that survive on every one."""
    right = sources.watched(group[0].line) if cells.backend == "triton" else group[0].right()
    left = list(group)
    for first in (EARLY, None) if len(cells.order()) > EARLY else (None,):
        if left:
            cells.warm(right, group[0].line, first, math.inf if first else budget)
        survivors = []
        for mutant in left:
            own = OWN_SECONDS + SLOWER * cells.seconds
            judge = functools.partial(
                evaluate,
                right=right,
                cells=cells,
                setting=cells.setting,
                every_run_judged=every_run_judged,
                first=first,
            )
            answer = _answer(judge, mutant, right, max(limit, 2 * own), own)
            if answer is None:
                survivors.append(mutant)
            else:
                yield not_run(mutant, answer) if isinstance(answer, str) else answer
        left = survivors


def _answer(
    judge: Callable[[Mutant], Record | None], mutant: Mutant, right: Any, limit: float, own: float
) -> Record | str | None:
    """`forked` of a mutant. What it writes out of bounds may be what its process judges with, which raises then: where
    the right kernel in its place raises nothing, that is the mutant's doing. Raises RuntimeError where it does."""
    try:
        return forked(functools.partial(judge, mutant), limit, own)
    except EditError:
        raise
    except RuntimeError as error:
        if isinstance(forked(lambda: judge(dataclasses.replace(mutant, make=lambda: right)), limit, own), str):
            raise
        return f"its process raised after what it wrote: {str(error).strip().splitlines()[-1][:200]}"


def _lost(device: torch.device, key: str) -> str | None:
    try:
        torch.cuda.synchronize(device)
    except RuntimeError as error:
        return f"{key} lost the device: {str(error).splitlines()[0][:200]}"
    return None


def do(job: dict[str, Any], setting: Setting, say: Callable[[str, Record | Tally], None]) -> None:
    """One job: ``mutants`` by key, and ``honest``, pieces of right runs as (key, first round, rounds)."""
    wanted = set(job["mutants"])
    drawn = catalogue(job["ops"], job["most"], job["plant_seed"], job["backend"], job["implementation"])
    chosen = [m for m in drawn if m.key in wanted]
    for record in each_mutant(chosen, setting, job["seed"], job["every_run_judged"], budget=job["budget"]):
        say(record.key, record)
    for key, first, rounds in job["honest"]:
        say(key, honest(job["ops"], setting, job["seed"], job["backend"], first, rounds))


def main() -> int:
    """The worker's own side. What kernels print goes to stderr: stdout carries the protocol."""
    from ferryman.device_profiles import detect, profile

    end_with_parent()

    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")  # NumPy warns of every planted NaN, Python of planted syntax
    torch.set_num_threads(1)
    job = json.loads(sys.stdin.read())

    def say(key: str, entry: Record | Tally) -> None:
        kind = "record" if isinstance(entry, Record) else "tally"
        with contextlib.suppress(BrokenPipeError):
            out.write(json.dumps({"key": key, kind: entry.model_dump(mode="json")}) + "\n")
            out.flush()

    device = torch.device("cpu")
    interpreted = job["backend"] == "triton"
    setting = Setting(device, detect(device), RUNS if interpreted else 3, profile(SIMULATED) if interpreted else None)
    with contextlib.ExitStack() as route:
        if job["backend"] == "hip":
            setting = Setting(device, profile(AMD), RUNS)
            route.enter_context(simulated_route.on(setting.profile))
        do(job, setting, say)
    return 0


__all__ = ["EDITS", "START", "do", "each_mutant", "forked", "main"]
