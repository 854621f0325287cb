"""A check's times are the device's: a slow host does not enter, and a call that waits for the device says so."""

from __future__ import annotations

import time

import pytest
import torch

from ferryman.porting.running.timing import events

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")


def test_a_slow_host_does_not_enter() -> None:
    x = torch.randn(1024, 4096, device=GPU, dtype=torch.bfloat16)

    def chain(pause: float) -> None:
        for _ in range(4):
            time.sleep(pause)
            x.mul(0.5)

    quick, slow = events(lambda: chain(0.0), GPU), events(lambda: chain(2e-4), GPU)
    assert quick[1] == slow[1] == "device events"
    assert slow[0] == pytest.approx(quick[0], rel=0.2) and slow[0] < 1e-4, (quick, slow)  # 0.8 ms of sleep


def test_what_waits_for_the_device_says_so() -> None:
    x = torch.randn(1024, 4096, device=GPU, dtype=torch.bfloat16)
    seconds, clock = events(lambda: x.mul(0.5).sum().item(), GPU)
    assert clock == "device events, launches included" and 0 < seconds < 1e-2


def test_what_is_written_over_is_given_back_before_each_repeat() -> None:
    x = torch.ones(1 << 20, device=GPU)
    seen: list[torch.Tensor] = []

    def call() -> None:
        seen.append(x[:1].clone())
        x.mul_(2)

    events(call, GPU, [x])
    assert {float(v) for v in seen[3:]} == {1.0}
