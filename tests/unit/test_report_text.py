"""Markdown and JUnit: they fit where CI shows them, count what they leave out, and say what failed and why."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET

import pytest

from ferryman.errors import BackendUnavailable
from ferryman.porting.judging.results import WorstElement
from ferryman.porting.report import junit, markdown
from ferryman.porting.report.markdown import LIMIT
from ferryman.porting.report.text import away, element, seconds
from tests.unit.documents import FULL, HOSTILE, cell, document, right, stale


def test_markdown_names_gate_element_and_pattern_of_a_failure() -> None:
    text = markdown(FULL)
    line = next(line for line in text.splitlines() if "case `ragged`" in line)
    for words in (
        "FAIL. G2: y[3, 127] is 1.5, expected 1.25 within 0.00309",
        "fails G2 (componentwise), G3 (noise)",
        "**last column of every row is stale**",
    ):
        assert words in line, words
    other = markdown(document(stale(reason="G3: too loud")))
    assert "worst y[3, 127] is 1.5, expected 1.25, bound 0.00309, error 81 bounds" in other
    assert text.startswith("# Parity on ") and "\n**FAIL**. 7 op x implementation rows: " in text


def test_markdown_counts_gates_and_says_why_one_does_not_apply() -> None:
    text = markdown(FULL)
    assert "| op | implementation | G0 structure | G2 componentwise | G3 noise | G5 hygiene |" in text
    assert "| `rms_norm` | torch | 1 **FAIL**, 3 pass | 1 **FAIL**, 2 pass | 1 **FAIL**, 2 n/a | 2 pass |" in text
    assert "- G3, 3 cells: too few finite elements for a confidence interval (256)" in text
    assert "- hip: UNIMPLEMENTED, 1 cells: x.stride[-1] is 2" in text
    assert "- **contradicted**: numerics.fp8.bits is stated as 14, measured 24. at K = 32" in text
    assert "- definition: COMPILED_ONLY, 1 cells: for gfx942" in text


@pytest.mark.parametrize("limit", [LIMIT, 20_000])
def test_markdown_fits_a_step_summary_and_counts_what_it_leaves_out(limit: int) -> None:
    cells = [stale(op=f"op_{i % 5_000}", case="é" * 200, reason="è" * 900, reading="ê" * 300) for i in range(12_000)]
    cells += [cell("NOT_RUN", op="other", implementation="hip", reason=f"{'à' * 500} {i}") for i in range(3_000)]
    text = markdown(document(*cells), limit)
    assert len(text.encode()) <= limit
    listed = sum(1 for line in text.splitlines() if line.startswith("- `op_"))
    left = [(int(a), int(b)) for a, b in re.findall(r"And (\d+) more wrong cells of (\d+)", text)]
    assert left == [(12_000 - listed, 12_000)]
    rows = text[: text.index("## Gates")].count("\n| `o")
    omitted = re.findall(r"And (\d+) more rows of (\d+)", text[: text.index("## Gates")])
    assert omitted == ([(str(5_001 - rows), "5001")] if rows < 5_001 else [])
    assert "more reasons of 3000" in text
    assert text.startswith("# Parity") and "| op | implementation | verdict |" in text


def test_every_op_has_its_turn_among_the_failures() -> None:
    cells = [stale(case=f"c{i}") for i in range(100)] + [stale(op="softmax", case="the other")]
    assert "case `the other`" in markdown(document(*cells))


def test_markdown_keeps_a_document_s_text_in_its_place() -> None:
    evil = [stale(case=HOSTILE, reason=HOSTILE, reading=HOSTILE), cell("NOT_RUN", op="softmax", reason=HOSTILE)]
    text = markdown(document(*evil))
    assert not set(text) & {"\x1b", "\x00", "\u202e"}
    outside = re.sub(r"(?<!\\)`[^`]*`", "", text)  # in a code span all text is text
    assert "alert('x')" in outside and "<script" not in outside and "](http" not in outside
    assert [line for line in text.splitlines() if line.startswith("# ")] == [text.splitlines()[0]]
    for line in text.splitlines():
        if line.startswith("| `"):
            assert line.replace("\\|", "").count("|") in (9, 10, 6, 5), line


def test_junit_gives_gate_element_and_pattern_of_a_failure() -> None:
    root = ET.fromstring(junit(FULL))
    cases = {(c.get("classname"), c.get("name")): c for c in root.iter("testcase")}
    failure = next(cases["rms_norm.torch", "ragged[float32]"].iter("failure"))
    assert failure.get("message") == "FAIL: G2: y[3, 127] is 1.5, expected 1.25 within 0.00309: 81 bounds away"
    assert (failure.text or "").splitlines() == [
        "G2 componentwise: y[3, 127] is 1.5",
        "G3 noise: RMS error is 9.5 times what is allowed",
        "worst element: y[3, 127] is 1.5, expected 1.25, bound 0.00309, error 81 bounds",
        "reading: last column of every row is stale",
    ]
    skipped = [key for key, c in cases.items() if c.find("skipped") is not None]
    assert len(skipped) == 5, "NOT_RUN, UNIMPLEMENTED, COMPILED_ONLY and SIMULATED are no passed tests"
    errors = [c.find("error") for c in cases.values() if c.find("error") is not None]
    assert len(errors) == 2 and root.get("failures") == "2" and root.get("errors") == "2"
    assert root.get("skipped") == "5" and root.get("tests") == str(len(FULL.cells))
    assert sum(1 for c in cases.values() if not list(c)) == 2 == sum(c.verdict == "PASS" for c in FULL.cells)


def test_junit_holds_hostile_text() -> None:
    text = junit(document(stale(case=HOSTILE, reason=HOSTILE, reading=HOSTILE), right(case=HOSTILE)))
    cases = list(ET.fromstring(text).iter("testcase"))
    assert len(cases) == 2 and "<script>alert('x')</script>" in (cases[0].get("name") or "")


def test_junit_without_its_library_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "junitparser", None)
    with pytest.raises(BackendUnavailable, match=r"ferryman\[report\]"):
        junit(FULL)


def test_an_error_is_told_in_bounds_where_it_is_a_number() -> None:
    nan, inf = float("nan"), float("inf")
    assert away(WorstElement(output="y", index=[0], value=2.0, expected=1.0, bound=0.5)) == 2
    assert away(WorstElement(output="y", index=[0], value=1.0, expected=1.0, bound=0.0)) == 0
    assert away(WorstElement(output="y", index=[], value=2.0, expected=1.0, bound=0.0)) == inf
    assert "error not finite" in element(WorstElement(output="y", index=[], value=nan, expected=1.0, bound=0.1))
    assert [seconds(s) for s in (2.0, 2e-3, 2e-5, 2e-8)] == ["2 s", "2 ms", "20 us", "20 ns"]
