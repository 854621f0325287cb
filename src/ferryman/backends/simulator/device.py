"""A device that is not here: launches of Triton and HIP kernels on CPU tensors are executed by the simulator.

    simulator = Simulator(target)      # target: dispatch.select.target_of(profile("mi300x"))
    y = simulator.wrap(triton_kernels.rms_norm)(x, weight, 1e-6, False, target)
    simulator.take()                   # what the sanitizer found

While it is active, `backends.triton.launch` and `backends.simt_runtime.runtime` come here. Memory that a kernel may
touch is what its arguments point to: the op's inputs, read-only, and what the launcher allocated.
"""

from __future__ import annotations

import functools
import hashlib
import struct
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ferryman.backends import redirect
from ferryman.backends.base import Target
from ferryman.backends.simulator import assembly
from ferryman.backends.simulator.findings import Finding
from ferryman.backends.simulator.memory import Region
from ferryman.backends.simulator.numerics import Assumptions
from ferryman.backends.simulator.program import ARCHES, BUDGET, Program, Report
from ferryman.errors import SimulationError

_PROGRAMS = 256
_FORMATS = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f", "fp64": "<d", "u1": "<b", "i1": "<b"}


class Simulator:
    """One simulated device. As a context, this thread's launches go to it, and dispatch takes it for the device.

    ``reports`` has a kernel's name and report for each launch since `take`. ``change`` gives the SIMT unit that runs in
    the place of one that is launched; what it makes is compiled for this process alone. profile: the device's, for
    dispatch. count: keep counters. Raises SimulationError for an arch that is not implemented.
    """

    on_device = False

    def __init__(
        self,
        target: Target,
        assumptions: Assumptions | None = None,
        *,
        sanitize: bool = True,
        count: bool = False,
        budget: int = BUDGET,
        profile: Any = None,
    ) -> None:
        if target.arch not in ARCHES:
            raise SimulationError(f"the simulator executes {', '.join(ARCHES)}; {target.arch} is none of them")
        self.target, self.assumptions = target, assumptions or Assumptions()
        self.sanitize, self.count, self.budget, self.profile = sanitize, count, budget, profile
        self.reports: list[tuple[str, Report]] = []
        self.change: Callable[[Any], Any] = lambda unit: unit
        self._inputs: list[Region] = []
        self._mode: _Allocations | None = None
        self._before: list[redirect.Route | None] = []

    def __enter__(self) -> Simulator:
        self._before.append(redirect.to(self))
        return self

    def __exit__(self, *exception: Any) -> None:
        redirect.back(self._before.pop())

    def probe(self, backend: str, vendor: str) -> tuple[str, ...] | None:
        """Nothing stands against the backends whose launches can come here; the others are asked themselves."""
        return () if vendor == self.target.vendor and backend in ("triton", "hip") else None

    def begin(self) -> None:
        self.reports.clear()

    def evidence(self) -> str:
        return f"its {self.target.arch} code, executed by the simulator"

    def take(self) -> list[Finding]:
        """The findings of all launches since the last call."""
        findings = [f for _, report in self.reports for f in report.findings]
        self.reports.clear()
        return findings

    def wrap(self, launcher: Callable[..., Any], over: Collection[int] = ()) -> Callable[..., Any]:
        """``launcher`` as a function of the same arguments that runs here; its tensors are inputs, read-only but for
        those at ``over``."""

        @functools.wraps(launcher)
        def run(*args: Any) -> Any:
            before = self._inputs, self._mode
            self._inputs = [_extent(a, f"argument {i}", i in over) for i, a in enumerate(args) if _counts(a)]
            self._mode = _Allocations()
            try:
                with self, self._mode:
                    return launcher(*args)
            finally:
                self._inputs, self._mode = before

        return run

    # ------------------------------------------------------------------------------------------------ launches

    def launch_triton(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
        from ferryman.backends.triton import specialise

        source = specialise(kernel, args, meta)
        program, resources = _triton_program(repr(source), source, self.target, self.assumptions)
        names = [p.name for p in kernel.params]
        given = dict(zip(names, args, strict=False)) | {k: v for k, v in meta.items() if k in names}
        values = [(given[n], source.signature[n]) for n in names if n in source.signature]
        block = _triton_arguments(program, values)
        tensors = {n: v for n, v in given.items() if _counts(v)}
        regions = self._regions([_extent(t, n, True) for n, t in tensors.items()])
        shape = (*(int(g) for g in grid), 1, 1)[:3]
        self._run(program, (shape[0], shape[1], shape[2]), resources["threads"], block, regions, resources["shared"])

    def launch(
        self, unit: Any, device: torch.device, grid: int, block: int, shared: int, args: tuple[int | float, ...]
    ) -> None:
        """A SIMT unit, as `simt.Runtime` has it: pointers are integers."""
        asked, unit = unit, self.change(unit)
        program = _unit_program(unit, self.target.arch, self.assumptions, unit is asked)
        layout = program.kernel.arguments
        explicit = [a for a in layout if not str(a[".value_kind"]).startswith("hidden")]
        if len(explicit) != len(args):
            raise SimulationError(f"{unit.name}: {len(args)} arguments, its metadata has {len(explicit)}")
        packed = bytearray(int(program.kernel.metadata.get(".kernarg_segment_size", 0)))
        for value, entry in zip(args, explicit, strict=True):
            form = "<f" if isinstance(value, float) else "<q"
            if struct.calcsize(form) != entry[".size"]:
                raise SimulationError(f"{unit.name}: an argument of {entry['.size']} bytes got {value!r}")
            struct.pack_into(form, packed, entry[".offset"], value)
        if self._mode is None:
            raise SimulationError(f"{unit.name}: launched outside Simulator.wrap, which knows what its pointers are")
        known = [*self._inputs, *self._mode.regions(self._inputs)]
        pointed = [r for r in known if any(type(a) is int and r.start <= a < r.end for a in args)]
        self._run(program, (grid, 1, 1), block, bytes(packed), self._regions(pointed), shared)

    def _regions(self, regions: Iterable[Region]) -> list[Region]:
        """Disjoint regions: those that overlap become one, read-only where a read-only input is among them."""
        merged: list[Region] = []
        for region in sorted(regions):
            only = any(i.start < region.end and region.start < i.end for i in self._inputs if not i.writable)
            region = region._replace(writable=region.writable and not only)
            if merged and region.start < merged[-1].end:
                last = merged.pop()
                names = last.name if region.name in last.name.split("+") else f"{last.name}+{region.name}"
                region = Region(last.start, max(last.end, region.end), names, last.writable and region.writable)
            merged.append(region)
        return merged

    def _run(
        self,
        program: Program,
        grid: tuple[int, int, int],
        threads: int,
        arguments: bytes,
        regions: list[Region],
        shared: int,
    ) -> None:
        if 0 in grid:
            return
        report = program.run(
            grid,
            threads,
            arguments,
            regions,
            dynamic_lds=shared,
            lds_limit=self.target.shared_memory,
            sanitize=self.sanitize,
            count=self.count,
            budget=self.budget,
        )
        self.reports.append((program.kernel.name, report))


def _counts(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() > 0


def _extent(tensor: Tensor, name: str, writable: bool) -> Region:
    """The addresses from a tensor's first element to its last."""
    last = sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return Region(start, start + (last + 1) * tensor.element_size(), name, writable)


class _Allocations(TorchDispatchMode):
    """Storages that appear while a launcher runs. They are held until the end, so that no address comes back."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._tensors: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for one in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(one, Tensor):
                self._tensors.append(one)
        return result

    def regions(self, inputs: list[Region]) -> list[Region]:
        regions: dict[int, Region] = {}
        for i, tensor in enumerate(self._tensors):
            storage = tensor.untyped_storage()
            start, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
            if end > start and not any(r.start < end and start < r.end for r in inputs):
                regions[start] = Region(start, end, f"tensor {i} {tuple(tensor.shape)}")
        return list(regions.values())


@functools.lru_cache(maxsize=_PROGRAMS)
def _decoded(text: str, name: str, arch: str, assumptions: Assumptions) -> Program:
    kernels = assembly.kernels(text)
    if name not in kernels:
        raise SimulationError(f"the assembly has no kernel {name}; it has {', '.join(kernels)}")
    return Program(kernels[name], arch, assumptions)


_compiled: dict[str, tuple[str, str, dict[str, int]]] = {}


def _triton_program(key: str, source: Any, target: Target, assumptions: Assumptions) -> tuple[Program, dict[str, int]]:
    from ferryman.backends.triton import TritonBackend

    full = hashlib.sha256(f"{target}\0{key}".encode()).hexdigest()
    if full not in _compiled:
        artefact = TritonBackend().compile(source, None, target.arch, target)
        _compiled[full] = artefact.log, artefact.kernel, dict(artefact.resources)
    text, name, resources = _compiled[full]
    return _decoded(text, name, target.arch, assumptions), resources


def _unit_program(unit: Any, arch: str, assumptions: Assumptions, keep: bool) -> Program:
    from ferryman.backends import simt_offline

    return _decoded(simt_offline.assembly(unit, arch, keep), unit.name, arch, assumptions)


def _triton_arguments(program: Program, values: list[tuple[Any, str]]) -> bytes:
    """The argument block: the kernel's parameters in order, at the offsets of its metadata; what Triton adds behind
    them (scratch pointers) is null."""
    layout = program.kernel.arguments
    packed = bytearray(int(program.kernel.metadata.get(".kernarg_segment_size", 0)))
    if len(values) > len(layout):
        raise SimulationError(f"{program.kernel.name}: {len(values)} arguments, its metadata has {len(layout)}")
    for (value, kind), entry in zip(values, layout, strict=False):
        if kind.startswith("*"):
            form, value = "<Q", 0 if value is None else value.data_ptr()
        else:
            form = _FORMATS[kind]
        if struct.calcsize(form) != entry[".size"]:
            raise SimulationError(f"{program.kernel.name}: {kind} for an argument of {entry['.size']} bytes")
        struct.pack_into(form, packed, entry[".offset"], value)
    return bytes(packed)
