"""What a benchmark and a tuning run on a node: functions of plain values, which Ray finds there by their names."""

from __future__ import annotations

import os
import socket
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ferryman.device_profiles import Profile
from ferryman.dispatch import cost, lockfile_document, select
from ferryman.dispatch.lockfile_entry import Entry
from ferryman.errors import FerrymanError, LockfileError
from ferryman.porting.bench import ceilings, grid, runner
from ferryman.porting.bench.document import Benchmark, Ceilings
from ferryman.porting.fleet.remote import claimed
from ferryman.porting.inputs.fills import DTYPES
from ferryman.porting.judging import results
from ferryman.porting.running.process import quiet
from ferryman.porting.tune import tuner

_CELL_SECONDS, _BYTES_PER_SECOND = 2.0, 1e9  # of a cell however small it is; what its calls move, all together


def plan(ask: dict[str, Any], profile_name: str) -> dict[str, Any]:
    """The cells of the request, [op, case, seconds that it may take], and this device's ceilings."""
    place, profile = claimed(ask["device"], profile_name)
    if ask.get("lockfile") is not None:
        _require_of_here(ask["lockfile"], ask["path"], profile)
    kind = DTYPES[ask["dtype"]]
    pairs = runner.cells_of(ask["ops"], ask["grid"], place)
    if "seed" in ask:  # a benchmark
        runner.require_served(runner.Plan(place, profile, kind, pairs, tuple(ask["implementations"] or ()), (), 0))
    else:
        tried = {op.name for op, _ in pairs if tuner.candidates_of(op, profile, ask["implementations"])}
        pairs = tuple(pair for pair in pairs if pair[0].name in tried)
        if not pairs:
            raise FerrymanError("nothing to tune: none of the ops has a case and a candidate on the workers' device")
    cells = []
    for op, case in pairs:
        work = cost.work_of(op, grid.on_meta(op, case, kind))
        cells.append([op.name, case.name, _CELL_SECONDS + work.bytes / _BYTES_PER_SECOND])
    with quiet():
        limits = ceilings.measure(place, kind) if "seed" in ask else None
    return {"cells": cells, "ceilings": None if limits is None else limits.model_dump(mode="json")}


def _require_of_here(text: str, name: str, profile: Profile) -> None:
    """Raises LockfileError, of the file's own name, where it is damaged or of another device."""
    with tempfile.TemporaryDirectory(prefix="ferryman-") as folder:
        path = Path(folder) / "lock.json"
        path.write_text(text, encoding="utf-8")
        try:
            lockfile_document.load_here(path, profile)
        except LockfileError as error:
            raise LockfileError(str(error).replace(str(path), name)) from None


def bench(ask: dict[str, Any], pairs: Sequence[Sequence[str]], limits: Any, profile_name: str) -> dict[str, Any]:
    """The benchmark of some cells."""
    place, _ = claimed(ask["device"], profile_name)
    benchmark = runner.run(
        ops=list(dict.fromkeys(op for op, _ in pairs)),
        implementations=ask["implementations"],
        grid_name=ask["grid"],
        device=place,
        dtype=DTYPES[ask["dtype"]],
        seed=ask["seed"],
        only=frozenset((op, case) for op, case in pairs),
        limits=Ceilings.model_validate(limits),
    )
    return {"document": benchmark.model_dump(mode="json"), "host": socket.gethostname(), "pid": os.getpid()}


def tune(ask: dict[str, Any], pairs: Sequence[Sequence[str]], limits: Any, profile_name: str) -> dict[str, Any]:
    """The tuning of some cells: what became of each, and the entries that were measured."""
    place, _ = claimed(ask["device"], profile_name)
    with tempfile.TemporaryDirectory(prefix="ferryman-") as folder:
        path = Path(folder) / "lock.json"
        if ask["lockfile"] is not None:
            path.write_text(ask["lockfile"], encoding="utf-8")
        outcomes = tuner.tune(
            path,
            list(dict.fromkeys(op for op, _ in pairs)),
            ask["implementations"],
            ask["grid"],
            place,
            DTYPES[ask["dtype"]],
            again=ask["again"],
            silence=ask["silence"],
            only=frozenset((op, case) for op, case in pairs),
        )
        written = lockfile_document.load(path).choices if path.exists() else {}
    fresh = {(one.op, one.case) for one in outcomes if one.result == "written"}
    dtype = ask["dtype"]
    entries = [
        [op, region, entry.model_dump(mode="json")]
        for op, regions in written.items()
        for region, entry in regions.items()
        if any(entry.case == f"{case} {dtype}" for name, case in fresh if name == op)
    ]
    rows = [
        {**asdict(one), "entry": None if one.entry is None else one.entry.model_dump(mode="json")} for one in outcomes
    ]
    return {"outcomes": rows, "entries": entries, "host": socket.gethostname(), "pid": os.getpid()}


def merge(ask: dict[str, Any], lockfile: str | None, entries: Sequence[Any], profile_name: str) -> str | None:
    """``lockfile``, the text of one if there is one, with what workers measured; None where there is nothing at all."""
    place, _ = claimed(ask["device"], profile_name)
    profile = select.profile_for(place)
    with tempfile.TemporaryDirectory(prefix="ferryman-") as folder:
        path = Path(folder) / "lock.json"
        if lockfile is not None:
            _require_of_here(lockfile, ask["path"], profile)
            path.write_text(lockfile, encoding="utf-8")
        for op, region, entry in entries:
            lockfile_document.record(path, profile, {op: {region: Entry.model_validate(entry)}})
        return path.read_text("utf-8") if path.exists() else None


def lost(
    what: str, ask: dict[str, Any], pairs: Sequence[Sequence[str]], limits: Any, profile_name: str, why: str
) -> dict[str, Any]:
    """What stands for cells at which workers died again and again."""
    if what == tune.__name__:
        outcomes = [{"op": op, "case": case, "result": f"not measured: {why}", "entry": None} for op, case in pairs]
        return {"outcomes": outcomes, "entries": []}
    place, profile = claimed(ask["device"], profile_name)
    wanted = {(op, case) for op, case in pairs}
    cells = runner.cells_of(ask["ops"], ask["grid"], place, wanted)
    given = tuple(ask["implementations"] or ())
    bench_plan = runner.Plan(place, profile, DTYPES[ask["dtype"]], cells, given, (), ask["seed"])
    document = Benchmark(
        environment=results.environment(place, profile, ask["seed"], ask["grid"], 0.0),
        ceilings=Ceilings.model_validate(limits),
        cells=[runner.not_timed(bench_plan, op, case, why) for op, case in cells],
    )
    return {"document": document.model_dump(mode="json")}
