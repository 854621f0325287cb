"""``norm(a + b)`` in ported forwards: which spellings are one op, which stay two, and that both compute the same."""

from __future__ import annotations

import ast
import copy
import inspect
import io
import textwrap
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import ferryman
from ferryman.dispatch import registry
from ferryman.porting.model import adding, generic
from ferryman.porting.model.port import port, unport
from tests.bounded import off

WIDTH = 48
NORM = registry.primitive("layer_norm")


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.last = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.25)
        for norm in (self.norm, self.last):
            nn.init.normal_(norm.weight)
            nn.init.normal_(norm.bias)

    def extra_repr(self) -> str:
        return ""


def normed(model: Base, *given: Tensor) -> Tensor:
    """The sum that the model's norm gets, from its own code."""
    seen: list[Tensor] = []
    handle = model.norm.register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    model(*given)
    handle.remove()
    return seen[0]


def beyond(norm: nn.LayerNorm, total: Tensor, output: Tensor) -> float:
    """How far a norm of a sum is off, in bounds of layer_norm."""
    return off(NORM, (total, norm.weight.detach(), norm.bias.detach(), norm.eps), (output.detach(),), total.dtype)


class PostNorm(Base):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.norm(self.drop(self.mix(x)) + x)


class PreNorm(Base):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = x + self.mix(x)
        residual = h
        h = self.norm(h)
        return residual + self.mix(h)


class Crossing(Base):
    """Two sides lead to the last norm; one of them has another norm between."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = self.mix(x)
        h = x + h
        if other is not None:
            residual = h
            h = self.norm(h)
            h = residual + self.mix(h) * other
        residual = h
        h = self.last(h)
        return residual + self.mix(h)


class Nested(Base):
    """An ``if`` in an ``if``."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = x + self.mix(x)
        if other is not None:
            if self.training:
                h = other + self.norm(h)
            else:
                h = other + h
        return self.last(h)


class Returned(Base):
    def forward(self, x: Tensor, other: Tensor | None = None) -> tuple[Tensor, Tensor]:
        h = x + self.mix(x)
        return self.norm(h), h


class Both(Base):
    """The norm is also called alone."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        return self.norm(self.mix(self.norm(x)) + x)


# Those that stay two


class Changed(Base):
    """The sum is changed before the norm reads it."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = x + self.mix(x)
        h.mul_(2.0)
        return self.norm(h)


class Rebound(Base):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = x + self.mix(x)
        g = h
        h = self.mix(h)
        return self.norm(h) + g


class Early(Base):
    """One side does not come to the norm."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = x + self.mix(x)
        if other is not None:
            return h
        return self.norm(h)


class Perhaps(Base):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = x + self.mix(x)
        return self.norm(h) if other is None else h


class ReadsIt(Base):
    """The test reads the sum."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = x + self.mix(x)
        if h.shape[0] > 2:
            h = h + 1.0
        return self.norm(h)


class Behind(Base):
    """Something that could change the sum runs before the norm, in one expression."""

    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        h = x + self.mix(x)
        return h.mul_(2.0) + self.norm(h)


FUSED: dict[type[Base], tuple[int, int]] = {  # without and with the second argument: calls of add_layer_norm
    PostNorm: (1, 1),
    PreNorm: (1, 1),
    Crossing: (1, 2),
    Nested: (1, 1),
    Returned: (1, 1),
    Both: (1, 1),
}
APART = (Changed, Rebound, Early, Perhaps, ReadsIt, Behind)


def drawn_model(kind: type[Base], dtype: torch.dtype = torch.float32) -> tuple[Base, Tensor, Tensor]:
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return kind().to(dtype), torch.randn(3, 5, WIDTH, dtype=dtype), torch.randn(3, 5, WIDTH, dtype=dtype)


def counted(call: Callable[[], Any]) -> dict[str, int]:
    with ferryman.trace() as traced:
        call()
    counts: dict[str, int] = {}
    for (op, _), n in traced.calls.items():
        counts[op] = counts.get(op, 0) + n
    return counts


def _twice(x: Tensor, other: Tensor | None) -> Callable[[nn.Module], Any]:
    return lambda m: m(x) if other is None else m(x, other)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("given", [False, True], ids=["one", "two"])
@pytest.mark.parametrize("kind", FUSED, ids=lambda k: k.__name__)
def test_an_addition_goes_into_the_norm_that_reads_it(kind: type[Base], given: bool, dtype: torch.dtype) -> None:
    model, x, other = drawn_model(kind, dtype)
    parity = generic.compare(model.eval(), _twice(x, other if given else None))
    assert parity.ok and parity.restored and not parity.miscounted, parity.reasons
    assert parity.calls["add_layer_norm"] == FUSED[kind][given] == parity.calls["add_layer_norm_backward"]
    assert parity.calls.get("layer_norm", 0) == (kind is Both)


@pytest.mark.parametrize("kind", APART, ids=lambda k: k.__name__)
def test_a_norm_of_anything_else_stays_apart(kind: type[Base]) -> None:
    model, x, other = drawn_model(kind)
    for given in (None, other):
        parity = generic.compare(model.eval(), _twice(x, given))
        assert parity.ok and "add_layer_norm" not in parity.calls, (parity.reasons, dict(parity.calls))


def test_what_training_draws_is_the_same() -> None:
    model, x, _ = drawn_model(PostNorm)
    torch.manual_seed(5)
    total = normed(model.train(), x)
    port(model)
    torch.manual_seed(5)
    with ferryman.trace() as traced:
        output = model(x)
    assert {op for op, _ in traced.calls} == {"add_layer_norm", "linear"}
    assert beyond(model.norm, total, output) <= 1


def test_calls_are_said_exactly_where_two_sides_lead_to_one_norm() -> None:
    model, x, other = drawn_model(Crossing)
    report = port(model)
    assert report.calls()["add_layer_norm"] == 1 and report.maybe() == {"add_layer_norm"}
    assert counted(lambda: model(x))["add_layer_norm"] == 1
    assert counted(lambda: model(x, other))["add_layer_norm"] == 2


def test_sums_of_other_shapes_and_dtypes_are_what_the_addition_gives() -> None:
    model, x, _ = drawn_model(PreNorm)
    for a, b in ((x, x[:1]), (x[0], x), (x, x.bfloat16()), (x, x[0, 0])):
        port(model)
        with ferryman.trace() as traced:
            y, s = adding.added(model.norm, a, b)
        unport(model)
        assert [op for op, _ in traced.calls] == ["add_layer_norm"] and torch.equal(s, a + b)
        assert beyond(model.norm, a + b, y) <= 1


def test_a_hook_or_autocast_keeps_the_norm_apart() -> None:
    model, x, _ = drawn_model(PostNorm)
    seen: list[Tensor] = []
    port(model.eval())
    handle = model.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    assert "layer_norm" in counted(lambda: model(x)) and len(seen) == 1
    handle.remove()
    assert "add_layer_norm" in counted(lambda: model(x)) and len(seen) == 1
    with torch.autocast("cpu", torch.bfloat16):
        output, calls = model(x), counted(lambda: model(x))
        unport(model)
        total, wanted = normed(model, x), model(x)
    assert "layer_norm" in calls and "add_layer_norm" not in calls and output.dtype == wanted.dtype
    assert beyond(model.norm, total, output) <= 1
    total = normed(model, x)
    port(model)
    own = model.norm.forward
    model.norm.forward = lambda x: own(x) * 2.0  # type: ignore[method-assign, assignment]
    assert "add_layer_norm" not in counted(lambda: model(x))
    doubled = model(x)
    del model.norm.forward
    assert beyond(model.norm, total, doubled / 2.0) <= 1
    plain = type(model.norm)
    model.norm.__class__ = type("Other", (plain,), {"forward": lambda self, x: plain.forward(self, x) * 3.0})
    assert "add_layer_norm" not in counted(lambda: model(x))
    hooked, x, _ = drawn_model(PostNorm)
    hooked.norm.register_forward_hook(lambda module, args, out: seen.append(out))
    port(hooked.eval())
    assert counted(lambda: hooked(x)).get("add_layer_norm", 0) == 0 and len(seen) == 2


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints_recompute_it(reentrant: bool) -> None:
    model, x, _ = drawn_model(PreNorm)
    x.requires_grad_()
    port(model)
    (wanted,) = torch.autograd.grad(model(x).sum(), x)
    with ferryman.trace() as traced:
        total = checkpoint(model, x, use_reentrant=reentrant).sum()
        total.backward()
    made_calls = sum(n for (op, _), n in traced.calls.items() if op == "add_layer_norm")
    assert made_calls == 2 and x.grad is not None and torch.equal(x.grad, wanted)


def test_it_is_compiled_whole_copied_and_pickled() -> None:
    model, x, _ = drawn_model(PreNorm)
    port(model.eval())
    again = io.BytesIO()
    torch.save(model, again)
    again.seek(0)
    for other in (copy.deepcopy(model), torch.load(again, weights_only=False)):
        assert torch.equal(other(x), model(x))
    last, x, _ = drawn_model(PostNorm)
    total = normed(last.eval(), x)
    port(last)
    assert beyond(last.norm, total, torch.compile(last, fullgraph=True, backend="eager")(x)) <= 1
    assert counted(lambda: copy.deepcopy(model)(x))["add_layer_norm"] == 1


def test_the_result_is_kept_by_no_local() -> None:
    tree = ast.parse(textwrap.dedent(inspect.getsource(PreNorm.forward))).body[0]
    assert isinstance(tree, ast.FunctionDef)
    text = ast.unparse(adding.fused(tree, "self", frozenset({"norm"}))[0])
    assert "ferryman_y0, h = ferryman_held(self.norm, x, self.mix(x))" in text and "h = ferryman_y0.pop()" in text
