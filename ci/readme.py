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

CHECK, AGAIN = "h200/check", "h200/check-second"  # all ops; those that were judged anew, after a mend
SHOWN = {CHECK: "rms_norm", "h200/check-seventh": "bias_act"}  # as examples
DRAWS = {
    "h100/regret-fourth": "all ops, H100",
    "h100/regret-attention-fifth": "attention alone, H100",
    "h200/regret-second": "all ops, H200",
    "h200/regret-attention-fourteenth": "attention and its gradient, H200, whose lockfile has no region of it",
    "h200/regret-attention-seventeenth": "the same, another seed",
    "h200/regret-attention-eighteenth": "the same with encoders, another seed; three rules came after it",
    "h200/regret-attention-encoders": "attention of encoders, forward, H200",
}
MODELS = (
    ("h200/whole_models-eager", "eager"),
    ("h200/whole_models-eager-second", "eager"),
    ("h200/whole_models-compiled", "compiled"),
    ("h200/whole_models-compiled-second", "compiled"),
    ("h200/whole_models-qwen3_8b", "eager"),
    ("h200/whole_models-qwen3_8b", "compiled"),
)
STEPS = "qwen3_8b/"  # of one model: a row for all of them
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
    """What `ferryman check` printed, for some ops."""
    shown = [(results.parse(document(name), name), op) for name, op in SHOWN.items()]
    head = _rows(*shown[0])[0]
    lines = [*head, *(line for judged, op in shown for line in _rows(judged, op)[1])]
    judged, later = (results.parse(document(name), name) for name in (CHECK, AGAIN))
    facts, failed = judged.environment, sum(cell.verdict == "FAIL" for cell in judged.cells)
    said = (
        f"These rows are of an {facts.device_name}. {link(CHECK)} has all ops: {len(judged.cells):,} cells in "
        f"{facts.seconds:.0f} seconds. {failed} of them failed. What was wrong is mended, and {len(later.cells):,} "
        f"cells of the ops concerned were judged again: none failed ({link(AGAIN)}).\n"
    )
    if any(cell.verdict == "FAIL" for cell in later.cells):
        raise SystemExit(f"{AGAIN} has cells that failed: README says that it has none")
    return "".join(f"{line}\n" for line in lines) + f"\n{said}"


def _rows(judged: results.Results, op: str) -> tuple[list[str], list[str]]:
    """(head, rows of an op) of a document's table."""
    lines = markdown(judged).splitlines()
    head = next(i for i, line in enumerate(lines) if line.startswith("| op |"))
    rows = lines[head + 2 : lines.index("", head)]
    return lines[head : head + 2], [row for row in rows if row.startswith(f"| `{op}` |")]


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
                    of = family["family"]
                    if case["how"] == how:
                        mode = "steps" if of.startswith(STEPS) else case["mode"]
                        speeds.setdefault(mode, {})[of.removeprefix(STEPS)] = case["speed"]
            for mode, by_family in speeds.items():
                order = sorted(by_family, key=by_family.__getitem__)
                mean = statistics.geometric_mean(by_family.values())
                ends = [f"{by_family[one]:.2f} ({one})" for one in (order[0], order[-1])]
                yield (link(name), f"{mode}, {how}", str(len(order)), f"{mean:.2f}", *ends)

    return table(["timed", "step", "families or steps", "speed: geometric mean", "least", "most"], rows())


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
