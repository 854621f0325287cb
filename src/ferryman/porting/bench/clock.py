"""The protocol of one contender: how its calls are timed, on a device and on a CPU.

A short call, and one that the host is busy with for most of its time, is timed in replays of a CUDA graph of all calls,
one for each set of inputs: events around eager calls would time the gaps between launches too, below 20 us for most and
up to 500 us where a call has many launches or a library's host work is long. Results are kept until the capture ends,
so that each call writes to memory of its own. Longer calls are timed by events around rounds of eager calls. What its
first calls show to be far behind another contender, the host's time taken off, is not made ready any further.

A call that writes over its inputs finds others the next time: they are restored before every sample, which is then one
round, and there is no time on the same inputs again and again. What restoring leaves in the last cache to be written
back is displaced before the sample begins, or the call would pay for it (up to 8% of two calls of 170 MB on an H200).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferryman.porting.bench.document import Method

Call = Callable[[], Any]
GRAPH_BELOW = 500e-6  # of an eager call's time
HOST_BOUND = 0.5  # of it: the host's part from which gaps between launches may be timed
ROUGH_CALLS = 32  # of an eager round, which tells what to capture and how many rounds a sample has
SAMPLES = 9  # of one trial; their median is the trial's time
CPU_SECONDS = 0.2  # of one trial on a CPU, which takes fewer samples of slow calls
SAMPLE_SECONDS = 4e-3  # of device time for one sample: many launches, so that an event's own 1 us is nothing
HOST_SECONDS = 20e-3


class Timer:
    """One contender's calls, one for each set of inputs, ready to be timed again and again."""

    method: Method = "host clock"
    note: str | None = None
    rough: float | None = None  # seconds of a call, from one round while it was made ready
    far_behind = False  # by ``rough``: it was not made ready any further

    def __init__(self, calls: Sequence[Call], device: torch.device, restore: Call | None = None) -> None:
        self.calls, self.device, self.restore = list(calls), device, restore
        for call in self.calls[:3] or self.calls:
            call()

    def cold(self, samples: int = SAMPLES) -> float:
        """Seconds of a call, each on another set of inputs than the last: the median of ``samples``."""
        return self._rounds(self.calls, samples)

    def warm(self) -> float | None:
        """Seconds of a call on the same inputs again and again; None where the first call changes them."""
        return None if self.restore is not None else self._rounds([self.calls[0]] * len(self.calls))

    def _rounds(self, calls: Sequence[Call], samples: int = SAMPLES) -> float:
        first = self._round(calls)
        more = max(0, min(samples - 1, round(CPU_SECONDS / max(first * len(calls), 1e-9)) - 1))
        return statistics.median([first, *(self._round(calls) for _ in range(more))])

    def _round(self, calls: Sequence[Call]) -> float:
        if self.restore is not None:
            self.restore()
        start = time.perf_counter()
        for call in calls:
            call()
        return (time.perf_counter() - start) / len(calls)

    def close(self) -> None:
        """Let go of what timing keeps."""


class DeviceTimer(Timer):
    """By graph replay where a call may be shorter than what a host can launch, else by device events."""

    def __init__(
        self,
        calls: Sequence[Call],
        device: torch.device,
        watching: Call = lambda: None,
        restore: Call | None = None,
        longest: float | None = None,
    ) -> None:
        super().__init__(calls, device, restore)
        self.watching = watching
        self.others: torch.Tensor | None = None  # what displaces everything else from the last cache
        if restore is not None:
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.others = torch.zeros(2 * cache // 4, dtype=torch.int32, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None  # of all calls
        self.method = "device events"
        if longest is not None:
            # an eager call may wait for its launch as long as what is captured may take, or as the host needs
            once, launching = min(self._launched(self.calls[-1], 1) for _ in range(2))
            if once - max(GRAPH_BELOW, launching) > longest:
                self.rough, self.far_behind, self.rounds = once, True, 1
                return
        few = self.calls[:ROUGH_CALLS]
        rough, launching = min(self._launched(lambda: self._each(few), len(few)) for _ in range(3))
        if rough < GRAPH_BELOW or launching > HOST_BOUND * rough:
            self.graph = self._captured(self.calls, distinct=True)
            if self.graph is not None:
                self.method = "graph replay"
                rough = self._events(self.graph.replay, len(self.calls), 1)
        self.rough = rough
        per_round = max(rough * len(self.calls), 1e-7)
        self.rounds = 1 if restore is not None else max(1, min(1000, round(SAMPLE_SECONDS / per_round)))

    @staticmethod
    def _each(calls: Sequence[Call]) -> None:
        for call in calls:
            call()

    def _captured(self, calls: Sequence[Call], distinct: bool) -> torch.cuda.CUDAGraph | None:
        """A graph of the calls; None where they cannot be captured, which is noted. distinct: results are kept until
        the end, so that none is written where the last one was."""
        side = torch.cuda.Stream(self.device)
        side.wait_stream(torch.cuda.current_stream(self.device))
        try:
            with torch.cuda.stream(side):
                for call in calls[:2]:
                    call()
            torch.cuda.current_stream(self.device).wait_stream(side)
            graph, kept = torch.cuda.CUDAGraph(), []
            with torch.cuda.graph(graph):
                for call in calls:
                    result = call()
                    if distinct:
                        kept.append(result)
            del kept, result
        except Exception as error:  # noqa: BLE001 - a peer may do anything; that it has no graph is said in its row
            torch.cuda.synchronize(self.device)
            _leave_capture(self.device)
            why = (str(error).splitlines() or [""])[0][:160] or type(error).__name__
            self.note = f"not capturable, launch gaps included: {why}"
            return None
        return graph

    def _events(self, work: Call, calls: int, rounds: int) -> float:
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(rounds):
            work()
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls / rounds

    def _launched(self, work: Call, calls: int) -> tuple[float, float]:
        """Seconds of a call by events, and those that the host took to launch it."""
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        before = time.perf_counter()
        work()
        launching = time.perf_counter() - before
        end.record()
        end.synchronize()
        return start.elapsed_time(end) / 1e3 / calls, launching / calls

    def _median(self, work: Call, number: int, samples: int) -> float:
        times = []
        for sample in range(samples):
            if sample == samples // 2:
                for _ in range(self.rounds):
                    work()
                self.watching()  # while the device has that work to do
            if self.restore is not None and self.others is not None:
                self.restore()
                self.others.max()
            times.append(self._events(work, number, self.rounds))
        return statistics.median(times)

    def cold(self, samples: int = SAMPLES) -> float:
        work = self.graph.replay if self.graph is not None else lambda: self._each(self.calls)
        return self._median(work, len(self.calls), samples)

    def warm(self) -> float | None:
        if self.restore is not None:
            return None
        same = [self.calls[0]] * len(self.calls)
        if self.graph is None:
            return self._median(lambda: self._each(same), len(same), SAMPLES)
        graph = self._captured(same, distinct=False)
        return None if graph is None else self._median(graph.replay, len(same), SAMPLES)

    def close(self) -> None:
        self.graph = None


def _leave_capture(device: torch.device) -> None:
    """After a capture that failed, torch's generator waits for its end, and every later random number raises."""
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device=device)
    torch.cuda.synchronize(device)


def timer(
    calls: Sequence[Call],
    device: torch.device,
    watching: Call = lambda: None,
    restore: Call | None = None,
    longest: float | None = None,
) -> Timer:
    """A timer of calls. longest: seconds beyond which a call need not be made ready, on a device."""
    if device.type == "cuda":
        return DeviceTimer(calls, device, watching, restore, longest)
    return Timer(calls, device, restore)


def host(call: Call, device: torch.device) -> float:
    """Seconds of one call by the host's clock, many in a row, waiting for the device after the last."""

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    def once(calls: int) -> float:
        wait()
        start = time.perf_counter()
        for _ in range(calls):
            call()
        wait()
        return (time.perf_counter() - start) / calls

    rough = once(3)
    calls = max(3, min(500, round(HOST_SECONDS / max(rough, 1e-7))))
    return statistics.median(once(calls) for _ in range(3))
