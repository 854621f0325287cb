"""Which kernels there are to compile: every Triton configuration that dispatch could choose, and every SIMT unit."""

from __future__ import annotations

import importlib
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.porting.aot.targets import launch_targets

DTYPES = ("float32", "float16", "bfloat16")
ANY_DTYPE = "any"  # a SIMT unit's name says its dtypes


@dataclass(frozen=True, order=True)
class Group:
    """The kernels of one family for one profile, backend and dtype: what one worker lists at once."""

    profile: str
    backend: str
    family: str
    dtype: str


@dataclass(frozen=True)
class Source:
    """One thing to compile: ``unit`` is what the backend takes (a `Specialisation`, a SIMT `Unit`)."""

    kernel: str
    unit: Any


def families_of(ops: Iterable[str] | None) -> tuple[str, ...]:
    """The families that the ops belong to (whose kernels they share); all of them for None. Raises UnknownName."""
    if ops is None:
        return registry.FAMILIES
    wanted = {registry.primitive(op).body.__module__.split(".")[-2] for op in ops}
    return tuple(family for family in registry.FAMILIES if family in wanted)


def groups_of(known: Profile, backends: Iterable[str], families: Iterable[str]) -> Iterator[Group]:
    """Every group of a profile that has a kernel file."""
    for backend in backends:
        for family in families:
            if not _modules(backend, family):
                continue
            for dtype in DTYPES if backend == "triton" else (ANY_DTYPE,):
                yield Group(known.name, backend, family, dtype)


def sources_of(group: Group, known: Profile) -> list[Source]:
    """What there is to compile in a group, each thing once. Imports the family's kernels, and with them Triton."""
    modules = [importlib.import_module(where) for where in _modules(group.backend, group.family)]
    found: dict[str, Source] = {}
    for target, module in itertools.product(launch_targets(known), modules):
        if group.backend == "triton":
            for one in module.specialisations(target, group.dtype):
                found.setdefault(repr(one), Source(one.name, one))
        else:
            for unit in module.units(target):
                found.setdefault(unit.name, Source(unit.name, unit))
    return list(found.values())


def _modules(backend: str, family: str) -> list[str]:
    """The family's kernel files for a backend, as its menu names them."""
    start = f"ferryman.ops.{family}."
    lines = (line for op in registry.primitives() for line in registry.implementations(op))
    named = [x.where.partition(":")[0] for x in lines if x.backend == backend and x.where.startswith(start)]
    return list(dict.fromkeys(named))
