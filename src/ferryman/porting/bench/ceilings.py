"""What the device reaches in this very run: a copy, and a product by the vendor's library."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import torch

from ferryman.porting.bench import clock
from ferryman.porting.bench.document import Ceilings
from ferryman.porting.inputs.fills import dtype_name

_COPIES = (torch.Tensor.copy_, lambda into, source: torch.bitwise_not(source, out=into))
_DEVICE_COPY, _HOST_COPY = 2 << 30, 64 << 20  # bytes of each side
_DEVICE_SIDE, _HOST_SIDE = 8192, 512
_MOST_OF_FREE = 0.25


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Bytes a second of a copy (read and written), and operations a second of a square product of random numbers."""
    size, side = (_DEVICE_COPY, _DEVICE_SIDE) if device.type == "cuda" else (_HOST_COPY, _HOST_SIDE)
    if device.type == "cuda":
        size = min(size, int(torch.cuda.mem_get_info(device)[0] * _MOST_OF_FREE))
    copy = _best(copies(2 * size, device)(), device)
    a, b = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    product = _best(lambda: torch.mm(a, b), device)
    return Ceilings(
        copy_bytes_per_s=2 * size / copy,
        copy_bytes=2 * size,
        product_flops_per_s=2 * side**3 / product,
        product=f"{dtype_name(dtype)} {side}^3",
    )


def _best(call: clock.Call, device: torch.device) -> float:
    timer = clock.timer([call], device)
    try:
        return min(timer.cold() for _ in range(3))
    finally:
        timer.close()


def copies(bytes_moved: float, device: torch.device) -> Callable[[], clock.Call]:
    """Makes copies of ``bytes_moved`` bytes, half of them read, each between memory of its own.

    By the quicker of CUDA's copy and an element-wise kernel: the former takes 1.5 times as long at many sizes (H200:
    128 MiB and 2 KiB in 100 us, 128 MiB and 4 KiB in 65), and ops that are ahead of that say nothing.
    """
    size = max(1, math.ceil(bytes_moved / 8))  # of int32, read and written
    chosen: list[Callable[..., Any]] = []

    def one() -> clock.Call:
        source = torch.randint(-(2**31), 2**31 - 1, (size,), dtype=torch.int32, device=device)
        into = torch.empty_like(source)
        if not chosen:
            chosen.append(_quickest(into, source))
        return lambda: chosen[0](into, source)

    return one


def _quickest(into: torch.Tensor, source: torch.Tensor) -> Callable[..., Any]:
    if source.device.type == "cpu":
        return _COPIES[0]
    timers = [clock.timer([functools.partial(way, into, source)], source.device) for way in _COPIES]
    times = [min(t.rough or math.inf, t.cold(1)) for t in timers]
    for timer in timers:
        timer.close()
    return _COPIES[times.index(min(times))]
