"""Errors against the oracle in units of a derived bound (docs/parity.md), and the statistics on them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ferryman.errors import EvidenceError
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.fills import SUBNORMAL

UNIT: Mapping[torch.dtype, float] = {
    torch.float32: 2.0**-24,
    torch.float16: 2.0**-11,
    torch.bfloat16: 2.0**-8,
    torch.float64: 2.0**-53,
    torch.float8_e4m3fn: 2.0**-4,
    torch.float8_e4m3fnuz: 2.0**-4,
    torch.float8_e5m2: 2.0**-3,
    torch.float8_e5m2fnuz: 2.0**-3,
    torch.int32: 0.0,
    torch.int64: 0.0,
}
# what a result is off by where it is 0; an integer that is wrong is off by one
_LEAST: Mapping[torch.dtype, float] = {**SUBNORMAL, torch.int32: 0.25, torch.int64: 0.25}
_ACCUMULATOR = 2.0**-24  # float32
_TF32 = 2.0**-11  # 10 stored bits, rounded to nearest
SIGMAS = 6.0  # the bounds' "accumulate" terms stand six standard deviations out (docs/parity.md)
_NOISE = 1.25  # G3: how much noisier than the low-precision reference
ENOUGH = 256  # elements that a confidence interval of a root mean square needs
_BLOCKS = 64
_RESAMPLES = 1000
_QUANTILE = 0.001
_CLUSTERS = 32  # rows, or columns, that an estimate of their scatter needs: 6 of 31 degrees of freedom is 1 in 10^6
Z_LIMIT = 6.0  # G4: standard errors that a bias may stand out
EDGES = tuple(2.0**e for e in range(-10, 5))  # errors in bounds between which a cell's distribution counts


@dataclass(frozen=True)
class Declared:
    """What an implementation declares, as the bounds read it."""

    accumulation: str = "fp32"
    roundings: frozenset[str] = frozenset()
    tf32: bool = False

    def terms(self, storage: torch.dtype, saved_exact: bool) -> dict[str, float]:
        """Term name -> its factor. ``saved_exact``: the oracle reads the saved tensors as stored, so "storage" (their
        rounding) is no error of the implementation's."""
        u, smallest = UNIT[storage], SUBNORMAL[storage]
        factors = {"accumulate": _ACCUMULATOR, "absolute": 1.0}
        if not saved_exact:
            factors |= {"storage": u, "storage_flush": smallest}
        for name in self.roundings:
            factors |= {name: u, f"{name}_flush": smallest}
        if self.accumulation == "split-k":
            factors["split-k"] = u
        if self.tf32 or self.accumulation in ("tf32-rne", "tf32-rz", "tf32"):
            factors["tf32"] = _TF32
        if self.accumulation == "tf32-rz":
            factors["tf32-rz"] = _TF32
        return factors


@dataclass(frozen=True)
class Bound:
    """Per element: the largest error allowed, and the variance that G3 allows beside the reference's own.

    ``ambiguous``: elements where float64 gives NaN by one formula and +Inf by another, so that either is right.
    ``systematic``: how far the errors of a right implementation may be off on average (G4).
    """

    total: Tensor
    variance: Tensor
    ambiguous: Tensor | None = None
    systematic: Tensor | None = None


def terms_of(op: Primitive, args: Sequence[Any], results: Sequence[Tensor]) -> tuple[Mapping[str, Any], ...]:
    """The error terms of each result, by an op's bound. Raises EvidenceError where they do not fit the results."""
    given = op.limits.bound(args, results)
    if not isinstance(given, tuple | list) or not all(isinstance(terms, Mapping) for terms in given):
        kinds = [type(terms).__name__ for terms in (given if isinstance(given, tuple | list) else (given,))]
        required = f"a tuple of a dict for each of {', '.join(op.outputs)}"
        raise EvidenceError(f"{op.name}: its bound returned {', '.join(kinds)}; required: {required}")
    if len(given) != len(results):
        required = f"{len(results)}: {', '.join(op.outputs)}"
        raise EvidenceError(f"{op.name}: its bound returned terms of {len(given)} results; required: {required}")
    for output, terms, exact in zip(op.outputs, given, results, strict=True):
        for name, term in terms.items():
            if isinstance(term, Tensor) and not _fits(term.shape, exact.shape):
                shapes = f"is {tuple(term.shape)}; required: {tuple(exact.shape)}"
                raise EvidenceError(f"{op.name}: its bound's {name!r} of {output} {shapes}")
    return tuple(given)


def _fits(shape: Sequence[int], into: Sequence[int]) -> bool:
    """Whether a shape broadcasts to another."""
    missing = len(into) - len(shape)
    return missing >= 0 and all(n in (1, m) for n, m in zip(shape, into[missing:], strict=True))


def bounds(
    terms: Iterable[Mapping[str, Tensor]],
    oracle: Iterable[Tensor],
    out_dtypes: Iterable[torch.dtype],
    declared: Declared,
    storage: torch.dtype,
    *,
    saved_exact: bool,
    shown: bool,
    statistics: bool = True,
) -> tuple[Bound, ...]:
    """``shown``: the low-precision reference itself applies the declared roundings, so they add no variance.
    ``statistics``: with what G3 and G4 ask for, the variance and the systematic part; else they are 0."""
    factors = declared.terms(storage, saved_exact)
    limits = []
    for given, exact, dtype in zip(terms, oracle, out_dtypes, strict=True):
        total = UNIT[dtype] * exact.abs() + _LEAST[dtype]
        variance = systematic = torch.zeros_like(exact)
        if statistics and "bias" in given:
            systematic = systematic + given["bias"] * factors["accumulate"]
        for name, term in given.items():
            if name not in factors:
                continue
            part = term * factors[name]
            total = total + part
            if not statistics:
                continue
            if (
                name in ("absolute", "tf32-rz")
                or name.endswith("_flush")
                or (name == "accumulate" and "bias" not in given)
            ):
                systematic = systematic + part
            elif name == "tf32":
                systematic = systematic + part / SIGMAS
            if name == "accumulate":
                variance = variance + (part / SIGMAS).square()
            elif name in declared.roundings and not shown:
                variance = variance + part.square() / 3  # a rounding error is uniform in [-part, part]
            elif name in ("split-k", "tf32", "tf32-rz"):
                variance = variance + part.square()
            elif name == "absolute":
                variance = variance + part.square() / 3
        limits.append(Bound(total, variance, given.get("ambiguous"), systematic))
    return tuple(limits)


@dataclass(frozen=True)
class Worst:
    """The element that is furthest out, in units of its bound."""

    output: str
    index: tuple[int, ...]
    value: float
    expected: float
    bound: float
    ratio: float


def _at(flat: int, shape: Iterable[int]) -> tuple[int, ...]:
    index: list[int] = []
    for n in reversed(tuple(shape)):
        index.insert(0, flat % n)
        flat //= n
    return tuple(index)


def largest(dtype: torch.dtype) -> float:
    """The magnitude from which rounding to nearest gives Inf: the maximum and half a unit in its last place."""
    if not dtype.is_floating_point:
        return math.inf
    top = torch.finfo(dtype).max
    return top * (1 + UNIT[dtype] / (2 - 2 * UNIT[dtype]))


def masks(output: str, got: Tensor, exact: Tensor, allowed: Bound) -> tuple[Tensor, Worst | None]:
    """(finite elements that G2 judges, the first element whose NaN or Inf differs from the oracle's after rounding).

    Where the oracle is within its bound of overflowing, both the largest values and Inf of its sign are right.
    """
    dtype, value, bound = got.dtype, got.double(), allowed.total
    expected = exact.to(dtype).double()
    if bool((value.isfinite() & expected.isfinite()).all()):  # almost always: then all of it is judged
        return torch.ones_like(value, dtype=torch.bool), None
    edge = (exact.abs() - largest(dtype)).abs() <= bound
    unless_nan = torch.where(expected.isinf(), value == expected, value.isfinite())
    same = torch.where(expected.isnan(), value.isnan(), unless_nan)
    near = exact.isfinite() & bound.isfinite()  # an infinite bound or oracle leaves no margin around the threshold
    same = same | (near & edge & (value.sign() == exact.sign()) & ~value.isnan())
    # an Inf whose threshold lies within the bound, be it that the bound is so wide that the sign is open
    same = same | (near & value.isinf() & ((value.sign() * largest(dtype) - exact).abs() <= bound))
    if allowed.ambiguous is not None:
        same = same | (allowed.ambiguous & (value.isnan() | value.isposinf()))
    judged = value.isfinite() & exact.isfinite() & same
    if bool(same.all()):
        return judged, None
    first = int((~same).flatten().nonzero()[0])
    flat = (value.flatten()[first].item(), expected.flatten()[first].item(), bound.flatten()[first].item())
    return judged, Worst(output, _at(first, got.shape), *flat, math.inf)


def ratios(got: Tensor, exact: Tensor, bound: Tensor) -> Tensor:
    """Every error in units of its bound."""
    return (got.double() - exact).abs() / bound


def worst(
    output: str, got: Tensor, exact: Tensor, bound: Tensor, judged: Tensor, ratio: Tensor | None = None
) -> Worst | None:
    """The largest error in units of its bound; None where nothing is judged. NaN bounds count as unmet. ``ratio``: as
    `ratios` gives it."""
    if got.numel() == 0 or not bool(judged.any()):
        return None
    ratio = ratios(got, exact, bound) if ratio is None else ratio
    ratio = torch.where(judged, ratio.nan_to_num(nan=math.inf, posinf=math.inf), -1.0)
    flat = int(ratio.argmax())
    pick = [float(t.flatten()[flat].item()) for t in (got, exact, bound, ratio)]
    return Worst(output, _at(flat, got.shape), *pick)


def usable(bound: Tensor, judged: Tensor) -> bool:
    """Whether every judged element has a finite bound: an infinite one would accept anything."""
    return bool((bound.isfinite() | ~judged).all())


@lru_cache(maxsize=8)
def _resamples(blocks: int) -> Tensor:
    generator = torch.Generator().manual_seed(20_240_607)
    return torch.randint(blocks, (_RESAMPLES, blocks), generator=generator)


@dataclass(frozen=True)
class Noise:
    """G3 of one output: RMS of the normalised error over what is allowed; ``low`` the lower end of the excess of the
    mean square, or the excess itself where there is none."""

    ratio: float
    low: float
    elements: int


def noise(got: Tensor, reference: Tensor, exact: Tensor, bound: Bound, judged: Tensor) -> Noise | None:
    """RMS error against 1.25 x the low-precision reference's, with a bootstrap interval over blocks of elements.

    The reference sums in PyTorch's order; another honest order is allowed the variance of the accumulation term
    (a sixth of it is one standard deviation), and declared roundings that the reference does not show theirs.
    None: too few elements for an interval.
    """
    where = judged & reference.isfinite()
    count = int(where.sum())
    if count < ENOUGH:
        return None
    whole = count == where.numel()  # almost always: then no element is left out
    mine, low, right, scale, variance = (
        t.reshape(-1) if whole else t[where] for t in (got, reference, exact, bound.total, bound.variance)
    )
    mine = ((mine.double() - right) / scale).square()
    allowed = _NOISE**2 * ((low.double() - right) / scale).square()
    allowed = allowed + variance / scale.square()
    top, bottom = float(mine.mean()), float(allowed.mean())
    if top <= bottom:
        return Noise(math.sqrt(top / bottom) if bottom > 0 else 0.0, top - bottom, len(mine))
    blocks = min(_BLOCKS, len(mine) // 4)
    keep = len(mine) // blocks * blocks
    a, b = (t[:keep].reshape(blocks, -1).mean(1).cpu() for t in (mine, allowed))
    draws = _resamples(blocks)
    excess = (a[draws].mean(1) - b[draws].mean(1)).sort().values
    ratio = math.sqrt(top / bottom) if bottom > 0 else math.inf
    return Noise(ratio, float(excess[int(_RESAMPLES * _QUANTILE)]), len(mine))


@dataclass(frozen=True)
class Bias:
    """G4 of one output: by how many standard errors the mean signed error stands out beyond what is allowed."""

    z: float
    excess: float
    toward_zero: bool | None
    elements: int


def _standard_error(a: Tensor, where: Tensor) -> float:
    """Of the mean over ``where`` (elsewhere ``a`` is 0): the largest of those by elements, by rows and by columns.

    An intermediate that is rounded once for a whole row gives the row one error: its elements are then one sample.
    """
    n = int(where.sum())
    centred = torch.where(where, a - a.sum() / n, 0.0)
    squares = float(centred.square().sum())
    if a.dim() > 1:
        flat = centred.reshape(-1, a.shape[-1])
        for axis in (0, 1):
            if flat.shape[1 - axis] >= _CLUSTERS:
                squares = max(squares, float(flat.sum(axis).square().sum()))
    return math.sqrt(squares) / n


def bias(
    got: Tensor, reference: Tensor, exact: Tensor, bound: Bound, judged: Tensor, *, shared: bool = False
) -> Bias | None:
    """Two-sample z of the signed error in bounds, implementation against low-precision reference.

    Errors are taken as they are (a floor has one sign) and along the result (truncation shrinks it, as does a factor).
    ``shared``: an intermediate that is rounded, by declaration, enters many elements; then there must be rows and
    columns enough to see how far these agree. None: too few elements.
    """
    where = judged & reference.isfinite()
    n = int(where.sum())
    if n < ENOUGH:
        return None
    if shared and (exact.dim() < 2 or min(exact.shape[-1], exact.numel() // exact.shape[-1]) < _CLUSTERS):
        return None
    mine, other, allowances = (
        torch.where(where, t / bound.total, 0.0)
        for t in (got.double() - exact, reference.double() - exact, _systematic(bound, exact))
    )
    allowed, sign = float(allowances.sum()) / n, exact.sign()
    worst = Bias(0.0, 0.0, None, n)
    for along in (False, True):
        a, b = (mine * sign, other * sign) if along else (mine, other)
        if along:
            a, b = a.nan_to_num(nan=0.0), b.nan_to_num(nan=0.0)
        difference = float(a.sum() - b.sum()) / n
        beyond = abs(difference) - allowed
        error = math.hypot(_standard_error(a, where), _standard_error(b, where)) if beyond > 0 else 0.0
        z = 0.0 if beyond <= 0 else math.inf if error == 0 else beyond / error
        if z > worst.z:
            worst = Bias(z, difference, difference < 0 if along else None, n)
    return worst


def _systematic(bound: Bound, like: Tensor) -> Tensor:
    return torch.zeros_like(like) if bound.systematic is None else bound.systematic.expand_as(like)


@lru_cache(maxsize=8)
def _edges(device: torch.device) -> Tensor:
    return torch.tensor(EDGES, dtype=torch.float64, device=device)


def distribution(got: Tensor, exact: Tensor, bound: Tensor, judged: Tensor, ratio: Tensor | None = None) -> list[int]:
    """How many judged elements have which error in bounds: below the first of EDGES, between them, from the last on.
    ``ratio``: as `ratios` gives it."""
    ratio = ratios(got, exact, bound) if ratio is None else ratio
    ratio = (ratio.flatten() if bool(judged.all()) else ratio[judged]).nan_to_num(nan=math.inf)
    place = torch.bucketize(ratio, _edges(ratio.device), right=True)
    return place.bincount(minlength=len(EDGES) + 1).tolist()
