"""A head and its loss in one part of a forward: what is served, and what ends that."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ferryman
from tests.unit.test_disguises import assert_as_right, assert_gradients_as_right

WIDTH, CLASSES = 48, 90
OP = "linear_cross_entropy"


class Head(nn.Module):
    def __init__(self, bias: bool = False) -> None:
        super().__init__()
        self.pad, self.lm_head = -100, nn.Linear(WIDTH, CLASSES, bias=bias)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.lm_head(x).float()
        return F.cross_entropy(z.view(-1, z.shape[-1]), y.view(-1), ignore_index=self.pad)


class Narrow(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.lm_head(x).view(-1, CLASSES), y.view(-1))


class Wide(Head):
    """Its product is in float32, and rounds nothing to storage."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = x.float() @ self.lm_head.weight.float().t()
        return F.cross_entropy(z.view(-1, CLASSES), y.view(-1))


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte = nn.Embedding(CLASSES, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, self.wte.weight).flatten(0, 1), y.flatten())


class Net(nn.Module):
    def __init__(self, head: nn.Module) -> None:
        super().__init__()
        self.head, self.beside = head, nn.Linear(4, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.head(x, y)
        return loss


def pair(kind: Callable[[], nn.Module]) -> tuple[Net, Net]:
    torch.manual_seed(0)
    before = Net(kind())
    after = copy.deepcopy(before)
    ferryman.port(after)
    return before, after


def given(rows: tuple[int, ...] = (2, 5), odd: int | None = -100) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)
    y = torch.randint(0, CLASSES, rows)
    if odd is not None:
        y.view(-1)[-2:] = odd
    return torch.randn(*rows, WIDTH), y


def calls(model: nn.Module, x: Tensor, y: Tensor) -> set[str]:
    with ferryman.trace() as trace:
        model(x, y)
    return {name for name, _ in trace.calls}


class Of(nn.Module):
    """A net of one input: its class numbers stay."""

    def __init__(self, net: nn.Module, y: Tensor) -> None:
        super().__init__()
        self.net, self.y = net, y

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.net(x, self.y)
        return loss


def assert_same(before: nn.Module, after: nn.Module, x: Tensor, y: Tensor) -> None:
    wanted, actual = before(x, y), after(x, y)
    assert wanted.dtype == actual.dtype and wanted.shape == actual.shape
    assert_as_right(actual, Of(before, y), x)
    assert_gradients_as_right(Of(after, y), Of(before, y), x)


def assert_no_row_counts(before: Net, after: Net, x: Tensor, y: Tensor) -> None:
    """The mean of nothing, and gradients that are zeros or NaN where the unported net's are."""
    slopes = []
    for model in (before, after):
        leaf = x.clone().requires_grad_()
        loss = model(leaf, y)
        assert loss.isnan()
        slopes.append(torch.autograd.grad(loss, [leaf, *model.head.parameters()]))
    for wanted, actual in zip(*slopes, strict=True):
        assert torch.equal(actual.isnan(), wanted.isnan())
        assert not actual.nan_to_num().any() and not wanted.nan_to_num().any()


@pytest.mark.parametrize("kind", [Head, Narrow, Tied, lambda: Head(True)])
def test_a_head_and_its_loss_are_one_call(kind: Callable[[], nn.Module]) -> None:
    before, after = pair(kind)
    x, y = given()
    assert calls(after, x, y) == {OP}
    assert_same(before, after, x, y)
    assert_no_row_counts(before, after, x, torch.full_like(y, -100))
    for dtype in (torch.bfloat16, torch.float16):
        before.to(dtype), after.to(dtype)
        assert calls(after, x.to(dtype), y) == {OP}
        assert_same(before, after, x.to(dtype), y)


def test_a_row_that_does_not_count_gives_nothing() -> None:
    _, after = pair(Head)
    x, y = given()
    leaf = x.clone().requires_grad_()
    after(leaf, y).backward()
    assert leaf.grad is not None and not leaf.grad[y == -100].any() and leaf.grad[y != -100].any()


def test_a_class_that_is_none_makes_the_loss_nan() -> None:
    before, after = pair(Head)
    x, y = given(odd=CLASSES)
    with pytest.raises(IndexError):
        before(x, y)
    assert after(x, y).isnan()


def test_a_frozen_head_learns_nothing() -> None:
    before, after = pair(Head)
    for model in (before, after):
        model.head.lm_head.requires_grad_(False)
    assert_same(before, after, *given())
    leaf = given()[0].requires_grad_()
    after(leaf, given()[1]).backward()
    assert after.head.lm_head.weight.grad is None and leaf.grad is not None


def test_no_row_at_all_is_left_to_the_module() -> None:
    before, after = pair(Head)
    x, y = given((0, 5), None)
    assert OP not in calls(after, x, y)
    assert after(x, y).isnan() and before(x, y).isnan()


class Viewed(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        try:
            return F.cross_entropy(self.lm_head(x).view(-1, CLASSES), y.view(-1))
        except RuntimeError:
            return x.sum() + 0 * self.lm_head.weight.sum()


@pytest.mark.parametrize("kind", [Narrow, Viewed, Tied])
def test_a_view_of_targets_that_lie_otherwise_is_what_it_was(kind: Callable[[], nn.Module]) -> None:
    before, after = pair(kind)
    x, y = given()
    assert calls(after, x, y) == {OP}
    y = y.t().contiguous().t()
    if kind is Narrow:
        for model in (before, after):
            with pytest.raises(RuntimeError, match="view size"):
                model(x, y)
    else:
        assert_same(before, after, x, y)
        assert (OP in calls(after, x, y)) == (kind is Tied)  # which flattens them


class Local(Head):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        z = self.lm_head(x)
        loss = F.cross_entropy(z.flatten(0, 1), y.flatten())
        more: Tensor = locals()["z"]
        return loss + more.mean()


def test_logits_that_locals_have_stay() -> None:
    before, after = pair(Local)
    assert_same(before, after, *given())


def test_a_product_in_float32_keeps_its_logits() -> None:
    before, after = pair(Wide)
    for dtype in (torch.float32, torch.bfloat16):
        x, y = given()
        assert OP not in calls(after.to(dtype), x.to(dtype), y)
        assert_same(before.to(dtype), after, x.to(dtype), y)


def _hooked(net: Net) -> None:
    net.head.lm_head.register_forward_hook(lambda module, given, out: out * 2)


def _before(net: Net) -> None:
    net.head.lm_head.register_forward_pre_hook(lambda module, given: (given[0] * 2,))


def _backward(net: Net) -> None:
    net.head.lm_head.register_full_backward_hook(lambda module, into, out: (into[0] * 2,))


class Half(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * 0.5


def _replaced(net: Net) -> None:
    half = Half(WIDTH, CLASSES, bias=False)
    half.load_state_dict(net.head.lm_head.state_dict())
    net.head.lm_head = half


def _forward(net: Net) -> None:
    plain = net.head.lm_head.forward
    net.head.lm_head.forward = lambda x: plain(x) * 2


def _no_module(net: Net) -> None:
    child = net.head.lm_head
    net.head.__dict__["lm_head"] = lambda x: child(x) * 2


def _parametrised(net: Net) -> None:
    class Doubled(nn.Module):
        def forward(self, w: Tensor) -> Tensor:
            return w * 2

    torch.nn.utils.parametrize.register_parametrization(net.head.lm_head, "weight", Doubled())


@pytest.mark.parametrize("change", [_hooked, _before, _backward, _replaced, _forward, _no_module])
def test_what_comes_later_to_the_child_is_as_it_was(change: Callable[[Net], None]) -> None:
    before, after = pair(Head)
    x, y = given()
    assert calls(after, x, y) == {OP}
    change(before), change(after)
    assert OP not in calls(after, x, y)
    assert_same(before, after, x, y)


def test_a_weight_that_is_computed_later_is_read() -> None:
    before, after = pair(Head)
    _parametrised(before), _parametrised(after)
    assert_same(before, after, *given())


def test_a_hook_of_all_modules_hears_of_the_child() -> None:
    before, after = pair(Head)
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, given, out: out * 2 if isinstance(module, nn.Linear) else None
    )
    try:
        assert_same(before, after, *given())
    finally:
        handle.remove()
    assert calls(after, *given()) == {OP}


def test_another_number_of_rows_that_do_not_count() -> None:
    before, after = pair(Head)
    x, y = given(odd=7)
    for model in (before, after):
        model.head.pad = 7
    assert OP not in calls(after, x, y)
    assert_same(before, after, x, y)


def test_weights_are_read_at_each_call() -> None:
    before, after = pair(Tied)
    for model in (before, after):
        model.head.wte = nn.Embedding(CLASSES, WIDTH, _weight=torch.linspace(-1, 1, CLASSES * WIDTH).view(CLASSES, -1))
    assert calls(after, *given()) == {OP}
    assert_same(before, after, *given())
    with torch.no_grad():
        before.head.wte.weight.mul_(2), after.head.wte.weight.mul_(2)
    assert_same(before, after, *given())


def test_a_weight_that_changes_before_the_backward_is_an_error() -> None:
    for model in pair(Tied):
        x, y = given()
        loss = model(x.requires_grad_(), y)
        with torch.no_grad():
            model.head.wte.weight.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_another_function_of_that_name(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = F.cross_entropy
    before, after = pair(Head)
    x, y = given()
    assert calls(after, x, y) == {OP}
    monkeypatch.setattr(F, "cross_entropy", lambda z, y, **more: plain(z, y, **more) * 2)
    assert OP not in calls(after, x, y)
    assert_same(before, after, x, y)


def test_another_linear_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = nn.Linear.forward
    before, after = pair(Head)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: plain(self, x) * 2)
    assert_same(before, after, *given())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Head, Narrow, Tied])
def test_under_autocast(kind: Callable[[], nn.Module], dtype: torch.dtype) -> None:
    before, after = pair(kind)
    before.to(dtype), after.to(dtype)
    x, y = given()
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(before, after, x.to(dtype), y)


def test_compiled() -> None:
    before, after = pair(Head)
    x, y = given()
    assert_as_right(torch.compile(after, backend="eager")(x, y), Of(before, y), x)
