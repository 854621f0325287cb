"""What the device reaches in this very run: a copy, and a product by the vendor's library."""

from __future__ import annotations

import torch

from ferryman.porting.bench import clock
from ferryman.porting.bench.document import Ceilings
from ferryman.porting.fills import dtype_name

_DEVICE_COPY, _HOST_COPY = 2 << 30, 64 << 20  # bytes of each side
_DEVICE_SIDE, _HOST_SIDE = 8192, 512
_MOST_OF_FREE = 0.25


def measure(device: torch.device, dtype: torch.dtype) -> Ceilings:
    """Bytes a second of a copy (read and written), and operations a second of a square product of random numbers."""
    size, side = (_DEVICE_COPY, _DEVICE_SIDE) if device.type == "cuda" else (_HOST_COPY, _HOST_SIDE)
    if device.type == "cuda":
        size = min(size, int(torch.cuda.mem_get_info(device)[0] * _MOST_OF_FREE))
    source = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device)
    into = torch.empty_like(source)
    copy = _best(lambda: into.copy_(source), device)
    a, b = (torch.randn(side, side, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    product = _best(lambda: torch.mm(a, b), device)
    return Ceilings(
        copy_bytes_per_s=2 * size / copy, copy_bytes=2 * size, product_flops_per_s=2 * side**3 / product,
        product=f"{dtype_name(dtype)} {side}^3",
    )  # fmt: skip


def _best(call: clock.Call, device: torch.device) -> float:
    made = clock.timer([call], device)
    try:
        return min(made.cold() for _ in range(3))
    finally:
        made.close()
