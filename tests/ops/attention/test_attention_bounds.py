"""The bound of attention's gradients where probabilities are lost: below float32's normal numbers, or by a rounding."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.attention import oracle
from ferryman.porting.judging.metrics import Declared, bounds, terms_of

OP = registry.primitive("attention_backward")
NAMES = OP.outputs[:3]


def _limits(args: tuple, exact: tuple[Tensor, ...], declared: Declared, dtype: torch.dtype) -> list[Tensor]:
    kinds = [dtype] * len(exact)
    own = bounds(terms_of(OP, args, exact), exact, kinds, declared, dtype, saved_exact=True, shown=False)
    return [limit.total for limit in own[:3]]


def test_a_probability_below_the_least_normal_number_may_be_zero() -> None:
    """Keys of one number: the second key's score is 87.8 below the first's, and its dP is 1,000."""
    q, k = torch.full((1, 1, 1, 1), 2.0), torch.tensor([0.0, -43.9]).reshape(1, 1, 2, 1)
    v, grad = torch.tensor([0.0, 1000.0]).reshape(1, 1, 2, 1), torch.ones(1, 1, 1, 1)
    q, k, v, grad = (x.double() for x in (q, k, v, grad))
    out, lse = oracle.forward(q, k, v, False, 1.0, None, 0.0, None)
    args = (grad, None, q, k, v, out, lse, False, 1.0, None, 0.0, None)
    exact = OP.body(*args)
    share = torch.softmax(q @ k.mT, -1)
    assert 0 < float(share[..., 1]) < 2.0**-126
    flushed = torch.where(share < 2.0**-126, 0.0, share)
    ds = flushed * (grad @ v.mT - (grad * out).sum(-1, keepdim=True))
    results = (ds @ k, ds.mT @ q, flushed.mT @ grad)
    for name, got, right, limit in zip(
        NAMES, results, exact, _limits(args, exact, Declared(), torch.float32), strict=False
    ):
        error = (got - right).abs()
        assert bool((error <= limit).all()), (name, float(error.max()), float(limit.max()))
    assert float((results[1] - exact[1]).abs().max()) > 8 * 2.0**-120  # what dS alone may lose is less


def test_probabilities_that_are_rounded_before_ds_are_a_declared_rounding() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(1, 2, 48, 16, generator=draw).bfloat16() for _ in range(4))
    out, lse = oracle.forward(q, k, v, False, None, None, 0.0, None)
    args = (grad, None, q, k, v, out, lse, False, None, None, 0.0, None)
    wide = tuple(x.double() if isinstance(x, Tensor) else x for x in args)
    exact = OP.body(*wide)
    plain, both = frozenset({"p", "ds"}), frozenset({"p", "ds", "p_in_ds"})
    noise = []
    for roundings in (plain, both):
        limits = _limits(wide, exact, Declared(roundings=roundings), torch.bfloat16)
        errors = [
            (a.double() - b).abs() for a, b in zip(oracle.backward(*args, roundings=roundings), exact, strict=True)
        ][:3]
        for name, error, limit in zip(NAMES, errors, limits, strict=True):
            assert bool((error <= limit).all()), (name, roundings)
        noise.append([float(error.square().mean()) for error in errors])
    # of dQ and dK it is heard, of dV it is nothing
    assert noise[1][0] > 1.2 * noise[0][0] and noise[1][1] > 1.2 * noise[0][1] and noise[1][2] == noise[0][2]


def test_pytorchs_memory_efficient_gradients_declare_it() -> None:
    declared = {line.name: line.roundings for line in registry.implementations("attention_backward")}
    assert set(declared["torch.efficient"]) == {"p", "ds", "p_in_ds"}
    assert {name for name, own in declared.items() if "p_in_ds" in own} == {"torch.efficient"}
