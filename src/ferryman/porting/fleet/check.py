"""`ferryman check` over a cluster: one document, a single process's but for times."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.porting.fleet import cluster, pool, remote, shards
from ferryman.porting.fleet.cluster import Claim
from ferryman.porting.fleet.journal import Journal, fingerprint
from ferryman.porting.fleet.shards import Group
from ferryman.porting.judging.results import Cell, Environment, Finding, Results, Timing, results
from ferryman.porting.running.cells import ALL, dtypes_of, ordered, require_lines, tier_cases
from ferryman.porting.running.workers import Job

DIED = "its process ended with code"  # how `worker` says that a cell's own process ended
_Key = tuple[str, str, str, str]  # op, implementation, dtype, case


def run(
    on: str,
    known: Profile,
    ops: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    tier: str | None = None,
    seed: int = 0,
    full: bool = False,
    workers: int = 1,
    earlier: Iterable[Path] = (),
    journal: Path | None = None,
    times: Path | None = None,
    progress: Callable[[int, int, str], None] | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> Results:
    """Check every requested op x implementation, as `runner.run` does, on a cluster's workers.

    on: "ray", a cluster of ``workers`` cores on this machine, or "ray@HOST:PORT". known: the device that each worker
    claims. earlier: documents whose times say what cells cost. journal: where finished shards are kept until all are
    done. times: where the seconds of each case go, for ``earlier``. say: hears what a user should know.
    Raises FleetError, ArgumentError, UnknownName, ResultError.
    """
    began = time.perf_counter()
    cluster.address(on)
    for op in ops or ():
        registry.primitive(op)
    for name in backends or ():
        registry.check_requested(name)
    require_lines(ops, backends)
    claim, spent = Claim.of(known), shards.measured(earlier)
    ask = {
        "ops": None if ops is None else list(ops),
        "backends": None if backends is None else list(backends),
        "dtypes": [str(d).removeprefix("torch.") for d in dtypes_of(dtypes)],
        "tier": tier,
        "seed": seed,
        "full": full,
        "device": claim.device,
    }
    with cluster.connected(on, workers) as ray:
        count = cluster.require(ray, claim)
        pool.agree(ray, claim)
        plan = pool.once(ray, claim, remote.plan, ask, known.name)
        sizes = _sizes(plan)
        record = Journal(journal, fingerprint([ask, known.name, remote.digest(), plan["groups"], plan["lines"]]))
        cells = _Cells(plan, record, progress)
        if record.other:
            say(
                f"{journal} is of another request or of other sources; it is kept as *.old.jsonl, and this "
                "run begins anew"
            )
        if cells.resumed:
            say(f"{cells.resumed} of {len(sizes)} groups of cells were done before; they stand in {journal}")
        cost = shards.costs({g: s for g, s in sizes.items() if g not in cells.done}, spent)
        waiting = {f"{i}": [_job(plan, groups), known.name] for i, groups in enumerate(shards.divided(cost, count))}
        try:
            pool.spread(ray, claim, remote.check, waiting, cells.take, cells.lost)
            facts = Environment.model_validate(plan["environment"])
            document = results(
                facts, ordered([*cells.cells(), *map(Cell.model_validate, plan["skipped"])], plan["tier"])
            )
            late = pool.once(
                ray, claim, remote.finish, document.model_dump(mode="json"), plan["lines"]["compiled"], ask["dtypes"]
            )
        except BaseException:
            record.close(done=False)
            raise
    if times is not None:
        times.parent.mkdir(parents=True, exist_ok=True)
        times.write_text(json.dumps(shards.document(cells.seconds), indent=1) + "\n", encoding="utf-8")
    record.close(done=True)
    return document.model_copy(
        update={
            "environment": facts.model_copy(update={"seconds": round(time.perf_counter() - began, 3)}),
            "timings": [Timing.model_validate(one) for one in late["timings"]],
            "numerics": [Finding.model_validate(one) for one in late["numerics"]],
        }
    )


def _sizes(plan: Mapping[str, Any]) -> dict[Group, float]:
    cases = {
        (op, case.name): case
        for ways in plan["lines"].values()
        for op in ways
        for case in tier_cases(registry.primitive(op), plan["tier"])
    }
    return {
        tuple(g): shards.sized(cases[g[1], g[3]], len(plan["lines"][g[0]][g[1]])) * (10 if g[0] == "interpreted" else 1)
        for g in plan["groups"]
    }


def _job(plan: Mapping[str, Any], groups: Sequence[Group]) -> dict[str, Any]:
    """The job of a shard: every implementation of its groups."""
    way = groups[0][0]
    menus = {op: plan["lines"][way][op] for op in dict.fromkeys(g[1] for g in groups)}
    return asdict(
        Job(
            menus,
            plan["dtypes"],
            plan["tier"],
            plan["seed"],
            plan["device"],
            interpret=way == "interpreted",
            only=[(g[1], g[2], g[3]) for g in groups],
        )
    )


class _Cells:
    """What came back, each cell once: from the journal first, then from workers."""

    def __init__(
        self, plan: Mapping[str, Any], journal: Journal, progress: Callable[[int, int, str], None] | None
    ) -> None:
        self._plan, self._journal, self._progress = plan, journal, progress
        self._cells: dict[_Key, Cell] = {}
        self._again: set[str] = set()  # cells whose process died once
        self.seconds: dict[tuple[str, str, str], float] = {}
        self.done: set[Group] = set()
        self._expected = {
            (op, line, dtype, case): (way, op, dtype, case)
            for way, op, dtype, case in map(tuple, plan["groups"])
            for line in plan["lines"][way][op]
        }
        for entry in journal.entries:
            self._keep(entry)
        counts: dict[Group, int] = {}
        for key, group in self._expected.items():
            counts[group] = counts.get(group, 0) + (key not in self._cells)
        self.done = {group for group, missing in counts.items() if not missing}
        # of a group that is not whole, all cells run again: its oracle is made anyway
        self._cells = {key: cell for key, cell in self._cells.items() if self._expected.get(key) in self.done}
        self.resumed = len(self.done)

    def cells(self) -> list[Cell]:
        return list(self._cells.values())

    def _keep(self, entry: Sequence[Sequence[Any]]) -> None:
        for text, seconds in entry:
            cell = Cell.model_validate_json(text)
            self._cells.setdefault((cell.op, cell.implementation, cell.dtype, cell.case), cell)
            if seconds is not None:
                key = cell.op, cell.dtype, cell.case
                self.seconds[key] = self.seconds.get(key, 0.0) + seconds

    def take(self, given: Sequence[Any], value: Mapping[str, Any]) -> dict[str, Sequence[Any]]:
        """A shard's cells. Those whose own process died run once more: something else may have killed it."""
        job, profile = given
        good: list[list[Any]] = []
        more: dict[str, Sequence[Any]] = {}
        for text, seconds in value["cells"]:
            cell = Cell.model_validate_json(text)
            key = cell.op, cell.implementation, cell.dtype, cell.case
            name = "|".join(key) if cell.case != ALL else json.dumps([cell.op, job["only"]])
            died = cell.verdict == "FAIL" and (cell.reason or "").startswith(DIED)
            if not died or name in self._again:
                good.append([text, seconds])
                continue
            self._again.add(name)
            if cell.case != ALL:
                lines, only = {cell.op: [cell.implementation]}, [(cell.op, cell.dtype, cell.case)]
            else:  # the process died before any of the op's cells
                lines, only = {cell.op: job["lines"][cell.op]}, [one for one in job["only"] if one[0] == cell.op]
            more[name] = [{**job, "lines": lines, "only": only}, profile]
        self._keep(good)
        if good:
            self._journal.add(good)
        self._tell(f"{value['host']}")
        return more

    def lost(self, given: Sequence[Any], why: str) -> None:
        """The cells of a shard at which workers died again and again."""
        job, _ = given
        for op, dtype, case in job["only"]:
            for name in job["lines"].get(op, ()):
                cell = Cell(
                    op=op,
                    implementation=name,
                    device=job["device"],
                    dtype=dtype,
                    case=case,
                    verdict="NOT_RUN",
                    reason=why,
                )
                self._cells.setdefault((op, name, dtype, case), cell)
        self._tell("lost")

    def _tell(self, label: str) -> None:
        if self._progress is not None:
            self._progress(len(self._cells), len(self._expected), label)
