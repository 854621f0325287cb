"""CUDA C++ on NVIDIA: NVRTC compiles, CuPy launches. Offline, cuda-bindings and the NVRTC wheel need no driver.

CuPy's own compile path is not used: it appends -ftz=true, which flushes subnormals, and needs a driver (`nvrtc`).
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import re
import struct
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ferryman.backends.base import Artefact, unimportable
from ferryman.backends.nvrtc import INSTALL, NOT_LOADABLE, nvrtc
from ferryman.backends.simt import Unit, defines_for
from ferryman.backends.simt.launcher import LoadedUnits
from ferryman.errors import ArgumentError, BackendUnavailable, CompileError, LaunchError

# -ffast-math's parts stay off: NVRTC's defaults are IEEE division and square root, subnormals kept.
OPTIONS = ("-std=c++17", "--ptxas-options=-v")
_MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_STREAM_SERIALIZATION = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION: 1 lets blocks start early
_CAPTURED_EARLY = 12_030  # the first driver whose graphs know such launches
_UNASKED_SHARED = 40 * 1024  # of the 48 KiB that a kernel may use without asking: it has static memory besides
# cuLaunchKernel refusing the launch itself: invalid value, handle, configuration (as a runtime code), resources.
# Everything else (out of memory, illegal address, a sticky error of earlier work) rises as it is.
_REFUSED = frozenset({1, 9, 400, 701})
_NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
_LAUNCHING = ("numpy", "cupy", "cupy.cuda.runtime", "cupy.cuda.function", "cupy_backends.cuda.api.driver")


def _resources(log: str) -> dict[str, int]:
    """Registers, shared memory, spills and stack of ptxas's report: the largest over the unit's kernels."""
    resources: dict[str, int] = {}
    for key, pattern in {
        "registers": r"Used (\d+) registers",
        "shared": r"(\d+) bytes smem",
        "spill_stores": r"(\d+) bytes spill stores",
        "spill_loads": r"(\d+) bytes spill loads",
        "stack": r"(\d+) bytes stack frame",
    }.items():
        values = [int(v) for v in re.findall(pattern, log)]
        if values or key == "shared":
            resources[key] = max(values, default=0)
    return resources


class CudaBackend:
    name = "cuda"
    vendors = frozenset({"nvidia"})

    def probe(self, vendor: str) -> tuple[str, ...]:
        if vendor not in self.vendors:
            return (f"cuda serves NVIDIA devices; this device's vendor is {vendor!r}",)
        if importlib.util.find_spec("cupy") is None:
            return (f"CuPy is not installed; {INSTALL}",)
        why = unimportable(*_LAUNCHING)
        if why is not None:
            return (f"CuPy cannot be used: {why}; {INSTALL}",)
        try:
            runtime = importlib.import_module("cupy.cuda.runtime")
            driver, needed = int(runtime.driverGetVersion()), int(runtime.runtimeGetVersion())
        except NOT_LOADABLE as error:
            return (f"CuPy cannot be used: {error}",)
        if driver == 0:
            return ("no NVIDIA driver is loaded (CuPy reports driver version 0)",)
        reasons = []
        if driver // 1000 < needed // 1000:  # within a major version any driver runs any runtime
            reasons.append(
                f"the driver supports CUDA {driver // 1000}.{driver % 1000 // 10}; CuPy is built for CUDA "
                f"{needed // 1000}.{needed % 1000 // 10}: update the driver, or {INSTALL}"
            )
        try:
            if int(runtime.getDeviceCount()) == 0:
                reasons.append("CUDA sees no device")
        except NOT_LOADABLE as error:
            reasons.append(f"CUDA sees no device: {error}")
        if not torch.cuda.is_available() or torch.version.cuda is None:
            reasons.append(f"torch {torch.__version__} has no CUDA device to share streams with")
        try:
            nvrtc()
        except BackendUnavailable as error:
            reasons.append(str(error))
        return tuple(reasons)

    def compile(self, source: Unit, options: Sequence[str] | None, arch: str) -> Artefact:
        """Compile a unit to a cubin. ``options`` are added to `OPTIONS`."""
        if re.fullmatch(r"sm_\d+[af]?", arch) is None:
            raise ArgumentError("cuda.compile", "arch", repr(arch), "sm_NN")
        defines = [f"-D{d}" for d in defines_for(source, arch)]
        exact = arch if arch.endswith(("a", "f")) else arch + source.suffix
        cubin, log = nvrtc().compile(
            source.source, f"{source.name}.cu", (*OPTIONS, f"--gpu-architecture={exact}", *defines, *(options or ()))
        )
        if cubin is None:
            raise CompileError("cuda", source.name, arch, log)
        return Artefact(source.name, arch, "cubin", cubin, _resources(log), log)


_SUBMIT = """
def submit(stream{given}):
    try:
        own = take()
    except IndexError:
        own = unpacked()
    memory, parameters = own
    pack(memory, 0{given})
    status = launch(configured[stream], kernel, parameters, None)
    if status:
        failed(status, stream, parameters)
    give(own)
"""


class _Configuration(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("number", ctypes.c_uint),
    ]


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute, with an int for its value."""

    _fields_ = [("id", ctypes.c_int), ("padding", ctypes.c_int), ("value", ctypes.c_int), ("rest", ctypes.c_int * 15)]


_EARLY = _Attribute(id=_STREAM_SERIALIZATION, value=1)  # of every launch that takes it; the driver reads it


def _configuration(grid: int, block: int, shared: int, early: bool, stream: int) -> _Configuration:
    at = ctypes.addressof(_EARLY) if early else None
    return _Configuration((grid, 1, 1), (block, 1, 1), shared, stream, at, int(early))


class _Configurations(dict[int, Any]):
    """A launch's configuration on each stream that it was launched on."""

    def __init__(self, grid: int, block: int, shared: int, early: bool) -> None:
        super().__init__()
        self.common = grid, block, shared, early

    def __missing__(self, stream: int) -> Any:
        configuration = self[stream] = ctypes.pointer(_configuration(*self.common, stream))
        return configuration


def _slots(args: tuple[int | float, ...]) -> list[Any]:
    """The arguments as the driver reads them."""
    return [ctypes.c_int64(a) if isinstance(a, int) else ctypes.c_float(a) for a in args]


class CudaRuntime(LoadedUnits):
    """Cubins loaded and launched through CuPy, on torch's streams."""

    backend = "cuda"

    def __init__(self) -> None:
        super().__init__()
        try:
            self._cupy: Any = importlib.import_module("cupy")
            self._modules: Any = importlib.import_module("cupy.cuda.function")
            self._float32: Any = importlib.import_module("numpy").float32
            self._driver: Any = importlib.import_module("cupy_backends.cuda.api.driver")
            self._library = ctypes.CDLL("libcuda.so.1" if os.name == "posix" else "nvcuda.dll")
        except NOT_LOADABLE as error:
            raise BackendUnavailable(f"CuPy or the driver cannot be loaded ({error}); {INSTALL}") from error
        self._compiler = CudaBackend()
        self._streams: dict[tuple[int, int], Any] = {}
        self._starts_early: dict[int, bool] = {}

    def device_arch(self, index: int) -> str:
        major, minor = torch.cuda.get_device_capability(index)
        return f"sm_{major}{minor}"

    def toolchain(self) -> str:
        return f"nvrtc {nvrtc().version()} {' '.join(OPTIONS)}"

    def build(self, unit: Unit, arch: str) -> bytes:
        return self._compiler.compile(unit, None, arch).image

    def open(self, image: bytes, unit: Unit) -> Any:
        module = self._modules.Module()
        module.load(image)
        return module.get_function(unit.name)  # keeps its module

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
        if shared > _UNASKED_SHARED:
            self._driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, shared)
        if overlapping and self._early(index) and self._started_early(function, stream, grid, block, shared, args):
            return
        on = self._streams.get((index, stream))
        if on is None:
            on = self._streams[index, stream] = self._cupy.cuda.ExternalStream(stream)
        # CuPy passes a Python float as 64 bits
        packed = tuple([self._float32(a) if type(a) is float else a for a in args])
        try:
            function((grid, 1, 1), (block, 1, 1), packed, shared, on)
        except self._driver.CUDADriverError as error:
            raise self._judged(error, grid, block, shared) from error

    def _early(self, index: int) -> bool:
        """Whether the device can start blocks before the kernel ahead of theirs has ended, captured launches too."""
        starts_early = self._starts_early.get(index)
        if starts_early is None:
            version = ctypes.c_int()
            self._library.cuDriverGetVersion(ctypes.byref(version))
            able = int(self._arch(index).removeprefix("sm_")) >= 90 and version.value >= _CAPTURED_EARLY
            starts_early = self._starts_early[index] = able
        return starts_early

    def _started_early(
        self, function: Any, stream: int, grid: int, block: int, shared: int, args: tuple[int | float, ...]
    ) -> bool:
        """Launches with leave to start early. False on a thread that has no context: that launch is left to CuPy."""
        slots = _slots(args)
        parameters = (ctypes.c_void_p * max(1, len(slots)))(*[ctypes.addressof(slot) for slot in slots])
        how = _configuration(grid, block, shared, True, stream)
        status = self._library.cuLaunchKernelEx(ctypes.byref(how), ctypes.c_void_p(function.ptr), parameters, None)
        if status not in (0, _NO_CONTEXT):
            raise self._judged(self._driver.CUDADriverError(status), grid, block, shared)
        return bool(status == 0)

    def bind(
        self,
        function: Any,
        index: int,
        grid: int,
        block: int,
        shared: int,
        args: tuple[int | float, ...],
        varying: Sequence[int],
        overlapping: bool = False,
    ) -> Callable[..., None]:
        """Straight to the driver, with all but the addresses packed: CuPy's call costs an H200's host 1.2 us more.

        The driver copies the arguments before it returns. Threads do not share them: each takes a set that is free.
        """
        try:
            launch = self._library.cuLaunchKernelEx
        except AttributeError:  # a driver older than CUDA 11.8
            return super().bind(function, index, grid, block, shared, args, varying)
        if shared > _UNASKED_SHARED:
            self._driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SHARED, shared)
        context = ctypes.c_void_p()
        self._library.cuCtxGetCurrent(ctypes.byref(context))
        layout = struct.Struct(f"<{len(varying)}q")

        def unpacked() -> tuple[Any, Any]:
            """Room for the addresses, and where the driver finds each argument; they keep their memory alive."""
            memory = ctypes.create_string_buffer(max(1, layout.size))
            slots = _slots(args)
            at = [ctypes.addressof(slot) for slot in slots]
            for place, argument in enumerate(varying):
                at[argument] = ctypes.addressof(memory) + 8 * place
            parameters = (ctypes.c_void_p * max(1, len(at)))(*at)
            parameters.kept = slots  # type: ignore[attr-defined]
            return memory, parameters

        def failed(status: int, stream: int, parameters: Any) -> None:
            if status == _NO_CONTEXT:  # a thread that has called nothing of the CUDA runtime yet
                self._library.cuCtxSetCurrent(context)
                status = launch(namespace["configured"][stream], kernel, parameters, None)
            if status:
                raise self._judged(self._driver.CUDADriverError(status), grid, block, shared)

        early = overlapping and self._early(index)
        kernel, free = ctypes.c_void_p(function.ptr), [unpacked()]
        namespace: dict[str, Any] = {
            "configured": _Configurations(grid, block, shared, early),
            "kernel": kernel,
            "launch": launch,
            "failed": failed,
            "pack": layout.pack_into,
            "take": free.pop,
            "give": free.append,
            "unpacked": unpacked,
        }
        given = "".join(f", a{i}" for i in range(len(varying)))
        exec(_SUBMIT.format(given=given), namespace)  # noqa: S102 - parameters by name cost 0.1 us less than *given
        submit: Callable[..., None] = namespace["submit"]
        return submit

    def _judged(self, error: Any, grid: int, block: int, shared: int) -> Exception:
        """A refusal of the launch itself as a LaunchError; any other failure as it is."""
        if error.status not in _REFUSED:
            failure: Exception = error
            return failure
        return LaunchError(
            f"cuda refused {grid} blocks of {block} threads with {shared} bytes of shared memory: {error}"
        )
