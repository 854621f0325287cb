"""PyTorch's own differentiable call leads where a gradient of small attention is asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.nn import functional

import ferryman
from ferryman import ops
from ferryman.device_profiles import detect, profile
from ferryman.dispatch import plan, registry, select
from tests.unit.test_own_gradient import ours


def heads(queries: int = 24, keys: int = 0, of_keys: int = 2, width: int = 16) -> list[torch.Tensor]:
    """(q, k, v) that ask for a gradient, in the layout of a model."""
    rows = ((2, queries, 2), (2, keys or queries, of_keys), (2, keys or queries, of_keys))
    return [torch.randn(*n, width, dtype=torch.bfloat16).transpose(1, 2).requires_grad_() for n in rows]


def _on_cpu(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dropout: float, causal: bool, scale: float | None = None
) -> Any:
    return torch._scaled_dot_product_flash_attention_for_cpu(q, k, v, dropout, causal, scale=scale)


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Callable[..., Any]]]:
    """An H100 whose calls run here: PyTorch's kernel for CPUs stands for its kernel for CUDA, and what is put into the
    dictionary, by op, for launchers."""
    launchers: dict[str, Callable[..., Any]] = {}
    monkeypatch.setattr(select, "profile_for", lambda device: profile("h100"))
    monkeypatch.setattr(registry, "probe", lambda backend, vendor: ())
    monkeypatch.setattr(registry, "launcher", lambda line: launchers[line.op])
    monkeypatch.setattr(torch, "_scaled_dot_product_flash_attention", _on_cpu)
    plan.drop_plans()
    yield launchers
    plan.drop_plans()


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
    assert [line.name for _, _, line in runner.plans.values()] == ["triton.packed", "torch.flash"]


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


def test_without_a_gradient_cudnns_call_is_alone(hopper: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives no log-sum-exp, so that a call for both, or with a gradient, has another plan."""
    asked: list[bool] = []

    def cudnn(
        q: Any, k: Any, v: Any, bias: Any, lse: bool, dropout: float, causal: bool, debug: bool, scale: Any
    ) -> Any:
        assert bias is None and not dropout and not debug
        asked.append(lse)
        return _on_cpu(q, k, v, 0.0, causal, scale)

    monkeypatch.setattr(torch, "_scaled_dot_product_cudnn_attention", cudnn)
    monkeypatch.setattr(plan, "REPLAYED", "cpu")  # only an accelerator's calls are PyTorch's own without a gradient
    hopper["attention"] = lambda q, k, v, causal, scale, *_: tuple(
        x.detach() for x in _on_cpu(q, k, v, 0.0, causal, scale)[:2]
    )
    tensors = [torch.randn(2, 504, 6, 64, dtype=torch.bfloat16).transpose(1, 2) for _ in range(3)]
    wanted = functional.scaled_dot_product_attention(*tensors)
    for _ in range(3):
        out = ops.attention(*tensors)
        assert torch.equal(out, wanted) and out.transpose(1, 2).is_contiguous()
    assert asked == [False] * 3
    ops.attention(*tensors, return_lse=True)
    ops.attention(*(t.requires_grad_() for t in tensors))
    assert asked == [False] * 3
    runner = plan.runner_of(registry.primitive("attention"))
    assert [line.name for _, _, line in runner.plans.values()] == ["torch.cudnn", "torch.cudnn", "torch.flash"]


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("batch", "length", "width"), [(1, 504, 64), (3, 130, 72), (2, 65, 40), (5, 1, 64), (1, 2048, 128)]
)
def test_cudnns_call_alone_is_right(batch: int, length: int, width: int, causal: bool) -> None:
    """Against the call with the log-sum-exp, which `ferryman check` judges: both round P and the output once."""
    if "wgmma" not in select.target_of(detect("cuda")).features:
        pytest.skip("cuDNN is first on Hopper")
    torch.manual_seed(0)
    q, k, v = (torch.randn(batch, length, 6, width, device="cuda").bfloat16().transpose(1, 2) for _ in range(3))
    with torch.no_grad(), ferryman.use(attention="torch.cudnn"):
        if length == 1:  # of one query cuDNN is another line
            with pytest.raises(ferryman.errors.Unsupported):
                ops.attention(q, k, v, causal=causal)
            return
        alone = ops.attention(q, k, v, causal=causal)
        with_lse, _ = ops.attention(q, k, v, causal=causal, return_lse=True)
    wanted = functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=causal)
    off, most = ((x.double() - wanted).abs().max() for x in (alone, with_lse))
    assert off <= 2.0**-7 * wanted.abs().max() and off <= 2 * most


def test_attention_keeps_its_function_where_every_run_must_be_the_same() -> None:
    torch.use_deterministic_algorithms(True)
    try:
        assert ferryman.explain(ops.attention, *heads(), device="h100").source != "autograd"
    finally:
        torch.use_deterministic_algorithms(False)
