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
    "exits": ("definition", "import sys\nsys.exit('needs a GPU')", "SystemExit: needs a GPU"),
    "exits_with_code": ("implementations", "raise SystemExit(3)", "SystemExit: 3"),
    "skips": ("definition", "import pytest\npytest.skip('no GPU', allow_module_level=True)", "Skipped: no GPU"),
    "exits_late": ("evidence", "raise SystemExit(3)", "SystemExit: 3"),
    "wrong_clause": (
        "implementations",
        "from ferryman.ops.clauses import either, absent, unit_stride, feature\n"
        "from ferryman.ops.menu import Implementation, menu\n"
        "_when = (either(feature('wgmma'), unit_stride('indexx')), absent('scale'))\n"
        "IMPLEMENTATIONS = menu('x', Implementation(op='wrong_clause_op', name='torch', when=_when))",
        "ArgumentError: wrong_clause, op wrong_clause_op: an argument that its line torch reads (clause: a device with "
        "wgmma, or indexx contiguous in its last dimension) is indexx; required: one of parts, index, sizes, scale, "
        "dtype",
    ),
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
    kinds = {"no_evidence": "evidence", "exits_late": "evidence"}
    reasons = {name: report["broken"].pop(f"{kinds.get(name, 'ops')} {name}") for name in BREAKING}
    assert not report["broken"] and report["ops"], "an op without evidence runs"
    for name, (_, _, reason) in BREAKING.items():
        assert reason in reasons[name] and "\n" not in reasons[name]


def test_a_backend_and_a_recogniser_that_exit_are_named(tmp_path: Path) -> None:
    install(tmp_path, "gathered_ops", {**GATHERED, "recognise": "raise SystemExit(3)"})
    install(tmp_path, "exits", {"here": "raise SystemExit(4)"}, "ferryman.backends", "exits.here:Backend")
    install(tmp_path, "profiles", {"here": "raise SystemExit(5)"}, "ferryman.device_profiles", "profiles.here:data")
    done = run(tmp_path, "-m", "ferryman", "doctor", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    reasons = {row["entry"]: row["reason"] for row in json.loads(done.stdout)["broken"]}
    assert reasons == {
        "recognise gathered_ops": "SystemExit: 3",
        "backend exits": "SystemExit: 4",
        "profiles profiles": "SystemExit: 5",
    }


def _evidence(cases: str) -> dict[str, str]:
    """The package whose cases are these."""
    return {
        **GATHERED,
        "evidence": f"from ferryman.ops.evidence import Evidence\nEVIDENCE = [Evidence('gathered', {cases})]",
    }


def test_cases_that_raise_leave_their_op_unjudged_and_every_other_judged(tmp_path: Path) -> None:
    install(tmp_path, "gathered_ops", _evidence("lambda: 1 / 0"))
    reason = "gathered: gathered_ops.evidence:<lambda>, line 2, raised ZeroDivisionError: division by zero"
    listed = run(tmp_path, "-m", "ferryman", "ops", "--device", "cpu", "--json")
    assert listed.returncode == 0, listed.stderr[-3000:]
    rows = [row for row in json.loads(listed.stdout)["support"] if row["op"] == "gathered"]
    assert {row["implementation"] for row in rows} == {"torch", "definition"}
    assert all(not row["dtypes"] and any(reason in why for why in row["reasons"]) for row in rows)
    page = run(tmp_path, "-m", "ferryman", "docs", "--op", "gathered", "--op", "silu_mul")
    assert page.returncode == 0 and "| `gathered` | no standard case |" in page.stdout, page.stderr[-3000:]
    softmax = ("-m", "ferryman", "check", "--op", "softmax", "--backend", "torch", "--dtype", "bf16")
    checked = run(tmp_path, *softmax)
    assert checked.returncode == 0 and "PASS" in checked.stdout, checked.stderr[-3000:]
    asked = run(tmp_path, "-m", "ferryman", "check", "--op", "gathered")
    assert asked.returncode == 2 and "gathered has no cases to be checked on" in asked.stderr and reason in asked.stderr
    assert "Traceback" not in asked.stderr


WHOLE = """
import json, torch
from ferryman.device_profiles import detect
from ferryman.dispatch import registry
from ferryman.porting.running import runner
place = torch.device("cpu")
plan = runner.Plan(None, None, [torch.float32], "small", place, detect(place), True)
cells = [cell for cell in plan.skipped if cell.op == "gathered"]
print(json.dumps([[cell.implementation, cell.verdict, cell.reason] for cell in cells]))
"""


def test_a_check_of_everything_says_that_an_op_without_cases_did_not_run(tmp_path: Path) -> None:
    install(tmp_path, "gathered_ops", _evidence("lambda: [3]"))
    done = run(tmp_path, "-c", WHOLE)
    assert done.returncode == 0, done.stderr[-3000:]
    reason = "left out: EvidenceError: gathered: its cases() gives int; required: Case"
    assert json.loads(done.stdout) == [[name, "NOT_RUN", reason] for name in ("torch", "definition")]


WRONG = {
    "check": (
        ("definition", "    if sum(sizes)", "    raise RuntimeError('boo')\n    if sum(sizes)"),
        "PackageError: gathered: gathered_ops.definition:_check, line 9, raised RuntimeError: boo",
    ),
    "meta": (
        ("definition", "meta=_like", "meta=lambda *args: None"),
        "EvidenceError: its meta gives NoneType; required: a Tensor for each of y",
    ),
    "cost": (
        ("definition", "Cost(1.0, 1.0)", "Cost(-1.0, 1.0)"),
        "EvidenceError: its cost's flops is -1.0; required: a finite number, 0 or more",
    ),
    "bound": (
        ("definition", '({"accumulate": outputs[0].abs()},)', "3"),
        "EvidenceError: gathered: its bound returned int; required: a tuple of a dict for each of y",
    ),
    "clauses": (
        (
            "implementations",
            'name="torch")',
            'name="torch", when=(Clause("few rows", ("rows",), lambda view: view.args["rows"], bool),))',
        ),
        "PackageError: gathered: gathered_ops.implementations:<lambda>, line 3, raised KeyError: 'rows'",
    ),
}  # what is wrong -> (module, its source, what stands there instead), the reason that doctor gives


@pytest.mark.parametrize("what", WRONG)
def test_doctor_runs_each_function_of_an_op_once(tmp_path: Path, what: str) -> None:
    (module, right, wrong), reason = WRONG[what]
    assert right in GATHERED[module]
    source = GATHERED[module].replace(right, wrong)
    if what == "clauses":
        source = f"from ferryman.ops.clauses import Clause\n{source.lstrip()}"
    install(tmp_path, "gathered_ops", {**GATHERED, module: source})
    done = run(tmp_path, "-m", "ferryman", "doctor", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    (row,) = json.loads(done.stdout)["broken"]
    assert row["entry"] == f"{what} gathered{' torch' if what == 'clauses' else ''}"
    assert row["reason"].startswith(reason)


def test_explain_names_the_function_that_raised(tmp_path: Path) -> None:
    (module, right, wrong), reason = WRONG["check"]
    install(tmp_path, "gathered_ops", {**GATHERED, module: GATHERED[module].replace(right, wrong)})
    given = ("--shape", "4,8", "--arg", "index=3", "--arg", "sizes=4", "--device", "h200")
    done = run(tmp_path, "-m", "ferryman", "explain", "gathered", *given)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert done.stderr == f"ferryman: {reason.removeprefix('PackageError: ')}; mend or uninstall that package\n"


def test_a_clause_that_raises_leaves_the_other_ops_listed(tmp_path: Path) -> None:
    (module, right, wrong), reason = WRONG["clauses"]
    source = f"from ferryman.ops.clauses import Clause\n{GATHERED[module].replace(right, wrong).lstrip()}"
    install(tmp_path, "gathered_ops", {**GATHERED, module: source})
    done = run(tmp_path, "-m", "ferryman", "docs", "--op", "gathered", "--op", "silu_mul")
    assert done.returncode == 0, done.stderr[-3000:]
    assert "| `gathered` | its package breaks |" in done.stdout and "### `silu_mul`" in done.stdout
    listed = run(tmp_path, "-m", "ferryman", "ops", "--op", "gathered", "--device", "h200")
    assert listed.returncode == 0 and reason.removeprefix("PackageError: ") in listed.stdout


def test_a_line_of_a_backend_that_is_not_there_serves_no_device(tmp_path: Path) -> None:
    own = 'name="torch"), Implementation(op="gathered", name="mychip", where="gathered_ops.torch_kernels:gathered")'
    source = GATHERED["implementations"].replace('name="torch")', own)
    install(tmp_path, "gathered_ops", {**GATHERED, "implementations": source})
    install(tmp_path, "mychip", {"here": "Backend = dict"}, "ferryman.backends", "mychip.here:Backend")
    listed = run(tmp_path, "-m", "ferryman", "ops", "--op", "gathered", "--device", "cpu", "--json")
    assert listed.returncode == 0, listed.stderr[-3000:]
    rows = {row["implementation"]: row for row in json.loads(listed.stdout)["support"]}
    assert rows["torch"]["chosen"] and rows["mychip"]["reasons"] == ["mychip does not serve cpu devices"]
    done = run(tmp_path, "-m", "ferryman", "doctor", "--json")
    reasons = {row["entry"]: row["reason"] for row in json.loads(done.stdout)["broken"]}
    needed = "TypeError: it gives dict; required: an object with name, vendors, probe and compile"
    assert reasons["backend mychip"] == needed
    assert reasons["line gathered mychip"].startswith("UnknownName: unknown backend 'mychip'")


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
