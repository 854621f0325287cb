"""`ferryman bench`: how fast every implementation is, against the device's own limits and other libraries."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli import calls, documents, output
from ferryman.cli.place import place
from ferryman.device_profiles import resolve
from ferryman.dispatch import select
from ferryman.errors import ArgumentError
from ferryman.porting import bench as benchmark
from ferryman.porting.bench import peers as adapters
from ferryman.porting.bench.compare import Change, regressed, require_same
from ferryman.porting.fleet import timed as fleet
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging import results
from ferryman.porting.report import bench as report
from ferryman.porting.report import plots
from ferryman.porting.running.process import placed

_RIGHT = tuple(c for c in report.columns() if c.startswith(("us", "of")) or c in ("spread", "GB/s", "TFLOP/s"))


def bench(
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    implementation: Annotated[
        list[str] | None, typer.Option(help="Only this implementation, or those of this backend. Repeatable.")
    ] = None,
    peers: Annotated[
        str, typer.Option(help="Other libraries to time beside ours: none, all, or names separated by commas.")
    ] = "none",
    peers_from: Annotated[
        Path, typer.Option(help="The folder of their adapters, in a checkout or the sdist.")
    ] = adapters.DEFAULT,
    grid: Annotated[
        str, typer.Option(help="small: two shapes or so an op; full: those of the speed targets.")
    ] = "small",
    device: Annotated[str | None, typer.Option(help="cuda:1, cpu; default: the accelerator, else the CPU.")] = None,
    dtype: Annotated[str, typer.Option(help="f32, f16 or bf16.")] = "bf16",
    seed: Annotated[int, typer.Option(help="Seed of the inputs.")] = 0,
    out: Annotated[
        Path | None, typer.Option(help="Write the JSON document to this file; Markdown and plots (SVG) go beside it.")
    ] = None,
    compare: Annotated[
        Path | None, typer.Option(help="An earlier document of this device: what became slower, timed twice?")
    ] = None,
    on: Annotated[
        str | None,
        typer.Option(help="Share the cells over a Ray cluster: ray (--jobs workers of this machine), or ray@HOST:PORT"),
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="With --on ray: its workers; default: the cores.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
) -> None:
    """Time implementations on inputs that no cache holds, in turns, over three trials.

    A copy and a product are timed in the same run. Times that a throttled device gave are reported as such. Exits with
    1 if --compare finds something slower than both runs' noise explains, twice, or one of our implementations that is
    no longer timed. A run that is stopped leaves the cells so far in --out, marked as partial.
    """
    if on is None and jobs is not None:
        raise ArgumentError("bench", "--jobs", jobs, "--on beside it")
    for option, given in {"--peers": peers != "none", "--compare": compare is not None}.items():
        if on is not None and given:
            raise ArgumentError("bench", option, "given", "no --on beside it: it needs this machine's own run")
    before = benchmark.load(compare) if compare is not None else None
    if on is not None:
        if out is not None:
            _require_out(out)
        with output.progress("timing") as advance:
            journal = None if out is None else out.with_suffix(".fleet.jsonl")
            document = fleet.bench(
                on,
                resolve(device),
                op,
                implementation,
                grid,
                calls.dtype_of(dtype),
                seed,
                jobs or os.cpu_count() or 1,
                (),
                journal,
                advance,
                _tell_beside,
            )
        _show(document, as_json)
        if out is not None:
            _write(out, document)
        return
    where, kind, names = place(device, "bench"), calls.dtype_of(dtype), _peer_names(peers)
    if out is not None:
        _require_out(out)
        if compare is not None and _writes(out, compare.resolve()):
            required = "another file than --compare, which neither it nor the Markdown and plots beside it replace"
            raise ArgumentError("bench", "--out", out, required)
        if (table := out.with_suffix(".md")).exists() and not out.exists():
            raise ArgumentError("bench", "--out", out, f"another name: {table} is there without it, so not its table")
    if before is not None:
        here = placed(where)
        cells = {(one.name, case.name, dtype_name(kind)) for one, case in benchmark.cells_of(op, grid, here)}
        require_same(before, results.environment(here, select.profile_for(here), seed, grid), cells)

    def kept(partial: benchmark.Benchmark) -> None:
        assert out is not None
        _write_documents(out, partial)

    def ignored(partial: benchmark.Benchmark) -> None:
        """Without --out nothing is kept of a run that is stopped."""

    def timed(only: frozenset[tuple[str, str]] | None) -> benchmark.Benchmark:
        with output.progress("timing" if only is None else "timing again") as advance:
            return benchmark.run(
                ops=op,
                implementations=implementation,
                grid_name=grid,
                device=where,
                dtype=kind,
                peer_names=names,
                peers_from=peers_from,
                seed=seed,
                only=only,
                advance=advance,
                finished=kept if only is None and out is not None else ignored,
            )

    document = timed(None)
    _show(document, as_json)  # before writing, which may fail
    if out is not None:
        _write(out, document)  # before comparing, which may refuse
    if before is None:
        return
    changes = benchmark.compare(before, document, timed, implementation or ())
    if out is not None:
        documents.write(out.with_suffix(".md"), report.markdown(document, changes))
    _print_changes(changes, compare, err=as_json)
    if regressed(changes):
        raise typer.Exit(1)


def _peer_names(text: str) -> Sequence[str] | None:
    """None for all; raises ArgumentError for an empty name."""
    if text in ("none", "all"):
        return () if text == "none" else None
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ArgumentError("bench", "--peers", repr(text), "none, all, or names separated by commas")
    return names


def _require_out(path: Path) -> None:
    """Raises ArgumentError for the name of a file that goes beside it, FerrymanError where nothing can be written."""
    if not path.name:
        raise ArgumentError("bench", "--out", repr(str(path)), "a file's name")
    if path.suffix.lower() in (".md", ".svg"):
        required = f"the JSON document's name, such as {path.with_suffix('.json')}; Markdown and plots go beside it"
        raise ArgumentError("bench", "--out", path, required)
    for written in (path, path.with_suffix(".md")):
        documents.require_writable(written)


def _writes(path: Path, other: Path) -> bool:
    """Whether `_write` replaces another file."""
    plot = other.suffix == ".svg" and other.name.startswith(f"{path.stem}-") and other.parent == path.parent.resolve()
    return plot or other in (path.resolve(), path.with_suffix(".md").resolve())


def _write_documents(path: Path, document: benchmark.Benchmark) -> None:
    documents.write(path, benchmark.dumps(document))
    documents.write(path.with_suffix(".md"), report.markdown(document))


def _write(path: Path, document: benchmark.Benchmark) -> None:
    _write_documents(path, document)
    if plots.available():
        for name, svg in report.figures(document).items():
            documents.write(path.with_name(f"{path.stem}-{name}.svg"), svg)


def _show(document: benchmark.Benchmark, as_json: bool) -> None:
    if as_json:
        output.say(benchmark.dumps(document))
    else:
        _print(document)


def _print(document: benchmark.Benchmark) -> None:
    for line in report.head(document):
        output.say(line)
    output.say()
    output.table(report.columns(), report.rows(document), right=_RIGHT)
    for line in (*report.standing(document), *report.untimed(document)):
        output.say(line)


def _tell_beside(text: str) -> None:
    sys.stderr.write(text + "\n")


def _print_changes(changes: Sequence[Change], against: Path | None, err: bool) -> None:
    """err: to stderr, beside a document on stdout; then what was shown as a table is left out."""
    changed = [c for c in changes if c.verdict != "same"]
    tell = _tell_beside if err else output.say
    if changed and not err:
        output.say()
        headers = ("op", "case", "contender", "verdict", "now / before", "noise", "confirmed")
        output.table(headers, report.change_rows(changed))
    for c in changes:
        if c.verdict == "no longer timed":
            tell(f"{c.op} {c.case}: {c.name} was timed before and is no longer: {c.reason}")
        elif c.reason is not None:
            tell(f"{c.op} {c.case}: {c.name} has no verdict, {c.verdict}: {c.reason}")
        elif c.verdict == "device slower":
            tell(f"{c.op} {c.case}: the device was slower: the copy takes {c.ratio:.2f} times what it took before")
        elif err and c.verdict == "slower":
            tell(f"{c.op} {c.case}: {c.name} takes {c.ratio:.2f} times what it took before")
    ours = [c.verdict for c in changes if c.role == "implementation"]
    others = (f"; {ours.count(v)} {v}" for v in ("no longer timed", "too noisy", "untrusted") if v in ours)
    tell(f"against {against}: {ours.count('slower')} of {len(ours)} of ours slower, confirmed{''.join(others)}")
