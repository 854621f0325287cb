"""Ops of other packages: what their schemas may hold, and what happens where one breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.other_packages import GATHERED, SCALED, install, run

CALLS = """
import json, torch, ferryman
from ferryman.dispatch import plan, registry
from gathered_ops.definition import gathered

found = {"broken": dict(registry.broken()), "schema": registry.primitive("gathered").schema}
parts = [torch.arange(6.0).reshape(3, 2), torch.arange(4.0).reshape(2, 2) + 10]
index = torch.tensor([4, -1, 0], dtype=torch.int32)
with ferryman.trace() as trace:
    y = gathered(parts, index, [3, 2])
found["y"], found["ran"] = y.tolist(), [name for _, name in trace.calls]
runner = plan.runner_of(registry.primitive("gathered"))
for _ in range(3):
    gathered(parts, index, [3, 2])
found["plans"] = len(runner.plans)
gathered(parts, index, [3, 2], 2.0), gathered([p.half() for p in parts], index, [3, 2])
found["plans after others"] = len(runner.plans)
found["half"] = str(gathered([p.half() for p in parts], index, [3, 2], dtype=torch.float32).dtype)
library = torch.ops.ferryman.gathered.default
found["library"] = bool(torch.equal(library(parts, index, [3, 2], None, None), y))
found["library dtype"] = str(library(parts, index, [3, 2], 2.0, torch.float16).dtype)
compiled = torch.compile(lambda p, i: gathered(p, i, [3, 2], 2.0) + 1, backend="eager", fullgraph=True)
found["compiled"] = bool(torch.equal(compiled(parts, index), gathered(parts, index, [3, 2], 2.0) + 1))
for name, wrong in {"numbers": lambda: gathered(parts, index, [3, 1.5]), "list": lambda: gathered(parts[0], index, [3]),
                    "dtype": lambda: gathered(parts, index, [3, 2], None, "float32"),
                    "gradient": lambda: gathered([p.requires_grad_() for p in parts], index, [3, 2])}.items():
    try:
        wrong()
    except ferryman.errors.ArgumentError as error:
        found[name] = str(error)
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def gathered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gathered")
    install(folder, "gathered_ops", GATHERED)
    return folder


def test_lists_dtypes_and_optional_scalars_go_both_ways(gathered: Path) -> None:
    done = run(gathered, "-c", CALLS)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["broken"] == {}
    assert report["schema"] == (
        "gathered(Tensor[] parts, Tensor index, int[] sizes, float? scale, ScalarType? dtype) -> Tensor"
    )
    assert report["y"] == [[12.0, 13.0], [0.0, 0.0], [0.0, 1.0]] and report["ran"] == ["torch"]
    assert (report["plans"], report["plans after others"]) == (1, 3)
    assert report["library"] and report["compiled"]
    assert (report["half"], report["library dtype"]) == ("torch.float32", "torch.float16")
    assert "sizes is 1.5 (float); required: int" in report["numbers"]
    assert "required: a list" in report["list"] and "required: torch.dtype" in report["dtype"]
    assert "parts[0].requires_grad is True; required: False" in report["gradient"]


def test_its_cases_fit_each_other_and_it_is_checked_and_fuzzed(gathered: Path) -> None:
    """The index is drawn from the rows that the parts have; the op names no domain, so its cases are varied."""
    done = run(gathered, "-c", JUDGED, "gathered")
    assert done.returncode == 0, done.stderr[-3000:]
    assert json.loads(done.stdout) == {"cases": 3, "dtypes": [], "verdicts": {"PASS": 18 + 40}}


def test_tensors_of_8_bits_and_their_scales_are_checked_and_fuzzed(tmp_path: Path) -> None:
    install(tmp_path, "scaled_ops", SCALED)
    done = run(tmp_path, "-c", JUDGED, "scaled")
    assert done.returncode == 0, done.stderr[-3000:]
    kinds = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e8m0fnu"]
    assert json.loads(done.stdout) == {"cases": 3, "dtypes": kinds, "verdicts": {"PASS": 18 + 40}}


JUDGED = """
import collections, json, sys
from ferryman.dispatch import registry
from ferryman.ops.primitive import STORAGE_DTYPES
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell
op = registry.primitive(sys.argv[1])
lines = [registry.implementation(op.name, name) for name in ("torch", "definition")]
cells = [check_cell(op, line, c, d) for line in lines for d in STORAGE_DTYPES for c in cases_of(op)]
cells += [check_cell(op, lines[0], c, d) for c, d in fuzz.cases(op, 40)]
wrong = [cell.reason for cell in cells if cell.verdict != "PASS"]
assert not wrong, wrong[:3]
counts = collections.Counter(cell.verdict for cell in cells)
specs = [spec for c in cases_of(op) for spec in c.args.values() if hasattr(spec, "dtype")]
eight = sorted({str(spec.dtype) for spec in specs if str(spec.dtype).startswith("float8")})
print(json.dumps({"cases": len(cases_of(op)), "dtypes": eight, "verdicts": counts}))
"""

HERE = """
import json, torch, ferryman
from ferryman import ops
from ferryman.dispatch import registry
y = ops.softmax(torch.zeros(2, 4))
registry.evidences(), registry.backends()
runs = "no_evidence_op" in registry.primitives()
print(json.dumps({"broken": dict(registry.broken()), "ops": runs, "y": y.tolist()}))
"""


BREAKING = {
    "no_module": ("definition", "import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "no_syntax": ("definition", "def f(:", "SyntaxError"),
    "no_menu": ("implementations", "IMPLEMENTATIONS = 3", "TypeError"),
    "strange_menu": (
        "implementations",
        "from ferryman.ops.menu import Implementation, menu\n"
        "IMPLEMENTATIONS = menu('x', Implementation(op='softmax', name='torch'))",
        "op of strange_menu on its menu",
    ),
    "no_evidence": ("evidence", "1 / 0", "ZeroDivisionError"),
    "two_lines": ("definition", "raise RuntimeError('first\\nsecond')", "RuntimeError: first"),
    "gathered_ops": ("definition", GATHERED["definition"].replace("gathered", "softmax"), "two primitives are called"),
}  # package -> module that is wrong, its source, the reason that is given


def test_a_package_that_breaks_is_named_and_breaks_nothing(tmp_path: Path) -> None:
    for name, (module, source, _) in BREAKING.items():
        whole = {
            m: text.replace("gathered_ops", name).replace("gathered", f"{name}_op") for m, text in GATHERED.items()
        }
        install(tmp_path, name, {**whole, module: source})
    done = run(tmp_path, "-c", HERE)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["y"] == [[0.25] * 4] * 2
    kinds = {"no_evidence": "evidence"}
    reasons = {name: report["broken"].pop(f"{kinds.get(name, 'ops')} {name}") for name in BREAKING}
    assert not report["broken"] and report["ops"], "an op without evidence runs"
    for name, (_, _, reason) in BREAKING.items():
        assert reason in reasons[name] and "\n" not in reasons[name]


def test_doctor_lists_it(tmp_path: Path) -> None:
    install(tmp_path, "gathered_ops", {**GATHERED, "definition": "import no_such_module"})
    wrong = {m: text.replace("gathered", "wrong") for m, text in GATHERED.items()}
    dtype = '\nfrom ferryman.ops.primitive import Case, TensorSpec\nEVIDENCE = (Evidence("wrong", lambda: ('
    dtype += 'Case("one", {"sizes": TensorSpec((2,), "float99")}),)),)\n'
    kernels = {"evidence": wrong["evidence"] + dtype, "torch_kernels": "import not_here"}
    install(tmp_path, "wrong_ops", {**wrong, **kernels})
    install(tmp_path, "no_backend", {}, "ferryman.backends", "no_backend:Nothing")
    install(tmp_path, "no_profiles", {}, "ferryman.device_profiles", "no_profiles:data")
    done = run(tmp_path, "-m", "ferryman", "doctor", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    reasons = {row["entry"]: row["reason"] for row in json.loads(done.stdout)["broken"]}
    assert reasons["ops gathered_ops"].endswith("No module named 'no_such_module'")
    assert "unknown dtype of a TensorSpec 'float99'" in reasons["evidence wrong"]
    assert reasons["kernels wrong torch"].endswith("No module named 'not_here'")
    assert "Nothing" in reasons["backend no_backend"] and "profiles no_profiles" in reasons
    unknown = run(tmp_path, "-m", "ferryman", "check", "--op", "gathered")
    assert unknown.returncode == 2 and "No module named 'no_such_module'" in unknown.stderr
