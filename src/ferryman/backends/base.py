"""What a backend is: how a toolchain compiles and launches a kernel. It knows nothing of what an op means."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable


def unimportable(*modules: str) -> str | None:
    """Why one of ``modules`` cannot be imported: whatever its import raises (another ABI, say); None where all can."""
    for name in modules:
        try:
            importlib.import_module(name)
        except Exception as error:  # noqa: BLE001 - an extension module may raise anything, and all of it is a reason
            lines = str(error).strip().splitlines() or [""]
            return f"importing {name} raises {type(error).__name__}: {lines[0][:300]}"
    return None


@dataclass(frozen=True)
class Target:
    """The facts of a device that a kernel's launcher may read; derived from its profile.

    arch: "sm_90", "gfx942", "cpu". vendor: "nvidia", "amd", "cpu". wave: lanes per warp or wavefront.
    shared_memory: bytes one block may have (opt-in limit). units: SMs or CUs. l2_bytes: last on-die cache of the SMs.
    registers_per_unit: 32-bit registers of an SM or CU; 0 where the profile does not say.
    configuration: which of its configurations a launcher takes ("": the one that its own plan puts first).
    """

    arch: str
    vendor: str
    wave: int
    shared_memory: int
    max_threads: int
    units: int
    l2_bytes: int
    features: frozenset[str] = field(default_factory=frozenset)
    registers_per_unit: int = 0
    configuration: str = ""


@dataclass(frozen=True)
class Artefact:
    """One compiled kernel image: ``image`` is a cubin, an hsaco, or PTX; ``resources`` what the toolchain reported.

    ``metadata`` is what the backend needs beside the image to launch it (JSON types; Triton's alone has some).
    """

    kernel: str
    arch: str
    kind: str
    image: bytes
    resources: dict[str, int] = field(default_factory=dict)
    log: str = ""
    metadata: dict[str, Any] = field(default_factory=dict)


@runtime_checkable
class Backend(Protocol):
    """One toolchain. ``vendors`` are the vendors whose devices it can ever serve."""

    name: str
    vendors: frozenset[str]

    def probe(self, vendor: str) -> tuple[str, ...]:
        """Why this backend cannot run on a device of ``vendor`` in this process; empty when it can. Never raises."""
        ...

    def compile(self, source: Any, options: Any, arch: str) -> Artefact:
        """Compile for ``arch``, which need not be here. Raises CompileError with the toolchain's log."""
        ...
