"""`ferryman tune`: which implementation is fastest in each shape region, and what a lockfile no longer matches."""

from __future__ import annotations

import functools
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ferryman import settings
from ferryman.cli import calls, output
from ferryman.cli.place import place
from ferryman.device_profiles import Profile, resolve
from ferryman.dispatch import lockfile, registry, select
from ferryman.errors import ArgumentError
from ferryman.porting import tune as tuning
from ferryman.porting.bench import condition
from ferryman.porting.bench.grid import cases, grid_of, on_meta
from ferryman.porting.fleet import timed as fleet
from ferryman.porting.running.process import placed
from ferryman.porting.tune.tuner import QUICK_SECONDS, SILENCE_SECONDS, known_implementations
from ferryman.porting.tune.worker import candidates

FOLDER = Path(".ferryman")


def tune(
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="Only this implementation, or those of this backend. Repeatable.")
    ] = None,
    grid: Annotated[
        str, typer.Option(help="small or full: the shapes that are measured, as in ferryman bench.")
    ] = "small",
    device: Annotated[str | None, typer.Option(help="cuda:1, cpu; default: the accelerator, else the CPU.")] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="f32, f16 or bf16 (default). Repeatable.")] = None,
    lock: Annotated[
        Path | None,
        typer.Option(
            "--lockfile",
            help="The file; default: the setting, else .ferryman/PROFILE.lock.json, which --check replaces by the one "
            "that comes with the package where there is none.",
        ),
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Measure also what the lockfile holds already.")] = False,
    quick: Annotated[
        bool,
        typer.Option(
            "--quick",
            help="Three minutes at most: the largest shapes of each op first; what dispatch takes untuned stays the "
            "choice unless something is faster by more than the noise.",
        ),
    ] = False,
    timeout: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="Seconds without a sign of life after which a candidate is left out."),
    ] = SILENCE_SECONDS,
    check: Annotated[
        bool,
        typer.Option("--check", help="Measure nothing: what of the lockfile holds here, and what of --grid it covers."),
    ] = False,
    predict: Annotated[
        bool,
        typer.Option(
            "--predict",
            help="Measure nothing: the candidates in the order in which they would be measured, and the times that the "
            "cost model predicts. --device may name a profile then (h200).",
        ),
    ] = False,
    on: Annotated[
        str | None,
        typer.Option(help="Share the cells over a Ray cluster: ray (--jobs workers of this machine), or ray@HOST:PORT"),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="With --on ray: its workers; default: the cores.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was found as JSON: outcomes, what holds, or predictions.")
    ] = False,
) -> None:
    """Write the fastest implementation of each shape region into a lockfile; the setting `lockfile` puts it in force.

    It can be stopped and started again, and several may work on one file. A candidate that fails, hangs or crashes is
    recorded and left out. Exits with 1 if --check finds no entry, or one that does not hold, or if a cell could not be
    written.
    """
    if on is None and jobs is not None:
        raise ArgumentError("tune", "--jobs", jobs, "--on beside it")
    if predict:
        _alone("--predict", {"--check": check, "--again": again, "--quick": quick, "--lockfile": lock, "--on": on})
        _predict(resolve(device), op, implementation, grid, dtype or ["bf16"], as_json)
        return
    if on is not None:
        _alone("--on", {"--check": check, "--quick": quick})
    where = None if on is not None else place(device, "tune")
    profile = resolve(device) if where is None else select.profile_for(placed(where))
    named = settings.get("lockfile")
    path = lock or (None if named == settings.NO_LOCKFILE else named)
    if path is None:  # what comes with the package is read, never written
        path = FOLDER / f"{profile.name}.lock.json"
        path = (lockfile.shipped(profile) if check and not path.exists() else None) or path
    if check:
        _alone("--check", {"--op": op, "--implementation": implementation, "--again": again, "--quick": quick})
        _check(path, profile, placed(where), grid, dtype or ["bf16"], as_json)
        return
    if implementation and len(implementation) == 1:
        alone = f"{implementation[0]} alone is measured: dispatch obeys regions that nothing else was compared with"
        typer.echo(alone, err=as_json)
    if where is not None and (why := condition.watch(placed(where)).unknown):
        typer.echo(f"throttling is not looked for: {why}", err=as_json)
    outcomes: dict[str, list[tuning.Outcome]] = {}
    kinds = {name: calls.dtype_of(name) for name in dtype or ["bf16"]}
    seconds = QUICK_SECONDS / len(kinds) if quick else None
    for name, kind in kinds.items():
        with output.progress(f"tuning {name}") as advance:
            if on is not None:
                outcomes[name] = fleet.tune(
                    on,
                    profile,
                    path,
                    op,
                    implementation,
                    grid,
                    kind,
                    again,
                    timeout,
                    jobs or os.cpu_count() or 1,
                    journal=path.with_suffix(f".{name}.fleet.jsonl"),
                    progress=advance,
                    say=functools.partial(typer.echo, err=True),
                )
            else:
                outcomes[name] = tuning.tune(
                    path,
                    op,
                    implementation,
                    grid,
                    where,
                    kind,
                    again=again,
                    silence=timeout,
                    advance=advance,
                    quick=seconds,
                )
        if not as_json:
            _print(outcomes[name], name)
    lockfile.forget()
    wrote = any(one.entry is not None for of_dtype in outcomes.values() for one in of_dtype)
    if as_json:
        output.json_document({"lockfile": str(path) if wrote else None, "outcomes": _facts(outcomes)})
    elif wrote:
        output.say(f"{path}: set FERRYMAN_LOCKFILE to it, or [tool.ferryman] lockfile")
    else:
        output.say("no lockfile was written: no cell gave an entry")
    if any(one.entry is None and not one.left for of_dtype in outcomes.values() for one in of_dtype):
        raise typer.Exit(1)


def _alone(option: str, others: dict[str, Any]) -> None:
    """Raises ArgumentError for an option that says nothing beside this one."""
    for other, given in others.items():
        if given:
            raise ArgumentError("tune", other, "given", f"no {option} beside it")


def _facts(outcomes: dict[str, list[tuning.Outcome]]) -> list[dict[str, Any]]:
    return [
        {
            "op": one.op,
            "case": one.case,
            "dtype": dtype,
            "result": one.result,
            "left": one.left,
            "entry": None if one.entry is None else one.entry.model_dump(mode="json"),
        }
        for dtype, of_dtype in outcomes.items()
        for one in of_dtype
    ]


def _print(outcomes: list[tuning.Outcome], dtype: str) -> None:
    rows = []
    for one in outcomes:
        entry = one.entry
        others = (
            ""
            if entry is None
            else ", ".join(
                f"{c.label} {'not timed' if c.seconds is None else f'{c.seconds * 1e6:.1f}'}"
                for c in entry.candidates
                if c.label != entry.label
            )
        )
        chosen = ("", "") if entry is None else (entry.label, f"{entry.seconds * 1e6:.1f}")
        rows.append((one.op, one.case, dtype, *chosen, others, one.result))
    output.table(("op", "case", "dtype", "choice", "us", "others, us", ""), rows, right=("us",))
    for one in outcomes:
        for tried in one.entry.candidates if one.entry is not None else ():
            if tried.failed:
                output.say(f"{one.op} {one.case}: {tried.label} failed: {tried.error}; --again tries it once more")


def _predict(
    profile: Profile,
    ops: list[str] | None,
    implementations: list[str] | None,
    grid: str,
    dtypes: list[str],
    as_json: bool,
) -> None:
    known_implementations(implementations)
    size, kind = grid_of(grid), torch.device("cpu" if profile.vendor == "cpu" else "cuda")
    rows: list[tuple[Any, ...]] = []
    for name in dtypes:
        for op in [registry.primitive(name) for name in ops] if ops else registry.primitives().values():
            for case in cases(op, size, kind):
                args = on_meta(op, case, calls.dtype_of(name))
                for number, one in enumerate(candidates(op, args, profile, implementations), 1):
                    way = one.implementation, one.configuration, one.seconds
                    rows.append((op.name, case.name, name, number, *way))
    heads = ("op", "case", "dtype", "rank", "implementation", "configuration")
    if as_json:
        output.json_document([dict(zip((*heads, "seconds"), row, strict=True)) for row in rows])
        return
    texts = [(*row, "" if seconds is None else f"{seconds * 1e6:.1f}") for *row, seconds in rows]
    output.table((*heads, "us, predicted"), texts, right=("rank", "us, predicted"))


def _check(path: Path, profile: Profile, device: torch.device, grid: str, dtypes: list[str], as_json: bool) -> None:
    validity = tuning.check(path, profile)
    holding = 0 if validity.differing else validity.entries - len(validity.stale)
    size = grid_of(grid)
    shapes = [
        (op, on_meta(op, case, calls.dtype_of(name)))
        for name in dtypes
        for op in registry.primitives().values()
        for case in cases(op, size, device)
    ]
    known = [one for one in tuning.covered(path, profile, shapes) if one.measured or one.predicted]
    if as_json:
        output.json_document(
            {
                "lockfile": str(path),
                "holds": validity.holds,
                "entries": validity.entries,
                "holding": holding,
                "differing": validity.differing,
                "stale": [dict(zip(("op", "region", "reason"), one, strict=True)) for one in validity.stale],
                "failed": [
                    dict(zip(("op", "case", "candidate", "error"), one, strict=True)) for one in validity.failed
                ],
                "grid": grid,
                "covered": [asdict(one) for one in known],
            }
        )
    else:
        _print_validity(path, validity, holding, grid, known)
    if not validity.holds:
        raise typer.Exit(1)


def _print_validity(
    path: Path, validity: tuning.Validity, holding: int, grid: str, known: list[tuning.Covered]
) -> None:
    for fact in validity.differing:
        output.say(f"ignored as a whole: {fact}")
    if validity.stale:
        output.table(("op", "region", "ignored because"), validity.stale)
    if validity.failed:
        output.table(
            ("op", "case", "candidate", "failed when it was measured (--again tries it once more)"), validity.failed
        )
    if known:
        rows = [(one.op, str(one.measured), str(one.predicted), str(one.neither)) for one in known]
        heads = (f"op, on the {grid} grid", "measured", "predicted from regions near", "neither")
        output.table(heads, rows, right=heads[1:])
    wanted = "" if validity.entries else "; required: one or more (ferryman tune writes them)"
    output.say(f"{path}: {holding} of {validity.entries} entries hold here{wanted}")
