"""`ferryman new`: the packages that it writes are installed, and work with every tool as they are."""

from __future__ import annotations

import json
import subprocess
import sys
import textwrap
from dataclasses import fields
from pathlib import Path

import pytest

from ferryman.cli import new
from ferryman.errors import ArgumentError, UnknownName
from ferryman.ops.primitive import Case
from tests.interpreter import Interpreter
from tests.unit.other_packages import run

ROOT = Path(__file__).resolve().parents[2]
MOST_LINES = 120  # of an op


def installed(tmp: Path, kind: str, name: str) -> Path:
    """Where the package is importable from, put there by pip."""
    new.write(kind, name, tmp)
    site = tmp / "site"
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-index", "--no-build-isolation"]
    command = [*pip, "--disable-pip-version-check", "--target", str(site), str(tmp / name)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return site


@pytest.fixture(scope="module")
def op(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return installed(tmp_path_factory.mktemp("op"), "op", "bias_relu")


def test_the_op_is_short_and_as_the_formatter_lays_it_out(tmp_path: Path) -> None:
    files = [path for path in new.write("op", "bias_relu", tmp_path) if path.suffix == ".py"]
    assert sum(len(path.read_text().splitlines()) for path in files) <= MOST_LINES
    ruff = [sys.executable, "-m", "ruff"]
    for command in (["check"], ["format", "--check"]):
        options = ["--config", str(ROOT / "pyproject.toml"), "--no-cache", str(tmp_path)]
        done = subprocess.run([*ruff, *command, *options], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def test_the_page_has_every_field_of_a_case() -> None:
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    table = page.partition("A `Case` has these fields")[2].partition("A layout is")[0]
    assert [row.split("`")[1] for row in table.splitlines() if row.startswith("| `")] == [f.name for f in fields(Case)]


def test_the_pages_program_for_the_interpreter_runs(interpreter: Interpreter) -> None:
    page = (ROOT / "docs" / "extending.md").read_text("utf-8")
    program = textwrap.dedent(page.partition('    PROGRAM = """\n')[2].partition('    """')[0])
    assert interpreter.run(program) == [[0.25] * 4] * 2


JUDGED = """
import collections, json, sys, torch, ferryman
from ferryman.cli import support
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
from ferryman_bias_relu import bias_relu

op = registry.primitive("bias_relu")
names = sys.argv[1].split(",")
dtypes = STORAGE_DTYPES if "torch" in names else (torch.bfloat16,)
found = collections.Counter()
for name in names:
    line = registry.implementation("bias_relu", name)
    count = 40 if "torch" in names else 5
    own = [(case, dtype) for case in cases_of(op) for dtype in dtypes]
    for case, dtype in [*own, *fuzz.cases(op, count)]:
        cell = check_cell(op, line, case, dtype, simulate=None if "torch" in names else profile("h200"))
        assert cell.verdict not in ("FAIL", "MISTRUSTED"), (case, dtype, cell.reason)
        found[f"{name} {cell.verdict}"] += 1
with ferryman.trace() as trace:
    y = bias_relu(torch.tensor([[-1.0, 2.0]]), torch.tensor([0.5, 0.5]))
first = {row.implementation: row.mark for row in support.of(op, profile("h200"))}
print(json.dumps({"counts": found, "y": y.tolist(), "ran": [n for _, n in trace.calls], "h200": first}))
"""


def test_every_gate_and_fuzzing_pass(op: Path) -> None:
    done = run(op, "-c", JUDGED, "torch,definition")
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["counts"] == {"torch PASS": 13 * 3 + 40, "definition PASS": 13 * 3 + 40}
    assert report["y"] == [[0.0, 2.5]] and report["ran"] == ["torch"]
    assert set(report["h200"]) == {"torch", "triton", "definition"} and "first" in report["h200"].values()


def test_the_triton_kernel_is_right_interpreted(op: Path) -> None:
    done = run(op, "-c", JUDGED, "triton", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stderr[-3000:]
    counts = json.loads(done.stdout)["counts"]
    assert counts["triton SIMULATED"] >= 14


@pytest.mark.slow
def test_the_command_line_knows_it(op: Path) -> None:
    """check, fuzz, selftest, bench, ops, docs, explain and compile."""
    check = run(op, "-m", "ferryman", "check", "--op", "bias_relu", "--backend", "torch", "--out", str(op / "out"))
    assert check.returncode == 0, check.stdout[-2000:] + check.stderr[-2000:]
    assert "bias_relu" in check.stdout and (op / "out").is_dir()
    fuzz = run(op, "-m", "ferryman", "fuzz", "--op", "bias_relu", "--device", "cpu", "--cases", "24")
    assert fuzz.returncode == 0, fuzz.stdout[-2000:] + fuzz.stderr[-2000:]
    rows = [line.split() for line in fuzz.stdout.splitlines() if line.startswith("bias_relu")]
    assert [row[1:] for row in rows if row[1] != "triton"] == [
        [name, "24", "24", "0", "0", "0"] for name in ("torch", "definition")
    ]
    (triton,) = [row for row in rows if row[1] == "triton"]
    assert int(triton[3]) > 0 and int(triton[3]) + int(triton[4]) == 24 and triton[5:] == ["0", "0"]
    planted = run(op, "-m", "ferryman", "selftest", "--op", "bias_relu", "--backend", "torch", "--honest", "50")
    assert planted.returncode == 0, planted.stdout[-2000:] + planted.stderr[-2000:]
    bench = run(op, "-m", "ferryman", "bench", "--op", "bias_relu", "--grid", "small", "--out", str(op / "bench"))
    assert bench.returncode == 0 and "bias_relu" in bench.stdout, bench.stdout[-2000:] + bench.stderr[-2000:]
    ops = run(op, "-m", "ferryman", "ops", "--op", "bias_relu", "--device", "mi300x")
    assert ops.returncode == 0 and "triton" in ops.stdout, ops.stderr[-2000:]
    docs = run(op, "-m", "ferryman", "docs", "--op", "bias_relu")
    assert docs.returncode == 0, docs.stderr[-2000:]
    assert (
        "bias_relu(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor" in docs.stdout
        and "Raises ArgumentError." in docs.stdout
    )
    assert "| `bias_relu` | triton | bias contiguous in its last dimension | fp32 | - |" in docs.stdout
    assert "| defined in | `ferryman_bias_relu.definition` |" in docs.stdout
    explain = run(op, "-m", "ferryman", "explain", "bias_relu", "--shape", "8,64", "--device", "h200")
    assert explain.returncode == 0 and "bias=bfloat16[64]" in explain.stdout, explain.stdout + explain.stderr[-2000:]
    compile_ = run(op, "-m", "ferryman", "compile", "--op", "bias_relu", "--backend", "triton", "--target", "sm_90")
    assert compile_.returncode == 0 and "COMPILED_ONLY" in compile_.stdout, compile_.stdout + compile_.stderr[-2000:]
    assert "poor form generic-hopper" not in compile_.stdout + compile_.stderr, compile_.stdout


OTHERS = """
import json
from ferryman.device_profiles import catalogue, loading
from ferryman.dispatch import registry
card = catalogue()["test_card"]
reasons = registry.backends()["no_toolchain"].probe("nvidia")
print(json.dumps({"units": card.units, "reasons": reasons, "broken": {**registry.broken(), **loading.broken()}}))
"""


def test_a_device_and_a_backend_are_found(tmp_path: Path) -> None:
    site = installed(tmp_path, "device", "test_card")
    assert installed(tmp_path, "backend", "no_toolchain") == site
    done = run(site, "-c", OTHERS)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["units"] == 100 and report["broken"] == {}
    assert report["reasons"] == ["no_toolchain is not installed: pip install no_toolchain"]


@pytest.mark.parametrize(
    ("kind", "name", "error", "message"),
    [
        ("ops", "mine", UnknownName, "nearest: op"),
        ("op", "Mine", ArgumentError, "required: lower-case letters"),
        ("op", "class", ArgumentError, "no word of Python"),
        ("op", "softmax", ArgumentError, "a name that no op has yet"),
        ("device", "h200", ArgumentError, "a name that no device has yet"),
        ("op", "here", ArgumentError, "a folder without that name"),
    ],
)
def test_what_cannot_be_written_is_named(
    kind: str, name: str, error: type[Exception], message: str, tmp_path: Path
) -> None:
    (tmp_path / "here").mkdir()
    with pytest.raises(error, match=message):
        new.write(kind, name, tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["here"]
