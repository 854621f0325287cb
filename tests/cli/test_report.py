"""`ferryman report`: which files it writes, and what it refuses."""

from __future__ import annotations

import json
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from ferryman.porting.judging import results
from tests.cli.run import alone, ferryman
from tests.unit.documents import FULL


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "check.json"
    results.save(FULL, path)
    return path


def test_the_page_is_written_beside_the_document(saved: Path) -> None:
    done = ferryman("report", str(saved))
    page = saved.with_suffix(".html").read_text("utf-8")
    assert done.code == 0 and done.out == "" and f"wrote {saved.with_suffix('.html')}" in done.err
    assert done.err.startswith("FAIL: 2 FAIL, 1 MISTRUSTED, 1 QUARANTINED cells")
    assert page.startswith("<!DOCTYPE html>") and "last column of every row is stale" in page
    assert {p.name for p in saved.parent.iterdir()} == {"check.json", "check.html"}, "no temporary file is left"


def test_every_format_goes_where_it_is_wanted(saved: Path, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "er"
    done = ferryman(
        "report",
        str(saved),
        "--html",
        str(out / "a.html"),
        "--md",
        str(out / "a.md"),
        "--junit",
        str(out / "a.xml"),
        "--json",
    )
    summary = json.loads(done.out)
    assert summary["verdict"] == "FAIL" and summary["counts"]["FAIL"] == 2
    assert summary["written"] == [str(out / name) for name in ("a.html", "a.md", "a.xml")]
    assert (out / "a.md").read_text("utf-8").startswith("# Parity on")
    assert ET.parse(out / "a.xml").getroot().get("failures") == "2"
    assert not saved.with_suffix(".html").exists()


def test_markdown_goes_to_stdout_for_a_step_summary(saved: Path) -> None:
    done = ferryman("report", str(saved), "--md", "-")
    assert done.code == 0 and done.out.startswith("# Parity on") and done.err == ""


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--html", "{document}"), "--html is {document}; required: a file of its own, not the document itself"),
        (("--html", "{folder}/x", "--md", "{folder}/x"), "not --html"),
        (("--html", "-"), "only --md without --json goes to stdout"),
        (("--md", "-", "--json"), "only --md without --json goes to stdout"),
        (("--md", "{document}/x.md"), "choose another --md"),
    ],
)
def test_what_cannot_be_meant_is_bad_use(saved: Path, arguments: tuple[str, ...], message: str) -> None:
    names = {"document": saved, "folder": saved.parent}
    before = saved.read_bytes()
    done = ferryman("report", str(saved), *(a.format(**names) for a in arguments))
    assert done.code == 2 and message.format(**names) in done.err, done.err
    assert saved.read_bytes() == before and {p.name for p in saved.parent.iterdir()} == {"check.json"}


def test_a_newer_or_damaged_document_is_bad_use(saved: Path) -> None:
    raw = json.loads(saved.read_text("utf-8"))
    raw["schema_version"] = results.SCHEMA_VERSION + 1
    saved.write_text(json.dumps(raw))
    done = ferryman("report", str(saved))
    assert done.code == 2 and "Upgrade ferryman" in done.err
    saved.write_text("{")
    done = ferryman("report", str(saved))
    assert done.code == 2 and "is not JSON" in done.err
    assert ferryman("report", str(saved.parent / "none.json")).code == 2
    assert {p.name for p in saved.parent.iterdir()} == {"check.json"}


def test_a_missing_library_is_named(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    done = ferryman("report", str(saved))
    assert done.code == 2 and "pip install 'ferryman[report]'" in done.err
    assert {p.name for p in saved.parent.iterdir()} == {"check.json"}


def test_as_a_user_starts_it(saved: Path) -> None:
    done = alone("report", str(saved), "--html", "page.html", cwd=saved.parent)
    assert done.code == 0 and (saved.parent / "page.html").stat().st_size > 50_000, done.err
