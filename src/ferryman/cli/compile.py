"""`ferryman compile`: every kernel compiled for devices that are not here, judged, and kept for deployments."""

from __future__ import annotations

from collections import Counter, defaultdict
from pathlib import Path
from typing import Annotated

import typer

from ferryman.backends.artefacts import Manifest
from ferryman.cli import calls, output
from ferryman.errors import ArgumentError, FerrymanError
from ferryman.porting import aot
from ferryman.porting.aot.gates import poor_form
from ferryman.porting.inputs.fills import dtype_name

_MOST_REASONS = 20
_SPILLS = ("spills", "vgpr_spills", "sgpr_spills", "spill_stores")


def compile_(
    target: Annotated[
        list[str] | None,
        typer.Option(help="Profiles or arches, separated by commas (mi300x,h100,gfx90a,sm_100), or 'all'. Repeatable."),
    ] = None,
    op: Annotated[list[str] | None, typer.Option(help="Only the family of this op. Repeatable.")] = None,
    backend: Annotated[list[str] | None, typer.Option(help="Only triton, cuda or hip. Repeatable.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the artefacts and their manifest.json (FERRYMAN_ARTEFACTS).")
    ] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Only f32, f16 or bf16 of what depends on one. Repeatable.")
    ] = None,
    width: Annotated[
        list[int] | None, typer.Option(min=1, help="With --out: serve rows of this length, too. Repeatable.")
    ] = None,
    head_dim: Annotated[
        list[int] | None, typer.Option(min=1, help="With --out: serve heads of this length, too. Repeatable.")
    ] = None,
    jobs: Annotated[int | None, typer.Option(min=1, help="Processes at once; default: one a core, at most 8.")] = None,
    timeout: Annotated[float, typer.Option(min=1.0, help="Seconds for one kernel.")] = aot.TIMEOUT_SECONDS,
    as_json: Annotated[bool, typer.Option("--json", help="Print the manifest as JSON.")] = False,
) -> None:
    """Compile every Triton configuration that dispatch could choose, and every CUDA and HIP kernel, for --target.

    With --out also all that calls of models launch, whose rows are multiples of 64 up to 4096, of 256 up to 16384, and
    more (docs/compile.md). No device is needed. A kernel that its toolchain cannot compile is QUARANTINED, one that
    cannot run on the device or spills beyond what its author allowed is FAIL; either makes the exit code 1.
    """
    profiles = aot.profiles_for(target or [])
    if out is not None and out.exists() and not out.is_dir():
        raise ArgumentError("compile", "--out", f"{out}, a file", "the name of a folder")
    if out is None and (width or head_dim):
        raise ArgumentError("compile", "--width and --head-dim", "without --out", "a folder that serves such calls")
    names = None if dtype is None else [dtype_name(calls.dtype_of(name)) for name in dtype]
    usual = aot.Shapes()
    serving = aot.Shapes((*usual.widths, *(width or ())), (*usual.head_dims, *(head_dim or ())))
    with output.progress("compiling") as advance:
        compiled = aot.compile_all(
            profiles,
            ops=op,
            backends=backend,
            dtypes=names,
            jobs=jobs,
            timeout=timeout,
            serving=None if out is None else serving,
            progress=advance,
        )
    if out is not None:
        try:
            aot.write(compiled, out)
        except OSError as error:
            raise FerrymanError(f"{out} cannot be written: {error.strerror}; choose another --out") from error
    if as_json:
        output.say(compiled.manifest.model_dump_json(indent=1))
    else:
        _print(compiled)
        if out is not None:
            output.say(f"wrote {out}: FERRYMAN_ARTEFACTS={out} serves them where they match")
    counts = compiled.manifest.counts()
    if counts["FAIL"] or counts["QUARANTINED"]:
        raise typer.Exit(1)


def _print(compiled: aot.Compiled) -> None:
    manifest = compiled.manifest
    cached = sum(entry.cached for entry in manifest.entries)
    output.say(
        f"{len(manifest.entries)} kernels for {len(manifest.profiles)} targets in {manifest.seconds:.0f} s, "
        f"{cached} of them from the cache ({', '.join(f'{k} {v}' for k, v in sorted(manifest.toolchain.items()))})"
    )
    output.table(
        ["target", "arch", "backend", "COMPILED_ONLY", "FAIL", "QUARANTINED", "spilling", "poor form"],
        _rows(manifest),
        right=("COMPILED_ONLY", "FAIL", "QUARANTINED", "spilling", "poor form"),
    )
    built = [m for m in manifest.modules if m.file is not None]
    if built:
        output.say(f"{len(built)} of Triton's C modules (its driver's, launchers) for {built[0].abi}")
    if unbuilt := [m for m in manifest.modules if m.file is None]:
        output.say(f"{len(unbuilt)} of Triton's C modules are left to the first launch: {unbuilt[0].reason}")
    wrong = [entry for entry in manifest.entries if entry.verdict != "COMPILED_ONLY"]
    for entry in wrong[:_MOST_REASONS]:
        facts = {**entry.constexprs, **entry.options}
        given = ", ".join(f"{k}={v}" for k, v in facts.items())
        output.say(f"{entry.verdict} {entry.profile} {entry.kernel} {entry.dtype} ({given}): {entry.reason}")
    if len(wrong) > _MOST_REASONS:
        output.say(f"and {len(wrong) - _MOST_REASONS} more; the manifest has them all")
    poor_forms = Counter((e.profile, e.kernel, poor_form(e.gates)) for e in manifest.entries if poor_form(e.gates))
    for (name, kernel, why), count in poor_forms.most_common(_MOST_REASONS):
        output.say(f"poor form {name} {kernel}, {count} of them like this: {why}")
    for text in compiled.damaged:
        output.say(f"rebuilt: {text}")


def _rows(manifest: Manifest) -> list[list[object]]:
    counts: defaultdict[tuple[str, str, str], Counter[str]] = defaultdict(Counter)
    spilling: Counter[tuple[str, str, str]] = Counter()
    poor: Counter[tuple[str, str, str]] = Counter()
    for entry in manifest.entries:
        place = (entry.profile, entry.arch, entry.backend)
        counts[place][entry.verdict] += 1
        spilling[place] += any(entry.resources.get(name) for name in _SPILLS)
        poor[place] += poor_form(entry.gates) is not None
    verdicts = ("COMPILED_ONLY", "FAIL", "QUARANTINED")
    return [[*place, *(counts[place][v] for v in verdicts), spilling[place], poor[place]] for place in sorted(spilling)]
