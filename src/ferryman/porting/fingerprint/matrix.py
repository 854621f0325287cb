"""What a matrix unit does to a sum of products: its order, its width, its rounding, its subnormals.

Every probe is a sum whose large terms cancel exactly, so that what is left shows what became of the small ones, in any
result dtype. Nothing here knows where the sum is computed: the tests run the same probes on simulated units.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ferryman.porting.fingerprint.formats import Format, factor
from ferryman.porting.fingerprint.rounding import STEPS, rule_of_addend, rules_of_sum
from ferryman.porting.fingerprint.tree import (
    Exact,
    Irregular,
    Node,
    Reduce,
    chain_places,
    describe,
    fused,
    longest_spine,
    order_class,
    recover,
)

LONG, ACTIVE = 4096, 64  # of a long sum 64 terms are placed, evenly spread: enough to see splits and promotions


@dataclass
class Answer:
    """One measured fact, or the reason why there is none. ``detail`` holds what it was read from."""

    name: str
    value: str | int | float | None
    reason: str | None = None
    detail: dict[str, object] = field(default_factory=dict)


@dataclass(frozen=True)
class Width:
    """Fraction bits kept below the leading one, and the rounding of what lies below them."""

    bits: int
    at_least: bool
    rule: str | None
    table: dict[str, float]


def kept_bits(reduce: Reduce, form: Format, length: int, at: tuple[int, int, int]) -> tuple[int, bool]:
    """(fraction bits that survive beside a leading term, whether even the smallest that could be tried does).

    ``at`` places +M, a power of two, and -M. The smallest power that comes back unchanged counts: one that is rounded
    away is 0, one that is rounded up comes back doubled.
    """
    depths = range(2, form.window + 1)  # 1.5 of the largest power and half of it would overflow float16
    terms = torch.zeros(len(depths), length, dtype=torch.float64)
    small = torch.tensor([2.0 ** (form.leading - d) for d in depths], dtype=torch.float64)
    terms[:, at[0]], terms[:, at[2]] = 1.5 * 2.0**form.leading, -1.5 * 2.0**form.leading
    terms[:, at[1]] = small
    whole = (reduce(terms) == small).tolist()
    bits = next((d - 1 for d, kept in zip(depths, whole, strict=True) if not kept), form.window)
    if any(whole[bits:]):
        raise Irregular(f"2^-{bits + 1} of the leading term is lost, a smaller one is not")
    return bits, bits == form.window


def remainders(
    reduce: Reduce, form: Format, length: int, at: tuple[int, int, int], bits: int
) -> dict[tuple[float, bool], float]:
    """What is left of quarter steps of the last bit, by (step, whether -M comes first)."""
    keys = [(step, negative) for negative in (False, True) for step in STEPS]
    last = 2.0 ** (form.leading - bits)
    terms = torch.zeros(len(keys), length, dtype=torch.float64)
    for row, (step, negative) in enumerate(keys):
        big = (-1.5 if negative else 1.5) * 2.0**form.leading
        terms[row, at[0]], terms[row, at[1]], terms[row, at[2]] = big, step * last, -big
    return dict(zip(keys, (reduce(terms) / last).tolist(), strict=True))


def width_of_sum(
    reduce: Reduce, form: Format, length: int, at: tuple[int, int, int], beside: Width | None = None
) -> Width:
    """How a partial sum is stored: M, then a small term is added, then M is taken away.

    ``beside`` is the alignment of terms in the step that adds the small one: it is cut there first.
    """
    bits, at_least = kept_bits(reduce, form, length, at)
    if at_least:
        return Width(bits, True, None, {})
    table = remainders(reduce, form, length, at, bits)
    if beside is None or beside.at_least or beside.rule is None:
        rules = rules_of_sum(table)
    elif beside.bits <= bits:
        # nothing below the last bit arrives: what is seen is the alignment
        rules = [beside.rule] if rules_of_sum(table, (0, beside.rule)) else []
    else:
        rules = rules_of_sum(table, (beside.bits - bits, beside.rule))
    return Width(bits, False, rules[0] if len(rules) == 1 else None, _named(table))


def width_of_addend(reduce: Reduce, form: Format, length: int, at: tuple[int, int, int]) -> Width:
    """How far terms that are added at once are aligned: M, -M and a small term in the same step."""
    bits, at_least = kept_bits(reduce, form, length, at)
    if at_least:
        return Width(bits, True, None, {})
    table = remainders(reduce, form, length, at, bits)
    either = {step: table[step, False] for step in STEPS}
    same = all(table[step, True] == value for step, value in either.items())
    return Width(bits, False, rule_of_addend(either) if same else None, _named(table))


def _named(table: dict[tuple[float, bool], float]) -> dict[str, float]:
    return {f"{'-M' if negative else '+M'} {step:+g}": value for (step, negative), value in table.items()}


def order(reduce: Reduce, form: Format, length: int, positions: Sequence[int]) -> Node:
    """The tree of a sum. An accumulator too narrow for the format's own range gets a smaller absorber."""
    try:
        return recover(reduce, length, positions, 2.0**form.absorber, 2.0**form.unit)
    except Irregular:
        if form.narrow is None:
            raise
        big, unit = form.narrow
        return recover(reduce, length, positions, 2.0**big, 2.0**unit)


def accumulator_places(root: Node) -> tuple[tuple[int, int, int], bool] | None:
    """Terms for M, the small one and -M such that M is the running sum when the small one is added, and the result is
    stored before -M comes; and whether that step aligns the small term with M directly.

    None where no partial sum passes through enough steps.
    """
    spine = longest_spine(root)
    steps = list(spine.steps)
    inside = {spine.leaf}
    if len(steps) > 1 and sum(1 for c in steps[0].children if not c.children) > 2:
        inside = set(steps[0].leaves)
        steps = steps[1:]  # M shares the first step with others: it is an accumulator from the second on
    if len(steps) < 2:
        return None
    small = next(i for i in steps[0].leaves if i not in inside)
    last = next(i for i in steps[1].leaves if i not in steps[0].leaves)
    direct = len(steps[0].children) > 2 and any(c.leaf == small for c in steps[0].children)
    return (spine.leaf, small, last), direct


def fused_places(root: Node) -> tuple[int, int, int] | None:
    """Terms for M, the small one and -M that one step adds at once; M may be its accumulator. None where every addition
    has two operands."""
    stack, second = [root], None
    while stack:
        node = stack.pop()
        terms = [c.leaf for c in node.children if not c.children]
        if len(terms) > 2:
            return terms[0], terms[1], terms[2]
        if len(terms) == 2 and len(node.children) == 3:
            sums = next(c for c in node.children if c.children)
            second = sums.leaves[0], terms[0], terms[1]
        stack += node.children
    return second


def probe_order(reduce: Reduce, form: Format, length: int, name: str) -> tuple[Answer, Node | None]:
    """The order of a sum of ``length`` products, from all of them or from ACTIVE that are evenly spread."""
    spacing = 1 if length <= form.terms else length // ACTIVE
    try:
        root = order(reduce, form, length, list(range(0, length, spacing)))
    except Exact:
        span = form.absorber - form.unit
        return Answer(name, "exact", None, {"words": f"exact over {span} bits: the order does not show"}), None
    except Irregular as finding:
        words = f"no fixed order: {finding}"
        if not _same_everywhere(reduce, form, length, spacing):
            words = "the order depends on the place of the element in the result, or changes from call to call"
        return Answer(name, "irregular", None, {"words": words}), None
    detail: dict[str, object] = {"words": describe(root, spacing), "terms": length, "spacing": spacing}
    if spacing == 1:
        detail["tree"] = root.notation
    return Answer(name, order_class(root), None, detail), root


def _same_everywhere(reduce: Reduce, form: Format, length: int, spacing: int) -> bool:
    """Whether equal sums are equal wherever they stand in a result. BLAS libraries for CPUs have kernels for the edges
    of a tile that sum in another order."""
    for i, j in ((0, 1), (0, 2), (1, 2), (1, form.terms // 2)):
        terms = torch.zeros(128, length, dtype=torch.float64)
        terms[:, ::spacing] = 2.0**form.unit
        terms[:, i * spacing], terms[:, j * spacing] = 2.0**form.absorber, -(2.0**form.absorber)
        sums = reduce(terms)
        if not torch.equal(sums, sums[:1].expand_as(sums)):
            return False
    return True


def probe_matrix(reduce: Reduce, form: Format) -> Iterator[Answer]:
    """Order of a short sum of products, how many are fused, their alignment, and the accumulator."""
    terms = form.terms
    ordered, root = probe_order(reduce, form, terms, "order")
    yield ordered
    if root is None:
        why = str(ordered.detail["words"])
        if ordered.value == "exact":
            yield Answer("accumulator_bits", form.absorber - form.unit, None, {"at_least": True})
        else:
            yield Answer("accumulator_bits", None, why)
        for name in ("block", "aligned_bits", "aligned_rounding", "accumulator_rounding"):
            yield Answer(name, None, why)
        return
    yield Answer("block", fused(root))
    together, alignment = fused_places(root), None
    if together is None:
        why = "every addition has two operands: nothing is aligned in common"
        yield from (Answer(name, None, why) for name in ("aligned_bits", "aligned_rounding"))
    else:
        try:
            alignment = width_of_addend(reduce, form, terms, together)
            yield from _width("aligned", alignment, together)
        except Irregular as finding:
            yield from (Answer(name, None, str(finding)) for name in ("aligned_bits", "aligned_rounding"))
    accumulator = accumulator_places(root)
    if accumulator is None:
        why = f"no partial sum of {terms} terms passes through two additions"
        yield from (Answer(name, None, why) for name in ("accumulator_bits", "accumulator_rounding"))
        return
    places, direct = accumulator
    yield from _accumulator("accumulator", reduce, form, terms, places, alignment if direct else None)


def probe_long(reduce: Reduce, form: Format, *, terms: int = LONG) -> Iterator[Answer]:
    """The order of a long sum: whether it is split, and how the parts are added up."""
    ordered, root = probe_order(reduce, form, terms, f"order_{terms}")
    yield ordered
    places = None if root is None else chain_places(root)
    if places is None:
        why = "the long sum is no chain of partial sums"
        yield from (Answer(name, None, why) for name in ("partial_bits", "partial_rounding"))
        return
    spacing = terms // ACTIVE
    scaled = (places[0] * spacing, places[1] * spacing, places[2] * spacing)
    yield from _accumulator("partial", reduce, form, terms, scaled, None)


def _accumulator(
    name: str, reduce: Reduce, form: Format, terms: int, places: tuple[int, int, int], beside: Width | None
) -> Iterator[Answer]:
    try:
        yield from _width(name, width_of_sum(reduce, form, terms, places, beside), places)
    except Irregular as finding:
        yield from (Answer(f"{name}_{what}", None, str(finding)) for what in ("bits", "rounding"))


def _width(name: str, width: Width, at: tuple[int, int, int]) -> Iterator[Answer]:
    detail: dict[str, object] = {"places": list(at)}
    if width.at_least:
        detail["at_least"] = True
    yield Answer(f"{name}_bits", width.bits + 1, None, detail)  # the leading bit counts: float32 has 24
    if width.at_least:
        yield Answer(f"{name}_rounding", None, "nothing was rounded in the range that was tried")
        return
    why = None if width.rule else "no one rule gives the remainders in detail"
    yield Answer(f"{name}_rounding", width.rule, why, {"remainders": width.table})


def probe_inputs(reduce: Reduce, form: Format) -> Iterator[Answer]:
    """How many significand bits of an input survive, and how the rest is rounded: 1.5 + 2^-d, times one."""

    def single(values: list[float]) -> list[float]:
        sums = torch.zeros(len(values), form.terms, dtype=torch.float64)
        sums[:, 0] = torch.tensor(values, dtype=torch.float64)
        return [float(v) for v in reduce(sums)]

    depths = range(2, form.bits)
    wanted = [1.5 + 2.0**-d for d in depths]
    whole = [a == b for a, b in zip(single(wanted), wanted, strict=True)]
    bits = next((d - 1 for d, kept in zip(depths, whole, strict=True) if not kept), form.bits - 1)
    yield Answer("input_bits", bits + 1)
    if bits == form.bits - 1:
        yield Answer("input_rounding", None, "inputs are used as they are")
        return
    if bits + 2 > form.bits - 1:
        yield Answer("input_rounding", None, f"quarters of the last of {bits + 1} bits do not fit {form.name}")
        return
    last = 2.0**-bits
    keys = [(step, negative) for negative in (False, True) for step in STEPS]
    base = {False: 1.5, True: -1.5}
    got = single([base[negative] + step * last for step, negative in keys])
    table = {(s, n): (v - base[n]) / last for (s, n), v in zip(keys, got, strict=True)}
    rules = rules_of_sum(table)
    rule = rules[0] if len(rules) == 1 else None
    why = None if rule else "no one rule gives the remainders in detail"
    yield Answer("input_rounding", rule, why, {"remainders": _named(table)})


Multiply = Callable[[Tensor, Tensor], Tensor]
"""(P, K) and (P, K) float64 factors to (P,) float64 sums of products, as the route under test computes them."""


def summing(multiply: Multiply, form: Format) -> Reduce:
    """The route as a sum of given products."""
    return lambda products: multiply(*factor(products, form))


def probe_subnormals(multiply: Multiply, form: Format, result: torch.dtype) -> Iterator[Answer]:
    """Whether a subnormal factor counts, on either side, and whether a subnormal result is kept."""
    left, right = form, form.right
    tiny = [max(f.least + 1, f.normal - 4) for f in (left, right)]
    cases = [(tiny[0], min(-tiny[0], right.most)), (min(-tiny[1], left.most), tiny[1])]
    yield Answer("subnormal_inputs", *_survival(multiply, cases, form.terms))
    lowest = torch.finfo(result).tiny  # the smallest normal number
    half = int(torch.frexp(torch.tensor(lowest, dtype=torch.float64)).exponent) - 1 - 4
    if half // 2 < form.normal:
        name = str(result).removeprefix("torch.")
        why = f"no product of normal {form.name} numbers is subnormal in {name}, the result's dtype"
        yield Answer("subnormal_outputs", None, why)
        return
    yield Answer("subnormal_outputs", *_survival(multiply, [(half // 2, half - half // 2)], form.terms))


def _survival(multiply: Multiply, cases: Sequence[tuple[int, int]], terms: int) -> tuple[str | None, str | None]:
    left = torch.zeros(len(cases), terms, dtype=torch.float64)
    right = torch.ones(len(cases), terms, dtype=torch.float64)
    for row, (a, b) in enumerate(cases):
        left[row, 0], right[row, 0] = 2.0**a, 2.0**b
    got = multiply(left, right).tolist()
    if all(v == 2.0 ** (a + b) for v, (a, b) in zip(got, cases, strict=True)):
        return "kept", None
    if all(v == 0 for v in got):
        return "flushed", None
    return None, f"neither kept nor flushed: {got} for {[2.0 ** (a + b) for a, b in cases]}"
