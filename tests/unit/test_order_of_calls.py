"""A ported forward calls things in the order of its code, and a function is what the code says that it is."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ferryman
from ferryman.porting.model import quiet
from tests.unit.disguises_blind_fourth_heads import FOURTH_HEADS
from tests.unit.test_blind import _right

WIDTH = 16


class Cache:
    def __init__(self, keys: Tensor) -> None:
        self.keys = keys

    def update(self, more: Tensor) -> Tensor:
        self.keys = self.keys + more
        return more


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in "qkv")
        self.drop = nn.Dropout(0.5)

    def shares(self, q: Tensor, keys: Tensor) -> Tensor:
        return torch.softmax(q @ keys.mT * 0.25, -1)


class Dropped(Heads):
    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(self.q(x) @ self.drop(self.k(x)).mT * 0.25, -1)
        v = self.drop(self.v(x))
        return p @ v


class DroppedInAMethod(Heads):
    def less(self, x: Tensor) -> Tensor:
        return F.dropout(x, 0.5, self.training)

    def forward(self, x: Tensor) -> Tensor:
        p = torch.softmax(self.q(x) @ self.less(self.k(x)).mT * 0.25, -1)
        v = self.less(self.v(x))
        return p @ v


class Appending(Heads):
    def push(self, x: Tensor, seen: list[Tensor]) -> Tensor:
        seen.append(x)
        return F.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        seen = [x]
        p = torch.softmax(self.q(x) @ seen[-1].mT * 0.25, -1)
        v = self.push(self.v(x), seen)
        return p @ v


class Updating(Heads):
    def keep(self, x: Tensor, cache: Cache) -> Tensor:
        return cache.update(x)

    def forward(self, x: Tensor) -> Tensor:
        cache = Cache(x)
        p = torch.softmax(self.q(x) @ cache.keys.mT * 0.25, -1)
        v = self.keep(self.v(x), cache)
        return p @ v


class Remembering(Heads):
    def note(self, x: Tensor) -> Tensor:
        setattr(self, "last", x)  # noqa: B010 - as code has it that a reader does not see
        return F.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        p = torch.softmax(self.q(x) @ (self.last * 2.0).mT * 0.25, -1)
        v = self.note(self.v(x))
        return p @ v


class Filling(Heads):
    def put(self, x: Tensor, room: Tensor) -> Tensor:
        room.copy_(x)
        return F.relu(x)

    def forward(self, x: Tensor) -> Tensor:
        room = x.clone()
        q, w = self.q(x), self.v(x)
        p = torch.softmax(q @ room.mT * 0.25, -1)
        v = self.put(w, room)
        return p @ v


class Asked(Heads):
    """Causal where the function is PyTorch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = F.scaled_dot_product_attention

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x)[:, None] for m in (self.q, self.k, self.v))
        return self.attend(q, k, v, is_causal=self.attend is F.scaled_dot_product_attention)


class AskedByAName(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x)[:, None] for m in (self.q, self.k, self.v))
        attend = F.scaled_dot_product_attention
        return attend(q, k, v, is_causal=attend == F.scaled_dot_product_attention)


class AskedInAMethod(Heads):
    def run(self, f: Any, *given: Tensor) -> Tensor:
        return f(*given, is_causal=f is not F.scaled_dot_product_attention)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x)[:, None] for m in (self.q, self.k, self.v))
        return self.run(F.scaled_dot_product_attention, q, k, v)


class Stored(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (m(x)[:, None] for m in (self.q, self.k, self.v))
        self.used = F.scaled_dot_product_attention
        return self.used(q, k, v)


class InPlaceDropped(Heads):
    def __init__(self) -> None:
        super().__init__()
        self.over = nn.Dropout(0.5, inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        w = q @ k.mT * 0.25
        v = self.over(k)
        return torch.softmax(w, -1) @ v


class DrawnBetween(Heads):
    def more(self, v: Tensor) -> Tensor:
        return torch.randn_like(v)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        p = F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.5, self.training)
        n = self.more(v)
        return p @ (v + n)


class DrawnByAMethodOfIts(DrawnBetween):
    def more(self, v: Tensor) -> Tensor:
        return v * torch.full_like(v, 0.5).bernoulli()


class DrawnByAFunction(DrawnBetween):
    def more(self, v: Tensor) -> Tensor:
        return noisy(v)


class DrawnByAttention(DrawnBetween):
    def more(self, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(v, v, v, None, 0.5 if self.training else 0.0)


class DrawnTwice(Heads):
    """The second product has what was drawn second first."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        p = F.dropout(torch.softmax(q @ k.mT * 0.25, -1), 0.5, self.training)
        v = F.dropout(v, 0.5, self.training)
        return (v.mT @ p.mT).mT


class DrawnAlike(Heads):
    """Two equal calls give two tensors."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.q(x), self.k(x), self.v(x)
        n = torch.rand_like(v)
        m = torch.rand_like(v)
        return torch.softmax(q @ k.mT * 0.25, -1) @ (v + m) + n


class FilledByAFunction(Heads):
    def forward(self, x: Tensor) -> Tensor:
        room = x.clone()
        q, w = self.q(x), self.v(x)
        p = torch.softmax(q @ room.mT * 0.25, -1)
        v = put(w, room)
        return p @ v


class OverItsInput(Heads):
    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        w = q @ k.mT * 0.25
        return torch.softmax(w, -1) @ F.relu(k, True)


class Over(nn.Linear):
    """A child that writes over what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        x.mul_(0.5)
        return y


class Counting(nn.Linear):
    count = 0

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return F.linear(x, self.weight, self.bias)


class Noisy(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        return noisy(y) if self.training else y


class InALine(Heads):
    other: type[nn.Linear] = nn.Linear

    def __init__(self) -> None:
        super().__init__()
        self.v = self.other(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        w = self.q(h) @ self.k(h).mT * 0.25
        v = self.v(h)
        return torch.softmax(w, -1) @ v + h


class OfOver(InALine):
    other = Over


class OfCounting(InALine):
    other = Counting


class OfNoisy(InALine):
    other = Noisy


class OverWithin(InALine):
    """The child that writes stands between what is multiplied and what reads it."""

    other = Over

    def forward(self, x: Tensor) -> Tensor:
        h = x.clone()
        return torch.softmax(self.q(x) @ (h * 2.0).mT * 0.25, -1) @ self.v(h)


def put(x: Tensor, room: Tensor) -> Tensor:
    room.copy_(x)
    return F.relu(x)


def noisy(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


MORE = (
    InPlaceDropped,
    DrawnBetween,
    DrawnByAMethodOfIts,
    DrawnByAFunction,
    DrawnByAttention,
    DrawnTwice,
    DrawnAlike,
    FilledByAFunction,
    OverItsInput,
    InALine,
    OfOver,
    OfCounting,
    OfNoisy,
    OverWithin,
)
KINDS = (
    Dropped,
    DroppedInAMethod,
    Appending,
    Updating,
    Remembering,
    Filling,
    Asked,
    AskedByAName,
    AskedInAMethod,
    Stored,
)


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_it_gives_what_it_gave(kind: type[nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    module = kind().train(training)
    x, before = torch.randn(2, 8, WIDTH), copy.deepcopy(module)
    results = []
    ferryman.port(module)
    for one in (before, module):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(one(x.clone()))
    assert (results[0] - results[1]).abs().max() < 1e-5
    if kind is Stored:
        assert module.used is F.scaled_dot_product_attention


def test_code_that_writes_over_what_it_is_given_spoils_no_later_proof(tmp_path: Any) -> None:
    ferryman.port(Filling())
    assert _right(FOURTH_HEADS, {"JSinCos"}, tmp_path) == []


# Calls of children


@contextlib.contextmanager
def recorded(module: nn.Module, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Of each call of a child: which, what it is given, and what would be drawn next."""
    calls: list[tuple[Any, ...]] = []
    names, whole = {id(child): name for name, child in module.named_children()}, nn.Module.__call__

    def call(self: nn.Module, *given: Any, **options: Any) -> Any:
        if id(self) in names:
            numbers = [round(float(t.double().sum()), 4) for t in given]
            calls.append((names[id(self)], *numbers, hash(torch.random.get_rng_state().numpy().tobytes())))
        return whole(self, *given, **options)

    with monkeypatch.context() as patch:
        patch.setattr(nn.Module, "__call__", call)
        yield calls


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", [*KINDS, *MORE])
def test_children_get_what_they_got(kind: type[nn.Module], training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the order of the code, but for those that neither write nor draw."""
    torch.manual_seed(0)
    module = kind().train(training)
    x, before, records = torch.randn(2, 8, WIDTH), copy.deepcopy(module), []
    ferryman.port(module)
    for one in (before, module):
        torch.manual_seed(1)
        with torch.no_grad(), recorded(one, monkeypatch) as calls:
            one(x.clone())
        records.append(calls)
    free = {*quiet.free_of(before)}
    free |= set() if training else {n for n, c in before.named_children() if isinstance(c, nn.Dropout)}
    kept = [[call for call in calls if call[0] not in free] for calls in records]
    assert kept[0] == kept[1]
    called = [sorted(call[:-1] for call in calls if call[0] not in ("drop", "over")) for calls in records]
    assert called[0] == called[1]


def _served(module: nn.Module, x: Tensor) -> tuple[Tensor, set[str]]:
    torch.manual_seed(1)
    with ferryman.trace() as trace, torch.no_grad():
        result = module(x.clone())
    return result, {op for op, _ in trace.calls}


class Replaced(Heads):
    """Calls of its children are where no call of another's was."""

    def forward(self, x: Tensor) -> Tensor:
        w = self.q(x) @ self.k(x).mT * 0.25
        n = self.v(x)
        return torch.softmax(w, -1) @ n


def _hooked(module: nn.Module) -> None:
    module.q.register_forward_hook(lambda child, given, result: noisy(result))  # type: ignore[union-attr]
    module.v.register_forward_hook(lambda child, given, result: noisy(result))  # type: ignore[union-attr]


def _replaced(module: nn.Module) -> None:
    torch.manual_seed(3)
    module.k, module.v = Noisy(WIDTH, WIDTH), Noisy(WIDTH, WIDTH)


@pytest.mark.parametrize("change", [_hooked, _replaced])
def test_children_that_change_later_end_it(change: Callable[[nn.Module], None]) -> None:
    torch.manual_seed(0)
    module = Replaced()
    x, before = torch.randn(2, 8, WIDTH), copy.deepcopy(module)
    ferryman.port(module)
    assert "attention" in _served(module, x)[1]
    change(before)
    change(module)
    actual, ops = _served(module, x)
    assert "attention" not in ops and (actual - _served(before, x)[0]).abs().max() < 1e-5


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.act(self.up(x)))


class Keeping(nn.Linear):
    def __init__(self, *sizes: int) -> None:
        super().__init__(*sizes)
        self.seen: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(x)
        return F.linear(x, self.weight, self.bias)


class Moving(nn.Linear):
    """It writes over a tensor of its own."""

    def forward(self, x: Tensor) -> Tensor:
        torch.add(self.bias, 1.0, out=self.bias)
        return F.linear(x, self.weight, self.bias)


FREE = [
    (nn.Linear(8, 8), True),
    (nn.LayerNorm(8), True),
    (nn.Embedding(9, 8), True),
    (Two(), True),
    (nn.Sequential(nn.Linear(8, 8), nn.GELU()), True),
    (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), False),
    (nn.Embedding(9, 8, max_norm=1.0), False),
    (nn.BatchNorm1d(8), False),
    (nn.ReLU(inplace=True), False),
    (nn.Dropout(0.1), False),
    (Over(8, 8), False),
    (Counting(8, 8), False),
    (Noisy(8, 8), False),
    (Keeping(8, 8), False),
    (Moving(8, 8), False),
]


@pytest.mark.parametrize(("child", "free"), FREE, ids=lambda value: type(value).__name__)
def test_which_children_have_no_effects(child: nn.Module, free: bool) -> None:
    assert quiet.is_free(child) is free
    assert all(p.device.type == "cpu" for p in child.parameters())


@pytest.mark.parametrize("child", [c for c, free in FREE if not free], ids=lambda value: type(value).__name__)
def test_the_run_sees_it_as_well(child: nn.Module) -> None:
    """Without the sources."""
    assert not quiet.is_recorded_free(child)


def test_a_hook_is_an_effect() -> None:
    child = nn.Linear(8, 8)
    child.register_forward_hook(lambda *given: None)
    assert not quiet.is_free(child)
