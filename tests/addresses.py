"""Whether interpreted Triton reads and writes only what its launch was given: each address, of each lane that is not
masked out.

A read past a tensor may be thrown away, so that no result shows it; on a device it may end the process.
"""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch


def extent(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's elements, and the one after the last."""
    elements = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    begin = tensor.data_ptr()
    return begin, begin + elements * tensor.element_size()


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield from (value,) if value.numel() else ()
    elif isinstance(value, dict):
        yield from tensors_in(list(value.values()))
    elif isinstance(value, list | tuple):
        for one in value:
            yield from tensors_in(one)
    elif hasattr(value, "base"):  # a tensor descriptor
        yield from tensors_in(value.base)


class _Looking:
    """Triton's module of reads and writes, which notes those that lie elsewhere."""

    def __init__(self, module: Any) -> None:
        self.module, self.given = module, list[tuple[int, int]]()
        self.accesses, self.outside = 0, list[str]()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.module, name)

    def load(self, addresses: Any, mask: Any, other: Any, dtype: Any) -> Any:
        self._look("reads", addresses, mask, np.dtype(dtype).itemsize)
        return self.module.load(addresses, mask, other, dtype)

    def store(self, addresses: Any, values: Any, mask: Any) -> Any:
        self._look("writes", addresses, mask, values.dtype.itemsize)
        return self.module.store(addresses, values, mask)

    def _look(self, what: str, addresses: Any, mask: Any, size: int) -> None:
        self.accesses += 1
        lanes = addresses[np.broadcast_to(mask, addresses.shape).astype(bool)]
        if not lanes.size:
            return
        least, most = int(lanes.min()), int(lanes.max()) + size
        if any(begin <= least and most <= end for begin, end in self.given):
            return
        inside = np.zeros(lanes.shape, bool)
        for begin, end in self.given:
            inside |= (lanes >= begin) & (lanes + size <= end)
        if not inside.all():
            code = [f for f in traceback.extract_stack() if not {"triton", "backends"} & {*Path(f.filename).parts}]
            kernel = [f for f in code if f.filename != __file__][-1]
            self.outside.append(
                f"{what} {int((~inside).sum())} of {lanes.size} elsewhere, line {kernel.lineno}: {kernel.line}"
            )


@contextlib.contextmanager
def watched() -> Iterator[_Looking]:
    """Of the process's launches within: how many accesses there were, and those outside of every tensor."""
    from triton.runtime import interpreter

    executor, usual, module = (
        interpreter.GridExecutor,
        interpreter.GridExecutor._init_args_hst,
        interpreter._interpreter,
    )
    looking = _Looking(module)

    def given(self: Any, args: Any, named: Any) -> Any:
        ready = usual(self, args, named)
        looking.given = [extent(t) for t in tensors_in(ready)]
        return ready

    executor._init_args_hst, interpreter._interpreter = given, looking
    try:
        yield looking
    finally:
        executor._init_args_hst, interpreter._interpreter = usual, module
