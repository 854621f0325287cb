"""Record a capsule: every op, implementation, case and dtype on this machine, judged, with outputs and timings."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ferryman.device_profiles import Profile, detect
from ferryman.dispatch import registry
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.capsule.cases import derived, hashes, recorded, small, turning
from ferryman.porting.capsule.container import digest
from ferryman.porting.capsule.contents import (
    TILE,
    CaseRecord,
    InputRecord,
    Manifest,
    OutputRecord,
    RunRecord,
    dumps,
)
from ferryman.porting.capsule.machine import machine
from ferryman.porting.capsule.run import (
    ALL,
    Kernels,
    absent,
    not_run,
    run_line,
)
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import SEED, Prepared, prepare
from ferryman.porting.judging.results import Cell, Results, Timing, WorstElement, environment, results
from ferryman.porting.running import timing
from ferryman.porting.running.cells import dtypes_of, tier_cases
from ferryman.porting.running.process import device_lost, placed, quiet
from ferryman.porting.running.runner import Progress, compile_ahead

WHOLE_BYTES = 2048  # an output up to here is stored whole
SAMPLE_BYTES = 1024  # of a larger one


def record(
    ops: Iterable[str] | None = None,
    device: torch.device | str | None = None,
    dtypes: Iterable[str | torch.dtype] | None = None,
    tier: str | None = None,
    seed: int = SEED,
    progress: Progress | None = None,
    *,
    backends: Iterable[str] | None = None,
    kernels: Kernels | None = None,
    jobs: int = 1,
) -> bytes:
    """The bytes of a capsule (`ferryman.porting.capsule.contents.save` writes them).

    ops, dtypes, backends: names; None is all. tier: "small" or "standard" (which includes small); None is "standard" on
    an accelerator. kernels: (op, implementation) -> what runs in the place of its launcher, under its declarations.
    jobs: where more than one, so many processes compile the kernels first. Raises UnknownName for a name that is not
    there, CapsuleError where the capsule would be too large.
    """
    profile = detect(device)
    place = placed(device)
    tier = tier or ("small" if place.type == "cpu" else "standard")
    names = list(registry.primitives()) if ops is None else [registry.primitive(op).name for op in ops]
    wanted = None if backends is None else set(backends)
    for name in wanted or ():
        registry.check_requested(name)
    if jobs > 1:
        compile_ahead(names, wanted, place, dtypes_of(dtypes), tier, seed, jobs, progress)
    names = [name for name in dict.fromkeys(names) if list(registry.asked(name, wanted))]
    recorder = _Recorder(place, profile, dtypes_of(dtypes), tier, seed, dict(kernels or {}), progress)
    recorder.total = sum(len(tier_cases(registry.primitive(n), tier)) for n in names) * len(recorder.dtypes)
    with quiet():
        for name in names:
            recorder.op(registry.primitive(name), list(registry.asked(name, wanted)))
    return recorder.finish()


class _Recorder:
    def __init__(
        self,
        device: torch.device,
        profile: Profile,
        dtypes: tuple[torch.dtype, ...],
        tier: str,
        seed: int,
        kernels: dict[tuple[str, str], Callable[..., Any]],
        progress: Progress | None,
    ) -> None:
        self.device, self.profile, self.dtypes, self.tier, self.seed = device, profile, dtypes, tier, seed
        self.kernels, self.progress = kernels, progress
        self.total = self.done = 0
        self.cells: list[Cell] = []
        self.timings: list[Timing] = []
        self.tensors: dict[str, Tensor] = {}
        self.cases: list[CaseRecord] = []
        self.inputs: list[InputRecord] = []
        self.runs: list[RunRecord] = []
        self.machine = machine(device)
        self.began = time.perf_counter()

    def op(self, primitive: Primitive, lines: list[Implementation]) -> None:
        here, gone = [], None
        for line in lines:
            why = absent(line, self.profile)
            if why:
                self.cells += [
                    not_run(primitive.name, line.name, self.device, d, ALL, "; ".join(why), line=line)
                    for d in self.dtypes
                ]
            else:
                here.append(line)
        for case in tier_cases(primitive, self.tier):
            self.cases.append(recorded(primitive, case))
            for dtype in self.dtypes:
                gone = gone or device_lost(self.device)
                if gone:
                    self.cells += [
                        not_run(primitive.name, x.name, self.device, dtype, case.name, gone, line=x) for x in here
                    ]
                else:
                    self._input(primitive, case, dtype, here)
                self.done += 1
                if self.progress is not None:
                    self.progress(self.done, self.total, primitive.name)
        self.timings += timing.of_right_ones(
            primitive, here, self.dtypes, self.device, self.profile, self.seed, self.cells, self.kernels
        )

    def _input(self, primitive: Primitive, case: Case, dtype: torch.dtype, lines: list[Implementation]) -> None:
        try:
            prepared = prepare(primitive, case, dtype, self.device, self.seed)
        except torch.OutOfMemoryError as error:
            why = f"the oracle ran out of memory: {str(error).splitlines()[0][:300]}"
            self.cells += [not_run(primitive.name, x.name, self.device, dtype, case.name, why, line=x) for x in lines]
            return
        saved = derived(primitive, prepared.exact)
        large = {name: tensor for name, tensor in saved.items() if not small(tensor)}
        turns = turning(primitive, case, dtype, self.seed, large)
        self.inputs.append(
            InputRecord.model_validate(
                {
                    "case": len(self.cases) - 1,
                    "dtype": dtype_name(dtype),
                    "hashes": hashes(prepared.exact),
                    "stored": {name: self._store(tensor) for name, tensor in saved.items() if name not in large},
                    "patched": {
                        name: {
                            "at": self._store(at),
                            "values": self._store(saved[name].reshape(-1)[at.to(saved[name].device)]),
                        }
                        for name, at in turns.items()
                    },
                }
            )
        )
        for line in lines:
            run = run_line(prepared, line, self.profile, self.kernels.get((primitive.name, line.name)))
            self.cells.append(run.cell)
            if run.outputs:
                outputs = [
                    self._output(prepared, name, out, run.cell.worst)
                    for name, out in zip(primitive.outputs, run.outputs, strict=True)
                ]
                at = {"input": len(self.inputs) - 1, "cell": len(self.cells) - 1}
                self.runs.append(RunRecord(**at, tf32=run.tf32, outputs=outputs))

    def _output(self, prepared: Prepared, name: str, out: Tensor, worst: WorstElement | None) -> OutputRecord:
        whole, tiles, kept = digest(out), None, out
        if out.numel() * out.element_size() > WHOLE_BYTES:
            place = f"{prepared.primitive.name}/{prepared.case.name}/{dtype_name(out.dtype)}/{name}"
            at = _flat(worst.index, out.shape) if worst is not None and worst.output == name else None
            tiles = sampled(place, out.numel(), SAMPLE_BYTES // out.element_size() // TILE, at)
            kept = elements(out, tiles)
        return OutputRecord(
            name=name,
            dtype=dtype_name(out.dtype),
            shape=list(out.shape),
            hash=whole,
            stored=self._store(kept),
            tiles=tiles,
        )

    def _store(self, tensor: Tensor) -> str:
        """Keep a tensor once, however many refer to it."""
        name = digest(tensor)
        if name not in self.tensors:
            self.tensors[name] = tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
        return name

    def finish(self) -> bytes:
        timings = timing.slowest(self.cells) if self.device.type == "cpu" else self.timings
        seconds = round(time.perf_counter() - self.began, 3)
        document = results(environment(self.device, self.profile, self.seed, self.tier, seconds), self.cells, timings)
        manifest = Manifest(
            results=as_data(document), machine=self.machine, cases=self.cases, inputs=self.inputs, runs=self.runs
        )
        return dumps(manifest, self.tensors)


def as_data(document: Results) -> dict[str, Any]:
    """A result document as JSON values, without what is as the schema has it by default."""
    short = document.model_dump(mode="json", exclude_defaults=True)
    return {"schema_version": document.schema_version, "kind": document.kind, **short}


def _flat(index: list[int], shape: torch.Size) -> int:
    flat = 0
    for i, n in zip(index, shape, strict=True):
        flat = flat * n + i
    return flat


def sampled(place: str, count: int, most: int, at: int | None = None) -> list[int]:
    """Which tiles are stored: the first, the last, the one that holds element ``at``, and others by a hash of the
    place, so that every implementation and machine shows the same ones."""
    tiles = (count - 1) // TILE + 1
    chosen = {0, tiles - 1} | ({at // TILE} if at is not None else set())
    turn = 0
    while len(chosen) < min(most, tiles):
        word = hashlib.blake2b(f"{place}/{turn}".encode(), digest_size=8).digest()
        chosen.add(int.from_bytes(word, "little") % tiles)
        turn += 1
    return sorted(chosen)


def elements(tensor: Tensor, tiles: list[int]) -> Tensor:
    """The elements of some tiles, in order."""
    return tensor.reshape(-1)[positions(tensor.numel(), tiles).to(tensor.device)]


def positions(count: int, tiles: list[int]) -> Tensor:
    """Where they lie, counted in row-major order; the last tile may be short."""
    at = (torch.tensor(tiles)[:, None] * TILE + torch.arange(TILE)).reshape(-1)
    return at[at < count]
