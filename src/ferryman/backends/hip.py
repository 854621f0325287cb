"""HIP C++ on AMD: hipRTC compiles, hip-python loads and launches. One source with `cuda` (see `simt`).

hip-python 7.2 and 10 are bindings only: ROCm's libamdhip64 and libhiprtc must be on the loader's path.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import re
from collections.abc import Sequence
from typing import Any

import torch

from ferryman.backends.base import Artefact
from ferryman.backends.simt import Unit, defines_for
from ferryman.backends.simt.launcher import LoadedUnits
from ferryman.backends.simt.resources import read_hsaco
from ferryman.errors import ArgumentError, BackendUnavailable, CompileError, LaunchError

INSTALL = "pip install ferryman[rocm7]"
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=fast")
# Refusals of the launch itself; everything else (out of memory, illegal address) rises as a HipError.
_REFUSED = frozenset({1, 9, 98, 701})
_NOT_LOADABLE = (ImportError, OSError, RuntimeError, ValueError, TypeError)
# The first ROCm whose LLVM has the target (15, 17, 19, 20). An older hipRTC may not refuse what it does not know: 5.2.3
# aborts the process on gfx942 and gfx1100.
_FIRST_ROCM = {"gfx1100": (5, 3), "gfx942": (5, 6), "gfx1200": (6, 3), "gfx1201": (6, 3), "gfx950": (6, 4)}


class HipError(RuntimeError):
    """A HIP call failed. ``status`` is its hipError_t."""

    def __init__(self, call: str, status: int, text: str) -> None:
        super().__init__(f"{call} failed: {text} ({status})")
        self.status = status


@functools.lru_cache(maxsize=1)
def _bindings() -> tuple[Any, Any]:
    """(hip, hiprtc) of hip-python. Raises BackendUnavailable where they are not installed."""
    try:
        package = importlib.import_module("hip")
        return package.hip, package.hiprtc
    except (*_NOT_LOADABLE, AttributeError) as error:
        raise BackendUnavailable(f"hip-python cannot be imported ({error}); {INSTALL}") from error


def _call(module: Any, name: str, *args: Any) -> Any:
    """A call that must succeed: its results without the status. A missing library is a RuntimeError of hip-python."""
    status, *rest = getattr(module, name)(*args)
    if int(status) != 0:
        raise HipError(name, int(status), str(getattr(status, "name", status)))
    return rest[0] if len(rest) == 1 else tuple(rest)


def hiprtc_version() -> tuple[int, int]:
    """Version of the hipRTC that is loaded. Raises RuntimeError where its library is missing."""
    _, hiprtc = _bindings()
    major, minor = _call(hiprtc, "hiprtcVersion")
    return int(major), int(minor)


def runtime_version() -> tuple[int, int]:
    """ROCm's (major, minor) of the HIP runtime that is loaded. Raises RuntimeError where its library is missing.

    hiprtcVersion says 9.0 over many releases, so what hipRTC knows is judged by the runtime beside it.
    """
    hip, _ = _bindings()
    version = int(_call(hip, "hipRuntimeGetVersion"))  # 50221153 is 5.2.21153
    return version // 10_000_000, version // 100_000 % 100


def _refuse_unknown(kernel: str, arch: str) -> None:
    """Raises CompileError where the hipRTC that is loaded is older than ``arch``."""
    first = _FIRST_ROCM.get(arch)
    if first is None:
        return
    try:
        version = runtime_version()
    except RuntimeError:
        return  # hipRTC alone is loaded, which from ROCm 6 on is a library of its own: it knows what to refuse
    if version < first:
        log = f"hipRTC of ROCm {version[0]}.{version[1]} does not know {arch}; required: {first[0]}.{first[1]} or newer"
        raise CompileError("hip", kernel, arch, f"{log}. Update ROCm, or compile elsewhere (ferryman compile)")


class HipBackend:
    name = "hip"
    vendors = frozenset({"amd"})

    def probe(self, vendor: str) -> tuple[str, ...]:
        if vendor not in self.vendors:
            return (f"hip serves AMD devices; this device's vendor is {vendor!r}",)
        if importlib.util.find_spec("hip") is None:
            return (f"hip-python is not installed; {INSTALL}",)
        try:
            hip, _ = _bindings()
        except BackendUnavailable as error:
            return (str(error),)
        reasons = []
        try:
            if int(_call(hip, "hipGetDeviceCount")) == 0:
                reasons.append("HIP sees no device")
        except HipError as error:
            reasons.append(f"HIP sees no device: {error}")
        except _NOT_LOADABLE as error:
            reasons.append(f"the HIP runtime cannot be loaded ({error}); install ROCm, or put libamdhip64 on the path")
        try:
            hiprtc_version()
        except _NOT_LOADABLE as error:
            reasons.append(f"hipRTC cannot be loaded ({error}); install ROCm's hiprtc, or put libhiprtc on the path")
        if torch.version.hip is not None and not reasons:
            built, loaded = torch.version.hip.split(".")[0], runtime_version()
            if built != str(loaded[0]):
                reasons.append(
                    f"the HIP runtime on the loader's path is ROCm {loaded[0]}.{loaded[1]}, torch {torch.__version__} "
                    f"is built for ROCm {torch.version.hip}: two runtimes share no stream; put torch's on the path"
                )
        if torch.version.hip is None:
            reasons.append(f"torch {torch.__version__} is not a ROCm build: it has no AMD device to share streams with")
        return tuple(reasons)

    def compile(self, source: Unit, options: Sequence[str] | None, arch: str) -> Artefact:
        """Compile a unit to a code object with hipRTC. ``options`` are added to `OPTIONS`."""
        if re.fullmatch(r"gfx[0-9a-f]+", arch) is None:
            raise ArgumentError("hip.compile", "arch", repr(arch), "gfxNNN")
        _, hiprtc = _bindings()
        _refuse_unknown(source.name, arch)
        defines = [f"-D{d}" for d in defines_for(source, arch)]
        flags = [f.encode() for f in (*OPTIONS, f"--offload-arch={arch}", *defines, *(options or ()))]
        try:
            program = _call(
                hiprtc, "hiprtcCreateProgram", source.source.encode(), f"{source.name}.hip".encode(), 0, None, None
            )
        except RuntimeError as error:
            if isinstance(error, HipError):
                raise
            raise BackendUnavailable(f"hipRTC cannot be loaded ({error}); install ROCm's hiprtc") from error
        try:
            (status,) = hiprtc.hiprtcCompileProgram(program, len(flags), flags)
            log = bytearray(int(_call(hiprtc, "hiprtcGetProgramLogSize", program)))
            if log:
                _call(hiprtc, "hiprtcGetProgramLog", program, log)
            text = bytes(log).rstrip(b"\0").decode("utf-8", errors="replace")
            if int(status) != 0:
                raise CompileError("hip", source.name, arch, text or str(status))
            code = bytearray(int(_call(hiprtc, "hiprtcGetCodeSize", program)))
            _call(hiprtc, "hiprtcGetCode", program, code)
        finally:
            _call(hiprtc, "hiprtcDestroyProgram", program.createRef())
        image = bytes(code)
        return Artefact(source.name, arch, "hsaco", image, read_hsaco(image), text)


@functools.lru_cache(maxsize=None)
def _arguments(signature: str) -> type[ctypes.Structure]:
    """The kernel's argument block: every argument at its natural alignment, as AMD's kernel ABI lays them out."""
    kinds: dict[str, Any] = {"q": ctypes.c_int64, "f": ctypes.c_float}
    fields = [(f"a{i}", kinds[k]) for i, k in enumerate(signature)]
    return type("Arguments", (ctypes.Structure,), {"_fields_": fields})


def pack_arguments(args: tuple[int | float, ...]) -> ctypes.Structure:
    return _arguments("".join(["f" if type(a) is float else "q" for a in args]))(*args)


class HipRuntime(LoadedUnits):
    """Code objects loaded and launched through hip-python, on torch's streams."""

    backend = "hip"

    def __init__(self) -> None:
        super().__init__()
        self._hip, _ = _bindings()
        self._compiler = HipBackend()
        self._toolchain: str | None = None

    def device_arch(self, index: int) -> str:
        # "gfx942:sramecc+:xnack-": code without the suffixes runs in every mode
        name: str = torch.cuda.get_device_properties(index).gcnArchName
        return name.split(":")[0]

    def toolchain(self) -> str:
        if self._toolchain is None:
            version = _call(self._hip, "hipRuntimeGetVersion")  # hiprtcVersion stays 9.0 over many ROCm releases
            self._toolchain = f"hiprtc {hiprtc_version()} hip {version} {' '.join(OPTIONS)}"
        return self._toolchain

    def build(self, unit: Unit, arch: str) -> bytes:
        return self._compiler.compile(unit, None, arch).image

    def open(self, image: bytes, unit: Unit) -> Any:
        module = _call(self._hip, "hipModuleLoadData", image)
        function = _call(self._hip, "hipModuleGetFunction", module, unit.name.encode())
        return function, module, image  # HIP does not copy the image on every release

    def start(
        self,
        function: Any,
        stream: int,
        index: int,
        grid: int,
        block: int,
        shared: int,
        args: tuple[int | float, ...],
        overlapping: bool = False,
    ) -> None:
        kernel = function[0]
        try:
            _call(
                self._hip,
                "hipModuleLaunchKernel",
                kernel,
                grid,
                1,
                1,
                block,
                1,
                1,
                shared,
                stream,
                None,
                (pack_arguments(args),),
            )
        except HipError as error:
            if error.status not in _REFUSED:
                raise
            raise LaunchError(
                f"hip refused {grid} blocks of {block} threads with {shared} bytes of shared memory: {error}"
            ) from error
