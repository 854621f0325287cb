"""A mutating op's kernel as a function: run on copies of what it writes over, so that every gate and every other
implementation finds the inputs as they were, and every run starts from the same ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.fills import Buffer


class OnCopies:
    """``kernel`` on copies with the strides and the alignment of the arguments, between guards of their own.

    ``faults``: what it wrote outside the argument that it may write over, or returned in that argument's place.
    """

    def __init__(self, op: Primitive, kernel: Callable[..., Any]) -> None:
        self.faults: list[str] = []
        self._op, self._kernel = op, kernel

    def __call__(self, *args: Any) -> Any:
        given = list(args)
        buffers = {}
        for place, _ in self._op.overwritten:
            buffers[place] = Buffer.holding(args[place], args[place].device)
            given[place] = buffers[place].tensor
        result = self._kernel(*given)
        outputs = result if isinstance(result, (tuple, list)) else (result,)
        for place, output in self._op.overwritten:
            name = self._op.names[place]
            if buffers[place].overrun():
                self._fault(f"wrote outside {name}")
            if output < len(outputs) and not _same(outputs[output], given[place]):
                self._fault(f"output {output} is not {name}, which it is to be written over")
        return result

    def _fault(self, text: str) -> None:
        if text not in self.faults:
            self.faults.append(text)


def _same(output: Any, argument: Tensor) -> bool:
    if not isinstance(output, Tensor) or output.shape != argument.shape:
        return False
    return output is argument or not argument.numel() or output.data_ptr() == argument.data_ptr()


def on_copies(op: Primitive, kernel: Callable[..., Any]) -> Callable[..., Any]:
    """The kernel itself, where its op writes over nothing."""
    return OnCopies(op, kernel) if op.mutates else kernel


def faults(kernel: Callable[..., Any]) -> list[str]:
    """What was found so far of a kernel from `on_copies`."""
    return kernel.faults if isinstance(kernel, OnCopies) else []
