"""`ferryman ci`: a matrix of vendors, devices and backends in which what was not tested never looks green."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from ferryman.cli import documents, output
from ferryman.errors import ArgumentError
from ferryman.porting.ci import changes, evidence, exchange, initialise, merged, provenance, summary, workflows
from ferryman.porting.ci import history as histories
from ferryman.porting.ci import matrix as matrices
from ferryman.porting.ci import merge as merging
from ferryman.porting.ci import run as running
from ferryman.porting.ci import verify as verifying
from ferryman.porting.ci.judge import Context
from ferryman.porting.ci.merged import Merged
from ferryman.porting.ci.record import moment
from ferryman.porting.ci.row import HOW

app = typer.Typer(
    name="ci",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="A matrix of vendors, devices and backends in which what was not tested never looks green (docs/ci.md).",
)
Root = Annotated[Path, typer.Option(help="The repository; default: the working folder.")]
File = Annotated[Path | None, typer.Option("--file", help="The matrix; default: ferryman.yaml, else pyproject.toml.")]
Results = Annotated[list[Path], typer.Argument(help="Folders and files that jobs brought back.")]
HistoryFile = Annotated[
    list[Path] | None, typer.Option("--history", help="What was before; written again with these runs. Repeatable.")
]
Signers = Annotated[
    Path | None,
    typer.Option("--require-signed", help="Allowed-signers file: a run counts only if one of these signed it."),
]
Commit = Annotated[str | None, typer.Option(help="The tested commit; default: that of the repository.")]
Base = Annotated[
    str | None, typer.Option(help="What changed since this commit; rows that it does not reach may be out.")
]
Now = Annotated[str | None, typer.Option(help="The time to judge ages by, ISO 8601; default: the clock.", hidden=True)]

Replays = Annotated[
    Path | None, typer.Option(help="What `ferryman ci replay` wrote: rows with a capsule need it to be green.")
]


def _matrix(root: Path, file: Path | None) -> matrices.Matrix:
    return matrices.read(file or matrices.find(root))


@app.command("init")
def init(
    root: Root = Path(),
    to: Annotated[
        list[str] | None, typer.Option("--for", help="github, gitlab or buildkite. Repeatable; default: github.")
    ] = None,
    vendor: Annotated[
        list[str] | None,
        typer.Option(help="nvidia, amd, jetson, cpu. Repeatable; default: those that the kernels serve."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Write over files that are there.")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Print what would be written.")] = False,
) -> None:
    """Write a matrix for the kernels and tests of a repository, and thin workflows that run it."""
    planned = initialise.plan(root, to or ["github"], vendor)
    for line in planned.notes:
        sys.stderr.write(f"{line}\n")
    if dry_run:
        for name, text in planned.files.items():
            output.say(f"# {name}\n{text}")
        return
    there = [name for name in planned.files if (root / name).exists()]
    if there and not force:
        raise ArgumentError("ci init", "files", ", ".join(there), "none of these there yet, or --force to replace them")
    for name, text in planned.files.items():
        documents.write(root / name, text, "--root")
        sys.stderr.write(f"wrote {name}\n")


@app.command("matrix")
def matrix(
    root: Root = Path(),
    file: File = None,
    base: Base = None,
    format_: Annotated[str, typer.Option("--format", help="table, json, github (a job matrix) or ids.")] = "table",
    how: Annotated[list[str] | None, typer.Option(help="Only rows of this kind. Repeatable.")] = None,
    group: Annotated[
        str | None, typer.Option(help="Only rows on a device that share a job: nvidia, amd, jetson.")
    ] = None,
) -> None:
    """The rows, and why each is in or out."""
    if format_ not in ("table", "json", "github", "ids"):
        raise ArgumentError("ci matrix", "--format", format_, "table, json, github or ids")
    for kind in how or ():
        if kind not in HOW:
            raise ArgumentError("ci matrix", "--how", kind, ", ".join(HOW))
    known = _matrix(root, file)
    decisions = [d for d in changes.decide(root, known, base) if not how or d.row.how in how]
    if group is not None:
        decisions = [d for d in decisions if d.row.on_device and workflows.group(d.row) == group]
    if format_ == "table":
        headers = ["row", "vendor", "device", "backend", "how", "runs", "why"]
        rows = [
            [d.row.id, d.row.vendor, d.row.device, d.row.backend, d.row.how, "yes" if d.chosen else "no", d.why]
            for d in decisions
        ]
        output.table(headers, rows)
        return
    chosen = [d.row.to_dict() for d in decisions if d.chosen]
    if format_ == "github":
        output.say(json.dumps({"include": chosen}))
    elif format_ == "ids":
        for row in chosen:
            output.say(row["id"])
    else:
        output.json_document([{**d.row.to_dict(), "in": d.chosen, "why": d.why} for d in decisions])


@app.command("run")
def run(
    row: Annotated[str, typer.Argument(help="The row's id.")],
    root: Root = Path(),
    file: File = None,
    out: Annotated[Path, typer.Option(help="Results go to a folder of the row's name below it.")] = Path("out/ci"),
    commit: Annotated[
        str | None, typer.Option(help="The commit, where the sources lie in no git repository (an archive, a copy).")
    ] = None,
    sign: Annotated[Path | None, typer.Option(help="Sign the record with this ssh key.")] = None,
    timeout: Annotated[float, typer.Option(help="Seconds after which the command is ended.")] = 6 * 3600,
    baseline: Annotated[Path | None, typer.Option(help="Of a bench row: the device's past, written again.")] = None,
) -> None:
    """Run a row and write its record: what a job executes, the same on a laptop. Exits as the row's command does."""
    known = _matrix(root, file)
    done = running.run(
        root, known, known.row(row), out, commit=commit, sign_with=sign, seconds=timeout, baseline=baseline
    )
    record = done.record
    sys.stderr.write(
        f"{row}: exit code {record.exit_code}, {len(record.collected)} cases, launches on the device: "
        f"{'not counted' if record.launches is None else record.launches}; wrote {done.path}\n"
    )
    if record.exit_code:
        raise typer.Exit(1)


def _merged(
    results: list[Path],
    root: Path,
    file: Path | None,
    history: list[Path] | None,
    signers: Path | None,
    commit: str | None,
    base: str | None,
    now: str | None,
    replays: Path | None,
) -> tuple[Merged, matrices.Matrix]:
    known = _matrix(root, file)
    runs, problems = evidence.collect(results)
    past, notes = histories.load(history or [])
    tree = changes.Tree(root, known)
    decisions = {} if base is None else {d.row.id: d for d in changes.decide(root, known, base, tree)}
    context = Context(
        matrix=known,
        tree=tree,
        commit=commit or provenance.state(root).commit,
        now=moment(now) if now else datetime.datetime.now(datetime.timezone.utc),
        history=past,
        signers=signers,
        decisions=decisions,
        replays=exchange.replays_of(replays),
    )
    document, entries = merging.merge(runs, problems, context)
    if history:
        histories.save(histories.extended(past, entries), history[0])
    return document.model_copy(update={"notes": notes}), known


@app.command("replay")
def replay(
    results: Results,
    root: Root = Path(),
    file: File = None,
    out: Annotated[Path, typer.Option(help="The folder of what the replays show.")] = Path("out/replays"),
    device: Annotated[str, typer.Option(help="Where they are replayed: cpu, cuda:1.")] = "cpu",
) -> None:
    """Judge again, on this machine, what the rows' machines recorded in capsules.

    What is wrong the gate says, so it exits with 0.
    """
    runs, _ = evidence.collect(results)
    out.mkdir(parents=True, exist_ok=True)
    count = 0
    for row, outcome in exchange.replayed(runs, _matrix(root, file), out, device):
        count += 1
        if isinstance(outcome, str):
            output.say(f"{row}: {outcome}")
            continue
        judged = len([e for e in outcome.explained if e.judged])
        computed = len([e for e in outcome.explained if e.elements])
        by = outcome.replayed.environment.profile
        output.say(f"{row}: {judged} of {computed} recorded results were judged again by {by}")
    output.say(f"{count} capsules; {out} is for --replays of merge and verify")


@app.command("merge")
def merge(
    results: Results,
    root: Root = Path(),
    file: File = None,
    history: HistoryFile = None,
    require_signed: Signers = None,
    commit: Commit = None,
    base: Base = None,
    out: Annotated[Path, typer.Option(help="The merged document.")] = Path("out/ci/merged.json"),
    now: Now = None,
    replays: Replays = None,
) -> None:
    """All rows from what jobs brought back, and from the history the last real run of each."""
    document, _ = _merged(results, root, file, history, require_signed, commit, base, now, replays)
    documents.write(out, merged.dumps(document))
    _show(document)
    sys.stderr.write(f"wrote {out}\n")


@app.command("verify")
def verify(
    results: Results,
    root: Root = Path(),
    file: File = None,
    require: Annotated[
        str | None, typer.Option(help="Vendors that must be green, separated by commas; default: the matrix's.")
    ] = None,
    history: HistoryFile = None,
    require_signed: Signers = None,
    commit: Commit = None,
    base: Base = None,
    out: Annotated[Path | None, typer.Option(help="Write the merged document here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the merged document.")] = False,
    now: Now = None,
    replays: Replays = None,
) -> None:
    """The check to require: exits with 1 unless every required vendor was tested and nothing else is wrong."""
    wanted = None if require is None else [name.strip() for name in require.split(",") if name.strip()]
    if require is not None and not wanted:
        raise ArgumentError("ci verify", "--require", repr(require), "vendors separated by commas")
    document, known = _merged(results, root, file, history, require_signed, commit, base, now, replays)
    document = verifying.verified(document, known, wanted)
    if out is not None:
        documents.write(out, merged.dumps(document))
    if as_json:
        output.say(merged.dumps(document))
    else:
        _show(document)
        for failure in document.failures:
            output.say(f"FAILS {failure}")
        output.say(summary.sentence(document))
    if document.failures:
        raise typer.Exit(1)


def _show(document: Merged) -> None:
    rows: list[list[Any]] = [
        [
            r.id,
            r.how,
            r.verdict,
            " ".join(f"{n} {v}" for v, n in r.counts.items()) or "-",
            summary.last(r),
            summary.why(r),
        ]
        for r in document.rows
    ]
    output.table(["row", "how", "verdict", "cases", "last success", "why"], rows)
    for note in [*document.notes, *(f"{r.id}: {n}" for r in document.rows for n in r.notes)]:
        output.say(f"note: {note}")
    for fault in document.faults:
        output.say(f"{fault.code}: {fault.file}: {fault.text}")


@app.command("summary")
def summarise(
    document: Annotated[Path, typer.Argument(help="A merged document.")],
    md: Annotated[Path | None, typer.Option("--md", help="Markdown; - is stdout.")] = None,
    html: Annotated[Path | None, typer.Option(help="The dashboard, one self-contained page.")] = None,
    junit: Annotated[Path | None, typer.Option(help="JUnit XML.")] = None,
    badge: Annotated[Path | None, typer.Option(help="A badge, SVG.")] = None,
    annotations: Annotated[bool, typer.Option("--annotations", help="Print GitHub's annotations.")] = False,
    title: Annotated[str | None, typer.Option(help="Instead of the project's name.")] = None,
) -> None:
    """Render a merged document; with no format named, Markdown to stdout. Exits with 0 whatever it says."""
    merged_document = merged.load(document)
    if title:
        merged_document = merged_document.model_copy(update={"project": title})
    if md is None and html is None and junit is None and badge is None and not annotations:
        md = Path("-")
    if annotations:
        output.say(summary.commands(merged_document))
    for option, path, render in (
        ("--md", md, summary.markdown),
        ("--html", html, summary.html),
        ("--junit", junit, summary.junit),
        ("--badge", badge, summary.badge),
    ):
        if path == Path("-"):
            output.say(render(merged_document).rstrip("\n"))
        elif path is not None:
            documents.write(path, render(merged_document), option)
            sys.stderr.write(f"wrote {path}\n")
