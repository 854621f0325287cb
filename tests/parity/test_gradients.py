"""In float64, every backward's definition is the derivative of its forward's: against autograd, and numerically."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity_support import BACKWARD, CPU
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.domain import Sizes
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.cases import as_tuple, cases_of, double, forward_of, materialise

FLOATS = ("storage", "float32", "bfloat16", "float16")
FILLS_WITHOUT_DERIVATIVE = ("nonfinite", "infinite_logits")
# autograd through logsumexp and where gives NaN for rows that see nothing; those are checked numerically instead
EMPTY_ROWS = (
    *("longer_queries", "bool_mask", "row_mask", "float_mask", "bias_whole", "bias_few", "softcap_mask", "no_keys"),
    *("sinks_blind", "sinks_no_keys", "range_causal", "range_window", "range_decode", "range_hostile"),
    *("range_mask_sinks", "all_options", "exact_range"),
)


def _pair(op: str) -> tuple[Primitive, Primitive]:
    backward = registry.primitive(op)
    forward = forward_of(backward)
    assert forward is not None
    return forward, backward


class Analytic(torch.autograd.Function):
    """A forward's definition with its backward's, as dispatch joins them."""

    @staticmethod
    def forward(ctx: Any, forward: Primitive, backward: Primitive, *args: Any) -> Any:
        outputs = as_tuple(forward.body(*args))
        ctx.forward, ctx.backward, ctx.args, ctx.outputs = forward, backward, args, outputs
        ctx.mark_non_differentiable(
            *(o for n, o in zip(forward.outputs, outputs, strict=True) if n in forward.gradient.nondifferentiable)
        )
        return outputs if len(outputs) > 1 else outputs[0]

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_of = gradients(ctx.forward, ctx.backward, ctx.args, ctx.outputs, grads)
        return None, None, *(grad_of.get(n) for n in ctx.forward.names)


def gradients(
    forward: Primitive,
    backward: Primitive,
    args: tuple[Any, ...],
    outputs: tuple[Tensor, ...],
    grads: tuple[Tensor, ...],
) -> dict[str, Tensor]:
    """Forward argument -> its gradient by the backward's definition."""
    known = dict(zip(forward.names, args, strict=True)) | {
        f"out_{n}" if n in forward.names else n: o for n, o in zip(forward.outputs, outputs, strict=True)
    }
    known |= {n: grads[i] for n, i in (forward.gradient_names() | {"grad": 0}).items()}
    known |= {n: True for n in backward.names if n.startswith("need_")}
    results = as_tuple(backward.body(*(known[n] for n in backward.names)))
    return {
        name: result
        for names, result in zip(forward.gradient.owners, results, strict=True)
        for name in names
        if known[name] is not None
    }


def _inputs(forward: Primitive, case: Case) -> tuple[tuple[Any, ...], list[str]]:
    """float64 arguments, those of them that have gradients requiring one."""
    args = list(double(materialise(case, forward, torch.float32, 0, CPU)))
    wanted = [n for names in forward.gradient.owners for n in names]
    for i, name in enumerate(forward.names):
        if name in wanted and args[i] is not None and args[i].is_floating_point():
            args[i] = args[i].contiguous().requires_grad_()
    return tuple(args), [n for n in wanted if getattr(args[forward.names.index(n)], "requires_grad", False)]


@pytest.mark.daily(7)
@pytest.mark.parametrize("op", BACKWARD)
def test_the_definition_equals_autograd(op: str) -> None:
    forward, backward = _pair(op)
    compared = 0
    for case in registry.evidence(forward).cases():
        if case.tier != "small" or case.name in EMPTY_ROWS:
            continue
        if any(isinstance(a, TensorSpec) and a.fill in FILLS_WITHOUT_DERIVATIVE for a in case.args.values()):
            continue
        args, names = _inputs(forward, case)
        outputs = as_tuple(forward.body(*args))
        live = [o for n, o in zip(forward.outputs, outputs, strict=True) if n not in forward.gradient.nondifferentiable]
        generator = torch.Generator().manual_seed(1)
        cotangents = tuple(torch.randn(o.shape, dtype=torch.float64, generator=generator) for o in outputs)
        # a table without rows, or experts without tokens: nothing of the output comes from the inputs
        reached = [(o, c) for o, c in zip(live, cotangents, strict=False) if o.requires_grad]
        expected: Sequence[Tensor | None] = [None] * len(names)
        if reached:
            expected = torch.autograd.grad(
                [o for o, _ in reached],
                [args[forward.names.index(n)] for n in names],
                [c for _, c in reached],
                allow_unused=True,
            )
        with torch.no_grad():
            grad_of = gradients(forward, backward, args, outputs, cotangents)
        for name, want in zip(names, expected, strict=True):
            torch.testing.assert_close(
                grad_of[name],
                torch.zeros_like(grad_of[name]) if want is None else want,
                rtol=1e-9,
                atol=1e-9,
                equal_nan=True,
                msg=lambda m, c=case.name, n=name: f"{c}, {n}: {m}",
            )
            compared += 1
    assert compared >= 10


TINY = Sizes(
    rows=(1, 2, 3),
    width=(1, 2, 3, 5),
    depth=(1, 2, 3, 4),
    batch=(1, 2),
    groups=(1, 2),
    per_group=(1, 2),
    queries=(1, 2, 4),
    keys=(1, 2, 5),
    head_dim=(2, 4),
    windows=(None, 1, 2),
)
SMOOTH = {"normal", "uniform", "unit", "weight", "mask", "bias"}
MOST, DRAWN = 48, 12  # elements of a case that are moved one by one; cases of an op


def tiny(forward: Primitive) -> list[tuple[tuple[Any, ...], list[str]]]:
    """Inputs drawn from the op's whole domain, few enough to move each, and without kinks, NaN or saturation."""
    draws = []
    own = {fill.name for fill in registry.evidence(forward).fills if fill.independent}  # drawn, not written down
    for case, _ in fuzz.cases(forward, 12_000, sizes=TINY):
        floats = {n: a for n, a in case.args.items() if isinstance(a, TensorSpec) and a.dtype in FLOATS}
        if not all(a.fill in SMOOTH | own for a in floats.values()):
            continue
        args, names = _inputs(forward, case)
        if not all(bool((args[forward.names.index(n)].abs() < 16).all()) for n in names):
            continue  # an op's own fill may saturate, or hold NaN
        chooses = any(not o.is_floating_point() for o in as_tuple(forward.meta(*args)))
        if chooses and any(len(args[forward.names.index(n)].unique()) < math.prod(a.shape) for n, a in floats.items()):
            continue  # where numbers are equal a choice leaps
        elements = [args[forward.names.index(n)].numel() for n in names]
        if all(elements) and 3 <= sum(elements) <= MOST:
            draws.append((args, names))
        if len(draws) == DRAWN:
            return draws
    raise AssertionError(f"{forward.name}: {len(draws)} of {DRAWN} tiny cases")


@pytest.mark.daily(7)
@pytest.mark.parametrize("op", BACKWARD)
def test_gradcheck(op: str) -> None:
    forward, backward = _pair(op)
    checked = 0
    for args, _ in tiny(forward):

        def outputs(*args: Any) -> Any:
            got = as_tuple(Analytic.apply(forward, backward, *args))  # type: ignore[no-untyped-call]
            # lse is -inf in rows that see nothing: it has no numerical derivative there
            return tuple(
                o
                for n, o in zip(forward.outputs, got, strict=True)
                if n not in forward.gradient.nondifferentiable and bool(o.isfinite().all())
            )

        if outputs(*args):
            assert torch.autograd.gradcheck(outputs, args, eps=1e-6, atol=1e-7, rtol=1e-5)
            checked += 1
    least = DRAWN // 2
    text = f"{op}: {checked} of {DRAWN} cases that its Domain drew have finite outputs; required: {least}. "
    assert checked >= least, f"{text}Leave infinite scalars to the cases of its evidence."


def test_the_cases_that_autograd_cannot_judge_exist() -> None:
    names = {c.name for c in cases_of(registry.primitive("attention"))}
    assert set(EMPTY_ROWS) <= names
