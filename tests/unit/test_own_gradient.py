"""PyTorch's own differentiable call leads where a gradient of small tensors is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import ferryman
from ferryman import ops
from ferryman.device_profiles import Profile, profile
from ferryman.dispatch import plan, registry, select
from tests.bounded import off

LIMIT = 4096
SMALL = dataclasses.replace(profile("cpu"), thresholds={"autograd.bytes": LIMIT})
W, B = torch.randn(64), torch.randn(64)


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A CPU whose profile has the threshold."""
    monkeypatch.setattr(select, "profile_for", lambda device: SMALL)
    plan.drop_plans()
    yield
    plan.drop_plans()


def drawn(rows: int = 4, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, 64, dtype=dtype, requires_grad=True)


def ours(y: torch.Tensor) -> bool:
    """Whether a Function of ours stands around the call."""
    assert y.grad_fn is not None
    return "Bridge" in y.grad_fn.name()


SERVED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "layer_norm": (lambda x: ops.layer_norm(x, W, B), lambda x: functional.layer_norm(x, (64,), W, B)),
    "rms_norm": (lambda x: ops.rms_norm(x, W), lambda x: functional.rms_norm(x, (64,), W, 1e-6)),
    "silu": (lambda x: ops.bias_act(x, None, "silu"), functional.silu),
    "softmax": (ops.softmax, lambda x: torch.softmax(x, -1)),
    "linear": (lambda x: ops.linear(x, W.expand(8, 64)), lambda x: functional.linear(x, W.expand(8, 64))),
}
LEFT: dict[str, Callable[[Any], Any]] = {
    "two roundings": lambda x: ops.rms_norm(x, W, cast_before_weight=True),
    "a bias": lambda x: ops.bias_act(x, B, "silu"),
    "a rounded result": lambda x: ops.bias_act(x, None, "tanh"),
    "rounded products": lambda x: ops.softmax(x.half()),
    "no elements": lambda x: ops.layer_norm(x[:0], W, B),
    "a sum beside the norm": lambda x: ops.add_layer_norm(x, x, W, B)[0],
}


@pytest.mark.parametrize("name", SERVED)
def test_small_calls_are_pytorchs_own(name: str) -> None:
    call, own = SERVED[name]
    x = drawn()
    for _ in range(3):  # chosen, from the plan, behind a guard
        y, wanted = call(x), own(x)
        assert not ours(y) and torch.equal(y, wanted)
        (gradient,), (expected,) = (torch.autograd.grad(z.square().sum(), x) for z in (y, wanted))
        assert torch.equal(gradient, expected)


@pytest.mark.parametrize("name", LEFT)
def test_what_pytorch_rounds_otherwise_keeps_its_function(name: str) -> None:
    assert ours(LEFT[name](drawn()))


def heads(queries: int = 24, keys: int = 0, of_keys: int = 2, width: int = 16) -> list[torch.Tensor]:
    """(q, k, v) that ask for a gradient, in the layout of a model."""
    rows = ((2, queries, 2), (2, keys or queries, of_keys), (2, keys or queries, of_keys))
    return [torch.randn(*n, width, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for n in rows]


def _on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool, scale: float | None = None
) -> Any:
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> dict[str, Callable[..., Any]]:
    """An H100 whose calls run here: PyTorch's kernel for CPUs stands for its kernel for CUDA, and what is put into the
    dictionary, by op, for launchers."""
    launchers: dict[str, Callable[..., Any]] = {}
    monkeypatch.setattr(select, "profile_for", lambda device: profile("h100"))
    monkeypatch.setattr(registry, "probe", lambda backend, vendor: ())
    monkeypatch.setattr(registry, "launcher", lambda line: launchers[line.op])
    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention", _on_cpu)
    plan.drop_plans()
    return launchers


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("scale", [None, 0.3])
def test_small_attention_is_pytorchs_own(hopper: dict[str, Any], causal: bool, scale: float | None) -> None:
    hopper["attention"] = lambda *args: None
    q, k, v = tensors = heads()
    for _ in range(3):
        out = ops.attention(q, k, v, causal=causal, scale=scale)
        wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        assert not ours(out) and torch.equal(out, wanted) and out.transpose(1, 2).is_contiguous()
        for got, expected in zip(*(torch.autograd.grad(z.sum(), tensors) for z in (out, wanted)), strict=True):
            assert torch.equal(got, expected)


def test_small_attention_of_contiguous_heads_has_the_ops_layout(hopper: dict[str, Any]) -> None:
    hopper["attention"] = lambda *args: None
    out = ops.attention(*[t.detach().contiguous().requires_grad_() for t in heads()])
    assert not ours(out) and out.transpose(1, 2).is_contiguous()


def test_attention_with_its_log_sum_exp_keeps_its_function(hopper: dict[str, Any]) -> None:
    """PyTorch's call gives no gradient of it. Calls with and without do not share a plan."""
    hopper["attention"] = lambda q, k, v, causal, scale, *_: tuple(
        x.detach() for x in _on_cpu(q, k, v, 0.0, causal, scale)[:2]
    )
    tensors = heads()
    for _ in range(3):
        out, lse = ops.attention(*tensors, return_lse=True)
        assert ours(out) and ours(lse) and not ours(ops.attention(*tensors))
    runner = plan.runner_of(registry.primitive("attention"))
    assert [line.name for _, _, line in runner.plans.values()] == ["triton.tiled", "torch.flash"]


def test_a_trace_of_small_attention_counts_what_serves_both_passes(hopper: dict[str, Any]) -> None:
    hopper["attention"] = lambda q, k, v, causal, scale, *_: tuple(
        x.detach() for x in _on_cpu(q, k, v, 0.0, causal, scale)[:2]
    )
    hopper["attention_backward"] = lambda grad, lse, q, k, v, *_: (q, k, v, q.new_empty(0), q.new_empty(0))
    with ferryman.trace() as traced:
        out = ops.attention(*heads())
    assert ours(out)
    out.sum().backward()
    assert traced.calls == {("attention", "torch.flash"): 1, ("attention_backward", "torch.flash"): 1}
    assert traced.sources["attention", "torch.flash", "autograd"] == 1


NOT_SERVED: dict[str, tuple[list[torch.Tensor], dict[str, Any]]] = {
    "a log-sum-exp": (heads(), {"return_lse": True}),
    "a window": (heads(), {"window": 3, "causal": True}),
    "a mask": (heads(), {"mask": torch.ones(24, 24, dtype=torch.bool)}),
    "a soft cap": (heads(), {"softcap": 5.0}),
    "sinks": (heads(), {"sinks": torch.zeros(2)}),
    "a key range": (heads(), {"key_range": torch.tensor([[0, 24], [1, 24]], dtype=torch.int32)}),
    "fewer queries, causal": (heads(8, 32), {"causal": True}),
    "groups of heads": (heads(of_keys=1), {}),
    "a width of no vector": (heads(width=12), {}),
    "steps of no vector": ([torch.randn(2, 24, 2, 20).bfloat16()[..., :16].transpose(1, 2).requires_grad_()] * 3, {}),
    "many keys": (heads(24, 2049), {}),
    "much memory": ([torch.empty(64, 8, 512, 64, dtype=torch.bfloat16, requires_grad=True)] * 3, {}),
    "float32": ([t.detach().float().requires_grad_() for t in heads()], {}),
}


@pytest.mark.parametrize("name", NOT_SERVED)
def test_attention_that_pytorchs_call_does_not_express_keeps_its_function(name: str) -> None:
    tensors, options = NOT_SERVED[name]
    assert ferryman.explain(ops.attention, *heads(), device="h100").source == "autograd"
    assert ferryman.explain(ops.attention, *tensors, device="h100", **options).source != "autograd"


def test_attention_keeps_its_function_where_every_run_must_be_the_same() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert ferryman.explain(ops.attention, *heads(), device="h100").source != "autograd"
    finally:
        torch.use_deterministic_algorithms(False)


def test_large_calls_and_profiles_without_the_threshold_keep_the_function(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = (W.numel() + B.numel()) * 4
    rows = (LIMIT - beside) // (64 * 4)
    assert not ours(ops.layer_norm(drawn(rows), W, B)) and ours(ops.layer_norm(drawn(rows + 1), W, B))
    monkeypatch.setattr(select, "profile_for", lambda device: profile("cpu"))
    plan.drop_plans()
    assert ours(ops.layer_norm(drawn(), W, B))


def test_calls_with_and_without_a_gradient_do_not_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without one the profile's order stands, in whatever turn calls come."""
    monkeypatch.setattr(select, "preferred", lambda op, profile: ["definition", "torch"])
    x, plain = drawn(), drawn().detach()
    runner = plan.runner_of(registry.primitive("layer_norm"))
    for _ in range(3):
        assert not ours(ops.layer_norm(x, W, B))
        with torch.no_grad():
            assert ops.layer_norm(x, W, B).grad_fn is None
        assert ops.layer_norm(plain, W, B).grad_fn is None
    assert sorted(line.name for _, _, line in runner.plans.values()) == ["definition", "definition", "torch"]


def test_requests_go_before_it() -> None:
    x = drawn()
    with ferryman.use("definition"), ferryman.trace() as traced:
        ops.layer_norm(x, W, B).sum().backward()
    assert traced.calls == {("layer_norm", "definition"): 1, ("layer_norm_backward", "definition"): 1}
    with ferryman.use("definition"):
        assert ours(ops.layer_norm(x, W, B))
    with ferryman.use("torch"):
        assert ours(ops.layer_norm(x, W, B))  # a CPU's: its line for the backward is the one that was asked for
    with ferryman.strict():
        assert not ours(ops.layer_norm(x, W, B))


def test_a_trace_counts_what_serves_both_passes() -> None:
    x = drawn()
    with ferryman.trace() as traced:
        y = ops.layer_norm(x, W, B)
    y.sum().backward()
    assert traced.calls == {("layer_norm", "torch"): 1, ("layer_norm_backward", "torch"): 1}
    assert traced.sources["layer_norm", "torch", "autograd"] == 1 and not traced.fallbacks


def test_explain_says_why_the_line_leads() -> None:
    wide = drawn(512, torch.bfloat16)
    weights = torch.randn(64, dtype=torch.bfloat16), torch.randn(64, dtype=torch.bfloat16)
    why = ferryman.explain(ops.layer_norm, wide, *weights, device="h100")
    assert (why.chosen, why.source) == ("torch", "autograd") and "own differentiable call" in str(why)
    with torch.no_grad():
        assert ferryman.explain(ops.layer_norm, wide, *weights, device="h100").source != "autograd"
    large = torch.empty(2**15, 64, dtype=torch.bfloat16, requires_grad=True)
    assert ferryman.explain(ops.layer_norm, large, *weights, device="h100").source != "autograd"


def test_below_autograd_and_under_modes_nothing_changes() -> None:
    """torch.compile, subclasses, autocast and dispatch modes come through the library, whose Function has the
    gradient."""

    class Sub(torch.Tensor):
        pass

    x = drawn()
    sub = x.detach().as_subclass(Sub).requires_grad_()
    y = ops.layer_norm(sub, W, B)
    y.sum().backward()
    assert type(y) is Sub and sub.grad is not None
    compiled = torch.compile(lambda z: ops.layer_norm(z, W, B), backend="aot_eager", fullgraph=True)
    assert off(registry.primitive("layer_norm"), (x.detach(), W, B, 1e-5), [compiled(x).detach()], x.dtype) <= 1
    with torch.autocast("cpu"):
        assert ops.layer_norm(x, W, B).requires_grad
    torch.use_deterministic_algorithms(True)
    try:
        assert not ours(ops.layer_norm(x, W, B))
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("name", ["h100", "h200"])
def test_hoppers_have_the_threshold(name: str) -> None:
    known: Profile = profile(name)
    assert known.thresholds[select.AUTOGRAD_BYTES] == 4 << 20
    assert select.AUTOGRAD_BYTES not in profile("a100").thresholds
