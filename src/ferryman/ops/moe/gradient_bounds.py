"""Error terms of the gradients of a layer of experts. Arguments are float64; rows are slots, sorted by expert."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.ops.moe.bounds import (
    ALPHA,
    CLAMPED,
    LIMIT,
    SLOPE,
    Terms,
    activated,
    as_given,
    each,
    factor,
    first_in_halves,
    in_halves,
    over_rows,
    product,
    sorted_slots,
    spans,
)

CURVE = (
    1.2  # the steepest that a slope is: silu's 0.5 (1.702 times that, clamped), gelu's 0.8, that of gelu by tanh 1.1
)
_ROOT = math.sqrt(2 / math.pi)
_CUBIC = 0.044715
_TINY = 2.0**-125  # an exp, or a product, that underflows on the way
# what one unit of a term is at most; a rounding's is that of bfloat16
_UNITS = {"accumulate": 2.0**-24, "tf32": 2.0**-11}
_ROUNDING = 2.0**-8


def slope(gate: Tensor, activation: str) -> Tensor:
    """The derivative of the activation. PyTorch's clamp lets a gradient pass at its limits."""
    if activation in CLAMPED:
        s = torch.sigmoid(ALPHA * gate)
        # past 1e4 the slope is 0 or 1, and an infinite gate must not meet the 0: 0 * inf
        bent = s * (1 + ALPHA * gate.clamp(-1e4, 1e4) * (1 - s))
        return torch.where(gate > LIMIT, 0.0, bent)
    if activation == "silu":
        s = torch.sigmoid(gate)
        return s * (1 + gate * (1 - s))
    factor, steep, _ = _factor(gate, activation)
    return factor + gate * steep


def passed(up: Tensor, activation: str) -> Tensor:
    """The derivative of what the activated gate is multiplied by."""
    return torch.where(up.abs() > LIMIT, 0.0, 1.0).to(up.dtype) if activation in CLAMPED else torch.ones_like(up)


def _nearness(distance: Tensor) -> Tensor:
    """How steep a line through a clamp's limit is that reaches its jump of 1 at an argument so far from it."""
    return 1 / distance.abs().clamp(min=2.0**-60)


def _factor(gate: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """(F, F', |argument of F's function|) where the activation is gate F(gate)."""
    if activation == "gelu":
        return (
            0.5 * (1 + torch.erf(gate * 0.5**0.5)),
            torch.exp(-0.5 * gate * gate) / math.sqrt(2 * math.pi),
            gate.abs(),
        )
    t = torch.tanh(_ROOT * (gate + _CUBIC * gate**3))
    # past 1e4 the slope is 0, and the square must not become infinite: 0 * inf
    square = (gate * gate).clamp(max=1e8)
    return (
        0.5 * (1 + t),
        0.5 * (1 - t * t) * _ROOT * (1 + 3 * _CUBIC * square),
        _ROOT * (gate + _CUBIC * gate**3).abs(),
    )


def _own_slope(gate: Tensor, activation: str) -> Tensor:
    """What the slope's own arithmetic is off by, in units of 2^-24: as of the gated activations (docs/parity.md)."""
    size = gate.abs()
    if activation in CLAMPED:
        cut = ALPHA * gate.clamp(max=LIMIT)
        s = torch.sigmoid(cut)
        return torch.where(gate > LIMIT, 0.0, s * (1 + cut.abs() * (1 - s)) * (4 * cut.abs() + 10))
    if activation == "silu":
        s = torch.sigmoid(gate)
        return s * (1 + size * (1 - s)) * (2 * size + 8)
    _, steep, argument = _factor(gate, activation)
    bend = (gate * steep).abs()
    units = 4 + 4 * argument * steep + bend * (4 * argument * (1 + argument) + 12) + 2 * slope(gate, activation).abs()
    if activation == "gelu_tanh":
        steepness = _ROOT * (1 + 3 * _CUBIC * gate * gate)
        units = units + size * torch.where(argument < 10, 3 * steepness, steep / 2.0**-24)
    return units


class Moved(NamedTuple):
    """A number's magnitude, and what it is off by."""

    size: Tensor
    terms: Terms


def times(*factors: Moved) -> Moved:
    """The product: each error times the others' magnitudes, and errors of one kind times each other, which is all that
    there is where sums cancel and the factors themselves are 0."""
    size, terms = factors[0]
    for other in factors[1:]:
        products = {name: term * other.size for name, term in terms.items()}
        for name, term in other.terms.items():
            own = size * term
            if name in terms:
                own = own + products[name] + _UNITS.get(name, _ROUNDING) * terms[name] * term
            products[name] = own
        size, terms = size * other.size, products
    return Moved(size, terms)


def plus(terms: Terms, more: Mapping[str, Tensor]) -> Terms:
    total = dict(terms)
    for name, term in more.items():
        total[name] = total[name] + term if name in total else term
    return total


def through(terms: Mapping[str, Tensor], carried: Callable[[Tensor], Tensor]) -> Terms:
    return {name: carried(term) for name, term in terms.items()}


def _of_product(depth: int, of: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Terms:
    """Of a product by experts, each term in its shape."""
    terms = product(depth, of, a, b)
    del terms["bias"]  # every error counts as one that may lean
    return through(terms, lambda term: term.expand_as(terms["accumulate"]))


def moe_experts_backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """Each stage's own error, carried on. The first product and the gradient after the second are factors of all that
    follows; a slope moves by 1.2 at most for each unit of the gate, the activation by 1.13."""
    grad, x, gate_up, down, topk_ids, topk_weights, activation, bias, *needs = args
    gate_up, clamped = in_halves(gate_up, 1, activation), activation in CLAMPED
    (experts, width, inner), slots = down.shape, topk_ids.shape[1]
    empty = tuple({"accumulate": torch.zeros_like(o)} for o in outputs)
    if not x.numel() or not topk_ids.numel():
        return empty
    order, ends = sorted_slots(topk_ids, experts)
    known = (torch.arange(len(order), device=x.device) < ends[-1])[:, None]
    token = order // slots
    rows, above = x[token], torch.where(known, grad[token], 0.0)
    weight = torch.where(known, topk_weights.reshape(-1)[order].abs()[:, None], 0.0)
    biased = x.new_zeros(len(order), 2 * inner + width)
    if bias is not None:
        for expert, owned in spans(ends, len(order)):
            biased[owned] = bias[expert]
    biased = first_in_halves(biased, inner, activation)

    def by_expert(a: Tensor, b: Tensor) -> Tensor:
        return each(a, b, ends)

    def by_expert_turned(a: Tensor, b: Tensor) -> Tensor:
        return each(a, b.mT, ends)

    def summed(a: Tensor, b: Tensor) -> Tensor:
        return over_rows(a, b, ends, experts)

    ones = torch.ones_like
    h = by_expert(rows, gate_up) + biased[:, : 2 * inner]
    first = plus(
        _of_product(width, by_expert, rows, gate_up),
        {"accumulate": h.abs() + 2 * biased[:, : 2 * inner].abs(), "h": h.abs(), "h_flush": ones(h)},
    )
    if clamped:
        first = through(first, lambda term: torch.where(h.isfinite(), term, 0.0))
    gate, raw = h[:, :inner], h[:, inner:]
    if clamped:  # below -1e4, and of -inf, the slope is 0; what follows from the activation there is 0, or not finite
        gate = gate.clamp(min=-1e4)
    up = factor(raw, activation).nan_to_num(nan=0.0)  # what follows from it is NaN; the gradient of it does not
    of_gate = through(first, lambda term: term[:, :inner])
    of_up = through(first, lambda term: term[:, inner:])
    u = by_expert_turned(above, down)
    behind = Moved(u.abs(), plus(_of_product(width, by_expert_turned, above, down), {"u": u.abs(), "u_flush": ones(u)}))
    opened = activated(gate, activation)
    size = gate.clamp(max=LIMIT).abs() if clamped else gate.abs()
    own = opened.abs() * ((4 * ALPHA * size + 10) if clamped else (2 * size + 8)) + 4 * size * torch.exp(-0.5 * size)
    tiny = _TINY * (1 + size)
    to_up = Moved(up.abs(), plus(of_up, {"accumulate": up.abs()}) if clamped else of_up)
    to_gate = Moved(opened.abs(), plus(through(of_gate, lambda t: SLOPE * t), {"accumulate": own, "absolute": tiny}))
    steep = slope(gate, activation)
    # a slope that ends at a limit: an error as large as the distance to it takes the whole
    curve = CURVE + SLOPE * _nearness(gate - LIMIT) if clamped else CURVE
    to_slope = Moved(
        steep.abs(),
        plus(through(of_gate, lambda t: curve * t), {"accumulate": _own_slope(gate, activation), "absolute": tiny}),
    )
    passes = passed(raw, activation)
    jump = _nearness(raw.abs() - LIMIT).nan_to_num(nan=0.0) if clamped else 0.0
    to_passed = Moved(passes, through(of_up, lambda t: jump * t) if clamped else {"absolute": 0.0 * passes})
    share = Moved(weight, {"absolute": torch.zeros_like(weight)})

    def finished(stage: Moved, name: str) -> Terms:
        """With four roundings of its own, what underflows in them, and the declared one."""
        small = _TINY * (1 + behind.size) * (1 + weight) * (1 + to_up.size) * (1 + to_gate.size)
        return plus(
            stage.terms,
            {
                "accumulate": 4 * stage.size,
                "absolute": small,
                name: (1 + 2 * _ROUNDING) * stage.size,
                f"{name}_flush": ones(stage.size),
            },
        )

    both = [times(share, behind, to_up, to_slope), times(share, behind, to_gate, to_passed)]
    opened_up = times(to_gate, to_up)
    moved = [finished(one, "dh") for one in both]
    dh = Moved(
        torch.cat([one.size for one in both], -1),
        {
            name: torch.cat([moved[0].get(name, ones(up) * 0), moved[1].get(name, ones(up) * 0)], -1)
            for name in moved[0]
        },
    )
    a = times(share, opened_up)
    wa = Moved(a.size, finished(a, "a"))
    terms: dict[str, Terms] = {}
    if needs[0]:
        terms["x"] = _gradient_of_x(dh, gate_up, outputs[0], token, slots, by_expert_turned)
    if needs[1]:
        terms["gate_up"] = through(_of_sum(dh, rows.abs(), summed), lambda t: as_given(t, 1, activation))
    if needs[2]:
        terms["down"] = _of_sum(wa, above.abs(), lambda p, q: summed(q, p))
    if needs[3]:
        terms["topk_weights"] = _gradient_of_weights(opened_up, behind, above, biased, order, outputs[3])
    if needs[4] and bias is not None:
        n = 6 * math.sqrt(len(order)) + 2
        column = ones(weight)
        direct = above.abs() * weight
        parts = plus(through(dh.terms, lambda t: summed(t, column)), {"accumulate": n * summed(dh.size, column)})
        parts = through(parts, lambda t: as_given(t, 1, activation))
        there = {"accumulate": n * summed(direct, column), "absolute": summed(ones(direct), column) * _TINY}
        nothing = torch.zeros_like(there["accumulate"])
        terms["bias"] = {name: torch.cat([term, there.get(name, nothing)], 1)[..., 0] for name, term in parts.items()}
    names = ("x", "gate_up", "down", "topk_weights", "bias")
    return tuple(terms.get(name, nothing) for name, nothing in zip(names, empty, strict=True))


def _gradient_of_x(
    dh: Moved, gate_up: Tensor, like: Tensor, token: Tensor, slots: int, by_expert: Callable[..., Tensor]
) -> Terms:
    size = by_expert(dh.size, gate_up.abs())
    terms = through(dh.terms, lambda term: by_expert(term, gate_up.abs()))
    terms = plus(terms, _of_product(gate_up.shape[1], by_expert, dh.size, gate_up))
    terms = plus(
        terms,
        {
            "accumulate": (2 + 6 * math.sqrt(slots)) * size,
            "absolute": torch.full_like(size, _TINY),
            "dx": size,
            "dx_flush": torch.ones_like(size),
        },
    )
    return through(terms, lambda term: torch.zeros_like(like).index_add_(0, token, term))


def _of_sum(moved: Moved, other: Tensor, of: Callable[[Tensor, Tensor], Tensor]) -> Terms:
    """A gradient of weights: a sum over an expert's rows."""
    terms = through(moved.terms, lambda term: of(term, other))
    return plus(terms, _of_product(len(other), of, moved.size, other))


def _gradient_of_weights(
    opened_up: Moved, behind: Moved, above: Tensor, biased: Tensor, order: Tensor, like: Tensor
) -> Terms:
    """The sum of the activation times what comes from behind; and, with a bias, of the gradient times it."""
    summand, width = times(opened_up, behind), above.shape[1]
    inner = summand.size.shape[1]
    direct = (above * biased[:, -width:]).abs().sum(-1) if width else above.new_zeros(len(above))
    terms = through(summand.terms, lambda term: term.sum(-1))
    terms = plus(
        terms,
        {
            "accumulate": (6 * math.sqrt(inner) + 3) * summand.size.sum(-1) + (6 * math.sqrt(width) + 2) * direct,
            "absolute": _TINY * (1 + (1 + opened_up.size).sum(-1) + behind.size.sum(-1)),
        },
    )

    def placed(term: Tensor) -> Tensor:
        flat = torch.zeros_like(like).reshape(-1)
        flat[order] = term
        return flat.reshape(like.shape)

    return through(terms, placed)
