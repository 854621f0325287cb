"""Calls that models make, for a folder of artefacts to serve: every op on the bench's shapes, and beside them rows of
many lengths, tokens, heads and vocabularies.

What they launch is found by the launchers themselves, on tensors without data, for every implementation that serves the
call: which one dispatch would choose may change with a lockfile.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

import torch

from ferryman.backends import redirect
from ferryman.backends.base import Target
from ferryman.backends.simt.rows import SPREADS
from ferryman.device_profiles import Profile
from ferryman.dispatch import registry, select
from ferryman.ops.evidence import ModelSizes
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import grid

_MANY = 2**26  # elements: rows enough that no launcher takes them for few


def launched(
    ops: Iterable[Primitive],
    backend: str,
    known: Profile,
    target: Target,
    dtype: torch.dtype,
    sizes: Mapping[str, Any],
) -> dict[str, Any]:
    """What the calls launch with a backend on a device: Triton's specialisations by their text, SIMT units by name.

    sizes: fields of `ModelSizes` that take others than the usual ones.
    """
    ops = tuple(ops)
    lines = {op.name: [x for x in registry.implementations(op.name) if x.backend == backend] for op in ops}
    launchers = {line: registry.launcher(line) for own in lines.values() for line in own}
    collector = Collector(target)
    before = redirect.to(cast(redirect.Route, collector))  # of a route, only the launches are met
    try:
        for op in ops:
            for case in calls_of(op, target, sizes):
                args = grid.on_meta(op, case, dtype)
                view = select.View.of(op, args, known)
                for line in lines[op.name]:
                    if not select.refusals(line, view, known, absent=True):
                        launchers[line](*args, target)
    finally:
        redirect.back(before)
    return collector.units


class Collector:
    """A route that keeps what is launched."""

    profile = None
    on_device = True

    def __init__(self, target: Target) -> None:
        self.target = target
        self.units: dict[str, Any] = {}

    def launch(self, unit: Any, *_: Any) -> None:
        self.units[unit.name] = unit

    def launch_triton(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
        from ferryman.backends.triton import specialise

        one = specialise(kernel, args, meta)
        self.units[repr(one)] = one


def calls_of(op: Primitive, target: Target, sizes: Mapping[str, Any]) -> Iterator[Case]:
    """The calls of an op that models make: the bench's, and those that its evidence adds."""
    yield from grid.cases(op, "full", torch.device("cuda"))
    calls = registry.evidence(op).calls
    if calls is not None:
        models = ModelSizes(**{"rows": functools.partial(_rows, target), **sizes})
        for args in calls(models):
            yield Case("of a model", args)


def _rows(target: Target, width: int) -> Sequence[int]:
    """One for each way in which launchers tell few rows from many."""
    units = max(1, target.units)
    return sorted({1, *(max(1, units * 1024 // spread) for spread in SPREADS), max(8192, _MANY // width)})
