"""`ferryman check`: is every implementation that can run here right, and is a ported model still the same model?"""

from __future__ import annotations

import os
import secrets
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from ferryman.cli import check_kernel, check_model, documents, output, report
from ferryman.cli import port as port_command
from ferryman.cli.place import place
from ferryman.device_profiles import profile as catalogued
from ferryman.device_profiles import resolve
from ferryman.dispatch import registry, use
from ferryman.errors import ArgumentError, BackendUnavailable, UnknownName
from ferryman.porting.ci import provenance
from ferryman.porting.fleet import check as fleet
from ferryman.porting.judging.results import Cell, Results, Row, Timing, dumps, failed, number
from ferryman.porting.kernel import check as kernels
from ferryman.porting.report import junit, markdown
from ferryman.porting.report.markdown import MEANING, duration, percent
from ferryman.porting.running import cells, runner, simulated, simulated_route, stand_in

DEFAULT_OUT = Path(".ferryman")
_SHORT = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
_MOST_FAILURES = 20
_RAN = {"PASS", "FAIL", "SIMULATED", "MISTRUSTED"}


def check(
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    backend: Annotated[
        list[str] | None,
        typer.Option(help="Only this backend; with --model, the allow-list; simulated: see --device. Repeatable."),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(
            help="cuda:1, cpu; default: the accelerator, else the CPU. With --backend simulated: mi300x, mi355x."
        ),
    ] = None,
    stands_in_for: Annotated[
        str | None,
        typer.Option(
            "--as",
            help="An older NVIDIA device (a100, orin-agx, l4) that --device stands in for: it executes the PTX of that "
            "one's Triton kernels. SIMULATED at best.",
        ),
    ] = None,
    dtype: Annotated[list[str] | None, typer.Option(help="f32, f16 or bf16. Repeatable; --model takes one.")] = None,
    model: Annotated[
        str | None, typer.Option(help="Check a ported model instead: qwen3, llama, .., or a local config.json.")
    ] = None,
    tiny: Annotated[bool, typer.Option("--tiny", help="With --model: smaller widths, real head_dim.")] = False,
    layers: Annotated[int, typer.Option(help="With --model: decoder layers to build.")] = 4,
    kernel: Annotated[
        str | None, typer.Option(help="Check this function as one of --op: module:function or file.py:function.")
    ] = None,
    accumulation: Annotated[
        str | None, typer.Option(help="With --kernel: its accumulation class; default fp32.")
    ] = None,
    rounding: Annotated[
        list[str] | None, typer.Option(help="With --kernel: a rounding of the op's that it uses. Repeatable.")
    ] = None,
    not_deterministic: Annotated[
        bool, typer.Option("--not-deterministic", help="With --kernel: its runs need not be bitwise equal.")
    ] = False,
    timeout: Annotated[float | None, typer.Option(help="With --kernel: seconds for one case; default 60.")] = None,
    tier: Annotated[
        str | None, typer.Option(help="small or standard (real sizes); default: standard on an accelerator.")
    ] = None,
    full: Annotated[bool, typer.Option("--full", help="Interpreted Triton: each case in every dtype.")] = False,
    turn: Annotated[
        str | None,
        typer.Option(metavar="K/N", help="The K-th (from 0) of N turns: a case has one dtype in each, at most."),
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(help="Seed of the inputs; default: 0; with --kernel a fresh one, which is printed."),
    ] = None,
    assume: Annotated[
        list[str] | None,
        typer.Option(help="With --backend simulated: undocumented arithmetic, as mfma_order=sequential. Repeatable."),
    ] = None,
    jobs: Annotated[
        int | None,
        typer.Option(min=1, help="Processes that share the cells; default: up to 8 (CPU: for interpreted Triton)."),
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(
            help="Share the cells over a Ray cluster: ray (--jobs workers on this machine), or ray@HOST:PORT. --device "
            "may name a profile then, which nodes declare (docs/fleet.md)."
        ),
    ] = None,
    costs: Annotated[
        list[Path] | None,
        typer.Option(help="With --on: an earlier document, or a fleet's times, by which cells are shared. Repeatable."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help=f"Where JSON, JUnit, Markdown and HTML go; {DEFAULT_OUT}, or none with --json.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result document as JSON.")] = False,
) -> None:
    """Run every implementation that can run here against the float64 meaning of its op, on every case.

    Ratios are the worst error in units of its derived bound: at most 1 is right. Exits with 1 if anything is wrong, or
    if nothing ran at all. Interrupted, it writes what it has, and exits with 130.
    """
    interrupted = False
    if seed is None:
        # a kernel that is tuned to pass one drawing of the inputs does not pass the next
        seed = 0 if kernel is None else secrets.randbelow(2**31)
    simulates = simulated_route.NAME in (backend or ())
    beside = {"--model": model, "--kernel": kernel, "--as": stands_in_for, "--backend simulated": simulates}
    if turn is not None:
        _alone("--turn", {**beside, "--on": on, "--full": full})
    if on is not None:
        _alone("--on", beside)
    elif costs:
        raise ArgumentError("check", "--costs", "given", "--on beside it")
    where = "cpu" if simulates or on is not None else place(device, "check")
    folder = out if out is not None or as_json else DEFAULT_OUT
    if kernel is None:
        facts = {"--accumulation": accumulation, "--rounding": rounding, "--timeout": timeout}
        for option, value in {**facts, "--not-deterministic": not_deterministic}.items():
            if value:
                raise ArgumentError("check", option, "given", "--kernel beside it")
    if simulates and stands_in_for is not None:
        raise ArgumentError("check", "--as", stands_in_for, "no --backend simulated beside it")
    for routed, route in ((simulates, "--backend simulated"), (stands_in_for is not None, "--as")):
        if routed:
            _alone(route, {"--model": model, "--kernel": kernel, "--full": full, "--tiny": tiny})
    if assume and not simulates:
        raise ArgumentError("check", "--assume", "given", "--backend simulated beside it")
    if model is not None:
        rejected = {"--op": op, "--tier": tier, "--kernel": kernel}
        _model(model, where, backend, dtype, tiny, layers, seed, folder, as_json, rejected=rejected)
        return
    if tiny:
        raise ArgumentError("check", "--tiny", "given", "--model beside it")
    if kernel is not None:
        declared = kernels.Declaration(accumulation or "fp32", tuple(rounding or ()), not not_deterministic)
        limit = kernels.TIMEOUT_SECONDS if timeout is None else timeout
        sys.stderr.write(f"ferryman: seed {seed}; --seed {seed} draws these inputs again\n")
        document = check_kernel.run(
            kernel, op, declared, where, dtype, tier, seed, limit, rejected={"--backend": backend, "--full": full}
        )
    elif on is not None:
        with output.progress("checking") as advance:
            document = fleet.run(
                on,
                resolve(device),
                op,
                backend,
                dtype,
                tier,
                seed,
                full,
                jobs or os.cpu_count() or 1,
                costs or (),
                None if folder is None else folder / "fleet-check.jsonl",
                None if folder is None else folder / "fleet-check-times.json",
                advance,
                _tell,
            )
    elif simulates:
        others = [b for b in backend or () if b != simulated_route.NAME] or None
        assumed = simulated_route.assumptions_of(assume or ())
        with output.progress("simulating") as advance:
            document = simulated.run(resolve(device or "mi300x"), op, others, dtype, tier, seed, advance, jobs, assumed)
    elif stands_in_for is not None:
        with output.progress("checking") as advance:
            document = stand_in.run(
                catalogued(stands_in_for), op, backend, where, dtype, tier, seed, progress=advance, jobs=jobs
            )
    else:
        try:
            with output.progress("checking") as advance:
                document = runner.run(
                    ops=op,
                    backends=backend,
                    device=where,
                    dtypes=dtype,
                    tier=tier,
                    seed=seed,
                    progress=advance,
                    full=full,
                    jobs=jobs or runner.default_jobs(where),
                    interpreted_jobs=jobs,
                    turn=None if turn is None else cells.turn_of(turn),
                )
        except runner.Interrupted as stopped:
            document, interrupted = stopped.document, True
    document = provenance.stamped(document)
    if as_json:
        output.say(dumps(document))
    else:
        _print(document)
    if folder is not None:
        route = "-simulated" if simulates else "" if stands_in_for is None else f"-as-{document.environment.profile}"
        stem = f"check{route}" if kernel is None else f"kernel-{document.summary[0].op}"
        _write(
            folder, stem, dumps(document), markdown(document), lambda: junit(document), lambda: report.page(document)
        )
    if interrupted:
        left = sum(cell.reason == runner.INTERRUPTED for cell in document.cells)
        sys.stderr.write(f"ferryman: interrupted; {left} rows have cases that did not run\n")
        raise typer.Exit(130)
    if failed(document):
        raise typer.Exit(1)
    if not any(cell.verdict in _RAN for cell in document.cells):
        sys.stderr.write("ferryman: nothing ran, so nothing is shown to be right\n")
        raise typer.Exit(1)


def _alone(option: str, others: dict[str, Any]) -> None:
    """Refuse what cannot be beside an option."""
    for other, value in others.items():
        if value:
            raise ArgumentError("check", other, "given", f"no {option} beside it")


def _tell(text: str) -> None:
    sys.stderr.write(f"ferryman: {text}\n")


def _model(
    name: str,
    place: str,
    backends: Sequence[str] | None,
    dtypes: Sequence[str] | None,
    tiny: bool,
    layers: int,
    seed: int,
    folder: Path | None,
    as_json: bool,
    rejected: dict[str, Any],
) -> None:
    _alone("--model", rejected)
    if dtypes and len(dtypes) > 1:
        raise ArgumentError("check", "--dtype", ", ".join(dtypes), "one dtype with --model")
    for backend in backends or ():
        registry.check_requested(backend)
    (dtype,) = cells.dtypes_of(dtypes or ["bfloat16"])
    if _bundled(name):
        with use(*backends) if backends else nullcontext():
            port_command.run(name, place, None, dtype, tiny, layers, folder, as_json, stem=f"model-{name}")
        return
    with (
        _transformers() as (run, porter),
        use(*backends) if backends else nullcontext(),
        output.progress("checking") as advance,
    ):
        stages = {stage: i for i, stage in enumerate(run.STAGES)}
        result = run.check_model(
            name,
            porter=porter,
            device=place,
            dtype=dtype,
            tiny=tiny,
            layers=layers,
            seed=seed,
            progress=lambda stage: advance(stages.get(stage, 0), len(stages), stage),
        )
    text = result.model_dump_json(indent=1)
    if as_json:
        output.say(text)
    else:
        check_model.show(result)
    if folder is not None:
        stem = f"model-{result.family}-{_SHORT[result.dtype]}"
        _write(
            folder,
            stem,
            text,
            check_model.markdown(result),
            lambda: check_model.junit(result),
            lambda: check_model.html(result),
        )
    if result.verdict == "FAIL":
        raise typer.Exit(1)


def _bundled(name: str) -> bool:
    """Whether it is a family that `ferryman port` knows by name, and no preset. Raises UnknownName."""
    from ferryman.porting.model.config import PRESETS
    from ferryman.porting.model.families import FAMILIES

    if name not in {**PRESETS, **FAMILIES} and not (os.sep in name or name.endswith(".json") or Path(name).exists()):
        raise UnknownName("model", name, sorted({**PRESETS, **FAMILIES}))
    return name in FAMILIES and name not in PRESETS


@contextmanager
def _transformers() -> Iterator[tuple[Any, Any]]:
    """(the model check, the porter). The integration is handed in from here: porting knows none."""
    try:
        from ferryman.integrations import transformers as porter
        from ferryman.porting.model import check as model
    except ImportError as error:
        raise BackendUnavailable(f"--model needs transformers ({error}); pip install 'ferryman[models]'") from error
    yield model, porter


def _print(document: Results) -> None:
    facts = document.environment
    output.say(
        f"{facts.device_name or facts.device} ({facts.profile}, {facts.arch}), torch {facts.versions['torch']}: "
        f"{len(document.cells)} cells in {facts.seconds:.0f} s, tier {facts.tier}, seed {facts.seed}"
    )
    assumed = {n.removeprefix("simulator."): v for n, v in facts.flags.items() if n.startswith("simulator.")}
    if assumed:
        output.say(f"assumed: {', '.join(f'{name} {value}' for name, value in assumed.items())}")
    dtypes = [d for d in _SHORT if any(d in row.ratio for row in document.summary)]
    ratios = [f"{_SHORT[d]} error" for d in dtypes]
    headers = ["op", "implementation", "verdict", "cells", "refused", *ratios, "time", "of roofline"]
    rows = [
        [
            row.op,
            row.implementation,
            row.verdict,
            _counts(row),
            str(row.refusals or "-"),
            *(number(row.ratio.get(d)) for d in dtypes),
            *_time(document.timings, row),
        ]
        for row in document.summary
    ]
    # a column that says nothing here (no roofline on a CPU, nothing refused) only takes the width of the others
    shown = [i for i, _ in enumerate(headers) if any(row[i] != "-" for row in rows)]
    headers, rows = [headers[i] for i in shown], [[row[i] for i in shown] for row in rows]
    output.table(headers, rows, right=("refused", *ratios, "of roofline"))
    output.say()
    output.say("error: the worst one in units of its derived bound; at most 1 is right")
    seen = {cell.verdict for cell in document.cells}
    for verdict in MEANING:
        if verdict in seen:
            output.say(f"{verdict}: {MEANING[verdict]}")
    _reasons(document.cells)
    for finding in document.numerics:
        if finding.outcome == "contradicted":
            said = f"the profile states {finding.stated}, measured {finding.measured}"
            output.say(f"CONTRADICTED {finding.path}: {said} ({finding.reason}); see ferryman fingerprint")
    confirmed = sum(finding.outcome == "confirmed" for finding in document.numerics)
    if document.numerics:
        output.say(f"numeric facts of the profile: {confirmed} of {len(document.numerics)} confirmed on this device")


def _counts(row: Row) -> str:
    return " ".join(f"{n} {verdict}" for verdict, n in row.counts.items())


def _time(timings: Sequence[Timing], row: Row) -> tuple[str, str]:
    """Time and share of the roofline in the narrowest dtype that was timed: what models run in."""
    mine = {t.dtype: t for t in timings if (t.op, t.implementation) == (row.op, row.implementation)}
    shown = next((mine[d] for d in ("bfloat16", "float16", "float32") if d in mine), None)
    return duration(shown), percent(shown)


def _reasons(cells: Sequence[Cell]) -> None:
    """What is wrong, cell by cell; what did not run, by reason."""
    wrong = [c for c in cells if c.verdict in ("FAIL", "MISTRUSTED", "QUARANTINED")]
    for cell in wrong[:_MOST_FAILURES]:
        output.say(f"{cell.verdict} {cell.op} {cell.implementation} {cell.dtype} {cell.case}: {cell.reason}")
    if len(wrong) > _MOST_FAILURES:
        output.say(f"and {len(wrong) - _MOST_FAILURES} more; the JSON document has them all")
    absent: Counter[tuple[str, str, str]] = Counter()
    for cell in cells:
        # what an implementation of the menu refuses, its conditions say (docs/ops.md)
        if cell.verdict == "NOT_RUN" or (cell.verdict == "UNIMPLEMENTED" and cell.implementation.startswith("user:")):
            absent[cell.verdict, cell.implementation, cell.reason or "no reason given"] += 1
    for (verdict, implementation, reason), n in absent.items():
        output.say(f"{verdict} {implementation}, {n} cells: {reason}")


def _write(folder: Path, stem: str, document: str, page: str, xml: Any, html: Any) -> None:
    """The document and its renderings, each whole or not at all; what pictures must not delay comes first."""
    wrote = []

    def write(suffix: str, text: str) -> None:
        path = folder / f"{stem}.{suffix}"
        documents.write(path, text)
        wrote.append(str(path))

    write("json", document)
    write("md", page)
    for suffix, render in (("xml", xml), ("html", html)):
        try:
            write(suffix, render())
        except BackendUnavailable as error:
            sys.stderr.write(f"ferryman: no {stem}.{suffix}: {error}\n")
    sys.stderr.write(f"wrote {', '.join(wrote)}\n")
