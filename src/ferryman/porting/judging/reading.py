"""What the pattern of a kernel's errors looks like, in one line: a hint for whoever mends it, never a verdict."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor

_MOST = 2**22  # elements that are looked at
_PURE = 0.98  # of the elements must follow a pattern for it to be named


@dataclass(frozen=True)
class Evidence:
    """One output. ``wrong``: elements that a gate does not accept. ``unit``: the storage dtype's unit roundoff.
    ``sigma``: one standard deviation of the accumulation's error, were its unit roundoff 1."""

    got: Tensor
    exact: Tensor
    bound: Tensor
    wrong: Tensor
    unit: float
    sigma: Tensor | None = None


def read(e: Evidence) -> str | None:
    """The pattern, or None where none is recognised."""
    if e.got.numel() == 0 or e.got.numel() > _MOST or e.got.dim() == 0:
        return None
    got, exact = e.got.double(), e.exact.double()
    truncated = _signs(got, exact, e.unit) if int(e.wrong.sum()) != 1 else None
    if truncated is not None or not bool(e.wrong.any()):
        return truncated or _factor(got, exact, e.bound, e.wrong, e.unit)
    special = _special(got, exact, e.wrong)
    if special is not None:
        return special
    moved = _swapped(got, exact, e.bound, e.wrong)
    if moved is not None:
        return moved
    place = _place(got, e.wrong)
    factor = _factor(got, exact, e.bound, e.wrong, e.unit)
    if place is not None:
        return place if factor in (None, "it is 0") else f"{place}: {factor}"
    if factor == "it is 0":
        return "what is wrong is 0"
    return factor or _rows_off(got, exact, e.bound, e.unit) or _noisy(got, exact, e)


def _special(got: Tensor, exact: Tensor, wrong: Tensor) -> str | None:
    lost = exact.isnan() & wrong
    if bool(lost.any()) and bool((got[lost] == 0).all()):
        return "NaN became 0"
    nans = got.isnan() & ~exact.isnan()
    if bool(nans.all()):
        return "every element is NaN"
    if bool(nans.any()) and bool((nans == wrong).all()) and _place(got, wrong) is None:
        return f"NaN in {int(nans.sum())} elements where the result is a number: read out of bounds, or not written"
    if bool((got == 0).all()) and bool((exact != 0).any()):
        return "every element is 0"
    return None


def _near(a: Tensor, b: Tensor, bound: Tensor) -> Tensor:
    return ((a - b).abs() <= bound) | (a == b) | (a.isnan() & b.isnan())


def _swapped(got: Tensor, exact: Tensor, bound: Tensor, wrong: Tensor) -> str | None:
    for axis in range(got.dim()):
        if got.shape[axis] < 2:
            continue
        name, names = _axis(axis, got.dim())
        bad = _indices(wrong, axis)
        if not 2 <= len(bad) <= 4096:
            continue
        pick = torch.tensor(bad, device=got.device)
        mine, room = got.index_select(axis, pick), bound.expand_as(exact)

        def holds(
            order: Tensor, axis: int = axis, pick: Tensor = pick, mine: Tensor = mine, room: Tensor = room
        ) -> bool:
            """Whether what is wrong is right at other indices."""
            there = torch.maximum(room.index_select(axis, pick), room.index_select(axis, order))
            return bool(_near(mine, exact.index_select(axis, order), there).all())

        for shift in (1, -1):
            order = torch.tensor([b ^ 1 if shift == 1 else ((b + 1) ^ 1) - 1 for b in bad], device=got.device)
            if int(order.min()) < 0 or int(order.max()) >= got.shape[axis]:
                continue
            if holds(order):
                more = f", and {len(bad) // 2 - 1} more pairs" if len(bad) > 2 else ""
                return f"{names} {bad[0]} and {int(order[0])} are swapped{more}"
        turned = torch.tensor([bad[0] + bad[-1] - b for b in bad], device=got.device)
        if int(turned.min()) >= 0 and holds(turned):
            return f"{names} {bad[0]} to {bad[-1]} are in reverse order"
        for step in (1, -1):
            order = (pick + step) % got.shape[axis]
            if len(bad) > 2 and holds(order):
                return f"{names} {bad[0]} to {bad[-1]} hold the {'next' if step == 1 else 'previous'} {name}'s values"
    return None


def _axis(axis: int, dims: int) -> tuple[str, str]:
    """What an index along an axis is called, and many of them."""
    if dims == 1:
        return "element", "elements"
    if axis >= dims - 2:
        return ("column", "columns") if axis == dims - 1 else ("row", "rows")
    return f"slice of dimension {axis}", f"slices of dimension {axis}"


def _indices(wrong: Tensor, axis: int) -> list[int]:
    others = [a for a in range(wrong.dim()) if a != axis]
    hit = wrong.any(dim=others) if others else wrong
    indices: list[int] = hit.nonzero().flatten().tolist()
    return indices


def _place(got: Tensor, wrong: Tensor) -> str | None:
    """Where the wrong elements lie, if that is a strict subset with a form."""
    count = int(wrong.sum())
    if count == 1 and got.numel() > 2:
        return "one element alone is wrong"
    parts, size = [], 1
    for axis in range(got.dim()):
        bad, n = _indices(wrong, axis), got.shape[axis]
        size *= len(bad)
        if len(bad) == n:
            continue
        text = _form(bad, n, *_axis(axis, got.dim()))
        if text is None:
            return None
        parts.append(text)
    if not parts or count < 0.5 * size:
        return None
    there = got[wrong]
    state = "0" if bool((there == 0).all()) else "NaN" if bool(there.isnan().all()) else "wrong"
    text = " of ".join(reversed(parts))
    if parts == ["the last column"]:
        return f"the last column of every row is {'stale or wrong' if state == 'wrong' else state}"
    if state != "wrong":
        return f"{state} in {text}"
    if text.startswith("the columns from ") and len(parts) == 1 and _tile(_indices(wrong, got.dim() - 1)[0]):
        return f"only {text} are wrong: the first tile is right"
    return f"wrong in {text} only"


def _tile(n: int) -> bool:
    return n >= 16 and n & (n - 1) == 0


def _form(bad: list[int], n: int, name: str, names: str) -> str | None:
    """A set of indices below ``n`` in words."""
    if bad == [n - 1]:
        return f"the last {name}"
    if len(bad) == 1:
        kind, _, rest = name.partition(" ")
        return f"{kind} {bad[0]} {rest}".rstrip()
    run = bad[-1] - bad[0] + 1 == len(bad)
    if run and bad[-1] == n - 1:
        return f"the {names} from {bad[0]} on"
    if run and bad[0] == 0:
        return f"the first {len(bad)} {names}"
    if run:
        return f"the {names} {bad[0]} to {bad[-1]}"
    steps = {b - a for a, b in itertools.pairwise(bad)}
    if len(steps) == 1 and len(bad) > 2:
        step = steps.pop()
        suffix = {1: "st", 2: "nd", 3: "rd"}.get(step % 10 if step % 100 not in (11, 12, 13) else 0, "th")
        return f"every {step}{suffix} {name} (from {bad[0]})"
    return None


def _factor(got: Tensor, exact: Tensor, bound: Tensor, wrong: Tensor, unit: float) -> str | None:
    """One factor, or one offset, on everything (or on what is wrong)."""
    where = wrong & got.isfinite() & exact.isfinite()
    share = float(where.sum()) / got.numel()
    small = bool(((got - exact)[where].abs() <= 4 * bound.expand_as(exact)[where]).all())
    everything = share > 0.5 or small  # of a small factor only the least lucky elements leave their bounds
    if everything:
        where = got.isfinite() & exact.isfinite()
    a, b, room = got[where], exact[where], bound.expand_as(exact)[where]
    if len(a) < 8 or float(b.abs().max()) == 0:
        return None
    if bool((a == 0).all()):
        return None if everything else "it is 0"
    c = float((a / room) @ (b / room) / ((b / room) @ (b / room)))
    spread = float(((a / room) - (a / room).mean()).square().sum() ** 0.5 / ((b / room) @ (b / room)) ** 0.5)
    what = "everything" if everything else "what is wrong"
    moved = ((c - 1) * b).abs() / room
    enough = float(moved.mean()) > 0.02 and abs(c - 1) > 6 * (1 + spread) * _scatter(a - c * b, room, b)
    if enough and float(((a - c * b).abs() <= (1 + abs(c)) * room).double().mean()) >= _PURE:
        if abs(c + 1) < 1e-3:
            return f"the sign of {what} is flipped"
        return f"constant factor {c:.5g} of {what}"
    shift = float((a - b).mean())
    if float((shift / room).abs().mean()) > 1 and bool(((a - b - shift).abs() <= room + 2 * unit * a.abs()).all()):
        return f"{shift:.4g} is added to {what}"
    return None


def _scatter(rest: Tensor, room: Tensor, b: Tensor) -> float:
    """The standard error of the factor."""
    weight = b / room
    return float((rest / room).std() / weight.norm())


def _signs(got: Tensor, exact: Tensor, unit: float) -> str | None:
    """Rounding errors of one sign: truncation's are up to a whole unit in the last place, and never outwards."""
    where = got.isfinite() & exact.isfinite() & (exact != 0)
    error = (got - exact)[where] / (unit * exact[where].abs())
    if len(error) < 64:
        return None
    along = error * exact[where].sign()
    slack = 2.0**-10
    inward, largest = float((along <= slack).double().mean()), float(along.abs().quantile(0.9))
    if 0.5 < largest <= 2.1:
        if inward >= 0.999 and float(along.mean()) < -0.3:
            return "errors have one sign, toward zero: truncated instead of rounded"
        if float((error <= slack).double().mean()) >= 0.999 and float(error.mean()) < -0.3:
            return "errors have one sign, downward: rounded down instead of to nearest"
        if float((along >= -slack).double().mean()) >= 0.999 and float(along.mean()) > 0.3:
            return "errors have one sign, away from zero"
    return None


def _rows_off(got: Tensor, exact: Tensor, bound: Tensor, unit: float) -> str | None:
    """Every row by its own factor or offset: what is computed once a row is wrong."""
    if got.dim() < 2 or got.shape[-1] < 8 or not bool((got.isfinite() & exact.isfinite()).all()):
        return None
    a, b = got.reshape(-1, got.shape[-1]), exact.reshape(-1, exact.shape[-1])
    room = bound.expand_as(exact).reshape(b.shape)
    power = b.square().sum(-1, keepdim=True)
    c = torch.where(power > 0, (a * b).sum(-1, keepdim=True) / power, 1.0)
    if float(((a - c * b).abs() <= (1 + c.abs()) * room).double().mean()) >= _PURE and float((c - 1).abs().max()) > 0:
        return "each row has a factor of its own: what is computed once a row (sum, mean, maximum) is wrong"
    shift = (a - b).mean(-1, keepdim=True)
    if float(((a - b - shift).abs() <= room + 2 * unit * a.abs()).double().mean()) >= _PURE:
        return "each row has an offset of its own: its mean, or its maximum, is wrong"
    return None


def _noisy(got: Tensor, exact: Tensor, e: Evidence) -> str | None:
    """Errors everywhere, without a sign, of the size that sums in 16 bits have."""
    if e.sigma is None or float(e.wrong.double().mean()) < 0.02:
        return None
    where = got.isfinite() & exact.isfinite() & (e.sigma.expand_as(exact) > 0)
    if int(where.sum()) < 64:
        return None
    error = (got - exact)[where] / e.sigma.expand_as(exact)[where]
    size = float(error.square().mean().sqrt())
    if abs(float(error.mean())) < 0.3 * size:
        for name, unit in (("float16", 2.0**-11), ("bfloat16", 2.0**-8)):
            if 0.05 * unit <= size <= 0.9 * unit:
                return f"errors without a sign, as of sums kept in {name}: they grow with the number of terms"
    return None
