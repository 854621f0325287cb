"""What every test shares: no settings from outside, few threads, `gpu` tests only where there is a device; and what is
quick: a test that costs more CPU time than the quick ones have is listed in tests/slow.txt, and is `slow` by that."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import json
import math
import os
import re
import sys
import time
import zlib
from collections.abc import Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

for _name in [n for n in os.environ if n.startswith("FERRYMAN_") and not n.startswith("FERRYMAN_SELFTEST_")]:
    del os.environ[_name]  # before ferryman is imported: a developer's settings must not change a test
os.environ["FERRYMAN_LOCKFILE"] = "none"  # nor what was measured on the device here

# Some virtual machines list AMX and refuse its instructions: oneDNN's bfloat16 products then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

from tests.interpreter import Interpreter  # noqa: E402

# The process that starts others needs no torch, and they wait for it.
if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores; more threads make each other wait
    import torch

    torch.set_num_threads(1)


SLOW = Path(__file__).with_name("slow.txt")
QUICK = 1.0  # seconds of CPU that a quick test may take; `python ci/slow_tests.py` lists what takes more
UNKNOWN = 15.0  # of a slow test that was not measured yet: about the mean of those that are slow by their source
LIMIT = 120.0  # beyond this one that is not listed fails: who comes first pays for what a process keeps


def turns_of(costs: Mapping[str, float], turns: int) -> dict[str, int]:
    """{what is drawn together: its share}. A name's hash says where it goes, until that share has its part of the
    seconds; then it goes where the fewest are. So shares are even, and a new test moves few others."""
    room = math.fsum(costs.values()) / turns  # the same in every process, in whatever order tests were collected
    spent, chosen = [0.0] * turns, {}
    for name in sorted(costs, key=lambda name: (-costs[name], name)):
        turn = zlib.crc32(name.encode()) % turns
        if spent[turn] + costs[name] > room:
            turn = min(range(turns), key=spent.__getitem__)
        spent[turn] += costs[name]
        chosen[name] = turn
    return chosen


def together(name: str, long: Mapping[str, float]) -> str:
    """A test, or its whole file where its tests share what the first of them makes."""
    file = name.partition("::")[0]
    return file if file in long else name


def seconds_of(name: str, long: Mapping[str, float]) -> float:
    """What a slow test costs, by its own line, or its file's, or that of its function."""
    return next((long[n] for n in (name, together(name, long), name.partition("[")[0]) if n in long), UNKNOWN)


def keep_share(items: list[pytest.Item], share: str, long: Mapping[str, float]) -> None:
    """Leave the tests of one share, and of these the longest first; every test is in one of the N."""
    turn, turns = (int(part) for part in share.split("/"))
    if not 0 <= turn < turns:
        raise pytest.UsageError(f"--share is {share}; required: K/N with 0 <= K < N")
    slow = [item.nodeid for item in items if {"slow", "gpu"} & set(item.keywords) == {"slow"}]
    costs = {together(name, long): seconds_of(name, long) for name in slow}
    chosen = turns_of(costs, turns)
    mine = [i for i in items if chosen.get(together(i.nodeid, long), zlib.crc32(i.nodeid.encode()) % turns) == turn]
    if turns > 1:
        mine.sort(key=lambda item: (-costs.get(together(item.nodeid, long), 0.0), item.nodeid))
    items[:] = mine


def _larger(item: pytest.Item) -> str | None:
    """The test that this one is a part of."""
    marker = item.get_closest_marker("alternate")
    name = None if marker is None else marker.kwargs.get("within")
    file, _, own = item.nodeid.partition("::")
    return None if name is None else f"{file}::{name}{own[len(own.partition('[')[0]) :]}"


def _word(value: object) -> str:
    """A parameter as text, the same in every process: without the places of objects in memory."""
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))


def keep_week(items: list[pytest.Item], week: int) -> None:
    """Of a test that is marked `alternate("dtype")`: for all its other parameters one dtype, another each week; with
    ``weeks=2`` every other week. `alternate()`: the test as it is, every other week. `alternate(within="test_larger")`:
    not where that test of its file has the same parameters, and with them all that this one asks."""
    every_one = {item.nodeid for item in items}
    items[:] = [item for item in items if _larger(item) not in every_one]
    variants: dict[str, set[str]] = {}
    places: dict[int, tuple[str, str]] = {}
    every: dict[str, int] = {}
    for item in items:
        marker = item.get_closest_marker("alternate")
        if marker is not None and "within" not in marker.kwargs:
            given: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
            rest = {name: _word(value) for name, value in sorted(given.items()) if name not in marker.args}
            place = f"{item.nodeid.partition('[')[0]} {rest}"
            places[id(item)] = place, str([_word(given[name]) for name in marker.args])
            variants.setdefault(place, set()).add(places[id(item)][1])
            every[place] = marker.kwargs.get("weeks", 1 if marker.args else 2)
    now: dict[str, str | None] = {}
    for place, own in variants.items():
        turn, off = divmod((week + zlib.crc32(place.encode())) % (len(own) * every[place]), every[place])
        now[place] = None if off else sorted(own)[turn]
    items[:] = [i for i in items if id(i) not in places or now[places[id(i)][0]] == places[id(i)][1]]


def today() -> int:
    return int(time.time() // 86400)


def keep_day(items: list[pytest.Item], day: int) -> None:
    """Of a function that is marked `daily(N)`: every N-th of its quick tests, another N-th each day; after N days all
    had their turn. A function that has fewer than N runs whole each day; slow tests have shares of their own."""
    families: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("daily") is not None and not {"slow", "gpu"} & set(item.keywords):
            families.setdefault(item.nodeid.partition("[")[0], []).append(item)
    left = set[int]()
    for name, family in families.items():
        marker = family[0].get_closest_marker("daily")
        assert marker is not None
        (days,) = marker.args
        family.sort(key=lambda item: item.nodeid)
        if len(family) >= days:
            left |= {id(item) for i, item in enumerate(family) if (i + day + zlib.crc32(name.encode())) % days}
    items[:] = [item for item in items if id(item) not in left]


def listed(text: str) -> dict[str, float]:
    """{test's id, or a whole file: its seconds of CPU} of a list such as tests/slow.txt: seconds first, # a comment."""
    rows = (line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {name.strip(): float(seconds) for seconds, name in rows}


@functools.lru_cache(maxsize=1)
def _slow_files(text: str) -> tuple[set[str], set[str]]:
    """(files that are listed whole, files of which something is listed) of a list such as tests/slow.txt."""
    names = listed(text)
    return {name for name in names if "::" not in name}, {name.partition("::")[0] for name in names}


def cpu_seconds(root: int | None = None) -> float:
    """CPU time of this process, of its children that ended, and of its descendants that run (those on Linux alone)."""
    if root is None:
        spent = os.times()
        return spent[0] + spent[1] + spent[2] + spent[3] + cpu_seconds(os.getpid())
    total, tick = 0.0, os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100
    try:
        tasks = list(Path(f"/proc/{root}/task").iterdir())
        children = [int(pid) for task in tasks for pid in (task / "children").read_text().split()]
    except OSError:  # another system, or the process has ended
        return 0.0
    for child in children:
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(int(n) for n in fields[11:15]) / tick + cpu_seconds(child)
    return total


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1", metavar="K/N", help="one of N shares of about equal cost, 0 to N - 1")
    parser.addoption("--week", type=int, metavar="N", help="of tests that alternate, those of this week; default: all")
    parser.addoption("--day", metavar="N", help="of daily tests, those of this day, or all; default: today's")
    parser.addoption("--costs", metavar="FOLDER", help="write each test's seconds of CPU there, for ci/slow_tests.py")


def pytest_configure(config: pytest.Config) -> None:
    """The day is set once, for all processes of a run: at midnight they would draw otherwise. Who names a file asks for
    all of its tests."""
    if config.option.day is None:
        whole = config.args_source is not pytest.Config.ArgsSource.TESTPATHS
        config.option.day = "all" if whole else str(today())
    if config.option.day != "all" and not config.option.day.isdecimal():
        raise pytest.UsageError(f"--day is {config.option.day}; required: days since 1970, or all")


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.option.day != "all":
        again = f"--day {config.option.day} draws them again, --day all runs every one"
        terminalreporter.write_line(f"tests that are marked daily were drawn by date: {again}")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """A file that has none of the tests that are asked for is not imported: most of the time of collecting."""
    words = config.option.markexpr
    if collection_path.suffix != ".py" or not words.startswith(("slow", "not ")) or " or " in words:
        return None
    text = collection_path.read_text(encoding="utf-8")
    path = collection_path.relative_to(SLOW.parents[1]).as_posix()
    whole_files, files = _slow_files(SLOW.read_text())
    if words.startswith("slow"):
        return None if "mark.slow" in text or path in files else True
    whole = set(re.findall(r"\bpytest\.mark\.(\w+)", "".join(re.findall(r"^pytestmark = (.*)$", text, re.M))))
    whole |= {"slow"} if path in whole_files else set()
    return True if {f"not {mark}" for mark in whole} & set(words.split(" and ")) else None


def import_from_own_place(config: pytest.Config, worker: int, workers: int) -> None:
    """Import the files of tests, each worker from another one on. Most of the time of an import is the rewriting of its
    asserts, which is kept (`__pycache__`): so each rewrites a part, and reads what the others did. What cannot be
    imported is reported where it is collected."""
    files = sorted(path for path in SLOW.parent.rglob("test_*.py") if not pytest_ignore_collect(path, config))
    start = len(files) * worker // workers
    for path in files[start:] + files[:start]:
        folder, name = path.parent, path.stem
        while (folder / "__init__.py").exists():
            folder, name = folder.parent, f"{folder.name}.{name}"
        if str(folder) not in sys.path:
            sys.path.insert(0, str(folder))
        with contextlib.suppress(Exception, pytest.skip.Exception):
            importlib.import_module(name)


def pytest_sessionstart(session: pytest.Session) -> None:
    config = session.config
    if config.args_source is pytest.Config.ArgsSource.TESTPATHS and "PYTEST_XDIST_WORKER" in os.environ:
        worker = int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw"))
        with uncollected():
            import_from_own_place(config, worker, int(os.environ["PYTEST_XDIST_WORKER_COUNT"]))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """What is imported and drawn here stays for the session: no garbage collection looks at it, now or later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    with uncollected():
        return (yield)


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import torch

    long = listed(SLOW.read_text())
    for item in items:
        if item.nodeid in long or item.nodeid.partition("::")[0] in long:
            item.add_marker(pytest.mark.slow(listed=True))
        if item.nodeid.partition("::")[0] in long:
            item.add_marker(
                pytest.mark.xdist_group(item.nodeid.partition("::")[0])
            )  # one process makes what they share
    if config.option.day != "all":
        keep_day(items, int(config.option.day))
    if config.getoption("--week") is not None:
        keep_week(items, config.getoption("--week"))
    keep_share(items, config.getoption("--share"), long)
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no NVIDIA or AMD device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Interpreter]:
    """The session's process that interprets Triton."""
    one = Interpreter()
    yield one
    one.close()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    import torch

    # A test draws the same numbers whichever tests its process ran before. (torch.manual_seed would ask for a stack.)
    torch.default_generator.manual_seed(zlib.crc32(item.nodeid.encode()))
    folder = item.config.getoption("--costs")
    long = listed(SLOW.read_text()) if folder else {}
    if item.nodeid.partition("::")[0] in long:  # all that its file costs stands there
        folder = None
    before = cpu_seconds() if folder else 0.0
    result = yield
    if folder:
        with open(Path(folder) / f"{os.getpid()}.jsonl", "a") as file:
            own = any(mark.name == "slow" and not mark.kwargs.get("listed") for mark in item.iter_markers())
            file.write(json.dumps([item.nodeid, round(cpu_seconds() - before, 2), own]) + "\n")
    return result


def _settings_of_torch() -> dict[str, object]:
    """What a test must leave as it was: the next tests of its process would compute otherwise."""
    import torch

    return {
        "default dtype": torch.get_default_dtype(),
        "default device": torch.get_default_device(),
        "deterministic algorithms": torch.are_deterministic_algorithms_enabled(),
        "gradients": torch.is_grad_enabled(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "threads": torch.get_num_threads(),
    }


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    import torch

    before, settings = os.times(), _settings_of_torch()
    result = yield
    spent = sum(os.times()[:4]) - sum(before[:4])
    changed = _settings_of_torch()
    if changed != settings:
        torch.set_default_dtype(torch.float32)
        torch.use_deterministic_algorithms(False)
        pytest.fail(f"it leaves settings of torch changed: {changed}; required: {settings}, as it began with")
    if spent > LIMIT and not {"slow", "gpu"} & set(item.keywords):
        pytest.fail(f"it took {spent:.0f} s of CPU; a quick test has {QUICK:g}: list it (python ci/slow_tests.py)")
    return result
