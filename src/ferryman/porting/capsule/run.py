"""One implementation on one prepared case, through the engine, with its outputs kept: what record and replay share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.triton import interpreting
from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.dispatch.select import View, refusals
from ferryman.ops.menu import Implementation
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging.parity import Prepared, check_cell
from ferryman.porting.judging.results import Cell, Verdict
from ferryman.porting.running.process import device_lost

Kernels = Mapping[tuple[str, str], Callable[..., Any]]  # (op, implementation) -> what runs in its launcher's place
ALL = "all"  # the case of a cell that stands for every case


@dataclass(frozen=True)
class Run:
    """The engine's verdict, and the outputs that it was about; none where the kernel was not run or raised."""

    cell: Cell
    outputs: tuple[Tensor, ...] = ()
    tf32: bool = False


def run_line(
    prepared: Prepared,
    line: Implementation,
    profile: Profile,
    kernel: Callable[..., Any] | None = None,
    times: int = 3,
) -> Run:
    """Run and judge. ``kernel`` replaces the implementation's launcher, under its declarations and conditions."""
    device = prepared.device
    gone = device_lost(device)
    if gone:
        return Run(
            not_run(prepared.primitive.name, line.name, device, prepared.dtype, prepared.case.name, gone, line=line)
        )
    view = View.of(prepared.primitive, prepared.args.values, profile)
    if kernel is not None and refusals(line, view, profile):
        kernel = None  # `check_cell` asks a kernel that it is handed for no conditions
    kept: list[tuple[Any, ...]] = []
    cell = check_cell(
        prepared.primitive,
        line,
        prepared.case,
        prepared.dtype,
        device,
        profile,
        prepared=prepared,
        times=times,
        kernel=kernel,
        keep=kept.append,
    )
    outputs = tuple(o.detach() for o in kept[0] if isinstance(o, Tensor)) if kept else ()
    whole = outputs if len(outputs) == len(prepared.declared) and not device_lost(device) else ()
    if cell.verdict == "PASS" and not whole:
        cell = cell.model_copy(update={"verdict": "NOT_RUN", "reason": "its outputs could not be kept"})
    return Run(cell, whole, bool(view.flags["tf32"]) and device.type == "cuda")


def output_hash(hashes: Sequence[str]) -> str | None:
    """One hash for all outputs of a run."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest() if hashes else None


def absent(line: Implementation, profile: Profile) -> list[str]:
    """Why an implementation cannot run in this process at all."""
    backend = registry.backends()[line.backend]
    if profile.vendor not in backend.vendors:
        return [f"{line.backend} does not serve {profile.vendor} devices"]
    if line.backend == "triton" and profile.vendor == "cpu" and not interpreting():
        return ["an interpreted kernel is no evidence about a device"]
    return list(registry.probe(line.backend, profile.vendor))


def not_run(
    op: str,
    implementation: str,
    device: torch.device,
    dtype: torch.dtype | str,
    case: str,
    reason: str,
    verdict: Verdict = "NOT_RUN",
    line: Implementation | None = None,
    capsule: str | None = None,
) -> Cell:
    return Cell(
        op=op,
        implementation=implementation,
        device=str(device),
        case=case,
        verdict=verdict,
        reason=reason,
        dtype=dtype if isinstance(dtype, str) else dtype_name(dtype),
        capsule=capsule,
        accumulation=line.accumulation if line else "fp32",
        roundings=sorted(line.roundings) if line else [],
    )
