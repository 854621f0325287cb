"""Resource gates: can a compiled kernel run on a device, and has it the form that the device is fast in?

Each gate gives actual against required. What cannot run there, or spills beyond what its author allowed, fails. Gates
of form (`FORM`) fail no kernel, as a slow one is right: what they find is counted and printed as poor form. A number
that the toolchain did not report, or a limit that the profile does not have, is judged by no gate.

Occupancy: waves that a compute unit holds at once, by registers, shared memory and threads, in whole blocks. Registers
are given out in steps: 8 of a thread on NVIDIA and CDNA (CUDA occupancy calculator; LLVM, "User Guide for AMDGPU
Backend", VGPR allocation granule), 24 on RDNA 3 with wave 32. Warps are dealt over the four schedulers of an SM, and
waves over the SIMDs of a CU, so a block's are counted in fours on both.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType

from ferryman.backends.artefacts import Gate
from ferryman.device_profiles import Profile

# No kernel of ours is near; beyond it, something was unrolled by accident (an instruction cache holds 64 to 128 KiB).
CODE_LIMIT = 256 * 1024
# gates of form, and what to do
_CURES = {
    "matrix": " (give tl.dot operands of 16 bits, in tiles of 16 x 16 and more)",
    "wide_loads": " (leave specialization on for strides and sizes that masks read; give 8 elements of 16 bits a lane)",
    "buffer_loads": " (address by a pointer and an int32 offset)",
}
FORM = frozenset(_CURES)
_SIMDS = {64: 4, 32: 2}  # of an AMD compute unit, by its wave: CDNA, RDNA


def judge(resources: Mapping[str, int], known: Profile, spills_allowed: int, aligned: bool) -> list[Gate]:
    """The gates of one kernel. ``resources`` as `triton_resources.of` or the SIMT compilers give them; ``aligned``: all
    that it reads is dense and aligned, so that 16 bytes a lane can be read."""
    gates: list[Gate | None] = [
        _most("registers", resources.get("registers"), known.registers_per_thread, "a thread"),
        *_spills(resources, known.vendor, spills_allowed),
        _most("shared", resources.get("shared"), known.shared_memory, "bytes a block"),
        _most("threads", resources.get("threads"), known.max_threads, "a block"),
        _occupancy(resources, known),
        _matrix(resources, known),
        _wide(resources, aligned),
        _buffers(resources, known),
        _most("code_bytes", resources.get("code_bytes"), CODE_LIMIT, "bytes"),
    ]
    return [gate for gate in gates if gate is not None]


def failures(gates: list[Gate]) -> str | None:
    """Why the kernel may not be chosen, actual against required; None where it may."""
    return _words(gate for gate in gates if gate.name not in FORM)


def poor_form(gates: list[Gate]) -> str | None:
    """What is slow about the kernel, in the same words; None where nothing was found."""
    return _words((gate for gate in gates if gate.name in FORM), _CURES)


def _words(gates: Iterable[Gate], cures: Mapping[str, str] = MappingProxyType({})) -> str | None:
    words = (f"{g.name}: {g.actual}, required {g.required}{cures.get(g.name, '')}" for g in gates if not g.passed)
    return "; ".join(words) or None


def _most(name: str, actual: int | None, limit: int | None, unit: str) -> Gate | None:
    if actual is None or limit is None:
        return None
    return Gate(name=name, passed=actual <= limit, actual=f"{actual} {unit}", required=f"at most {limit}")


def _spills(resources: Mapping[str, int], vendor: str, allowed: int) -> list[Gate | None]:
    """NVIDIA: bytes of local memory a thread. AMD: vector and scalar registers, and bytes of scratch for them."""
    if vendor == "nvidia":
        spilled = resources.get("spills", resources.get("spill_stores"))
        return [_most("spills", spilled, allowed, "bytes a thread")]
    vector, scalar = resources.get("vgpr_spills"), resources.get("sgpr_spills")
    return [
        _most("vgpr_spills", vector, allowed, "registers"),
        _most("sgpr_spills", scalar, allowed, "registers"),
        _most("scratch", resources.get("scratch"), 8 * allowed, "bytes a thread"),  # two ways for each, 4 bytes each
    ]


def waves(resources: Mapping[str, int], known: Profile) -> tuple[int, int] | None:
    """(waves that a unit holds at once, the most it can); None where the profile or the toolchain lacks a number."""
    threads, registers = resources.get("threads"), resources.get("registers")
    if threads is None or registers is None or known.registers_per_unit is None or known.max_threads_per_unit is None:
        return None
    most = known.max_threads_per_unit // known.wave
    block = -(-threads // known.wave)
    step = 24 if known.vendor == "amd" and known.wave == 32 else 8
    each = -(-max(registers, 1) // step) * step * known.wave  # registers of one wave
    simds = _SIMDS[known.wave] if known.vendor == "amd" else 4
    per_simd = min(known.registers_per_unit // simds // each, most // simds)
    blocks = per_simd * simds // (-(-block // simds) * simds) if block >= simds else per_simd * simds // block
    shared = resources.get("shared", 0)
    if shared and known.shared_memory_per_unit is not None:
        blocks = min(blocks, known.shared_memory_per_unit // shared)
    return blocks * block, most


def _occupancy(resources: Mapping[str, int], known: Profile) -> Gate | None:
    occupancy = waves(resources, known)
    if occupancy is None:
        return None
    actual, most = occupancy
    required = "at least one block"
    return Gate(name="occupancy", passed=actual > 0, actual=f"{actual} of {most} waves a unit", required=required)


def _matrix(resources: Mapping[str, int], known: Profile) -> Gate | None:
    """Products run on the matrix unit where it has a form for them: every one has for 16 bits, NVIDIA's has tf32, and
    only CDNA's has IEEE float32. Elsewhere such products run on the vector units, and no gate judges them."""
    if "matrix" not in resources:
        return None
    able = resources["dots_half"]
    able += resources["dots_tf32"] if known.vendor == "nvidia" else 0
    able += resources["dots_ieee"] if "mfma" in known.features else 0
    if able == 0:
        return None
    actual, required = f"{resources['matrix']} instructions", f"at least 1 for {able} products"
    return Gate(name="matrix", passed=resources["matrix"] > 0, actual=actual, required=required)


def _wide(resources: Mapping[str, int], aligned: bool) -> Gate | None:
    if not aligned or resources.get("loads", 0) == 0:
        return None
    actual = f"{resources['wide_loads']} of {resources['loads']} loads"
    return Gate(
        name="wide_loads", passed=resources["wide_loads"] > 0, actual=actual, required="some of 16 bytes a lane"
    )


def _buffers(resources: Mapping[str, int], known: Profile) -> Gate | None:
    """CDNA's buffer loads check their bounds for nothing; a global load of a masked row costs a branch."""
    if "mfma" not in known.features or resources.get("loads", 0) == 0:
        return None
    buffered = resources.get("buffer_loads")
    if buffered is None:
        return None
    actual = f"{buffered} of {resources['loads']} loads"
    return Gate(name="buffer_loads", passed=buffered > 0, actual=actual, required="some through buffers")
