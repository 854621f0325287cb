"""Triton, on NVIDIA and AMD, and its interpreter on the CPU: ahead-of-time compilation, and launching.

Importing this module does not import triton; the kernels' files do. A process either interprets Triton or compiles
it, fixed when triton is first imported, so parity checks on a CPU and ahead-of-time compilation use worker processes.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ferryman.backends import redirect, replay
from ferryman.backends.base import Artefact, Target, unimportable
from ferryman.backends.triton_runtime import provide_scratch, release, resource_errors
from ferryman.errors import ArgumentError, CaptureError, CompileError, FerrymanError

_TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.bool: "i1",
}
_TENSOR_MEMORY_COLUMNS = 512
_TRUE = frozenset({"1", "true", "yes", "on", "y"})  # what triton.knobs accepts


def interpreting() -> bool:
    """Whether Triton interprets kernels in this process. Asks triton once it is imported, the environment before."""
    language = sys.modules.get("triton.language")
    if language is None:
        return os.environ.get("TRITON_INTERPRET", "0").lower() in _TRUE
    return type(language.sum).__name__ == "InterpretedFunction"


@dataclass(frozen=True, repr=False)
class Specialisation:
    """One configuration of a kernel, enough to compile it with no device and no tensors.

    ``signature`` maps every parameter that is not a constexpr to its Triton type ("*bf16", "i32", "fp32");
    ``constexprs`` maps the others to their values. ``unaligned`` names pointers that are not 16-byte aligned,
    ``divisible`` integers known to be divisible by 16. ``options`` are the compiler's own (``waves_per_eu``).
    ``num_stages`` None is the compiler's own default (3 on NVIDIA, 2 on AMD), as in a launch that does not name it.
    ``spills_allowed`` is what its author accepts, in the unit of the resource "spills"; beyond it the configuration
    fails its gates (`ferryman compile`).
    """

    kernel: Any
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    num_warps: int = 4
    num_stages: int | None = 1
    options: Mapping[str, Any] = field(default_factory=dict)
    unaligned: frozenset[str] = frozenset()
    divisible: frozenset[str] = frozenset()
    spills_allowed: int = 0

    @property
    def name(self) -> str:
        return _kernel_name(self.kernel)

    def __repr__(self) -> str:
        types = ", ".join(
            f"{n}: {t}{'' if n not in self.divisible else ' %16'}{' unaligned' if n in self.unaligned else ''}"
            for n, t in self.signature.items()
        )
        given = ", ".join(f"{n}={v}" for n, v in {**self.constexprs, **self.options}.items() if v is not None)
        # complete on purpose: two specialisations are the same if and only if they print the same
        return f"{self.name}({types}; {given}; {self.num_warps} warps, {self.num_stages} stages)"


class TritonBackend:
    name = "triton"
    vendors = frozenset({"nvidia", "amd", "cpu"})

    def probe(self, vendor: str) -> tuple[str, ...]:
        if vendor not in self.vendors:
            return (f"triton does not serve vendor {vendor!r}; it serves {', '.join(sorted(self.vendors))}",)
        if importlib.util.find_spec("triton") is None:
            return ("triton is not installed; pip install 'ferryman[triton]'",)
        if vendor == "cpu":
            return _interpreter_reasons() or _import_reasons()
        reasons = []
        if interpreting():
            reasons.append("TRITON_INTERPRET=1: this process interprets Triton, which serves CPU tensors only")
        built_for = "amd" if torch.version.hip else "nvidia" if torch.version.cuda else None
        if built_for != vendor:
            reasons.append(f"this torch build ({torch.__version__}) drives {built_for or 'no GPU'}, not {vendor}")
        elif not torch.cuda.is_available():
            reasons.append(f"no {vendor} device is visible to torch (torch.cuda.is_available() is False)")
        return tuple(reasons) or _import_reasons()

    def compile(
        self,
        source: Specialisation,
        options: Mapping[str, Any] | None,
        arch: str,
        target: Target | None = None,
    ) -> Artefact:
        """Compile ``source`` for ``arch``, which need not be here; ``options`` override the specialisation's own.

        Triton ignores options that it does not know and does not check shared memory, so both are checked here
        (the latter where a ``target`` is given).
        """
        if interpreting():
            log = "TRITON_INTERPRET=1: an interpreting process cannot compile"
            raise CompileError("triton", source.name, arch, log)
        import triton

        ast, chosen, gpu = _source(source, arch, options)
        try:
            compiled = triton.compile(ast, target=gpu, options=chosen)
        except (MemoryError, OSError):
            raise
        except Exception as error:  # Triton raises its own, RuntimeError, ValueError, AssertionError and KeyError
            raise CompileError("triton", source.name, arch, f"{type(error).__name__}: {error}") from error
        from ferryman.backends import triton_artefacts, triton_reductions, triton_resources

        if (wrong := triton_reductions.refusal(compiled)) is not None:
            raise CompileError("triton", source.name, arch, wrong)
        kind = "cubin" if gpu.backend == "cuda" else "hsaco"
        text = compiled.asm["ptx" if kind == "cubin" else "amdgcn"]
        resources = triton_resources.of(compiled, kind, gpu.warp_size)
        # Beyond 512 columns of tensor memory (sm_100) Triton 3.6 emits a kernel that is only `trap`, and says nothing.
        columns = getattr(compiled.metadata, "tmem_size", None) or 0
        if columns > _TENSOR_MEMORY_COLUMNS:
            log = f"tensor memory: {columns} columns needed, {arch} has {_TENSOR_MEMORY_COLUMNS}; use smaller tiles"
            raise CompileError("triton", source.name, arch, log)
        if target is not None:
            for what, limit in (("shared", target.shared_memory), ("threads", target.max_threads)):
                if resources[what] > limit:
                    log = f"{what}: {resources[what]} needed, {target.arch} has {limit} for a block"
                    raise CompileError("triton", source.name, arch, log)
        metadata = triton_artefacts.metadata_of(compiled)
        return Artefact(source.name, arch, kind, compiled.asm[kind], resources, text, metadata)

    def key(self, source: Specialisation, arch: str) -> str:
        """What a launch must match for an artefact of ``source`` to serve it (`triton_artefacts.key`)."""
        from ferryman.backends import triton_artefacts

        return triton_artefacts.key(*_source(source, arch))


def jit_source(source: Specialisation, arch: str) -> Any:
    """Triton's own source object of a specialisation, which its launcher is made from."""
    return _source(source, arch)[0]


def _source(source: Specialisation, arch: str, options: Mapping[str, Any] | None = None) -> tuple[Any, dict, Any]:
    """(Triton's ASTSource, the compiler's options, the GPUTarget). Raises ArgumentError for an unknown option."""
    gpu = gpu_target(arch)
    stages = {} if source.num_stages is None else {"num_stages": source.num_stages}
    chosen: dict[str, Any] = {"num_warps": source.num_warps, **stages, **source.options, **(options or {})}
    known = _known_options(gpu.backend)
    unknown = sorted(set(chosen) - known)
    if unknown:
        raise ArgumentError("triton.compile", "options", unknown, f"options of {arch}: {', '.join(sorted(known))}")
    ast = _source_type(source.kernel)(
        fn=source.kernel,
        signature=_signature(source),
        constexprs=dict(source.constexprs),
        attrs=_attributes(source, gpu.backend),
    )
    return ast, chosen, gpu


def _source_type(kernel: Any) -> Any:
    from triton.compiler import ASTSource

    if not getattr(kernel, "is_gluon", lambda: False)():
        return ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def gpu_target(arch: str) -> Any:
    """Triton's name for ``arch``: "sm_90" or "gfx942"."""
    from triton.backends.compiler import GPUTarget

    if nvidia := re.fullmatch(r"sm_(\d+)[af]?", arch):
        return GPUTarget("cuda", int(nvidia[1]), 32)
    if amd := re.fullmatch(r"gfx(\d+)[0-9a-f]{2}", arch):
        return GPUTarget("hip", arch, 32 if int(amd[1]) >= 10 else 64)
    raise ArgumentError("triton.compile", "arch", repr(arch), "sm_NN or gfxNNN")


def _import_reasons() -> tuple[str, ...]:
    """Asked last: it loads triton, which nothing needs where another reason stands."""
    why = unimportable("triton", "triton.language")
    return () if why is None else (f"{why}; install the triton that torch {torch.__version__} comes with",)


def _interpreter_reasons() -> tuple[str, ...]:
    if not interpreting():
        return ("a CPU is served only by Triton's interpreter: set TRITON_INTERPRET=1 before triton is imported",)
    from importlib.metadata import version

    triton_version, numpy_version = version("triton"), version("numpy")
    if release(triton_version) == (3, 6) and release(numpy_version) >= (2, 4):
        # 3.6's interpreter turns a 1-element array into a loop bound, which numpy 2.4 refuses
        return (f"triton {triton_version}'s interpreter needs numpy < 2.4, found {numpy_version}",)
    return ()


@functools.cache
def _known_options(backend: str) -> frozenset[str]:
    if backend == "cuda":
        from triton.backends.nvidia.compiler import CUDAOptions as Options
    else:
        from triton.backends.amd.compiler import HIPOptions as Options
    return frozenset(Options.__dataclass_fields__)


def _signature(source: Specialisation) -> dict[str, str]:
    missing = [n for n in source.kernel.arg_names if n not in source.signature and n not in source.constexprs]
    extra = [n for n in (*source.signature, *source.constexprs) if n not in source.kernel.arg_names]
    if missing or extra:
        mismatch = f"missing {missing}, unknown {extra}"
        raise ArgumentError("triton.compile", "signature", mismatch, "the kernel's parameters")
    return {n: "constexpr" if n in source.constexprs else source.signature[n] for n in source.kernel.arg_names}


def _attributes(source: Specialisation, backend: str) -> dict[tuple[int], list[list[Any]]]:
    attributes: dict[tuple[int], list[list[Any]]] = {}
    for index, name in enumerate(source.kernel.arg_names):
        if name in source.constexprs:
            continue
        pointer = source.signature[name].startswith("*")
        hints: list[list[Any]] = []
        if name in source.divisible or (pointer and name not in source.unaligned):
            hints.append(["tt.divisibility", 16])
        if pointer and backend == "hip":
            # as the JIT does for tensors below 2 GiB: without it every access is a 64-bit global one, no buffer ops
            hints.append(["tt.pointer_range", 32])
        if hints:
            attributes[index,] = hints
    return attributes


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, device: torch.device, **meta: Any) -> None:
    """Launch a kernel on ``device``, on that device's current stream.

    ``args`` are the kernel's leading parameters, ``meta`` its constexprs and the compiler's options. Triton launches on
    the current device, so the tensors' device is made current where it is not. A failure of the toolchain is a
    CompileError; out of memory and illegal accesses rise as they are; a compilation during graph capture is a
    CaptureError.
    """
    if _recording.specialisations is not None:
        _recording.specialisations.append(specialise(kernel, args, meta))
        return
    route = redirect.current()
    if route is not None:
        route.launch_triton(kernel, grid, args, meta)
        return
    if "_ferryman_guard" not in kernel.__dict__:
        _install_guard(kernel)
    recording = replay.recording()
    if recording is not None:
        from ferryman.backends import triton_replay

        recording.add(triton_replay.step(kernel, grid, args, meta, recording.device))
        return
    if getattr(kernel, "uses_scratch", False):
        provide_scratch()
    try:
        if device.type == "cuda" and torch.cuda.current_device() != device.index and device.index is not None:
            with torch.cuda.device(device):
                kernel.run(*args, grid=grid, warmup=False, **meta)
        else:
            kernel.run(*args, grid=grid, warmup=False, **meta)
    except resource_errors() as error:
        # raised when the binary is loaded, at the first launch: too much shared memory, too many threads
        raise CompileError("triton", _kernel_name(kernel), _arch_of(device), str(error)) from error


class _Recording(threading.local):
    specialisations: list[Specialisation] | None = None


_recording = _Recording()


def recorded(calls: Iterable[Callable[[], object]]) -> list[Specialisation]:
    """Every distinct specialisation that ``calls`` would launch, without launching: run them on meta tensors.

    So the configurations compiled ahead of time are those of the launchers, by construction.
    """
    _recording.specialisations = []
    try:
        for call in calls:
            call()
        distinct = {repr(s): s for s in _recording.specialisations}
    finally:
        _recording.specialisations = None
    return list(distinct.values())


def strides(tensor: torch.Tensor | None, rank: int) -> tuple[int, ...]:
    """What a kernel takes for a tensor of ``rank`` dimensions that a call may leave out: zeros then."""
    return (0,) * rank if tensor is None else tensor.stride()


def specialise(kernel: Any, args: tuple[Any, ...], meta: Mapping[str, Any]) -> Specialisation:
    """The specialisation that Triton's JIT derives from these arguments (its rules, triton 3.6 runtime/jit.py)."""
    names = [parameter.name for parameter in kernel.params]
    bound = dict(zip(names, args, strict=False)) | {k: v for k, v in meta.items() if k in names}
    options = {k: v for k, v in meta.items() if k not in names}
    signature: dict[str, str] = {}
    constexprs: dict[str, Any] = {}
    unaligned, divisible = set(), set()
    for parameter in kernel.params:
        name = parameter.name
        value = bound.get(name, parameter.default)
        free = not parameter.do_not_specialize
        if parameter.is_constexpr or value is None or (free and type(value) is int and value == 1):
            constexprs[name] = value
        elif isinstance(value, torch.Tensor):
            signature[name] = "*" + _TYPES[value.dtype]
            if value.data_ptr() % 16:
                unaligned.add(name)
        elif isinstance(value, bool):
            signature[name] = "u1"
        elif isinstance(value, int):
            signature[name] = "i32" if -(2**31) <= value < 2**31 else "i64"
            if free and value % 16 == 0:
                divisible.add(name)
        else:
            signature[name] = "fp32"
    warps, stages = options.pop("num_warps", 4), options.pop("num_stages", None)
    return Specialisation(
        kernel, signature, constexprs, warps, stages, options, frozenset(unaligned), frozenset(divisible)
    )


def _kernel_name(kernel: Any) -> str:
    return str(kernel.fn.__name__)  # an interpreted function has no __name__ of its own


def _arch_of(device: torch.device) -> str:
    if device.type != "cuda":
        return device.type
    properties = torch.cuda.get_device_properties(device)
    return getattr(properties, "gcnArchName", "").split(":")[0] or f"sm_{properties.major}{properties.minor}"


def _install_guard(kernel: Any) -> None:
    """Wrap this kernel's own compile step, which a cached launch never reaches: the checks cost a launch nothing.

    Triton's hook for this (``knobs.runtime.jit_cache_hook``) is one global slot, which profilers and Inductor take.
    """
    compile_step = getattr(kernel, "_do_compile", None)  # an interpreted function has none
    if compile_step is not None:
        from ferryman.backends import triton_artefacts, triton_host, triton_reductions

        triton_host.serve()  # before the first launch, which loads Triton's driver

        def guarded(key: Any, signature: Any, device: Any, *rest: Any, **more: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                raise CaptureError(
                    f"triton kernel {_kernel_name(kernel)} would be compiled while a graph is being captured; "
                    "call the op once with these shapes and dtypes before capturing"
                )
            try:
                compiled = triton_artefacts.kept(kernel, key, signature, device, rest)  # once for each specialisation
                if compiled is None:
                    compiled = compile_step(key, signature, device, *rest, **more)
                    if (wrong := triton_reductions.refusal(compiled)) is not None:
                        kernel.device_caches[device][0].pop(key, None)  # or the next launch would take it from there
                        where = _arch_of(torch.device("cuda", device))
                        raise CompileError("triton", _kernel_name(kernel), where, wrong)
            except (MemoryError, OSError, torch.OutOfMemoryError, torch.AcceleratorError, FerrymanError):
                raise
            except Exception as error:
                where = _arch_of(torch.device("cuda", device))
                raise CompileError("triton", _kernel_name(kernel), where, f"{type(error).__name__}: {error}") from error
            return compiled

        kernel._do_compile = guarded
    else:
        from ferryman.backends import triton_bfloat16

        triton_bfloat16.mend_if_known()
    kernel._ferryman_guard = True
