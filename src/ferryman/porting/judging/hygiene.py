"""How an implementation is run under check: poisoned outputs, guarded inputs, three times (G5)."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.cases import Arguments, as_tuple

# NaN in every floating dtype, a large finite number, zero: what is not written differs between the runs.
_POISONS = (0xFF, 0x55, 0x00)
# A small output can come from any of several free blocks: so many of its size are filled, all of them at once.
_BLOCKS, _SMALL = 8, 1 << 20


@dataclass
class Runs:
    """Outputs of the first run, and what the three runs showed."""

    outputs: tuple[Any, ...]
    seconds: float
    faults: list[str] = field(default_factory=list)
    differing: str | None = None


def _poison(primitive: Primitive, args: tuple[Any, ...], pattern: int) -> None:
    """Fill memory of the outputs' sizes and free it: the allocator hands it to the implementation next."""
    blocks = [block for block in as_tuple(primitive.meta(*args)) if block.numel()]
    filled = []  # all of them at once: the allocator gives none twice
    for block in blocks:
        size = block.untyped_storage().nbytes()
        torch.empty(0, dtype=torch.uint8, device=block.device).set_(block.untyped_storage()).fill_(pattern)
        for _ in range(_BLOCKS if size <= _SMALL else 0):
            filled.append(torch.full((size,), pattern, dtype=torch.uint8, device=block.device))


def bitwise_equal(a: Tensor, b: Tensor) -> bool:
    """Equal in every bit, NaN payloads and signs of zero included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(_as_bytes(a), _as_bytes(b))


def _as_bytes(x: Tensor) -> Tensor:
    """A dimension of one element, or of none, may have any stride, of which there is no view in bytes."""
    packed = x.contiguous()
    return packed.as_strided((packed.numel(),), (1,)).view(torch.uint8)


def _aliased(outputs: tuple[Any, ...], args: Arguments) -> list[str]:
    inputs = {b.tensor.untyped_storage().data_ptr(): name for name, b in args.buffers.items()}
    aliases, seen = [], set[int]()
    for i, out in enumerate(outputs):
        if not isinstance(out, Tensor) or out.numel() == 0:
            continue
        storage = out.untyped_storage().data_ptr()
        if storage in inputs:
            aliases.append(f"output {i} aliases {inputs[storage]}")
        if out.data_ptr() in seen:
            aliases.append(f"output {i} aliases another output")
        seen.add(out.data_ptr())
    return aliases


def run(
    primitive: Primitive,
    kernel: Callable[..., Any],
    args: Arguments,
    target: Target,
    device: torch.device,
    times: int = 3,
) -> Runs:
    """Run ``times`` times; the kernel's own exceptions rise."""
    first: tuple[Any, ...] = ()
    faults: list[str] = []
    differing = None
    seconds = []
    for number in range(times):
        _poison(primitive, args.values, _POISONS[number % len(_POISONS)])
        _synchronize(device)
        start = time.perf_counter()
        with torch.no_grad():
            outputs = as_tuple(kernel(*args.values, target))
        early = _copies(outputs) if number == 0 and device.type == "cuda" else None
        _synchronize(device)
        seconds.append(time.perf_counter() - start)
        if number == 0:
            first = outputs
            faults += _aliased(outputs, args)
            if early is not None and not all(bitwise_equal(a, b) for a, b in zip(early, _copies(outputs), strict=True)):
                faults.append("work was left on another stream: the outputs changed after the current one's end")
            first = tuple(o.clone() if isinstance(o, Tensor) and _aliased((o,), args) else o for o in outputs)
        else:
            faults += [f for f in _recycled(first, outputs) if f not in faults]
            differing = differing or _difference(first, outputs, number)
    faults += args.untouched()
    return Runs(first, statistics.median(seconds), faults, differing)


def _recycled(first: tuple[Any, ...], again: tuple[Any, ...]) -> list[str]:
    """The first run's outputs are still held here: memory that comes back belongs to two results."""
    addresses = {o.data_ptr() for o in first if isinstance(o, Tensor) and o.numel()}
    return [
        f"output {i} is memory of an earlier call's output, which is still in use"
        for i, o in enumerate(again)
        if isinstance(o, Tensor) and o.numel() and o.data_ptr() in addresses
    ]


def _copies(outputs: tuple[Any, ...]) -> list[Tensor]:
    return [o.clone() for o in outputs if isinstance(o, Tensor)]


def _difference(first: tuple[Any, ...], again: tuple[Any, ...], number: int) -> str | None:
    if len(first) != len(again):
        return f"run {number + 1} returned {len(again)} outputs, the first {len(first)}"
    for i, (a, b) in enumerate(zip(first, again, strict=True)):
        if isinstance(a, Tensor) and isinstance(b, Tensor) and not bitwise_equal(a, b):
            return f"output {i} of run {number + 1} differs bitwise from the first run's"
    return None


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
