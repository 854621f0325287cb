"""Attention through PyTorch's fused kernels (cuDNN, FlashAttention-2, memory-efficient, CPU flash), else composed.

The fused kernels are called below `scaled_dot_product_attention`, because only there do they return the log-sum-exp.
Their causal mask is aligned top-left, so they serve causal calls with Sq = Sk only (decoding needs no mask at all).
"""

from __future__ import annotations

import math
from collections.abc import Container
from typing import Any

import torch
from torch import Tensor

from ferryman.backends.base import Target

aten = torch.ops.aten
_CPU_LANES = 16  # float32 in an AVX-512 register


def _model_layout(out: Tensor) -> Tensor:
    _, heads, seq, head_dim = out.shape
    if out.stride() == (seq * heads * head_dim, head_dim, heads * head_dim, 1):
        return out
    return out.transpose(1, 2).contiguous().transpose(1, 2)


def _grouped(x: Tensor, heads: int) -> Tensor:
    if x.shape[1] == heads:
        return x
    batch, group, seq, head_dim = x.shape
    return x.unsqueeze(2).expand(-1, -1, heads // group, -1, -1).reshape(batch, heads, seq, head_dim)


def _hidden(sq: int, sk: int, causal: bool, window: int | None, device: torch.device) -> Tensor | None:
    """(Sq, Sk), True where a query may not look; the diagonal is bottom-right."""
    if not causal and window is None:
        return None
    every = torch.ones(sq, sk, dtype=torch.bool, device=device)
    diagonal = sk - sq
    seen = every.tril(diagonal) if causal else every
    if window is not None:
        seen = seen.triu(diagonal - window + 1)
        if not causal:
            seen = seen.tril(diagonal + window - 1)
    return seen.logical_not()


def _composed_scores(
    q: Tensor, k: Tensor, causal: bool, scale: float, window: int | None, softcap: float, mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    s = torch.matmul(q.float() * scale, k.float().mT)
    capped = None
    if softcap:
        capped = torch.tanh(s / softcap)
        s = capped * softcap
    if mask is not None and mask.dtype != torch.bool:
        s = s + mask.float()
    elif mask is not None:
        s = s.masked_fill(mask.logical_not(), -math.inf)
    hidden = _hidden(q.shape[2], k.shape[2], causal, window, q.device)
    return (s if hidden is None else s.masked_fill(hidden, -math.inf)), capped


def _probabilities(s: Tensor, lse: Tensor) -> Tensor:
    """exp(s - lse), 0 in rows that see nothing; divided by its sum, which is 1 but for the rounding of lse."""
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    total = p.sum(-1, keepdim=True)
    return p / total.where(total > 0, 1.0)


def _vectorised(x: Tensor) -> Tensor:
    """The fused kernels read 16 bytes at a time and do not look: a misaligned tensor is an illegal access, so copy."""
    words, (batch, head, row, _) = 16 // x.element_size(), x.stride()
    if x.data_ptr() % 16 == 0 and batch % words == 0 and head % words == 0 and row % words == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


_HAS_CUDNN = torch.backends.cudnn.is_available()  # how PyTorch was built; a constant, so that it can be traced


def _takes_cudnn(q: Tensor, features: Container[str]) -> bool:
    """Hopper's fastest library (bf16 causal D128: 632 TFLOP/s against FlashAttention-2's 338), but not for decoding."""
    fits = q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 128 and q.shape[2] > 1
    return fits and "wgmma" in features and _HAS_CUDNN


def _fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, target: Target) -> tuple[Tensor, Tensor] | None:
    """(out, lse) from the fastest fused kernel that takes the call, or None."""
    if q.is_cuda and _takes_cudnn(q, target.features):
        operands = map(_vectorised, (q, k, v))
        got = aten._scaled_dot_product_cudnn_attention(*operands, None, True, 0.0, causal, False, scale=scale)
        return got[0], got[1].squeeze(-1)
    if q.is_cuda and q.dtype != torch.float32 and q.shape[-1] % 8 == 0:
        got = aten._scaled_dot_product_flash_attention(*map(_vectorised, (q, k, v)), 0.0, causal, False, scale=scale)
        return got[0], got[1]
    # PyTorch's CPU kernel takes 16-bit types too, but with an exp that is off by 5e-5 in the log-sum-exp, and NaN to 0;
    # a row of NaN scores also becomes 0 where its keys do not fill one vector. Where every score of a row is -inf its
    # log-sum-exp is 0 (-inf here), a value that 16 keys or more hardly have otherwise.
    if q.is_cpu and q.dtype == torch.float32 and k.shape[2] >= _CPU_LANES:
        keys, values = _grouped(k, q.shape[1]), _grouped(v, q.shape[1])
        got = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, causal, scale=scale)
        return None if bool((got[1] == 0).any()) else (got[0], got[1])
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, window: int | None, softcap: float,
    mask: Tensor | None, target: Target,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    heads, sq, head_dim = q.shape[1:]
    factor = head_dim**-0.5 if scale is None else scale
    plain = window is None and softcap == 0.0 and mask is None and q.numel() > 0 and k.shape[2] > 0
    needs_mask = causal and sq > 1
    if plain and (not needs_mask or sq == k.shape[2]) and all(t.stride(-1) == 1 for t in (q, k, v)):
        found = _fused(q, k, v, needs_mask, factor, target)
        if found is not None:
            return _model_layout(found[0]), found[1].float().contiguous()
    s, _ = _composed_scores(q, _grouped(k, heads), causal, factor, window, softcap, mask)
    lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    out = torch.matmul(_probabilities(s, lse), _grouped(v, heads).float()).to(q.dtype)
    return _model_layout(out), lse


_offset_fits: list[int] = []


def _note_offset(context: Any) -> None:
    x = context.get_local("x").as_fake()
    _offset_fits.append(int(x.storage_offset() * x.element_size() % 16 == 0))


def _noted_offset() -> int:
    return _offset_fits.pop()


_noted_offset._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _vectorised_when_traced(x: Tensor) -> bool:
    """`_vectorised` where there is no address: strides say it, and the offset, which Dynamo gives its own code only."""
    from torch._dynamo.comptime import comptime

    words, (batch, head, row, _) = 16 // x.element_size(), x.stride()
    comptime(_note_offset)
    return _noted_offset() == 1 and batch % words == 0 and head % words == 0 and row % words == 0


def attention_traced(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float | None, window: int | None, softcap: float,
    mask: Tensor | None, features: str,
) -> Tensor | None:  # fmt: skip
    """`attention`'s output as one ATen call that autograd and Inductor know; None where only the whole kernel will do.

    A decoder layer of 512 tokens is bound by the host on an H200: the opaque op costs 63 us of it, this call 16.
    """
    heads, sq, head_dim = q.shape[1:]
    needs_mask = causal and sq != 1
    empty = sq == 0 or k.shape[2] == 0 or q.shape[0] * heads == 0
    if empty or window is not None or softcap or mask is not None or (needs_mask and sq != k.shape[2]):
        return None
    if q.stride(3) != 1 or k.stride(3) != 1 or v.stride(3) != 1:
        return None
    factor = head_dim**-0.5 if scale is None else scale
    if q.is_cpu and q.dtype == torch.float32:
        keys, values = _grouped(k, heads), _grouped(v, heads)
        got = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, needs_mask, scale=factor)
    elif not q.is_cuda or q.dtype == torch.float32 or head_dim % 8 or not all(map(_vectorised_when_traced, (q, k, v))):
        return None
    elif _takes_cudnn(q, features.split()):
        saved = torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)
        got = aten._scaled_dot_product_cudnn_attention(q, k, v, None, saved, 0.0, needs_mask, False, scale=factor)
    else:
        got = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, needs_mask, False, scale=factor)
    return _model_layout(got[0])


def attention_backward(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, causal: bool,
    scale: float | None, window: int | None, softcap: float, mask: Tensor | None, target: Target,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    _, heads, sq, head_dim = q.shape
    group = k.shape[1]
    factor = head_dim**-0.5 if scale is None else scale

    def per_key_head(x: Tensor, like: Tensor) -> Tensor:
        return x.unflatten(1, (group, heads // group)).sum(2).to(like.dtype).contiguous()

    plain = window is None and softcap == 0.0 and mask is None and grad_lse is None and q.numel() > 0
    if plain and q.is_cuda and q.dtype != torch.float32 and head_dim % 8 == 0 and sq == k.shape[2]:
        # Either backward takes any forward's natural-log lse; without dropout the random state is unused.
        nothing = torch.zeros((), dtype=torch.int64, device=q.device)
        layout = [_vectorised(_model_layout(t)) for t in (grad_out, q, k, v, out)]
        if _takes_cudnn(q, target.features):
            grads = aten._scaled_dot_product_cudnn_attention_backward(
                *layout, lse.unsqueeze(-1), nothing, nothing, None, None, None, sq, sq, 0.0, causal, scale=factor
            )
            return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()
        gq, gk, gv = aten._scaled_dot_product_flash_attention_backward(
            *layout, lse, None, None, sq, sq, 0.0, causal, nothing, nothing, scale=factor
        )
        return gq.contiguous(), gk.contiguous(), gv.contiguous()
    keys, values = _grouped(k, heads), _grouped(v, heads)
    s, capped = _composed_scores(q, keys, causal, factor, window, softcap, mask)
    p, g = _probabilities(s, lse), grad_out.float()
    dp = torch.matmul(g, values.float().mT)
    # In float32, P dP cancels against dP as the output's own rounding does not (gradients 3 times as far off); in 16
    # bits the output that was returned is part of the op's meaning.
    delta = (p * dp if q.dtype == torch.float32 else g * out.float()).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    ds = p * (dp - delta.unsqueeze(-1))
    if capped is not None:
        ds = ds * (1 - capped.square())

    return (
        (torch.matmul(ds, keys.float()) * factor).to(q.dtype).contiguous(),
        per_key_head(torch.matmul(ds.mT, q.float()) * factor, k),
        per_key_head(torch.matmul(p.mT, g), v),
    )
