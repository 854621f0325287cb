"""Which rounding maps exact values to observed ones: every candidate is tried, and exactly one may fit.

Values are in units of the last place, relative to a base of 1.5 units of the leading place, whose last bit is even and
which stays in its binade. Quarter steps separate every rule; ties at one half and at one and a half tell the kinds of
nearest apart; both signs of the base tell "toward zero" from "down".
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

STEPS = tuple(i / 4 for i in range(-7, 8) if i)


def _away(value: float) -> float:
    return math.copysign(math.floor(abs(value) + 0.5), value)


# How a number is rounded to an integer, sign and all. The names are those of profiles (schema.ROUNDINGS).
RULES: dict[str, Callable[[float], float]] = {
    "nearest-even": lambda v: float(round(v)),
    "nearest-away": _away,
    "toward-zero": lambda v: float(math.trunc(v)),
    "down": lambda v: float(math.floor(v)),
    "up": lambda v: float(math.ceil(v)),
}
_BASE = 2**20  # even, and larger than any step: only its sign matters


def rounded_beside(rule: str, step: float, negative: bool) -> float:
    """What remains of ``step`` when it is added to the base, the sum rounded, and the base taken away again."""
    base = -_BASE if negative else _BASE
    return RULES[rule](base + step) - base


def aligned(step: float, extra: int, rule: str) -> float:
    """``step`` cut to ``extra`` bits below the last one of the sum, as terms are that are aligned and then added."""
    return RULES[rule](step * 2.0**extra) / 2.0**extra


def rules_of_sum(observed: Mapping[tuple[float, bool], float], cut: tuple[int, str] | None = None) -> list[str]:
    """Every rule that gives these remainders by (step, base negative) when the *sum* is rounded, after ``cut`` (extra
    bits, rule) was applied to the step. No extra bit leaves nothing to round: then every rule fits."""

    def left(rule: str, step: float, negative: bool) -> float:
        return rounded_beside(rule, step if cut is None else aligned(step, *cut), negative)

    return [r for r in RULES if all(left(r, s, n) == v for (s, n), v in observed.items())]


def rule_of_addend(observed: Mapping[float, float]) -> str | None:
    """The same where the *addend* itself is cut before it is added, whatever the base."""
    fitting = [r for r, rule in RULES.items() if all(rule(s) == v for s, v in observed.items())]
    return fitting[0] if len(fitting) == 1 else None
