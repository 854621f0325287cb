"""`ferryman fuzz`: what it prints of right kernels and of wrong ones, and when it exits with 1 or 2."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from ferryman.cli import new
from ferryman.dispatch import registry
from ferryman.porting.inputs import fuzz
from ferryman.porting.running import fuzzed
from tests.cli.run import ferryman
from tests.unit.other_packages import install, run

SOFTMAX = ("fuzz", "--device", "cpu", "--op", "softmax", "--implementation", "torch")


def table(text: str) -> dict[str, list[int]]:
    """Cases, right, refused, not run and failed of each implementation."""
    lines = [line.split() for line in text.splitlines()]
    return {words[1]: [int(n) for n in words[2:]] for words in lines if len(words) == 7 and words[2].isdigit()}


def test_right_kernels_and_the_document(tmp_path: Path) -> None:
    done = ferryman(*SOFTMAX, "--implementation", "cuda", "--cases", "9", "--out", str(tmp_path / "fuzz.json"))
    assert done.code == 0, done.out + done.err
    assert table(done.out) == {"torch": [9, 9, 0, 0, 0]}
    assert "NOT_RUN softmax cuda: cuda does not serve cpu devices" in done.out
    document = json.loads((tmp_path / "fuzz.json").read_text("utf-8"))
    assert document["kind"] == "ferryman-fuzz" and document["failures"] == []
    assert [row["right"] for row in document["rows"]] == [9] and document["environment"]["device"] == "cpu"


def test_one_case_is_drawn_by_its_number_and_shown() -> None:
    done = ferryman(*SOFTMAX, "--seed", "3", "--case", "17")
    assert done.code == 0 and table(done.out) == {"torch": [1, 1, 0, 0, 0]}
    assert fuzz.described(*fuzz.numbered(registry.primitive("softmax"), 17, 3)) in done.out


def test_interpreted_triton_has_a_process_of_its_own() -> None:
    pytest.importorskip("triton")
    done = ferryman("fuzz", "--device", "cpu", "--op", "linear", "--implementation", "triton", "--cases", "6")
    assert done.code == 0, done.out + done.err
    cases, right, refused, not_run, failed = table(done.out)["triton"]
    assert cases == right + refused + not_run == 6 and right >= 2 and failed == 0


def test_cases_of_one_dtype_keep_their_numbers() -> None:
    op = registry.primitive("softmax")
    everything = list(fuzz.cases(op, 40))
    wanted = {everything[0][1]}
    assert fuzz.numbers(op, 5) == [0, 1, 2, 3, 4]
    assert fuzz.numbers(op, 5, 0, wanted) == [i for i, (_, dtype) in enumerate(everything) if dtype in wanted][:5]
    done = ferryman(*SOFTMAX, "--dtype", "bf16", "--cases", "3", "--json")
    assert done.code == 0 and json.loads(done.out)["rows"][0]["right"] == 3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--op", "sofmax"), "unknown op 'sofmax'; nearest: softmax"),
        (("--op", "softmax", "--cases", "0"), "--cases is 0; required: 1 or more"),
        (("--op", "softmax", "--case", "-1"), "--case is -1; required: 0 or more"),
        (("--op", "softmax", "--case", "1", "--cases", "2"), "--cases is given; required: no --case beside it"),
        (("--op", "softmax", "--case", "1", "--dtype", "bf16"), "--dtype is given; required: no --case beside it"),
        (("--op", "softmax", "--implementation", "torhc"), "unknown backend or implementation 'torhc'; nearest: torch"),
        (("--op", "softmax", "--implementation", "torch.flash"), "unknown implementation of softmax 'torch.flash'"),
        (("--op", "softmax", "--dtype", "f8"), "unknown dtype 'f8'"),
        (("--op", "softmax", "--out", "."), "it is a folder; choose another --out"),
    ],
)
def test_bad_use_is_one_message(arguments: tuple[str, ...], says: str) -> None:
    done = ferryman("fuzz", "--device", "cpu", *arguments)
    assert (done.code, done.out) == (2, "") and says in done.err and len(done.err.splitlines()) == 1, done.err


def test_an_op_without_a_domain_is_bad_use_where_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    reason = "no evidence.py has a record of softmax"
    monkeypatch.setattr(fuzz, "undrawable", lambda op: {"softmax": reason}.get(op.name))
    done = ferryman("fuzz", "--device", "cpu", "--op", "softmax")
    assert (done.code, done.out) == (2, "")
    assert f"--op is softmax; required: an op that cases can be drawn for; {reason}" in done.err
    primitives, left_out = fuzzed.primitives_of(None)
    assert "softmax" not in {op.name for op in primitives} and len(primitives) == len(registry.primitives()) - 1
    assert [(one.op, one.reason) for one in left_out] == [("softmax", reason)]


def test_what_runs_nowhere_is_not_shown_to_be_right() -> None:
    done = ferryman("fuzz", "--device", "cpu", "--op", "softmax", "--implementation", "hip", "--cases", "2")
    assert done.code == 1 and "nothing ran, so nothing is shown to be right" in done.err


MENU = """
from ferryman.ops.menu import Implementation, menu

names = ("torch", "torch.forgets", "torch.raises", "torch.dies", "torch.always")
wheres = {name: f":{name.partition('.')[2] or 'bias_relu'}" for name in names}
IMPLEMENTATIONS = menu(
    "ferryman_bias_relu", *(Implementation(op="bias_relu", name=name, where=where) for name, where in wheres.items())
)
"""
KERNELS = """
import os
import torch

def bias_relu(x, bias, target):
    return torch.relu(x.float() + bias.float()).to(x.dtype).contiguous()

def forgets(x, bias, target):
    return bias_relu(x, bias if x.dim() < 3 else torch.zeros_like(bias), target)

def raises(x, bias, target):
    if not x.is_contiguous():
        raise ValueError("it wants contiguous rows")
    return bias_relu(x, bias, target)

def dies(x, bias, target):
    if x.dim() == 4:
        os._exit(41)
    return bias_relu(x, bias, target)

def always(x, bias, target):
    os._exit(42)
"""


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The op of `ferryman new`, with kernels that are wrong in one way each; and one that has no evidence."""
    folder = tmp_path_factory.mktemp("wrong")
    new.write("op", "bias_relu", folder / "sources")
    package = folder / "sources" / "bias_relu" / "ferryman_bias_relu"
    modules = {name: (package / f"{name}.py").read_text("utf-8") for name in ("definition", "evidence")}
    install(folder, "ferryman_bias_relu", {**modules, "implementations": MENU, "torch_kernels": KERNELS})
    bare = modules["definition"].replace("bias_relu", "bare")
    install(folder, "bare_ops", {"definition": bare, "implementations": "IMPLEMENTATIONS = ()\n"})
    return folder


def test_a_fault_costs_its_cases_and_is_repeated_by_the_command_that_is_printed(wrong: Path) -> None:
    names = [f"--implementation=torch{name}" for name in (".forgets", ".raises", ".dies")]
    done = run(wrong, "-m", "ferryman", "fuzz", "--op", "bias_relu", "--device", "cpu", "--cases", "14", *names)
    assert done.returncode == 1, done.stdout + done.stderr[-2000:]
    counts = table(done.stdout)
    assert set(counts) == {"torch.forgets", "torch.raises", "torch.dies"}
    for cases, right, refused, not_run, failed in counts.values():
        assert cases == right + failed == 14 and failed > 0 and refused == not_run == 0
    failures = [line for line in done.stdout.splitlines() if line.startswith("FAIL ")]
    assert len(failures) == sum(row[-1] for row in counts.values())
    reasons = {line.split()[2]: line for line in failures}
    assert "raised ValueError: it wants contiguous rows" in reasons["torch.raises"]
    assert "its process ended with code 41" in reasons["torch.dies"] and "G" in reasons["torch.forgets"]
    for name in ("torch.forgets", "torch.dies"):
        again = shlex.split(reasons[name].partition("; again: ")[2])
        assert again[:2] == ["ferryman", "fuzz"] and f"--implementation {name} --seed 0 --case" in reasons[name]
        repeated = run(wrong, "-m", *again)
        assert repeated.returncode == 1 and table(repeated.stdout) == {name: [1, 0, 0, 0, 1]}, repeated.stdout


def test_a_kernel_that_always_dies_is_left_out_in_the_end(wrong: Path) -> None:
    options = ("--op", "bias_relu", "--device", "cpu", "--implementation", "torch.always", "--cases", "9", "--json")
    done = run(wrong, "-m", "ferryman", "fuzz", *options)
    document = json.loads(done.stdout)
    assert done.returncode == 1
    assert [failure["number"] for failure in document["failures"]] == [0, 1, 2, 3, 4]
    assert [(row["failed"], row["not_run"]) for row in document["rows"]] == [(5, 4)]
    assert [(one["cases"], one["reason"]) for one in document["not_run"]] == [
        (4, "the rest is left out: torch.always had ended or held up its process 5 times")
    ]


def test_an_op_without_evidence_is_bad_use_and_has_a_page(wrong: Path) -> None:
    done = run(wrong, "-m", "ferryman", "fuzz", "--op", "bare")
    assert done.returncode == 2 and "no evidence.py has a record of bare" in done.stderr, done.stderr
    ops = run(wrong, "-m", "ferryman", "ops", "--op", "bare", "--device", "h200")
    assert ops.returncode == 0 and "the op's evidence has no standard case to ask about" in ops.stdout, ops.stderr
    page = run(wrong, "-m", "ferryman", "docs", "--op", "bare")
    assert page.returncode == 0 and "| `bare` | no standard case |" in page.stdout, page.stderr
