"""Norms and softmaxes that are written out keep the order of dimensions, and so do the ops that serve them."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import ferryman
from ferryman.porting.model.laid import laid
from tests.unit.test_disguises import assert_as_right, assert_gradients_as_right

WIDTH = 24
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(2, 5, WIDTH),
    "transposed": lambda: torch.randn(2, WIDTH, 5).transpose(1, 2),
    "heads": lambda: torch.randn(2, 3, 4, WIDTH).transpose(1, 2),
    "channels last": lambda: torch.randn(2, WIDTH, 3, 4).permute(0, 2, 3, 1),
    "all turned": lambda: torch.randn(WIDTH, 5, 2).permute(2, 1, 0),
    "a part": lambda: torch.randn(2, 5, 2 * WIDTH)[..., :WIDTH],
    "one row": lambda: torch.randn(1, 1, WIDTH),
    "none": lambda: torch.randn(0, 4, WIDTH).transpose(0, 1),
}


class WrittenOut(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH) + 0.5)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight
        return y * torch.nn.functional.silu(gate)


class Centred(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        y = x - x.mean(-1, keepdim=True)
        return y / torch.sqrt(y.square().mean(-1, keepdim=True) + 1e-5)


class Library(nn.LayerNorm):
    """PyTorch's own gives a contiguous result of any."""

    def __init__(self) -> None:
        super().__init__(WIDTH)


class Viewed(nn.Module):
    """What follows is a view, which a contiguous result has not."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x.transpose(1, 2)).transpose(1, 2).view(x.shape[0], -1)


KINDS: list[type[nn.Module]] = [WrittenOut, Centred, Gated, Library]


def _pair(kind: type[nn.Module]) -> tuple[nn.Module, nn.Module]:
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        sides.append(nn.ModuleList([kind(), nn.Linear(4, 4)]).eval())
    ferryman.port(sides[0])
    return sides[0][0], sides[1][0]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_result_lies_as_the_modules_own(kind: type[nn.Module], layout: str) -> None:
    ported, before = _pair(kind)
    x = LAYOUTS[layout]()
    given = [x.clone() for _ in range(2 if kind is Gated else 1)]
    with ferryman.trace() as trace:
        y = ported(*given)
    wanted = before(*given)
    assert trace.calls
    assert [s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1] == [
        s for s, n in zip(wanted.stride(), wanted.shape, strict=True) if n > 1
    ] or not y.numel()
    if y.numel():
        assert_as_right(y, lambda x: before(x, *given[1:]), given[0])


@pytest.mark.parametrize(("kind", "op"), [(WrittenOut, "rms_norm"), (Centred, "layer_norm")])
def test_a_module_may_go_on_with_a_view_of_its_child(kind: type[nn.Module], op: str) -> None:
    sides = []
    for _ in range(2):
        torch.manual_seed(0)
        sides.append(nn.Sequential(Viewed(kind()), nn.Linear(5 * WIDTH, 4)).eval())
    model, before = sides
    ferryman.port(model)
    x = torch.randn(2, WIDTH, 5)
    with ferryman.trace() as trace:
        y = model(x)
    assert op in {called for called, _ in trace.calls}
    assert_as_right(y, before, x)
    assert_gradients_as_right(model, before, x)


def test_where_the_last_dimension_is_the_innermost_nothing_is_copied() -> None:
    seen: list[Tensor] = []

    def run(x: Tensor) -> Tensor:
        seen.append(x)
        return torch.softmax(x, -1).contiguous()

    x = LAYOUTS["heads"]()
    y = laid(run, x)
    assert seen[0].data_ptr() == x.data_ptr() and seen[0].is_contiguous() and y.stride() == x.stride()
    assert torch.equal(y, torch.softmax(x, -1))


@pytest.mark.parametrize("layout", ["transposed", "heads", "contiguous"])
def test_a_compiler_follows_it_with_sizes_that_are_symbols(layout: str) -> None:
    ported, before = _pair(WrittenOut)
    torch._dynamo.reset()
    x = LAYOUTS[layout]()
    with ferryman.use(rms_norm="torch"):
        y = torch.compile(ported, fullgraph=True, backend="aot_eager", dynamic=True)(x)
    wanted = before(x)
    assert y.stride() == wanted.stride()
    assert_as_right(y, before, x)


class OfChannels(nn.Module):
    """A norm over an image's channels, written out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.rand(6) + 0.5), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        u = x.mean(1, keepdim=True)
        s = (x - u).pow(2).mean(1, keepdim=True)
        x = (x - u) / torch.sqrt(s + 1e-6)
        return self.weight[:, None, None] * x + self.bias[:, None, None]


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_norm_of_channels_lies_as_its_code_does(form: torch.memory_format) -> None:
    model = nn.Sequential(OfChannels()).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    x = torch.randn(2, 6, 3, 4).contiguous(memory_format=form)
    with torch.no_grad(), ferryman.trace() as trace:
        actual, wanted = model(x), before(x)
    assert {op for op, _ in trace.calls} == {"layer_norm"}
    assert actual.stride() == wanted.stride() == x.stride()
    assert_as_right(actual, before, x)
