"""Attention with a mask under torch.compile: cuDNN's own call in the graph, with the op's meaning."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ferryman
from ferryman import ops
from ferryman.device_profiles import detect
from ferryman.dispatch import select

pytestmark = pytest.mark.gpu


def _mask(kind: str, rows: int, keys: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    seen = torch.rand(2, 1, rows, keys, generator=draw) < 0.6
    seen[0, 0, 5] = False  # a row that sees nothing
    if kind == "bool":
        return seen.cuda()
    bias = torch.randn(1, 4, rows, keys, generator=draw)
    bias[:, 1, 7] = -torch.inf
    return bias.to(torch.bfloat16).cuda()


@pytest.mark.parametrize("kind", ["bool", "bias"])
@pytest.mark.parametrize(("keys", "whole"), [(136, False), (131, True)], ids=["served", "rows not of 16 bytes"])
def test_a_mask_is_traced_where_cudnn_reads_it(kind: str, keys: int, whole: bool) -> None:
    if "wgmma" not in select.target_of(detect("cuda")).features:
        pytest.skip("cuDNN is first on Hopper")
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, n, 4, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n in (96, keys, keys))
    mask = _mask(kind, 96, keys)
    targets: list[str] = []

    def looking(graph: torch.fx.GraphModule, given: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return torch._inductor.compile(graph, given)

    def call(*args: torch.Tensor) -> torch.Tensor:
        return ops.attention(*args[:3], mask=args[3])

    with torch.no_grad():
        got = torch.compile(call, fullgraph=True, backend=looking)(q, k, v, mask)
        wanted = ops.attention(q.double().float(), k.float(), v.float(), mask=mask if kind == "bool" else mask.float())
    assert any("ferryman.attention" in name for name in targets) == whole
    assert any("cudnn" in name for name in targets) != whole
    # rounding of P and of the output to 8 bits, of values of unit variance, and the blind rows exactly
    assert (got.float() - wanted).norm() < 2.0**-7 * wanted.norm()
    blind = wanted.abs().amax(-1) == 0
    assert blind.any() and not got[blind].any()


def test_a_mask_stays_the_ops_where_a_gradient_is_needed() -> None:
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 4, 64, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    targets: list[str] = []

    def looking(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    mask = _mask("bool", 64, 64)
    torch.compile(lambda: ops.attention(q, k, v, mask=mask), fullgraph=True, backend=looking)().sum().backward()
    assert any("ferryman.attention" in name for name in targets) and bool(torch.isfinite(q.grad).all())


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("kv_heads", [2, 4])
def test_a_window_is_traced_as_flash_attention(causal: bool, kv_heads: int) -> None:
    if "wgmma" not in select.target_of(detect("cuda")).features:
        pytest.skip("traced on Hopper")
    torch._dynamo.reset()
    heads = (4, kv_heads, kv_heads)
    given = [torch.randn(2, 200, n, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for n in heads]
    grad = torch.randn(2, 4, 200, 64, device="cuda", dtype=torch.bfloat16)
    targets: list[str] = []

    def looking(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    def call(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return ops.attention(q, k, v, causal=causal, window=33)

    results = []
    for function in (torch.compile(call, fullgraph=True), torch.compile(call, fullgraph=True, backend=looking)):
        leaves = [x.detach().requires_grad_() for x in given]
        out = function(*leaves)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    assert any("_flash_attention_forward" in name for name in targets)
    assert not any("ferryman.attention" in name for name in targets)
    leaves = [x.detach().double().float().requires_grad_() for x in given]
    with ferryman.use(attention="torch.composed", attention_backward="torch.composed"):
        out = call(*leaves)
        wanted = (out, *torch.autograd.grad(out, leaves, grad.float()))
    for got in results:  # 8 bits of P, dS and the results, of values of unit variance
        for mine, right in zip(got, wanted, strict=True):
            assert (mine.float() - right).norm() < 2.0**-7 * right.norm()


@pytest.mark.parametrize("kind", ["mask", "window"])
def test_much_work_that_is_hidden_stays_the_ops(kind: str) -> None:
    """Whose own kernel skips it; a gradient's forward is traced."""
    if "wgmma" not in select.target_of(detect("cuda")).features:
        pytest.skip("of Hopper's kernel")
    torch._dynamo.reset()
    q, k, v = (torch.randn(2, 2048, 32, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2) for _ in range(3))
    seen = torch.ones(2048, 2048, dtype=torch.bool, device="cuda").tril()
    given: dict[str, Any] = {"mask": seen} if kind == "mask" else {"causal": True, "window": 1500}
    targets: list[str] = []

    def looking(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    with torch.no_grad():
        got = torch.compile(lambda: ops.attention(q, k, v, **given), fullgraph=True, backend=looking)()
        with ferryman.use(attention="triton.hopper"):
            assert torch.equal(got, ops.attention(q, k, v, **given))
    assert any("ferryman.attention" in name for name in targets)


@pytest.mark.parametrize("width", [128, 60])
def test_narrow_values_are_traced_as_they_are(width: int) -> None:
    if "wgmma" not in select.target_of(detect("cuda")).features:
        pytest.skip("cuDNN is first on Hopper")
    torch._dynamo.reset()
    q, k = (torch.randn(2, 4, 128, 192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    v = torch.randn(2, 4, 128, width, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(2, 4, 128, width, device="cuda", dtype=torch.bfloat16)
    results = []
    for function in (torch.compile(ops.attention, fullgraph=True), ops.attention):
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        out = function(*leaves, causal=True)
        results.append((out, *torch.autograd.grad(out, leaves, grad)))
    leaves = [x.detach().float().requires_grad_() for x in (q, k, v)]
    with ferryman.use(attention="torch.composed", attention_backward="torch.composed"):
        out = ops.attention(*leaves, causal=True)
        wanted = (out, *torch.autograd.grad(out, leaves, grad.float()))
    for got in results:
        for mine, right in zip(got, wanted, strict=True):
            assert mine.shape == right.shape and (mine.float() - right).norm() < 2.0**-7 * right.norm()
