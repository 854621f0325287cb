"""What is drawn by date: every test is in one share. CI's budget: what its parts and a quick test may take."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.conftest import (
    QUICK,
    SLOW,
    cpu_seconds,
    keep_day,
    keep_share,
    keep_week,
    listed,
    pytest_ignore_collect,
    seconds_of,
    turns_of,
)

ROOT = Path(__file__).resolve().parents[2]
CORES = 2
# A share that took 605 s was 498 s by the list. START comes before the first test: each process starts, and collects
# for 15 s. BESIDE is the rest: what a test takes beside another process, which shares caches and memory with it.
START, BESIDE = 25.0, 1.17
SLOWER = 1.15  # another machine's times
FEW = 10  # tests of a function that nobody measured: their guess may be off by less than a share has left


def item(name: str, *marks: str, **parameters: object) -> Any:
    """A test as pytest collects it, as far as it is asked."""
    named: Any = parameters.pop("alternate", None)
    how = {name: parameters.pop(name) for name in ("weeks", "within") if name in parameters}
    marker = None if named is None else SimpleNamespace(args=tuple(named), kwargs=how)
    return SimpleNamespace(
        nodeid=f"tests/unit/{name}",
        keywords=dict.fromkeys(marks),
        callspec=SimpleNamespace(params=parameters),
        get_closest_marker=lambda name: marker,
    )


def shares_of(items: list[Any], long: dict[str, float], turns: int = 7) -> list[list[Any]]:
    shares = []
    for turn in range(turns):
        mine = list(items)
        keep_share(mine, f"{turn}/{turns}", long)
        shares.append(mine)
    return shares


def test_every_test_is_in_one_share() -> None:
    tests = [item(f"test_x.py::test_{i}", *(["slow"] if i % 2 else [])) for i in range(400)]
    shares = shares_of(tests, {})
    assert sorted(i.nodeid for share in shares for i in share) == sorted(i.nodeid for i in tests)
    assert all(30 < len(share) < 90 for share in shares)
    (whole,) = shares_of(tests, {}, 1)
    assert whole == tests


def test_shares_cost_the_same_and_begin_with_the_longest() -> None:
    tests = [item(f"test_x.py::test_{i}[{j}]", "slow") for i in range(60) for j in range(3)]
    long = {f"tests/unit/test_x.py::test_{i}": 1.0 + i for i in range(60)}  # by function
    long["tests/unit/test_x.py::test_7[1]"] = 200.0  # and one by itself
    spent = []
    for share in shares_of(tests, long):
        costs = [seconds_of(i.nodeid, long) for i in share]
        assert costs == sorted(costs, reverse=True)
        spent.append(sum(costs))
    assert max(spent) - min(spent) < 0.02 * sum(spent) / 7


def test_what_shares_what_the_first_makes_is_drawn_together() -> None:
    tests = [item(f"test_{i % 9}.py::test_{i}", "slow") for i in range(90)]
    long = {f"tests/unit/test_{k}.py": 50.0 for k in range(3)}
    files = [{i.nodeid.partition("::")[0] for i in share} for share in shares_of(tests, long)]
    for k in range(9):
        assert sum(f"tests/unit/test_{k}.py" in own for own in files) == 1 or k >= 3


def test_a_new_test_moves_few_others() -> None:
    costs = {f"test_{i}": 2.0 + i % 40 for i in range(400)}
    before, after = turns_of(costs, 7), turns_of({**costs, "new": 30.0}, 7)
    assert sum(before[name] != after[name] for name in costs) < 0.2 * len(costs)


def test_what_alternates_has_one_variant_for_each_of_the_others_a_week() -> None:
    tests = [
        item(f"test_x.py::test_op[{op}-{device}]", op=op, device=device, alternate=["device"])
        for op in map(str, range(30))
        for device in ("a", "b", "c")[: 2 if op == "4" else 3]
    ]
    plain = item("test_x.py::test_other")
    weeks = []
    for week in range(3):
        items = [*tests, plain]
        keep_week(items, week)
        assert items.pop() is plain
        assert sorted(i.callspec.params["op"] for i in items) == sorted(map(str, range(30)))  # each op once
        assert {i.callspec.params["device"] for i in items} == {"a", "b", "c"}
        weeks.append({i.nodeid for i in items})
    assert set.union(*weeks) == {i.nodeid for i in tests}


def test_what_alternates_every_other_week_has_all_variants_in_time() -> None:
    tests = [
        item(f"test_x.py::test_op[{op}-{dtype}]", op=op, dtype=dtype, alternate=["dtype"], weeks=2)
        for op in range(40)
        for dtype in ("a", "b")
    ]
    drawn = []
    for week in range(4):
        items = list(tests)
        keep_week(items, week)
        assert len({i.callspec.params["op"] for i in items}) == len(items) and 5 < len(items) < 35
        drawn += items
    assert sorted(i.nodeid for i in drawn) == sorted(i.nodeid for i in tests)


def test_what_alternates_by_itself_runs_every_other_week() -> None:
    tests = [item(f"test_x.py::test_cost[{op}]", op=op, alternate=[]) for op in range(40)]
    one, two, three = (list(tests), list(tests), list(tests))
    for week, items in enumerate((one, two, three)):
        keep_week(items, week)
    assert 10 < len(one) < 30 and one == three and {*map(id, one)} ^ {*map(id, two)} == {*map(id, tests)}


def test_a_part_of_a_larger_test_is_left_to_it() -> None:
    parts = [item(f"test_x.py::test_few[{op}]", op=op, alternate=[], within="test_many") for op in range(4)]
    larger = [item(f"test_x.py::test_many[{op}]", op=op) for op in range(3)]
    for week in range(3):
        items = [*parts, *larger]
        keep_week(items, week)
        assert items == [parts[3], *larger]


def test_what_is_daily_has_all_its_tests_in_a_week_and_some_each_day() -> None:
    def named(name: str, *marks: str, daily: int | None = 7) -> Any:
        one = item(name, *marks)
        one.get_closest_marker = lambda _: None if daily is None else SimpleNamespace(args=(daily,), kwargs={})
        return one

    many = [named(f"test_x.py::test_many[{i}]") for i in range(30)]
    whole = [named(f"test_x.py::test_few[{i}]") for i in range(6)] + [named("test_x.py::test_other", daily=None)]
    whole += [named(f"test_x.py::test_many[slow-{i}]", "slow") for i in range(9)]
    for first in (20_000, 20_001):
        drawn = []
        for day in range(first, first + 7):
            items = [*many, *whole]
            keep_day(items, day)
            assert items[-len(whole) :] == whole and 4 <= len(items) - len(whole) <= 5
            drawn += items[: -len(whole)]
        assert sorted(i.nodeid for i in drawn) == sorted(i.nodeid for i in many)


def test_the_day_is_printed_and_a_file_that_is_named_runs_whole() -> None:
    test = "tests/unit/test_share.py::test_an_unknown_part_of_ci_is_refused_before_anything_is_made"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    for more, says in (((), False), (("--day", "20000"), True)):
        done = subprocess.run([*command, *more], capture_output=True, text=True, cwd=ROOT)
        assert done.returncode == 0, done.stdout
        assert ("--day 20000 draws them again, --day all runs every one" in done.stdout) is says
    done = subprocess.run([*command, "--day", "soon"], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 4 and "--day is soon; required: days since 1970, or all" in done.stderr


def test_a_file_without_a_test_that_is_asked_for_is_not_imported() -> None:
    here, listed_file = ROOT / "tests/unit/test_names.py", ROOT / "tests/unit/test_replay.py"
    marked, folder = ROOT / "tests/parity/test_fuzz.py", ROOT / "tests/unit"
    device, all_slow = ROOT / "tests/gpu/test_ampere_gpu.py", ROOT / "tests/unit/test_artefacts.py"
    for expression, left_out in (
        ("slow and not gpu", [here, device]),
        ("not gpu and not slow", [device, all_slow]),
        ("not slow", [all_slow]),
        ("not gpu or slow", []),
        ("gpu", []),
        ("", []),
    ):
        config: Any = SimpleNamespace(option=SimpleNamespace(markexpr=expression))
        paths = (here, listed_file, marked, folder, device, all_slow)
        assert [p for p in paths if pytest_ignore_collect(p, config)] == left_out, expression


_COLLECT = """
import json, sys
from collections import Counter
import pytest
from tests.conftest import SLOW, keep_share, keep_week, listed, seconds_of, together

class Seen:
    def pytest_collection_modifyitems(self, items):
        self.items = items

seen, out = Seen(), sys.stdout
sys.stdout = sys.stderr
assert pytest.main(["-q", "--collect-only", "-p", "no:cacheprovider", "-m", "slow and not gpu"], plugins=[seen]) == 0
long, report = listed(SLOW.read_text()), {}
slow = [i for i in seen.items if {"slow", "gpu"} & set(i.keywords) == {"slow"}]
for week in range(6):
    items = list(slow)
    keep_week(items, week)
    for turn in range(7):
        share = list(items)
        keep_share(share, f"{turn}/7", long)
        costs = {together(i.nodeid, long): seconds_of(i.nodeid, long) for i in share}
        report[f"{turn}/7 of week {week}"] = [sum(costs.values()), max(costs.values())]
by_source = [i.nodeid for i in slow if any(m.name == "slow" and not m.kwargs.get("listed") for m in i.iter_markers())]
names = {part for i in slow for part in (i.nodeid, i.nodeid.partition("[")[0], i.nodeid.partition("::")[0])}
unlisted = Counter(
    n.partition("[")[0] for n in by_source
    if not {n, n.partition("[")[0], n.partition("::")[0]} & set(long)
)
json.dump({"shares": report, "gone": sorted(set(long) - names), "unlisted": unlisted, "by source": by_source}, out)
"""


def expected_seconds(spent: float, longest: float) -> float:
    """The time of a share by the CPU seconds of its tests; the longest, which begins first, may take all of it."""
    return START + BESIDE * max(spent / CORES, longest)


def test_what_a_share_is_said_to_take_is_what_one_took() -> None:
    assert expected_seconds(2 * 498.0, 100.0) == pytest.approx(605, rel=0.01)
    assert expected_seconds(100.0, 90.0) > 90 + START


def test_each_days_share_of_the_slow_tests_fits_its_budget() -> None:
    """By what each cost when it was measured, with what a run costs beside, and on a machine that is slower."""
    done = subprocess.run([sys.executable, "-c", _COLLECT], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    (budget,) = re.findall(r'^ *step (\d+) "make test-slow', (ROOT / ".ci" / "run").read_text(), re.M)
    for share, (seconds, longest) in report["shares"].items():
        assert SLOWER * expected_seconds(seconds, longest) <= int(budget), (share, seconds, longest)
    many = {name: count for name, count in report["unlisted"].items() if count > FEW}
    assert not many, f"slow by their source, and nobody knows what they cost: python ci/slow_tests.py: {many}"
    assert report["gone"] == [], "tests that moved: python ci/slow_tests.py"
    long, own = listed(SLOW.read_text()), {n.partition("[")[0] for n in report["by source"]}
    assert all(seconds > QUICK for name, seconds in long.items() if name.partition("[")[0] not in own)


@pytest.mark.parametrize("share", ["4/4", "-1/4"])
def test_a_share_that_is_none_is_refused(share: str) -> None:
    with pytest.raises(pytest.UsageError, match="required: K/N"):
        keep_share([], share, {})


def test_the_parts_of_ci_fit_its_budget() -> None:
    """30 minutes together and 6 for the quick tests, on two cores; .ci/run prints each part's time against its own."""
    script = (ROOT / ".ci" / "run").read_text()
    parts = {title: int(seconds) for seconds, title in re.findall(r'^ *step (\d+) "([^"]+)"$', script, re.M)}
    (quick,) = (seconds for title, seconds in parts.items() if title.startswith("make test, "))
    assert len(parts) == len(re.findall(r"^ *step \d", script, re.M)) >= 8
    assert sum(parts.values()) <= 1800 and quick <= 360
    assert "day=$(($(date +%s) / 86400))" in script and "share=$((day % 7))/7" in script
    assert 'make test ARGS="--day $day"' in script and 'ARGS="--turn $((day % 6))/6 --seed' in script
    assert 'ARGS="--share $share --week $((day / 7))"' in script  # all shares of a week are of one number


def test_an_unknown_part_of_ci_is_refused_before_anything_is_made() -> None:
    completed = subprocess.run(["sh", str(ROOT / ".ci" / "run"), "chek"], capture_output=True, text=True)
    assert completed.returncode == 2 and not completed.stdout
    assert "no part chek; required: lint, hiprtc, check, test or slow" in completed.stderr


def test_githubs_jobs_are_the_parts_of_ci_within_45_minutes_and_run_each_day() -> None:
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text())
    (job,) = workflow["jobs"].values()
    assert job["timeout-minutes"] <= 45
    script = (ROOT / ".ci" / "run").read_text()
    assert job["strategy"]["matrix"]["part"] == re.findall(r"^if wants (\w+); then$", script, re.M)
    assert workflow[True]["schedule"]  # YAML reads the key "on" as true; a share of the slow tests is of a day


def test_what_is_printed_of_the_parts(tmp_path: Path) -> None:
    """The functions of .ci/run, with two parts of which the second fails."""
    script = (ROOT / ".ci" / "run").read_text()
    functions = script[script.index("begun=") : script.index("trap total EXIT")]
    completed = subprocess.run(
        ["sh", "-euc", functions + 'trap total EXIT; step 9 "one: two"; sleep 1; step 7 three; exit 3'],
        capture_output=True,
        text=True,
    )
    assert completed.returncode == 3 and not completed.stderr
    assert re.search(
        r"==> times\n +[12] s of +9  one: two\n +\d s of +7  three\n +\d s of  1800  together\n", completed.stdout
    )


def test_what_costs_more_than_a_quick_test_is_listed_as_slow(tmp_path: Path) -> None:
    """A run in another process: its costs are written, the list is made of them, and its tests are slow then."""
    test = "tests/unit/test_share.py::test_a_share_that_is_none_is_refused[4/4]"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--costs", str(tmp_path), test]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout
    (name, seconds, by_source) = json.loads(next(tmp_path.glob("*.jsonl")).read_text())
    assert name == test and 0 <= seconds < QUICK and not by_source


def test_the_list_has_tests_by_themselves_and_functions_that_are_slow_by_their_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("slow_tests", ROOT / "ci" / "slow_tests.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    before = {"a.py::test_kept": 5.0, "a.py::test_quick_now": 9.0, "b.py": 50.0, "a.py::test_marked[0]": 30.0}
    page, costs = tmp_path / "slow.txt", tmp_path / "costs"
    page.write_text("# a comment\n" + "".join(f"{seconds} {name}\n" for name, seconds in before.items()))
    costs.mkdir()
    marked = [(f"a.py::test_marked[{i}]", seconds, True) for i, seconds in enumerate((3.0, 4.0, 5.0, 80.0))]
    rows = [*marked, ("a.py::test_quick_now", 1.0, False), ("a.py::test_slow_now", 7.0, False)]
    (costs / "1.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.setattr(script, "SLOW", page)
    script.main(str(costs))
    assert listed(page.read_text()) == {
        "a.py::test_kept": 5.0,
        "a.py::test_marked": 4.0,
        "a.py::test_marked[3]": 80.0,
        "a.py::test_slow_now": 7.0,
        "b.py": 50.0,
    }


def test_the_cpu_time_of_what_a_test_starts_counts() -> None:
    before = cpu_seconds()
    spin = "import time\nwhile time.process_time() < 1.5: pass\nprint(flush=True)\ntime.sleep(60)"
    child = subprocess.Popen([sys.executable, "-c", spin], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None and child.stdout.readline()
        assert cpu_seconds() - before >= 1.4  # it runs still
    finally:
        child.kill()
        child.communicate()
    assert cpu_seconds() - before >= 1.4  # it has ended


def test_turns_do_not_depend_on_where_objects_lie() -> None:
    """Each process of pytest-xdist has its own objects, and all must draw the same tests."""
    drawn = set()
    for _ in range(8):
        kept = [lambda: None for _ in range(5)]  # at other places each time
        items = [item(f"test_x.py::test_{i}[{t}]", f=kept[i], t=t, alternate=["t"]) for i in range(5) for t in "abc"]
        keep_week(items, 3)
        drawn.add(tuple(i.nodeid for i in items))
    assert len(drawn) == 1 and len(next(iter(drawn))) == 5
