"""Clocks, power and throttling of the device, asked while it works: a run on lowered clocks measures the cooling."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ferryman.porting.bench.document import Condition

# NVML's reasons for lowered clocks. Being idle or set by the user is no throttling.
_REASONS = {
    0x4: "power cap",
    0x8: "hardware slowdown",
    0x10: "sync boost",
    0x20: "software thermal slowdown",
    0x40: "hardware thermal slowdown",
    0x80: "hardware power brake",
}
# Large products run at it for ever. Contenders take turns and meet the same clocks, so that their times are trusted
# while those of one and the same hold still.
STEADY = frozenset({"power cap"})
CLOCK_SPREAD = 1.05
_CPU = "a CPU is not asked"


@dataclass
class Watch:
    """Samples of one cell."""

    ask: Callable[[], tuple[int, int, float, int, list[str]]] | None
    source: str
    samples: list[tuple[int, int, float, int, list[str]]] = field(default_factory=list)

    @property
    def unknown(self) -> str:
        """Why a GPU's clocks cannot be asked for; "" where they can, and for a CPU."""
        return "" if self.ask is not None or self.source == _CPU else self.source

    def sample(self) -> None:
        """Ask the device, while it has work."""
        if self.ask is not None:
            self.samples.append(self.ask())

    def condition(self) -> Condition:
        if not self.samples:
            return Condition(source=self.source)
        sm, memory, power, heat, _ = zip(*self.samples, strict=True)
        reasons = dict.fromkeys(reason for *_, causes in self.samples for reason in causes)
        return Condition(
            source=self.source,
            sm_clock_mhz=(min(sm), max(sm)),
            memory_clock_mhz=(min(memory), max(memory)),
            power_w=(min(power), max(power)),
            temperature_c=max(heat),
            throttled_by=list(reasons),
        )


def watch(device: torch.device) -> Watch:
    """What can be asked of a device here: NVML through nvidia-ml-py."""
    if device.type != "cuda":
        return Watch(None, _CPU)
    if torch.version.hip:
        return Watch(None, "an AMD device's clocks are not asked for")
    try:
        nvml = importlib.import_module("pynvml")
    except ImportError:
        return Watch(None, "nvidia-ml-py is not installed: clocks, power and throttling are not known")
    try:
        nvml.nvmlInit()
        handle = _handle(nvml, device)
        ask = _asker(nvml, handle)
        ask()
    except nvml.NVMLError as error:
        return Watch(None, f"NVML cannot be asked: {error}")
    return Watch(ask, "NVML")


def _handle(nvml: Any, device: torch.device) -> Any:
    """NVML counts all devices, torch those that are visible: both know the device's UUID."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    if uuid is None:
        return nvml.nvmlDeviceGetHandleByIndex(device.index or 0)
    return nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}")


def _asker(nvml: Any, handle: Any) -> Callable[[], tuple[int, int, float, int, list[str]]]:
    reasons_of = getattr(nvml, "nvmlDeviceGetCurrentClocksEventReasons", None)
    if reasons_of is None:  # before version 12 of nvidia-ml-py
        reasons_of = nvml.nvmlDeviceGetCurrentClocksThrottleReasons

    def ask() -> tuple[int, int, float, int, list[str]]:
        mask = int(reasons_of(handle))
        return (
            int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            int(nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            nvml.nvmlDeviceGetPowerUsage(handle) / 1e3,
            int(nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
            [name for bit, name in _REASONS.items() if mask & bit],
        )

    return ask


def spread(trials: Iterable[Sequence[float]]) -> float:
    """The most by which one contender's longest trial exceeds its shortest."""
    return max((max(own) / min(own) for own in trials if own), default=1.0)


def steadied(trials: Sequence[Sequence[float]]) -> list[list[float]]:
    """Each contender's times over those of all in the same turn: a comparison is as good on clocks that sink for all
    alike, as they do for minutes under large products. Of one contender, its times."""
    if len(trials) < 2:
        return [list(own) for own in trials]
    turns = [math.exp(sum(map(math.log, turn)) / len(turn)) for turn in zip(*trials, strict=True)]
    return [[seconds / turn for seconds, turn in zip(own, turns, strict=True)] for own in trials]


def distrust(condition: Condition, spread: float) -> list[str]:
    """Why times under this condition are not to be trusted; empty where they are. ``spread``: of trials of one kind."""
    doubts = [f"clocks were lowered: {reason}" for reason in condition.throttled_by if reason not in STEADY]
    clocks = condition.sm_clock_mhz
    if clocks is not None and condition.throttled_by and spread > CLOCK_SPREAD:
        low, high = clocks
        if high > CLOCK_SPREAD * low:
            doubts.append(
                f"the SM clock moved between {low} and {high} MHz at the power cap, and times by {spread - 1:.0%}"
            )
    return doubts
