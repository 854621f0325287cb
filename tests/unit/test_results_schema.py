"""The published schema accepts what Ferryman writes, refuses what it does not, and is documented."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from ferryman.porting.judging import results
from tests.unit.documents import FULL

ROOT = Path(__file__).resolve().parents[2]
PUBLISHED = ROOT / "docs" / "schema" / f"results-v{results.SCHEMA_VERSION}.json"


@pytest.fixture(scope="module")
def validator() -> Any:
    schema = json.loads(PUBLISHED.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    return jsonschema.Draft202012Validator(schema)


def written() -> Any:
    return json.loads(results.dumps(FULL))


def test_what_is_written_is_valid_with_its_infinities(validator: Any) -> None:
    raw = written()
    assert raw["cells"][3]["ratio"] == "Infinity" and raw["cells"][3]["worst"]["value"] == "NaN"
    assert list(validator.iter_errors(raw)) == []


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.update(schema_version=results.SCHEMA_VERSION + 1),
        lambda d: d.update(schema_version=1),
        lambda d: d.pop("schema_version"),
        lambda d: d.pop("kind"),
        lambda d: d.update(surprise=1),
        lambda d: d["cells"][0].update(verdict="GREEN"),
        lambda d: d["cells"][0].update(ratio="fast"),
        lambda d: d["cells"][0].update(op="../etc"),
        lambda d: d["cells"][0]["gates"].update(G9={"outcome": "pass"}),
        lambda d: d["cells"][0].pop("case"),
        lambda d: d["cells"][2]["worst"].pop("bound"),
    ],
)
def test_what_is_not_written_is_invalid(validator: Any, change: Any) -> None:
    raw = written()
    change(raw)
    assert list(validator.iter_errors(raw))


def test_the_published_schema_is_the_code_s() -> None:
    assert json.loads(PUBLISHED.read_text("utf-8")) == results.schema(), "run `make docs`"


def test_every_field_is_documented() -> None:
    page = (ROOT / "docs" / "results.md").read_text("utf-8")
    schema = results.schema()
    fields = set(schema["properties"]) | {name for model in schema["$defs"].values() for name in model["properties"]}
    assert sorted(name for name in fields if f"`{name}`" not in page) == []
    assert PUBLISHED.name in page


def test_a_document_of_the_first_version_still_loads() -> None:
    """One row of a run on an H200, as version 1 wrote it."""
    kept = ROOT / "tests" / "data" / "results_schema_1.json"
    assert json.loads(kept.read_text())["schema_version"] == 1
    assert len(results.load(kept).cells) > 40


def test_the_published_runs_load_and_what_failed_in_the_first_is_green_in_the_second(tmp_path: Path) -> None:
    """What was wrong in the first is mended, and the second is of the code since."""
    document = tmp_path / "check.json"
    runs = []
    for name in ("check", "check-second", "check-third", "check-fourth"):
        kept = ROOT / "benchmarks" / "results" / "h200" / f"{name}.json.gz"
        document.write_bytes(gzip.decompress(kept.read_bytes()))
        runs.append(results.load(document))
        assert runs[-1].environment.device_name == "NVIDIA H200"
    published, *later = runs
    assert not any(results.failed(run) for run in later)
    failed, right = (
        {(c.op, c.implementation, c.dtype, c.case) for c in run.cells if c.verdict == verdict}
        for run, verdict in ((published, "FAIL"), (later[0], "PASS"))
    )
    assert failed and failed <= right
    assert not any(c.verdict in ("MISTRUSTED", "QUARANTINED") for c in published.cells)
    passed = {c.op for c in published.cells if c.verdict == "PASS"}
    assert passed == {c.op for c in published.cells} and len(passed) >= 23, "an op that came later is in the next run"
