"""Error terms of products by experts, and which rows an expert owns. Arguments are float64."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

Terms = dict[str, Tensor]
CLAMPED = ("swiglu_oai", "swiglu_oai_interleaved")
INTERLEAVED = CLAMPED[1]
ALPHA, LIMIT = 1.702, 7.0
SLOPE = 1.13  # the steepest that silu (1.0998) and gelu (1.129) are


def spans(offsets: Tensor, rows: int) -> Iterator[tuple[int, slice]]:
    """(expert, its rows), for experts with any. A row is the first expert's whose end lies beyond it."""
    start = 0
    for expert, end in enumerate(offsets.tolist()):
        end = min(end, rows)
        if end > start:
            yield expert, slice(start, end)
            start = end


def each(x: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Rows of ``x`` times their expert's ``weight`` transposed; 0 for a row that is no expert's."""
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for expert, rows in spans(offsets, x.shape[0]):
        y[rows] = x[rows] @ weight[expert].T
    return y


def over_rows(grad: Tensor, x: Tensor, offsets: Tensor, experts: int) -> Tensor:
    """(E, N, K): the product of grad's and x's rows, an expert's summed over its own."""
    products = x.new_zeros(experts, grad.shape[1], x.shape[1])
    for expert, rows in spans(offsets, x.shape[0]):
        products[expert] = grad[rows].T @ x[rows]
    return products


def product(depth: int, of: Callable[[Tensor, Tensor], Tensor], a: Tensor, b: Tensor) -> Terms:
    """As of `linear`: 6 sqrt(depth) |a| @ |b|, tf32 and split-k beside. ``of`` multiplies by expert."""
    magnitude = of(a.abs(), b.abs())
    root = math.sqrt(max(depth, 1))
    return {
        "accumulate": (6 * root + 1) * magnitude,
        "bias": (root + 1) * magnitude,
        "absolute": a.new_full((), max(depth, 1) * 2.0**-149),
        "split-k": magnitude,
        "tf32": 6 * math.sqrt(2) * torch.sqrt(of(a.square(), b.square())),
    }


def grouped_linear(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    x, weight, offsets = args
    return (product(x.shape[1], lambda a, b: each(a, b, offsets), x, weight),)


def grouped_linear_backward(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    grad, x, weight, offsets, need_x, need_weight = args
    nothing = {"accumulate": x.new_empty(0)}
    experts, outs, _ = weight.shape
    return (
        product(outs, lambda a, b: each(a, b.mT, offsets), grad, weight) if need_x else nothing,
        product(len(x), lambda a, b: over_rows(a, b, offsets, experts), grad, x) if need_weight else nothing,
    )


def sorted_slots(topk_ids: Tensor, experts: int) -> tuple[Tensor, Tensor]:
    """(places in the flat ids, sorted by expert and stable; int32 end offsets). Ids of no expert come last."""
    flat = topk_ids.reshape(-1).long()
    keys, order = torch.where((flat >= 0) & (flat < experts), flat, experts).sort(stable=True)
    ends = torch.searchsorted(keys, torch.arange(experts, device=keys.device), right=True)
    return order, ends.int()


def halves(h: Tensor, activation: str) -> tuple[Tensor, Tensor]:
    """(gate, up) of the first product."""
    if activation == INTERLEAVED:
        return h[..., ::2], h[..., 1::2]
    gate, up = h.split(h.shape[-1] // 2, -1)
    return gate, up


def joined(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """What `halves` divides."""
    return torch.stack([gate, up], -1).flatten(-2) if activation == INTERLEAVED else torch.cat([gate, up], -1)


def in_halves(t: Tensor, dim: int, activation: str) -> Tensor:
    """Weights or biases of gate, then those of up."""
    if activation != INTERLEAVED:
        return t
    return torch.cat(halves(t.movedim(dim, -1), activation), -1).movedim(-1, dim)


def as_given(t: Tensor, dim: int, activation: str) -> Tensor:
    """What `in_halves` changes, as it was."""
    if activation != INTERLEAVED:
        return t
    gate, up = t.movedim(dim, -1).chunk(2, -1)
    return joined(gate, up, activation).movedim(-1, dim)


def factor(up: Tensor, activation: str) -> Tensor:
    """What the activated gate is multiplied by."""
    return up.clamp(-LIMIT, LIMIT) + 1 if activation in CLAMPED else up


def activated(gate: Tensor, activation: str) -> Tensor:
    """PyTorch's erf-gelu is NaN at +inf on AVX-512 CPUs: gelu is written out."""
    if activation in CLAMPED:
        cut = gate.clamp(max=LIMIT)
        return cut * torch.sigmoid(ALPHA * cut)
    if activation == "silu":
        return torch.nn.functional.silu(gate)
    if activation == "gelu":
        return gate * (0.5 * (1 + torch.erf(gate * 0.5**0.5)))
    return gate * (0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3))))


def first_in_halves(bias: Tensor, inner: int, activation: str) -> Tensor:
    """Rows of biases, the first product's in halves."""
    return torch.cat([in_halves(bias[:, : 2 * inner], 1, activation), bias[:, 2 * inner :]], 1)


def moe_experts(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[Terms, ...]:
    """Each stage's own error, carried on to the result by the absolute weights of what follows.

    A gated activation f(g) u moves by 1.13 |u| for each unit of g, by |f(g)| for each of u, and by 1.13 times the
    product of both errors, which is all that there is where terms cancel and g and u are 0; its own arithmetic is off
    by 8 units, and by exp's argument 2 |g| more; the sum over k slots by 2 + 6 sqrt(k) units of its magnitude. A
    clamped activation is 1.702 times as steep inside, divided by as much; a clamp moves no further than its argument,
    and not at all where that is infinite. Its own arithmetic is off by 4 times 1.702 |g|, the constant's rounding in
    it, and by 2 units more for up + 1.
    """
    x, gate_up, down, topk_ids, topk_weights, activation, bias = args
    gate_up = in_halves(gate_up, 1, activation)
    inner, width = down.shape[2], gate_up.shape[2]
    slots = topk_ids.shape[1]
    if not outputs[0].numel() or not topk_ids.numel():
        return ({"accumulate": torch.zeros_like(outputs[0])},)
    order, ends = sorted_slots(topk_ids, len(down))
    known = torch.arange(len(order), device=x.device) < (ends[-1] if len(ends) else 0)
    rows = x[order // slots]
    biased = x.new_zeros(len(order), 2 * inner + down.shape[1])
    if bias is not None:
        for expert, owned in spans(ends, len(order)):
            biased[owned] = bias[expert]
    biased = first_in_halves(biased, inner, activation)
    h = each(rows, gate_up, ends) + biased[:, : 2 * inner]
    clamped = activation in CLAMPED
    gate, up = h[:, :inner], factor(h[:, inner:], activation)
    opened = activated(gate, activation)
    a = opened * up
    y = each(a, down, ends) + biased[:, 2 * inner :]
    weight = torch.where(known, topk_weights.reshape(-1)[order].abs(), 0.0)[:, None]
    later = down.abs()

    def summed(error: Tensor) -> Tensor:
        """An error of y, carried on."""
        return torch.zeros_like(outputs[0]).index_add_(0, order // slots, weight * error)

    def after_gate(error: Tensor) -> Tensor:
        """An error of the gated activation, carried on."""
        return summed(each(error, later, ends))

    def unmoved(error: Tensor) -> Tensor:
        return torch.where(h.isinf(), 0.0, error) if clamped else error

    def after_product(error: Tensor) -> Tensor:
        """An error of the first product, carried on."""
        error = unmoved(error)
        return after_gate(SLOPE * up.abs() * error[:, :inner] + opened.abs() * error[:, inner:])

    def together(error: Tensor, unit: float) -> Tensor:
        """What an error of the gate, times one of up, comes to; in units, as these are."""
        error = unmoved(error)
        return after_gate(SLOPE * unit * error[:, :inner] * error[:, inner:])

    first = product(width, lambda p, q: each(p, q, ends), rows, gate_up)
    second = product(inner, lambda p, q: each(p, q, ends), a, down)
    added = 2 * biased.abs()
    first_error = first["accumulate"] + h.abs() + added[:, : 2 * inner]
    size = gate.clamp(max=LIMIT).abs() if clamped else gate.abs()
    own = a.abs() * ((4 * ALPHA * size + 10) if clamped else (2 * size + 8))
    own = own + 4 * up.abs() * size * torch.exp(-0.5 * size)
    ones = torch.ones_like
    return (
        {
            "accumulate": after_product(first_error)
            + together(first_error + first["split-k"], 2.0**-24)
            + after_gate(own)
            + summed(second["accumulate"] + (2 + 6 * math.sqrt(slots)) * y.abs() + added[:, 2 * inner :]),
            # what underflows on the way, times what multiplies it
            "absolute": (after_product(ones(h)) * width + after_gate(ones(a) + up.abs()) + summed(ones(y)) + 1)
            * 2.0**-125,
            "split-k": after_product(first["split-k"]) + summed(second["split-k"]),
            "tf32": after_product(first["tf32"]) + together(first["tf32"], 2.0**-11) + summed(second["tf32"]),
            "h": after_product(h.abs()),
            "h_flush": after_product(ones(h)),
            "a": after_gate(a.abs()),
            "a_flush": after_gate(ones(a)),
            "y": summed(y.abs()),
            "y_flush": summed(ones(y)),
        },
    )
