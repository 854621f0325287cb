"""On a real device: a kernel whose blocks start early reads what came before it, and is read by what comes after."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import plan, registry
from tests.gpu.test_replay_gpu import GPU, replayed

pytestmark = pytest.mark.gpu
N, ROUNDS, LONG = 1 << 20, 5, 1 << 26


def _ours(x: Tensor) -> Tensor:
    """rms_norm(silu_mul(x, x)) by the kernels in C++, which overlap."""
    with ferryman.use("cuda"):
        return ops.rms_norm(ops.silu_mul(x, x).view(-1, 4096)).view(-1)


class _Chain:
    """Ours between kernels of others that take long, a fill, and another stream's work, over the same few buffers."""

    def __init__(self) -> None:
        made = torch.Generator(GPU).manual_seed(0)
        self.source = torch.randn(LONG, generator=made, device=GPU)
        self.x = torch.empty(N, dtype=torch.bfloat16, device=GPU)
        self.total = torch.zeros(N, device=GPU)
        self.side = torch.cuda.Stream(GPU)

    def run(self, ours: Callable[[Tensor], Tensor]) -> Tensor:
        self.total.zero_()
        for index in range(ROUNDS):
            self.x.copy_((self.source * (index + 1.0))[-N:])  # the last of the long kernel's results
            self.total.add_(ours(self.x))  # reads what is written just before
            self.x.copy_(ours(ours(self.x)))  # and each other's results
            self.total.add_(self.x)
            kept = ours(self.x)
            self.x.zero_()  # a write after a read
            self.total.add_(ours(self.x)).add_(kept)
            here = torch.cuda.current_stream(GPU)
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                self.x.copy_((self.source * -0.5)[-N:])
            here.wait_stream(self.side)
            self.total.add_(ours(self.x))  # after streams met
        return self.total.clone()


@pytest.mark.parametrize("captured", [False, True])
def test_overlapping_kernels_keep_the_streams_order(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "REPLAY_AFTER", 2)
    plan.drop_plans()
    chain = _Chain()

    def in_order(x: Tensor) -> Tensor:
        torch.cuda.synchronize(GPU)
        result = _ours(x)
        torch.cuda.synchronize(GPU)
        return result

    expected = chain.run(in_order)
    assert expected.isfinite().all() and expected.abs().sum() > 0
    assert all(replayed(registry.primitives()[name]) for name in ("silu_mul", "rms_norm"))
    if not captured:
        for _ in range(10):
            assert torch.equal(chain.run(_ours), expected)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain.run(_ours)
    for _ in range(10):
        result.zero_()
        graph.replay()
        torch.cuda.synchronize(GPU)
        assert torch.equal(result, expected)
    plan.drop_plans()
