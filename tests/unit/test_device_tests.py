"""Tests of a device's kind in a method of an activation: served where a call is on the side that a proof took."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ferryman
from ferryman.errors import PortError
from tests.unit.situations import load
from tests.unit.test_disguises import assert_as_right

_CODE = """
import torch, torch.nn.functional as F
from torch import nn
class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 64)
{buffer}
    def act(self, gate{more}):
        {before}
        return F.gelu(gate) if {test} else F.gelu(gate.float()).double()
    def forward(self, x):
        h, gate = self.proj(x).chunk(2, dim=-1)
        return h * self.act(gate{given})
"""


def _model(folder: Path, test: str, before: str = "pass", more: str = "", given: str = "", buffer: str = "") -> Any:
    code = _CODE.format(test=test, before=before, more=more, given=given, buffer=buffer)
    torch.manual_seed(0)
    return nn.Sequential(load(code, f"ferryman_device_{abs(hash((code, str(folder))))}", folder).Gated()).eval()


def _calls(model: nn.Module, x: torch.Tensor) -> tuple[torch.Tensor, set[str]]:
    with ferryman.trace() as trace, torch.no_grad():
        y = model(x)
    return y, {op for op, _ in trace.calls}


@pytest.mark.parametrize("test", ["gate.device.type != 'meta'", "gate.device.type not in ('meta', 'mps')"])
def test_a_gate_whose_method_asks_for_the_device_is_served_on_the_side_that_a_proof_took(
    test: str, tmp_path: Path
) -> None:
    model, before = _model(tmp_path, test), _model(tmp_path, test)
    ferryman.port(model)
    x = torch.randn(3, 16)
    y, calls = _calls(model, x)
    assert len(calls) == 2
    with torch.no_grad():
        assert_as_right(y, before, x)
    y, calls = _calls(model.to("meta"), x.to("meta"))
    assert len(calls) == 1 and y.dtype is torch.float64  # the module's own other side


def test_what_is_made_on_another_device_than_a_call_s_is_left_to_the_module(tmp_path: Path) -> None:
    model = _model(tmp_path, "gate.device.type != 'meta'")
    ferryman.port(model)
    with torch.device("meta"):
        _, calls = _calls(model, torch.randn(3, 16, device="cpu"))
    assert len(calls) == 1


@pytest.mark.parametrize(
    "changed",
    [
        {"test": "torch.zeros(()).device.type != 'meta'"},
        {"test": "where.device.type != 'meta'", "before": "where = torch.zeros(())"},
        {
            "test": "where.device.type != 'meta'",
            "more": ", where",
            "given": ", self.kept",
            "buffer": "        self.register_buffer('kept', torch.zeros((), device='meta'))",
        },
        {"test": "gate.device.type == 'meta'"},
        {"test": "gate.device.type != chr(109)"},
    ],
)
def test_other_tests_of_a_device_give_what_they_gave(changed: dict[str, str], tmp_path: Path) -> None:
    model, before = _model(tmp_path, **changed), _model(tmp_path, **changed)
    try:
        ferryman.port(model)
    except PortError:
        return
    x = torch.randn(3, 16)
    for given in (x, x.bfloat16()):
        y, _ = _calls(model.to(given.dtype), given)
        with torch.no_grad():
            assert y.dtype is before.to(given.dtype)(given).dtype
            assert_as_right(y, before, given)
