"""What became of a test is what its own call did: plugins, options and settings that say otherwise are found out."""

from __future__ import annotations

import json
from typing import Any

import pytest

import ferryman  # noqa: F401 - sessions in this process find it loaded
from tests.sessions import imports_stay, run_inside  # noqa: F401

pytest_plugins = "pytester"
SUITE = """
import pytest

def test_right(): pass

def test_other(): pass

def test_skips(): pytest.skip("no device")

def test_wrong(): assert False
"""
AS_PASSED = """
import pytest

@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if call.excinfo is not None:
        report.outcome, report.longrepr = "passed", None
    return report
"""
FORGOTTEN = """
def pytest_runtest_makereport(item, call):
    call.excinfo = None
"""
ALTERED = """
import pytest

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_logreport(report):
    report.outcome, report.longrepr = "passed", None
"""
INVENTED = """
from _pytest.reports import TestReport

def pytest_runtest_protocol(item, nextitem):
    for when in ("setup", "call", "teardown"):
        report = TestReport(item.nodeid, item.location, {}, "passed", None, when)
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
AGAIN = """
import pytest

runs = {}

@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    from _pytest.runner import runtestprotocol
    if item.name != "test_flaky":
        return None
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        pass
    for report in runtestprotocol(item, nextitem=nextitem, log=False):
        item.ihook.pytest_runtest_logreport(report=report)
    return True
"""
FLAKY = "runs = []\n\ndef test_flaky():\n    runs.append(1)\n    assert len(runs) > 1\n"
RETRIED = """
from _pytest.reports import TestReport

def pytest_runtest_logstart(nodeid, location):
    import conftest
    report = TestReport(nodeid, location, {}, "retried", "AssertionError", "call")
    conftest.CONFIG.hook.pytest_runtest_logreport(report=report)

def pytest_report_teststatus(report):
    if report.outcome == "retried":
        return "retried", "R", "RETRY"

def pytest_configure(config):
    import conftest
    conftest.CONFIG = config
"""


def recorded(pytester: pytest.Pytester, *arguments: str, **files: str) -> tuple[dict[str, str], dict[str, Any]]:
    """(outcome by the name of the test, the whole document) of a session."""
    conftest = files.pop("conftest", "")
    pytester.makeconftest(conftest)
    pytester.makepyfile(**files)
    plugins = ("-p", "no:hypothesispytest", "-p", "no:randomly", "--ferryman-record=tests.json")
    own = () if _installed() else ("-p", "pytest_ferryman")
    run_inside(pytester, *own, *plugins, *arguments)
    document = json.loads((pytester.path / "tests.json").read_text())
    return {case["id"].rpartition("::")[2]: case["outcome"] for case in document["cases"]}, document


def _installed() -> bool:
    from importlib import metadata

    return any(entry.name == "pytest_ferryman" for entry in metadata.entry_points(group="pytest11"))


@pytest.mark.parametrize("conftest", [AS_PASSED, ALTERED, FORGOTTEN], ids=["made", "altered", "forgotten"])
def test_a_plugin_that_says_passed_of_what_raised(pytester: pytest.Pytester, conftest: str) -> None:
    outcomes, document = recorded(pytester, conftest=conftest, test_it=SUITE)
    assert outcomes == {"test_right": "passed", "test_other": "passed", "test_skips": "skipped", "test_wrong": "rerun"}
    reasons = [case["reason"] or "" for case in document["cases"]]
    assert any("reported as passed, and it raised Skipped: no device" in reason for reason in reasons)


def test_a_plugin_that_invents_reports(pytester: pytest.Pytester) -> None:
    outcomes, document = recorded(pytester, conftest=INVENTED, test_it=SUITE)
    assert set(outcomes.values()) == {"skipped"} and len(outcomes) == 4
    assert "nothing called it" in document["cases"][0]["reason"]


def test_a_plugin_that_runs_again_and_tells_the_last(pytester: pytest.Pytester) -> None:
    outcomes, _ = recorded(pytester, conftest=AGAIN, test_it=FLAKY)
    assert outcomes == {"test_flaky": "rerun"}


def test_an_outcome_of_another_name_is_a_run_again(pytester: pytest.Pytester) -> None:
    outcomes, _ = recorded(pytester, conftest=RETRIED, test_it="def test_a(): pass\n")
    assert outcomes == {"test_a": "rerun"}


def test_what_xdist_s_workers_leave_out(pytester: pytest.Pytester) -> None:
    outcomes, document = recorded(pytester, "-n", "1", "-k", "right", test_it=SUITE)
    assert outcomes == {n: "passed" if n == "test_right" else "deselected" for n in outcomes} and len(outcomes) == 4
    assert len(document["collected"]) == 4


@pytest.mark.parametrize(
    ("arguments", "conftest"),
    [
        (("--ignore", "test_hard.py"), ""),
        (("--ignore-glob", "*hard*"), ""),
        ((), "collect_ignore = ['test_hard.py']\n"),
        (("-n", "1", "--ignore", "test_hard.py"), ""),
        ((), "def pytest_pycollect_makeitem(name):\n    return [] if name == 'test_hard' else None\n"),
    ],
)
def test_a_file_that_is_kept_from_being_collected(
    pytester: pytest.Pytester, arguments: tuple[str, ...], conftest: str
) -> None:
    outcomes, document = recorded(
        pytester,
        *arguments,
        conftest=conftest,
        test_easy="def test_easy(): pass\n",
        test_hard="def test_hard(): pass\n",
        test_none="VALUES = [1]\n",
    )
    assert outcomes == {"test_easy": "passed", "test_hard.py": "deselected"}
    assert sorted(document["collected"]) == ["test_easy.py::test_easy", "test_hard.py"]


def test_a_folder_that_is_kept_from_being_collected(pytester: pytest.Pytester) -> None:
    pytester.makeini("[pytest]\nnorecursedirs = gpu .* build\n")
    for name in ("gpu/deep", "build", ".hidden"):
        folder = pytester.path / name
        folder.mkdir(parents=True)
        (folder / "test_there.py").write_text("def test_there(): pass\n")
    outcomes, _ = recorded(pytester, test_easy="def test_easy(): pass\n")
    assert outcomes == {"test_easy": "passed", "gpu/deep/test_there.py": "deselected"}


def test_only_what_failed_before(pytester: pytest.Pytester) -> None:
    files = {"test_one": "def test_a(): assert 0\n\ndef test_b(): pass\n", "test_two": "def test_c(): pass\n"}
    recorded(pytester, **files)
    files["test_one"] = files["test_one"].replace("assert 0", "pass  ")
    outcomes, _ = recorded(pytester, "--lf", **files)
    assert outcomes["--last-failed"] == "deselected" and outcomes["test_a"] == "passed"


def test_parts_of_tests_count_with_them(pytester: pytest.Pytester) -> None:
    """unittest's subTest, and skips and expected failures of unittest."""
    body = """
    import unittest

    class TestIt(unittest.TestCase):
        def test_parts(self):
            for i in range(2):
                with self.subTest(i=i):
                    self.assertEqual(i, i)
        @unittest.skip("no device")
        def test_left(self): pass
        def test_leaves(self): self.skipTest("no device")
        @unittest.expectedFailure
        def test_expected(self): self.fail()
    """
    outcomes, _ = recorded(pytester, test_it=body)
    expected = {"test_parts": "passed", "test_left": "skipped", "test_leaves": "skipped", "test_expected": "xfailed"}
    assert outcomes == expected


def test_ids_of_any_length_are_kept_apart(pytester: pytest.Pytester) -> None:
    body = """
    import pytest

    @pytest.mark.parametrize("s", [1, 2], ids=["x" * 5000 + "a", "x" * 5000 + "b"])
    def test_it(s): pass
    """
    _, document = recorded(pytester, test_it=body)
    ids = [case["id"] for case in document["cases"]]
    assert len(set(ids)) == 2 and document["collected"] == ids and all(len(name) <= 2000 for name in ids)
