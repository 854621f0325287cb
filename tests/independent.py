"""What an op's `tests/ops/FAMILY/independent.py` gives: for each of its ops another way to compute it, which shares no
code with the definition. `tests/parity/test_independent.py` compares the two, and the definition's mutants."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Source:
    """compute: float64 arguments in the order of the schema -> the op's outputs, one or a tuple. Where the op has a
    gradient, autograd must be able to differentiate it: that is what the backward is compared with.

    leaves_out: whether a call is one that the source says nothing of, and why.
    """

    compute: Callable[..., Any]
    leaves_out: Callable[..., bool] = lambda *args: False
    why: str = ""
