"""What every test shares: no settings from outside, few threads, `gpu` tests only where there is a device."""

from __future__ import annotations

import os
import zlib

import pytest

for _name in [n for n in os.environ if n.startswith("FERRYMAN_")]:
    del os.environ[_name]  # before ferryman is imported: a developer's settings must not change a test
os.environ["FERRYMAN_LOCKFILE"] = "none"  # nor what was measured on the device here

# Some virtual machines list AMX and refuse its instructions: oneDNN's bfloat16 products then end the process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

import torch  # noqa: E402

if "PYTEST_XDIST_WORKER" in os.environ:  # the processes share the cores; more threads make each other wait
    torch.set_num_threads(1)


def keep_share(items: list[pytest.Item], share: str) -> None:
    """Leave the tests of one share; every test is in one of the N."""
    turn, turns = (int(part) for part in share.split("/"))
    if not 0 <= turn < turns:
        raise pytest.UsageError(f"--share is {share}; required: K/N with 0 <= K < N")
    items[:] = [item for item in items if zlib.crc32(item.nodeid.encode()) % turns == turn]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--share", default="0/1", metavar="K/N", help="of the tests every N-th, drawn by name, from K on")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    keep_share(items, config.getoption("--share"))
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="torch sees no NVIDIA or AMD device")
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(skip)
