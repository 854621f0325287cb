"""Bounds from terms, masks at the edge of overflow, the worst element, and the noise interval."""

from __future__ import annotations

import math

import pytest
import torch

from ferryman.dispatch import registry
from ferryman.porting.judging import metrics
from ferryman.porting.judging.metrics import Bound, Declared

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def one(value: float) -> torch.Tensor:
    return torch.tensor([value], dtype=torch.float64)


def total(declared: Declared, term: str, *, storage: torch.dtype = BF16, saved: bool = False) -> float:
    terms, zero = [{term: one(1.0)}], [one(0.0)]
    (bound,) = metrics.bounds(terms, zero, [storage], declared, storage, saved_exact=saved, shown=False)
    return bound.total.item() - metrics.SUBNORMAL[storage]


def test_each_declaration_widens_by_its_own_term_only() -> None:
    nothing = Declared()
    assert total(nothing, "accumulate") == 2.0**-24
    assert total(nothing, "absolute") == 1.0
    assert total(nothing, "p") == total(nothing, "split-k") == total(nothing, "tf32") == 0.0
    rounds_p = Declared(roundings=frozenset({"p"}))
    assert total(rounds_p, "p") == 2.0**-8 and total(rounds_p, "ds") == 0.0
    assert total(rounds_p, "p_flush") == metrics.SUBNORMAL[BF16]
    assert total(Declared("split-k"), "split-k") == 2.0**-8 and total(Declared("split-k"), "tf32") == 0.0
    assert total(Declared("tf32-rne"), "tf32") == 2.0**-11 == total(Declared(tf32=True), "tf32")
    assert total(Declared("tf32-rz"), "tf32") == total(Declared("tf32-rz"), "tf32-rz") == 2.0**-11
    assert total(Declared("tf32-rne"), "tf32-rz") == total(Declared(tf32=True), "tf32-rz") == 0.0


@pytest.mark.parametrize("depth", [1, 32, 4096])
def test_cut_operands_lie_within_their_own_class_alone(depth: int) -> None:
    """Products of one sign: what cutting takes adds up, so that the bound for rounding is broken as the sum grows."""
    generator = torch.Generator().manual_seed(0)
    x, w = (torch.rand(64, depth, generator=generator) + 0.5 for _ in range(2))
    cut = [(t.view(torch.int32) & ~0x1FFF).view(F32).double() for t in (x, w)]
    exact, got = x.double() @ w.double().T, cut[0] @ cut[1].T
    terms = registry.primitive("linear").limits.bound((x.double(), w.double(), None), (exact,))
    furthest = {}
    for name in ("tf32-rne", "tf32-rz"):
        (bound,) = metrics.bounds(terms, [exact], [F32], Declared(name), F32, saved_exact=False, shown=False)
        furthest[name] = float(((got - exact).abs() / bound.total).max())
    assert furthest["tf32-rz"] <= 1.0
    assert (furthest["tf32-rne"] > 1.0) == (depth > 1)


def test_the_rounding_of_saved_tensors_is_no_error_where_the_oracle_reads_them() -> None:
    assert total(Declared(), "storage") == 2.0**-8 and total(Declared(), "storage", saved=True) == 0.0


def test_every_bound_holds_the_output_rounding_and_its_smallest_subnormal() -> None:
    (bound,) = metrics.bounds([{}], [one(3.0)], [F16], Declared(), F32, saved_exact=False, shown=True)
    assert bound.total.item() == 3 * 2.0**-11 + 2.0**-24


def masks(
    got: list[float],
    exact: list[float],
    dtype: torch.dtype = F16,
    bound: float = 1e-9,
    ambiguous: list[bool] | None = None,
) -> tuple[list[bool], metrics.Worst | None]:
    x = torch.tensor(exact, dtype=torch.float64)
    either = None if ambiguous is None else torch.tensor(ambiguous)
    allowed = Bound(torch.full_like(x, bound), torch.zeros_like(x), either)
    judged, wrong = metrics.masks("y", torch.tensor(got, dtype=dtype), x, allowed)
    return judged.tolist(), wrong


def test_nan_and_infinities_must_stand_where_the_oracles_do() -> None:
    nan, inf = math.nan, math.inf
    assert masks([1, nan, inf, -inf], [1, nan, inf, -inf]) == ([True, False, False, False], None)
    for got, exact in ((0.0, nan), (nan, 0.0), (inf, -inf), (65504.0, inf), (inf, nan)):
        judged, wrong = masks([1.0, got], [1.0, exact])
        assert wrong is not None and wrong.index == (1,) and judged == [True, False]


def test_an_oracle_beyond_the_output_dtype_counts_as_infinite() -> None:
    assert masks([math.inf], [1e5])[1] is None
    assert masks([65504.0], [1e5])[1] is not None
    assert metrics.largest(F16) == 65520.0
    # within its bound of the edge, the largest number and Inf are both right; NaN and the other sign are not
    assert masks([65504.0], [65521.0], bound=16)[1] is None and masks([math.inf], [65519.0], bound=16)[1] is None
    assert masks([math.nan], [65521.0], bound=16)[1] is not None
    assert masks([-math.inf], [65521.0], bound=16)[1] is not None


def test_ambiguous_elements_may_be_nan_or_plus_infinity_and_nothing_else() -> None:
    for got, right in ((math.nan, True), (math.inf, True), (-math.inf, False), (0.0, False)):
        assert (masks([got], [math.inf], ambiguous=[True])[1] is None) == right


def test_the_worst_element_is_named_in_units_of_its_own_bound() -> None:
    exact = torch.zeros(2, 3, dtype=torch.float64)
    got = exact.float()
    got[1, 2], got[0, 0] = 0.5, 4.0
    bound = torch.ones_like(exact)
    bound[1, 2], bound[0, 0] = 0.1, 8.0
    worst = metrics.worst("y", got, exact, bound, torch.ones_like(exact, dtype=torch.bool))
    assert worst is not None and worst.index == (1, 2) and abs(worst.ratio - 5) < 1e-12 and worst.value == 0.5
    assert metrics.worst("y", got[:0], exact[:0], bound[:0], torch.ones(0, 3, dtype=torch.bool)) is None


def test_a_bound_that_is_not_finite_is_not_usable() -> None:
    finite = torch.ones(2, dtype=torch.bool)
    assert metrics.usable(torch.tensor([1.0, math.inf]), torch.tensor([True, False]))
    assert not metrics.usable(torch.tensor([1.0, math.inf]), finite)
    assert not metrics.usable(torch.tensor([1.0, math.nan]), finite)


def noise(scale: float, n: int = 4096, variance: float = 0.0) -> metrics.Noise | None:
    generator = torch.Generator().manual_seed(3)
    exact = torch.zeros(n, dtype=torch.float64)
    got, low = ((torch.rand(n, generator=generator) - 0.5) for _ in range(2))
    allowed = Bound(torch.ones(n, dtype=torch.float64), torch.full((n,), variance, dtype=torch.float64))
    return metrics.noise(got * scale, low, exact, allowed, torch.ones(n, dtype=torch.bool))


def test_noise_passes_what_is_equal_and_catches_what_is_half_again_as_loud() -> None:
    same, louder = noise(1.0), noise(1.5)
    assert same is not None and same.low < 0 and abs(same.ratio - 0.8) < 0.03
    assert louder is not None and louder.low > 0 and louder.ratio > 1.1
    assert noise(1.0, n=255) is None
    allowed = noise(1.5, variance=0.2)
    assert allowed is not None and allowed.low < 0


def test_noise_of_two_exact_results_is_no_alarm() -> None:
    zero = torch.zeros(512, dtype=torch.float64)
    estimate = metrics.noise(zero.float(), zero.float(), zero, Bound(zero + 1, zero), torch.ones(512, dtype=torch.bool))
    assert estimate is not None and estimate.ratio == 0.0 and estimate.low <= 0


def leaning(shift: float, *, factor: float = 1.0, systematic: float = 0.0, n: int = 8192) -> metrics.Bias | None:
    """Errors uniform in half a bound, shifted; the exact values are +-1 by turns."""
    generator = torch.Generator().manual_seed(5)
    exact = torch.where(torch.arange(n) % 2 == 0, 1.0, -1.0).double()
    mine, low = ((torch.rand(n, generator=generator, dtype=torch.float64) - 0.5) for _ in range(2))
    bound = Bound(torch.ones_like(exact), torch.zeros_like(exact), None, torch.full_like(exact, systematic))
    return metrics.bias(exact * factor + mine + shift, exact + low, exact, bound, torch.ones(n, dtype=torch.bool))


def test_bias_finds_a_shift_and_a_shrinking_and_lets_what_is_allowed_pass() -> None:
    none, up, inward = leaning(0.0), leaning(0.05), leaning(0.0, factor=0.95)
    assert none is not None and none.z < 3
    assert up is not None and up.z > metrics.Z_LIMIT and up.excess > 0 and up.toward_zero is None
    assert inward is not None and inward.z > metrics.Z_LIMIT and inward.toward_zero is True
    outward, allowed = leaning(0.0, factor=1.05), leaning(0.05, systematic=0.05)
    assert outward is not None and outward.toward_zero is False
    assert allowed is not None and allowed.z < 3
    assert leaning(0.05, n=255) is None


def test_an_error_that_a_whole_row_shares_is_one_sample() -> None:
    generator = torch.Generator().manual_seed(2)
    exact = torch.ones(64, 256, dtype=torch.float64)
    rows = 0.5 * torch.randn(64, 1, generator=generator, dtype=torch.float64)
    bound = Bound(torch.ones_like(exact), torch.zeros_like(exact))
    everywhere = torch.ones(exact.shape, dtype=torch.bool)
    bias = metrics.bias(exact + rows, exact, exact, bound, everywhere)
    assert bias is not None and bias.z < 4
    apart = (exact + rows).flatten()[torch.randperm(exact.numel(), generator=generator)].reshape(exact.shape)
    again = metrics.bias(apart, exact, exact, bound, everywhere)  # the same errors, but independent, stand out
    assert again is not None and again.z > metrics.Z_LIMIT > bias.z


def test_systematic_errors_are_allowed_by_the_accumulation_term_or_by_what_stands_for_it() -> None:
    zero = [one(0.0)]
    (plain,) = metrics.bounds([{"accumulate": one(6.0)}], zero, [BF16], Declared(), BF16, saved_exact=True, shown=True)
    assert plain.systematic is not None and plain.systematic.item() == 6 * 2.0**-24
    terms = [{"accumulate": one(6.0), "bias": one(1.0), "absolute": one(2.0**-30), "tf32": one(6.0)}]
    (sums,) = metrics.bounds(terms, zero, [F32], Declared(tf32=True), F32, saved_exact=True, shown=True)
    assert sums.systematic is not None and sums.systematic.item() == 2.0**-24 + 2.0**-30 + 2.0**-11


def test_the_distribution_counts_every_judged_element_once() -> None:
    exact = torch.zeros(6, dtype=torch.float64)
    got = torch.tensor([0.0, 2.0**-11, 2.0**-10, 1.0, 1.5, 100.0], dtype=torch.float64)
    judged = torch.ones(6, dtype=torch.bool)
    counts = metrics.distribution(got, exact, torch.ones_like(exact), judged)
    assert len(counts) == len(metrics.EDGES) + 1 and sum(counts) == 6
    assert counts[0] == 2 and counts[1] == 1 and counts[-1] == 1
    assert counts[1 + metrics.EDGES.index(1.0)] == 2
    assert sum(metrics.distribution(got, exact, torch.ones_like(exact), ~judged)) == 0


def test_shared_roundings_need_rows_and_columns_enough() -> None:
    exact = torch.ones(18, 256, dtype=torch.float64)
    bound, everywhere = Bound(exact, 0 * exact), torch.ones(exact.shape, dtype=torch.bool)
    got = exact + torch.linspace(-0.1, 0.1, exact.numel(), dtype=torch.float64).reshape(exact.shape)
    assert metrics.bias(got, exact, exact, bound, everywhere) is not None
    assert metrics.bias(got, exact, exact, bound, everywhere, shared=True) is None
