"""Right kernels that are not ours: other orders, splits, formulas, libraries. The engine must pass them.

Each is written as a careful author would write it, and declares what it rounds beside its result.
"""

from __future__ import annotations

import functools
import importlib

from ferryman.porting.selftest.alternatives.common import Alternative

_FILES = ("common", "norms", "pointwise", "softmax", "products", "interpreted")


@functools.lru_cache(maxsize=1)
def alternatives() -> tuple[Alternative, ...]:
    """Every right alternative."""
    found: list[Alternative] = []
    for name in _FILES:
        found += importlib.import_module(f"{__name__}.{name}").RIGHT.found
    keys = [a.key for a in found]
    if len(set(keys)) != len(keys):
        raise ValueError(f"alternatives of the same key: {', '.join(sorted({k for k in keys if keys.count(k) > 1}))}")
    return tuple(found)
