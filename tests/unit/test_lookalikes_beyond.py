# ruff: noqa: E501
"""A second set of look-alikes: the difference shows in no drawn input of ordinary size, or only after porting.

Each is written to a file, ported in a small model, and compared with itself unported in the situation that shows it.
"""

from __future__ import annotations

import copy
import importlib
import os
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferryman
from ferryman.errors import PortError
from ferryman.porting.model.classes import is_ported
from tests.unit.situations import apart

WIDTH = 64
_HEAD = """
import math, os, torch, torch.nn.functional as F
from torch import nn
SCALE, TABLE, TENSOR = 1.0, {torch.float64: 1e-6, torch.float32: 1e-6, torch.bfloat16: 1e-6, torch.float16: 0.5}, torch.ones(1)
KNOBS = {"n": 0.0}
def root(h, eps): return h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + eps)
def other(h, eps): return h * 0.5
def turn(x): a, b = x.chunk(2, -1); return torch.cat((-b, a), -1)
def other_turn(x): return 5 * x
act = F.silu
class Base(nn.Module):
    knob = 1.0
    def __init__(self):
        super().__init__()
        self.weight, self.eps, self.log = nn.Parameter(torch.linspace(0.5, 1.5, 64)), 1e-6, []
    def helper(self, h): return root(h, self.eps)
class Lin(nn.Module):
    def __init__(self, rows=32, columns=64):
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-1, 1, rows * columns).sin().reshape(rows, columns))
"""
_Y = "        h = x.float(); y = self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)\n"
_OPEN = "class M(Base):\n    def forward(self, x):\n"
_LIN = "class M(Lin):\n    def forward(self, x):\n"


def _x(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)


def _odd(value: float) -> Tensor:
    x = _x(2, 5, WIDTH)
    x[0, 0, 3] = value
    return x


# what it does -> (its code, an input on which it shows)
STILL: dict[str, tuple[str, Tensor]] = {
    "tokens beyond 256 are left": (
        _OPEN + _Y + "        return torch.cat((y[..., :256, :], x[..., 256:, :]), -2)\n",
        _x(1, 300, WIDTH),
    ),
    "a quotient of lengths": (_OPEN + _Y + "        return y * (1 + x.size(-2) // 200)\n", _x(1, 300, WIDTH)),
    "an equality that is a factor": (_OPEN + _Y + "        return y * (1 + (x.shape[0] == 7))\n", _x(7, 3, WIDTH)),
    "a factor by the dimensions": (
        _OPEN + _Y + "        return y * {2: 1.0, 3: 1.0, 4: 2.0}.get(x.dim(), 1.0)\n",
        _x(2, 3, 2, WIDTH),
    ),
    "a bound of 1e12": (
        _OPEN + _Y.replace("x.float()", "x.float().clamp(-1e12, 1e12)") + "        return y\n",
        _x(2, 5, WIDTH, scale=1e15),
    ),
    "zero where huge": (
        _OPEN + _Y + "        return torch.where(h.abs() > 1e14, 0 * y, y)\n",
        _x(2, 5, WIDTH, scale=1e16),
    ),
    "no NaN": (_OPEN + _Y + "        return torch.nan_to_num(y)\n", _odd(float("nan"))),
    "an eps by dtype": (
        _OPEN + _Y.replace("self.eps", "TABLE[x.dtype]") + "        return y\n",
        _x(2, 5, WIDTH, dtype=torch.float16),
    ),
    "a factor by contiguity": (
        _OPEN + _Y + "        return y * (2 - x.is_contiguous())\n",
        _x(5, 2, WIDTH).transpose(0, 1),
    ),
    "a factor by strides": (_OPEN + _Y + "        return y * x.stride(-1)\n", _x(2, WIDTH, 5).transpose(1, 2)),
    "a logarithm of lengths": (
        _OPEN + _Y + "        return y * (1 + int(math.log2(max(1, x.shape[1]))) // 12)\n",
        _x(1, 5000, WIDTH),
    ),
    "a property that counts": (
        "class M(Base):\n    def __init__(self): super().__init__(); self.c = [0]\n    @property\n    def gain(self): self.c[0] += 1; return self.weight * (1 + self.c[0] // 2)\n    def forward(self, x): return self.gain * root(x.float(), self.eps).to(x.dtype)\n",
        _x(2, 5, WIDTH),
    ),
    "another name of what is activated": (
        "class M(Base):\n    def forward(self, x): t = x + 0; k = t; t = F.silu(t); k.mul_(2); t = t * self.weight; return t + k\n",
        _x(2, 5, WIDTH),
    ),
    "an activation in a loop": (
        "class M(Base):\n    def forward(self, x):\n        t = x\n        for _ in range(2): t = F.silu(t); t = t * self.weight\n        return t\n",
        _x(2, 5, WIDTH),
    ),
    "relu of a mask": ("class M(nn.Module):\n    def forward(self, x): return x * (x > 0)\n", _odd(-float("inf"))),
    "relu without NaN": (
        "class M(nn.Module):\n    def forward(self, x): return torch.where(x > 0, x, 0 * x)\n",
        _odd(float("nan")),
    ),
    "a slice of long rows": (
        "class M(Lin):\n    def __init__(self): super().__init__(32, 1024)\n    def forward(self, x): return F.linear(x[..., :700], self.weight[:, :700])\n",
        _x(2, 5, 1024),
    ),
    "the last of many results": (
        "class M(Lin):\n    def __init__(self): super().__init__(1024, 32)\n    def forward(self, x): y = F.linear(x, self.weight); return torch.cat((y[..., :600], 2 * y[..., 600:]), -1)\n",
        _x(2, 5, 32),
    ),
    "16 bits in between": (
        _LIN + "        return (x.bfloat16() @ self.weight.bfloat16().t()).to(x.dtype)\n",
        _x(2, 5, WIDTH),
    ),
    "a number times an activation": (
        "class M(Base):\n    def forward(self, x): return F.silu(x) * 3\n",
        _x(2, 5, WIDTH),
    ),
    "its input changes before the product": (
        "class M(Base):\n    def forward(self, x):\n        g = x + 0; a = F.silu(g); g.add_(1.0)\n        return a * self.weight + 0 * g\n",
        _x(2, 5, WIDTH),
    ),
    "ids from the end": ("class M(Lin):\n    def forward(self, x): return self.weight[x]\n", torch.tensor([[-1, 3]])),
    "an id that is another": (
        "class M(nn.Embedding):\n    def __init__(self): super().__init__(1500, 8)\n    def forward(self, x): return super().forward(torch.where(x == 777, 0, x))\n",
        torch.tensor([[777]]),
    ),
    "a parameter that is left out": (
        "class M(Base):\n    def forward(self, x, more=None):\n"
        + _Y
        + "        return y if more is None else y * more\n",
        _x(2, 5, WIDTH),
    ),
}

# what others do after porting -> (its code, what they do)
LATER: dict[str, tuple[str, Callable[[ModuleType, Any], None]]] = {
    "a number of its file": (_OPEN + _Y + "        return y * SCALE\n", lambda home, m: setattr(home, "SCALE", 3.0)),
    "a table of its file": (
        _OPEN + _Y + "        return y * (1 + KNOBS['n'])\n",
        lambda home, m: home.KNOBS.update(n=2.0),
    ),
    "a tensor of its file": (
        _OPEN + _Y + "        return y * TENSOR.to(y.dtype)\n",
        lambda home, m: home.TENSOR.fill_(2.0),
    ),
    "a function of its file": (
        _OPEN + "        return self.weight * root(x.float(), self.eps).to(x.dtype)\n",
        lambda home, m: setattr(home, "root", home.other),
    ),
    "a number that a property reads": (
        "class M(Base):\n    @property\n    def gain(self): return self.weight * SCALE\n    def forward(self, x): return self.gain * root(x.float(), self.eps).to(x.dtype)\n",
        lambda home, m: setattr(home, "SCALE", 3.0),
    ),
    "a variable of the environment": (
        "class M(Base):\n    @property\n    def gain(self): return self.weight * 2 if os.environ.get('FERRYMAN_PLANTED') else self.weight\n    def forward(self, x): return self.gain * root(x.float(), self.eps).to(x.dtype)\n",
        lambda home, m: home.os.environ.update(FERRYMAN_PLANTED="1"),
    ),
    "an attribute of another class": (
        "class Knobs: v = 1.0\n" + _OPEN + _Y + "        return y * Knobs.v\n",
        lambda home, m: setattr(home.Knobs, "v", 2.0),
    ),
    "its parent's forward": (
        "class P(Base):\n    def forward(self, x): return self.weight * root(x.float(), self.eps).to(x.dtype)\nclass M(P):\n    def forward(self, x): return super().forward(x)\n",
        lambda home, m: setattr(home.P, "forward", lambda self, x: 2 * x),
    ),
    "the keywords of a partial": (
        "import functools\nclass M(nn.Module):\n    def __init__(self): super().__init__(); self.act = functools.partial(F.elu, alpha=1.0)\n    def forward(self, x): return self.act(x)\n",
        lambda home, m: m.act.keywords.update(alpha=3.0),
    ),
    "the keywords of a gate's partial": (
        "import functools\nclass A(nn.Module):\n    def __init__(self): super().__init__(); self.act = functools.partial(F.gelu, approximate='none')\n    def forward(self, x): return self.act(x)\nclass M(Base):\n    def __init__(self): super().__init__(); self.a = A()\n    def forward(self, x): return self.a(x) * (x + 1)\n",
        lambda home, m: m.a.act.keywords.update(approximate="tanh"),
    ),
    "an activation of its file": (
        "class M(Base):\n    def forward(self, x): return act(x)\n",
        lambda home, m: setattr(home, "act", torch.tanh),
    ),
    "a gate of its file": (
        "class M(Base):\n    def forward(self, x): return act(x) * (x + 1)\n",
        lambda home, m: setattr(home, "act", torch.tanh),
    ),
    "an attribute that its code may ask for": (
        _OPEN + _Y + "        return y * getattr(self, 'gain', 1.0)\n",
        lambda home, m: setattr(m, "gain", 2.0),
    ),
    "a method on the instance": (
        _OPEN + "        return self.weight * self.helper(x.float()).to(x.dtype)\n",
        lambda home, m: setattr(m, "helper", lambda h: 0 * h),
    ),
    "a default tensor": (
        _OPEN.replace("(self, x)", "(self, x, shift=TENSOR)") + _Y + "        return y * shift.to(y.dtype)\n",
        lambda home, m: home.TENSOR.fill_(2.0),
    ),
    "a list that it appends to": (
        _OPEN + _Y + "        self.log.append(1); return y * (1 + len(self.log) // 2)\n",
        lambda home, m: None,
    ),
    "an inner function of its file": (
        "class M(nn.Module):\n    def forward(self, x): a = x.view(2, 5, 4, 16).transpose(1, 2); c = a[:, 0].detach(); return rotate(a, c, c)\ndef rotate(q, c, s): return q * c[:, None] + turn(q) * s[:, None]\n",
        lambda home, m: setattr(home, "turn", home.other_turn),
    ),
}


class Net(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner, self.beside = inner, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.inner(x)


def _home(code: str, folder: Path, request: pytest.FixtureRequest) -> ModuleType:
    name = f"ferryman_lookalike_{abs(hash(request.node.name))}"
    (folder / f"{name}.py").write_text(_HEAD + code)
    sys.path.insert(0, str(folder))
    request.addfinalizer(lambda: (sys.path.remove(str(folder)), sys.modules.pop(name, None)))
    return importlib.import_module(name)


def _same(ported: nn.Module, unported: nn.Module, x: Tensor) -> None:
    """Within the roundings that two orders of a sum, and two places of a product, may have (`situations.apart`)."""
    with torch.no_grad():
        assert not apart(ported(x.clone()), unported(x.clone()))


@pytest.mark.parametrize("what", STILL)
def test_what_shows_beyond_ordinary_inputs_is_computed_as_it_was(
    what: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    code, x = STILL[what]
    model = Net(_home(code, tmp_path, request).M()).eval()
    if x.is_floating_point():
        model = model.to(x.dtype)
    before = copy.deepcopy(model)
    ferryman.port(model)
    _same(model, before, x)


@pytest.mark.parametrize(
    "factor", ("1.03 if x.dtype is torch.bfloat16 else 1.0", "1 + 4 * torch.finfo(x.dtype).eps", "1.0")
)
def test_a_factor_that_only_a_narrow_dtype_has_is_not_served(
    factor: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """It is smaller than what bfloat16's roundings may do to one element, but all elements have it."""
    y = _Y.replace("self.eps)).to", f"self.eps) * ({factor})).to")
    model = Net(_home(_OPEN + y + "        return y\n", tmp_path, request).M()).eval()
    ferryman.port(model)
    assert is_ported(model.inner) is (factor == "1.0")


@pytest.mark.parametrize("what", LATER)
def test_what_changes_after_porting_is_what_counts(what: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code, change = LATER[what]
    home = _home(code, tmp_path, request)
    request.addfinalizer(lambda: os.environ.pop("FERRYMAN_PLANTED", None))
    model, x = Net(home.M()).eval(), _x(2, 5, WIDTH)
    before = copy.deepcopy(model)
    ferryman.port(model)
    _same(model, before, x)
    change(home, model.inner)
    if home.TENSOR.item() == 1.0:
        change(home, before.inner)
    _same(model, before, x)


@pytest.mark.parametrize("under", ["autocast", "inference"])
def test_a_factor_by_mode(under: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    asked = {"autocast": 'torch.is_autocast_enabled("cpu")', "inference": "torch.is_inference_mode_enabled()"}[under]
    model = Net(_home(_OPEN + _Y + f"        return y * (1 + {asked})\n", tmp_path, request).M()).eval()
    before, x = copy.deepcopy(model), _x(2, 5, WIDTH)
    ferryman.port(model)
    with torch.autocast("cpu", torch.bfloat16) if under == "autocast" else torch.inference_mode():
        assert torch.equal(model(x), before(x))


def test_under_autocast_a_product_and_a_sum_have_the_dtypes_that_they_had(
    tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    code = "class M(Lin):\n    def __init__(self): super().__init__(); self.bias = nn.Parameter(torch.ones(32))\n"
    home = _home(code + "    def forward(self, x): return x @ self.weight.t() + self.bias\n", tmp_path, request)
    model = Net(home.M()).eval()
    before, x = copy.deepcopy(model), _x(2, 5, WIDTH)
    ferryman.port(model)
    assert is_ported(model.inner)
    with torch.autocast("cpu", torch.bfloat16):
        assert model(x).dtype is before(x).dtype is torch.float32


def test_a_copy_of_a_model_whose_class_changed_is_of_that_class(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    home = _home(_OPEN + _Y + "        return y * self.knob\n", tmp_path, request)
    model, x = Net(home.M()).eval(), _x(2, 5, WIDTH)
    before = copy.deepcopy(model)
    ferryman.port(model)
    assert is_ported(model.inner)
    home.Base.knob = 5.0
    for twin in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        _same(twin, before, x)


RIGHT = {
    "an eps of its file": "EPS = 1e-4\nclass M(Base):\n    def forward(self, x): h = x.float(); return self.weight * root(h, EPS).to(x.dtype)\n",
    "an eps of its class": "class M(Base):\n    small = 1e-4\n    def forward(self, x): h = x.float(); return self.weight * root(h, self.small).to(x.dtype)\n",
    "an eps that is enclosed": "def make(e):\n    class M(Base):\n        def forward(self, x): h = x.float(); return self.weight * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + e)).to(x.dtype)\n    return M\nM = make(1e-4)\n",
    "a static method": "class M(Base):\n    @staticmethod\n    def stat(h, e): return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + e)\n    def forward(self, x): h = x.float(); return self.weight * (h * self.stat(h, self.eps)).to(x.dtype)\n",
    "a class method": "class M(Base):\n    @classmethod\n    def stat(cls, h, e): return torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + e)\n    def forward(self, x): h = x.float(); return self.weight * (h * self.stat(h, self.eps)).to(x.dtype)\n",
    "its parent's forward": "class P(Base):\n    def forward(self, x): h = x.float(); return self.weight * root(h, self.eps).to(x.dtype)\nclass M(P):\n    def forward(self, x): return super().forward(x)\n",
    "a decorator that hands on": "import functools\ndef plain(f):\n    @functools.wraps(f)\n    def call(*given, **named): return f(*given, **named)\n    return call\nclass M(Base):\n    @plain\n    def forward(self, x): h = x.float(); return self.weight * root(h, self.eps).to(x.dtype)\n",
    "three dimensions": "class M(Base):\n    def forward(self, x): b, s, d = x.shape; h = x.float(); return self.weight * root(h, self.eps).to(x.dtype).view(b, s, d)\n",
}


@pytest.mark.parametrize("what", RIGHT)
def test_more_spellings_of_a_norm_are_recognised(what: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = Net(_home(RIGHT[what], tmp_path, request).M()).eval()
    before, x = copy.deepcopy(model), _x(2, 5, WIDTH)
    report = ferryman.port(model)
    assert [s.role for s in report.ported if s.path == "inner"] == ["rms_norm"], report.text()
    _same(model, before, x)


# what it does -> (its code, the ops of one pass, its input)
_MLP = "class M(nn.Module):\n    def __init__(self): super().__init__(); self.a, self.b, self.f, self.n = nn.Linear(64, 64), nn.Linear(64, 64), F.silu, nn.LayerNorm(64)\n    def forward(self, x): "
SERVED: dict[str, tuple[str, dict[str, int], Tensor]] = {
    "torch.mul of a gate": (
        _MLP + "return torch.mul(F.silu(self.a(x)), self.b(x))\n",
        {"silu_mul": 1},
        _x(2, 5, WIDTH),
    ),
    "a method times a gate": (_MLP + "return F.silu(self.a(x)).mul(self.b(x))\n", {"silu_mul": 1}, _x(2, 5, WIDTH)),
    "a name that is used again": (
        _MLP + "t = F.silu(self.a(x)); t = t * self.b(x); return t + 1\n",
        {"silu_mul": 1},
        _x(2, 5, WIDTH),
    ),
    "a name that is its own argument": (
        _MLP + "a, b = self.a(x).chunk(2, -1); a = F.silu(a); return a * b\n",
        {"silu_mul": 1},
        _x(2, 5, WIDTH),
    ),
    "a function that it holds": (_MLP + "return self.f(self.a(x)) * self.b(x)\n", {"silu_mul": 1}, _x(2, 5, WIDTH)),
    "torch.add before a norm": (
        _MLP + "return self.n(torch.add(x, self.a(x)))\n",
        {"add_layer_norm": 1},
        _x(2, 5, WIDTH),
    ),
    "a static method that rotates": (
        "class M(nn.Module):\n    @staticmethod\n    def rot(q, c, s): return q * c[:, None] + turn(q) * s[:, None]\n    def forward(self, x): a = x.view(2, 5, 4, 16).transpose(1, 2); c = a[:, 0]; return self.rot(a, c, c)\n",
        {"rope": 1},
        _x(2, 5, WIDTH),
    ),
    "a loss": (
        "class M(nn.Module):\n    def forward(self, x): return F.cross_entropy(x, x.argmin(-1), ignore_index=3, label_smoothing=0.1)\n",
        {"cross_entropy": 1},
        _x(10, WIDTH),
    ),
    "a loss of bfloat16": (
        "class M(nn.Module):\n    def __init__(self): super().__init__(); self.loss = nn.CrossEntropyLoss()\n    def forward(self, x): return self.loss(x, x.argmin(-1))\n",
        {"cross_entropy": 1},
        _x(10, WIDTH, dtype=torch.bfloat16),
    ),
}


@pytest.mark.parametrize("what", SERVED)
def test_more_spellings_are_served(what: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    code, wanted, x = SERVED[what]
    model = Net(_home(code, tmp_path, request).M()).eval()
    before = copy.deepcopy(model)
    ferryman.port(model)
    with ferryman.trace() as trace, torch.no_grad():
        model(x)
    calls = {op: n for (op, _), n in trace.calls.items()}
    assert {op: calls.get(op) for op in wanted} == wanted
    _same(model, before, x)


def test_a_function_that_a_module_holds_may_be_replaced(tmp_path: Path, request: pytest.FixtureRequest) -> None:
    model = Net(_home(SERVED["a function that it holds"][0], tmp_path, request).M()).eval()
    ferryman.port(model)
    before = copy.deepcopy(model)
    ferryman.unport(before)
    model.inner.f = before.inner.f = torch.tanh
    _same(model, before, _x(2, 5, WIDTH))


def test_a_traced_model_is_refused_with_its_reason() -> None:
    traced = torch.jit.trace(nn.Linear(4, 4), torch.ones(1, 4))
    with pytest.raises(PortError, match="TorchScript"):
        ferryman.port(traced)
