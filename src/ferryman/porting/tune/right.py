"""Which candidates of a cell are right: by the op's definition on its standard case, and alike on the timed inputs.

No implementation is trusted to be right, the one that serves by default no more than the others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from ferryman.dispatch import registry, select
from ferryman.ops.primitive import Primitive
from ferryman.porting.bench import peers, rotation, runner
from ferryman.porting.bench.contender import Contender
from ferryman.porting.inputs.cases import as_tuple, double, materialise
from ferryman.porting.running.process import failure
from ferryman.porting.running.timing import standard_case


@lru_cache(maxsize=2)  # its cells follow each other
def standard(
    op: str, dtype: torch.dtype, seed: int, device: torch.device
) -> tuple[str, tuple[Any, ...], tuple[Tensor, ...]] | None:
    """The name of an op's standard case, its arguments, and what the definition makes of them in float64."""
    known = registry.primitive(op)
    case = standard_case(known)
    if case is None:
        return None
    args = tuple(rotation.own(a) for a in materialise(case, known, dtype, seed, device))
    return case.name, args, as_tuple(known.body(*double(args)))


@torch.no_grad()
def judge(plan: runner.Plan, op: Primitive, contender: Contender) -> bool:
    """Whether a candidate was right on the standard case. One that was wrong or failed is skipped, with its reason;
    one that does not serve that case is not."""
    reference = standard(op.name, plan.dtype, plan.seed, plan.device)
    if reference is None:
        return False
    case, args, exact = reference
    implementation, _, configuration = contender.name.partition(" ")
    line = registry.implementation(op.name, implementation)
    if select.refusals(line, select.View.of(op, args, plan.profile), plan.profile) or (
        configuration and configuration not in line.ranked_configurations(args, select.target_of(plan.profile))
    ):
        return False
    try:
        difference = peers.wrong(op, args, contender.call_of(rotation.spared(op, args))(), exact)
    except Exception as error:  # noqa: BLE001 - a candidate that cannot run is recorded as such
        contender.skipped = failure(error, plan.device)
        return False
    if difference is not None:
        contender.skipped = f"not equal to the op on {case}: {difference}"
    return difference is None


@torch.no_grad()
def compare(
    plan: runner.Plan,
    op: Primitive,
    args: tuple[Any, ...],
    contenders: Sequence[Contender],
    judged: Sequence[str],
    starting: Callable[[str | None], None],
) -> None:
    """Skip candidates that are wrong on the timed inputs, by the first that was right on the standard case.

    Where there is none, or one contradicts it, the definition says who is wrong; it may need more memory than there
    is, and then nobody is known to be right.
    """

    def wrong(contender: Contender, exact: tuple[Tensor, ...]) -> str | None:
        starting(contender.name)
        try:
            return peers.wrong(op, args, contender.call_of(rotation.spared(op, args))(), exact, peers.AGREEING)
        except Exception as error:  # noqa: BLE001 - as above
            contender.skipped = failure(error, plan.device)
            return None

    first = next((c for c in contenders if c.name in judged), None)
    if first is not None:
        starting(first.name)
        exact = as_tuple(first.call_of(rotation.spared(op, args))())
        if all(wrong(c, exact) is None for c in contenders):
            return
        del exact
    racing = [c for c in contenders if c.skipped is None]
    starting(None)
    try:
        exact = as_tuple(op.body(*double(args)))
    except Exception as error:  # noqa: BLE001 - no memory, mostly
        why = f"whether it is right is not known: the definition gives {failure(error, plan.device)}"
        for contender in racing:
            contender.skipped = why
        return
    for contender in racing:
        if difference := wrong(contender, exact):
            contender.skipped = f"wrong on these inputs: {difference}"
