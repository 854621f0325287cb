"""The planted bugs, grouped by class; each file is a list of short wrong kernels, or of edits of the right ones."""

from __future__ import annotations

import functools
import importlib
from collections import Counter

from ferryman.porting.selftest.planting import Mutant

_FILES = (
    "sums", "rounding", "formula", "edges", "special", "memory", "structure", "inplace", "attention", "gradients",
    "triton_norms", "triton_pointwise", "triton_softmax", "triton_linear", "triton_attention", "simt",
)  # fmt: skip


@functools.lru_cache(maxsize=1)
def catalogue() -> tuple[Mutant, ...]:
    """Every mutant, keys distinct."""
    found: list[Mutant] = []
    for name in _FILES:
        found += importlib.import_module(f"{__name__}.{name}").BUGS.found
    repeated = [key for key, n in Counter(m.key for m in found).items() if n > 1]
    if repeated:
        raise ValueError(f"mutants of the same key: {', '.join(repeated)}")
    return tuple(found)
