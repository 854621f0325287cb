"""Which kernels there are to compile: those that a family lists, every form of each on every dtype; and where calls of
models are to be served, all that these launch (`calls`)."""

from __future__ import annotations

import importlib
import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.ops.evidence import ModelSizes
from ferryman.ops.primitive import Primitive
from ferryman.porting.aot.calls import launched
from ferryman.porting.aot.targets import launch_targets

DTYPES = ("float32", "float16", "bfloat16")
ANY_DTYPE = "any"  # a SIMT unit's name says its dtypes
# What a form that is not listed, but launched by a call of a model, may spill: bytes a thread (registers on AMD). ptxas
# takes two registers beyond the launch bound for rms_norm of 14,592 to 15,104 columns in bfloat16 (480 threads).
_BESIDE = 16


class Shapes(NamedTuple):
    """Of the calls that a folder is to serve: lengths of rows, and of heads."""

    widths: tuple[int, ...] = ModelSizes.widths
    head_dims: tuple[int, ...] = ModelSizes.head_dims


@dataclass(frozen=True, order=True)
class Group:
    """The kernels of one family for one profile, backend and dtype: what one worker lists at once.

    ``dtypes``: of calls of models whose kernels belong to it, too, with these lengths of rows and heads; () for none.
    """

    profile: str
    backend: str
    family: str
    dtype: str
    dtypes: tuple[str, ...] = ()
    widths: tuple[int, ...] = ()
    head_dims: tuple[int, ...] = ()


@dataclass(frozen=True)
class Source:
    """One thing to compile: ``unit`` is what the backend takes (a `Specialisation`, a SIMT `Unit`)."""

    kernel: str
    unit: Any


def families_of(ops: Iterable[str] | None) -> tuple[str, ...]:
    """The families that the ops belong to (whose kernels they share); all of them for None. Raises UnknownName."""
    known = tuple(family.name for family in registry.families())
    if ops is None:
        return known
    wanted = {family_of(registry.primitive(op)) for op in ops}
    return tuple(family for family in known if family in wanted)


def groups_of(
    known: Profile,
    backends: Iterable[str],
    families: Iterable[str],
    dtypes: Sequence[str] = DTYPES,
    serving: Shapes | None = None,
) -> Iterator[Group]:
    """Every group of a profile that has a kernel file."""
    for backend in backends:
        for family in families:
            if not _modules(backend, family):
                continue
            for own in [(d,) for d in dtypes] if backend == "triton" else [tuple(dtypes)]:
                dtype = own[0] if backend == "triton" else ANY_DTYPE
                calls = () if serving is None else (own, serving.widths, serving.head_dims)
                yield Group(known.name, backend, family, dtype, *calls)


def sources_of(group: Group, known: Profile) -> list[Source]:
    """What there is to compile in a group, each thing once. Imports the family's kernels, and with them Triton."""
    modules = [importlib.import_module(where) for where in _modules(group.backend, group.family)]
    sources: dict[str, Source] = {}
    allowed: Counter[str] = Counter()  # spills, by kernel: other forms of it may have as many
    for target, module in itertools.product(launch_targets(known), modules):
        triton = group.backend == "triton"
        for unit in module.specialisations(target, group.dtype) if triton else module.units(target):
            sources.setdefault(_key(group, unit), Source(unit.name, unit))
            kernel = _kernel(group, unit)
            allowed[kernel] = max(allowed[kernel], unit.spills_allowed)
    ops = [op for op in registry.primitives().values() if family_of(op) == group.family]
    for target, dtype in itertools.product(launch_targets(known), group.dtypes):
        sizes = {"widths": group.widths, "head_dims": group.head_dims}
        served = launched(ops, group.backend, known, target, getattr(torch, dtype), sizes)
        for key, unit in served.items():
            if key not in sources:
                spills = max(allowed[_kernel(group, unit)], _BESIDE)
                sources[key] = Source(unit.name, _allowing(group, unit, spills))
    return list(sources.values())


def _key(group: Group, unit: Any) -> str:
    return repr(_allowing(group, unit, 0)) if group.backend == "triton" else str(unit.name)


def _allowing(group: Group, unit: Any, spills: int) -> Any:
    return replace(unit, spills_allowed=spills) if group.backend == "triton" else unit._replace(spills_allowed=spills)


def _kernel(group: Group, unit: Any) -> str:
    """A SIMT unit's name has all its template arguments; the family's units are allowed alike."""
    return str(unit.name) if group.backend == "triton" else group.family


def family_of(op: Primitive) -> str:
    return registry.family_of(op).name


def _modules(backend: str, family: str) -> list[str]:
    """The family's kernel files for a backend, as its menu names them."""
    ops = [op.name for op in registry.primitives().values() if family_of(op) == family]
    lines = (line for op in ops for line in registry.implementations(op))
    named = [x.where.partition(":")[0] for x in lines if x.backend == backend]
    return list(dict.fromkeys(named))
