"""How verbs print: tables (rich on a terminal, plain columns elsewhere), JSON, and progress bars on stderr."""

from __future__ import annotations

import contextlib
import json
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

EVERY = 30.0  # seconds between two lines of progress off a terminal
GREEN, RED, YELLOW, DIM = "green", "red", "yellow", "dim"
STYLES = {
    "PASS": GREEN,
    "yes": GREEN,
    "chosen": GREEN,
    "FAIL": RED,
    "MISTRUSTED": RED,
    "QUARANTINED": RED,
    "no": RED,
    "SIMULATED": YELLOW,
    "COMPILED_ONLY": YELLOW,
    "refused": YELLOW,
    "NOT_RUN": DIM,
    "UNIMPLEMENTED": DIM,
    "-": DIM,
}


def say(text: str = "") -> None:
    """A line on stdout, as it is; what stdout's encoding lacks is escaped."""
    try:
        sys.stdout.write(text + "\n")
    except UnicodeEncodeError:  # a path that is not UTF-8, a terminal that is ASCII
        sys.stdout.write(text.encode(sys.stdout.encoding, "backslashreplace").decode(sys.stdout.encoding) + "\n")


def json_document(document: Any) -> None:
    """JSON that any parser reads: an infinity or NaN is a string, as in a result document."""
    say(json.dumps(_spelled(document), indent=1, default=str, allow_nan=False))


def _spelled(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _spelled(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_spelled(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value


def table(headers: Sequence[str], rows: Sequence[Sequence[Any]], title: str = "", right: Sequence[str] = ()) -> None:
    """A table on stdout. Off a terminal nothing is cut, coloured or boxed: columns are separated by two spaces."""
    cells = [[_text(value) for value in row] for row in rows]
    if title:
        say(title)
    if sys.stdout.isatty():
        _rich(headers, cells, right)
        return
    widths = [max(len(row[i]) for row in [list(headers), *cells]) for i in range(len(headers))]
    for row in [list(headers), ["-" * w for w in widths], *cells]:
        columns = zip(row, widths, headers, strict=True)
        say("  ".join(t.rjust(w) if h in right else t.ljust(w) for t, w, h in columns).rstrip())


def _rich(headers: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[str]) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    grid = Table(show_edge=False, header_style="bold")
    for header in headers:
        grid.add_column(header, justify="right" if header in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell, style=STYLES.get(cell, "")) for cell in row))
    Console().print(grid)


def _text(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def quantity(value: float | None, unit: str) -> str | None:
    """A number with an SI prefix: 4.8e12, "B/s" -> "4.8 TB/s"."""
    if value is None:
        return None
    for prefix, factor in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{value / factor:.4g} {prefix}{unit}"
    return f"{value:.4g} {unit}"


def size(value: int | None) -> str | None:
    """Bytes with a binary prefix."""
    if value is None:
        return None
    for prefix, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if value >= factor:
            return f"{value / factor:.4g} {prefix}"
    return f"{value} B"


@contextmanager
def _lines(what: str) -> Iterator[Callable[[int, int, str], None]]:
    began, ended, state = time.monotonic(), threading.Event(), [""]

    def advance(done: int, total: int, label: str = "") -> None:
        state[0] = " ".join(f" {done} of {total} {label}".split("\n")).rstrip()

    def tell() -> None:
        while not ended.wait(EVERY):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr is gone: nobody reads
                sys.stderr.write(f"ferryman: {what}:{state[0]} after {time.monotonic() - began:.0f} s\n")
                sys.stderr.flush()

    teller = threading.Thread(target=tell, daemon=True)
    teller.start()
    try:
        yield advance
    finally:
        ended.set()
        teller.join()


@contextmanager
def progress(what: str) -> Iterator[Callable[[int, int, str], None]]:
    """A progress bar on stderr while the block runs; gives ``advance(done, total, label)``. Off a terminal a line every
    `EVERY` seconds, however long one step takes."""
    if sys.stderr is None or not sys.stderr.isatty():
        with _lines(what) as print_line:
            yield print_line
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=None)

        def advance(done: int, total: int, label: str = "") -> None:
            bar.update(task, completed=done, total=total, description=f"{what} {label}".rstrip())

        yield advance
