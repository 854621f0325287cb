"""Write tests/slow.txt: the tests that cost more CPU time than a quick test has, from a run that measured all of them.

python -m pytest -n 2 -m "not gpu" --costs=FOLDER; python ci/slow_tests.py FOLDER

Tests that the run did not reach keep their line. Those that are marked `slow` in their source are listed by function,
with the mean of its parameters, and by themselves where they cost twice the median: a share of the slow tests has its
part of the seconds. A line of a whole file is written by hand: all its tests share what one of them makes, and the
first pays for it.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.conftest import QUICK, SLOW, listed  # noqa: E402

_HEAD = f"""# Tests that took more than {QUICK:g} s of CPU when they were measured (ci/slow_tests.py): seconds, id.
# They are slow tests: `make test` leaves them out, `make test-slow` runs them, .ci/run a share of them a day.
# A function without parameters in brackets is slow by its source: the mean of its tests.
"""
LARGE = 10.0  # seconds from which one of a function's tests has a line of its own


def main(folder: str) -> None:
    measured: dict[str, float] = {}
    marked: dict[str, dict[str, float]] = {}  # by function: those that are slow by their source
    for path in Path(folder).glob("*.jsonl"):
        for line in path.read_text().splitlines():
            name, seconds, by_source = json.loads(line)
            into = marked.setdefault(name.partition("[")[0], {}) if by_source else measured
            into[name] = max(seconds, into.get(name, 0.0))
    middle = {function: statistics.median_low(own.values()) for function, own in marked.items()}
    outliers = {n: s for f, own in marked.items() for n, s in own.items() if s > max(LARGE, 2 * middle[f])}
    functions = {f: statistics.fmean(s for n, s in own.items() if n not in outliers) for f, own in marked.items()}
    again = {*measured, *functions, *(name for own in marked.values() for name in own)}
    kept = {n: s for n, s in listed(SLOW.read_text()).items() if n not in again}
    long = kept | {n: s for n, s in measured.items() if round(s, 1) > QUICK} | functions | outliers
    long = {n: s for n, s in long.items() if "::" not in n or n.partition("::")[0] not in long}
    lines = [f"{seconds:.1f} {name}\n" for name, seconds in sorted(long.items())]
    SLOW.write_text(_HEAD + "".join(lines))
    quick = sum(s for n, s in measured.items() if not {n, n.partition("::")[0]} & long.keys())
    print(f"{SLOW.name}: {len(long)} lines; {quick:.0f} s are left to the quick tests")


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_dir():
        sys.exit(f"usage: python ci/slow_tests.py FOLDER; given: {sys.argv[1:]}; required: a folder of --costs")
    main(sys.argv[1])
