"""What kernels do on a simulated device, counted: instruction mix, bytes moved, coalescing, LDS conflicts, occupancy.

One case of each op x implementation runs; the document has an entry for each, with one record for each launch. Counts
are of the compiled code: no time follows from them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from ferryman.backends.triton import interpreting
from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.dispatch.select import View, refusals, target_of
from ferryman.errors import ArgumentError, BackendUnavailable, CompileError, SimulationError, UnknownName
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.inputs.cases import materialise
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.results import Environment, Name, environment
from ferryman.porting.running.cells import tier_cases
from ferryman.porting.running.simulated_route import NAME, SERVES, require

if TYPE_CHECKING:
    from ferryman.backends.simulator.counters import Counters

SCHEMA_VERSION = 1


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class AccessCount(_Model):
    """One load, store or atomic of the program, over all its executions."""

    line: int
    instruction: str
    waves: int
    bytes: int = Field(description="that waves asked for, each byte once in an instruction")
    lines: int = Field(description="cache lines of 128 bytes that waves touched")
    efficiency: float = Field(description="lines that the bytes need, over those touched: 1 is coalesced")


class Launch(_Model):
    """One kernel's launch."""

    kernel: str
    waves: int
    wave_instructions: int
    mix: dict[str, int] = Field(description="wave-instructions by chapter of the ISA manual")
    matrix: dict[str, int] = Field(description="matrix instructions by name")
    bytes: int
    efficiency: float
    accesses: list[AccessCount]
    lds_cycles: int
    lds_conflicts: int = Field(description="of the LDS cycles, those beyond the least")
    occupancy: float = Field(description="waves that a SIMD can hold")
    lds_bytes: int = Field(description="of a workgroup")
    registers: int = Field(description="vector and accumulation registers of a lane")
    spills: int = Field(description="vector registers that were spilled")


class Entry(_Model):
    """One implementation of one op on one case; ``reason`` says why there are no launches."""

    op: Name
    implementation: Name
    dtype: Name
    case: str
    least_bytes: float | None = Field(default=None, description="the op's least traffic: each tensor once")
    launches: list[Launch] = []
    reason: str | None = None


class Counted(_Model):
    """The document of `ferryman counters`."""

    schema_version: int = SCHEMA_VERSION
    kind: Literal["ferryman-counters"] = "ferryman-counters"
    environment: Environment
    entries: list[Entry]


def compiling() -> None:
    """Make this process compile Triton rather than interpret it. Raises BackendUnavailable where it is too late."""
    if interpreting():
        os.environ["TRITON_INTERPRET"] = "0"  # heard where triton is not imported yet
    if interpreting():
        raise BackendUnavailable("this process has imported triton with TRITON_INTERPRET=1; start one without it")


def largest(primitive: Primitive) -> Case:
    """The small case with the most elements that is no exact probe; the first of equals."""
    cases = tier_cases(primitive, "small")
    return max([c for c in cases if not c.exact] or cases, key=_elements)


def _elements(case: Case) -> int:
    return sum(math.prod(a.shape) for a in case.args.values() if isinstance(a, TensorSpec))


def case_named(primitives: Sequence[Primitive], name: str) -> dict[str, Case]:
    """The case of that name of each op that has one. Raises UnknownName if none has."""
    known = {p.name: {c.name: c for c in tier_cases(p, "standard")} for p in primitives}
    by_op = {op: cases[name] for op, cases in known.items() if name in cases}
    if not by_op:
        raise UnknownName("case", name, {n for cases in known.values() for n in cases})
    return by_op


def run(
    known: Profile,
    ops: Iterable[str] | None = None,
    backends: Iterable[str] | None = None,
    dtype: torch.dtype = torch.bfloat16,
    case: str | None = None,
    seed: int = 0,
    progress: Callable[[int, int, str], None] | None = None,
) -> Counted:
    """Count one case of every requested op x implementation on a device of ``known``'s arch that is not here.

    backends: triton, hip; None is both. case: None is each op's `largest`. Raises ArgumentError for a device without a
    simulator or another backend, UnknownName for a name that is not there, BackendUnavailable as `compiling` does.
    """
    require(known, "counters")
    wanted = tuple(backends) if backends is not None else SERVES
    for name in wanted:
        registry.check_requested(name)
        if name.partition(".")[0] not in SERVES:
            raise ArgumentError("counters", "--backend", name, " or ".join(SERVES))
    names = list(registry.primitives()) if ops is None else list(ops)
    primitives = [registry.primitive(op) for op in dict.fromkeys(names)]
    cases = {p.name: largest(p) for p in primitives} if case is None else case_named(primitives, case)
    compiling()
    lines = [(p, line) for p in primitives if p.name in cases for line in registry.asked(p.name, wanted)]
    entries = []
    for index, (primitive, line) in enumerate(lines):
        entries.append(count(primitive, line, cases[primitive.name], dtype, known, seed))
        if progress is not None:
            progress(index + 1, len(lines), f"{primitive.name} {line.name}")
    facts = environment(torch.device("cpu"), known, seed, "small")
    facts = facts.model_copy(update={"device": NAME, "device_name": f"{known.title}, simulated"})
    return Counted(environment=facts, entries=entries)


def count(
    primitive: Primitive, line: Implementation, case: Case, dtype: torch.dtype, known: Profile, seed: int = 0
) -> Entry:
    """One run with counters; what cannot run is an entry with its reason."""
    from ferryman.backends.simulator.device import Simulator

    args = materialise(case, primitive, dtype, seed)
    least = primitive.cost(*args).bytes
    entry = Entry(
        op=primitive.name, implementation=line.name, dtype=dtype_name(dtype), case=case.name, least_bytes=least
    )
    with Simulator(target_of(known), sanitize=False, count=True, profile=known) as simulator:
        refused = refusals(line, View.of(primitive, args, known), known)
        if refused:
            return entry.model_copy(update={"reason": "; ".join(refused)})
        try:
            with torch.no_grad():
                registry.launcher(line)(*args, target_of(known))
        except (CompileError, SimulationError) as error:
            return entry.model_copy(update={"reason": str(error).splitlines()[0]})
        launches = [_launch(name, report.counters) for name, report in simulator.reports if report.counters is not None]
        findings = simulator.take()
    return entry.model_copy(update={"launches": launches, "reason": str(findings[0]) if findings else None})


def _launch(kernel: str, counters: Counters) -> Launch:
    accesses = [
        AccessCount(
            line=line,
            instruction=counters.names[line],
            waves=a.waves,
            bytes=a.bytes,
            lines=a.lines,
            efficiency=a.efficiency,
        )
        for line, a in sorted(counters.accesses.items())
    ]
    matrix = {name: n for name, n in counters.mnemonics.items() if "_mfma_" in name}
    return Launch(
        kernel=kernel,
        waves=counters.waves,
        wave_instructions=sum(counters.mix.values()),
        mix=dict(counters.mix.most_common()),
        matrix=matrix,
        bytes=counters.bytes_moved,
        efficiency=counters.efficiency,
        accesses=accesses,
        lds_cycles=counters.lds_cycles,
        lds_conflicts=counters.conflicts,
        occupancy=counters.occupancy,
        lds_bytes=counters.lds_bytes,
        registers=counters.resource("vgpr_count"),
        spills=counters.resource("vgpr_spill_count"),
    )
