"""`ferryman check`: what it prints and writes, and when it exits with 1."""

from __future__ import annotations

import functools
import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.cli import check_model
from ferryman.dispatch import registry
from ferryman.porting.judging import results
from ferryman.porting.model.results import ModelResult
from ferryman.porting.running import runner
from ferryman.porting.running.cells import tier_cases
from tests.cli.run import ferryman

QUICK = ("check", "--device", "cpu", "--op", "softmax", "--dtype", "f32", "--backend", "torch")
no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the backend must not be usable here")


def test_a_check_prints_a_table_and_writes_four_documents(tmp_path: Path) -> None:
    done = ferryman(*QUICK, "--backend", "definition", "--out", str(tmp_path / "deep" / "out"))
    assert done.code == 0, done.out
    rows = [line.split() for line in done.out.splitlines() if line.startswith("softmax")]
    assert [row[:3] for row in rows] == [["softmax", "torch", "PASS"], ["softmax", "definition", "PASS"]]
    assert "f32 error" in done.out and "f16 error" not in done.out
    folder = tmp_path / "deep" / "out"
    assert {p.name for p in folder.iterdir()} == {"check.json", "check.md", "check.xml", "check.html"}
    document = results.load(folder / "check.json")
    assert {c.implementation for c in document.cells} == {"torch", "definition"}
    assert all(c.verdict == "PASS" and c.ratio is not None for c in document.cells if not c.case.startswith("empty"))
    suites = ET.parse(folder / "check.xml").getroot()
    assert int(suites.attrib["tests"]) == len(document.cells) and suites.attrib["failures"] == "0"
    assert "| `softmax` | torch | PASS |" in (folder / "check.md").read_text("utf-8")
    assert done.err.startswith("wrote ")


def test_json_is_the_document_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    done = ferryman(*QUICK, "--json")
    document = json.loads(done.out)
    assert done.code == 0 and done.err == "" and list(tmp_path.iterdir()) == []
    results.parse(document)
    for cell in document["cells"]:
        assert {"op", "implementation", "device", "dtype", "case", "verdict", "gates"} <= set(cell)
        assert {"ratio", "seconds"} <= set(cell) or cell["verdict"] != "PASS" or cell["case"].startswith("empty")


def test_documents_go_to_a_folder_of_their_own_by_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert ferryman(*QUICK).code == 0
    assert {p.name for p in (tmp_path / ".ferryman").iterdir()} == {"check.json", "check.md", "check.xml", "check.html"}


def test_a_wrong_kernel_is_exit_code_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = registry.launcher

    def launcher(line: Any) -> Any:
        kernel = right(line)
        return (lambda *args: kernel(*args) * 1.01) if line.backend == "torch" else kernel

    monkeypatch.setattr(registry, "launcher", launcher)
    done = ferryman(*QUICK, "--backend", "definition", "--out", str(tmp_path))
    assert done.code == 1
    assert [line.split()[2] for line in done.out.splitlines() if line.startswith("softmax")] == ["FAIL", "PASS"]
    assert "FAIL softmax torch float32 prime: G2: y[" in done.out
    assert int(ET.parse(tmp_path / "check.xml").getroot().attrib["failures"]) > 0


def test_an_interrupted_check_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user stops it after ten cells; the interpreter's process is at work, too."""
    whole = runner.check_op

    def stopping(*args: Any, **options: Any) -> Iterator[results.Cell]:
        for count, cell in enumerate(whole(*args, **options)):
            if count == 10:
                raise KeyboardInterrupt
            yield cell

    monkeypatch.setattr(runner, "check_op", stopping)
    done = ferryman(*QUICK, "--backend", "definition", "--backend", "triton", "--out", str(tmp_path))
    assert done.code == 130 and "interrupted" in done.err
    document = results.load(tmp_path / "check.json")
    judged = [c for c in document.cells if c.verdict == "PASS"]
    left = {c.implementation: c for c in document.cells if c.reason == runner.INTERRUPTED}
    assert len(judged) == 10 and {c.implementation for c in judged} == {"torch", "definition"}
    assert left.keys() == {"torch", "definition", "triton.rows", "triton.long"} and all(
        c.verdict == "NOT_RUN" for c in left.values()
    )
    many = len(tier_cases(registry.primitive("softmax"), "small"))
    assert left["torch"].case == f"{many - 5} of {many} cases"


@no_gpu
def test_nothing_ran_is_not_a_success() -> None:
    done = ferryman("check", "--op", "rms_norm", "--backend", "cuda", "--device", "cpu", "--json")
    assert done.code == 1
    assert {c["verdict"] for c in json.loads(done.out)["cells"]} == {"NOT_RUN"}
    assert "nothing ran, so nothing is shown to be right" in done.err


def test_a_folder_that_cannot_be_made_is_bad_use(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = ferryman(*QUICK, "--out", str(tmp_path / "file" / "out"))
    assert done.code == 2 and "choose another --out" in done.err


@functools.cache
def _model_run(folder: Path) -> Any:
    return ferryman(
        "check",
        "--model",
        "qwen3",
        "--tiny",
        "--layers",
        "1",
        "--device",
        "cpu",
        "--dtype",
        "f32",
        "--out",
        str(folder),
    )


def test_a_model_is_shown_with_its_floor_and_its_calls(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.getbasetemp() / "model"
    done = _model_run(folder)
    assert done.code == 0, done.out + done.err
    assert done.out.startswith("PASS: Qwen3-8B (")
    result = ModelResult.model_validate_json((folder / "model-qwen3-f32.json").read_text("utf-8"))
    for call in result.calls:
        assert any(
            call.phase in line and call.op in line and str(call.expected) in line for line in done.out.splitlines()
        )
    assert "one-ulp floor" in done.out and "KL divergence" in done.out and "greedy tokens: 2 of 2" in done.out
    assert {p.suffix for p in folder.iterdir()} == {".json", ".md", ".xml", ".html"}
    assert "KL divergence" in (folder / "model-qwen3-f32.html").read_text("utf-8")


def test_a_failed_model_fails_in_every_rendering(tmp_path_factory: pytest.TempPathFactory) -> None:
    pytest.importorskip("transformers")
    folder = tmp_path_factory.getbasetemp() / "model"
    _model_run(folder)
    right = ModelResult.model_validate_json((folder / "model-qwen3-f32.json").read_text("utf-8"))
    wrong = right.model_copy(update={"verdict": "FAIL", "reasons": ['layer 0: "9" <& 1']})
    case = ET.fromstring(check_model.junit(wrong)).find("./testsuite/testcase")
    assert case is not None
    failure = case.find("failure")
    assert failure is not None and failure.attrib["message"] == 'layer 0: "9" <& 1'
    assert "- FAIL: layer 0" in check_model.markdown(wrong)
    simulated = right.model_copy(update={"verdict": "SIMULATED"})
    assert ET.fromstring(check_model.junit(simulated)).attrib["skipped"] == "1"
    assert "no evidence about a device" in check_model.markdown(simulated)
    assert ET.fromstring(check_model.junit(right)).attrib["failures"] == "0"


def test_an_allow_list_binds_the_ported_model() -> None:
    pytest.importorskip("transformers")
    done = ferryman(
        "check",
        "--model",
        "qwen3",
        "--tiny",
        "--layers",
        "1",
        "--device",
        "cpu",
        "--dtype",
        "f32",
        "--backend",
        "definition",
        "--json",
    )
    result = json.loads(done.out)
    assert done.code == 0, result["reasons"]
    assert {name for call in result["calls"] for name in call["served"]} == {"definition"}
