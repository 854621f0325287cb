"""What a session did, test by test, as `ferryman ci run` asks for it: collected, left out, and launched on the device.

Launches are kernels that the driver reports, through PyTorch's profiler: whoever launched them, they are counted. What
became of a test is what its own call did: a plugin that reports otherwise is told, and does not count. One that calls
something else in a test's place (`pytest_pyfunc_call`) is not seen.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import sys
import unittest
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

_LAUNCHES = "ferryman: launches"
_RAN, _RAISED = "ferryman: ran", "ferryman: raised"
_REASON = 600
_ID = 2000  # characters of an id in a record
_TEST = re.compile(rb"^[ \t]*(?:(?:async[ \t]+)?def[ \t]+test|class[ \t]+Test)", re.MULTILINE)
# folders that pytest leaves out by itself: no repository's tests lie there
_FOREIGN = ("*.egg", ".*", "_darcs", "build", "CVS", "dist", "node_modules", "venv", "{arch}", "__pycache__")
_IN_WORKER = "ferryman"  # the key of what an xdist worker hands over


class Recorder:
    """A plugin of one session; `--ferryman-record FILE` registers it."""

    def __init__(self, path: Path, config: pytest.Config) -> None:
        self.path, self.config = path, config
        self.collected: dict[str, None] = {}
        self.cases: dict[str, dict[str, Any]] = {}
        self.interpreted = False

    def pytest_itemcollected(self, item: pytest.Item) -> None:
        self.collected[_shown(item.nodeid)] = None

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        self.collected |= dict.fromkeys(map(_shown, ids))

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: Any, error: Any) -> None:
        """What a worker of xdist alone saw: its tests' reports come by themselves, what it left out does not."""
        seen = getattr(node, "workeroutput", {}).get(_IN_WORKER)
        if seen is None:  # it crashed, and its test failed of that
            return
        self.collected |= dict.fromkeys(seen["collected"])
        self.interpreted |= seen["interpreted"]
        for case in seen["cases"]:
            self._set(case["id"], case["outcome"], case["reason"])

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            self._set(item.nodeid, "deselected", "by -k, -m or a plugin")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_ignore_collect(self, collection_path: Path) -> Iterator[None]:
        """Tests in files that a setting, an option or a conftest.py keeps from being collected."""
        ignored = yield
        if ignored:
            for path in self._tests_in(collection_path):
                self._collected_as(self._relative(path), "deselected", "its file was kept from being collected")
        return ignored

    def _tests_in(self, path: Path) -> Iterator[Path]:
        if not path.is_dir():
            fits = any(fnmatch.fnmatch(path.name, pattern) for pattern in self.config.getini("python_files"))
            if fits and path.suffix == ".py" and _has_tests(path):
                yield path
        elif not (_foreign(path) or path.is_symlink()):
            for inner in sorted(path.iterdir()):
                yield from self._tests_in(inner)

    def _relative(self, path: Path) -> str:
        return Path(os.path.relpath(path, self.config.rootpath)).as_posix()

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A module that cannot be imported, skips itself, or gives no test has tests that nobody sees."""
        if report.failed:
            self._collected_as(report.nodeid, "error", report.longreprtext)
        elif report.skipped:
            self._collected_as(report.nodeid, "skipped", _skip_reason(report))
        elif not report.result and report.nodeid.endswith(".py") and _has_tests(self.config.rootpath / report.nodeid):
            self._collected_as(report.nodeid, "deselected", "it defines tests, and none was collected")

    def pytest_collection_finish(self) -> None:
        if getattr(self.config.option, "lf", False):
            self._collected_as("--last-failed", "deselected", "only what failed before was collected")

    def _collected_as(self, name: str, outcome: str, reason: str) -> None:
        self.collected[_shown(name)] = None
        self._set(name, outcome, reason)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[Any]) -> Iterator[None]:
        """Notes what the call did beside what is reported of it. A raise stays noted: a run again forgets nothing."""
        raised = call.excinfo
        report: Any = yield
        raised = raised or call.excinfo  # a plugin that takes it away, or adds one
        if raised is not None:
            skips = isinstance(raised.value, (pytest.skip.Exception, unittest.SkipTest))
            note = _RAISED, f"{'skipped' if skips else 'failed'}: {raised.exconly()[-_REASON:]}"
            item.user_properties.append(note)
            report.user_properties.append(note)
        elif call.when == "call":
            report.user_properties.append((_RAN, True))
        return report

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
        if hasattr(report, "wasxfail"):
            self._set(name, "xfailed" if outcome == "skipped" else "xpassed", str(report.wasxfail))
        elif outcome == "skipped":
            self._set(name, "skipped", _skip_reason(report))
        elif outcome == "failed":
            self._set(name, "failed" if report.when == "call" else "error", report.longreprtext)
        elif outcome != "passed":  # "rerun", "retried": what passes afterwards did not pass
            self._set(name, "rerun", report.longreprtext)
        elif report.when == "call":
            self._set(name, *_passed(report))
        case = self.cases.get(_shown(name), {})
        for key, value in report.user_properties:
            if key == _LAUNCHES and case:
                case["launches"] = value
        if report.when == "call" and case:
            case["seconds"] = round(report.duration, 6)

    def _set(self, name: str, outcome: str, reason: str | None) -> None:
        """The worst that was said of a test stays: one that fails in its teardown did not pass."""
        order = ("passed", "deselected", "skipped", "xpassed", "xfailed", "rerun", "failed", "error")
        name = _shown(name)
        known = self.cases.setdefault(name, {"id": name, "outcome": outcome, "reason": None})
        if order.index(outcome) >= order.index(known["outcome"]):
            known.update(outcome=outcome, reason=None if reason is None else reason.strip()[-_REASON:])

    def pytest_sessionfinish(self) -> None:
        interpreted = self.interpreted or _interpreted()
        if hasattr(self.config, "workerinput"):  # of xdist: the controller writes
            left = [case for case in self.cases.values() if case["outcome"] == "deselected"]
            seen = {"collected": list(self.collected), "cases": left, "interpreted": interpreted}
            handed: Any = self.config
            handed.workeroutput[_IN_WORKER] = seen
            return
        counts = [case["launches"] for case in self.cases.values() if case.get("launches") is not None]
        document = {
            "kind": "ferryman-ci-tests",
            "collected": list(self.collected),
            "cases": list(self.cases.values()),
            "launches": sum(counts) if counts else None,
            "interpreted": interpreted,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


def _passed(report: Any) -> tuple[str, str | None]:
    """(outcome, reason) of a test that is reported as passed, from what its own call did."""
    raised = [str(value) for key, value in report.user_properties if key == _RAISED]
    if raised:
        what, _, text = raised[0].partition(": ")
        return "skipped" if what == "skipped" else "rerun", f"reported as passed, and it raised {text}"
    if not any(key == _RAN for key, _ in report.user_properties):
        return "skipped", "reported as passed, and nothing called it"
    return "passed", None


def _foreign(folder: Path) -> bool:
    return any(fnmatch.fnmatch(folder.name, pattern) for pattern in _FOREIGN) or (folder / "pyvenv.cfg").exists()


def _has_tests(path: Path) -> bool:
    try:
        return _TEST.search(path.read_bytes()) is not None
    except OSError:
        return False


def _shown(name: str) -> str:
    """A test's id, as a record has it: the end of one that is too long for that is a digest."""
    if len(name) <= _ID:
        return name
    return f"{name[: _ID - 20]}..{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()[:16]}"


def _skip_reason(report: Any) -> str:
    longrepr = report.longrepr
    return str(longrepr[2]) if isinstance(longrepr, tuple) and len(longrepr) == 3 else str(longrepr)


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
