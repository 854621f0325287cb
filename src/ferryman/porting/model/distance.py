"""How far two results are apart, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

# float64 has 53 bits. 2^-40 leaves 13 of them to sums of up to 8192 terms in any order, and is 2^-16 of half a unit in
# the last place of float32, the finest storage dtype: what differs by less cannot be told apart in any of them.
LIMIT = 2.0**-40
UNIT = 2.0**-52  # of float64: LIMIT is 2^12 of them


class Disagreement(Exception):
    """Two callables differ; the text says where, ``distance`` by how much."""

    def __init__(self, text: str, distance: float | None = None) -> None:
        super().__init__(text)
        self.distance = distance


def flat(value: Any) -> list[Tensor]:
    """The tensors of a result, in order; anything else than tensors, tuples, lists and None is refused."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, tuple | list):
        return [tensor for item in value for tensor in flat(item)]
    if value is None:
        return []
    raise Disagreement(f"a result is {type(value).__name__}; required: tensors")


def equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


def distance(
    what: str,
    actual: list[Tensor],
    wanted: list[Tensor],
    limit: float,
    reach: Callable[[], list[Tensor]] | None = None,
) -> float:
    """Largest difference relative to the largest element of its row; raises where it is over the limit.

    reach: how far roundings of one unit in the last place move each row. A gradient may be small because what it sums
    cancels, or lie on the slope of a product that cancelled: two orders of its terms differ by more units of it then.
    Such a row may differ by as many of these moves as another by units, 2^12 (Monte Carlo arithmetic: Parker, 1997).
    """
    moves: list[Tensor] | None = None
    if len(actual) != len(wanted):
        raise Disagreement(f"{len(wanted)} {what}s against the op's {len(actual)}")
    worst = 0.0
    for i, (f, w) in enumerate(zip(actual, wanted, strict=True)):
        if f.shape != w.shape:
            raise Disagreement(f"{what} {i} has shape {tuple(w.shape)}, the op's {tuple(f.shape)}")
        if w.numel() == 0:
            continue
        if f.dtype != w.dtype and w.is_floating_point():
            raise Disagreement(f"{what} {i} is {w.dtype}, the op's {f.dtype}")
        if f.dtype == w.dtype and torch.equal(f, w):
            continue
        finite = torch.isfinite(w)
        all_finite = bool(finite.all())
        alike = torch.equal(finite, torch.isfinite(f)) and (all_finite or equal(f[~finite], w[~finite]))
        if not alike:
            raise Disagreement(f"{what} {i} is not finite in other places than the op's")
        if not all_finite:
            f, w = f.masked_fill(~finite, 0.0), w.masked_fill(~finite, 0.0)
        row = (w.abs().amax(-1, keepdim=True) if w.dim() else w.abs()).clamp_min(1e-290)
        error = float(((f - w).abs() / row).max())
        if error > limit and reach is not None:
            moves = reach() if moves is None else moves
            error = float(((f - w).abs() / torch.maximum(row, moves[i] / UNIT)).max())
        worst = max(worst, error)
        if not error <= limit:
            raise Disagreement(f"{what} {i} differs by {error:.3g} in float64 (limit {limit:.3g})", error)
    return worst
