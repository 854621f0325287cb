"""FLOP formulas for `torch.utils.flop_counter`, registered when that module is first imported.

Importing it here would cost every user 40 ms, because it imports triton.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

from ferryman.ops.primitive import Primitive

_COUNTER = "torch.utils.flop_counter"
_waiting: list[tuple[Primitive, Any]] = []


def register(op: Primitive, overload: Any) -> None:
    """Count ``overload`` by the primitive's cost, now or when the counter is imported."""
    _waiting.append((op, overload))
    if _COUNTER in sys.modules:
        _flush(sys.modules[_COUNTER])
    elif not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


def _flush(counter: ModuleType) -> None:
    while _waiting:
        op, overload = _waiting.pop()

        def formula(*args: Any, _op: Primitive = op, out_val: Any = None, **kwargs: Any) -> int:
            return int(_op.cost(*_op.bind(args, kwargs)).flops)

        counter.register_flop_formula(overload.overloadpacket, get_raw=True)(formula)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the counter as Python would, and flushes the waiting formulas once it has run."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        if name != _COUNTER:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            _flush(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec
