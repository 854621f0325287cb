"""What a check's clock counts, on a device and a host that are simulated: no GPU is needed to be late."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from ferryman.porting.judging.results import WITH_LAUNCHES, Timing
from ferryman.porting.report.markdown import duration
from ferryman.porting.running import timing

GPU = torch.device("cuda")


@dataclass
class Clocks:
    """Seconds on the host, and when the device is through with what it was given."""

    host: float = 0.0
    device: float = 0.0

    def launch(self, host: float, device: float) -> None:
        self.host += host
        self.device = max(self.device, self.host) + device

    def wait(self) -> None:
        self.host = max(self.host, self.device)


@pytest.fixture
def clocks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Clocks]:
    now = Clocks()

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at = 0.0

        def record(self) -> None:
            now.launch(2e-6, 0.0)
            self.at = now.device

        def query(self) -> bool:
            return self.at <= now.host

        def synchronize(self) -> None:
            now.host = max(now.host, self.at)

        def elapsed_time(self, end: Event) -> float:
            return (end.at - self.at) * 1e3

    class Flush:
        def zero_(self) -> None:
            now.launch(4e-6, 60e-6)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(timing.torch, "empty", lambda *given, **named: Flush())
    yield now


def kernels(clocks: Clocks, number: int, host: float, device: float) -> Callable[[], None]:
    def call() -> None:
        for _ in range(number):
            clocks.launch(host, device)

    return call


@pytest.mark.parametrize(
    ("number", "host", "device"),
    [(1, 5e-6, 3e-6), (20, 10e-6, 2e-6), (4, 250e-6, 5e-6), (20, 10e-6, 50e-3)],
    ids=["one", "composite", "slow host", "long"],
)
def test_the_time_is_the_devices(clocks: Clocks, number: int, host: float, device: float) -> None:
    seconds, clock = timing.events(kernels(clocks, number, host, device), GPU)
    assert clock == "device events" and seconds == pytest.approx(number * device, rel=1e-3)


def test_one_late_repeat_in_four_does_not_count(clocks: Clocks) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        clocks.launch(5e-6, 10e-6)
        clocks.host += 20e-3 if calls % 4 == 0 else 0.0  # longer than any flush
        clocks.launch(5e-6, 10e-6)

    seconds, clock = timing.events(call, GPU)
    assert clock == "device events" and seconds == pytest.approx(20e-6, rel=1e-3)


@pytest.mark.parametrize(("device", "most"), [(50e-6, 60), (20e-3, 10), (1.0, 4)])
def test_a_call_that_waits_is_timed_with_its_launches_and_within_the_budget(
    clocks: Clocks, device: float, most: int
) -> None:
    calls = 0

    def call() -> None:
        nonlocal calls
        calls += 1
        clocks.launch(5e-6, device)
        clocks.wait()
        clocks.launch(5e-6, 0.0)

    seconds, clock = timing.events(call, GPU)
    assert clock == WITH_LAUNCHES and device < seconds < device + 20e-6
    assert calls <= most


def test_a_table_says_which_times_have_launches() -> None:
    fields: dict[str, Any] = {"op": "softmax", "implementation": "torch", "device": "cuda:0", "dtype": "bfloat16"}
    times = [Timing(**fields, case="rows", seconds=2e-5, clock=clock) for clock in ("device events", WITH_LAUNCHES)]
    assert [duration(t) for t in times] == ["20 us (bf16 rows)", "20 us with launches (bf16 rows)"]
