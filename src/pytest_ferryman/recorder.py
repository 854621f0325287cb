"""What a session did, test by test, as `ferryman ci run` asks for it: collected, left out, and launched on the device.

Launches are kernels that the driver reports, through PyTorch's profiler: whoever launched them, they are counted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_LAUNCHES = "ferryman: launches"
_REASON = 600


class Recorder:
    """A plugin of one session; `--ferryman-record FILE` registers it."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path, self.config = path, config
        self.collected: list[str] = []
        self.cases: dict[str, dict[str, Any]] = {}

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.collected.append(item.nodeid)

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected += [name for name in ids if name not in set(self.collected)]

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            self._set(item.nodeid, "deselected", "by -k, -m or a plugin")

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported, or skips itself, has tests that nobody sees."""
        if report.failed:
            self._collected_as(report.nodeid, "error", report.longreprtext)
        elif report.skipped:
            self._collected_as(report.nodeid, "skipped", _skip_reason(report))

    def _collected_as(self, name: str, outcome: str, reason: str) -> None:
        self.collected.append(name)
        self._set(name, outcome, reason)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Iterator[None]:
        if not self.config.getoption("--ferryman-launches"):
            yield
            return
        counted = _Counted()
        with counted:
            yield
        if counted.launches is not None:
            item.user_properties.append((_LAUNCHES, counted.launches))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        name, outcome = report.nodeid, str(report.outcome)
        if outcome == "rerun":  # pytest-rerunfailures: what passes afterwards did not pass
            self._set(name, "rerun", report.longreprtext)
        elif hasattr(report, "wasxfail"):
            self._set(name, "xfailed" if outcome == "skipped" else "xpassed", str(report.wasxfail))
        elif outcome == "skipped":
            self._set(name, "skipped", _skip_reason(report))
        elif outcome == "failed":
            self._set(name, "failed" if report.when == "call" else "error", report.longreprtext)
        elif report.when == "call":
            self._set(name, "passed", None)
        for key, value in report.user_properties:
            if key == _LAUNCHES and name in self.cases:
                self.cases[name]["launches"] = value
        if report.when == "call" and name in self.cases:
            self.cases[name]["seconds"] = round(report.duration, 6)

    def _set(self, name: str, outcome: str, reason: str | None) -> None:
        """The worst that was said of a test stays: one that fails in its teardown did not pass."""
        order = ("passed", "deselected", "skipped", "xpassed", "xfailed", "rerun", "failed", "error")
        known = self.cases.setdefault(name, {"id": name, "outcome": outcome, "reason": None})
        if order.index(outcome) >= order.index(known["outcome"]):
            known.update(outcome=outcome, reason=None if reason is None else reason.strip()[-_REASON:])

    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):  # xdist: the controller hears of everything
            return
        counts = [case["launches"] for case in self.cases.values() if case.get("launches") is not None]
        made = {
            "kind": "ferryman-ci-tests",
            "collected": list(dict.fromkeys(self.collected)),
            "cases": list(self.cases.values()),
            "launches": sum(counts) if counts else None,
            "interpreted": _interpreted(),
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def _skip_reason(report: Any) -> str:
    found = report.longrepr
    return str(found[2]) if isinstance(found, tuple) and len(found) == 3 else str(found)


def _interpreted() -> bool:
    if "torch" not in sys.modules:
        return os.environ.get("TRITON_INTERPRET", "0") == "1"
    from ferryman.backends.triton import interpreting

    return interpreting()


class _Counted:
    """Kernels that the device runs inside the block; None where there is no device, or another profiler."""

    def __init__(self) -> None:
        self.launches: int | None = None
        self._profiler: Any = None

    def __enter__(self) -> _Counted:
        import torch

        if torch.cuda.is_available():
            try:
                self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA])
                self._profiler.__enter__()
            except RuntimeError:  # the test above has one of its own
                self._profiler = None
        return self

    def __exit__(self, *exception: Any) -> None:
        if self._profiler is None:
            return
        import torch

        try:
            torch.cuda.synchronize()
        except RuntimeError:  # the test lost the device, which is its own failure
            return
        finally:
            self._profiler.__exit__(None, None, None)
        kinds = self._profiler.profiler.kineto_results.events()
        self.launches = sum(_kernel(event) for event in kinds)


def _kernel(event: Any) -> bool:
    """Kernels, and not copies or fills, which a test that tests nothing makes too."""
    if "CUDA" not in str(event.device_type()):
        return False
    name = str(event.name()).lower()
    return not name.startswith(("memcpy", "memset", "copydevice", "copyhost", "fillbuffer", "__amd_rocclr"))
