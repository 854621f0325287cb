"""`ferryman counters`: what kernels do on an AMD device that is not here, counted by executing their code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ferryman.cli import documents, output
from ferryman.cli.calls import dtype_of
from ferryman.device_profiles import resolve
from ferryman.porting.running import counting
from ferryman.porting.running.counting import Counted, Entry, Launch

_HEADERS = (
    "op",
    "implementation",
    "kernel",
    "waves",
    "instructions",
    "mix",
    "matrix",
    "bytes",
    "x least",
    "coalesced",
    "LDS conflicts",
    "waves/SIMD",
    "registers",
)
_LEGEND = """instructions: that waves executed. bytes: that waves asked of global memory, each once in an instruction;
x least: over the op's own minimum, each tensor once. coalesced: cache lines that these bytes need, over those touched.
LDS conflicts: share of LDS cycles beyond the least. waves/SIMD: that registers, LDS and workgroups leave room for."""


def counters(
    op: Annotated[list[str] | None, typer.Option(help="Only this op. Repeatable.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="triton or hip; default: both. Repeatable.")] = None,
    dtype: Annotated[str, typer.Option(help="f32, f16 or bf16.")] = "bf16",
    case: Annotated[
        str | None, typer.Option(help="A case of the op; default: its largest small one that is no exact probe.")
    ] = None,
    device: Annotated[str, typer.Option(help="mi300x or mi355x.")] = "mi300x",
    out: Annotated[Path | None, typer.Option(help="Write the JSON document to this file.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the document as JSON.")] = False,
) -> None:
    """Run one case of each op x implementation on a simulated AMD device, and count what its kernels do."""
    with output.progress("counting") as advance:
        document = counting.run(resolve(device), op, backend, dtype_of(dtype), case, progress=advance)
    text = document.model_dump_json(indent=1)
    if out is not None:
        documents.write(out, text)
    if as_json:
        output.say(text)
    else:
        _print(document)


def _print(document: Counted) -> None:
    facts = document.environment
    output.say(f"{facts.device_name} ({facts.profile}, {facts.arch}), counted in the simulator")
    rows = [_row(entry, launch) for entry in document.entries for launch in entry.launches]
    if rows:
        output.table(_HEADERS, rows, right=_HEADERS[3:5] + _HEADERS[7:])
        output.say()
        output.say(_LEGEND)
    cases = dict.fromkeys((e.op, e.case, e.dtype) for e in document.entries)
    output.say("cases: " + ", ".join(f"{op} {case} {dtype}" for op, case, dtype in cases))
    for entry in document.entries:
        if entry.reason is not None:
            output.say(f"{entry.op} {entry.implementation} {entry.case}: {entry.reason}")


def _row(entry: Entry, launch: Launch) -> tuple[str, ...]:
    total = launch.wave_instructions or 1
    mix = " ".join(f"{group} {100 * n / total:.0f}%" for group, n in launch.mix.items())
    matrix = " ".join(f"{n} {name.removeprefix('v_mfma_')}" for name, n in launch.matrix.items())
    share = f"{100 * launch.lds_conflicts / launch.lds_cycles:.0f}%" if launch.lds_cycles else "-"
    ratio = f"{launch.bytes / entry.least_bytes:.2f}" if entry.least_bytes else "-"
    spilled = f" ({launch.spills} spilled)" if launch.spills else ""
    return (
        entry.op,
        entry.implementation,
        launch.kernel,
        str(launch.waves),
        str(launch.wave_instructions),
        mix,
        matrix or "-",
        output.size(launch.bytes) or "-",
        ratio,
        f"{100 * launch.efficiency:.0f}%",
        share,
        f"{launch.occupancy:g}",
        f"{launch.registers}{spilled}",
    )
