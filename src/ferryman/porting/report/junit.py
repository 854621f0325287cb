"""A result document as JUnit XML. Only PASS is a passed test; what was simulated or did not run is skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferryman.errors import BackendUnavailable
from ferryman.porting.report.markdown import MEANING
from ferryman.porting.results import Cell, Results

if TYPE_CHECKING:
    from junitparser import TestCase


def junit(document: Results) -> str:
    """JUnit XML text. Raises BackendUnavailable without junitparser, which the extra ``report`` brings."""
    try:
        from junitparser import JUnitXml, TestSuite
    except ImportError as error:
        raise BackendUnavailable("junitparser is not installed; pip install 'ferryman[report]'") from error
    xml = JUnitXml("ferryman check")
    for op in dict.fromkeys(cell.op for cell in document.cells):
        suite = TestSuite(op)
        suite.add_property("device", document.environment.device_name or document.environment.device)
        suite.add_property("profile", document.environment.profile)
        suite.add_testcases([_case(cell) for cell in document.cells if cell.op == op])
        xml.add_testsuite(suite)
    xml.update_statistics()
    text = xml.tostring()
    return text.decode() if isinstance(text, bytes) else str(text)


def _case(cell: Cell) -> TestCase:
    from junitparser import Error, Failure, Skipped, TestCase

    case = TestCase(f"{cell.case}[{cell.dtype}]", f"{cell.op}.{cell.implementation}", cell.seconds)
    message = _plain(f"{cell.verdict}: {cell.reason or MEANING[cell.verdict]}")
    if cell.verdict == "FAIL":
        case.result = [Failure(message, "FAIL")]
    elif cell.verdict in ("MISTRUSTED", "QUARANTINED"):
        case.result = [Error(message, cell.verdict)]
    elif cell.verdict != "PASS":
        case.result = [Skipped(message, cell.verdict)]
    return case


def _plain(text: str) -> str:
    """Without control characters, which XML 1.0 cannot hold (a compiler's log has escapes)."""
    return "".join(c if c.isprintable() else " " for c in text)
