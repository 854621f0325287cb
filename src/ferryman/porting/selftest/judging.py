"""One mutant, or one right alternative, on one cell: what the engine says, and what the other rules say of the outputs.

All of them see the same run: the outputs of the first call that the engine makes, on the same guarded inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ferryman.device_profiles import Profile
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.inputs import mutation
from ferryman.porting.inputs.cases import Arguments, as_tuple
from ferryman.porting.judging import hygiene, route
from ferryman.porting.judging.parity import Prepared, check_cell
from ferryman.porting.judging.results import Cell
from ferryman.porting.mutate.edits import EditError
from ferryman.porting.selftest import baselines

RAISED = "raised"  # beside the gates: the kernel raised, or its process died
Outputs = tuple[Any, ...] | None
_JUDGED = ("PASS", "FAIL", "SIMULATED", "MISTRUSTED")
_ALIGNED_FILLS = {None, "normal", "weight", "unit"}


@dataclass(frozen=True)
class Setting:
    """What every run of one session shares."""

    device: torch.device
    profile: Profile
    times: int = 3
    simulate: Profile | None = None


@dataclass
class Seen:
    """One run: the engine's cell, and the rules that let its outputs through."""

    cell: Cell
    accepted: tuple[str, ...]
    outputs: tuple[Any, ...] | None

    @property
    def judged(self) -> bool:
        return self.cell.verdict in _JUDGED

    @property
    def flagged(self) -> bool:
        return self.cell.verdict in ("FAIL", "MISTRUSTED")

    @property
    def gates(self) -> tuple[str, ...]:
        """The gates that failed; RAISED where none could be judged."""
        failed = tuple(n for n, g in sorted(self.cell.gates.items()) if g.outcome == "fail")
        return failed or ((RAISED,) if self.flagged else ())


class _Recorder:
    """Keeps a copy of the first call's outputs. Later calls may write over them."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        self.kernel = kernel
        self.outputs: tuple[Any, ...] | None = None
        self.fault: EditError | None = None

    def __call__(self, *args: Any) -> Any:
        try:
            result = self.kernel(*args)
        except EditError as error:  # no verdict on a kernel: the engine must not count it as one
            self.fault = error
            raise
        if self.outputs is None:
            parts = (result,) if isinstance(result, Tensor) or not isinstance(result, (tuple, list)) else result
            self.outputs = tuple(o.clone() if isinstance(o, Tensor) else o for o in parts)
        return result


class ArgumentLost(RuntimeError):
    """A kernel raised inside Triton's interpreter, which then holds an argument's memory: nothing more can run here."""


def restore(args: Arguments) -> None:
    """A kernel under test may have written its inputs: the next one gets them as they were. Raises ArgumentLost."""
    for name, buffer in args.buffers.items():
        try:
            untouched = buffer.untouched()
        except RuntimeError as error:
            raise ArgumentLost(f"raised, and {name} has no memory any more: {error}") from error
        if not untouched:
            buffer.bytes.copy_(buffer.pristine)


def look(
    kernel: Callable[..., Any],
    line: Implementation,
    prepared: Prepared,
    setting: Setting,
    rules: tuple[str, ...] = baselines.NAMES,
) -> Seen:
    """Run a kernel on one cell, judge it, and ask the other rules. The inputs are afterwards as they were."""
    roundings = frozenset(line.roundings)
    prepared.reference(roundings)  # before the kernel can have changed the inputs
    recorder = _Recorder(kernel)
    try:
        cell = check_cell(
            prepared.primitive,
            line,
            prepared.case,
            prepared.dtype,
            setting.device,
            setting.profile,
            prepared=prepared,
            kernel=recorder,
            times=setting.times,
            simulate=setting.simulate,
        )
    finally:
        restore(prepared.args)
    if recorder.fault is not None:
        raise recorder.fault
    outputs = recorder.outputs
    accepted = tuple(r for r in rules if outputs is not None and baselines.accepts(r, outputs, prepared, roundings))
    return Seen(cell, accepted, outputs)


def call(op: Primitive, kernel: Callable[..., Any], args: Arguments, setting: Setting, target: Any) -> Outputs:
    """The kernel's outputs alone; None where it raises, or does what it may not to memory."""
    route.begin()
    try:
        whole = mutation.on_copies(op, kernel)
        runs = hygiene.run(op, whole, args, target, setting.device, 1)
        clean = not runs.faults and not mutation.faults(whole) and not route.faults()
    except EditError:
        raise
    except Exception:  # noqa: BLE001 - a mutant may raise anything; the caller counts it as different
        return None
    finally:
        restore(args)
    return as_tuple(runs.outputs) if clean else None


def same_bits(mine: Outputs, right: Outputs) -> bool:
    """Equal in every bit, but that NaN equals NaN, whose other bits no standard gives a meaning to, and that zeros of
    either sign are equal, as they are for the gates."""
    if mine is None or right is None or len(mine) != len(right):
        return False
    return all(
        isinstance(a, Tensor) and isinstance(b, Tensor) and a.dtype == b.dtype and _equal(a, b)
        for a, b in zip(mine, right, strict=True)
    )


def _equal(a: Tensor, b: Tensor) -> bool:
    if hygiene.bitwise_equal(a, b):
        return True
    if a.shape != b.shape or not a.is_floating_point():
        return False
    return torch.allclose(a.double(), b.double(), rtol=0, atol=0, equal_nan=True)


def aligned(primitive: Primitive, case: Case) -> bool:
    """What a usual test tries: normal values, contiguous (or a model's heads), the last dimension a multiple of 8."""
    specs = [a for a in case.args.values() if isinstance(a, TensorSpec)]
    dense = all(s.layout in ("contiguous", "heads") and s.fill in _ALIGNED_FILLS for s in specs)
    return dense and all(s.shape and s.shape[-1] % 8 == 0 and 0 not in s.shape for s in specs if s.dtype != "int64")
