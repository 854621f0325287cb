"""Reads ci/matrix.yaml: rows for GitHub's job matrices, and what became of each row.

    python ci/matrix.py github --how compile        the rows as {"include": [...]}
    python ci/matrix.py summary results/*.json      a Markdown table; exit code 1 if a row failed

A row is judged by the result documents of exactly its kind: hardware by runs on that device, compile by compilations
for it, simulate by executions of its code on a CPU, stand-in by executions of its PTX on a newer device, cpu by runs on
the CPU. A row without a document is NOT_RUN, and nothing makes it pass.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.errors import FerrymanError
from ferryman.porting import simulated_route, stand_in
from ferryman.porting.results import Results, Verdict, load, row_verdict

FILE = Path(__file__).with_name("matrix.yaml")
HOW = ("hardware", "compile", "simulate", "stand-in", "cpu")
NOWHERE = "none"  # the device of a document that only compiled (ci/compile.py)
KINDS = {NOWHERE: "compile", simulated_route.NAME: "simulate", stand_in.NAME: "stand-in"}
_ONLY = {"compile": "compiled", "simulate": "simulated", "stand-in": "executed by a stand-in"}
_KEYS = {"vendor", "profile", "backend", "how", "runner"}
_NAME = re.compile(r"[a-zA-Z0-9][a-zA-Z0-9._-]{0,63}")
_MOST_BYTES = 1 << 20


class MatrixError(FerrymanError, ValueError):
    """The matrix file is invalid; the message gives the file and the row."""


@dataclass(frozen=True)
class Row:
    """One thing to test. ``runner`` are the labels of the machine that can."""

    vendor: str
    profile: str
    backend: str
    how: str
    runner: tuple[str, ...]

    @property
    def key(self) -> tuple[str, str, str]:
        return self.profile, self.backend, self.how

    def to_dict(self) -> dict[str, Any]:
        return {"name": f"{self.profile}-{self.backend}-{self.how}", "vendor": self.vendor, "profile": self.profile,
                "backend": self.backend, "how": self.how, "runner": list(self.runner)}  # fmt: skip


def read(path: Path = FILE) -> list[Row]:
    """The rows of a matrix file. Raises MatrixError for anything that is not exactly what it should be."""
    try:
        size = path.stat().st_size
        if size > _MOST_BYTES:
            raise MatrixError(f"{path} is {size} bytes; required: at most {_MOST_BYTES}")
        document = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        raise MatrixError(f"{path} cannot be read: {error}") from error
    if not isinstance(document, dict) or set(document) != {"schema", "rows"} or document["schema"] != 1:
        raise MatrixError(f"{path} must hold 'schema: 1' and 'rows', and nothing else")
    if not isinstance(document["rows"], list) or not document["rows"]:
        raise MatrixError(f"{path}: rows must be a list that is not empty")
    rows: list[Row] = []
    for number, raw in enumerate(document["rows"], 1):
        try:
            row = _row(raw)
        except FerrymanError as error:
            raise MatrixError(f"{path}, row {number}: {error}") from error
        if row.key in [other.key for other in rows]:
            raise MatrixError(f"{path}, row {number}: {' '.join(row.key)} is there already")
        rows.append(row)
    return rows


def _row(raw: Any) -> Row:
    if not isinstance(raw, dict):
        raise MatrixError(f"it is a {type(raw).__name__}; required: keys and values")
    unknown, missing = set(raw) - _KEYS, _KEYS - {"runner"} - set(raw)
    if unknown or missing:
        raise MatrixError(f"unknown keys: {sorted(map(str, unknown))}; missing keys: {sorted(missing)}")
    runner = raw.get("runner", ["ubuntu-latest"])
    texts = [
        raw["vendor"],
        raw["profile"],
        raw["backend"],
        raw["how"],
        *(runner if isinstance(runner, list) else [None]),
    ]
    for text in texts:
        if not isinstance(text, str) or not _NAME.fullmatch(text):
            raise MatrixError(f"{text!r} is not a name")
    row = Row(raw["vendor"], raw["profile"], raw["backend"], raw["how"], tuple(runner))
    registry.check_requested(row.backend)
    known = profile(row.profile)
    if known.name != row.profile or known.vendor != row.vendor:
        raise MatrixError(
            f"profile {row.profile!r} is {known.name} of vendor {known.vendor}; the row says {row.vendor}"
        )
    if row.vendor not in registry.backends()[row.backend].vendors:
        raise MatrixError(f"backend {row.backend} does not serve {row.vendor}")
    if row.how not in HOW:
        raise MatrixError(f"how is {row.how!r}; required: {', '.join(HOW)}")
    if (row.how == "cpu") != (row.vendor == "cpu"):
        raise MatrixError(f"how is {row.how!r} for vendor {row.vendor}; a CPU is tested as 'cpu', and nothing else is")
    if row.how == "compile" and row.backend == "torch":
        raise MatrixError("torch's kernels come compiled; there is nothing to compile")
    if row.how == "simulate":
        simulated_route.require(known)
        if row.backend not in simulated_route.SERVES:
            raise MatrixError(f"the simulator executes {' and '.join(simulated_route.SERVES)}, not {row.backend}")
    if row.how == "stand-in":
        stand_in.require(known, None)
        if row.backend not in stand_in.SERVES:
            raise MatrixError(f"a stand-in executes {' and '.join(stand_in.SERVES)}, not {row.backend}")
    if row.how in ("hardware", "stand-in") and "self-hosted" not in row.runner:
        raise MatrixError(f"{row.how} needs a runner with the label self-hosted")
    return row


def judge(row: Row, documents: Sequence[Results]) -> tuple[Verdict, dict[str, int]]:
    """(the row's verdict, how many cells ended how) from the documents of its kind."""
    counts: Counter[Verdict] = Counter()
    for document in documents:
        facts = document.environment
        kind = KINDS.get(facts.device) or ("cpu" if facts.vendor == "cpu" else "hardware")
        if (facts.vendor, facts.profile, kind) == (row.vendor, row.profile, row.how):
            counts.update(cell.verdict for cell in document.cells if cell.implementation == row.backend)
    if row.how in KINDS.values() and counts["PASS"]:
        raise MatrixError(f"{' '.join(row.key)}: a document calls a kernel that was only {_ONLY[row.how]} PASS")
    return row_verdict(dict(counts)), {str(verdict): n for verdict, n in sorted(counts.items())}


def summary(rows: Sequence[Row], documents: Sequence[Results]) -> tuple[str, bool]:
    """(the Markdown table, whether a row failed)."""
    lines = ["| vendor | device profile | backend | how | verdict | cells |", "|---|---|---|---|---|---|"]
    bad = False
    for row in rows:
        verdict, counts = judge(row, documents)
        bad = bad or verdict in ("FAIL", "MISTRUSTED", "QUARANTINED")
        cells = ", ".join(f"{n} {v}" for v, n in counts.items()) or "-"
        lines.append(f"| {row.vendor} | {row.profile} | {row.backend} | {row.how} | {verdict} | {cells} |")
    return "\n".join(lines) + "\n", bad


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--file", type=Path, default=FILE)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verbs.add_parser("github", help="the rows as GitHub's matrix").add_argument("--how", choices=HOW)
    verbs.add_parser("summary", help="what became of each row").add_argument("results", type=Path, nargs="*")
    options = parser.parse_args(arguments)
    try:
        rows = read(options.file)
        if options.verb == "github":
            print(json.dumps({"include": [row.to_dict() for row in rows if options.how in (None, row.how)]}))
            return 0
        text, bad = summary(rows, [load(path) for path in options.results])
    except FerrymanError as error:
        print(f"matrix: {error}", file=sys.stderr)
        return 2
    print(text, end="")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main())
