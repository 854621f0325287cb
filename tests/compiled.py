"""Kernels compiled for devices that are not here, once for all: C++ is kept by content, in the folder of `ferryman
compile`, and what a row of ferryman.yaml compiles each day no test compiles again."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import filelock
import pytest

from ferryman.backends import simt_offline
from ferryman.backends.base import Artefact
from ferryman.backends.simt import Unit, defines_for, vendor_of
from ferryman.device_profiles import Profile, profile
from ferryman.porting import aot
from ferryman.porting.aot import cache, groups
from ferryman.porting.ci import matrix

ROOT = Path(__file__).resolve().parents[1]


def rows(backend: str) -> dict[str, Profile]:
    """{arch: the device} of the rows that compile every kernel of a backend. Red there: a kernel that does not compile,
    spills more than its author allows, or has not the room on the device (`aot.gates`)."""
    every = (r for r in matrix.read(ROOT / "ferryman.yaml").rows if r.how == "compile" and r.backend == backend)
    devices = [profile(str(row.device)) for row in every if row.suite == "ferryman" and not row.args]
    return {known.arch: known for known in devices}


def by_row(known: Profile, backend: str, families: Iterable[str], dtype: str) -> dict[str, Any]:
    """{a name that no other has: what is compiled} by a device's row. Imports the kernels, and with them Triton."""
    every = [groups.Group(known.name, backend, family, dtype) for family in families]
    listed = [one.unit for group in every for one in groups.sources_of(group, known)]
    return {str(unit.name) if backend != "triton" else repr(unit): unit for unit in listed}


def compile_unit(unit: Unit, arch: str) -> Artefact:
    """`simt_offline.compile_unit`, from the cache where the same source, options and toolchain are in it."""
    backend = "cuda" if vendor_of(arch) == "nvidia" else "hip"
    key = cache.key("\0".join(("tests", repr(unit), *defines_for(unit, arch))), backend, arch)
    try:
        kept = cache.get(key)
    except cache.DamagedEntry:
        kept = None
    if kept is not None:
        facts, image = kept
        return Artefact(unit.name, arch, facts["kind"], image, facts["resources"], facts["log"])
    fresh = simt_offline.compile_unit(unit, arch)
    cache.put(key, {"kind": fresh.kind, "resources": dict(fresh.resources), "log": fresh.log}, fresh.image)
    return fresh


def rope(factory: pytest.TempPathFactory) -> tuple[Path, aot.Compiled]:
    """(the cache, what is in it): rope in bfloat16 by Triton for an H200 and an MI300X, and by HIP in all dtypes. The
    processes of a session share the cache: who asks first compiles."""
    own = factory.getbasetemp()
    kept = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "rope"
    with filelock.FileLock(f"{kept}.lock"), pytest.MonkeyPatch.context() as patch:
        patch.setattr(groups, "DTYPES", ("bfloat16",))
        patch.setenv("FERRYMAN_CACHE_DIR", str(kept))
        return kept, aot.compile_all(
            aot.profiles_for(["h200,mi300x"]), ops=["rope"], backends=["triton", "hip"], jobs=2
        )
