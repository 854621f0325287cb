"""`ferryman check --kernel`: a function that we did not write, right, wrong, hanging, dying, or not there at all."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman import ops
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, KernelError, UnknownName
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging import results
from ferryman.porting.judging.parity import prepare
from ferryman.porting.judging.results import Cell, Results
from ferryman.porting.kernel import adapter as kernel_adapter
from ferryman.porting.kernel import check as kernel
from tests.cli.run import Done, alone, ferryman
from tests.lines import serving

SOURCE = (Path(__file__).parent / "user_kernels.py").read_text("utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    user_folder = tmp_path_factory.mktemp("user")
    (user_folder / "my_kernels.py").write_text(SOURCE)
    (user_folder / "broken.py").write_text("import torch\nraise RuntimeError('no compiler')\n")
    (user_folder / "leaves.py").write_text("import sys\nsys.exit(4)\n")
    (user_folder / "dies.py").write_text("import os\nos._exit(6)\n")
    (user_folder / "slow.py").write_text("import time\ntime.sleep(600)\n")
    return user_folder


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    """Loading in this process leaves a module and a folder to find it in."""
    path, modules = list(sys.path), set(sys.modules)
    yield
    sys.path[:] = path
    for name in {"my_kernels", "broken", "leaves"} - modules:
        sys.modules.pop(name, None)


def run(folder: Path, function: str, op: str = "rms_norm", **options: Any) -> Results:
    return kernel.run(f"{folder}/my_kernels.py:{function}", op, **{"device": "cpu", "dtypes": ["f32"], **options})


def judged(folder: Path, function: str, op: str = "rms_norm", **facts: Any) -> list[Cell]:
    """The same cells without a process of their own, which takes a second to start."""
    primitive = registry.primitive(op)
    reference = kernel_adapter.parse(f"{folder}/my_kernels.py:{function}")
    adapter = kernel_adapter.Adapter(kernel_adapter.load(reference), primitive, function)
    line = kernel_adapter.declared(primitive, function, **facts)
    cpu = torch.device("cpu")
    prepared = [prepare(primitive, case, torch.float32, cpu) for case in cases_of(primitive)]
    return [kernel_adapter.check(adapter, line, p) for p in prepared]


def which(holds: Callable[[Any], bool]) -> set[str]:
    """The cases of rms_norm whose arguments are such ones."""
    return {case.name for case in cases_of(registry.primitive("rms_norm")) if holds(case.args)}


def verdicts(document: Results | list[Cell]) -> dict[str, int]:
    return dict(Counter(c.verdict for c in (document.cells if isinstance(document, Results) else document)))


def test_a_right_kernel_passes_every_gate_in_every_dtype(folder: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    document = run(folder, "rms_norm", dtypes=None, progress=lambda *a: seen.append(a))
    assert set(verdicts(document)) == {"PASS"} and not results.failed(document)
    assert {c.dtype for c in document.cells} == {"float32", "float16", "bfloat16"}
    assert {c.implementation for c in document.cells} == {"user:rms_norm"}
    assert all(c.gates["G5"].outcome == "pass" for c in document.cells)
    assert [s[0] for s in seen] == list(range(1, len(document.cells) + 1)) and seen[-1][1] == len(document.cells)
    assert document.environment.flags["kernel"] == f"{folder}/my_kernels.py:rms_norm"
    assert results.parse(json.loads(results.dumps(document))) == document
    assert {t.clock for t in document.timings} == {"host clock"}


@pytest.mark.parametrize("function", ["other_names", "with_target"])
def test_parameters_are_the_op_s_in_order_or_fewer_or_a_target_more(folder: Path, function: str) -> None:
    cells = judged(folder, function)
    asked = which(lambda args: args["cast_before_weight"] and function == "other_names")
    assert {c.case for c in cells if c.verdict == "UNIMPLEMENTED"} == asked
    assert set(verdicts(cells)) <= {"PASS", "UNIMPLEMENTED"}
    for cell in cells:
        if cell.verdict == "UNIMPLEMENTED":
            assert cell.reason is not None and "takes no cast_before_weight; required here: True" in cell.reason
            assert cell.refusals == [cell.reason]


@pytest.mark.parametrize(
    ("function", "gate", "message"),
    [
        ("twice", "G2", "bounds away"),
        ("none", "G0", "returned None; required: a tensor (y)"),
        ("listed", "G0", "returned a list of 1; required: a tensor (y)"),
        ("wide", "G0", "y.dtype is torch.float64; required: torch.float32"),
        ("flat", "G0", "y.shape is"),
        ("meta", "G0", "y.device is meta; required: cpu"),
        ("sparse", "G0", "torch.sparse_coo tensor; required: a strided one"),
        ("mutates", "G5", "x was modified"),
        ("overruns", "G5", "wrote outside x"),
        ("stale", "G5", "memory of an earlier call's output"),
    ],
)
def test_a_wrong_kernel_fails_the_gate_that_names_it(folder: Path, function: str, gate: str, message: str) -> None:
    cells = judged(folder, function)
    failed = [c for c in cells if c.verdict == "FAIL"]
    assert len(failed) >= len(cells) - 4  # an empty or a flat case cannot show everything
    named = [c for c in failed if c.gates[gate].outcome == "fail" and message in (c.gates[gate].reason or "")]  # type: ignore[index]
    assert len(named) >= len(failed) - 2, Counter(c.reason for c in failed)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("raises", "raised ValueError: no such tile"),
        ("late_import", "raised ModuleNotFoundError: No module named 'a_library_that_is_not_here'"),
        ("exits", "called sys.exit(3)"),
    ],
)
def test_a_kernel_that_raises_fails_and_the_run_goes_on(folder: Path, function: str, message: str) -> None:
    cells = judged(folder, function)
    assert set(verdicts(cells)) == {"FAIL"}
    assert all(message in (c.reason or "") for c in cells), cells[0].reason


def test_a_kernel_that_hangs_or_dies_costs_the_case_it_was_at(folder: Path) -> None:
    document = run(folder, "dies", timeout=3)
    wrong = {c.case: c.reason or "" for c in document.cells if c.verdict == "FAIL"}
    (half,) = which(lambda args: args["eps"] == 0.5)
    assert set(wrong) == which(lambda args: args["x"].shape in ((7, 257), (3, 1))) | {half}
    assert {"prime", "row_of_one"} < set(wrong) and len(wrong) == 3
    assert wrong["prime"].startswith("its process ended with exit code 41") and "illegal instruction" in wrong["prime"]
    assert "SIGSEGV" in wrong["row_of_one"] and wrong[half] == "no result within 3 s (time limit)"
    assert verdicts(document)["PASS"] == len(document.cells) - 3
    names = [c.case for c in document.cells]
    assert names == list(dict.fromkeys(names)), "in the op's order, each once"


def test_after_some_deaths_the_rest_is_left_out_and_said_to_be(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "MOST_LOST", 2)
    document = run(folder, "always_dies")
    assert verdicts(document) == {"FAIL": 2, "NOT_RUN": len(document.cells) - 2} and results.failed(document)
    assert "hung or ended its process 2 times" in (document.cells[-1].reason or "")


@pytest.mark.parametrize("function", ["leaves_children", "chatty", "keeps_running"])
def test_what_a_kernel_starts_or_prints_does_not_hold_the_run(folder: Path, function: str) -> None:
    document = run(folder, function, timeout=20)
    lost = 1 if function == "leaves_children" else 0
    assert verdicts(document).get("FAIL", 0) == lost and document.environment.seconds < 60


def test_refusals_are_counted_and_never_green(folder: Path) -> None:
    document = run(folder, "refuses_wide")
    refused = which(lambda args: args["x"].shape[-1] > 1000)
    assert {c.case for c in document.cells if c.verdict == "UNIMPLEMENTED"} == refused != set()
    assert verdicts(document)["PASS"] == len(document.cells) - len(refused)
    assert document.summary[0].refusals == len(refused)
    done = ferryman(
        "check",
        "--kernel",
        f"{folder}/my_kernels.py:refuses",
        "--op",
        "rms_norm",
        "--dtype",
        "f32",
        "--device",
        "cpu",
        "--out",
        str(folder / "out"),
    )
    assert done.code == 1 and "nothing ran, so nothing is shown to be right" in done.err
    assert f"UNIMPLEMENTED user:refuses, {len(document.cells)} cells:" in done.out and "only sm_90" in done.out


def test_several_outputs_are_a_tuple(folder: Path) -> None:
    assert set(verdicts(judged(folder, "rope", "rope"))) == {"PASS"}
    assert set(verdicts(judged(folder, "rotated_in_place", "rope_"))) == {"PASS"}
    assert "FAIL" in verdicts(judged(folder, "rotated_elsewhere", "rope_"))
    document = judged(folder, "rope_q_only", "rope")
    assert {c.reason for c in document} == {"G0: returned a Tensor; required: a tuple of 2 tensors (q, k)"}


def of_ours() -> Iterator[Any]:
    """Ops whose public call can give every result: the losses' log-sum-exp is forward's and backward's own."""
    twice = "as a user's kernel its own autograd runs beside the gate's: 4 backwards for 2"
    for name, op in registry.primitives().items():
        if len(op.outputs) == 1 or inspect.signature(getattr(ops, name)).return_annotation != "Tensor":
            fails = op.mutates and op.gradient.backward is not None
            yield pytest.param(name, marks=pytest.mark.xfail(strict=True, reason=twice) if fails else ())


@pytest.mark.slow
@pytest.mark.alternate(weeks=4)
@pytest.mark.parametrize("op", [*of_ours()])
def test_an_op_of_ours_is_a_kernel_too(op: str) -> None:
    """A public op called as a user calls it: keyword-only arguments, its switch for every output, backwards."""
    document = kernel.run(
        f"ferryman.ops:{op}",
        op,
        device="cpu",
        dtypes=["f32"],
        declaration=kernel.Declaration(roundings=serving(op, "torch").roundings),
    )
    assert set(verdicts(document)) == {"PASS"}, [c.reason for c in document.cells if c.verdict != "PASS"]


def test_declarations_widen_what_they_name_only(folder: Path) -> None:
    assert "FAIL" in verdicts(judged(folder, "random_rows", "softmax"))
    loose = judged(folder, "random_rows", "softmax", deterministic=False)
    assert all("not deterministic" not in (c.reason or "") for c in loose)
    assert all(c.gates["G5"].outcome == "pass" for c in loose)
    split = judged(folder, "rms_norm", accumulation="split-k")
    assert {c.accumulation for c in split} == {"split-k"}


CLI = ("check", "--device", "cpu", "--dtype", "f32", "--kernel")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [  # the ones that name a file that is there start a process
        (("my_kernels:rms_norm",), "check: --op is missing; required: one op beside --kernel"),
        (("my_kernels:rms_norm", "--op", "rms_norm", "--op", "softmax"), "--op is rms_norm, softmax; required: one op"),
        (("my_kernels:rms_norm", "--op", "rmsnorm"), "unknown op 'rmsnorm'; nearest: rms_norm"),
        (("my_kernels", "--op", "rms_norm"), "--kernel is 'my_kernels'; required: module:function"),
        (("a b:c", "--op", "rms_norm"), "required: module:function"),
        (("./nothing.py:f", "--op", "rms_norm"), "nothing.py is no file here"),
        (("no_such_module:f", "--op", "rms_norm"), "no_such_module cannot be imported: ModuleNotFoundError"),
        (("{folder}/my_kernels.py:rms_nrm", "--op", "rms_norm"), "'rms_nrm'; nearest: rms_norm"),
        (("{folder}/my_kernels.py:no_such_order", "--op", "rms_norm"), "eps is parameter 2; required: parameter 3"),
        (("{folder}/dies.py:f", "--op", "rms_norm"), "could not be loaded: its process ended with exit code 6"),
        (("{folder}/my_kernels.py:rms_norm", "--op", "rms_norm", "--backend", "torch"), "--backend is given"),
        (("{folder}/my_kernels.py:rms_norm", "--op", "rms_norm", "--model", "qwen3"), "no --model beside it"),
        (("{folder}/my_kernels.py:rms_norm", "--op", "rms_norm", "--timeout", "-1"), "--timeout is -1.0; required"),
        (("{folder}/my_kernels.py:rms_norm", "--op", "rms_norm", "--accumulation", "fp16"), "class 'fp16'"),
        (("{folder}/my_kernels.py:rms_norm", "--op", "rms_norm", "--rounding", "p"), "rms_norm permits 'p'"),
    ],
)
def test_bad_use_is_one_message(folder: Path, arguments: tuple[str, ...], message: str) -> None:
    done = ferryman(*CLI, *(a.format(folder=folder) for a in arguments))
    assert done.code == 2 and message in done.err and "Traceback" not in done.err, done.err
    assert done.out == ""


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        ("broken.py:f", KernelError, "broken.py cannot be imported: RuntimeError: no compiler"),
        ("leaves.py:f", KernelError, "leaves.py cannot be imported: SystemExit: 4"),
        ("my_kernels.py:number", KernelError, "my_kernels.py:number is an int; required: a function"),
        ("my_kernels.py:torch.no_such", UnknownName, "unknown function of .*'no_such'"),
        (
            "my_kernels.py:demanding",
            ArgumentError,
            "block is an argument that the op has not; required: rms_norm",
        ),
    ],
)
def test_what_cannot_be_loaded_says_why(folder: Path, where: str, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        user_kernel = kernel_adapter.load(kernel_adapter.parse(f"{folder}/{where}"))
        kernel_adapter.Adapter(user_kernel, registry.primitive("rms_norm"), where)


def test_options_of_a_kernel_need_one() -> None:
    for option in (("--timeout", "3"), ("--accumulation", "fp32"), ("--rounding", "p"), ("--not-deterministic",)):
        done = ferryman("check", *option)
        assert done.code == 2 and f"{option[0]} is given; required: --kernel beside it" in done.err


def test_loading_has_a_time_limit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "LOADING_SECONDS", 2.0)
    with pytest.raises(KernelError, match=r"could not be loaded: no result within 2 s \(time limit\)"):
        kernel.run(f"{folder}/slow.py:f", "rms_norm", device="cpu")


def test_a_process_that_talks_nonsense_is_ended(folder: Path) -> None:
    command = [sys.executable, "-c", "print('hello')\nimport time\ntime.sleep(600)"]
    with pytest.raises(KernelError, match="wrote what is no message: 'hello"):
        run(folder, "rms_norm", command=command)


def test_the_command_as_a_user_types_it(folder: Path) -> None:
    """A module beside the user, found without a path; the documents are written and say which function it was."""
    asked = ("--kernel", "my_kernels:twice", "--op", "rms_norm", "--dtype", "bf16", "--device", "cpu")
    done: Done = alone("check", *asked, cwd=folder)
    assert (
        done.code == 1
        and "rms_norm  user:twice      FAIL" in done.out
        and "FAIL rms_norm user:twice bfloat16" in done.out
    )
    document = results.load(folder / ".ferryman" / "kernel-rms_norm.json")
    assert document.environment.flags["kernel"] == "my_kernels:twice"
    assert {f"kernel-rms_norm.{s}" for s in ("json", "md", "xml")} <= {p.name for p in (folder / ".ferryman").iterdir()}
    shown = ferryman(*CLI, f"{folder}/my_kernels.py:rms_norm", "--op", "rms_norm", "--json")
    assert shown.code == 0 and results.parse(json.loads(shown.out)).summary[0].verdict == "PASS"


def test_the_page_s_commands_do_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "testing.md").read_text("utf-8")
    (tmp_path / "my_kernels.py").write_text(re.findall(r"```python\n# my_kernels\.py\n(.*?)```", page, re.DOTALL)[0])
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    ferryman (check --kernel .*)$", page, re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        done = ferryman(*command.split(), "--device", "cpu")
        assert done.code == 0 and "rms_norm  user:my_rms_norm  PASS" in done.out, done.out + done.err


@pytest.mark.parametrize(
    ("name", "sanitised"),
    [
        ("my_rms", "user:my_rms"),
        ("<lambda>", "user:_lambda_"),
        ("Ops.norm", "user:Ops.norm"),
        ("x" * 300, "user:" + "x" * 100),
    ],
)
def test_names_fit_the_schema(name: str, sanitised: str) -> None:
    assert kernel_adapter.implementation_name(name) == sanitised


def test_a_target_of_the_op_s_own_is_not_the_device() -> None:
    op = registry.primitive("cross_entropy")
    seen: list[tuple[Any, ...]] = []
    logits, classes = torch.ones(2, 3), torch.zeros(2, dtype=torch.int64)
    adapter = kernel_adapter.Adapter(lambda logits, target: seen.append((logits, target)) or (1, 2), op, "f")
    adapter(logits, classes, -100, 0.0, "device")
    assert seen[0][0] is logits and seen[0][1] is classes
    with pytest.raises(ArgumentError, match="target is parameter 1; required: parameter 2"):
        kernel_adapter.Adapter(lambda target, logits: None, op, "f")
