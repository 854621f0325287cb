"""What others' rules say of the same outputs: `torch.allclose`, `torch.testing.assert_close`, and "2x the reference".

Each is given the kindest reference that there is, the float64 oracle rounded to the output's dtype, and NaN equals NaN.
A comparison that raises (another dtype, an incompatible shape) counts as a rejection.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.porting.judging.parity import Prepared

ALLCLOSE, ASSERT_CLOSE, TWICE = "allclose_1e-2", "assert_close", "twice_the_reference"
NAMES = (ALLCLOSE, ASSERT_CLOSE, TWICE)
MEANING = {
    ALLCLOSE: "torch.allclose(rtol=1e-2, atol=1e-2)",
    ASSERT_CLOSE: "torch.testing.assert_close, default tolerances",
    TWICE: "largest error at most twice the low-precision reference's (FlashAttention)",
}


def _allclose(got: Tensor, want: Tensor, exact: Tensor, low: Tensor) -> bool:
    return torch.allclose(got, want, rtol=1e-2, atol=1e-2, equal_nan=True)


def _assert_close(got: Tensor, want: Tensor, exact: Tensor, low: Tensor) -> bool:
    torch.testing.assert_close(got, want, equal_nan=True)
    return True


def _twice(got: Tensor, want: Tensor, exact: Tensor, low: Tensor) -> bool:
    """Where oracle and reference are finite: the rule says nothing about the others."""
    finite = exact.isfinite() & low.isfinite()
    if got.shape != exact.shape:
        return False
    if not bool(finite.any()):
        return True
    error = (got.double() - exact)[finite].abs().nan_to_num(nan=torch.inf).max()
    allowed = (low.double() - exact)[finite].abs().max()
    return bool(error <= 2 * allowed)


_RULES: dict[str, Callable[[Tensor, Tensor, Tensor, Tensor], bool]] = {
    ALLCLOSE: _allclose,
    ASSERT_CLOSE: _assert_close,
    TWICE: _twice,
}


def accepts(rule: str, outputs: Sequence[Any], prepared: Prepared, roundings: frozenset[str]) -> bool:
    """Whether a rule lets these outputs through."""
    if len(outputs) != len(prepared.oracle):
        return False
    lows = prepared.reference(roundings)
    for got, exact, declared, low in zip(outputs, prepared.oracle, prepared.declared, lows, strict=True):
        if not isinstance(got, Tensor):
            return False
        try:
            if not _RULES[rule](got.to(exact.device), exact.to(declared.dtype), exact, low):
                return False
        except (RuntimeError, AssertionError, ValueError):
            return False
    return True
