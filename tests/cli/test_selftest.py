"""`ferryman selftest`: what it prints, and when it exits with 1 or 2."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ferryman import files
from ferryman.cli import documents
from ferryman.porting.selftest import runner
from tests.cli.run import ferryman

QUICK = ("selftest", "--device", "cpu", "--op", "softmax", "--edits", "1", "--sample", "20", "--honest", "20")


@pytest.fixture(autouse=True)
def no_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker has tests of its own; here it would only take its 5 s to start."""
    monkeypatch.setattr(runner, "_triton", lambda place, profile: "left out by the test")


def test_the_score_is_printed_beside_other_rules(tmp_path: Path) -> None:
    done = ferryman(*QUICK, "--out", str(tmp_path / "score.md"))
    assert done.code == 0, done.out
    rows = [line for line in done.out.splitlines() if "%" in line]
    assert rows[0].startswith("ferryman") and "torch.allclose" in rows[1] and "twice" in rows[3]
    assert "gates that failed" in done.out
    assert "not run" in done.out and "left out by the test" in done.out
    tables = (tmp_path / "score.md").read_text("utf-8").splitlines()
    caught = next(line for line in tables if line.startswith("| ferryman |")).split("|")
    assert int(caught[2]) > 5 and caught[3:5] == [" 100.0% ", " 0 "]
    fates = [[int(n) for n in line.split("|")[2:6]] for line in tables[tables.index("|---|---|---|---|---|") + 1 :]]
    assert sum(map(sum, fates)) == 20 and sum(f[0] for f in fates) == int(caught[2])


def test_the_document_is_json_and_can_be_written(tmp_path: Path) -> None:
    done = ferryman(*QUICK, "--json", "--out", str(tmp_path / "score.json"))
    assert done.code == 0
    document = json.loads(done.out)
    assert document["mutants"]["caught"] == document["mutants"]["non_equivalent"] > 5
    assert set(document["mutants"]) == {"caught", "non_equivalent", "by_gate"}
    assert document["false_alarms"] == 0 and document["honest_runs"] >= 18
    assert json.loads((tmp_path / "score.json").read_text("utf-8")) == document


def test_a_document_whose_name_ends_with_gz_is_packed(tmp_path: Path) -> None:
    packed, plain = tmp_path / "score.json.gz", tmp_path / "score.json"
    for path in (packed, plain):
        documents.write(path, '{"kind": 1}')
    assert packed.read_bytes().startswith(b"\x1f\x8b") and files.document(packed) == {"kind": 1}
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes() == b'{"kind": 1}\n'
    before = packed.read_bytes()
    documents.write(packed, '{"kind": 1}')
    assert packed.read_bytes() == before


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "sofmax"), "nearest: softmax"),
        (("--device", "toaster"), "toaster"),
        (("--honest", "-1"), "0 or more"),
        (("--edits", "-1"), "greater than or equal to 0"),
    ],
)
def test_bad_use_is_one_line(arguments: tuple[str, ...], message: str) -> None:
    done = ferryman("selftest", "--quick", *arguments)
    assert done.code == 2 and message in done.err and "Traceback" not in done.err


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    done = ferryman(*QUICK, "--out", str(tmp_path))
    assert done.code == 2 and "a folder" in done.err, "before anything runs"
    (tmp_path / "file").write_text("")
    done = ferryman(*QUICK, "--out", str(tmp_path / "file" / "score.json"))
    assert done.code == 2 and "cannot be written" in done.err
