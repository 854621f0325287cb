"""The probes of matrix units, on simulated ones: every parameter is recovered exactly, or said not to be visible."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import pytest
import torch

from ferryman.device_profiles.schema import ROUNDINGS
from ferryman.porting.fingerprint import matrix, rounding
from ferryman.porting.fingerprint.formats import FORMATS, factor
from ferryman.porting.fingerprint.tree import Exact, Irregular, build, describe, meeting_sizes, order_class
from tests.unit.fingerprint_units import Unit, in_order

F32 = torch.float32


def _probe(unit: Unit, name: str) -> dict[str, matrix.Answer]:
    form = FORMATS[name]
    return {f.name: f for f in matrix.probe_matrix(matrix.summing(unit.multiply, form), form)}


def _values(unit: Unit, name: str) -> dict[str, object]:
    return {key: measurement.value for key, measurement in _probe(unit, name).items()}


# The units of the literature: Fasi et al. (PeerJ CS 7:e330, 2021) for V100 and A100, Hickmann & Bradford and Khattak &
# Mikaitis (2025) for Hopper: blocks of 4, 8 and 16, no, one and two bits below float32's, everything cut toward zero.
KNOWN = {
    "V100": (Unit(4, 24, stored=24, rule="toward-zero"), "float16", 24),
    "A100": (Unit(8, 25, stored=24, rule="toward-zero"), "bfloat16", 24),
    "A100 tf32": (Unit(4, 25, stored=24, rule="toward-zero", inputs=11), "tf32", 24),
    "H100": (Unit(16, 26, stored=24, rule="toward-zero"), "float16", 24),
    "H100 fp8": (Unit(32, 14, stored=24, rule="toward-zero"), "e4m3fn", 14),
    "H100 fp8 e5m2": (Unit(32, 14, stored=24, rule="toward-zero"), "e5m2", 14),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_units(name: str) -> None:
    unit, form, accumulator = KNOWN[name]
    assert _values(unit, form) == {
        "order": "fused",
        "block": unit.block,
        "aligned_bits": unit.aligned,
        "aligned_rounding": "toward-zero",
        "accumulator_bits": accumulator,
        "accumulator_rounding": "toward-zero",
    }


_NEAR_ZERO = ("toward-zero", "down")
JOINED = [*itertools.product((2, 4, 8, 16), (2, 3), ROUNDINGS, _NEAR_ZERO, (True,))]
APART = [*itertools.product((4, 8), (2, 4), ROUNDINGS, ("toward-zero", "nearest-even"), (False,))]
FUSED = [*JOINED, *APART]


@pytest.mark.daily(7)
@pytest.mark.parametrize(
    ("block", "extra", "rule", "align", "joined"),
    # one in five runs always, and so that every rule, block and alignment is among them
    [pytest.param(*unit, marks=[] if i % 5 == i // 10 % 5 else pytest.mark.slow) for i, unit in enumerate(FUSED)],
)
def test_every_parameter_of_a_fused_unit(block: int, extra: int, rule: str, align: str, joined: bool) -> None:
    unit = Unit(block, 24 + extra, align_rule=align, stored=24, rule=rule, joined=joined)
    values = _values(unit, "bfloat16")
    assert (values["block"], values["accumulator_bits"], values["accumulator_rounding"]) == (
        1 if block == 2 and not joined else block,
        24,
        rule,
    )
    assert (values["aligned_bits"], values["aligned_rounding"]) == (24 + extra, align)
    assert values["order"] == ("fused" if joined else "blocked")


@pytest.mark.daily(7)
@pytest.mark.parametrize(("bits", "rule"), [*itertools.product((8, 11, 14, 24), ROUNDINGS), (32, "toward-zero")])
def test_accumulators_of_sequential_units(bits: int, rule: str) -> None:
    values = _values(Unit(stored=bits, rule=rule), "bfloat16")
    assert values["order"] == "sequential" and values["block"] == 1 and values["aligned_bits"] is None
    assert (values["accumulator_bits"], values["accumulator_rounding"]) == (bits, rule)


def test_a_float16_accumulator_that_overflows_is_probed_below_its_largest_number() -> None:
    half = Unit(stored=11)

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        sums = half.multiply(left, right)
        overflows = (left * right).abs().amax(-1) > 65504
        return torch.where(overflows, torch.tensor(math.nan, dtype=torch.float64), sums)

    form = FORMATS["float16"]
    values = {f.name: f.value for f in matrix.probe_matrix(matrix.summing(multiply, form), form)}
    assert (values["order"], values["accumulator_bits"]) == ("sequential", 11)


def test_an_exact_unit_says_so() -> None:
    measurements = _probe(Unit(16, None, stored=200), "bfloat16")
    assert measurements["order"].value == "exact" and "60 bits" in str(measurements["order"].detail["words"])
    assert measurements["accumulator_bits"].value == 60
    assert measurements["accumulator_bits"].detail == {"at_least": True}
    assert measurements["block"].value is None and measurements["block"].reason


@pytest.mark.parametrize("joined", [True, False])
def test_a_block_that_adds_without_loss(joined: bool) -> None:
    measurements = _probe(Unit(4, None, stored=24, joined=joined), "float16")
    assert (measurements["order"].value, measurements["block"].value) == ("fused" if joined else "blocked", 4)
    assert measurements["aligned_bits"].value == 28 and measurements["aligned_bits"].detail["at_least"] is True
    assert (measurements["aligned_rounding"].value, measurements["accumulator_bits"].value) == (None, 24)


def test_a_sum_without_a_fixed_order_is_irregular() -> None:
    generator = torch.Generator().manual_seed(1)
    form = FORMATS["bfloat16"]

    def shuffled(terms: torch.Tensor) -> torch.Tensor:
        order = torch.rand(terms.shape, generator=generator).argsort(-1)  # another one for each sum, as atomics give
        return terms.gather(1, order).float().cumsum(-1)[:, -1].double()

    measurements = {f.name: f for f in matrix.probe_matrix(shuffled, form)}
    assert measurements["order"].value == "irregular" and measurements["accumulator_bits"].value is None
    assert "changes from call to call" in str(measurements["accumulator_bits"].reason)


def test_an_order_that_depends_on_the_place_is_irregular() -> None:
    def edges(terms: torch.Tensor) -> torch.Tensor:
        sums = Unit().multiply(terms, torch.ones_like(terms))
        backwards = Unit(backwards=True).multiply(terms, torch.ones_like(terms))
        return torch.where(torch.arange(len(terms)) % 8 < 6, sums, backwards)

    order, root = matrix.probe_order(edges, FORMATS["bfloat16"], 64, "order")
    assert root is None and order.value == "irregular"
    assert "depends on the place" in str(order.detail["words"])


def test_a_fixed_result_of_no_tree_is_irregular_and_says_where() -> None:
    """The pair (0, 2) absorbs all, every other pair what a sequential sum does: no tree has such sizes."""

    def odd(terms: torch.Tensor) -> torch.Tensor:
        sums = Unit().multiply(terms, torch.ones_like(terms))
        return torch.where((terms[:, 0].abs() > 1) & (terms[:, 2].abs() > 1), 0.0, sums)

    order, root = matrix.probe_order(odd, FORMATS["bfloat16"], 64, "order")
    assert root is None and "no fixed order: term" in str(order.detail["words"])


def test_promotion_is_seen_and_measured() -> None:
    unit = Unit(32, 14, stored=24, rule="toward-zero", promote=128)
    form = FORMATS["e4m3fn"]
    reduce = matrix.summing(unit.multiply, form)
    short = {f.name: f.value for f in matrix.probe_matrix(reduce, form)}
    assert (short["block"], short["accumulator_bits"]) == (32, 14)
    measurements = {f.name: f for f in matrix.probe_long(reduce, form, terms=1024)}
    assert str(measurements["order_1024"].detail["words"]).startswith("8 sums of 128 in a chain")
    assert (measurements["order_1024"].value, measurements["partial_bits"].value) == ("blocked", 24)
    assert measurements["partial_rounding"].value == "nearest-even"
    plain = Unit(32, 14, stored=24, rule="toward-zero")
    measurements = {f.name: f for f in matrix.probe_long(matrix.summing(plain.multiply, form), form, terms=1024)}
    # one in 16 terms is placed, so two of each block of 32
    assert measurements["order_1024"].detail["words"] == "32 at a time into the accumulator"
    assert (measurements["order_1024"].value, measurements["partial_bits"].value) == ("fused", None)


@pytest.mark.parametrize(("bits", "rule"), [*itertools.product((8, 11, 14, 20), ROUNDINGS)])
def test_inputs_that_are_cut(bits: int, rule: str) -> None:
    unit = Unit(8, 26, rule="toward-zero", inputs=bits, input_rule=rule)
    form = FORMATS["tf32"]
    values = [(f.name, f.value) for f in matrix.probe_inputs(matrix.summing(unit.multiply, form), form)]
    assert values == [("input_bits", bits), ("input_rounding", rule)]


@pytest.mark.parametrize("name", FORMATS)
def test_inputs_that_are_used_whole(name: str) -> None:
    form = FORMATS[name]
    measurements = list(matrix.probe_inputs(matrix.summing(Unit().multiply, form), form))
    assert (measurements[0].value, measurements[1].value) == (form.bits, None)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("flush", [False, True])
def test_subnormals(name: str, flush: bool) -> None:
    form = FORMATS[name]
    unit = Unit(flush_inputs=form.right.normal if flush else None, flush_outputs=flush)
    left, right = matrix.probe_subnormals(unit.multiply, form, F32)
    # one of two factors has the other format's subnormals: a unit that flushes only those is neither
    expected = "flushed" if flush else "kept"
    assert left.value == (expected if form.partner is None or not flush else left.value)
    if form.key in ("fp8", "f16"):
        assert right.value is None and "subnormal in float32" in str(right.reason)
    else:
        assert right.value == expected


def test_subnormals_of_one_side_only_are_neither() -> None:
    form = FORMATS["bfloat16"]

    def multiply(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        return Unit().multiply(torch.where(left.abs() < 2.0**form.normal, 0.0, left), right)

    measurement = next(iter(matrix.probe_subnormals(multiply, form, F32)))
    assert measurement.value is None and "neither" in str(measurement.reason)


# -- the pieces


@pytest.mark.parametrize("name", FORMATS)
def test_every_product_that_a_probe_needs_has_two_factors(name: str) -> None:
    form = FORMATS[name]
    steps = [s * 2.0 ** (form.leading - d) for d in range(1, form.window + 1) for s in rounding.STEPS]
    big = [2.0**form.absorber, 1.5 * 2.0**form.leading, 2.0**form.unit, 0.0]
    products = torch.tensor([*steps, *big, *(-b for b in big)], dtype=torch.float64)
    left, right = factor(products, form)
    assert torch.equal(left * right, products)
    assert torch.equal(left.to(form.dtype).double(), left) and torch.equal(right.to(form.right.dtype).double(), right)


def test_a_product_out_of_range_is_refused() -> None:
    with pytest.raises(ValueError, match="no two factors in e4m3fn"):
        factor(torch.tensor([2.0**20], dtype=torch.float64), FORMATS["e4m3fn"])


def test_rules_are_told_apart_by_the_steps() -> None:
    assert tuple(rounding.RULES) == ROUNDINGS
    tables = {
        rule: {(s, n): rounding.rounded_beside(rule, s, n) for s in rounding.STEPS for n in (False, True)}
        for rule in ROUNDINGS
    }
    for rule, table in tables.items():
        assert rounding.rules_of_sum(table) == [rule]
        assert rounding.rule_of_addend({s: rounding.RULES[rule](s) for s in rounding.STEPS}) == rule
    broken = {**tables["down"], (0.25, False): 1.0}
    assert rounding.rules_of_sum(broken) == []


def _float32(values: Sequence[float]) -> list[float]:
    return torch.tensor(values, dtype=torch.float32).double().tolist()


def _sequential(values: Sequence[float]) -> float:
    total = 0.0
    for value in values:
        (total,) = _float32([total + value])
    return total


def _pairwise(values: Sequence[float]) -> float:
    if len(values) == 1:
        return values[0]
    half = len(values) // 2
    return _float32([_pairwise(values[:half]) + _pairwise(values[half:])])[0]


ORDERS = {
    "sequential": (_sequential, "sequential", "sequential"),
    "backwards": (lambda v: _sequential(v[::-1]), "sequential", "sequential, last term first"),
    "pairwise": (_pairwise, "pairwise", "pairwise"),
    "strided": (
        lambda v: _pairwise([_sequential(v[i::4]) for i in range(4)]),
        "strided",
        "4 strided (by 4) sums of 8, added in pairs (each: sequential)",
    ),
    "split": (
        lambda v: _pairwise([_sequential(v[:16]), _sequential(v[16:])]),
        "tree",
        "2 contiguous sums of 16 (each: sequential)",
    ),
    "chunks": (
        lambda v: _sequential([_sequential(v[i : i + 8]) for i in range(0, 32, 8)]),
        "blocked",
        "4 sums of 8 in a chain (each: sequential)",
    ),
    "uneven": (
        lambda v: _sequential([_sequential(v[i : i + 12]) for i in range(0, 32, 12)]),
        "blocked",
        "3 sums of 8 to 12 in a chain (each: sequential)",
    ),
}


@pytest.mark.parametrize("name", ORDERS)
def test_orders_are_recovered_and_named(name: str) -> None:
    add, kind, words = ORDERS[name]
    root = build(meeting_sizes(in_order(add), 32, range(32), 2.0**60, 1.0))
    assert (order_class(root), describe(root)) == (kind, words)
    assert sorted(root.leaves) == list(range(32))


def test_the_tree_is_the_one_that_summed() -> None:
    root = build(meeting_sizes(in_order(lambda v: _pairwise([_sequential(v[:3]), v[3]])), 4, range(4), 2.0**60, 1.0))
    assert root.notation == "(((0 1) 2) 3)"


@pytest.mark.parametrize(
    ("table", "why"),
    [
        ([[1, 3, 2], [3, 1, 2], [2, 2, 1]], "two partial sums at once"),
        ([[1, 2, 4], [2, 1, 4], [4, 4, 1]], "more than the 3 terms"),
    ],
)
def test_sizes_of_no_tree_are_irregular(table: list[list[int]], why: str) -> None:
    with pytest.raises(Irregular, match=why):
        build(table)


def test_nothing_absorbed_is_exact() -> None:
    with pytest.raises(Exact):
        build(meeting_sizes(in_order(math.fsum), 8, range(8), 2.0**30, 1.0))
