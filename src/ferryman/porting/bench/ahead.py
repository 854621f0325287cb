"""What many cells compile, compiled before any of them is timed, by several processes at once.

The processes share a folder. Each takes the next cell that none has taken: first the kernels of every cell, each of
which is launched once, since Triton keeps on disk what it compiled; then what serves prepared calls only (Inductor
keeps that on disk, too). A process that is killed leaves what it said of the cells before.
"""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import torch

from ferryman.dispatch import preparing, registry
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.bench import grid, rotation, runner
from ferryman.porting.running.process import device_lost, failure

Part = Literal["kernels", "prepared"]
PARTS: tuple[Part, ...] = get_args(Part)
_COMPILED_BY_PYTORCH = ("torch", "definition")  # nothing of theirs is compiled for a call


@dataclasses.dataclass(frozen=True)
class Done:
    """One part of one cell: what a process said of it."""

    part: Part
    cell: int
    seconds: float
    failed: str | None = None
    wants_preparing: bool = False  # of a cell's kernels: whether the other part is wanted, too


def compile_cells(folder: Path, name: str, plan: runner.Plan, cells: Sequence[tuple[int, Primitive, Case]]) -> None:
    """Compile what cells need that no other process has taken. name: this process's, of a file in the folder."""
    with (folder / f"{name}.jsonl").open("w", encoding="utf-8") as file:
        for part in PARTS:
            for index, op, case in cells:
                start, wants, failed = time.monotonic(), False, None
                try:
                    wants = wants_preparing(plan, op, case)
                    if (part == "prepared" and not wants) or not _taken(folder, part, index):
                        continue
                    failed = _kernels(plan, op, case) if part == "kernels" else _prepared(plan, op, case)
                except Exception as error:  # noqa: BLE001 - no room beside the others, mostly: its own turn tells
                    failed = failure(error, plan.device)
                if plan.device.type == "cuda":
                    if (lost := device_lost(plan.device)) is not None:
                        raise SystemExit(f"the device serves nothing more: {lost}")
                    torch.cuda.empty_cache()
                done = Done(part, index, round(time.monotonic() - start, 3), failed, wants)
                file.write(json.dumps(dataclasses.asdict(done)) + "\n")
                file.flush()


def wants_preparing(plan: runner.Plan, op: Primitive, case: Case) -> bool:
    """Whether some implementation would serve the cell once it was compiled for it. No data is made."""
    if all(line.prepare is None for line in registry.implementations(op.name)):
        return False
    return bool(preparing.preparable(op, grid.on_meta(op, case, plan.dtype), plan.profile, plan.implementations))


def _taken(folder: Path, part: Part, index: int) -> bool:
    """Whether this process is the one that takes a part of a cell."""
    try:
        os.close(os.open(folder / f"{part}-{index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


@torch.no_grad()
def _kernels(plan: runner.Plan, op: Primitive, case: Case) -> str | None:
    args = grid.inputs(op, case, plan.dtype, plan.seed, plan.device)
    backend_of = {line.name: line.backend for line in registry.implementations(op.name)}
    contenders = runner.implementations(dataclasses.replace(plan, prepares=False), op, args)
    failures = []
    for contender in [*contenders, *runner.own_plans(plan, op, args)]:
        if contender.skipped is not None or backend_of.get(contender.name) in _COMPILED_BY_PYTORCH:
            continue
        try:
            contender.call_of(rotation.spared(op, args))()
        except RuntimeError as error:  # the others are compiled all the same
            failures.append(f"{contender.name}: {failure(error, plan.device)}")
    return "; ".join(failures) or None


@torch.no_grad()
def _prepared(plan: runner.Plan, op: Primitive, case: Case) -> str | None:
    args = grid.inputs(op, case, plan.dtype, plan.seed, plan.device)
    _, failed = preparing.ready(op, args, plan.profile, plan.implementations)
    return "; ".join(f"{name}: {error}" for name, error in failed.items()) or None


def done(folder: Path) -> list[Done]:
    """What the processes of a folder have said so far; a last line that was cut off is none."""
    return [one for file in sorted(folder.glob("*.jsonl")) for one in _read(file)]


def _read(file: Path) -> Iterator[Done]:
    for line in file.read_text(encoding="utf-8").splitlines():
        try:
            raw: dict[str, Any] = json.loads(line)
        except json.JSONDecodeError:
            return
        yield Done(**raw)


def ready(said: Sequence[Done], part: Part) -> set[int]:
    """Cells of which a part was compiled without failure."""
    return {one.cell for one in said if one.part == part and one.failed is None}


def described(said: Sequence[Done], cells: int, seconds: float) -> str:
    """What came of it, in words."""
    parts = []
    for part in PARTS:
        own = [one for one in said if one.part == part]
        failed = sum(one.failed is not None for one in own)
        spent = sum(one.seconds for one in own)
        wanted = cells if part == "kernels" else sum(one.part == "kernels" and one.wants_preparing for one in said)
        tried = f"{part} of {len(own) - failed} of {wanted} cells"
        parts.append(f"{tried} ({failed} failed) in {spent:.0f} s of processes")
    return f"compiled ahead in {seconds:.0f} s: {'; '.join(parts)}"
