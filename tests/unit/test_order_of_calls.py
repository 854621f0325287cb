"""A ported forward calls things in the order of its code, and a function is what the code says that it is."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

import ferryman
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
@pytest.mark.parametrize("kind", KINDS)
def test_it_gives_what_it_gave(kind: type[nn.Module], training: bool) -> None:
    torch.manual_seed(0)
    module = kind().train(training)
    x, before = torch.randn(2, 8, WIDTH), copy.deepcopy(module)
    results = []
    ferryman.port(module)
    for one in (before, module):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(one(x))
    assert (results[0] - results[1]).abs().max() < 1e-5
    if kind is Stored:
        assert module.used is F.scaled_dot_product_attention


def test_code_that_writes_over_what_it_is_given_spoils_no_later_proof(tmp_path: Any) -> None:
    ferryman.port(Filling())
    assert _right(FOURTH_HEADS, {"JSinCos"}, tmp_path) == []
