"""Matrix products and attention in other orders, split, online, and by other libraries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ferryman.porting.selftest.alternatives.common import Rights
from ferryman.porting.selftest.alternatives.norms import array, chunked, tensor, tree

RIGHT = Rights()


def _by_k(a: Tensor, b: Tensor, size: int, reverse: bool = False) -> Tensor:
    """a @ b, float32, ``size`` of K at a time, forwards or backwards."""
    total = torch.zeros(*a.shape[:-1], b.shape[-1], device=a.device)
    parts = list(zip(a.split(size, -1), b.split(size, -2), strict=True))
    for x, y in reversed(parts) if reverse else parts:
        total = total + x @ y
    return total


def _biased(y: Tensor, bias: Tensor | None) -> Tensor:
    return y if bias is None else y + bias.to(y.dtype)


@RIGHT.of("linear")
def one_product_after_another(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """K one by one, as a single accumulator does"""
    total = torch.zeros(*x.shape[:-1], weight.shape[0], device=x.device)
    w = weight.float()
    for k in range(x.shape[-1]):
        total = total + x[..., k, None].float() * w[:, k]
    return _biased(total, bias)


@RIGHT.of("linear")
def split_in_float32(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """K in pieces of 16 whose float32 products are added last to first"""
    return _biased(_by_k(x.float(), weight.float().T, 16, reverse=True), bias)


@RIGHT.of("linear")
def products_by_a_tree(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """all products, then a tree"""
    products = x.float().unsqueeze(-2) * weight.float()
    return _biased(tree(products).squeeze(-1), bias)


@RIGHT.of("linear", accumulation="split-k")
def split_in_storage_as_declared(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """two halves of K rounded to storage, and declared"""
    half = (x.shape[-1] + 1) // 2
    a, b = (
        (x[..., s].float() @ weight[:, s].float().T).to(x.dtype).float()
        for s in (slice(half), slice(half, None))
    )  # fmt: skip
    return _biased(a + b, bias)


@RIGHT.of("linear")
def numpy_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """NumPy's float32 product (OpenBLAS)"""
    y = tensor(array(x).astype(np.float32) @ array(weight).astype(np.float32).T, x)
    return _biased(y, bias)


def _rows(x: Tensor) -> Tensor:
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _linear_gradient(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    need_x: bool,
    need_weight: bool,
    product: Any,
    add: Any,
) -> Any:
    g, h, w = _rows(grad.float()), _rows(x.float()), weight.float()
    nothing = x.new_empty(0)
    return (
        product(g, w).view(x.shape) if need_x else nothing,
        product(g.T, h) if need_weight else nothing,
        nothing if bias is None else add(g.T)[:, 0],
    )


@RIGHT.of("linear_backward")
def gradient_in_pieces_of_8(grad: Tensor, x: Tensor, w: Tensor, b: Tensor | None, nx: bool, nw: bool) -> Any:
    """every product in pieces of 8"""
    return _linear_gradient(grad, x, w, b, nx, nw, lambda p, q: _by_k(p, q, 8), lambda t: chunked(t, 8))


@RIGHT.of("linear_backward")
def gradient_last_to_first(grad: Tensor, x: Tensor, w: Tensor, b: Tensor | None, nx: bool, nw: bool) -> Any:
    """every product in pieces of 32, last to first"""
    return _linear_gradient(grad, x, w, b, nx, nw, lambda p, q: _by_k(p, q, 32, True), tree)


@RIGHT.of("linear_backward")
def gradient_by_einsum(grad: Tensor, x: Tensor, w: Tensor, b: Tensor | None, nx: bool, nw: bool) -> Any:
    """einsum in float32"""
    return _linear_gradient(grad, x, w, b, nx, nw, lambda p, q: torch.einsum("mk,kn->mn", p, q), tree)


@RIGHT.of("linear_backward")
def numpy_gradient(grad: Tensor, x: Tensor, w: Tensor, b: Tensor | None, nx: bool, nw: bool) -> Any:
    """NumPy's float32 product (OpenBLAS)"""

    def product(p: Tensor, q: Tensor) -> Tensor:
        return tensor(array(p).astype(np.float32) @ array(q).astype(np.float32), p)

    return _linear_gradient(grad, x, w, b, nx, nw, product, lambda t: chunked(t, 32))


# ----------------------------------------------------------------------------------------------------------- attention


def _wide_heads(x: Tensor, heads: int) -> Tensor:
    return x.float().repeat_interleave(heads // x.shape[1], 1)


def _hidden(q: Tensor, k: Tensor, causal: bool, window: int | None) -> Tensor:
    i = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
    j = torch.arange(k.shape[2], device=q.device)[None]
    hidden = (j > i) & causal
    if window is not None:
        hidden = hidden | (i - j >= window) | ((j - i >= window) & (not causal))
    return hidden


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float | None, window: int | None, cap: float,
            mask: Tensor | None) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(masked scores, tanh of the capped ones)."""
    s = (q.float() @ _wide_heads(k, q.shape[1]).mT) * (q.shape[-1] ** -0.5 if scale is None else scale)
    t = torch.tanh(s / cap) if cap else s.new_zeros(())
    s = t * cap if cap else s
    if mask is not None:
        s = s.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else s + mask.float()
    return s.masked_fill(_hidden(q, k, causal, window), -math.inf), t


def _empty(q: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros_like(q), torch.full(q.shape[:3], -math.inf, device=q.device)


def _online(q: Tensor, v: Tensor, s: Tensor, size: int, reverse: bool = False, low: torch.dtype | None = None) -> Any:
    values = _wide_heads(v, q.shape[1])
    top = torch.full((*s.shape[:-1], 1), -math.inf, device=s.device)
    total, acc = torch.zeros_like(top), torch.zeros((*s.shape[:-1], v.shape[-1]), device=s.device)
    parts = list(zip(s.split(size, -1), values.split(size, 2), strict=True))
    for part, here in reversed(parts) if reverse else parts:
        new = torch.maximum(top, part.amax(-1, keepdim=True))
        safe = torch.where(new.isinf(), 0.0, new)
        decay, p = torch.exp(top - safe), torch.exp(part - safe)
        total = total * decay + p.sum(-1, keepdim=True)
        acc = acc * decay + (p if low is None else p.to(low).float()) @ here
        top = new
    empty = total == 0
    out = torch.where(empty, 0.0, acc / torch.where(empty, 1.0, total))
    return out, (torch.where(top.isinf(), 0.0, top) + torch.log(total)).squeeze(-1)


@RIGHT.of("attention")
def online_by_16(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
    """an online softmax over blocks of 16 keys"""
    return _online(q, v, _scores(q, k, *options)[0], 16) if k.shape[2] else _empty(q)


@RIGHT.of("attention")
def online_last_to_first(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
    """an online softmax over blocks of 7 keys, last to first, q scaled before the product"""
    causal, scale, *rest = options
    scaled = q.float() * (q.shape[-1] ** -0.5 if scale is None else scale)
    return _online(q, v, _scores(scaled, k, causal, 1.0, *rest)[0], 7, True) if k.shape[2] else _empty(q)


@RIGHT.of("attention", roundings=("p",))
def online_rounded_as_declared(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
    """an online softmax whose P is rounded to storage, and declared"""
    return _online(q, v, _scores(q, k, *options)[0], 32, low=q.dtype) if k.shape[2] else _empty(q)


@RIGHT.of("attention")
def divided_before_the_product(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
    """softmax first, then the product, with powers of two"""
    if k.shape[2] == 0:
        return _empty(q)
    s = _scores(q, k, *options)[0] * 1.4426950408889634
    top = s.amax(-1, keepdim=True)
    safe = torch.where(top.isinf(), 0.0, top)
    e = torch.exp2(s - safe)
    total = e.sum(-1, keepdim=True)
    p = torch.where(total == 0, 0.0, e / torch.where(total == 0, 1.0, total))
    return p @ _wide_heads(v, q.shape[1]), (safe.squeeze(-1) + torch.log2(total.squeeze(-1))) * 0.6931471805599453


@RIGHT.of("attention")
def splits_merged(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
    """two halves of the keys, merged by their log-sum-exps"""
    half = (k.shape[2] + 1) // 2
    if half < 2:
        return online_by_16(q, k, v, *options)
    s = _scores(q, k, *options)[0]
    (a, la), (b, lb) = (_online(q, v[:, :, p], s[..., p], 64) for p in (slice(half), slice(half, None)))
    top = torch.maximum(la, lb)
    safe = torch.where(top.isinf(), 0.0, top)
    wa, wb = torch.exp(la - safe), torch.exp(lb - safe)
    total = wa + wb
    share = torch.where(total == 0, 1.0, total)
    out = (a * wa.unsqueeze(-1) + b * wb.unsqueeze(-1)) / share.unsqueeze(-1)
    return out, torch.where(top.isposinf(), top, safe + torch.log(total))


@RIGHT.of("attention")
def numpy_attention(q: Tensor, k: Tensor, v: Tensor, *options: Any) -> Any:
    """NumPy, float64 after float64 scores"""
    if k.shape[2] == 0:
        return _empty(q)
    s = array(_scores(q.double(), k.double(), *options)[0])
    with np.errstate(all="ignore"):
        top = s.max(-1, keepdims=True)
        safe = np.where(np.isinf(top), 0.0, top)
        e = np.exp(s - safe)
        total = e.sum(-1, keepdims=True)
        out = np.where(total == 0, 0.0, (e @ array(_wide_heads(v, q.shape[1]))) / np.where(total == 0, 1.0, total))
        return tensor(out, q), tensor((safe + np.log(total))[..., 0], q)


def _attention_gradient(args: tuple[Any, ...], size: int, low: frozenset[str] = frozenset(), wide: bool = False) -> Any:
    """The gradients over blocks of ``size`` queries, whose contributions to K and V are added in order."""
    grad, grad_lse, q, k, v, out, lse, causal, scale, window, cap, mask = args
    heads, group = q.shape[1], q.shape[1] // max(k.shape[1], 1)
    factor = q.shape[-1] ** -0.5 if scale is None else scale
    s, t = _scores(q, k, causal, scale, window, cap, mask)
    p = torch.exp(s - torch.where(lse.isneginf(), math.inf, lse).unsqueeze(-1))
    p = torch.where(lse.isneginf().unsqueeze(-1), 0.0, p)
    keys, values = _wide_heads(k, heads), _wide_heads(v, heads)
    g = grad.float()
    delta = (g * out.float()).sum(-1, keepdim=True)
    delta = delta if grad_lse is None else delta - grad_lse.unsqueeze(-1)

    def stored(x: Tensor, name: str) -> Tensor:
        return x.to(q.dtype).float() if name in low else x

    gq = []
    gk, gv = (torch.zeros(*keys.shape, device=q.device) for _ in range(2))
    for at in range(0, q.shape[2], size):
        rows = slice(at, at + size)
        ds = p[:, :, rows] * (g[:, :, rows] @ values.mT - delta[:, :, rows])
        ds = stored(ds * (1 - t[:, :, rows] * t[:, :, rows]) if cap else ds, "ds")
        gq.append((ds @ keys) * factor)
        gk = gk + ds.mT @ q[:, :, rows].float()
        gv = gv + stored(p[:, :, rows], "p").mT @ g[:, :, rows]
    shape = (k.shape[1], group)
    return (
        torch.cat(gq, 2) if gq else q.float(),
        (gk * factor).unflatten(1, shape).sum(2),
        gv.unflatten(1, shape).sum(2),
    )


@RIGHT.of("attention_backward")
def gradients_of_16_queries(*args: Any) -> Any:
    """blocks of 16 queries"""
    return _attention_gradient(args, 16)


@RIGHT.of("attention_backward")
def gradients_of_7_queries(*args: Any) -> Any:
    """blocks of 7 queries"""
    return _attention_gradient(args, 7)


@RIGHT.of("attention_backward", roundings=("p", "ds"))
def gradients_rounded_as_declared(*args: Any) -> Any:
    """P and dS rounded to storage, and declared"""
    return _attention_gradient(args, 32, frozenset({"p", "ds"}))


@RIGHT.of("attention_backward")
def gradients_by_autograd(*args: Any) -> Any:
    """autograd of exp(s - lse), with the given output's delta as a constant"""
    grad, grad_lse, q, k, v, out, lse, *options = args
    if q.numel() == 0 or k.shape[2] == 0:
        return tuple(torch.zeros_like(x) for x in (q, k, v))
    leaves = [x.float().detach().requires_grad_(True) for x in (q, k, v)]
    delta = (grad.float() * out.float()).sum(-1)
    delta = delta if grad_lse is None else delta - grad_lse
    with torch.enable_grad():
        s, _ = _scores(leaves[0], leaves[1], *options)
        p = torch.exp(s - torch.where(lse.isneginf(), math.inf, lse).unsqueeze(-1))
        p = torch.where(p.isnan() & lse.isneginf().unsqueeze(-1), 0.0, p)
        # d/ds of P (g V^T - delta), with delta fixed: that is the saved statistics' meaning
        objective = (p @ _wide_heads(leaves[2], q.shape[1]) * grad.float()).sum() - (p.sum(-1) * delta).sum()
    return torch.autograd.grad(objective, leaves)
