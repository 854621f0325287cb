"""What a proof saw of the code that it ran: its tests with their outcomes, and what it trusts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

_TRUSTED = ("torch", "math", "builtins", "operator", "typing", "_operator")
# Functions of a library without arguments that say in which mode PyTorch runs, such as export: a proof holds for the
# answer that it got, and a call asks again.
modes: set[Any] = set()


class Unproven(Exception):
    """Code that a proof cannot follow; the text says what and where."""


@dataclass
class Test:
    """A condition and how it came out. ``guard``: its source, where it may stand before the whole call instead.

    Of an equality with an attribute of the module, ``against``: which one; ``sides``: by run, the two numbers each time
    it was asked.
    """

    text: str
    line: int
    guard: str | None
    seen: set[bool] = field(default_factory=set)
    loop: bool = False
    against: str = ""
    sides: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass
class Trace:
    """All conditions of the code that was followed. ``run``: whoever runs it counts the runs that he tells apart."""

    tests: list[Test] = field(default_factory=list)
    run: int = 0

    def seen(self, index: int, value: Any) -> Any:
        self.tests[index].seen.add(bool(value))
        return value

    def same(self, index: int, left: Any, right: Any) -> Any:
        self.tests[index].sides.setdefault(self.run, []).append((_number(left), _number(right)))
        return self.seen(index, left == right)

    def each(self, index: int, items: Any) -> Iterator[Any]:
        taken = False
        for item in items:
            taken = self.seen(index, True)
            yield item
        if not taken:
            self.seen(index, False)

    def guards(
        self, entered: bool = False, never: Callable[[Test], bool] = lambda test: False
    ) -> list[tuple[str, bool]]:
        """(condition, the outcome that was proven) of what came out one way only. Raises Unproven without a guard.

        entered: whoever asks has a guard of its own, by which every loop that always had items has some. never: whether
        a test that was never true cannot be.
        """
        guards = []
        for test in self.tests:
            if len(test.seen) == 1:
                if entered and test.loop and True in test.seen:
                    continue
                if True not in test.seen and never(test):
                    continue
                if test.guard is None:
                    raise Unproven(f"no input took both sides of `{test.text}` (line {test.line})")
                guards.append((test.guard, next(iter(test.seen))))
        return list(dict.fromkeys(guards))


def _number(value: Any) -> float:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return number if isinstance(number, int | float) else math.nan


def trusted(value: Any) -> bool:
    """A function or class of PyTorch or of Python, whose meaning is known."""
    home = getattr(value, "__module__", None) or ""
    return home.split(".")[0] in _TRUSTED
