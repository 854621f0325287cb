"""Writes the tables of results in README.md from the packed documents in benchmarks/results.

python ci/readme.py            writes them (make docs)
python ci/readme.py --check    exit code 1 if README.md has others (tests/unit/test_readme.py asks the same)

A table stands between two marks, `<!-- NAME: .. -->` and `<!-- end of NAME -->`. What is around it is written by hand.
"""

from __future__ import annotations

import argparse
import re
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ferryman import files
from ferryman.porting.judging import results
from ferryman.porting.report.markdown import markdown

ROOT = Path(__file__).resolve().parent.parent
README, RESULTS = ROOT / "README.md", ROOT / "benchmarks" / "results"
sys.path.insert(0, str(ROOT / "benchmarks"))

from dispatch_regret import report as regret  # noqa: E402

SHOWN = ("rms_norm", "attention")  # as examples; the linked page has all
CHECK = "h200/check"
AGAIN = "h200/check-second"  # of the ops that were judged anew, after a mend
DRAWS = {
    "h100/regret-fourth": "all ops, H100",
    "h100/regret-attention-fifth": "attention alone, H100",
    "h200/regret-second": "all ops, H200",
    "h200/regret-attention-fourteenth": "attention and its gradient, H200, whose lockfile has no region of it",
    "h200/regret-attention-sixteenth": "the same, another seed, half of it",
    "h200/regret-attention-seventeenth": "the same after four rules, another seed, whole",
}
MODELS = (
    ("h100/whole_models", "compiled"),
    ("h100/whole_models-compiled", "compiled"),
    ("h100/whole_models-eager-second", "eager"),
    ("h100/whole_models-graphed", "eager"),
    ("h100/whole_models-rest", "eager"),
    ("h200/whole_models-qwen3_8b", "eager"),
    ("h200/whole_models-qwen3_8b", "compiled"),
)
_NOTE = "<!-- {name}: ci/readme.py writes this from benchmarks/results; `make docs` -->\n"
_END = "<!-- end of {name} -->\n"


def document(name: str) -> Any:
    return files.document(RESULTS / f"{name}.json.gz")


def link(name: str) -> str:
    path = RESULTS / f"{name}.md"
    return f"[{path.name}]({path.relative_to(ROOT).as_posix()})"


def table(head: Sequence[str], rows: Iterator[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def check() -> str:
    """What `ferryman check` printed, for some ops: of those that were judged again, that run's rows."""
    judged, later = (results.parse(document(name), name) for name in (CHECK, AGAIN))
    anew = {row.op for row in later.summary}
    head, rows = _rows(judged, [op for op in SHOWN if op not in anew])
    facts, failed = judged.environment, sum(cell.verdict == "FAIL" for cell in judged.cells)
    said = (
        f"`ferryman check` on an {facts.device_name}, {len(judged.cells):,} cells in {facts.seconds:.0f} seconds: "
        f"{link(CHECK)} has all ops. {failed} cells failed there. What was wrong is mended, and these ops were judged "
        f"again ({link(AGAIN)}): {', '.join(f'`{op}`' for op in SHOWN if op in anew)} has that run's rows.\n\n"
    )
    again = _rows(later, [op for op in SHOWN if op in anew])[1]
    return said + "".join(f"{line}\n" for line in (*head, *rows, *again))


def _rows(judged: results.Results, names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(head, rows of these ops that ran) of a document's table."""
    lines = markdown(judged).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| op |"))
    rows = lines[head + 2 : lines.index("", head)]
    of_ops = tuple(f"| `{op}` |" for op in names)
    return lines[head : head + 2], [row for row in rows if of_ops and row.startswith(of_ops)]


def draws() -> str:
    """How much slower dispatch's choice was than the best, over cells drawn from ops' whole domains."""

    def rows() -> Iterator[Sequence[str]]:
        for name, what in DRAWS.items():
            drawn = document(name)
            one = regret.summary(drawn["cells"], lambda cell: "all")["all"]
            shares = [f"{one['regret'][share]:.1%}" for share in ("median", "p95", "most")]
            yield (link(name), what, str(one["cells"]), str(one["counts"]), *shares)

    return table(["draw", "of", "cells", "that count", "regret: median", "95th percentile", "worst"], rows())


def models() -> str:
    """Speeds of ported models over unported ones."""

    def rows() -> Iterator[Sequence[str]]:
        for name, how in MODELS:
            speeds: dict[str, dict[str, float]] = {}
            for family in document(name)["families"]:
                for case in family["cases"]:
                    if case["how"] == how:
                        speeds.setdefault(case["mode"], {})[family["family"]] = case["speed"]
            for mode, by_family in speeds.items():
                order = sorted(by_family, key=by_family.__getitem__)
                mean = statistics.geometric_mean(by_family.values())
                ends = [f"{by_family[one]:.2f} ({one})" for one in (order[0], order[-1])]
                yield (link(name), f"{mode}, {how}", str(len(order)), f"{mean:.2f}", *ends)

    return table(["timed", "step", "families", "speed: geometric mean", "least", "most"], rows())


BLOCKS: dict[str, Callable[[], str]] = {"check": check, "draws": draws, "models": models}


def written(text: str) -> str:
    """README with its tables as the documents say them. Exits where a mark is lost."""
    for name, block in BLOCKS.items():
        begin, end = _NOTE.format(name=name), _END.format(name=name)
        place = re.search(re.escape(begin) + ".*?" + re.escape(end), text, re.DOTALL)
        if place is None:
            raise SystemExit(f"{README} has lost a mark of the table {name}: {begin}")
        text = text[: place.start()] + f"{begin}\n{block()}\n{end}" + text[place.end() :]
    return text


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true")
    now = README.read_text("utf-8")
    text = written(now)
    if parser.parse_args(arguments).check:
        if text != now:
            print("README.md's tables are not what benchmarks/results say: make docs")
        return int(text != now)
    README.write_text(text, "utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
