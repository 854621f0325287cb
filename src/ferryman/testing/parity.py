"""`assert_parity`: one call that says whether a kernel is right, and where not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.triton import interpreting
from ferryman.device_profiles import Profile, detect, profile
from ferryman.dispatch import registry, select
from ferryman.errors import ArgumentError, UnknownName
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import STORAGE_DTYPES, Case, Primitive, TensorSpec
from ferryman.porting.inputs.cases import TIERS, arguments, cases_of, forward_of
from ferryman.porting.judging.parity import SEED, check_cell, prepare
from ferryman.porting.judging.prepared import Prepared
from ferryman.porting.judging.results import Cell
from ferryman.porting.kernel import adapter as kernel_adapter
from ferryman.porting.running.cells import dtypes_of
from ferryman.porting.running.workers import SIMULATED
from ferryman.testing.requirements import default_device

Op = str | Callable[..., Any]
CaseLike = Case | str | Mapping[str, Any] | None
_SHOWN = 5
_WRONG = ("FAIL", "MISTRUSTED", "QUARANTINED")
_RAN = ("PASS", "SIMULATED")


class NotRun(AssertionError):
    """Nothing ran, for a reason that is the machine's (a backend or memory that is not here): nothing is shown."""


def assert_parity(
    op: Op,
    implementation: str | Callable[..., Any],
    case: CaseLike = None,
    *,
    dtype: str | torch.dtype | Iterable[str | torch.dtype] | None = None,
    device: torch.device | str | None = None,
    seed: int = SEED,
    accumulation: str = "fp32",
    roundings: Sequence[str] = (),
    deterministic: bool = True,
) -> list[Cell]:
    """Check an implementation of an op through every gate of `ferryman check`; AssertionError says what is wrong.

    op: a name, or `ferryman.ops.rms_norm`. implementation: a name from the op's menu; a backend's name, which asks for
    the first of its lines, in the menu's order, that serves the case, as `ferryman.use` does; or a function that is
    called as the op is (docs/testing.md), with what it declares in accumulation, roundings and deterministic. case: a
    `Case`, the name of one of the op's, a dict of arguments (tensors, `TensorSpec`s and scalars), or every small case.
    dtype: one or several; by default those of the given tensors, else float32, float16 and bfloat16. device: the
    accelerator, else the CPU. Returns the cells. Raises NotRun where nothing could run here, UnknownName and
    ArgumentError for bad use.
    """
    __tracebackhide__ = True
    primitive = registry.primitive(op)
    lines, adapter = _subject(primitive, implementation, accumulation, tuple(roundings), deterministic)
    place = default_device(None if device is None else str(device))
    here = detect(place)
    cells = []
    for each in _cases(primitive, case):
        for one in _dtypes(each, dtype):
            if isinstance(case, Mapping):
                primitive.check(*arguments(each, primitive, one, seed, place).values)
            prepared = prepare(primitive, each, one, place, seed)
            if adapter is None:
                cells.append(_first(lines, prepared, here))
            else:
                cells.append(kernel_adapter.check(adapter, lines[0], prepared))
    _judge(primitive, implementation if isinstance(implementation, str) else lines[0].name, here, cells)
    return cells


def _first(lines: Sequence[Implementation], prepared: Prepared, here: Profile) -> Cell:
    """The cell of the first line that serves the case. Where none does: a refusal that is this machine's, else the
    first line's."""
    op, case, dtype, place = prepared.primitive, prepared.case, prepared.dtype, prepared.device
    simulate = profile(SIMULATED) if place.type == "cpu" and interpreting() else None
    view = select.View.of(op, prepared.args.values, here)
    serving = [line for line in lines if not select.refusals(line, view, here)][:1]
    cells = [
        check_cell(op, line, case, dtype, place, here, prepared=prepared, simulate=simulate, ahead=True)
        for line in serving or lines
    ]
    return next((cell for cell in cells if cell.verdict != "UNIMPLEMENTED"), cells[0])


def _subject(
    op: Primitive,
    implementation: str | Callable[..., Any],
    accumulation: str,
    roundings: tuple[str, ...],
    deterministic: bool,
) -> tuple[tuple[Implementation, ...], kernel_adapter.Adapter | None]:
    if isinstance(implementation, str):
        if (accumulation, roundings, deterministic) != ("fp32", (), True):
            raise ArgumentError(
                "assert_parity",
                "accumulation, roundings or deterministic",
                "given",
                f"none beside {implementation!r}: its line in the menu declares them",
            )
        lines = registry.asked(op.name, (implementation,))
        if not lines:
            known = {name for line in registry.implementations(op.name) for name in (line.name, line.backend)}
            raise UnknownName(f"implementation of {op.name}", implementation, sorted(known))
        return lines, None
    if not callable(implementation):
        raise ArgumentError("assert_parity", "implementation", type(implementation).__name__, "a name or a function")
    name = getattr(implementation, "__name__", type(implementation).__name__)
    line = kernel_adapter.declared(op, name, accumulation, roundings, deterministic)
    return (line,), kernel_adapter.Adapter(implementation, op, name)


def _cases(op: Primitive, case: CaseLike) -> list[Case]:
    if case is None:
        return cases_of(op)
    if isinstance(case, Case):
        return [case]
    if isinstance(case, str):
        known = {c.name: c for tier in TIERS for c in cases_of(op, tier)}
        if case not in known:
            raise UnknownName(f"case of {op.name}", case, known)
        return [known[case]]
    return [Case("given", _arguments(op, dict(case)))]


def _arguments(op: Primitive, given: dict[str, Any]) -> dict[str, Any]:
    """Every argument of a case that was given as a dict. A backward may also be given its forward's specs."""
    forward = forward_of(op)
    has_tensors = any(isinstance(v, Tensor) for v in given.values())
    of = op if forward is None or has_tensors else forward
    allowed = set(of.names) | {n for n in op.names if n.startswith("need_")}
    for name, value in given.items():
        if name not in allowed:
            raise UnknownName(f"argument of {of.name}", name, allowed)
        if has_tensors and isinstance(value, TensorSpec) and forward is not None:
            raise ArgumentError(op.name, name, "a TensorSpec", "a tensor beside tensors")
    defaults, _ = kernel_adapter.face(of)
    for name in of.names:
        if name not in given:
            if name not in defaults:
                raise ArgumentError(of.name, name, "missing", f"every argument: {', '.join(of.names)}")
            given[name] = defaults[name]
    if of is not op:
        given |= {n: True for n in op.names if n.startswith("need_") and n not in given}
    return given


def _dtypes(case: Case, dtype: Any) -> tuple[torch.dtype, ...]:
    dtypes = [v.dtype for v in case.args.values() if isinstance(v, Tensor) and v.dtype in STORAGE_DTYPES]
    if dtypes:
        if dtype is not None:
            raise ArgumentError("assert_parity", "dtype", dtype, "none beside tensors, which have theirs")
        return (dtypes[0],)
    return dtypes_of([dtype] if isinstance(dtype, (str, torch.dtype)) else dtype)


def _judge(op: Primitive, by: str, here: Profile, cells: Sequence[Cell]) -> None:
    __tracebackhide__ = True
    counts = Counter(c.verdict for c in cells)
    tally = ", ".join(f"{n} {verdict}" for verdict, n in counts.items())
    wrong = [c for c in cells if c.verdict in _WRONG]
    head = f"{op.name} by {by} on {here.title}"
    if wrong:
        shown = "\n".join(_described(c) for c in wrong[:_SHOWN])
        more = f"\nand {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise AssertionError(f"{head}: {len(wrong)} of {len(cells)} cells are wrong ({tally})\n{shown}{more}")
    if any(c.verdict in _RAN for c in cells):
        return
    reasons = "; ".join(dict.fromkeys(c.reason or "no reason given" for c in cells)) or "there is no case"
    kind = AssertionError if counts.get("UNIMPLEMENTED") or not cells else NotRun
    raise kind(f"{head}: nothing ran, so nothing is shown to be right ({tally or 'no cell'}): {reasons}")


def _described(cell: Cell) -> str:
    text = f"{cell.verdict} {cell.dtype} {cell.case}: {cell.reason}"
    for name, gate in sorted(cell.gates.items()):
        if gate.outcome == "fail" and not (cell.reason or "").startswith(f"{name}:"):
            text += f"\n  {name}: {gate.reason}"
    at = "" if cell.worst is None else ", ".join(map(str, cell.worst.index))
    if cell.worst is not None and f"{cell.worst.output}[{at}]" not in text:
        text += (
            f"\n  worst element: {cell.worst.output}[{at}] is {cell.worst.value:.9g}, expected "
            f"{cell.worst.expected:.9g}, bound {cell.worst.bound:.3g}"
        )
    return text + (f"\n  reading: {cell.reading}" if cell.reading else "")
