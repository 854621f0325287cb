"""What every test shares: no settings from outside, few threads, `gpu` tests only where there is a device; and what is
quick: a test that costs more CPU time than the quick ones have is listed in tests/slow.txt, and is `slow` by that."""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator
from pathlib import Path

import pytest

for _name in [n for n in os.environ if n.startswith("FERRYMAN_")]:
    del os.environ[_name]  # before ferryman is imported: a developer's settings must not change a test
os.environ["FERRYMAN_LOCKFILE"] = "none"  # nor what was measured on the device here

# Some virtual machines list AMX and refuse its instructions: oneDNN's bfloat16 products then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch  # noqa: E402

from tests.interpreter import Interpreter  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores; more threads make each other wait
    torch.set_num_threads(1)


SLOW = Path(__file__).with_name("slow.txt")
QUICK = 2.0  # seconds of CPU that a quick test may take; `python ci/slow_tests.py` lists what takes more
LIMIT = 120.0  # beyond this one that is not listed fails: who comes first pays for what a process keeps


def keep_share(items: list[pytest.Item], share: str) -> None:
    """Leave the tests of one share; every test is in one of the N."""
    turn, turns = (int(part) for part in share.split("/"))
    if not 0 <= turn < turns:
        raise pytest.UsageError(f"--share is {share}; required: K/N with 0 <= K < N")
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % turns == turn]


def listed(text: str) -> dict[str, float]:
    """{test's id, or a whole file: its seconds of CPU} of a list such as tests/slow.txt: seconds first, # a comment."""
    rows = (line.split(maxsplit=1) for line in text.splitlines() if line.strip() and not line.startswith("#"))
    return {name.strip(): float(seconds) for seconds, name in rows}


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
    parser.addoption("--share", default="0/1", metavar="K/N", help="of the tests every N-th, drawn by name, from K on")
    parser.addoption("--costs", metavar="FOLDER", help="write each test's seconds of CPU there, for ci/slow_tests.py")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what is marked
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    long = listed(SLOW.read_text())
    for item in items:
        if item.nodeid in long or item.nodeid.partition("::")[0] in long:
            item.add_marker(pytest.mark.slow)
    keep_share(items, config.getoption("--share"))
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
    folder = item.config.getoption("--costs")
    if "slow" in item.keywords and item.nodeid not in listed(SLOW.read_text()):  # its source or its file says so
        folder = None
    before = cpu_seconds() if folder else 0.0
    result = yield
    if folder:
        with open(Path(folder) / f"{os.getpid()}.jsonl", "a") as file:
            file.write(json.dumps([item.nodeid, round(cpu_seconds() - before, 2)]) + "\n")
    return result


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    before = os.times()
    result = yield
    spent = sum(os.times()[:4]) - sum(before[:4])
    if spent > LIMIT and not {"slow", "gpu"} & set(item.keywords):
        pytest.fail(f"it took {spent:.0f} s of CPU; a quick test has {QUICK:.0f}: list it (python ci/slow_tests.py)")
    return result
