"""A case made ready once for all implementations: arguments, oracle, error terms, low-precision reference."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import EvidenceError
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.inputs.cases import Arguments, arguments, as_tuple, double, forward_of, independent, specs_of
from ferryman.porting.judging import metrics
from ferryman.porting.judging.metrics import Bound, Declared

SEED = 0
_ON_HOST = 2**20  # elements of a case's tensors


@dataclass
class Prepared:
    """``args`` lie on the device under test; ``exact`` are the same bits where the oracle is evaluated and results are
    judged: on the host for small cases, whose many small steps cost an accelerator 45 ms a cell and a CPU 2.
    """

    primitive: Primitive
    case: Case
    dtype: torch.dtype
    device: torch.device
    args: Arguments
    exact: Arguments
    oracle: tuple[Tensor, ...]
    terms: tuple[Any, ...]
    declared: tuple[Tensor, ...]
    backward: bool
    independent: bool
    seed: int = SEED
    kept: dict[Any, Any] = field(default_factory=dict)  # what a gate worked out for every implementation alike
    _bounds: dict[Declared, tuple[Bound, ...]] = field(default_factory=dict)
    _references: dict[frozenset[str], tuple[Tensor, ...]] = field(default_factory=dict)

    @property
    def small(self) -> bool:
        return sum(v.numel() for v in self.exact.values if isinstance(v, Tensor)) <= _ON_HOST

    def reference(self, roundings: frozenset[str]) -> tuple[Tensor, ...]:
        """The definition in the storage dtype, with the declared roundings where the op can apply them."""
        if self.primitive.limits.rounded is None:
            roundings = frozenset()
        if roundings not in self._references:
            rounded = self.primitive.limits.rounded
            body = self.primitive.body if rounded is None else rounded(roundings)
            with torch.no_grad():
                self._references[roundings] = as_tuple(body(*self.exact.values))
        return self._references[roundings]

    def bounds(self, declared: Declared) -> tuple[Bound, ...]:
        """What each element of each output may be off by. It is kept where it needs little memory."""
        if declared in self._bounds:
            return self._bounds[declared]
        limits = metrics.bounds(
            self.terms,
            self.oracle,
            [t.dtype for t in self.declared],
            declared,
            self.dtype,
            saved_exact=self.backward,
            shown=self.primitive.limits.rounded is not None,
        )
        if self.small:
            self._bounds[declared] = limits
        return limits

    def reduction(self) -> int | None:
        """How many terms are summed for one element of the result."""
        known = self.primitive.limits.reduction
        return None if known is None else int(known(*self.exact.values))


def prepare(
    primitive: Primitive,
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = SEED,
    given: Callable[[torch.device], Arguments] | None = None,
) -> Prepared:
    """Materialise a case and evaluate the oracle on it, in float64.

    ``given`` makes the arguments on the device that it is told, instead of `arguments` (a capsule's inputs).
    """
    small = sum(math.prod(s.shape) for s in specs_of(case)) <= _ON_HOST
    home = torch.device("cpu") if small else device
    exact = arguments(case, primitive, dtype, seed, home) if given is None else given(home)
    args = exact.to(device) if small and device.type != "cpu" else exact
    with torch.no_grad():
        wide = double(exact.values)
        oracle = as_tuple(primitive.body(*wide))
        terms = metrics.terms_of(primitive, wide, oracle)
        declared = as_tuple(primitive.meta(*args.values))
    backward = forward_of(primitive) is not None
    return Prepared(
        primitive,
        case,
        dtype,
        device,
        args,
        exact,
        oracle,
        terms,
        declared,
        backward,
        independent=independent(case) and not case.exact,
        seed=seed,
    )


def unprepared(error: Exception) -> str:
    """Why a case could not be made ready, as its cells say it."""
    if isinstance(error, EvidenceError):
        return str(error)[:500]
    return f"the definition or its bound raised {type(error).__name__}: {str(error)[:300]}"
