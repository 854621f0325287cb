"""A ported module runs a call of before again without its tests; whatever they or the op would see is seen still."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx

import ferryman
from ferryman.dispatch import kept, own_limit, plan, registry
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
        fresh = ported(Scaled(16))
        fresh.eps = eps
        assert torch.equal(module(x), fresh(x))
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
    kept_calls = calls_of(module)
    plain = copy.deepcopy(kept_calls)
    assert plain == {} and type(plain) is dict and type(pickle.loads(pickle.dumps(kept_calls))) is dict
    module.__dict__[repeated.ATTRIBUTE] = plain  # as of a copy of what another library derived from its class
    for _ in range(3):
        assert torch.equal(module(x), expected)
    assert torch.equal(alone(module, x, monkeypatch), expected)


def test_nothing_is_left_behind() -> None:
    holder = nn.Sequential(nn.Linear(16, 8), nn.Linear(8, 8))
    before = [set(vars(m)) for m in holder]
    ferryman.port(holder)
    x = torch.randn(3, 16)
    for _ in range(3):
        holder(x)
    assert all(map(calls_of, holder))
    holder[0].in_features = 17  # its role ends
    assert type(holder[0]) is nn.Linear and calls_of(holder[0]) is None
    ferryman.unport(holder)
    assert [set(vars(m)) for m in holder] == before


def test_calls_are_few_and_end(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ported(nn.Linear(16, 8))
    for length in range(1, 3 * kept.MOST):
        for _ in range(3):
            module(torch.ones(length, 16))
        assert 0 < len(calls_of(module)) <= kept.MOST
    known = dict(calls_of(module))
    monkeypatch.setattr(kept, "TURNS", calls_of(module).turns)
    for _ in range(4):
        module(torch.ones(1000, 16))
    assert calls_of(module) == known
    ferryman.reload()
    for _ in range(3):
        module(torch.ones(3, 16))
    assert len(calls_of(module)) == 1 and calls_of(module).turns == 1  # nothing of before


@pytest.mark.parametrize("way", ["trace", "autocast", "young"])
def test_calls_that_cannot_be_kept_take_no_turn(way: str) -> None:
    module, x = ported(nn.Linear(16, 8)), torch.randn(3, 16)
    traces = [ferryman.trace(), torch.autocast("cpu", torch.bfloat16)]
    if way != "young":
        with traces[way == "autocast"] as seen:
            for _ in range(5):
                module(x)
        assert not calls_of(module)
        gone = weakref.ref(seen) if way == "trace" else None
        del seen, traces
        gc.collect()
        assert gone is None or gone() is None
    for _ in range(3):
        module(x)
    assert len(calls_of(module)) == calls_of(module).turns == 1


def test_keeping_never_raises() -> None:
    """Symbolic sizes of the second tensor; nested and sparse tensors, which have no sizes or strides."""
    module = nn.Sequential(nn.Embedding(32, 16), nn.Linear(16, 8))
    ferryman.port(module)
    given = {name: p.detach() for name, p in module.named_parameters()}

    def call(parameters: Any, x: Tensor) -> Any:
        table = torch.func.functional_call(module[0], {"weight": parameters["0.weight"]}, (torch.zeros(1, 1).long(),))
        own = {"weight": parameters["1.weight"], "bias": parameters["1.bias"]}
        return torch.func.functional_call(module[1], own, (x + table,))

    graph = make_fx(call, tracing_mode="symbolic")(given, torch.randn(3, 8, 16))
    x = torch.randn(3, 8, 16)
    assert torch.equal(graph(given, x), call(given, x))
    wide = nn.Linear(16, 8).double()
    sparse = torch.eye(16).double().to_sparse_csr()
    nested = torch.nested.nested_tensor([torch.randn(2, 16).double(), torch.randn(3, 16).double()])
    for own, value in ((wide, nested), (wide, sparse), (nn.GELU(), nested), (nn.ReLU(), sparse)):
        other = ported(copy.deepcopy(own))
        for _ in range(3):
            got = other(value)
        expected = own(value)
        parts = zip(got.unbind(), expected.unbind(), strict=True) if expected.is_nested else [(got, expected)]
        for one, right in parts:
            one, right = (t.to_dense() if t.layout is not torch.strided else t for t in (one, right))
            assert torch.equal(one, right)


def test_a_call_that_the_own_code_serves_is_kept_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gradient of so little that PyTorch's own call is quicker; without a gradient the op serves it."""
    monkeypatch.setattr(own_limit, "bytes_of", lambda device: 1 << 20)
    module, x = ported(nn.LayerNorm(64)), torch.randn(3, 64)
    with ferryman.trace() as trace:
        first = module(x)
    assert not trace.calls
    for _ in range(3):
        module(x)
    ((check, run, extra),) = calls_of(module).values()
    assert run is None and extra is None and check(x, module.weight, module.bias)
    again = alone(module, x, monkeypatch)
    assert torch.equal(first, again) and type(again.grad_fn).__name__ == "NativeLayerNormBackward0"
    with torch.no_grad(), ferryman.trace() as trace:
        module(x)
    assert trace.calls
    wide = ported(nn.Linear(16, 8).double())
    for _ in range(3):
        wide(torch.ones(3, 16).double())
    assert not calls_of(wide)  # a test of its dtype is quicker


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


@pytest.mark.parametrize(
    "test",
    [
        "type(x) in ferryman_plain",
        "x.dtype is w.dtype",
        "x.dtype.itemsize < 8",
        "(x.dtype is torch.int64 or x.dtype is torch.int32)",
        "x.shape == w.shape",
        "w is not None",
        "not (torch.is_grad_enabled() and (x.requires_grad))",
    ],
)
def test_tests_of_what_a_guard_compares_are_left_out(test: str) -> None:
    assert repeated._seen(test, frozenset("xw"))
    assert not repeated._seen(test.replace("x", "z").replace("w", "z"), frozenset("xw")) or "z" not in test


@pytest.mark.parametrize(
    "test",
    [
        "ferryman_held.get('bias') is None",
        "ferryman_same(self.eps, 1e-5)",
        "self.training",
        "y.dtype is x.dtype",
        "torch.is_autocast_enabled(x.device.type)",
        "x.grad_fn is None",
        *("x", "not x", "x > 3", "x[0, 0] > 0", "x == w", "x @ w", "x if x else 1", "(y := x.dtype)"),
        *("x.sum() > 0", "bool(x.shape[0] > 3) is True", "x.item() is None", "x.is_floating_point()"),
        *("torch.backends.flag", "[v for v in x]", "x.is_contiguous()", "x in (w, x)"),
    ],
)
def test_other_tests_are_asked_again(test: str) -> None:
    assert not repeated._seen(test, frozenset("xw"))


def test_a_tensor_that_the_op_is_not_given_is_asked_about_again() -> None:
    served = repeated.Served((), (), ("x.dtype is w.dtype", "x.dtype is y.dtype"), "ops.linear(x, w, None)")
    lines, _ = served.lines("own(x)")
    (asked,) = [line for line in lines if "ferryman_call[0](" in line]
    assert "y.dtype" in asked and "w.dtype" not in asked


def test_what_is_no_plain_call_is_not_kept() -> None:
    for expression in ("ops.linear(x, w) + 1", "ops.rope_(q, k, cos, sin)", "ops.linear(x + 1, w, None)", "f(x)"):
        served = repeated.Served((), (), (), expression)
        lines, _ = served.lines("own(x)")
        assert not any("ferryman_key" in line for line in lines), expression
    assert kept.may(registry.primitive("linear")) and not kept.may(registry.primitive("kv_append"))
