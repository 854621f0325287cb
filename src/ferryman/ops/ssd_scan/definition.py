"""Mamba2's state-space scan with its state in and out: meaning and costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide
from ferryman.ops.ssd_scan import bounds


def _check(
    op: str,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_min: float | None,
    dt_max: float | None,
    grad_y: Tensor | None = None,
    grad_final_state: Tensor | None = None,
) -> None:
    given = {"x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d, "dt_bias": dt_bias, "initial_state": initial_state}
    given |= {"grad_y": grad_y, "grad_final_state": grad_final_state}
    checks.one_device(op, **given)
    checks.floating(op, **given)
    checks.same_dtype(op, x=x, b=b, c=c)
    if x.dim() != 4:
        raise ArgumentError(op, "x.shape", tuple(x.shape), "(B, L, H, P): batch, length, heads, head_dim")
    batch, length, heads, dim = x.shape
    if b.dim() != 4 or b.shape[:2] != x.shape[:2]:
        raise ArgumentError(op, "b.shape", tuple(b.shape), f"({batch}, {length}, G, N)")
    groups, width = b.shape[2:]
    if groups == 0 or heads % groups:
        raise ArgumentError(op, "b.shape[2]", groups, f"a divisor of x's {heads} heads")
    checks.shaped(op, "c", c, *b.shape)
    checks.shaped(op, "dt", dt, batch, length, heads)
    for name, one in (("a", a), ("d", d), ("dt_bias", dt_bias)):
        checks.shaped(op, name, one, heads)
    for name, one in (("initial_state", initial_state), ("grad_final_state", grad_final_state)):
        checks.shaped(op, name, one, batch, heads, dim, width)
    checks.shaped(op, "grad_y", grad_y, *x.shape)
    if dt_min is not None and dt_max is not None and not dt_min <= dt_max:
        raise ArgumentError(op, "dt_min", dt_min, f"at most dt_max, {dt_max}")


def _meta(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    batch, _, heads, dim = x.shape
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    final = x.new_empty((batch, heads, dim, b.shape[3]), dtype=kind)
    return x.new_empty(x.shape, dtype=kind if rest[-3] else x.dtype), final


def _cost(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    y_float32: bool,
    dt_min: float | None,
    dt_max: float | None,
) -> Cost:
    """Each token's part of the state, its decay, and what is read of it: 6 operations of an element of the state."""
    batch, _, heads, dim = x.shape
    given = (x, dt, b, c, *(t for t in (a, d, dt_bias, initial_state) if t is not None))
    each = 4 if y_float32 and x.element_size() < 4 else x.element_size()
    written = each * x.numel() + 4 * batch * heads * dim * b.shape[3]
    moved = sum(t.numel() * t.element_size() for t in given) + written
    return Cost(6.0 * x.numel() * b.shape[3], float(moved))


def _future(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor] | None:
    """Replace the later half of x, which no earlier token sees."""
    length = x.shape[1]
    if length < 2 or x.numel() == 0:
        return None
    x[:, length // 2 :] = 1 - 2 * x[:, length // 2 :]
    kept = (torch.arange(length, device=x.device) < length // 2)[:, None, None].expand(x.shape)
    return kept, torch.zeros((x.shape[0], *x.shape[2:], b.shape[3]), dtype=torch.bool, device=x.device)


@primitive(
    outputs=("y", "final_state"),
    check=lambda *args: _check("ssd_scan", *args[:8], *args[10:]),
    meta=_meta,
    cost=_cost,
    limits=Limits(
        bound=bounds.forward,
        batch={"x": 3, "dt": 2, "b": 3, "c": 3, "initial_state": 3, "y": 3, "final_state": 3},
        reduction=lambda x, dt, a, b, *rest: max(1, x.shape[1] + b.shape[3]),
        unseen=_future,
    ),
    gradient=Gradient(backward="ssd_scan_backward", grads=("x", "dt", "a", "b", "c", "d", "dt_bias", "initial_state")),
)
def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    dt_softplus: bool = False,
    y_float32: bool = False,
    dt_min: float | None = None,
    dt_max: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Mamba2's scan: ``h = exp(s a) h + s x (outer) b``, ``y = h c + d x``, token after token, for each head.

    s is ``dt + dt_bias``, or softplus of it with dt_softplus, then brought to dt_min at least and dt_max at most, where
    these are given. x: (B, L, H, P), L may be 0. dt: (B, L, H). a: (H,), below 0 in models. b, c: (B, L, G, N), of x's
    dtype; G divides H, and neighbouring heads share a group. d and dt_bias: (H,) or None. initial_state: (B, H, P, N),
    None for zeros. float32, float16 or bfloat16; dt, a, d, dt_bias and initial_state each of any of these; any strides.
    Returns y, of x's shape and dtype, contiguous, and final_state (B, H, P, N) in float32, which the next call takes as
    its initial_state. With y_float32 y is float32, and rounded no more. One token after another gives what all tokens
    at once give. Arithmetic is float32; an implementation may sum exponents over spans of up to 256 tokens, and a value
    that is not finite may reach the other tokens of its span. Raises ArgumentError. Source: Dao and Gu,
    arXiv:2405.21060; the order of mamba_ssm's mamba_chunk_scan_combined, without its chunk_size, which is the
    implementation's.
    """
    batch, length, heads, dim = x.shape
    shared = heads // b.shape[2]
    step = bounds.steps(wide(dt), None if dt_bias is None else wide(dt_bias), dt_softplus, dt_min, dt_max)
    if initial_state is None:
        h = wide(x).new_zeros((batch, heads, dim, b.shape[3]))
    else:
        h = wide(initial_state)
    y = torch.zeros_like(wide(x), memory_format=torch.contiguous_format)
    for t in range(length):
        into, out = (wide(m[:, t]).repeat_interleave(shared, 1)[:, :, None] for m in (b, c))
        decay = torch.exp(step[:, t] * wide(a))[..., None, None]
        h = decay * h + (step[:, t, :, None] * wide(x[:, t]))[..., None] * into
        y[:, t] = (h * out).sum(-1)
    if d is not None:
        y = y + wide(d)[:, None] * wide(x)
    return y if y_float32 else y.to(x.dtype), h.clone(memory_format=torch.contiguous_format)


def _meta_backward(
    grad_y: Tensor, grad_final_state: Tensor | None, x: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dt, a, b, c, d, dt_bias, initial_state = rest[:7]

    def like(t: Tensor | None) -> Tensor:
        return x.new_empty(0) if t is None else t.new_empty(t.shape)

    return like(x), like(dt), like(a), like(b), like(c), like(d), like(dt_bias), like(initial_state)


def _cost_backward(grad_y: Tensor, grad_final_state: Tensor | None, x: Tensor, *rest: Any) -> Cost:
    """The state again, its gradient, and what of both each of five gradients takes: 14 operations of an element."""
    given = [grad_y, x, *(t for t in (grad_final_state, *rest[:7]) if t is not None)]
    written = [x, *(t for t in rest[:7] if t is not None)]
    moved = sum(t.numel() * t.element_size() for t in (*given, *written))
    return Cost(14.0 * x.numel() * rest[2].shape[3], float(moved))


@primitive(
    outputs=(
        "grad_x",
        "grad_dt",
        "grad_a",
        "grad_b",
        "grad_c",
        "grad_d",
        "grad_dt_bias",
        "grad_initial_state",
    ),
    check=lambda *args: _check("ssd_scan_backward", *args[2:10], *args[11:], *args[:2]),
    meta=_meta_backward,
    cost=_cost_backward,
    limits=Limits(
        bound=bounds.backward,
        batch={
            "grad_y": 3,
            "grad_final_state": 3,
            "x": 3,
            "dt": 2,
            "b": 3,
            "c": 3,
            "initial_state": 3,
            "grad_x": 3,
            "grad_dt": 2,
            "grad_b": 3,
            "grad_c": 3,
            "grad_initial_state": 3,
        },
        reduction=lambda grad_y, grad_final_state, x, *rest: max(1, x.shape[0] * x.shape[1] * x.shape[3]),
    ),
)
def ssd_scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    dt_min: float | None,
    dt_max: float | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `ssd_scan`, each in its argument's dtype; an empty tensor for one that is absent.

    grad_y may be float32 beside 16-bit arguments. Nothing that forward computed is kept: states are computed again. A
    step beyond a limit has no gradient; one that lies on it has.
    """
    batch, length, heads, dim = x.shape
    groups, width = b.shape[2:]
    shared = heads // groups
    z = wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias)
    whole = bounds.steps(wide(dt), None if dt_bias is None else wide(dt_bias), dt_softplus)
    step = bounds.steps(wide(dt), None if dt_bias is None else wide(dt_bias), dt_softplus, dt_min, dt_max)
    first = wide(x).new_zeros((batch, heads, dim, width)) if initial_state is None else wide(initial_state)
    back = torch.zeros_like(first) if grad_final_state is None else wide(grad_final_state)
    decays = torch.exp(step * wide(a))

    def of_head(m: Tensor, t: int) -> Tensor:
        return wide(m[:, t]).repeat_interleave(shared, 1)[:, :, None]

    def advance(t: int, h: Tensor) -> Tensor:
        come = (step[:, t, :, None] * wide(x[:, t]))[..., None] * of_head(b, t)
        return decays[:, t, :, None, None] * h + come

    def grouped(m: Tensor) -> Tensor:
        return m.sum(2).unflatten(1, (groups, shared)).sum(2)

    of_x, of_step, of_exponent = (torch.zeros_like(wide(m), memory_format=torch.contiguous_format) for m in (x, dt, dt))
    of_step, of_exponent = of_step.to(step.dtype), of_exponent.to(step.dtype)
    of_b, of_c = (torch.zeros_like(wide(m), memory_format=torch.contiguous_format) for m in (b, c))
    for t, h, after in bounds.reversed_walk(advance, first, length):
        g = wide(grad_y[:, t])[..., None]
        back = back + g * of_head(c, t)
        of_c[:, t] = grouped(g * after)
        read = (back * of_head(b, t)).sum(-1)
        of_x[:, t] = step[:, t, :, None] * read
        of_step[:, t] = (read * wide(x[:, t])).sum(-1)
        of_b[:, t] = grouped((step[:, t, :, None] * wide(x[:, t]))[..., None] * back)
        back = decays[:, t, :, None, None] * back
        of_exponent[:, t] = (back * h).sum((2, 3))
    if d is not None:
        of_x = of_x + wide(d)[:, None] * wide(grad_y)
    of_z = wide(a) * of_exponent + of_step
    if dt_softplus:
        of_z = of_z * torch.sigmoid(z)
    if dt_min is not None or dt_max is not None:
        of_z = of_z.masked_fill(whole.clamp(dt_min, dt_max) != whole, 0.0)
    return (
        of_x.to(x.dtype),
        of_z.to(dt.dtype),
        (step * of_exponent).sum((0, 1)).to(a.dtype),
        of_b.to(b.dtype),
        of_c.to(c.dtype),
        x.new_empty(0) if d is None else (wide(x) * wide(grad_y)).sum((0, 1, 3)).to(d.dtype),
        x.new_empty(0) if dt_bias is None else of_z.sum((0, 1)).to(dt_bias.dtype),
        x.new_empty(0) if initial_state is None else back.to(initial_state.dtype, copy=True).contiguous(),
    )
