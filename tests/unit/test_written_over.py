"""Products in place with what an operation, or a method of the module's, has just given; and losses with a default."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ferryman
from ferryman.errors import PortError
from tests.unit.situations import load
from tests.unit.test_disguises import assert_as_right

HEAD = """
import torch, torch.nn.functional as F
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)
"""
TANH = "u * 0.5 * (1.0 + torch.tanh(0.7978845608028654 * (u + 0.044715 * u * u * u)))"
# (what a method gives, the forward, whether a product in place is an op's)
BODIES = {
    "a method's": (TANH, "return self.act(self.a(x)).mul_(self.b(x))", True),
    "an operation's": ("u", "u = self.a(x)\n        return (u * torch.sigmoid(u)).mul_(self.b(x))", True),
    "read again": (
        TANH,
        "u = self.a(x)\n        g = self.act(u)\n        return self.act(u).mul_(self.b(x)) + g",
        None,
    ),
    "its argument": (
        "u",
        "u = self.a(x)\n        y = self.act(u).mul_(self.b(x))\n        return F.relu(y) + u",
        False,
    ),
    "a view": (
        "u[:]",
        "u = self.a(x)\n        n = u * 3\n        y = self.act(u).mul_(self.b(x))\n        return n * u + y",
        False,
    ),
    "kept": (
        "self.kept",
        "self.kept = self.a(x)\n        y = self.act(x).mul_(self.b(x))\n        return y + self.kept",
        False,
    ),
    "either": (
        f"{TANH} if u.dim() > 2 else u",
        "u = self.a(x)\n        y = self.act(u).mul_(self.b(x))\n        return y + u",
        False,
    ),
    "a local": (TANH, "u = self.act(self.a(x))\n        y = u.mul_(self.b(x))\n        return y + u", False),
}


def _pair(code: str, name: str, folder: Path) -> tuple[nn.Module, nn.Module]:
    home = load(code, f"ferryman_over_{abs(hash((code, str(folder))))}_{name}", folder)
    torch.manual_seed(0)
    model, twin = home.M().eval(), home.M().eval()
    twin.load_state_dict(model.state_dict())
    return model, twin


def _calls(model: nn.Module, *given: Any, **named: Any) -> tuple[Any, set[str]]:
    with ferryman.trace() as trace:
        result = model(*given, **named)
    return result, {op for op, _ in trace.calls}


@pytest.mark.parametrize("what", BODIES)
def test_what_is_multiplied_in_place_is_as_it_was(what: str, tmp_path: Path) -> None:
    given, body, gated = BODIES[what]
    code = f"{HEAD}    def act(self, u):\n        return {given}\n    def forward(self, x):\n        {body}\n"
    model, twin = _pair(code, "over", tmp_path)
    ferryman.port(model)
    x = torch.randn(5, 16)
    for once in (x, x.clone().requires_grad_()):
        a, called = _calls(model, once)
        w = twin(once)
        assert_as_right(a, twin, once.detach())
        assert gated is None or bool({op for op in called if op.endswith("_mul")}) is gated
    torch.testing.assert_close(
        torch.autograd.grad(a.sum(), once)[0], torch.autograd.grad(w.sum(), once)[0], rtol=1e-4, atol=1e-5
    )


LOSS = """
import torch, torch.nn.functional as F
from torch import nn
class M(nn.Module):
    def __init__(self):
        super().__init__()
        self.p = nn.Linear(16, 16)
    def forward(self, x, target, s=0.1):
        logp = F.log_softmax(x, dim=-1)
        nll = -logp.gather(dim=-1, index=target.unsqueeze(-1)).squeeze(-1)
        REBOUND
        return ((1 - s) * nll - s * logp.mean(-1)).mean()
"""


@pytest.mark.parametrize("rebound", ["pass", "s = s * 2"])
def test_an_argument_with_a_default_is_that_where_it_is_left_out(rebound: str, tmp_path: Path) -> None:
    """Given another value, a tensor, or a value of its own in the code, the module's own code runs."""
    model, twin = _pair(LOSS.replace("REBOUND", rebound), "loss", tmp_path)
    try:
        ferryman.port(model)
    except PortError as error:
        raise AssertionError("its linear layer is served") from error
    x, target = torch.randn(6, 9), torch.randint(9, (6,))
    loss, called = _calls(model, x, target)
    assert_as_right(loss, lambda x: twin(x, target), x)
    assert ("cross_entropy" in called) is (rebound == "pass")
    for other in (0.3, 0.0, 1, torch.tensor(0.1), torch.tensor(0.4, requires_grad=True)):
        loss, called = _calls(model, x, target, s=other)
        assert_as_right(loss, functools.partial(twin, target=target, s=other), x)
        assert "cross_entropy" not in called
        if isinstance(other, torch.Tensor) and other.requires_grad:
            loss.backward()
            assert other.grad is not None
