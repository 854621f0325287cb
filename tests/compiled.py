"""C++ kernels compiled for devices that are not here, once for all tests: kept by content, in the folder of
`ferryman compile`."""

from __future__ import annotations

from ferryman.backends import simt_offline
from ferryman.backends.base import Artefact
from ferryman.backends.simt import Unit, defines_for, vendor_of
from ferryman.porting.aot import cache


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
