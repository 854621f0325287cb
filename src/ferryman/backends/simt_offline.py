"""Compiling SIMT kernels for devices that are not here, from PyPI packages alone.

NVIDIA: NVRTC through cuda-bindings, no driver. AMD: the clang and lld of the `ziglang` wheel with the device bitcode
of the `triton` wheel; no ROCm. `zig clang -cc1` has no HIP headers, and `portable.cuh` needs none.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import re
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path

from ferryman.backends.base import Artefact, Target
from ferryman.backends.cuda import CudaBackend
from ferryman.backends.simt import Unit, defines_for, vendor_of, wave_of
from ferryman.backends.simt.launcher import cached_image, keep_image
from ferryman.backends.simt.resources import read_hsaco
from ferryman.errors import ArgumentError, BackendUnavailable, CompileError

ARCHES = ("sm_80", "sm_90", "gfx90a", "gfx942", "gfx950", "gfx1100")
_CODE_OBJECT = 5
# As OCML's own control libraries: IEEE throughout. Nothing is approximated, flushed or assumed finite.
_CONTROLS = {
    "finite_only_opt": ("i8", 0),
    "unsafe_math_opt": ("i8", 0),
    "daz_opt": ("i8", 0),
    "correctly_rounded_sqrt32": ("i8", 1),
}
# Opt-in shared memory and SMs or CUs of the devices behind ARCHES: they only size plans. Sources: CUDA programming
# guide, table of compute capabilities; AMD's MI200, MI300 and RDNA3 white papers.
_LIMITS = {
    "sm_80": (166_912, 108),
    "sm_90": (232_448, 132),
    "gfx90a": (65_536, 110),
    "gfx942": (65_536, 304),
    "gfx950": (163_840, 256),
    "gfx1100": (65_536, 96),
}
_CLUSTERED = ("sm_90", "sm_100", "sm_103", "sm_110", "sm_120", "sm_121")


def target_for(arch: str) -> Target:
    """A target with the limits of ``arch``, for planning without a profile."""
    shared, units = _LIMITS.get(arch, (49_152 if vendor_of(arch) == "nvidia" else 65_536, 64))
    features = frozenset({"clusters"}) if arch in _CLUSTERED else frozenset()
    return Target(arch, vendor_of(arch), wave_of(arch), shared, 1024, units, 0, features)


def compile_unit(unit: Unit, arch: str) -> Artefact:
    """Compile for a device that need not be here. Raises CompileError, or BackendUnavailable with what to install."""
    if vendor_of(arch) == "nvidia":
        return CudaBackend().compile(unit, None, arch)
    return _compile_amd(unit, arch)


def compile_all(arch: str, units: Iterable[Unit]) -> list[Artefact]:
    """Compile ``units`` for ``arch``: those of a family are `simt_kernels.units(target_for(arch))`."""
    return [compile_unit(unit, arch) for unit in units]


@functools.lru_cache(maxsize=1)
def tools() -> tuple[Path, Path]:
    """(zig, the directory of the device bitcode)."""
    paths = []
    for package, inside in (("ziglang", "zig"), ("triton", "backends/amd/lib")):
        spec = importlib.util.find_spec(package)  # triton itself is not imported
        if spec is None or spec.origin is None:
            raise BackendUnavailable(f"offline HIP needs the {package} package: pip install ziglang triton")
        path = Path(spec.origin).parent / inside
        if not path.exists():
            raise BackendUnavailable(f"the installed {package} package has no {inside}: pip install ziglang triton")
        paths.append(path)
    return paths[0], paths[1]


def _cc1() -> tuple[str | Path, ...]:
    """Clang's own command line, which does not look for a HIP toolkit."""
    return tools()[0], "clang", "-cc1", "-triple", "amdgcn-amd-amdhsa"


def _isa_version(arch: str) -> int:
    """gfx942 -> 9402: major * 1000 + minor * 100 + stepping, the last two of them hexadecimal digits."""
    match = re.fullmatch(r"gfx(\d+)([0-9a-f])([0-9a-f])", arch)
    if match is None:
        raise ArgumentError("simt.offline", "arch", repr(arch), "gfxNNN")
    return int(match[1]) * 1000 + int(match[2], 16) * 100 + int(match[3], 16)


def _controls(arch: str) -> str:
    values = {
        **_CONTROLS,
        "wavefrontsize64": ("i8", int(wave_of(arch) == 64)),
        "ISA_version": ("i32", _isa_version(arch)),
        "ABI_version": ("i32", _CODE_OBJECT * 100),
    }
    lines = [
        f"@__oclc_{name} = linkonce_odr hidden local_unnamed_addr addrspace(4) constant {kind} {value}"
        for name, (kind, value) in values.items()
    ]
    return "\n".join(['target triple = "amdgcn-amd-amdhsa"', *lines, ""])


def _run(command: Sequence[str | Path], name: str, arch: str) -> str:
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=300, check=False)
    if done.returncode != 0:
        raise CompileError("hip", name, arch, done.stderr or f"{command[1]} exited with {done.returncode}")
    return done.stderr


@functools.lru_cache(maxsize=None)
def _control_library(arch: str) -> bytes:
    """`_controls` as bitcode, the only form that clang links."""
    with tempfile.TemporaryDirectory(prefix="ferryman-") as temporary:
        source, bitcode = Path(temporary) / "oclc.ll", Path(temporary) / "oclc.bc"
        source.write_text(_controls(arch), encoding="utf-8")
        _run((*_cc1(), "-x", "ir", "-emit-llvm-bc", "-o", bitcode, source), "oclc", arch)
        return bitcode.read_bytes()


def _clang(unit: Unit, arch: str, folder: Path, *output: str) -> str:
    """Compile a unit in ``folder``; ``output``: what to emit, and where to. Returns the log."""
    _, bitcode = tools()
    source, controls = folder / "kernel.hip", folder / "oclc.bc"
    source.write_text(unit.source, encoding="utf-8")
    controls.write_bytes(_control_library(arch))
    libraries = (bitcode / "ocml.bc", bitcode / "ockl.bc", controls)
    links = [word for lib in libraries for word in ("-mlink-builtin-bitcode", str(lib))]
    return _run(
        (
            *_cc1(),
            "-target-cpu",
            arch,
            "-fcuda-is-device",
            f"-mcode-object-version={_CODE_OBJECT}",
            "-ffp-contract=fast",
            "-fgpu-rdc",
            "-fvisibility=hidden",
            "-fapply-global-visibility-to-externs",
            "-x",
            "hip",
            "-std=c++17",
            "-O3",
            "-Wno-linker-warnings",
            *(f"-D{d}" for d in defines_for(unit, arch)),
            *links,
            *output,
            source,
        ),
        unit.name,
        arch,
    )


def _compile_amd(unit: Unit, arch: str) -> Artefact:
    with tempfile.TemporaryDirectory(prefix="ferryman-") as temporary:
        folder = Path(temporary)
        log = _clang(unit, arch, folder, "-emit-obj", "-o", str(folder / "kernel.o"))
        linked = (
            tools()[0],
            "ld.lld",
            "-shared",
            "--no-undefined",
            "-o",
            folder / "kernel.hsaco",
            folder / "kernel.o",
        )
        _run(linked, unit.name, arch)
        image = (folder / "kernel.hsaco").read_bytes()
    return Artefact(unit.name, arch, "hsaco", image, read_hsaco(image), log)


def assembly(unit: Unit, arch: str, keep: bool = True) -> str:
    """The same compilation of a unit for an AMD arch, as assembly text with line tables. Kept on disk, or in this
    process alone (``keep``: False), for code that nobody else compiles."""
    return _assembly(unit, arch) if keep else _passing(unit, arch)


@functools.lru_cache(maxsize=64)
def _passing(unit: Unit, arch: str) -> str:
    return _compiled(unit, arch).decode("utf-8")


def _compiled(unit: Unit, arch: str) -> bytes:
    with tempfile.TemporaryDirectory(prefix="ferryman-") as temporary:
        path = Path(temporary) / "kernel.s"
        lines = ("-debug-info-kind=line-tables-only", "-dwarf-version=5", "-debugger-tuning=gdb")
        _clang(unit, arch, Path(temporary), *lines, "-S", "-o", str(path))
        return path.read_bytes()


def _assembly(unit: Unit, arch: str) -> str:
    words = (*(version(p) for p in ("ziglang", "triton")), arch, *defines_for(unit, arch), unit.source)
    key = f"{arch}-s-{hashlib.sha256(chr(0).join(words).encode()).hexdigest()}"
    kept = cached_image(key)
    if kept is None:
        kept = _compiled(unit, arch)
        keep_image(key, kept)
    return kept.decode("utf-8")
