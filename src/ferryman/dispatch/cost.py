"""What a call would take, predicted from the op's own work and from numbers fitted to measured times.

    seconds = (fixed + max(bytes / (bandwidth * memory), flops / (peak * compute))) * beside

Bytes and flops are the op's declared least (`Cost`), bandwidth and peak the profile's. What an implementation adds,
``fixed`` seconds and the shares ``memory`` and ``compute`` that it reaches, was fitted to measured calls; ``beside`` is
what the fit missed at those, averaged so that the nearer ones count more: how a kernel fares with few heads, short
sequences or a ragged tile, which no formula of bytes and operations has. The numbers stand for each device, op, kind of
call and implementation in ``device_profiles/data/PROFILE.costs.json.gz``, which `benchmarks/fit_costs.py` fits; the
file says from what. A call of another kind, or whose sizes lie outside those that were measured, has no prediction.
"""

from __future__ import annotations

import json
import math
import operator
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from typing import Any

import torch

from ferryman import files
from ferryman.device_profiles import Profile
from ferryman.device_profiles import profile as named_profile
from ferryman.errors import ProfileError
from ferryman.ops.primitive import Primitive

FILE = ".costs.json.gz"  # behind the profile's name
VERSION = 2  # 2: kinds of calls, and what the fit missed at measured ones
ENOUGH = 4  # cells from which a fit orders anything: with fewer its error cannot be told
BEYOND = 1.0  # powers of two by which a size may leave the range that was measured
LENGTH = 8.0  # powers of two over which what a fit missed at one call says e times less of another
# Of two fits' errors together: what is predicted faster by more overtakes the preferred. Where one fit misses a call,
# so does the other mostly, to the same side.
AGREEMENT = 0.5
TRAVELLED = 0.05  # what a fit misses more on another device of its arch
LAUNCH_SECONDS = 2e-6  # of an empty kernel in a graph, for what has no fit; H200: 1.9 to 2.2
MOST_BESIDE = 2.0  # e to this: no fit is farther off
ONE, FEW = "one ", "few "  # so begin the kinds of calls of one row, and of fewer than TILE
TILE = 128  # rows of a tile of matrix units: below, many a library and launcher has another kernel
Sizes = Mapping[str, tuple[float, float]]


@dataclass(frozen=True)
class Work:
    """The least that a call must do. sizes: log2 of each tensor's (rows, last dimension), and "work": of both. kind:
    `kind_of`. place: `place_of`."""

    flops: float
    bytes: float
    dtype: torch.dtype
    sizes: Sizes
    kind: str = ""
    place: tuple[float, ...] = ()


@dataclass(frozen=True)
class Coefficients:
    """One implementation of one kind of call on one device.

    fixed: seconds. memory, compute: shares of the profile's peaks, in (0, 1]. error: relative, of predictions for cells
    that were left out of the fit. cells: how many were measured. sizes: the measured range, by tensor: log2 of rows and
    of the last dimension, lowest and highest (of "work": of flops and of bytes). places: where the measured cells lie;
    weights: what each adds to the logarithm of the time at its own place, 0 for one that this implementation lacks.
    """

    fixed: float
    memory: float
    compute: float
    error: float
    cells: int
    sizes: Mapping[str, tuple[float, float, float, float]]
    places: Sequence[tuple[float, ...]] = ()
    weights: Sequence[float] = ()

    def seconds(self, work: Work, profile: Profile) -> float | None:
        """None where the profile lacks a rate that the call's work needs."""
        times = parts(work, profile)
        return None if times is None else self.taken(times, nearnesses(work.place, self.places))

    def taken(self, times: tuple[float, float], near: Sequence[float]) -> float:
        """Seconds from `parts`, and from how near each of the places is."""
        beside = sum(map(operator.mul, self.weights, near))
        formula = self.fixed + max(times[0] / self.memory, times[1] / self.compute)
        return formula * math.exp(max(-MOST_BESIDE, min(MOST_BESIDE, beside)))

    def covers(self, work: Work) -> bool:
        """Whether a call lies within what was measured, or at most a factor of two beside it."""
        for name, (rows, width) in work.sizes.items():
            least_rows, most_rows, least_width, most_width = self.sizes.get(name, (-math.inf, math.inf) * 2)
            if not (least_rows - BEYOND <= rows <= most_rows + BEYOND):
                return False
            if not (least_width - BEYOND <= width <= most_width + BEYOND):
                return False
        return not self.places or len(self.places[0]) == len(work.place)


def nearness(place: Sequence[float], other: Sequence[float]) -> float:
    """1 for the same place, e times less for every LENGTH between them."""
    return math.exp(-math.dist(place, other) / LENGTH)


def nearnesses(place: Sequence[float], others: Sequence[Sequence[float]]) -> list[float]:
    """`nearness` of each of the others."""
    return [nearness(place, other) for other in others]


def size_of(shape: Sequence[int]) -> tuple[float, float]:
    """log2 of the rows and of the last dimension; an empty tensor counts as one element."""
    return math.log2(max(1, math.prod(shape[:-1]))), math.log2(max(1, shape[-1] if shape else 1))


def kind_of(op: Primitive, args: Sequence[Any]) -> str:
    """What decides on which kernel serves a call besides sizes: its flags, which scalars are zero or absent, whether
    there is a mask, and whether there is one row or query (products of a vector and decoding have kernels of their own
    in every library), or fewer than TILE."""
    said, rows = [], None
    for name, value in zip(op.names, args, strict=True):
        kind = op.types[name]
        if op.left_out(name, value):
            continue
        if isinstance(value, torch.Tensor):
            if value.dim() < 2:
                continue
            if rows is None:
                rows = value.shape[-2] if value.dim() > 3 else math.prod(value.shape[:-1])
            said.append(name)
        elif kind.startswith("float"):
            said.append(f"{name}={'0' if value == 0 else 'x'}")
        elif kind.startswith("int"):
            said.append(f"{name}={'none' if value is None else 'n'}")
        elif not kind.startswith("Tensor"):
            said.append(f"{name}={value}")
    few = "" if rows is None or rows >= TILE else ONE if rows == 1 else FEW
    return few + " ".join(said)


def general(kind: str) -> str:
    """A kind without what it says of the number of rows."""
    return kind.removeprefix(ONE).removeprefix(FEW)


def place_of(op: Primitive, args: Sequence[Any]) -> tuple[float, ...]:
    """log2 of the sizes of tensors of two dimensions or more: of every dimension, up to three as rows and the last."""
    sizes: list[float] = []
    for tensor in args:
        if isinstance(tensor, torch.Tensor) and tensor.dim() > 1:
            sizes += size_of(tensor.shape) if tensor.dim() < 4 else (math.log2(max(1, n)) for n in tensor.shape)
    return tuple(sizes)


def work_of(op: Primitive, args: Sequence[Any]) -> Work:
    """What a call must do at least. args: in schema order; tensors may be on "meta"."""
    cost = op.cost(*args)
    named = {n: a for n, a in zip(op.names, args, strict=True) if isinstance(a, torch.Tensor)}
    floating = [a for a in named.values() if a.is_floating_point()]
    dtype = max(floating, key=torch.Tensor.numel).dtype if floating else torch.float32
    sizes = {"work": (math.log2(max(1.0, cost.flops)), math.log2(max(1.0, cost.bytes)))}
    sizes |= {n: size_of(a.shape) for n, a in named.items()}
    return Work(float(cost.flops), float(cost.bytes), dtype, sizes, kind_of(op, args), place_of(op, args))


@lru_cache(maxsize=None)
def _key_of(dtype: torch.dtype) -> str:
    from ferryman.device_profiles.schema import dtype_key

    return dtype_key(dtype)


def parts(work: Work, profile: Profile) -> tuple[float, float] | None:
    """Seconds of moving the bytes and of the operations at the profile's peaks; None where it lacks one."""
    peak = profile.peaks.get(_key_of(work.dtype))
    if (profile.bandwidth is None and work.bytes) or (peak is None and work.flops):
        return None
    memory = work.bytes / profile.bandwidth if profile.bandwidth is not None else 0.0
    return memory, work.flops / peak.rate if peak is not None else 0.0


def scale(work: Work, profile: Profile) -> float:
    """Seconds that grow as any implementation's do, to carry a measured time to other sizes; else as the bytes."""
    times = parts(work, profile)
    return max(1.0, work.bytes) * 1e-10 if times is None else LAUNCH_SECONDS + max(times)


def knows(op: str, profile: Profile) -> bool:
    """Whether anything of an op was measured on a device."""
    return op in _known(profile.name)


def predictions(op: Primitive, work: Work, profile: Profile) -> dict[str, tuple[float, float]]:
    """Implementation -> (seconds, relative error), as far as measured times reach; bf16 and f16 are one. Of a fit
    to few cells the error is infinite: its times are told, and order nothing."""
    return predictions_of(_table(profile.name).get(f"{op.name} {work.dtype.itemsize * 8}", {}), work, profile)


def predictions_of(kinds: Kinds, work: Work, profile: Profile) -> dict[str, tuple[float, float]]:
    """`predictions` of one op's coefficients, by kind of call and implementation."""
    lines = kinds.get(work.kind) or kinds.get(general(work.kind)) or {}
    times = parts(work, profile) if lines else None
    estimates: dict[str, tuple[float, float]] = {}
    if times is None:
        return estimates
    near: dict[int, list[float]] = {}  # the lines of a kind were measured at the same places
    for name, known in lines.items():
        if not known.covers(work):
            continue
        if id(known.places) not in near:
            near[id(known.places)] = nearnesses(work.place, known.places)
        seconds = known.taken(times, near[id(known.places)])
        estimates[name] = (seconds, known.error if known.cells >= ENOUGH else math.inf)
    return estimates


def ranked(names: Sequence[str], predicted: Mapping[str, tuple[float, float]]) -> list[str]:
    """Names in order of preference, but what is predicted faster than AGREEMENT of both fits' errors together goes
    before.

    What has no prediction and comes first in its turn is not overtaken: nothing is known that speaks against it.
    """
    rest, order = list(names), []
    while rest:
        first = rest[0]
        ahead = first
        if first in predicted:
            seconds, error = predicted[first]
            faster = [
                n
                for n in rest
                if n in predicted
                and predicted[n][0] < seconds
                and predicted[n][0] * (1 + AGREEMENT * math.hypot(error, predicted[n][1])) < seconds
            ]
            ahead = min(faster, key=lambda n: predicted[n][0], default=first)
        rest.remove(ahead)
        order.append(ahead)
    return order


Kinds = Mapping[str, Mapping[str, Coefficients]]


def load(text: str, where: str, profile: str) -> dict[str, Kinds]:
    """Coefficients by "op bits", kind of call and implementation, from the file's text. Raises ProfileError: what is
    wrong, where."""
    try:
        raw = json.loads(text)
        header = raw.get("kind"), raw.get("version"), raw.get("profile")
        if header != ("ferryman-costs", VERSION, profile):
            raise ProfileError(f"{where} is {header}; required: ('ferryman-costs', {VERSION}, {profile!r})")
        return {
            op: {kind: _group(given, f"{where}: {op} {kind}") for kind, given in kinds.items()}
            for op, kinds in raw["ops"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ProfileError(f"{where} is damaged: {error!r}. Fit it again with benchmarks/fit_costs.py") from error


def _group(given: Mapping[str, Any], where: str) -> dict[str, Coefficients]:
    places = tuple(tuple(float(n) for n in place) for place in given["places"])
    if len({len(place) for place in places}) > 1 or not all(math.isfinite(n) for place in places for n in place):
        raise ProfileError(f"{where}: places are of different lengths, or not finite")
    return {name: _coefficients(line, places, f"{where} {name}") for name, line in given["implementations"].items()}


def _coefficients(given: Mapping[str, Any], places: Sequence[tuple[float, ...]], where: str) -> Coefficients:
    coefficients = Coefficients(
        given["fixed"],
        given["memory"],
        given["compute"],
        given["error"],
        given["cells"],
        {name: (low[0], high[0], low[1], high[1]) for name, (low, high) in given["sizes"].items()},
        places,
        tuple(given["weights"]),
    )
    limits = {"fixed": math.inf, "memory": 1.0, "compute": 1.0, "error": math.inf, "cells": math.inf}
    for name, most in limits.items():
        value = getattr(coefficients, name)
        if isinstance(value, bool) or not (0 < value <= most and value < math.inf):
            raise ProfileError(f"{where}: {name} is {value}; required: more than 0, finite, at most {most:g}")
    if len(coefficients.weights) != len(places) or not all(map(math.isfinite, coefficients.weights)):
        raise ProfileError(
            f"{where}: {len(coefficients.weights)} weights; required: {len(places)}, as there are places, finite"
        )
    for name, box in coefficients.sizes.items():
        if not all(map(math.isfinite, box)) or box[0] > box[1] or box[2] > box[3]:
            raise ProfileError(f"{where}: sizes of {name} are {box}; required: finite, the lowest first")
    return coefficients


@lru_cache(maxsize=None)
def _table(profile: str) -> Mapping[str, Kinds]:
    """A device's coefficients; of an op that was not measured there, those of a device of its arch.

    Coefficients are seconds of a launch and shares of a profile's own peaks, so that they travel with its bandwidth and
    rates; a travelled one's error is TRAVELLED larger.
    """
    table = dict(_own(profile))
    for sibling in _siblings(profile):
        for op, kinds in _own(sibling).items():
            if op not in table:
                table[op] = {kind: {n: _travelled(c) for n, c in lines.items()} for kind, lines in kinds.items()}
    return table


@lru_cache(maxsize=None)
def _known(profile: str) -> frozenset[str]:
    return frozenset(key.partition(" ")[0] for key in _table(profile))


def _siblings(profile: str) -> list[str]:
    """Measured devices of a profile's arch, itself apart."""
    arch = named_profile(profile).arch
    data = resources.files("ferryman.device_profiles") / "data"
    others = sorted(f.name.removesuffix(FILE) for f in data.iterdir() if f.name.endswith(FILE))
    return [name for name in others if name != profile and named_profile(name).arch == arch]


def _travelled(known: Coefficients) -> Coefficients:
    return replace(known, error=known.error + TRAVELLED)


@lru_cache(maxsize=None)
def _own(profile: str) -> Mapping[str, Kinds]:
    """What was fitted on a device; a damaged file is reported once and ignored, as preferences do without it."""
    file = resources.files("ferryman.device_profiles") / "data" / f"{profile}{FILE}"
    if not file.is_file():
        return {}
    try:
        return load(files.unpacked(file.read_bytes()).decode("utf-8"), str(file), profile)
    except (OSError, ValueError, ProfileError) as error:  # ValueError: gzip's, or UTF-8's
        warnings.warn(f"predicted costs ignored for {profile}: {error}", stacklevel=2)
        return {}


def forget() -> None:
    """Read the coefficients again at the next prediction."""
    _table.cache_clear()
    _known.cache_clear()
    _own.cache_clear()
