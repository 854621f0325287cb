"""What a call asks of the numbers that it is given, where the op that serves it holds for such numbers alone."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

LARGEST = 1e9  # that a value may be, whatever else is asked of it
Bounds = Sequence[tuple[Tensor, float, float]]


def within(bounds: Bounds) -> bool:
    """Whether each number of a value lies between its two bounds; NaN does not. False where numbers cannot be read: as
    code is compiled, traced or captured, under a mode or a transform, of a tensor without data.

    It waits for the device once. A loop over tokens has more to launch than that takes.
    """
    values = [value.detach() for value, _, _ in bounds]
    if not values or not _readable(values):
        return False
    with torch.no_grad():
        between = [((x >= least) & (x <= most)).all() for x, (_, least, most) in zip(values, bounds, strict=True)]
        return bool(torch.stack(between).all())


def _readable(values: list[Tensor]) -> bool:
    if torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None:
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None:
        return False
    if any(isinstance(x, FakeTensor) or x.device.type == "meta" for x in values):
        return False
    return not (any(x.is_cuda for x in values) and torch.cuda.is_current_stream_capturing())
