"""ci/matrix.py: a strict reader, GitHub's rows, and a summary in which what did not run never passed."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from ferryman.device_profiles import profile
from ferryman.porting import results

ROOT = Path(__file__).resolve().parents[2]


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"ferryman_ci_{name}", ROOT / "ci" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


matrix = _load("matrix")
compiling = _load("compile")
GOOD = {"vendor": "amd", "profile": "mi300x", "backend": "hip", "how": "compile"}


def _file(folder: Path, *rows: Any, **document: Any) -> Path:
    path = folder / "matrix.yaml"
    path.write_text(yaml.safe_dump({"schema": 1, "rows": list(rows), **document}))
    return path


def _document(device: str, name: str, *cells: tuple[str, str]) -> Any:
    known = profile(name)
    facts = results.environment(torch.device("cpu"), known, 0, "small").model_copy(update={"device": device})
    made = [
        results.Cell(op="rope", implementation=backend, device=device, dtype="float32", case=str(i), verdict=verdict)
        for i, (backend, verdict) in enumerate(cells)
    ]
    return results.results(facts, made)


def test_our_own_matrix_is_valid_and_covers_both_vendors() -> None:
    rows = matrix.read()
    assert {row.vendor for row in rows} == {"cpu", "nvidia", "amd"}
    assert {row.how for row in rows} == set(matrix.HOW)
    assert {row.backend for row in rows} == {"torch", "triton", "cuda", "hip"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"profile": "mi300y"}, "unknown device profile 'mi300y'; nearest: mi300x"),
        ({"profile": "MI300X"}, "profile 'MI300X' is mi300x of vendor amd"),
        ({"vendor": "nvidia", "backend": "cuda"}, "profile 'mi300x' is mi300x of vendor amd; the row says nvidia"),
        ({"backend": "cuda"}, "backend cuda does not serve amd"),
        ({"backend": "hipp"}, "unknown backend 'hipp'; nearest: hip"),
        ({"backend": "torch"}, "nothing to compile"),
        ({"how": "maybe"}, "how is 'maybe'; required: hardware, compile, simulate, stand-in, cpu"),
        ({"how": "cpu"}, "how is 'cpu' for vendor amd"),
        ({"how": "hardware"}, "a runner with the label self-hosted"),
        ({"how": "simulate", "backend": "torch"}, "the simulator executes triton and hip, not torch"),
        ({"how": "stand-in"}, "mi300x, of vendor amd; required: an NVIDIA device of the catalogue"),
        ({"how": "stand-in", "vendor": "nvidia", "profile": "l4", "backend": "cuda"}, "executes triton, not cuda"),
        ({"how": "stand-in", "vendor": "nvidia", "profile": "l4", "backend": "triton"}, "with the label self-hosted"),
        ({"how": "simulate", "profile": "rx7900xtx"}, "required: a device of gfx942 or gfx950"),
        ({"runner": "self-hosted"}, "None is not a name"),
        ({"runner": ["$(reboot)"]}, "is not a name"),
        ({"colour": "red"}, r"unknown keys: \['colour'\]"),
        ({"how": None}, "None is not a name"),
    ],
)
def test_a_bad_row_is_refused_with_its_number(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    other = {**GOOD, "profile": "mi355x"}
    assert len(matrix.read(_file(tmp_path, other, GOOD))) == 2
    with pytest.raises(matrix.MatrixError, match=f"row 2: .*{message}"):
        matrix.read(_file(tmp_path, other, {**GOOD, **change}))


def test_bad_files_are_refused(tmp_path: Path) -> None:
    incomplete = {k: v for k, v in GOOD.items() if k != "how"}
    for path, message in (
        (_file(tmp_path, GOOD, GOOD), "row 2: mi300x hip compile is there already"),
        (tmp_path / "absent.yaml", "cannot be read"),
    ):
        with pytest.raises(matrix.MatrixError, match=message):
            matrix.read(path)
    for rows, document, message in (
        ([], {}, "must be a list that is not empty"),
        ([GOOD], {"extra": 1}, "must hold 'schema: 1' and 'rows'"),
        ([GOOD], {"schema": 2}, "must hold 'schema: 1' and 'rows'"),
        (["row"], {}, "row 1: it is a str"),
        ([incomplete], {}, re.escape("missing keys: ['how']")),
    ):
        with pytest.raises(matrix.MatrixError, match=message):
            matrix.read(_file(tmp_path, *rows, **document))
    tagged = tmp_path / "tagged.yaml"
    tagged.write_text("schema: 1\nrows: !!python/object/apply:os.system [true]\n")
    with pytest.raises(matrix.MatrixError, match="could not determine a constructor"):
        matrix.read(tagged)


def test_github_gets_rows_of_one_kind(capsys: pytest.CaptureFixture[str]) -> None:
    assert matrix.main(["github", "--how", "hardware"]) == 0
    include = json.loads(capsys.readouterr().out)["include"]
    assert include and all(row["how"] == "hardware" and "self-hosted" in row["runner"] for row in include)
    assert len({row["name"] for row in include}) == len(include)


def _row(how: str, backend: str = "triton", name: str = "h200") -> Any:
    vendor = profile(name).vendor
    return matrix.Row(vendor, name, backend, how, ("self-hosted",))


def test_what_did_not_run_never_passed() -> None:
    cpu = _document("cpu", "cpu", ("torch", "PASS"), ("triton", "SIMULATED"))
    compiled = _document("none", "h200", ("triton", "COMPILED_ONLY"))
    ran = _document("cuda:0", "h200", ("triton", "PASS"), ("triton", "UNIMPLEMENTED"), ("cuda", "NOT_RUN"))
    other = _document("cuda:0", "h100-sxm", ("triton", "PASS"))
    everything = [cpu, compiled, other]
    assert matrix.judge(_row("hardware"), everything) == ("NOT_RUN", {})
    assert matrix.judge(_row("hardware"), [*everything, ran]) == ("PASS", {"PASS": 1, "UNIMPLEMENTED": 1})
    assert matrix.judge(_row("hardware", "cuda"), [ran]) == ("NOT_RUN", {"NOT_RUN": 1})
    assert matrix.judge(_row("compile"), [cpu, ran]) == ("NOT_RUN", {})
    assert matrix.judge(_row("compile"), [*everything, ran]) == ("COMPILED_ONLY", {"COMPILED_ONLY": 1})
    assert matrix.judge(_row("cpu", "triton", "cpu"), everything) == ("SIMULATED", {"SIMULATED": 1})
    simulated = _document(
        "simulated", "mi300x", ("triton", "SIMULATED"), ("hip", "SIMULATED"), ("hip", "UNIMPLEMENTED")
    )
    assert matrix.judge(_row("simulate", "triton", "mi300x"), [simulated]) == ("SIMULATED", {"SIMULATED": 1})
    assert matrix.judge(_row("simulate", "hip", "mi300x"), [simulated])[0] == "SIMULATED"
    for how in ("hardware", "compile"):
        assert matrix.judge(_row(how, "triton", "mi300x"), [simulated]) == ("NOT_RUN", {})
    assert matrix.judge(_row("simulate", "triton", "mi355x"), [simulated]) == ("NOT_RUN", {})
    with pytest.raises(matrix.MatrixError, match="only simulated PASS"):
        matrix.judge(_row("simulate", "triton", "mi300x"), [_document("simulated", "mi300x", ("triton", "PASS"))])
    stood_in = _document("stand-in", "a100-sxm-80", ("triton", "SIMULATED"))
    assert matrix.judge(_row("stand-in", "triton", "a100-sxm-80"), [stood_in]) == ("SIMULATED", {"SIMULATED": 1})
    for how in ("hardware", "compile"):
        assert matrix.judge(_row(how, "triton", "a100-sxm-80"), [stood_in]) == ("NOT_RUN", {})
    with pytest.raises(matrix.MatrixError, match="only executed by a stand-in PASS"):
        matrix.judge(_row("stand-in"), [_document("stand-in", "h200", ("triton", "PASS"))])
    with pytest.raises(matrix.MatrixError, match="only compiled PASS"):
        matrix.judge(_row("compile"), [_document("none", "h200", ("triton", "PASS"))])


def test_the_summary_has_every_row_and_fails_with_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    results.save(_document("cpu", "cpu", ("torch", "PASS")), good)
    results.save(_document("cuda:0", "h200", ("cuda", "PASS"), ("cuda", "FAIL")), bad)
    assert matrix.main(["summary", str(good)]) == 0
    table = capsys.readouterr().out
    assert "| cpu | cpu | torch | cpu | PASS | 1 PASS |" in table
    assert "| nvidia | h200 | cuda | hardware | NOT_RUN | - |" in table
    assert len(table.splitlines()) == 2 + len(matrix.read())
    assert matrix.main(["summary", str(good), str(bad)]) == 1
    assert "| nvidia | h200 | cuda | hardware | FAIL | 1 FAIL, 1 PASS |" in capsys.readouterr().out
    (tmp_path / "torn.json").write_text("{")
    assert matrix.main(["summary", str(tmp_path / "torn.json")]) == 2


def test_compiling_judges_each_kernel(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from ferryman.backends.artefacts import Entry
    from ferryman.porting import aot

    def entry(kernel: str, verdict: Any, reason: str | None) -> Entry:
        return Entry(key="0" * 64, profile="mi300x", arch="gfx942", backend="hip", family="norm", kernel=kernel,
                     dtype="any", verdict=verdict, reason=reason)  # fmt: skip

    compile_all = aot.compile_all

    def compiled(profiles: Any, **options: Any) -> aot.Compiled:
        if options["backends"] != ["hip"]:
            return compile_all(profiles, **options)
        assert [p.arch for p in profiles] == ["gfx942"]
        entries = [entry("a", "COMPILED_ONLY", None), entry("b", "QUARANTINED", "no such instruction"),
                   entry("c", "FAIL", "shared: 70000 bytes a block, required at most 65536")]  # fmt: skip
        return aot.Compiled(_manifest(entries))

    monkeypatch.setattr(aot, "compile_all", compiled)
    assert compiling.main(["--profile", "mi300x", "--backend", "hip", "--out", str(tmp_path)]) == 1
    document = results.load(tmp_path / "compile-mi300x-hip.json")
    assert [(c.op, c.case, c.verdict, c.reason) for c in document.cells] == [
        ("norm", "0: a()", "COMPILED_ONLY", None), ("norm", "1: b()", "QUARANTINED", "no such instruction"),
        ("norm", "2: c()", "FAIL", "shared: 70000 bytes a block, required at most 65536"),
    ]  # fmt: skip
    assert document.environment.device == matrix.NOWHERE == compiling.DEVICE
    assert compiling.main(["--profile", "mi300x", "--backend", "cuda", "--out", str(tmp_path)]) == 2
    assert compiling.main(["--profile", "mi300", "--backend", "hip", "--out", str(tmp_path)]) == 2


def _manifest(entries: list[Any]) -> Any:
    from ferryman.backends.artefacts import Manifest

    return Manifest(time="2026-01-01T00:00:00", toolchain={}, profiles=["mi300x"], seconds=1.0,
                    entries=entries)  # fmt: skip


def test_there_are_kernels_to_compile() -> None:
    from ferryman.porting.aot.groups import groups_of, sources_of

    known = profile("mi300x")
    made = list(groups_of(known, ["hip"], ["norm", "activation", "softmax", "rope", "matmul", "attention"]))
    assert {group.family for group in made} == {"norm", "activation", "softmax", "rope"}
    assert all(len(sources_of(group, known)) > 10 for group in made)


def test_amd_code_is_simulated_by_a_job_of_its_own() -> None:
    """Its job runs the simulator on the device and backend of each row, and uploads the document."""
    rows = {(row.profile, row.backend) for row in matrix.read() if row.how == "simulate"}
    assert rows == {("mi300x", "triton"), ("mi300x", "hip"), ("mi355x", "triton")}
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    steps = jobs["simulate"]["steps"]
    (run,) = [step["run"] for step in steps if "run" in step]
    assert run == 'make simulate ARGS="--backend ${{ matrix.backend }} --device ${{ matrix.profile }}"'
    assert re.search(r"\nsimulate: .*\n\t.*ferryman check --backend simulated ", (ROOT / "Makefile").read_text("utf-8"))
    assert any(step.get("with", {}).get("path") == "out/check-simulated.json" for step in steps)
    assert "simulate" in jobs["summary"]["needs"] and "simulate" in jobs["rows"]["outputs"]


def test_an_older_device_is_stood_in_for_by_a_job_of_its_own() -> None:
    rows = [row for row in matrix.read() if row.how == "stand-in"]
    assert [(row.profile, row.backend) for row in rows] == [("a100-sxm-80", "triton")]
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    (run,) = [step["run"] for step in jobs["stand-in"]["steps"] if "run" in step]
    assert run.startswith("make stand-in ")
    assert run.endswith('FOR=${{ matrix.profile }} ARGS="--backend ${{ matrix.backend }}"')
    assert re.search(r"\nstand-in: .*\n\t.*ferryman check --as ", (ROOT / "Makefile").read_text("utf-8"))
    assert "stand-in" in jobs["summary"]["needs"] and "stand-in" in jobs["rows"]["outputs"]


def test_workflows_are_thin() -> None:
    """Each step that runs something calls make, .ci/run or ci/: what CI does can be done anywhere."""
    for path in (ROOT / ".github" / "workflows").glob("*.yml"):
        for job in yaml.safe_load(path.read_text("utf-8"))["jobs"].values():
            for step in job["steps"]:
                for line in step.get("run", "").splitlines():
                    assert re.search(r"\bmake |\.ci/run|\bci/\w+\.py", line), line
