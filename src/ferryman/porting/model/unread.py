"""What original code may not do while a proof runs it: read what tensors hold, and draw random numbers.

Drawn inputs show nothing of what such a reading decides, however many there are.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.porting.model.trace import Unproven

# What PyTorch's own tags leave out of what reads a tensor's contents
_READS = {Tensor.tolist, Tensor.numpy, Tensor.__array__, Tensor.data_ptr, Tensor.untyped_storage, Tensor.__contains__}
_DEPENDS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
_MASKS = (torch.bool, torch.uint8)


@contextlib.contextmanager
def undrawn() -> Iterator[None]:
    """Raises Unproven where random numbers were drawn, however rare what they decide is; puts them back."""
    before = torch.random.get_rng_state()
    yield
    if not torch.equal(torch.random.get_rng_state(), before):
        torch.random.set_rng_state(before)
        raise Unproven("it draws random numbers")


def unread(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function that raises Unproven where what it calls reads what tensors hold."""

    def run(*given: Any) -> Any:
        with _Below(), _Above():
            return call(*given)

    return run


class _Above(TorchFunctionMode):
    """Within it, nothing of Python may follow from what tensors hold: a number, an outcome, a size."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _READS:
            raise Unproven(f"it reads what a tensor holds ({func.__name__})")
        return func(*args, **(kwargs or {}))


@functools.cache
def _depends(func: Any) -> bool:
    return bool(_DEPENDS & set(getattr(func, "tags", ()))) and func is not torch.ops.aten.index.Tensor


class _Below(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _depends(func):
            raise Unproven(f"it reads what a tensor holds ({func})")
        if func is torch.ops.aten.index.Tensor and any(i is not None and i.dtype in _MASKS for i in args[1]):
            raise Unproven("it reads what a tensor holds (a mask as an index)")
        return func(*args, **(kwargs or {}))
