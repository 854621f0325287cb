"""Mamba's selective scan with its state in and out: meaning and costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, primitive, wide
from ferryman.ops.selective_scan import bounds


def _check(
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
) -> None:
    op = "selective_scan"
    given = {"x": x, "dt": dt, "a": a, "b": b, "c": c, "d": d, "z": z, "dt_bias": dt_bias}
    given["initial_state"] = initial_state
    checks.one_device(op, **given)
    checks.floating(op, **given)
    checks.same_dtype(op, x=x, b=b, c=c, z=z)
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
    checks.shaped(op, "initial_state", initial_state, batch, channels, width)


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
    check=_check,
    meta=_meta,
    cost=_cost,
    bound=bounds.forward,
    batch={"x": 2, "dt": 2, "b": 2, "c": 2, "z": 2, "initial_state": 2, "y": 2, "final_state": 2},
    reduction=lambda x, dt, a, b, *rest: max(1, x.shape[1] + b.shape[2]),
    unseen=_future,
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
    rounding. Not differentiable. Raises ArgumentError. Source: Gu and Dao, arXiv:2312.00752; mamba_ssm's
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
