"""What a call asks of the numbers that it is given, where the op that serves it holds for such numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LARGEST = 1e9  # that a value may be, whatever else is asked of it
Bounds = Sequence[tuple[Tensor, float, float]]


def within(bounds: Bounds) -> bool:
    """Whether each number of a value lies between its two bounds; NaN does not. False where numbers cannot be read.

    It waits for the device once. A loop over tokens has more to launch than that takes.
    """
    values = [value.detach() for value, _, _ in bounds]
    if not values or not readable(*values):
        return False
    with torch.no_grad():
        between = [((x >= least) & (x <= most)).all() for x, (_, least, most) in zip(values, bounds, strict=True)]
        return bool(torch.stack(between).all())


def readable(*values: Tensor) -> bool:
    """Whether a call may read numbers. It may not as code is compiled, traced or captured, under a mode or a transform,
    of a tensor without data, nor where PyTorch reports that code waits for a device, or sums in an order that varies:
    the code that was there does neither.
    """
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if any(isinstance(x, FakeTensor) or x.device.type == "meta" for x in values):
        return False
    if all(x.device.type == "cpu" for x in values):
        return True
    if torch.are_deterministic_algorithms_enabled():  # `cumsum` has none on devices
        return False
    if not any(x.is_cuda for x in values):
        return True
    return not (torch.cuda.is_current_stream_capturing() or torch.cuda.get_sync_debug_mode())
