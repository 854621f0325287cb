"""On a real device: a kernel whose blocks start early reads what came before it, and is read by what comes after."""

from __future__ import annotations

import functools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import plan, registry
from tests.gpu.test_replay_gpu import GPU, replayed

pytestmark = pytest.mark.gpu
WIDTH = 131_072  # rows that a few blocks take one after another: they all start at once, and run for long
N, ROUNDS = 256 * WIDTH, 3


def _ours(x: Tensor, between: Callable[[], None]) -> Tensor:
    """silu_mul of rms_norm(x), by the kernels in C++: the second's blocks start as soon as all of the first's have."""
    between()
    with ferryman.use("cuda"):
        scaled = ops.rms_norm(x.view(-1, WIDTH))
        between()
        activated = ops.silu_mul(scaled, scaled).view(-1)
    between()
    return activated


class _Chain:
    """Ours between kernels of others that take long, a fill, and another stream's work, over the same few buffers."""

    def __init__(self) -> None:
        generator = torch.Generator(GPU).manual_seed(0)
        self.source = torch.randn(N, generator=generator, device=GPU)
        self.x = torch.empty(N, dtype=torch.bfloat16, device=GPU)
        self.total = torch.zeros(N, device=GPU)
        self.side = torch.cuda.Stream(GPU)

    def run(self, between: Callable[[], None] = lambda: None) -> Tensor:
        ours = functools.partial(_ours, between=between)
        self.total.zero_()
        for index in range(ROUNDS):
            self.x.copy_(self.source.roll(index))
            self.total.add_(ours(self.x))  # reads what is written just before
            self.x.copy_(ours(ours(self.x)))  # and each other's results
            self.total.add_(self.x)
            kept = ours(self.x)
            self.x.zero_()  # a write after a read
            self.total.add_(ours(self.x)).add_(kept)
            here = torch.cuda.current_stream(GPU)
            self.side.wait_stream(here)
            with torch.cuda.stream(self.side):
                self.x.copy_(self.source.roll(-index - 1))
            here.wait_stream(self.side)
            self.total.add_(ours(self.x))  # after streams met
        return self.total.clone()


@pytest.mark.parametrize("captured", [False, True])
def test_overlapping_kernels_keep_the_streams_order(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "REPLAY_AFTER", 2)
    plan.drop_plans()
    chain = _Chain()

    expected = chain.run(torch.cuda.synchronize)  # one kernel after another
    assert expected.isfinite().all() and expected.abs().sum() > 0
    assert all(replayed(registry.primitives()[name]) for name in ("silu_mul", "rms_norm"))
    if not captured:
        for _ in range(10):
            assert torch.equal(chain.run(), expected)
        return
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain.run()
    for _ in range(10):
        result.zero_()
        graph.replay()
        torch.cuda.synchronize(GPU)
        assert torch.equal(result, expected)
    plan.drop_plans()
