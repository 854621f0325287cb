"""Mamba's selective scan with its state in and out: meaning and costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide
from ferryman.ops.selective_scan import bounds


def _check(
    op: str,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    grad_y: Tensor | None = None,
    grad_final_state: Tensor | None = None,
) -> None:
    given = {"x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d, "z": z, "dt_bias": dt_bias}
    given |= {"initial_state": initial_state, "grad_final_state": grad_final_state}
    checks.one_device(op, **given)
    checks.one_device(op, x=x, grad_y=grad_y)
    checks.floating(op, **given, grad_y=grad_y)
    checks.same_dtype(op, x=x, b=b, c=c, z=z, grad_y=grad_y)
    if x.dim() != 3:
        raise ArgumentError(op, "x.shape", tuple(x.shape), "(B, L, D): batch, length, channels")
    batch, length, channels = x.shape
    if b.dim() != 3 or b.shape[:2] != x.shape[:2]:
        raise ArgumentError(op, "b.shape", tuple(b.shape), f"({batch}, {length}, N)")
    width = b.shape[2]
    checks.shaped(op, "c", c, *b.shape)
    checks.shaped(op, "dt", dt, *x.shape)
    checks.shaped(op, "a", a, channels, width)
    checks.shaped(op, "z", z, *x.shape)
    for name, one in (("d", d), ("dt_bias", dt_bias)):
        checks.shaped(op, name, one, channels)
    for name, one in (("initial_state", initial_state), ("grad_final_state", grad_final_state)):
        checks.shaped(op, name, one, batch, channels, width)
    checks.shaped(op, "grad_y", grad_y, *x.shape)


def _meta(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    return x.new_empty(x.shape), x.new_empty((x.shape[0], x.shape[2], b.shape[2]), dtype=kind)


def _cost(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *rest: Any) -> Cost:
    """For an element of the state a token takes its decay's exponent, and two products with their sums."""
    state = float(x.shape[0] * x.shape[2] * b.shape[2])
    given = (x, x, dt, a, b, b, *(t for t in rest[1:] if isinstance(t, Tensor)))
    moved = sum(t.numel() * t.element_size() for t in given) + 4 * state
    return Cost(6.0 * state * x.shape[1], moved)


def _future(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, *rest: Any) -> tuple[Tensor, Tensor] | None:
    """Replace the later half of x, which no earlier token sees."""
    length = x.shape[1]
    if length < 2 or x.numel() == 0:
        return None
    x[:, length // 2 :] = 1 - 2 * x[:, length // 2 :]
    kept = (torch.arange(length, device=x.device) < length // 2)[:, None].expand(x.shape)
    return kept, torch.zeros((x.shape[0], x.shape[2], b.shape[2]), dtype=torch.bool, device=x.device)


@primitive(
    outputs=("y", "final_state"),
    check=lambda *args: _check("selective_scan", *args[:9]),
    meta=_meta,
    cost=_cost,
    limits=Limits(
        bound=bounds.forward,
        batch={"x": 2, "dt": 2, "b": 2, "c": 2, "z": 2, "initial_state": 2, "y": 2, "final_state": 2},
        reduction=lambda x, dt, a, b, *rest: max(1, x.shape[1] + b.shape[2]),
        unseen=_future,
    ),
    gradient=Gradient(
        backward="selective_scan_backward", grads=("x", "dt", "a", "b", "c", "d", "z", "dt_bias", "initial_state")
    ),
)
def selective_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None = None,
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_state: Tensor | None = None,
    dt_softplus: bool = False,
) -> tuple[Tensor, Tensor]:
    """Mamba's scan: ``h = exp(s a) h + s x b``, ``y = (h . c + d x) silu(z)``, token after token, for each channel.

    s is ``dt + dt_bias``, or softplus of it with dt_softplus. x, dt: (B, L, D), L may be 0. a: (D, N), below 0 in
    models. b, c: (B, L, N). z: (B, L, D) or None for no gate. d and dt_bias: (D,) or None. initial_state: (B, D, N),
    None for zeros. float32, float16 or bfloat16; b, c and z of x's dtype, each other one of any of these; any strides.
    Returns y, of x's shape and dtype, contiguous, and final_state (B, D, N) in float32, which the next call takes as
    its initial_state. One token after another gives what all tokens at once give. Arithmetic is float32, with one
    rounding. Raises ArgumentError. Source: Gu and Dao, arXiv:2312.00752; mamba_ssm's
    selective_scan_fn, whose tensors have the channels before the length.
    """
    step = bounds.steps(wide(dt), None if dt_bias is None else wide(dt_bias), dt_softplus)
    if initial_state is None:
        h = wide(x).new_zeros((x.shape[0], x.shape[2], b.shape[2]))
    else:
        h = wide(initial_state)
    y = torch.zeros_like(wide(x), memory_format=torch.contiguous_format)
    for t in range(x.shape[1]):
        decay = torch.exp(step[:, t, :, None] * wide(a))
        h = decay * h + (step[:, t] * wide(x[:, t]))[..., None] * wide(b[:, t])[:, None]
        y[:, t] = (h * wide(c[:, t])[:, None]).sum(-1)
    if d is not None:
        y = y + wide(d) * wide(x)
    if z is not None:
        y = y * functional.silu(wide(z))
    return y.to(x.dtype), h.clone(memory_format=torch.contiguous_format)


def _meta_backward(
    grad_y: Tensor, grad_final_state: Tensor | None, x: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    dt, a, b, c, d, z, dt_bias, initial_state = rest[:8]

    def like(t: Tensor | None) -> Tensor:
        return x.new_empty(0) if t is None else t.new_empty(t.shape)

    return like(x), like(dt), like(a), like(b), like(c), like(d), like(z), like(dt_bias), like(initial_state)


def _cost_backward(grad_y: Tensor, grad_final_state: Tensor | None, x: Tensor, *rest: Any) -> Cost:
    """The state again, its gradient, and what of both each of five gradients takes: 16 operations of an element."""
    own = [x, *(t for t in rest[:8] if t is not None)]
    moved = sum(t.numel() * t.element_size() for t in (grad_y, *own, *own))
    moved += 0 if grad_final_state is None else 4 * grad_final_state.numel()
    return Cost(16.0 * x.numel() * rest[2].shape[2], float(moved))


@primitive(
    outputs=(
        "grad_x",
        "grad_dt",
        "grad_a",
        "grad_b",
        "grad_c",
        "grad_d",
        "grad_z",
        "grad_dt_bias",
        "grad_initial_state",
    ),
    check=lambda *args: _check("selective_scan_backward", *args[2:11], *args[:2]),
    meta=_meta_backward,
    cost=_cost_backward,
    limits=Limits(
        bound=bounds.backward,
        batch={
            **dict.fromkeys(("grad_y", "grad_final_state", "x", "dt", "b", "c", "z", "initial_state"), 2),
            **dict.fromkeys(("grad_x", "grad_dt", "grad_b", "grad_c", "grad_z", "grad_initial_state"), 2),
        },
        reduction=lambda grad_y, grad_final_state, x, *rest: max(1, x.shape[0] * x.shape[1], x.shape[2]),
    ),
)
def selective_scan_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    z: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of `selective_scan`, each in its argument's dtype; an empty tensor for one that is absent.

    Nothing that forward computed is kept: states are computed again.
    """
    turned = wide(dt) if dt_bias is None else wide(dt) + wide(dt_bias)
    step = bounds.steps(wide(dt), None if dt_bias is None else wide(dt_bias), dt_softplus)
    g = wide(grad_y) if z is None else wide(grad_y) * functional.silu(wide(z))
    first = wide(x).new_zeros((x.shape[0], x.shape[2], b.shape[2])) if initial_state is None else wide(initial_state)
    back = torch.zeros_like(first) if grad_final_state is None else wide(grad_final_state)

    def decay(t: int) -> Tensor:
        return torch.exp(step[:, t, :, None] * wide(a))

    def advance(t: int, h: Tensor) -> Tensor:
        return decay(t) * h + (step[:, t] * wide(x[:, t]))[..., None] * wide(b[:, t])[:, None]

    of_x, of_out, of_step = (torch.zeros(x.shape, dtype=step.dtype, device=x.device) for _ in range(3))
    of_b, of_c = (torch.zeros(b.shape, dtype=step.dtype, device=x.device) for _ in range(2))
    of_a = torch.zeros_like(wide(a))
    for t, h, after in bounds.reversed_walk(advance, first, x.shape[1]):
        out, into = wide(c[:, t])[:, None], wide(b[:, t])[:, None]
        back = back + g[:, t, :, None] * out
        of_out[:, t] = (after * out).sum(-1)
        of_c[:, t] = (g[:, t, :, None] * after).sum(1)
        read = (back * into).sum(-1)
        of_x[:, t] = step[:, t] * read
        of_b[:, t] = ((step[:, t] * wide(x[:, t]))[..., None] * back).sum(1)
        back = decay(t) * back
        of_step[:, t] = read * wide(x[:, t]) + (wide(a) * back * h).sum(-1)
        of_a = of_a + (step[:, t, :, None] * back * h).sum(0)
    if d is not None:
        of_x, of_out = of_x + wide(d) * g, of_out + wide(d) * wide(x)
    of_step = of_step * torch.sigmoid(turned) if dt_softplus else of_step
    of_z = x.new_empty(0)
    if z is not None:
        s = torch.sigmoid(wide(z))
        of_z = (wide(grad_y) * of_out * (s * (1 + wide(z) * (1 - s)))).to(z.dtype)
    return (
        of_x.to(x.dtype),
        of_step.to(dt.dtype),
        of_a.to(a.dtype).contiguous(),
        of_b.to(b.dtype),
        of_c.to(c.dtype),
        x.new_empty(0) if d is None else (wide(x) * g).sum((0, 1)).to(d.dtype),
        of_z.contiguous(),
        x.new_empty(0) if dt_bias is None else of_step.sum((0, 1)).to(dt_bias.dtype),
        x.new_empty(0) if initial_state is None else back.to(initial_state.dtype, copy=True).contiguous(),
    )
