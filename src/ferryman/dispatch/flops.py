"""FLOP formulas for `torch.utils.flop_counter`, registered when that module is first imported.

Importing it here would cost every user 40 ms, because it imports triton.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from ferryman.dispatch import arrivals

_COUNTER = "torch.utils.flop_counter"


def watch(name_all: Callable[[ModuleType], None]) -> None:
    """Have every op named when the counter arrives, or now: a counting mode copies the formulas when it is made."""
    arrivals.after_import(_COUNTER.__eq__, name_all)
    if arrived():
        name_all(sys.modules[_COUNTER])


def arrived() -> bool:
    """Whether there is a counter that takes formulas."""
    return hasattr(sys.modules.get(_COUNTER), "register_flop_formula")


def register(packet: Any, primitive: Callable[[], Any]) -> None:
    """Count an op of the library by the cost of its ``primitive``, which is asked for at the first count."""

    def formula(*args: Any, out_val: Any = None, **kwargs: Any) -> int:
        op = primitive()
        return int(op.cost(*op.bind(args, kwargs)).flops)

    sys.modules[_COUNTER].register_flop_formula(packet, get_raw=True)(formula)
