"""`ferryman report`: a result document as HTML, Markdown or JUnit, on any machine."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli import documents, output
from ferryman.errors import ArgumentError
from ferryman.porting import report as renderings
from ferryman.porting.judging.results import Results, load
from ferryman.porting.report.html import headline
from ferryman.porting.report.text import verdict
from ferryman.porting.report.view import tally

_STDOUT = Path("-")


def report(
    document: Annotated[Path, typer.Argument(help="A result document (check.json).")],
    html: Annotated[Path | None, typer.Option(help="Write one self-contained HTML page here.")] = None,
    md: Annotated[Path | None, typer.Option("--md", help="Write Markdown here; - is stdout.")] = None,
    junit: Annotated[Path | None, typer.Option(help="Write JUnit XML here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the verdict and what was written as JSON.")] = False,
) -> None:
    """Render a result document. With no format named, the HTML page is written beside it.

    Exits with 0 whatever the verdict: `ferryman check` is what judges.
    """
    if html is None and md is None and junit is None:
        html = document.with_suffix(".html")
    _refuse(document, {"--html": html, "--md": md, "--junit": junit}, as_json)
    loaded = load(document)
    wanted: list[tuple[str, Path | None, Callable[[Results], str]]] = [
        ("--html", html, page),
        ("--md", md, renderings.markdown),
        ("--junit", junit, renderings.junit),
    ]
    written = []
    for option, path, render in wanted:
        if path is None:
            continue
        text = render(loaded)
        if path == _STDOUT:
            sys.stdout.write(text)
        else:
            documents.write(path, text, option)
            written.append(str(path))
    if as_json:
        counts = tally(loaded.cells)
        output.json_document({"verdict": verdict(loaded), "counts": counts, "written": written})
        return
    if written:
        sys.stderr.write(f"{verdict(loaded)}: {headline(loaded)}\nwrote {', '.join(written)}\n")


def page(document: Results) -> str:
    """The HTML page; drawing the plots of 4,500 cells takes 2 to 3 s, so there is a bar."""
    with output.progress("drawing") as advance:
        return renderings.html(document, advance)


def _refuse(document: Path, outputs: dict[str, Path | None], as_json: bool) -> None:
    """What cannot be meant: writing over the document, two formats in one file, stdout for two things."""
    seen: dict[Path, str] = {document.resolve(): "the document itself"}
    for option, path in outputs.items():
        if path is None:
            continue
        if path == _STDOUT:
            if option != "--md" or as_json:
                raise ArgumentError("report", option, "-", "a file (only --md without --json goes to stdout)")
            continue
        other = seen.setdefault(path.resolve(), option)
        if other != option:
            raise ArgumentError("report", option, str(path), f"a file of its own, not {other}")
