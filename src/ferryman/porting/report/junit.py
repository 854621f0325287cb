"""A result document as JUnit XML. Only PASS is a passed test; what was simulated or did not run is skipped."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ferryman.errors import BackendUnavailable
from ferryman.porting.judging.results import Cell, Results
from ferryman.porting.report.text import GATES, MEANING, WRONG, element, failed_gates, plain

if TYPE_CHECKING:
    from junitparser import TestCase


def junit(document: Results) -> str:
    """JUnit XML text. Raises BackendUnavailable without junitparser, which the extra ``report`` brings."""
    try:
        from junitparser import JUnitXml, TestSuite
    except ImportError as error:
        raise BackendUnavailable("junitparser is not installed; pip install 'ferryman[report]'") from error
    xml = JUnitXml("ferryman check")
    cells: dict[str, list[Cell]] = {}
    for cell in document.cells:
        cells.setdefault(cell.op, []).append(cell)
    for op, mine in cells.items():
        suite = TestSuite(op)
        suite.add_property("device", plain(document.environment.device_name or document.environment.device))
        suite.add_property("profile", plain(document.environment.profile))
        suite.add_testcases([_case(cell) for cell in mine])
        xml.add_testsuite(suite)
    xml.update_statistics()
    text = xml.tostring()
    return text.decode() if isinstance(text, bytes) else str(text)


def _case(cell: Cell) -> TestCase:
    from junitparser import Error, Failure, Skipped, TestCase

    case = TestCase(plain(f"{cell.case}[{cell.dtype}]"), f"{cell.op}.{cell.implementation}", cell.seconds)
    message = plain(f"{cell.verdict}: {cell.reason or MEANING[cell.verdict]}")
    if cell.verdict == "FAIL":
        case.result = [Failure(message, "FAIL")]
    elif cell.verdict in ("MISTRUSTED", "QUARANTINED"):
        case.result = [Error(message, cell.verdict)]
    elif cell.verdict != "PASS":
        case.result = [Skipped(message, cell.verdict)]
    if cell.verdict in WRONG:
        case.result[0].text = "\n".join(_details(cell))
    return case


def _details(cell: Cell) -> list[str]:
    """Every gate that does not hold, the worst element and what the pattern looks like."""
    lines = [plain(f"{name} {GATES[name][0]}: {gate.reason or 'does not hold'}") for name, gate in failed_gates(cell)]
    if not lines:
        lines.append(plain(cell.reason or MEANING[cell.verdict]))
    if cell.worst is not None:
        lines.append(plain(f"worst element: {element(cell.worst)}"))
    if cell.reading:
        lines.append(plain(f"reading: {cell.reading}"))
    return lines
