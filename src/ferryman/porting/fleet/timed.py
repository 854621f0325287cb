"""`ferryman bench` and `ferryman tune` over a cluster: one document, or lockfile, a single process's but for times."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from ferryman.device_profiles import Profile
from ferryman.dispatch import lockfile_document, registry
from ferryman.dispatch.lockfile_entry import Entry
from ferryman.dispatch.whole_file import write_whole
from ferryman.porting.bench.document import Benchmark, parse
from ferryman.porting.bench.grid import grid_of
from ferryman.porting.fleet import cluster, pool, remote, remote_timed, shards
from ferryman.porting.fleet.cluster import Claim
from ferryman.porting.fleet.journal import Journal, fingerprint
from ferryman.porting.fleet.shards import Group
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.tune.tuner import Outcome

Progress = Callable[[int, int, str], None]
Say = Callable[[str], None]
_WAY = "timed"  # all groups of a sweep are of one way


def bench(
    on: str,
    known: Profile,
    ops: Sequence[str] | None = None,
    implementations: Sequence[str] | None = None,
    grid: str = "small",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    workers: int = 1,
    earlier: Iterable[Path] = (),
    journal: Path | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> Benchmark:
    """Time every op, or those named, as `bench.run` does without peers, on a cluster's workers.

    on, known, earlier, journal, say: as of `fleet.check.run`. The ceilings are measured once, on one worker, before the
    cells. On a CPU the workers share its memory, and times are those of a busy machine. Raises FleetError,
    ArgumentError, UnknownName, ResultError.
    """
    began = time.perf_counter()
    ask = _ask(on, ops, implementations, grid, dtype, Claim.of(known).device) | {"seed": seed}
    sweep = _Sweep(on, known, ask, workers, earlier, journal, progress, say)
    parts = [parse(one["document"], "a worker's benchmark") for one in sweep.run(remote_timed.bench, alone=True)]
    place = {pair: number for number, pair in enumerate(sweep.pairs)}
    cells = {(cell.op, cell.case): cell for part in parts for cell in part.cells}
    ordered = sorted(cells.values(), key=lambda cell: place[cell.op, cell.case])
    facts = parts[0].environment.model_copy(update={"seconds": round(time.perf_counter() - began, 3)})
    return parts[0].model_copy(update={"environment": facts, "cells": ordered})


def tune(
    on: str,
    known: Profile,
    path: Path,
    ops: Sequence[str] | None = None,
    implementations: Sequence[str] | None = None,
    grid: str = "small",
    dtype: torch.dtype = torch.bfloat16,
    again: bool = False,
    silence: float = 180.0,
    workers: int = 1,
    earlier: Iterable[Path] = (),
    journal: Path | None = None,
    progress: Progress | None = None,
    say: Say = lambda text: None,
) -> list[Outcome]:
    """Tune as `tune.tune` does, on a cluster's workers, and merge what they chose into the lockfile ``path``.

    A worker measures whole cells, so that the candidates of one are compared on one device. The lockfile is written at
    the end, with what others wrote into it meanwhile. Raises FleetError, ArgumentError, UnknownName; LockfileError for
    a file that is damaged, cannot be written, or is of another device than the workers have.
    """
    ask = _ask(on, ops, implementations, grid, dtype, Claim.of(known).device)
    texts: list[str | None] = []
    lockfile_document.locked(path, lambda real: texts.append(_text(real)))
    ask |= {"again": again, "silence": silence, "lockfile": texts[0], "path": str(path)}
    sweep = _Sweep(on, known, ask, workers, earlier, journal, progress, say)

    def merged(ray: Any, claim: Claim, parts: Sequence[Mapping[str, Any]]) -> None:
        entries = [entry for part in parts for entry in part["entries"]]

        def write(real: Path) -> None:
            text = pool.once(ray, claim, remote_timed.merge, ask, _text(real), entries, known.name)
            if text is not None:
                write_whole(real, text.encode("utf-8"))

        lockfile_document.locked(path, write)

    parts = sweep.run(remote_timed.tune, merged)
    place = {pair: number for number, pair in enumerate(sweep.pairs)}
    outcomes = [
        Outcome(one["op"], one["case"], one["result"], None if one["entry"] is None else Entry(**one["entry"]))
        for part in parts
        for one in part["outcomes"]
    ]
    return sorted(outcomes, key=lambda one: place[one.op, one.case])


def _text(path: Path) -> str | None:
    """A lockfile's text, once it was read as one; None where there is none."""
    return lockfile_document.load(path).model_dump_json(indent=1) + "\n" if path.exists() else None


def _ask(
    on: str,
    ops: Sequence[str] | None,
    implementations: Sequence[str] | None,
    grid: str,
    dtype: torch.dtype,
    device: str,
) -> dict[str, Any]:
    """The request, once all of it is known to be one: before a file or a cluster is made."""
    cluster.address(on)
    for op in ops or ():
        registry.primitive(op)
    for name in implementations or ():
        registry.check_requested(name)
    grid_of(grid)
    return {
        "ops": None if ops is None else list(ops),
        "implementations": None if implementations is None else list(implementations),
        "grid": grid,
        "dtype": dtype_name(dtype),
        "device": device,
    }


class _Sweep:
    """The cells of a grid, (op, case), spread over a cluster; each part of what workers said is kept once."""

    def __init__(
        self,
        on: str,
        known: Profile,
        ask: dict[str, Any],
        workers: int,
        earlier: Iterable[Path],
        journal: Path | None,
        progress: Progress | None,
        say: Say,
    ) -> None:
        self._on, self._known, self._ask, self._workers = on, known, ask, workers
        self._spent = shards.measured(earlier)
        self._journal, self._progress, self._say = journal, progress, say
        self._parts: list[dict[str, Any]] = []
        self._done: set[tuple[str, str]] = set()
        self.pairs: list[tuple[str, str]] = []

    def run(
        self,
        work: Callable[..., dict[str, Any]],
        finish: Callable[[Any, Claim, Sequence[Mapping[str, Any]]], None] | None = None,
        alone: bool = False,
    ) -> list[dict[str, Any]]:
        """What workers said. finish: what is done with it while the cluster is there. alone: a cell is a shard, so that
        one that kills its worker costs no other."""
        claim = Claim.of(self._known)
        with cluster.connected(self._on, self._workers) as ray:
            count = cluster.require(ray, claim)
            pool.agree(ray, claim)
            plan = pool.once(ray, claim, remote_timed.plan, self._ask, self._known.name)
            self.pairs = [(op, case) for op, case, _ in plan["cells"]]
            request = fingerprint([self._ask, self._known.name, remote.digest(), plan["cells"]])
            record = Journal(self._journal, request)
            self._resume(record)
            kept = plan["ceilings"] if not self._parts else self._parts[0]["ceilings"]
            dtype = self._ask["dtype"]
            sizes: dict[Group, float] = {
                (_WAY, op, dtype, case): seconds for op, case, seconds in plan["cells"] if (op, case) not in self._done
            }
            cost = shards.costs(sizes, self._spent)
            parts = [[g] for g in sorted(cost, key=lambda g: -cost[g])] if alone else shards.divided(cost, count)
            waiting: dict[str, Sequence[Any]] = {
                f"{i}": [self._ask, [[g[1], g[3]] for g in groups], kept, self._known.name]
                for i, groups in enumerate(parts)
            }

            def take(given: Sequence[Any], value: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
                part = {**value, "pairs": given[1], "ceilings": kept}
                record.add(part)
                self._keep(part, str(value["host"]))
                return {}

            def lost(given: Sequence[Any], why: str) -> None:
                part = pool.once(ray, claim, remote_timed.lost, work.__name__, *given, why)
                self._keep({**part, "pairs": given[1], "ceilings": kept}, "lost")

            try:
                pool.spread(ray, claim, work, waiting, take, lost)
                if finish is not None:
                    finish(ray, claim, self._parts)
            except BaseException:
                record.close(done=False)
                raise
        record.close(done=True)
        return self._parts

    def _resume(self, record: Journal) -> None:
        if record.other:
            self._say(f"{record.path} is of another request or of other sources; it is kept as *.old.jsonl")
        for part in record.entries:
            self._keep(part, "done before")
        if self._done:
            self._say(f"{len(self._done)} of {len(self.pairs)} cells were done before; they stand in {record.path}")

    def _keep(self, part: dict[str, Any], label: str) -> None:
        self._parts.append(part)
        self._done |= {(op, case) for op, case in part["pairs"]}
        if self._progress is not None:
            self._progress(len(self._done), len(self.pairs), label)
