"""Ops of other packages in a ported model: recognised as ours are, and left out where their ``recognise.py`` breaks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.other_packages import install, run

SQUASHED = {
    "definition": '''
import torch
from torch import Tensor
from ferryman.ops.primitive import Cost, Limits, primitive, wide

@primitive(
    outputs=("y",), check=lambda x: None, meta=lambda x: x.new_empty(x.shape), cost=lambda x: Cost(1.0, 1.0),
    limits=Limits(bound=lambda args, outputs: ({"accumulate": args[0].abs()},)),
)
def squashed(x: Tensor) -> Tensor:
    """``x / (1 + |x|)``."""
    rows = wide(x)
    return (rows / (1.0 + rows.abs())).to(x.dtype)
''',
    "implementations": """
from ferryman.ops.menu import Implementation, menu
IMPLEMENTATIONS = menu("squashed_ops", Implementation(op="squashed", name="torch"))
""",
    "torch_kernels": """
import torch

def squashed(x, target):
    return torch.nn.functional.softsign(x.float()).to(x.dtype).contiguous()
""",
    "evidence": """
from ferryman.ops.evidence import Evidence
from ferryman.ops.primitive import Case, TensorSpec
EVIDENCE = (Evidence("squashed", lambda: [Case("one", {"x": TensorSpec((3, 5))})]),)
""",
    "recognise": """
from torch.nn import functional
from ferryman.ops.recognition import Candidate, Served
from squashed_ops.definition import squashed

def softsign(input):
    return squashed(input) if input.is_floating_point() else functional.softsign(input)

def functions():
    return {functional.softsign: Served("squashed", softsign)}

def modules(leaf):
    if not leaf.vectors and not leaf.matrices:
        yield Candidate("squashed", "ops.squashed(x)", 96)
""",
}

PORTED = """
import json, torch, ferryman
from ferryman.dispatch import registry
from torch import nn
from torch.nn import functional

class Squash(nn.Module):
    def forward(self, x):
        return x / (1.0 + x.abs())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.gate = nn.Linear(8, 8), Squash(), nn.SiLU()

    def forward(self, x):
        return self.gate(functional.softsign(self.second(self.first(x)) * 2.0))

torch.manual_seed(0)
model, x = Model(), torch.randn(4, 8)
with torch.no_grad():
    before = model(x)
    report = ferryman.port(model)
    with ferryman.trace() as trace:
        after = model(x)
print(json.dumps({
    "close": bool(torch.allclose(before, after, atol=1e-6)),
    "calls": {name: count for (name, _), count in trace.calls.items()},
    "broken": dict(registry.broken()),
}))
"""


def ported(folder: Path, recognise: str) -> dict[str, object]:
    install(folder, "squashed_ops", {**SQUASHED, "recognise": recognise})
    (folder / "ported.py").write_text(PORTED)  # a file: proofs read the source
    done = run(folder, "ported.py")
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, object] = json.loads(done.stdout)
    assert report["close"]
    return report


def test_a_function_and_a_module_are_served_by_another_package_s_op(tmp_path: Path) -> None:
    report = ported(tmp_path, SQUASHED["recognise"])
    assert report["calls"] == {"linear": 1, "squashed": 2, "bias_act": 1} and report["broken"] == {}


BREAKING = {
    "does not import": ("import no_such_module", "ModuleNotFoundError: No module named 'no_such_module'"),
    "raises": (
        SQUASHED["recognise"].replace("    if not leaf", "    raise RuntimeError('wrong')\n    if not leaf"),
        "RuntimeError: wrong",
    ),
    "gives another type": (
        SQUASHED["recognise"].replace('Served("squashed", softsign)', "softsign"),
        "functions() gives function; required: Served",
    ),
    "names an unknown op": (
        SQUASHED["recognise"].replace('Served("squashed"', 'Served("squished"'),
        "unknown op 'squished'",
    ),
    "has what is no expression": (SQUASHED["recognise"].replace("ops.squashed(x)", "ops.squashed(x"), "SyntaxError"),
    "takes a function of ours": (
        SQUASHED["recognise"].replace("{functional.softsign", "{functional.silu"),
        "functions() has silu, which another op stands for",
    ),
}


@pytest.mark.parametrize("fault", BREAKING)
def test_one_that_breaks_is_named_and_left_out(fault: str, tmp_path: Path) -> None:
    recognise, reason = BREAKING[fault]
    report = ported(tmp_path, recognise)
    calls, broken = report["calls"], report["broken"]
    assert isinstance(calls, dict) and isinstance(broken, dict)
    assert calls["linear"] == calls["bias_act"] == 1, "ours serve as before"
    assert list(broken) == ["recognise squashed_ops"] and reason in broken["recognise squashed_ops"]


def test_an_expression_that_cannot_be_computed_is_refused(tmp_path: Path) -> None:
    report = ported(tmp_path, SQUASHED["recognise"].replace("ops.squashed(x)", "ops.squashed(x, self.nothing)"))
    assert report["calls"] == {"linear": 1, "squashed": 1, "bias_act": 1} and report["broken"] == {}


def test_doctor_names_it_without_a_model(tmp_path: Path) -> None:
    install(tmp_path, "squashed_ops", {**SQUASHED, "recognise": BREAKING["gives another type"][0]})
    done = run(tmp_path, "-m", "ferryman", "doctor", "--json")
    assert done.returncode == 0, done.stderr[-3000:]
    reasons = {row["entry"]: row["reason"] for row in json.loads(done.stdout)["broken"]}
    assert "required: Served" in reasons["recognise squashed_ops"]
