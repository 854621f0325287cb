"""An NVIDIA device that is here stands in for an older one: it executes that one's Triton kernels through their PTX.

    with StandIn(target, torch.device("cuda", 0), profile=known) as here:   # target: target_of(profile("a100"))
        ...                                                 # launches of this thread are those of an A100
    here.evidence()     # "sm_80 PTX of the a100-sxm-80 configuration, executed on NVIDIA H200: _norm x3"

PTX for one compute capability runs on every later one. Assembled for the device that is here it keeps the older one's
instructions (sm_80: mma.sync and cp.async, neither wgmma nor TMA), tiles, stages and warps; what differs is the machine
code and the arithmetic of the units that execute it. Arch-specific PTX ("sm_90a") runs on its own arch alone.
"""

from __future__ import annotations

import hashlib
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ferryman.backends import code_objects, redirect, replay, replay_record
from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, TritonBackend, jit_source, specialise
from ferryman.backends.triton_runtime import provide_scratch, resource_errors
from ferryman.errors import BackendUnavailable, CompileError

ARCH_SPECIFIC = 90  # from this compute capability on Triton emits PTX that runs on no later one
_ASSEMBLER_SECONDS = 600
_LOG_LINES = 20  # it complains of every line that holds the same fault
_TARGET = re.compile(r"^\.target\s+(sm_\d+)([af]?)", re.MULTILINE)


@dataclass(frozen=True)
class Assembled:
    """A kernel's PTX for the older device, and the machine code that the device here has for it.

    ptx_target: what the PTX's own header says ("sm_80"). arch: the image's ("sm_90"). resources: those of the older
    device's own form (`triton_resources.of`). metadata: Triton's, of that form too.
    """

    kernel: str
    ptx: str
    ptx_target: str
    image: bytes
    arch: str
    resources: Mapping[str, int]
    metadata: Mapping[str, Any]


def capability(arch: str) -> int:
    """90 of "sm_90"."""
    match = re.fullmatch(r"sm_(\d+)[af]?", arch)
    if match is None:
        raise ValueError(f"{arch} is no NVIDIA arch")
    return int(match[1])


def assemble(source: Specialisation, target: Target, arch: str) -> Assembled:
    """Compile for ``target``, within its limits, and assemble that PTX for ``arch``, of the same capability or a later.

    Raises CompileError where either is refused: by Triton, by the target's shared memory, by the assembler.
    """
    compiled = TritonBackend().compile(source, None, target.arch, target)
    ptx = compiled.log
    directive = _TARGET.search(ptx)
    if directive is None or directive[1] != target.arch:
        said = "none" if directive is None else directive[1]
        raise CompileError("triton", source.name, target.arch, f"its PTX is for {said}; required: {target.arch}")
    own = f"{arch}{directive[2]}" if arch == target.arch else arch
    image = _assembled(source.name, ptx, own, bool(compiled.metadata.get("enable_fp_fusion", True)))
    try:
        code_objects.check(image, arch)
    except ValueError as error:
        raise CompileError("triton", source.name, arch, f"the assembler's image: {error}") from error
    return Assembled(source.name, ptx, directive[1], image, arch, compiled.resources, compiled.metadata)


def _assembled(kernel: str, ptx: str, arch: str, fused: bool) -> bytes:
    """Machine code of ``arch``, by the assembler that Triton itself calls, with its options."""
    from triton import knobs

    nvidia = knobs.nvidia
    newer = getattr(nvidia, "ptxas_blackwell", nvidia.ptxas)
    assembler = newer if capability(arch) >= 100 else nvidia.ptxas
    with tempfile.TemporaryDirectory(prefix="ferryman-ptx-") as name:
        source, image = Path(name) / "kernel.ptx", Path(name) / "kernel.cubin"
        source.write_text(ptx, encoding="utf-8")
        command = [assembler.path, *([] if fused else ["--fmad=false"]), f"--gpu-name={arch}", source, "-o", image]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_ASSEMBLER_SECONDS, check=False)
        if done.returncode:
            said = (done.stderr or done.stdout).splitlines()[:_LOG_LINES]
            raise CompileError("triton", kernel, arch, f"ptxas, exit code {done.returncode}: " + "\n".join(said))
        return image.read_bytes()


class StandIn:
    """The device ``device`` as an older one. As a context, this thread's launches are the older one's.

    ``launches`` counts (kernel, the PTX's own target, arch of the image) since `begin`. Triton kernels alone are
    redirected: SIMT kernels are refused, and what PyTorch launches is its own, of the device that is here.
    profile: the older device's, for dispatch. arch: of the device that is here ("sm_90").
    """

    on_device = True

    def __init__(self, target: Target, device: torch.device, arch: str, title: str, profile: Any = None) -> None:
        self.target, self.device, self.arch, self.title, self.profile = target, device, arch, title, profile
        self.launches: Counter[tuple[str, str, str]] = Counter()
        self._kernels: dict[str, tuple[Assembled, Any]] = {}
        self._open: list[ExitStack] = []

    def __enter__(self) -> StandIn:
        stack = ExitStack()
        # on autograd's own threads nothing is redirected: backward passes run on this one
        stack.enter_context(torch.autograd.set_multithreading_enabled(False))
        stack.callback(redirect.back, redirect.to(self))
        self._open.append(stack)
        return self

    def __exit__(self, *exception: Any) -> None:
        self._open.pop().close()

    def probe(self, backend: str, vendor: str) -> tuple[str, ...] | None:
        if backend == "triton" and vendor == self.target.vendor:
            return ()
        if backend in ("cuda", "hip"):
            return (f"{self.title} stands in for {self._name}: it executes Triton kernels alone",)
        return None

    def wrap(self, launcher: Callable[..., Any], over: Collection[int] = ()) -> Callable[..., Any]:
        return launcher

    def begin(self) -> None:
        self.launches.clear()

    def take(self) -> list[Any]:
        return []

    def evidence(self) -> str:
        targets = sorted({target for _, target, _ in self.launches}) or [self.target.arch]
        ran = ", ".join(f"{kernel} x{count}" for (kernel, _, _), count in sorted(self.launches.items()))
        route = f"{' and '.join(targets)} PTX of the {self._name} configuration, executed on {self.title}"
        return f"{route}: {ran or 'no kernel was launched'}"

    @property
    def _name(self) -> str:
        return self.target.arch if self.profile is None else str(self.profile.name)

    def launch(self, unit: Any, device: Any, grid: int, block: int, shared: int, args: tuple[int | float, ...]) -> None:
        (why,) = self.probe("cuda", self.target.vendor) or ()
        raise BackendUnavailable(f"{unit.name}: {why}")

    def launch_triton(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
        if replay.recording() is not None:
            raise replay_record.NotReplayable("launches that are redirected")
        if 0 in grid:
            return
        assembled, compiled = self._kernel(specialise(kernel, args, meta))
        bound = dict(zip(kernel.arg_names, args, strict=False)) | dict(meta)
        values = [bound.get(p.name, p.default) for p in kernel.params]
        if getattr(kernel, "uses_scratch", False):
            provide_scratch()
        with torch.cuda.device(self.device):
            try:
                run = compiled.run  # loads it
            except resource_errors() as error:
                raise CompileError(
                    "triton", assembled.kernel, f"{assembled.ptx_target} on {assembled.arch}", str(error)
                ) from error
            stream = torch.cuda.current_stream().cuda_stream
            run(*(*grid, 1, 1)[:3], stream, compiled.function, compiled.packed_metadata, None, None, None, *values)
        self.launches[assembled.kernel, assembled.ptx_target, assembled.arch] += 1

    def _kernel(self, source: Specialisation) -> tuple[Assembled, Any]:
        from ferryman.backends import triton_artefacts

        key = repr(source)
        if key not in self._kernels:
            assembled = assemble(source, self.target, self.arch)
            code = {"cubin": assembled.image, "ptx": assembled.ptx.encode()}
            digest = hashlib.sha256(assembled.image + assembled.ptx.encode()).hexdigest()
            jit = jit_source(source, self.target.arch)
            self._kernels[key] = (
                assembled,
                triton_artefacts.built(jit, assembled.kernel, code, assembled.metadata, digest),
            )
        return self._kernels[key]
