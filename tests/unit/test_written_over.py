"""What a served module gives may be written over where its own result may, and a forward sees its own locals."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ferryman
from ferryman.porting.model import laid
from tests.unit.situations import load

CODE = """
import builtins
import inspect
import sys

import torch
from torch import nn
from torch.nn import functional as F


class Scaled(nn.Module):
    def forward(self, x):
        return F.softmax(x, dim=-1).mul(1.0)


class Wide(nn.Module):
    def forward(self, x):
        return (F.softmax(x.float(), dim=-1) * 1.0).to(x.dtype)


class Cast(nn.Module):
    def forward(self, x):
        return torch.softmax(x, dim=-1, dtype=torch.float32).to(x.dtype)


class Over(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner, self.linear = inner, nn.Linear(8, 8)

    def forward(self, x):
        y = self.inner(self.linear(x))
        y.mul_(2.0)
        return y


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = torch.softmax(self.linear(x), -1).mul(1.0)
        y[..., 0] = 0.0
        return y


class Locals(nn.Module):
    def forward(self, x):
        y = F.softmax(x, dim=-1)
        self.seen = sorted(locals())
        return y


class Vars(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = F.softmax(self.linear(x), dim=-1)
        self.seen = sorted(vars())
        return y


class Frame(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x):
        y = F.softmax(self.linear(x), dim=-1)
        self.seen = sorted(sys._getframe().f_locals)
        return y


class Current(Frame):
    def forward(self, x):
        y = F.softmax(self.linear(x), dim=-1)
        self.seen = sorted(inspect.currentframe().f_locals)
        return y


class Renamed(Frame):
    def forward(self, x):
        y, own = F.softmax(self.linear(x), dim=-1), vars
        self.seen = sorted(own())
        return y


class Starred(Frame):
    def forward(self, x):
        y = F.softmax(self.linear(x), dim=-1)
        self.seen = sorted(dir(*()))
        return y


class Builtin(Frame):
    def forward(self, x):
        y = F.softmax(self.linear(x), dim=-1)
        self.seen = sorted(builtins.locals())
        return y


def helper(t, seen):
    result = F.softmax(t, dim=-1)
    seen += dir()
    return result


class Within2(nn.Module):
    def forward(self, x):
        self.seen = []
        return helper(x, self.seen)
"""


@pytest.fixture
def module(tmp_path: Path) -> Any:
    return load(CODE, f"ferryman_written_over_{abs(hash(str(tmp_path)))}", tmp_path)


def _both(inner: nn.Module) -> tuple[nn.Module, nn.Module]:
    own = nn.Sequential(inner, nn.Linear(8, 8))
    ported = copy.deepcopy(own)
    ferryman.port(ported)
    return own, ported


def _slopes(net: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    x = x.clone().requires_grad_()
    (net(x).float() * torch.arange(8.0)).sum().backward()
    return [x.grad, *(p.grad for p in net.parameters())]  # type: ignore[list-item]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["Scaled", "Wide", "Cast", "Within"])
def test_a_result_that_may_be_written_over_may_be(module: Any, name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    inner = module.Within() if name == "Within" else module.Over(getattr(module, name)())
    own, ported = _both(inner.to(dtype))
    own, ported, x = own.to(dtype), ported.to(dtype), torch.randn(2, 3, 8, dtype=dtype)
    try:
        wanted = _slopes(own, x)
    except RuntimeError:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            _slopes(ported, x)
        return
    with ferryman.trace() as trace:
        actual = _slopes(ported, x)
    assert "softmax" in {op for op, _ in trace.calls}
    for a, w in zip(actual, wanted, strict=True):
        assert float((a.double() - w.double()).abs().max()) <= torch.finfo(dtype).eps * 32 * float(w.abs().max())


_READS = ["Locals", "Vars", "Within2", "Frame", "Current", "Renamed", "Starred", "Builtin"]


@pytest.mark.parametrize("name", _READS)
def test_a_forward_that_asks_for_its_locals_sees_its_own(module: Any, name: str) -> None:
    own, ported = _both(getattr(module, name)())
    x = torch.randn(2, 3, 8)
    with torch.no_grad():
        own(x), ported(x)
    assert ported[0].seen == own[0].seen


def test_only_what_a_backward_needs_is_copied() -> None:
    assert laid.keeps_result("softmax") and not laid.keeps_result("rms_norm")
    x = torch.randn(4, requires_grad=True) * 1.0
    assert laid.apart(x, torch.bfloat16) is x and laid.apart(x.detach(), torch.float32).data_ptr() == x.data_ptr()
    assert laid.apart(x, torch.float32).data_ptr() != x.data_ptr()
