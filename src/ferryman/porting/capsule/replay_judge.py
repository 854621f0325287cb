"""A's stored outputs against the oracle that B evaluates, and A against B explained."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from ferryman.porting.capsule.contents import Capsule, RunRecord
from ferryman.porting.capsule.record import positions
from ferryman.porting.capsule.replay_results import Explanation, Side
from ferryman.porting.capsule.run import output_hash
from ferryman.porting.inputs.fills import dtype_name
from ferryman.porting.judging import gates, metrics
from ferryman.porting.judging.parity import Prepared
from ferryman.porting.judging.results import Cell, WorstElement, number

_NOTHING = metrics.Declared()


@dataclass(frozen=True)
class Shown:
    """Elements of one output: all of it (``at`` None), or those at some positions."""

    name: str
    values: Tensor
    at: Tensor | None = None


@dataclass(frozen=True)
class Judged:
    """The worst of some elements. ``fault``: what makes them wrong; None where they are within bounds."""

    ratio: float | None = None
    plain: float | None = None
    worst: WorstElement | None = None
    fault: str | None = None
    judged: int = 0


def declared_of(cell: Cell, tf32: bool, dtype: torch.dtype) -> metrics.Declared:
    return metrics.Declared(cell.accumulation, frozenset(cell.roundings), tf32 and dtype == torch.float32)


def wording(declared: metrics.Declared) -> str:
    """ "split-k with p rounded"."""
    tf32 = ", tf32" if declared.tf32 and "tf32" not in declared.accumulation else ""
    rounded = f" with {', '.join(sorted(declared.roundings))} rounded" if declared.roundings else ""
    return f"{declared.accumulation}{tf32}{rounded}"


def judge(prepared: Prepared, shown: Sequence[Shown], declared: metrics.Declared) -> Judged:
    """The gates that an element alone can fail: where NaN and Inf stand (G0), exact probes (G1), the bound (G2)."""
    unknown = declared.roundings - {r.name for r in prepared.primitive.limits.roundings}
    if unknown:
        return Judged(fault=f"declares roundings that {prepared.primitive.name} does not permit: {sorted(unknown)}")
    full = prepared.bounds(declared)
    bare = full if declared == _NOTHING else prepared.bounds(_NOTHING)
    exactly = gates.not_exact(prepared, declared) is None
    worst: metrics.Worst | None = None
    wrong: metrics.Worst | None = None
    fault: str | None = None
    plain: float | None = None
    for output, exact, bound, without in zip(shown, prepared.oracle, full, bare, strict=True):
        got, here = output.values.to(exact.device), _pick(exact, output.at, exact)
        judgement = gates.Judgement.of(output.name, got, here, _bound(bound, output.at, exact))
        least = metrics.worst(output.name, got, here, _pick(without.total, output.at, exact), judgement.judged)
        if least is not None:
            plain = max(plain or 0.0, least.ratio)
        first = judgement.wrong
        if first is None and exactly and output.name not in prepared.case.inexact:
            differs = gates.differing(got, here)
            if bool(differs.any()):
                rounded = here.to(got.dtype).double()
                first = metrics.worst(output.name, got, rounded, torch.ones_like(rounded), differs)
        if wrong is None and first is not None:
            wrong = _placed(first, output.at, exact.shape)
            assert wrong is not None
            fault = gates.element(wrong) if judgement.wrong is not None else _bitwise(wrong)
        most = _placed(judgement.worst, output.at, exact.shape)
        if most is not None and (worst is None or most.ratio > worst.ratio):
            worst = most
    shown_worst = wrong or worst
    return Judged(
        None if worst is None else worst.ratio,
        plain,
        None if shown_worst is None else gates.worst_element(shown_worst),
        fault,
        sum(output.values.numel() for output in shown),
    )


def _bitwise(wrong: metrics.Worst) -> str:
    place = ", ".join(map(str, wrong.index))
    return f"{wrong.output}[{place}] is {wrong.value:.9g}, must be {wrong.expected:.9g} bit for bit"


def _pick(tensor: Tensor, at: Tensor | None, like: Tensor) -> Tensor:
    return tensor if at is None else tensor.expand_as(like).reshape(-1)[at.to(tensor.device)]


def _bound(bound: metrics.Bound, at: Tensor | None, like: Tensor) -> metrics.Bound:
    """The bound of the elements that are shown."""
    if at is None:
        return bound
    parts: dict[str, Tensor | None] = {f.name: getattr(bound, f.name) for f in fields(bound)}
    return replace(bound, **{name: _pick(t, at, like) for name, t in parts.items() if t is not None})


def _placed(worst: metrics.Worst | None, at: Tensor | None, shape: torch.Size) -> metrics.Worst | None:
    """The element's index in the whole output, where it was found in some of it."""
    if worst is None or at is None:
        return worst
    flat = int(at[worst.index[0]])
    return replace(worst, index=tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), shape)))


def recorded_outputs(capsule: Capsule, run: RunRecord, prepared: Prepared) -> list[Shown] | str:
    """A's stored outputs, or what is wrong with their structure.

    An op may have got outputs since: a record without them holds where this case's are empty tensors.
    """
    names, count = prepared.primitive.outputs, len(run.outputs)
    added = prepared.declared[count:]
    if [o.name for o in run.outputs] != list(names[:count]) or any(want.numel() for want in added):
        return f"outputs are {[o.name for o in run.outputs]}; required: {list(names)}"
    outputs = []
    for output, want in zip(run.outputs, prepared.declared[:count], strict=True):
        if (output.shape, output.dtype) != (list(want.shape), dtype_name(want.dtype)):
            return (
                f"{output.name} is {output.dtype} {output.shape}; required: {dtype_name(want.dtype)} {list(want.shape)}"
            )
        at = None if output.tiles is None else positions(want.numel(), output.tiles)
        values = None if output.stored is None else capsule.tensors[output.stored]
        if values is None:  # only its hash is known
            at, values = torch.empty(0, dtype=torch.int64), torch.empty(0, dtype=want.dtype)
        outputs.append(Shown(output.name, values, at))
    empty = (Shown(name, torch.empty_like(want)) for name, want in zip(names[count:], added, strict=True))
    return [*outputs, *empty]


def side_a(
    capsule: Capsule, run: RunRecord | None, cell: Cell | None, prepared: Prepared | None
) -> tuple[Side, Judged]:
    """A's part: what it recorded, and what its outputs say here."""
    if cell is None:
        return Side(verdict="NOT_RUN", reason="not in the capsule"), Judged()
    if run is None or prepared is None:
        tf32 = run.tf32 if run is not None else False
        declared = declared_of(cell, tf32, getattr(torch, cell.dtype))
        judgement = Judged(cell.ratio, None, cell.worst)
    else:
        declared = declared_of(cell, run.tf32, prepared.dtype)
        shown = recorded_outputs(capsule, run, prepared)
        judgement = Judged(fault=shown) if isinstance(shown, str) else judge(prepared, shown, declared)
    outputs = output_hash([o.hash for o in run.outputs]) if run is not None else None
    side = Side(
        verdict=cell.verdict,
        ratio=judgement.ratio,
        plain=judgement.plain,
        worst=judgement.worst,
        hash=outputs,
        declared=wording(declared),
        reason=judgement.fault or cell.reason,
    )
    return side, judgement


def explain(a: Side, b: Side, fault: str | None) -> tuple[Explanation, str | None]:
    """Which of the two is right, and what their difference comes from. ``fault``: A's, as judged here."""
    if b.verdict == "MISTRUSTED" or (a.verdict == "MISTRUSTED" and fault is None):
        return "not judged", b.reason if b.verdict == "MISTRUSTED" else a.reason
    a_wrong, b_wrong = fault is not None or a.verdict == "FAIL", b.verdict == "FAIL"
    if a_wrong or b_wrong:
        said = []
        if a_wrong and a.verdict == "FAIL":
            said.append(f"A: {fault or a.reason}" + ("" if fault else " (A's own record; what is stored is right)"))
        elif a_wrong:
            said.append(f"A: {fault}; its record says {a.verdict}, which its outputs contradict")
        if b_wrong:
            said.append(f"B: {b.reason}")
        return ("both are wrong" if a_wrong and b_wrong else "A is wrong" if a_wrong else "B is wrong"), "; ".join(said)
    ran = [side.verdict == "PASS" for side in (a, b)]  # what an interpreter did is no evidence about a device
    if not all(ran):
        return ("neither ran" if not any(ran) else "B did not run" if ran[0] else "A did not run"), _why(a, b, ran)
    if a.hash is not None and a.hash == b.hash:
        return "equal", None
    beyond = [side.plain is not None and side.plain > 1 for side in (a, b)]
    said = [
        f"{who} declares {side.declared}: {number(side.plain)} bounds without, {number(side.ratio)} with"
        for who, side, over in zip("AB", (a, b), beyond, strict=True)
        if over
    ]
    if all(beyond):
        return "both declared classes explain it", "; ".join(said)
    if any(beyond):
        return ("A's declared class explains it" if beyond[0] else "B's declared class explains it"), said[0]
    return "both within bounds", None


def _why(a: Side, b: Side, ran: list[bool]) -> str | None:
    parts = [
        f"{who}: {side.verdict}{f', {side.reason}' if side.reason else ''}"
        for who, side, there in zip("AB", (a, b), ran, strict=True)
        if not there
    ]
    return "; ".join(parts)
