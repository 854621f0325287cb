"""Functions that are written out where a forward calls them, and flags that calls leave out: served while all is what
it was, and what the code says after that."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferryman
from tests.unit.situations import load
from tests.unit.test_disguises import assert_as_right

_CODE = """
import torch
from torch import nn

def repeat(t, n):
    if n == 1:
        return t
    b, g, s, d = t.shape
    return t[:, :, None].expand(b, g, n, s, d).reshape(b, g * n, s, d)

def eager(module, query, key, value, mask, scaling, dropout=0.0, softcap=None, boost=1.0, *, gain=1.0, **kwargs):
    key, value = repeat(key, module.groups), repeat(value, module.groups)
    weights = torch.matmul(query, key.transpose(2, 3)) * scaling * boost * gain
    if softcap is not None:
        weights = torch.tanh(weights / softcap) * softcap
    if mask is not None:
        weights = weights + mask
    weights = nn.functional.softmax(weights, dim=-1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, p=dropout, training=module.training)
    return torch.matmul(weights, value).transpose(1, 2).contiguous(), weights

class Config:
    def __init__(self, cap):
        self.cap = cap

class Attends(nn.Module):
    def __init__(self, cap=5.0):
        super().__init__()
        self.config = Config(cap)
        self.groups, self.scaling, self.p = 2, 0.25, 0.3
        self.q, self.kv, self.o = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)

    def project(self, x):
        q = self.q(x).unflatten(-1, (4, 8)).transpose(1, 2)
        return q, *(t.unflatten(-1, (2, 8)).transpose(1, 2) for t in self.kv(x).chunk(2, -1))

    def forward(self, x, mask=None):
        q, k, v = self.project(x)
        out, weights = eager(
            self, q, k, v, mask, self.scaling, dropout=self.p if self.training else 0.0, softcap=self.config.cap
        )
        return self.o(out.flatten(2))

class Calls(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.scale = nn.Linear(32, 96), 0.3

    def _attn(self, q, k, v, mask=None):
        weights = torch.matmul(q, k.transpose(-1, -2)) * self.scale
        if mask is not None:
            weights = weights + mask
        weights = torch.softmax(weights, dim=-1)
        return torch.matmul(weights, v), weights

    def forward(self, x, mask=None, output_attentions=False, head_mask=None):
        q, k, v = (t.unflatten(-1, (4, 8)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out, weights = self._attn(q, k, v, mask)
        out = out.transpose(1, 2).flatten(2)
        outputs = (out, weights) if output_attentions else (out,)
        return outputs if head_mask is None else (*outputs, head_mask)
"""
_NAME = "ferryman_written_out"


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.beside = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor, *given: Any, **options: Any) -> Any:
        return self.inner(x, *given, **options)


def _pair(kind: str, folder: Path) -> tuple[types.ModuleType, Net, Net, Tensor]:
    """(the file, a ported net, the same unported, an input)."""
    file = load(_CODE, f"{_NAME}_{abs(hash(str(folder)))}", folder)
    torch.manual_seed(0)
    model = Net(getattr(file, kind)()).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    return file, model, before, 4 * torch.randn(2, 6, 32)


def _same(model: Net, before: Net, x: Tensor, *given: Any, **options: Any) -> list[str]:
    """The ops of a call, each of whose results is as right as a model's check asks."""

    def results(net: Net, x: Tensor) -> list[Tensor]:
        torch.manual_seed(7)
        with torch.no_grad():
            result = net(x, *given, **options)
        return [t for t in (result if isinstance(result, tuple) else (result,)) if t is not None]

    with ferryman.trace() as trace:
        actual = results(model, x)
    assert len(actual) == len(results(before, x))
    for i, one in enumerate(actual):
        assert_as_right(one, lambda x, i=i: results(before, x)[i], x)  # type: ignore[misc]
    return [called for called, _ in trace.calls]


def _mask(n: int) -> Tensor:
    return torch.full((n, n), -torch.inf).triu(1)


def test_a_function_that_is_given_the_module_is_served(tmp_path: Path) -> None:
    _, model, before, x = _pair("Attends", tmp_path)
    assert "attention" in _same(model, before, x) and "attention" in _same(model, before, x, _mask(6))


def _other(
    module: Any, query: Tensor, key: Tensor, value: Tensor, *given: Any, **options: Any
) -> tuple[Tensor, Tensor]:
    return query.transpose(1, 2) * 2, key


def _a_new_function(file: Any, nets: list[Net]) -> None:
    file.eager = _other


def _new_defaults(file: Any, nets: list[Net]) -> None:
    file.eager.__defaults__ = (0.0, None, 2.5)


def _a_default_in_place(file: Any, nets: list[Net]) -> None:
    file.eager.__kwdefaults__["gain"] = 3.0


def _new_code(file: Any, nets: list[Net]) -> None:
    def eager(
        module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: Any, dropout: Any = 0, softcap: Any = None
    ) -> Any:
        return query.transpose(1, 2) * 3, key

    file.eager.__code__ = eager.__code__


def _a_new_helper(file: Any, nets: list[Net]) -> None:
    file.repeat = lambda t, n: t.repeat(1, n, 1, 1)


def _no_cap(file: Any, nets: list[Net]) -> None:
    for net in nets:
        net.inner.config.cap = None  # type: ignore[union-attr]


def _another_cap(file: Any, nets: list[Net]) -> None:
    for net in nets:
        net.inner.config.cap = 0.5  # type: ignore[union-attr]


def _another_scale(file: Any, nets: list[Net]) -> None:
    for net in nets:
        net.inner.scaling = 2.0  # type: ignore[assignment]


def _training(file: Any, nets: list[Net]) -> None:
    for net in nets:
        net.train()


_CHANGES = (
    *(_a_new_function, _new_defaults, _a_default_in_place, _new_code, _a_new_helper),
    *(_no_cap, _another_cap, _another_scale, _training),
)


@pytest.mark.parametrize("change", _CHANGES)
def test_what_changes_after_a_port_is_followed(change: Callable[[Any, list[Net]], None], tmp_path: Path) -> None:
    file, model, before, x = _pair("Attends", tmp_path)
    was = before(x, _mask(6))
    assert "attention" in _same(model, before, x, _mask(6))
    change(file, [model, before])
    _same(model, before, x, _mask(6))
    assert not torch.allclose(before(x, _mask(6)), was, rtol=1e-3, atol=1e-3)  # it changed something


def test_a_method_and_flags_that_calls_leave_out_are_served(tmp_path: Path) -> None:
    _, model, before, x = _pair("Calls", tmp_path)
    for given in ((), (_mask(6),)):
        assert "attention" in _same(model, before, x, *given)
    for options in (
        {"output_attentions": True},
        {"output_attentions": 1},
        {"head_mask": x},
        {"output_attentions": None},
    ):
        _same(model, before, x, **options)


def test_a_method_of_an_instance_is_followed(tmp_path: Path) -> None:
    file, model, before, x = _pair("Calls", tmp_path)
    for net in (model, before):
        net.inner._attn = lambda q, k, v, mask=None: (q + v, k)  # type: ignore[assignment]
    assert "attention" not in _same(model, before, x)
    for net in (model, before):
        del net.inner._attn
    assert "attention" in _same(model, before, x)
    file.Calls._attn = lambda self, q, k, v, mask=None: (q - v, k)
    assert "attention" not in _same(model, before, x)


def test_a_method_of_a_ported_class_is_followed(tmp_path: Path) -> None:
    _, model, before, x = _pair("Calls", tmp_path)
    for net in (model, before):
        type(net.inner)._attn = lambda self, q, k, v, mask=None: (q - 2 * v, k)  # type: ignore[attr-defined]
    assert "attention" not in _same(model, before, x)


def test_new_defaults_of_a_forward_are_followed(tmp_path: Path) -> None:
    file, model, before, x = _pair("Calls", tmp_path)
    assert "attention" in _same(model, before, x)
    file.Calls.forward.__defaults__ = (None, True, None)
    assert len(before(x)) == 2
    _same(model, before, x)
