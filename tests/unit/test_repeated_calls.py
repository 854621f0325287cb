"""A ported module runs a call of before again without its tests; whatever they or the op would see is seen still."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ferryman
from ferryman.dispatch import kept, plan, registry
from ferryman.errors import CompileError, FerrymanError
from ferryman.porting.model import repeated


class Scaled(nn.Module):
    """An RMS norm by hand."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(0.5, 1.5, width))
        self.eps = 1e-5

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)).to(x.dtype)


class Turned(nn.Module):
    """A product whose weight lies the other way round."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(*x.shape[:-1], 8)


MODULES: dict[str, Any] = {
    "linear": lambda: nn.Linear(16, 8),
    "no bias": lambda: nn.Linear(16, 8, bias=False),
    "layer norm": lambda: nn.LayerNorm(16),
    "rms norm": lambda: Scaled(16),
    "turned": Turned,
    "gelu": nn.GELU,
}


def ported(module: nn.Module) -> Any:
    holder = nn.Sequential(module)
    ferryman.port(holder)
    assert hasattr(type(holder[0]), "ferryman_original"), type(module)
    return holder[0]


@pytest.fixture(params=MODULES)
def pair(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    torch.manual_seed(3)
    own = MODULES[request.param]()
    return own, ported(copy.deepcopy(own))


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    plan.drop_plans()
    yield
    plan.drop_plans()


def calls_of(module: Any) -> Any:
    return module.__dict__.get(repeated.ATTRIBUTE)


class Away:
    """In the place of `ferryman.ops` in a served forward: what runs nevertheless was kept."""

    def __getattr__(self, name: str) -> Any:
        raise AssertionError(f"ops.{name} was called")


def alone(module: Any, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> Any:
    with monkeypatch.context() as patched:
        patched.setitem(type(module).forward.__globals__, "ops", Away())
        return module(x)


def test_a_call_of_before_runs_what_the_op_ran(pair: tuple[nn.Module, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    _, module = pair
    shapes = [(2, 5, 16), (3, 16), (2, 5, 16)]
    for shape in shapes:
        x = torch.randn(shape, requires_grad=True)
        for _ in range(3):
            first = module(x)
        again = alone(module, x, monkeypatch)
        assert torch.equal(first, again) and first.stride() == again.stride()
        got = torch.autograd.grad(again.sin().sum(), [x, *module.parameters()])
        expected = torch.autograd.grad(first.sin().sum(), [x, *module.parameters()])
        assert all(map(torch.equal, got, expected))
        with pytest.raises(AssertionError, match="was called"):
            alone(module, torch.randn(7, 16), monkeypatch)
    with torch.no_grad():
        for _ in range(3):
            module(torch.ones(4, 16))
        assert not alone(module, torch.ones(4, 16), monkeypatch).requires_grad


def test_a_weight_that_changes_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Linear(16, 8)
    module, x = ported(own), torch.randn(3, 16)
    for _ in range(3):
        before = module(x)
    with torch.no_grad():
        module.weight.mul_(2)
        module.bias.mul_(2)
    assert torch.equal(alone(module, x, monkeypatch), 2 * before)
    module.weight = nn.Parameter(module.weight.detach() * 2)
    module.bias = nn.Parameter(module.bias.detach() * 2)
    assert torch.equal(alone(module, x, monkeypatch), 4 * before)
    module.weight.requires_grad_(False)
    with pytest.raises(AssertionError, match="was called"):
        alone(module, x, monkeypatch)
    module.bias = None
    assert torch.equal(module(x), nn.functional.linear(x, module.weight))


def test_a_number_that_changes_is_read() -> None:
    module = ported(Scaled(16))
    x = torch.full((2, 16), 1e-3)
    for eps in (1e-5, 1e-5, 1e-5, 1e-2, 1e-2, 1e-2, 1e-5):
        module.eps = eps
        own = Scaled(16)
        own.eps = eps
        torch.testing.assert_close(module(x), own(x), rtol=2e-7, atol=0)
    module.eps = torch.tensor(1e-2)  # of another type: the role ends
    assert type(module) is Scaled and module(x).shape == x.shape


def test_what_is_asked_for_and_counted_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = ported(nn.Linear(16, 8)), torch.randn(3, 16)
    with torch.no_grad():
        for _ in range(3):
            plain = module(x)
        with ferryman.trace() as trace:
            module(x)
        assert sum(trace.calls.values()) == 1
        with ferryman.use(linear="definition"), ferryman.trace() as trace:
            module(x)
        assert list(trace.calls) == [("linear", "definition")]
        with pytest.raises(AssertionError, match="was called"), ferryman.use(linear="definition"):
            alone(module, x, monkeypatch)
        assert torch.equal(alone(module, x, monkeypatch), plain)
        ferryman.reload()
        with pytest.raises(AssertionError, match="was called"):
            alone(module, x, monkeypatch)


def test_another_forward_of_the_class_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = ported(nn.Linear(16, 8)), torch.randn(3, 16)
    for _ in range(3):
        module(x)
    monkeypatch.setattr(nn.Linear, "forward", lambda self, x: x + 1)
    assert torch.equal(module(x), x + 1)


def _in_mode(module: Any, mode: str, x: Tensor) -> Any:
    if mode == "autocast":
        with torch.autocast("cpu", torch.bfloat16):
            return module(x)
    if mode == "inference":
        with torch.inference_mode():
            return module(torch.ones(3, 16))
    if mode == "vmap":
        return torch.vmap(module)(x)
    if mode == "forward":
        with torch.autograd.forward_ad.dual_level():
            return module(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    if mode == "subclass":
        return module(x.as_subclass(nn.Buffer))
    return torch.zeros_like(module.to("meta")(x.to("meta")), device="cpu")


@pytest.mark.parametrize("mode", ["autocast", "inference", "vmap", "forward", "subclass", "meta"])
def test_modes_go_where_they_went(mode: str) -> None:
    """As those of a twin without a call of before do; forward mode is refused by both."""
    own = nn.Linear(16, 8)
    module, x, results = ported(copy.deepcopy(own)), torch.randn(3, 16), list[Any]()
    for _ in range(3):
        module(x)
    for each in (ported(own), module):
        try:
            results.append(_in_mode(each, mode, x))
        except FerrymanError as error:
            results.append(str(error))
    first, second = results
    if mode == "forward":
        assert first == second and "forward-mode" in first
    else:
        assert first.dtype is second.dtype and torch.equal(first, second)


def test_copies_and_pickles_know_nothing_of_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = ported(nn.Linear(16, 8)), torch.randn(3, 16)
    for _ in range(3):
        expected = module(x)
    assert calls_of(module)
    for other in (copy.deepcopy(module), copy.copy(module), pickle.loads(pickle.dumps(module))):
        assert calls_of(other) is None and torch.equal(other(x), expected)
    module.in_features = 17  # the role ends, and what was kept stays behind
    assert type(module) is nn.Linear
    plain = pickle.loads(pickle.dumps(module))
    assert calls_of(plain) == {} and type(calls_of(plain)) is dict and torch.equal(plain(x), expected)
    holder = nn.Sequential(plain)
    ferryman.port(holder)
    for _ in range(3):
        assert torch.equal(holder(x), expected)
    assert torch.equal(alone(plain, x, monkeypatch), expected)


def test_calls_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ported(nn.Linear(16, 8))
    for length in range(1, 3 * kept.MOST):
        for _ in range(3):
            module(torch.ones(length, 16))
        assert 0 < len(calls_of(module)) <= kept.MOST
    monkeypatch.setattr(kept, "ATTEMPTS", calls_of(module).attempts)
    known = dict(calls_of(module))
    for _ in range(4):
        module(torch.ones(1000, 16))
    assert len(calls_of(module)) in (0, len(known)) and calls_of(module).attempts > kept.ATTEMPTS


def test_a_call_that_the_own_code_serves_is_kept_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    own = nn.Linear(16, 8)
    module = ported(copy.deepcopy(own))
    x = torch.randn(3, 16, dtype=torch.float64)
    module.double()
    for _ in range(3):
        module(x)
    (check, run, extra), *others = calls_of(module).values()
    assert run is None and extra is None and not others and check(x, module.weight, module.bias)
    assert torch.equal(module(x), own.double()(x))
    module.float()
    assert torch.equal(module(x.float()), own.float()(x.float()))


def test_the_same_tensor_twice_is_no_call_of_before(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ported(nn.Linear(16, 16, bias=False))
    for _ in range(3):
        module(torch.ones(16, 16))
    weight = module.weight
    assert torch.equal(module(weight), nn.functional.linear(weight, weight))


def test_threads_and_plans_that_are_dropped() -> None:
    own = nn.Linear(16, 8)
    module, wrong = ported(copy.deepcopy(own)), []
    inputs = [torch.randn(n, 16) for n in range(1, 30)]
    expected = [own(x) for x in inputs]

    def work(first: int) -> None:
        for step in range(400):
            i = (first + step) % len(inputs)
            if not torch.equal(module(inputs[i]), expected[i]):
                wrong.append(i)

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        plan.drop_plans()
    assert not wrong


def test_a_kernel_that_is_refused_is_left_to_the_op(monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = ported(nn.Linear(16, 8)), torch.randn(3, 16)
    for _ in range(3):
        expected = module(x)
    calls = calls_of(module)
    (key, (check, _, extra)), *_ = calls.items()
    refused: list[int] = []

    def refuse(*args: Any) -> Any:
        refused.append(1)
        raise CompileError("triton", "planted", "sm_90", "none")

    calls[key] = (check, refuse, extra)
    assert torch.equal(module(x), expected) and refused


def test_tests_that_a_guard_does_not_make_are_asked_again() -> None:
    tensors = frozenset(("x", "ferryman_own_weight"))
    for seen in (
        "type(x) in ferryman_plain",
        "x.dtype is ferryman_own_weight.dtype",
        "x.dtype.itemsize < 8",
        "(ferryman_compiling() or not ferryman_little(x, None, ferryman_own_weight))",
        "not (torch.is_grad_enabled() and (x.requires_grad))",
        "bool(x.shape[0] > 3) is True",
    ):
        assert repeated._seen(seen, tensors) is not seen.startswith("bool"), seen
    for other in (
        "ferryman_held.get('bias') is None",
        "ferryman_same(self.eps, 1e-5)",
        "x.sum() > 0",
        "self.training",
        "y.dtype is x.dtype",
        "torch.is_autocast_enabled(x.device.type)",
        "x.grad_fn is None",
    ):
        assert not repeated._seen(other, tensors), other


def test_what_is_no_plain_call_is_not_kept() -> None:
    for expression in ("ops.linear(x, w) + 1", "ops.rope_(q, k, cos, sin)", "ops.linear(x + 1, w, None)", "f(x)"):
        served = repeated.Served((), (), (), expression, frozenset("xw"))
        lines, _ = served.lines("own(x)")
        assert not any("ferryman_key" in line for line in lines), expression
    assert kept.may(registry.primitive("linear")) and not kept.may(registry.primitive("kv_append"))
