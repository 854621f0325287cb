"""What autocast makes of a function, beside the op that stands for it: dtypes, and in which the sums are."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from ferryman.dispatch import registry
from ferryman.porting.model.distance import distance, flat

_APART = 2.0**-4  # in bfloat16, of a result whose sums either side rounds where it likes
Run = Callable[..., Any]
# What CUDA's autocast computes in float32 and the CPU's does not, so that 16-bit numbers become wide there alone
_WIDENED = (
    " exp expm1 log log1p log2 log10 pow __pow__ __rpow__ reciprocal rsqrt softplus"
    " sum prod cumsum cumprod norm vector_norm softmax log_softmax logsumexp "
)


class _Seeing(TorchFunctionMode):
    """Notes the names of functions that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(getattr(function, "__name__", ""))
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def tests(op: str, original: Run, served: Run, given: Sequence[Any], x: str, apart: Run = distance) -> list[str]:
    """Tests of the input named x that a call must pass, so that under autocast it gives what the function gives."""
    outside = f"not {x}.is_meta and not torch.is_autocast_enabled({x}.device.type)"  # no autocast of meta
    narrow = f"({x}.dtype.itemsize >= 4 or {outside})"
    for dtype, test in ((torch.float32, outside), (torch.bfloat16, narrow)):
        low = [t.to(dtype) if isinstance(t, Tensor) and t.is_floating_point() else t for t in given]
        seeing = _Seeing()
        try:
            with torch.autocast("cpu", torch.bfloat16):
                actual = flat(served(*low))
                with seeing:
                    wanted = flat(original(*low))
            if [(a.dtype, a.shape) for a in actual] != [(w.dtype, w.shape) for w in wanted]:
                return [test]
            apart("under autocast: result", actual, wanted, _APART)
        except Exception:  # noqa: BLE001 - foreign code refuses what it likes: such calls are its own
            return [test]
    wide = (registry.primitive(op).autocast or ("",))[0] == "fp32"
    return [narrow] if not wide and any(f" {name} " in _WIDENED for name in seeing.names) else []
