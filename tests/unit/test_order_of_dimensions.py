"""Results of element-wise ops have the order of dimensions in memory that PyTorch's element-wise functions give."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from functools import reduce
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import ferryman
from ferryman import ops
from ferryman.dispatch import registry
from ferryman.ops.primitive import Primitive
from tests.bounded import must_be_right
from tests.unit.test_disguises import assert_as_right

OPS = [op for op in registry.primitives().values() if op.elementwise]
LAYOUTS: dict[str, Callable[[], Tensor]] = {
    "contiguous": lambda: torch.randn(3, 5, 4),
    "transposed": lambda: torch.randn(3, 4, 5).transpose(1, 2),
    "all turned": lambda: torch.randn(4, 5, 3).permute(2, 1, 0),
    "the first two": lambda: torch.randn(5, 3, 4).transpose(0, 1),
    "channels last": lambda: torch.randn(2, 6, 3, 4).to(memory_format=torch.channels_last),
    "one channel": lambda: torch.randn(2, 1, 3, 4).to(memory_format=torch.channels_last),
    "a part": lambda: torch.randn(3, 8, 5).transpose(1, 2)[..., 2:6],
    "expanded": lambda: torch.randn(4, 1, 5).expand(4, 3, 5).transpose(0, 2),
    "of one row": lambda: torch.randn(1, 4, 5).transpose(1, 2),
    "none": lambda: torch.randn(0, 4, 5).transpose(1, 2),
}


def _given(op: Primitive, x: Callable[[], Tensor]) -> list[Any]:
    names = {p.name: p.default for p in op.parameters}
    return [x() if name in op.elementwise else default for name, default in names.items()]


def _as_pytorch(op: Primitive, args: list[Any]) -> Tensor:
    return reduce(operator.mul, [a for n, a in zip(op.names, args, strict=True) if n in op.elementwise]) * 1


def _moved(y: Tensor) -> list[int]:
    """The strides that mean something: of dimensions with several elements."""
    return [s for s, n in zip(y.stride(), y.shape, strict=True) if n > 1] if y.numel() else []


def _each() -> Iterator[Any]:
    for op in OPS:
        for line in registry.implementations(op.name):
            if line.backend == "torch":
                yield pytest.param(op, line.name, id=f"{op.name}-{line.name}")


def test_there_are_such_ops() -> None:
    assert len(OPS) >= 3
    for op in OPS:
        assert len(op.outputs) == 1 and not op.mutates and set(op.elementwise) <= set(op.tensors)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("op", "line"), [*_each()])
@pytest.mark.parametrize("graded", [False, True])
def test_the_order_is_pytorchs(op: Primitive, line: str, layout: str, graded: bool) -> None:
    torch.manual_seed(0)
    args = _given(op, LAYOUTS[layout])
    for a in args:
        if graded and isinstance(a, Tensor):
            a.requires_grad_()
    call = getattr(ops, op.name)
    with ferryman.use(**{op.name: line}), ferryman.trace() as trace:
        first = call(*args)
    with ferryman.use(**{op.name: line}):
        again, kept = call(*args), call(*args)
    assert trace.calls == {(op.name, line): 1} or not first.numel()
    for y in (first, again, kept):
        assert y.shape == args[0].shape and _moved(y) == _moved(_as_pytorch(op, args))
        if y.numel():
            must_be_right(op.name, args, [y.contiguous()])
    if graded and first.numel():
        slopes = torch.autograd.grad(kept, [a for a in args if isinstance(a, Tensor)], torch.ones_like(kept))
        assert all(s.shape == args[0].shape and bool(s.isfinite().all()) for s in slopes)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_library_calls_and_fakes_agree(op: Primitive, layout: str) -> None:
    args = _given(op, LAYOUTS[layout])
    torch.library.opcheck(getattr(torch.ops.ferryman, op.name).default, tuple(args), test_utils="test_faketensor")
    y = getattr(torch.ops.ferryman, op.name)(*args)
    assert _moved(y) == _moved(_as_pytorch(op, args))


def test_a_vector_along_the_last_dimension_keeps_it_last() -> None:
    bias = torch.randn(5)
    for x, kept in ((LAYOUTS["transposed"](), False), (LAYOUTS["the first two"]()[..., :4], True)):
        y = ops.bias_act(x, bias[: x.shape[-1]], "silu")
        assert y.is_contiguous() is not kept
        must_be_right("bias_act", [x, bias[: x.shape[-1]], "silu", None], [y.contiguous()])


def test_an_explanation_is_of_the_call_that_runs() -> None:
    x = LAYOUTS["channels last"]()
    assert str(ferryman.explain(ops.bias_act, x)) == str(ferryman.explain(ops.bias_act, x.permute(0, 2, 3, 1)))


class _Views(nn.Module):
    """What it returns is a view, because element-wise functions keep the order of dimensions."""

    def __init__(self, gated: bool) -> None:
        super().__init__()
        self.gated = gated

    def forward(self, x: Tensor) -> Tensor:
        turned = x.transpose(1, 2)
        y = functional.silu(turned) * turned if self.gated else functional.gelu(turned)
        return y.transpose(1, 2).view(x.shape[0], -1)


@pytest.mark.parametrize("gated", [False, True])
def test_a_ported_module_may_go_on_with_a_view(gated: bool) -> None:
    model, before = (nn.Sequential(_Views(gated), nn.Linear(48, 4)).eval() for _ in range(2))
    before.load_state_dict(model.state_dict())
    ferryman.port(model)
    x = torch.randn(2, 6, 8)
    with ferryman.trace() as trace:
        y = model(x)
    assert {op for op, _ in trace.calls} >= {"silu_mul" if gated else "bias_act"}
    assert_as_right(y, before, x)
