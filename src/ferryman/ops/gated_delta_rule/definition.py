"""The gated delta rule with its state in and out: meaning and costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.gated_delta_rule import bounds
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, wide


def _check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    grad_y: Tensor | None = None,
    grad_final_state: Tensor | None = None,
) -> None:
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
    given |= {"grad_y": grad_y, "grad_final_state": grad_final_state}
    checks.one_device(op, **given)
    checks.floating(op, **given)
    checks.same_dtype(op, q=q, k=k, v=v)
    if q.dim() != 4:
        raise ArgumentError(op, "q.shape", tuple(q.shape), "(B, L, G, K): batch, length, heads of keys, head_dim")
    batch, length, shared, width = q.shape
    checks.shaped(op, "k", k, *q.shape)
    if v.dim() != 4 or v.shape[:2] != q.shape[:2]:
        raise ArgumentError(op, "v.shape", tuple(v.shape), f"({batch}, {length}, H, V)")
    heads, dim = v.shape[2:]
    if shared == 0 or heads % shared:
        raise ArgumentError(op, "v.shape[2]", heads, f"a multiple of q's {shared} heads")
    for name, one in (("g", g), ("beta", beta)):
        checks.shaped(op, name, one, batch, length, heads)
    for name, one in (("initial_state", initial_state), ("grad_final_state", grad_final_state)):
        checks.shaped(op, name, one, batch, heads, width, dim)
    checks.shaped(op, "grad_y", grad_y, *v.shape)


def _meta(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    kind = torch.float64 if v.dtype == torch.float64 else torch.float32
    return v.new_empty(v.shape), v.new_empty((v.shape[0], v.shape[2], q.shape[3], v.shape[3]), dtype=kind)


def _cost(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> Cost:
    """Of an element of the state a token takes its decay, and a product and a sum for read, correction and result."""
    state = v.shape[0] * v.shape[2] * q.shape[3] * v.shape[3]
    given = (q, k, v, v, *(t for t in rest if isinstance(t, Tensor)))
    moved = sum(t.numel() * t.element_size() for t in given) + 4 * state
    return Cost(7.0 * v.shape[1] * state, float(moved))


def _future(q: Tensor, k: Tensor, v: Tensor, *rest: Any) -> tuple[Tensor, Tensor] | None:
    """Replace the later half of v, which no earlier token sees."""
    length = v.shape[1]
    if length < 2 or v.numel() == 0:
        return None
    v[:, length // 2 :] = 1 - 2 * v[:, length // 2 :]
    kept = (torch.arange(length, device=v.device) < length // 2)[:, None, None].expand(v.shape)
    state = (v.shape[0], v.shape[2], q.shape[3], v.shape[3])
    return kept, torch.zeros(state, dtype=torch.bool, device=v.device)


@primitive(
    outputs=("y", "final_state"),
    check=lambda *args: _check("gated_delta_rule", *args[:6]),
    meta=_meta,
    cost=_cost,
    limits=Limits(
        bound=bounds.forward,
        batch={"q": 3, "k": 3, "v": 3, "g": 2, "beta": 2, "initial_state": 3, "y": 3, "final_state": 3},
        reduction=lambda q, *rest: max(1, q.shape[1] + q.shape[3]),
        unseen=_future,
    ),
    gradient=Gradient(backward="gated_delta_rule_backward", grads=("q", "k", "v", "g", "beta", "initial_state")),
)
def gated_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    qk_l2norm: bool = False,
) -> tuple[Tensor, Tensor]:
    """Gated DeltaNet's recurrence: ``S = exp(g) S; S = S + k (outer) beta (v - S^T k); y = scale S^T q``, head by head.

    q, k: (B, L, G, K), L may be 0. v: (B, L, H, V), of their dtype; G divides H, and neighbouring heads share a q and a
    k. g: (B, L, H), the logarithm of a decay, 0 or below; None for no decay, the plain delta rule. beta: (B, L, H).
    initial_state: (B, H, K, V), None for zeros. float32, float16 or bfloat16; g, beta and initial_state each of any of
    these; any strides. scale: None for ``K**-0.5``. With qk_l2norm q and k are first multiplied by
    ``rsqrt(sum(x**2) + 1e-6)``. Returns y, of v's shape and dtype, contiguous, and final_state (B, H, K, V) in float32,
    which the next call takes as its initial_state. One token after another gives what all tokens at once give.
    Arithmetic is float32 with one rounding; an implementation may sum g over spans of up to 64 tokens, and a value that
    is not finite may reach the other tokens of its span. The state stays bounded while ``beta |k|**2 <= 2``, as with
    qk_l2norm and beta up to 1. Raises ArgumentError. Source: Yang, Kautz and Hatamizadeh, arXiv:2412.06464; FLA's
    chunk_gated_delta_rule.
    """
    batch, length, shared, width = q.shape
    heads, dim = v.shape[2:]
    queries, keys = wide(q), wide(k)
    if qk_l2norm:
        queries, keys = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in (queries, keys))
    queries = queries * (max(width, 1) ** -0.5 if scale is None else scale)
    queries, keys = (x.repeat_interleave(heads // shared, 2) for x in (queries, keys))
    if initial_state is None:
        s = wide(v).new_zeros((batch, heads, width, dim))
    else:
        s = wide(initial_state)
    y = wide(v).clone(memory_format=torch.contiguous_format)  # every token's is written over it
    for t in range(length):
        if g is not None:
            s = torch.exp(wide(g[:, t]))[..., None, None] * s
        key = keys[:, t, :, :, None]
        correction = wide(beta[:, t])[..., None] * (wide(v[:, t]) - (s * key).sum(-2))
        s = s + key * correction[:, :, None]
        y[:, t] = (s * queries[:, t, :, :, None]).sum(-2)
    return y.to(v.dtype), s.clone(memory_format=torch.contiguous_format)


def _meta_backward(
    grad_y: Tensor, grad_final_state: Tensor | None, q: Tensor, *rest: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    k, v, g, beta, initial_state = rest[:5]

    def like(t: Tensor | None) -> Tensor:
        return v.new_empty(0) if t is None else t.new_empty(t.shape)

    return like(q), like(k), like(v), like(g), like(beta), like(initial_state)


def _cost_backward(
    grad_y: Tensor, grad_final_state: Tensor | None, q: Tensor, k: Tensor, v: Tensor, *rest: Any
) -> Cost:
    """The state again, 5 operations of an element of it; then its gradient, 5, and what q, k (2) and g take, 8."""
    own = [q, k, v, *(t for t in rest[:3] if t is not None)]
    given = [grad_y, *own] if grad_final_state is None else [grad_y, grad_final_state, *own]
    moved = sum(t.numel() * t.element_size() for t in (*given, *own))
    return Cost(18.0 * v.numel() * q.shape[3], float(moved))


@primitive(
    outputs=("grad_q", "grad_k", "grad_v", "grad_g", "grad_beta", "grad_initial_state"),
    check=lambda *args: _check("gated_delta_rule_backward", *args[2:8], *args[:2]),
    meta=_meta_backward,
    cost=_cost_backward,
    limits=Limits(
        bound=bounds.backward,
        batch={
            **dict.fromkeys(("grad_y", "grad_final_state", "q", "k", "v", "initial_state"), 3),
            **dict.fromkeys(("grad_q", "grad_k", "grad_v", "grad_initial_state"), 3),
            **dict.fromkeys(("g", "beta", "grad_g", "grad_beta"), 2),
        },
        reduction=lambda grad_y, grad_final_state, q, k, v, *rest: max(1, q.shape[1] + q.shape[3] + v.shape[3]),
    ),
)
def gated_delta_rule_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, g, beta and initial_state, in this order: see `gated_delta_rule`, whose arguments follow.

    grad_y: (B, L, H, V), grad_final_state: (B, H, K, V) or None, float32, float16 or bfloat16. Each result has its
    argument's shape and dtype; it is an empty tensor for one that is absent. Nothing that forward computed is kept:
    states are computed again. Raises ArgumentError as `gated_delta_rule` does.
    """
    batch, length, shared, width = q.shape
    heads, dim = v.shape[2:]
    factor = max(width, 1) ** -0.5 if scale is None else scale
    queries, keys = wide(q), wide(k)
    roots = [torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) if qk_l2norm else None for x in (queries, keys)]
    queries, keys = (x if root is None else x * root for x, root in zip((queries, keys), roots, strict=True))
    own = queries, keys
    queries, keys = (x.repeat_interleave(heads // shared, 2) for x in own)
    first = wide(v).new_zeros((batch, heads, width, dim)) if initial_state is None else wide(initial_state)
    back = torch.zeros_like(first) if grad_final_state is None else wide(grad_final_state)

    def decayed(t: int, s: Tensor) -> Tensor:
        return s if g is None else torch.exp(wide(g[:, t]))[..., None, None] * s

    def wrong(t: int, s: Tensor) -> Tensor:
        return wide(v[:, t]) - (s * keys[:, t, :, :, None]).sum(-2)

    def advance(t: int, s: Tensor) -> Tensor:
        s = decayed(t, s)
        return s + keys[:, t, :, :, None] * (wide(beta[:, t])[..., None] * wrong(t, s))[:, :, None]

    of_q, of_k = (torch.zeros(batch, length, heads, width, dtype=first.dtype, device=v.device) for _ in range(2))
    of_v = torch.zeros(v.shape, dtype=first.dtype, device=v.device)
    of_g, of_beta = (torch.zeros(beta.shape, dtype=first.dtype, device=v.device) for _ in range(2))
    for t, before, _ in bounds.reversed_walk(advance, first, length):
        given, rate = wide(grad_y[:, t])[:, :, None], wide(beta[:, t])[..., None]
        key, state = keys[:, t, :, :, None], decayed(t, before)
        error = wrong(t, state)
        correction = (rate * error)[:, :, None]
        of_q[:, t] = factor * ((state + key * correction) * given).sum(-1)
        back = back + factor * queries[:, t, :, :, None] * given
        asked = (back * key).sum(-2)
        of_beta[:, t] = (error * asked).sum(-1)
        of_v[:, t] = rate * asked
        of_k[:, t] = (back * correction).sum(-1) - (state * of_v[:, t, :, None]).sum(-1)
        back = back - key * of_v[:, t, :, None]
        of_g[:, t] = (back * state).sum((-2, -1))
        back = decayed(t, back)
    of_qk = []
    for x, one, root in zip((of_q, of_k), own, roots, strict=True):
        x = x.unflatten(2, (shared, heads // shared)).sum(3)
        of_qk.append(x if root is None else root * (x - one * (one * x).sum(-1, keepdim=True)))
    return (
        of_qk[0].to(q.dtype),
        of_qk[1].to(k.dtype),
        of_v.to(v.dtype),
        v.new_empty(0) if g is None else of_g.to(g.dtype),
        of_beta.to(beta.dtype),
        v.new_empty(0) if initial_state is None else back.to(initial_state.dtype, copy=True).contiguous(),
    )
