"""The gated delta rule with its state in and out: meaning and costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.gated_delta_rule import bounds
from ferryman.ops.primitive import Cost, primitive, wide


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
) -> None:
    op = "gated_delta_rule"
    given = {"q": q, "k": k, "v": v, "g": g, "beta": beta, "initial_state": initial_state}
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
    checks.shaped(op, "initial_state", initial_state, batch, heads, width, dim)


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
    check=_check,
    meta=_meta,
    cost=_cost,
    bound=bounds.forward,
    batch={"q": 3, "k": 3, "v": 3, "g": 2, "beta": 2, "initial_state": 3, "y": 3, "final_state": 3},
    reduction=lambda q, *rest: max(1, q.shape[1] + q.shape[3]),
    unseen=_future,
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
    qk_l2norm and beta up to 1. Not differentiable. Raises ArgumentError. Source: Yang, Kautz and Hatamizadeh,
    arXiv:2412.06464; FLA's chunk_gated_delta_rule.
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
    y = torch.zeros_like(wide(v), memory_format=torch.contiguous_format)
    for t in range(length):
        if g is not None:
            s = torch.exp(wide(g[:, t]))[..., None, None] * s
        key = keys[:, t, :, :, None]
        correction = wide(beta[:, t])[..., None] * (wide(v[:, t]) - (s * key).sum(-2))
        s = s + key * correction[:, :, None]
        y[:, t] = (s * queries[:, t, :, :, None]).sum(-2)
    return y.to(v.dtype), s.clone(memory_format=torch.contiguous_format)
