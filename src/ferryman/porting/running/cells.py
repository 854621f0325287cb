"""The cells of one op: which there are, each one checked in this process, and their order in a document."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import torch

from ferryman.device_profiles import Profile
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, EvidenceError, UnknownName
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import STORAGE_DTYPES, Case, Primitive
from ferryman.porting.inputs.cases import TIERS, cases_of
from ferryman.porting.inputs.fills import DTYPES, dtype_name
from ferryman.porting.judging.parity import SEED, Prepared, check_cell, prepare
from ferryman.porting.judging.prepared import unprepared
from ferryman.porting.judging.results import Cell, Verdict

_SHORT = {"f32": "float32", "fp32": "float32", "f16": "float16", "fp16": "float16", "bf16": "bfloat16"}
ALL = "all"  # the case of a cell that stands for every case
Starting = Callable[[str, str, str, str], None]  # op, dtype, case, implementation
Turn = tuple[int, int]  # (k, n): the k-th of n turns, n a multiple of the number of dtypes


def dtypes_of(names: Iterable[str | torch.dtype] | None) -> tuple[torch.dtype, ...]:
    """Storage dtypes by name ("bfloat16", "bf16"). Raises UnknownName."""
    if names is None:
        return STORAGE_DTYPES
    known = {dtype_name(d): d for d in STORAGE_DTYPES}
    dtypes = []
    for name in names:
        text = dtype_name(name) if isinstance(name, torch.dtype) else _SHORT.get(name, name)
        if text not in known:
            raise UnknownName("dtype", text, known)
        dtypes.append(known[text])
    return tuple(dict.fromkeys(dtypes))


def require_lines(ops: Sequence[str] | None, backends: Sequence[str] | None) -> None:
    """Raises ArgumentError where an op that is asked for by its name has no line of the backends that are, and
    EvidenceError where it is another package's and its cases cannot be made."""
    for op in ops or ():
        why = registry.unjudged(op)
        if why is not None:
            raise EvidenceError(f"{op} has no cases to be checked on: {why}")
        if backends is not None and not registry.asked(op, backends):
            menu = ", ".join(line.name for line in registry.implementations(op))
            raise ArgumentError("check", f"--backend of {op}", ", ".join(backends), f"one or more of its own: {menu}")


def tier_cases(primitive: Primitive, tier: str) -> list[Case]:
    """The cases of a tier and of the tiers before it."""
    if tier not in TIERS:
        raise UnknownName("tier", tier, TIERS)
    return [case for t in TIERS[: TIERS.index(tier) + 1] for case in cases_of(primitive, t)]


def turn_of(text: str) -> Turn:
    """A turn by its text, "4/6". Raises ArgumentError."""
    k, slash, n = text.partition("/")
    if not (slash and k.isdecimal() and n.isdecimal() and int(k) < int(n)):
        raise ArgumentError("check", "--turn", text, "K/N, of integers from 0, with K below N")
    return int(k), int(n)


def turns(case: int, dtype: int, dtypes: int, full: bool, turn: Turn | None = None) -> bool:
    """Whether a case runs in this dtype: in all of them, or each case in one, or, with ``turn``, each case or every
    second, third, .. in one, so that n turns are all."""
    k, n = turn or (0, dtypes)
    return full or ((case + k) % dtypes == dtype and (case + k // dtypes) % (n // dtypes) == 0)


def check_op(
    primitive: Primitive,
    lines: Sequence[Implementation],
    dtypes: Sequence[torch.dtype],
    tier: str,
    seed: int,
    device: torch.device,
    profile: Profile,
    *,
    thin: bool = False,
    turn: Turn | None = None,
    times: int = 3,
    skip: Collection[tuple[str, ...]] = (),
    simulate: Profile | None = None,
    share: tuple[int, int] = (0, 1),
    only: Collection[tuple[str, ...]] | None = None,
    starting: Starting | None = None,
) -> Iterator[Cell]:
    """Every cell of one op, but those in ``skip``: (op, dtype, case, implementation).

    thin: each case in one dtype at most, by the ``turn``. share: (k, n), of the cases and dtypes every n-th, from k.
    only: (op, dtype, case); None is all. ``starting`` hears of each cell before it runs.
    """
    cases = tier_cases(primitive, tier)
    for d, dtype in enumerate(dtypes):
        for c, case in enumerate(cases):
            key = primitive.name, dtype_name(dtype), case.name
            if only is not None and key not in only:
                continue
            wanted = [line for line in lines if (*key, line.name) not in skip]
            place = c * len(dtypes) + d
            if thin:
                if not turns(c, d, len(dtypes), False, turn):
                    continue
                place = c // (turn[1] // len(dtypes)) if turn else c
            if place % share[1] != share[0]:
                continue
            yield from check_case(
                primitive,
                wanted,
                case,
                dtype,
                device,
                profile,
                seed=seed,
                times=times,
                simulate=simulate,
                starting=starting,
            )


def check_case(
    primitive: Primitive,
    lines: Sequence[Implementation],
    case: Case,
    dtype: torch.dtype,
    device: torch.device,
    profile: Profile,
    *,
    seed: int = SEED,
    times: int = 3,
    simulate: Profile | None = None,
    starting: Starting | None = None,
    prepared: Prepared | None = None,
) -> Iterator[Cell]:
    """Implementations of one op on one case, which is made ready once for them all. ``prepared``: it is ready."""
    verdict: Verdict = "PASS"
    reason = ""
    for line in lines:
        if starting is not None:
            starting(primitive.name, dtype_name(dtype), case.name, line.name)
        if line is lines[0] and prepared is None:
            prepared, verdict, reason = _prepared(primitive, case, dtype, device, seed)
        if prepared is None:
            yield not_run(primitive.name, line, device, dtype, reason, case.name, verdict=verdict)
        else:
            yield check_cell(
                primitive, line, case, dtype, device, profile, prepared=prepared, times=times, simulate=simulate
            )


def _prepared(
    primitive: Primitive, case: Case, dtype: torch.dtype, device: torch.device, seed: int
) -> tuple[Prepared | None, Verdict, str]:
    try:
        return prepare(primitive, case, dtype, device, seed), "PASS", ""
    except torch.OutOfMemoryError as error:
        return None, "NOT_RUN", f"the oracle ran out of memory: {str(error).splitlines()[0][:300]}"
    except Exception as error:  # noqa: BLE001 - an op from another package may be wrong itself; the others are still judged
        return None, "MISTRUSTED", unprepared(error)


def not_run(
    op: str,
    line: Implementation,
    device: torch.device,
    dtype: torch.dtype,
    reason: str,
    case: str = ALL,
    refusals: Sequence[str] = (),
    verdict: Verdict = "NOT_RUN",
) -> Cell:
    return Cell(
        op=op,
        implementation=line.name,
        device=str(device),
        dtype=dtype_name(dtype),
        case=case,
        verdict=verdict,
        reason=reason,
        refusals=list(refusals),
        accumulation=line.accumulation,
        roundings=sorted(line.roundings),
    )


def alone(
    cells: list[Cell],
    local: Iterable[tuple[Primitive, Sequence[Implementation]]],
    tier: str,
    seed: int,
    device: torch.device,
    profile: Profile,
) -> list[Cell]:
    """Cells that found no memory beside the other processes, once more without them."""
    short = {
        (c.op, c.dtype, c.case, c.implementation)
        for c in cells
        if c.verdict == "NOT_RUN" and "out of memory" in (c.reason or "")
    }
    settled = [c for c in cells if (c.op, c.dtype, c.case, c.implementation) not in short]
    for op, lines in local:
        for case in tier_cases(op, tier):
            for name in dict.fromkeys(d for o, d, c, _ in short if (o, c) == (op.name, case.name)):
                mine = [line for line in lines if (op.name, name, case.name, line.name) in short]
                prepared, verdict, reason = _prepared(op, case, DTYPES[name], device, seed)
                for line in mine:
                    if prepared is None:
                        settled.append(not_run(op.name, line, device, DTYPES[name], reason, case.name, verdict=verdict))
                    else:
                        settled.append(check_cell(op, line, case, DTYPES[name], device, profile, prepared=prepared))
    return settled


def ordered(cells: Iterable[Cell], tier: str) -> list[Cell]:
    """By op, implementation and dtype as they are listed; what stands for many cases first, then case by case."""
    cells = list(cells)
    there = {cell.op for cell in cells}
    ops = {name: i for i, name in enumerate(registry.primitives()) if name in there}
    lines = {(op, x.name): i for op in ops for i, x in enumerate(registry.implementations(op))}
    dtypes = {dtype_name(d): i for i, d in enumerate(STORAGE_DTYPES)}
    cases = {(op, case.name): i for op in ops for i, case in enumerate(tier_cases(registry.primitive(op), tier))}

    def place(c: Cell) -> tuple[int, int, int, int]:
        return ops[c.op], lines[c.op, c.implementation], dtypes[c.dtype], cases.get((c.op, c.case), -1)

    once: dict[tuple[str, str, str, str], Cell] = {}
    for cell in cells:  # several workers may have lost the same op as a whole
        key = (cell.op, cell.implementation, cell.dtype, cell.case)
        if key not in once or cell.verdict == "FAIL":
            once[key] = cell
    return sorted(once.values(), key=place)
