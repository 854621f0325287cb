"""PyTorch's own differentiable call leads where a gradient of small tensors is asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import ferryman
from ferryman import ops
from ferryman.device_profiles import Profile, profile
from ferryman.dispatch import plan, registry, select
from tests import families
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


SERVED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = families.table("own_gradient", "SERVED")
LEFT: dict[str, Callable[[Any], Any]] = families.table("own_gradient", "LEFT")


def test_every_such_call_is_tried() -> None:
    """Here, or by a test of its family's own."""
    lines = [line for op in registry.primitives() for line in registry.implementations(op) if line.differentiable]
    left = {registry.family_of(registry.primitive(line.op)).name for line in lines if line.op not in SERVED}
    folders = Path(__file__).parents[1] / "ops"
    assert len(SERVED) >= 5 and [f for f in left if not [*folders.glob(f"{f}/test_*own_gradient.py")]] == []


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
