"""Under autocast a ported module gives the dtype and the numbers that it gave unported; what an op computes in another
dtype there is left to the module's own code."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman
from ferryman.porting.model import casting
from ferryman.porting.model.results import AMPLITUDE
from tests.unit.test_disguises import assert_as_right


def _convolved(x: Tensor, taps: Tensor, shift: Tensor | None = None, name: str | None = None) -> Tensor:
    y = functional.conv1d(functional.pad(x, (taps.shape[1] - 1, 0)), taps.unsqueeze(1), shift, groups=x.shape[1])
    return y if name is None else functional.silu(y)


class Routine(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.taps, self.shift = nn.Parameter(torch.randn(32, 4)), nn.Parameter(torch.randn(32))

    def forward(self, x: Tensor) -> Tensor:
        return _convolved(x, self.taps, self.shift, "silu")


class Block(nn.Conv1d):
    def __init__(self) -> None:
        super().__init__(32, 32, 4, groups=32)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (3, 0)))


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.out = nn.Conv1d(32, 32, 4, groups=32), nn.Linear(9, 9)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.conv(functional.pad(x, (3, 0))))


class Leaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.g = nn.Parameter(torch.linspace(0.5, 1.5, 9))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.g


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.beside = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


@pytest.mark.parametrize("kind", [Routine, Block, Part, Leaf])
def test_the_dtype_is_the_unported_ones(kind: Callable[[], nn.Module]) -> None:
    torch.manual_seed(0)
    model, x = Net(kind()).eval(), torch.randn(2, 32, 9)
    before = copy.deepcopy(model)
    ferryman.port(model)
    with ferryman.trace() as trace, torch.no_grad():
        assert_as_right(model(x), before, x)
    assert {"causal_conv1d", "rms_norm"} & {op for op, _ in trace.calls}
    for dtype in (torch.float32, torch.bfloat16):
        for one in (model, before):
            one.to(dtype)
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            actual, wanted = model(x.to(dtype)), before(x.to(dtype))
        exact = copy.deepcopy(before).double()(x.to(dtype).double()).detach()
        assert actual.dtype is wanted.dtype
        assert (actual.double() - exact).norm() <= AMPLITUDE * (wanted.double() - exact).norm()


def test_what_autocast_widens_on_a_gpu_alone_is_left_out_for_16_bits() -> None:
    given = [torch.randn(3, 8), torch.randn(3, 8)]
    served = ferryman.ops.silu_mul
    assert casting.tests("silu_mul", lambda a, b: functional.silu(a) * b, served, given, "x") == []
    (test,) = casting.tests("silu_mul", lambda a, b: a / (1 + torch.exp(-a)) * b, served, given, "x")
    assert "itemsize >= 4" in test
    assert casting.tests("silu_mul", lambda a, b: (functional.silu(a) * b).double(), served, given, "x") == [
        "not x.is_meta and not torch.is_autocast_enabled(x.device.type)"
    ]
