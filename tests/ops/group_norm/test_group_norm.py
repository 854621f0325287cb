"""group_norm: what it refuses, which line serves what, results' layout, and modules of a model that it stands for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils._python_dispatch import TorchDispatchMode

import ferryman
from ferryman.device_profiles import profile
from ferryman.dispatch import registry, select
from ferryman.errors import ArgumentError, PortError
from ferryman.ops import group_norm
from ferryman.porting.model.port import port
from tests.bounded import judged, off

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"x": torch.ones(6)}, r"x\.dim\(\) is 1; required: at least 2"),
        ({"num_groups": 4}, "num_groups is 4; required: a divisor of 6"),
        ({"num_groups": 0}, "num_groups is 0; required: a divisor of 6"),
        ({"num_groups": -2}, "num_groups is -2; required: a divisor of 6"),
        ({"weight": torch.ones(3)}, r"weight\.shape is \(3,\); required: \(6,\)"),
        ({"bias": torch.ones(6, 1)}, r"bias\.shape is \(6, 1\); required: \(6,\)"),
        ({"weight": torch.ones(6).half()}, r"weight\.dtype is torch\.float16"),
        ({"x": torch.ones(2, 6, 3).double()}, r"x\.dtype is torch\.float64"),
        ({"x": torch.ones(2, 6, 3).int()}, r"x\.dtype is torch\.int32"),
        ({"eps": -1.0}, "eps is -1.0"),
        ({"eps": float("nan")}, "eps is nan"),
    ],
)
def test_what_it_cannot_mean_is_refused(change: dict[str, Any], reason: str) -> None:
    args = {"x": torch.ones(2, 6, 3), "num_groups": 3, "weight": None, "bias": None, **change}
    with pytest.raises(ArgumentError, match=reason):
        group_norm(**args)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("line", ["torch", "definition"])
def test_it_is_pytorch_s_function_and_names_what_ran(line: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, w, b = torch.randn(3, 12, 5, 7).to(dtype), torch.randn(12).to(dtype), torch.randn(12).to(dtype)
    with ferryman.use(line), ferryman.trace() as trace:
        y = group_norm(x, 4, w, b, 1e-3)
    assert dict(trace.calls) == {("group_norm", line): 1}
    assert off(registry.primitive("group_norm"), (x, 4, w, b, 1e-3), [y], dtype) <= 1


@pytest.mark.parametrize("line", ["torch", "definition"])
@pytest.mark.parametrize(
    ("x", "kept"),
    [
        (torch.randn(2, 6, 5, 3).to(memory_format=torch.channels_last), torch.channels_last),
        (torch.randn(2, 6, 5, 3, 4).to(memory_format=torch.channels_last_3d), torch.channels_last_3d),
        (torch.randn(2, 6, 5, 3), torch.contiguous_format),
        (torch.randn(2, 5, 6).transpose(1, 2), torch.contiguous_format),
        (torch.randn(2, 6, 5, 6)[..., ::2], torch.contiguous_format),
        (torch.randn(2, 6, 1, 1).to(memory_format=torch.channels_last), torch.contiguous_format),
    ],
)
def test_channels_stay_last_in_results_and_gradients(line: str, x: Tensor, kept: torch.memory_format) -> None:
    leaf = x.requires_grad_()
    with ferryman.use(line):
        y = group_norm(leaf, 3)
        (grad,) = torch.autograd.grad(y, leaf, torch.randn(y.shape))
    assert y.is_contiguous(memory_format=kept)
    assert grad.is_contiguous(memory_format=kept)


def test_gradients_of_vectors_are_those_that_are_asked_for() -> None:
    x, w, b = torch.randn(2, 6, 5, requires_grad=True), torch.randn(6), torch.randn(6, requires_grad=True)
    y = group_norm(x, 2, w, b)
    y.retain_grad()
    y.square().sum().backward()
    assert x.grad is not None and w.grad is None and b.grad is not None
    given = (y.grad, x.detach(), 2, w, b.detach(), 1e-5, False, True)
    gradients = (x.grad, torch.empty(0), b.grad)
    assert off(registry.primitive("group_norm_backward"), given, gradients, torch.float32) <= 1


def test_an_empty_batch_has_gradients_of_zero() -> None:
    x, w = torch.empty(0, 6, 5, requires_grad=True), torch.randn(6, requires_grad=True)
    group_norm(x, 2, w).sum().backward()
    assert w.grad is not None and w.grad.tolist() == [0.0] * 6


@pytest.mark.parametrize(
    ("shape", "dtype", "forward", "backward"),
    [
        ((2, 320, 32, 32), torch.bfloat16, "triton.rows", "triton.rows"),
        ((2, 320, 32, 32), torch.float32, "triton.rows", "triton.long"),  # 16 channels of 1024 places, padded
        ((2, 320, 64, 64), torch.bfloat16, "triton.long", "triton.long"),
        ((2, 256), torch.float32, "triton.rows", "triton.rows"),
    ],
)
@pytest.mark.parametrize("device", ["h200", "mi300x"])
def test_groups_that_registers_hold_are_read_once(
    device: str, shape: tuple[int, ...], dtype: torch.dtype, forward: str, backward: str
) -> None:
    x, known = torch.empty(shape, dtype=dtype, device="meta"), profile(device)
    grad = (x, x, 32, None, None, 1e-5, False, False)
    for op, args, wanted in (
        ("group_norm", (x, 32, None, None, 1e-5), forward),
        ("group_norm_backward", grad, backward),
    ):
        primitive = registry.primitive(op)
        view = select.View.of(primitive, args, known)
        able = [n.name for n in registry.asked(op, ("triton",)) if not select.refusals(n, view, known, absent=True)]
        assert able[0] == wanted, op


class Written(nn.Module):
    """Written out; names say nothing."""

    def __init__(self, groups: int = 4) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(16)), nn.Parameter(torch.randn(16))
        self.c, self.d = groups, 1e-4

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], self.c, -1)
        apart = rows - rows.mean(-1, keepdim=True)
        rows = apart * torch.rsqrt(apart.square().mean(-1, keepdim=True) + self.d)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return rows.reshape(x.shape) * self.b.reshape(shape) + self.a.reshape(shape)


class Unbiased(Written):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], self.c, -1)
        rows = (rows - rows.mean(-1, keepdim=True)) * torch.rsqrt(rows.var(-1, keepdim=True) + self.d)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return rows.reshape(x.shape) * self.b.reshape(shape) + self.a.reshape(shape)


class Mixed(Written):
    """Groups of channels that stand apart: 0, 4, 8, 12 are one."""

    def forward(self, x: Tensor) -> Tensor:
        turned = x.unflatten(1, (-1, self.c)).transpose(1, 2).reshape(x.shape)
        return F.group_norm(turned, self.c, self.a, self.b, self.d)


class OverChannels(Written):
    """Statistics of a place, as a norm of channels alone has."""

    def forward(self, x: Tensor) -> Tensor:
        rows = x.unflatten(1, (self.c, -1))
        apart = rows - rows.mean(2, keepdim=True)
        rows = apart * torch.rsqrt(apart.square().mean(2, keepdim=True) + self.d)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return rows.flatten(1, 2) * self.b.reshape(shape) + self.a.reshape(shape)


class EpsOutside(Written):
    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], self.c, -1)
        apart = rows - rows.mean(-1, keepdim=True)
        rows = apart / (apart.square().mean(-1, keepdim=True).sqrt() + self.d)
        shape = (1, -1) + (1,) * (x.dim() - 2)
        return rows.reshape(x.shape) * self.b.reshape(shape) + self.a.reshape(shape)


class Fixed(nn.Module):
    """Its numbers stand in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(64))

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(x.shape[0], 32, -1)
        apart = rows - rows.mean(-1, keepdim=True)
        rows = apart / torch.sqrt(apart.square().mean(-1, keepdim=True) + 1e-6)
        return rows.reshape(x.shape) * self.weight.reshape((1, -1) + (1,) * (x.dim() - 2))


class Renamed(nn.LayerNorm):
    """Called as another norm is."""

    def __init__(self) -> None:
        super().__init__(16)
        self.groups = 8

    def forward(self, input: Tensor) -> Tensor:
        return F.group_norm(input, self.groups, self.weight, self.bias, self.eps)


class Taken(TorchDispatchMode):
    """The arguments of the op's calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.ferryman.group_norm.default:
            self.calls.append(args)
        return func(*args, **(kwargs or {}))


def assert_right(ported: nn.Module, args: tuple[Any, ...], after: Tensor, exact: Tensor) -> None:
    """What a ported module's one call of the op gave is within its bound of the module's own code in float64."""
    with Taken() as taken, torch.no_grad():
        ported(*args)
    (given,) = taken.calls
    _, (room,) = judged(registry.primitive("group_norm"), given, [after.dtype], after.dtype)
    assert bool(((after.double() - exact).abs() <= room).all())


def in_double(model: nn.Module, *args: Any) -> Tensor:
    wide = copy.deepcopy(model).double()
    result: Tensor = wide(*(a.double() if isinstance(a, Tensor) else a for a in args))
    return result.detach()


def of_model(module: nn.Module, channels: int) -> tuple[nn.Module, Tensor]:
    torch.manual_seed(1)
    return nn.Sequential(module, nn.Identity()), torch.randn(2, channels, 3, 5)


@pytest.mark.parametrize(
    ("make", "channels"),
    [
        (lambda: nn.GroupNorm(4, 16), 16),
        (lambda: nn.GroupNorm(16, 16), 16),
        (lambda: nn.GroupNorm(1, 16, affine=False), 16),
        (Written, 16),
        (Fixed, 64),
        (Renamed, 16),
    ],
)
def test_a_module_is_served_by_what_it_computes(make: Callable[[], nn.Module], channels: int) -> None:
    model, x = of_model(make(), channels)
    exact = in_double(model, x)
    report = port(model)
    with ferryman.trace() as trace:
        after = model(x.requires_grad_())
    assert {op for op, _ in trace.calls} == {"group_norm"}, report
    assert_right(model, (x,), after.detach(), exact)
    after.sum().backward()


@pytest.mark.parametrize("make", [Unbiased, OverChannels, EpsOutside])
def test_a_look_alike_stays_what_it_is(make: Callable[[], nn.Module]) -> None:
    model, _ = of_model(make(), 16)
    with pytest.raises(PortError, match="which is nearest: result 0 differs"):
        port(model)


def test_what_a_function_s_replacement_serves_is_the_function_s() -> None:
    """Every argument that it serves; others go to the function itself, with its errors."""
    model = nn.Sequential(Mixed())
    x = torch.randn(2, 16, 3, 5)
    exact = in_double(model, x)
    port(model)
    with ferryman.trace() as trace:
        after = model(x)
    assert {op for op, _ in trace.calls} == {"group_norm"}
    assert_right(model, (x,), after.detach(), exact)


class Called(nn.Module):
    def forward(self, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        return F.group_norm(x, groups, weight, bias, eps=eps)


@pytest.mark.parametrize(
    ("x", "groups", "weight", "eps", "served"),
    [
        (torch.randn(3, 6, 5), 3, torch.randn(6), 1e-5, True),
        (torch.randn(3, 6), 2, None, 0.5, True),
        (torch.randn(1, 6, 1, 2), 6, torch.randn(6), 1e-5, True),
        (torch.randn(3, 6, 5).bfloat16(), 3, torch.randn(6).bfloat16(), 1e-5, True),
        (torch.randn(3, 6, 5).bfloat16(), 3, torch.randn(6), 1e-5, False),
        (torch.randn(3, 6, 5).double(), 3, torch.randn(6).double(), 1e-5, False),
        (torch.randn(3, 6, 5), 3, None, -0.5, False),
    ],
)
def test_each_call_of_the_function(x: Tensor, groups: int, weight: Tensor | None, eps: float, served: bool) -> None:
    model = Called()
    bias = None if weight is None else weight + 1
    before, exact = model(x, groups, weight, bias, eps), in_double(model, x, groups, weight, bias, eps)
    port(model)
    with ferryman.trace() as trace:
        after = model(x, groups, weight, bias, eps)
    assert bool(trace.calls) is served
    if served:
        assert_right(model, (x, groups, weight, bias, eps), after, exact)
    else:
        torch.testing.assert_close(after, before, atol=0, rtol=0, equal_nan=True)


@pytest.mark.parametrize(("shape", "groups"), [((1, 6), 6), ((1, 6, 1), 6), ((3, 6, 2), 4)])
def test_calls_that_the_function_refuses_are_refused_alike(shape: tuple[int, ...], groups: int) -> None:
    model, x = Called(), torch.randn(shape)
    with pytest.raises((ValueError, RuntimeError)) as before:
        model(x, groups, None, None, 1e-5)
    port(model)
    with pytest.raises(type(before.value), match=str(before.value).split("[")[0][:40]):
        model(x, groups, None, None, 1e-5)
