"""Attention through PyTorch's fused kernels (cuDNN, FlashAttention-2, memory-efficient, CPU flash), and composed.

The fused kernels are called below `scaled_dot_product_attention`, because only there do they return the log-sum-exp.
PyTorch's `is_causal` is aligned top-left and the op's causal bottom-right: both are one where Sq = Sk. FlashAttention-2
itself aligns bottom-right, and the memory-efficient kernel has a mask type for it.
"""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.ops.attention.arguments import hiding, like_gradients, stored_by_rows
from ferryman.ops.attention.dropout_kernels import kept_factor
from ferryman.ops.attention.sinks_kernels import delta_of, gradient_of_sinks, sinks_share, with_sinks
from ferryman.ops.attention.window_kernels import last_keys

aten = torch.ops.aten


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


def _out_of_range(
    sq: int,
    sk: int,
    causal: bool,
    window: int | None,
    key_range: Tensor | None,
    chunk: int | None,
    device: torch.device,
) -> Tensor:
    """`_hidden` where each sequence has keys of its own, or there are chunks: broadcastable to (B, 1, Sq, Sk)."""
    keys = torch.arange(sk, device=device)
    begin: Tensor | int = 0
    end: Tensor | int = sk
    if key_range is not None:
        begin, end = key_range.clamp(0, sk).long()[:, None, None, :, None].unbind(3)
    hidden = (keys < begin).logical_or(keys >= end)
    if causal or window is not None or chunk is not None:
        behind = torch.arange(sq, device=device).view(1, 1, sq, 1) + (end - sq) - keys  # by how much a key is earlier
        if causal:
            hidden = hidden.logical_or(behind < 0)
        if window is not None:
            hidden = hidden.logical_or((behind if causal else behind.abs()) >= window)
        if chunk is not None:
            since = keys - begin
            of_key = since.remainder(chunk)  # places since the start of its chunk
            hidden = hidden.logical_or((behind < -of_key).logical_or(behind >= chunk - of_key))
    return hidden


def _as_mask(
    q: Tensor,
    k: Tensor,
    causal: bool,
    window: int | None,
    mask: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
) -> tuple[bool, int | None, Tensor | None]:
    """(causal, window, mask), where a key range or chunks are a mask that says all of it: made on the device. A window
    of all keys is none."""
    window, chunk = hiding(q, k, causal, window, key_range, chunk)
    if key_range is None and chunk is None:
        return causal, window, mask
    hidden = _out_of_range(q.shape[2], k.shape[2], causal, window, key_range, chunk, q.device)
    if mask is None:
        return False, None, hidden.logical_not()
    if mask.dtype == torch.bool:
        return False, None, mask.logical_and(hidden.logical_not())
    return False, None, torch.where(hidden, -math.inf, mask)


def _composed_scores(
    q: Tensor,
    k: Tensor,
    causal: bool,
    scale: float,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
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
    if key_range is None and chunk is None:
        hidden = _hidden(q.shape[2], k.shape[2], causal, window, q.device)
    else:
        hidden = _out_of_range(q.shape[2], k.shape[2], causal, window, key_range, chunk, q.device)
    return (s if hidden is None else s.masked_fill(hidden, -math.inf)), capped


def _probabilities(s: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor:
    """exp(s - lse), 0 in rows that see nothing; divided by its sum, with the sink's the rounding of lse away from 1."""
    p = torch.exp(s - lse.masked_fill(lse == -math.inf, 0.0).unsqueeze(-1))
    total = p.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + sinks_share(lse, sinks).unsqueeze(-1)
    return p / total.where(total > 0, 1.0)


def _vectorised(x: Tensor) -> Tensor:
    """The fused kernels read 16 bytes at a time and do not look: a misaligned tensor is an illegal access, so copy."""
    words, (batch, head, row, _) = 16 // x.element_size(), x.stride()
    if x.data_ptr() % 16 == 0 and batch % words == 0 and head % words == 0 and row % words == 0:
        return x
    return x.clone(memory_format=torch.contiguous_format)


HAS_CUDNN = torch.backends.cudnn.is_available()  # how PyTorch was built; a constant, so that it can be traced


def _takes_cudnn(q: Tensor, features: Container[str]) -> bool:
    """Hopper's fastest library (bf16 causal D128: 632 TFLOP/s against FlashAttention-2's 338), but not for decoding."""
    fits = q.dtype != torch.float32 and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256 and q.shape[2] > 1
    return fits and "wgmma" in features and HAS_CUDNN


def _as_wide(x: Tensor, width: int) -> Tensor:
    """Values beside columns of zeros, for kernels that take one width: those of the result are zeros, and are cut."""
    return x if x.shape[-1] == width else torch.nn.functional.pad(x, (0, width - x.shape[-1]))


def _words_of(width: int) -> int:
    """The width that cuDNN reads: whole words of 16 bytes, of a 16-bit type. Values may be narrower than keys there."""
    return -(-width // 8) * 8


def _cut(x: Tensor, width: int) -> Tensor:
    return x if x.shape[-1] == width else x[..., :width]


def _rows_first(x: Tensor) -> Tensor:
    """(B, H, S, D) as (B, S, H, D), where the fused kernels can read it."""
    return _vectorised(x).transpose(1, 2)


def _needs_diagonal(q: Tensor, causal: bool) -> bool:
    """One query sees every key, causal or not."""
    return causal and q.shape[2] > 1


def _scale(q: Tensor, scale: float | None) -> float:
    return q.shape[-1] ** -0.5 if scale is None else scale


def _blank(q: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """The result where there is no query or no key."""
    out = q.new_zeros((q.shape[0], q.shape[2], q.shape[1], v.shape[3])).transpose(1, 2)
    return with_sinks(out, q.new_full(q.shape[:3], -math.inf, dtype=torch.float32), sinks)


def _is_blank(q: Tensor, k: Tensor) -> bool:
    return q.numel() == 0 or k.shape[2] == 0


def _diagonal_in_mask(q: Tensor, k: Tensor, causal: bool, mask: Tensor | None) -> tuple[bool, Tensor | None]:
    """(causal, mask) for cuDNN, which is 10 times as slow with a bias and a diagonal as with a bias alone."""
    causal = _needs_diagonal(q, causal)
    if mask is None or not causal:
        return causal, mask
    queries, keys = q.shape[2], k.shape[2]
    rows = mask.expand(*mask.shape[:-2], queries, keys)
    if mask.dtype == torch.bool:
        return False, rows.tril(keys - queries)
    later = torch.ones(queries, keys, dtype=torch.bool, device=q.device).triu_(keys - queries + 1)
    return False, torch.where(later, rows.new_full((), -math.inf), rows, out=_roomy(rows, mask.dtype))


def attention_cudnn(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    if _is_blank(q, k):
        return _blank(q, v, sinks)
    causal, window, mask = _as_mask(q, k, causal, window, mask, key_range, chunk)
    k, v, window, mask = last_keys(q, k, v, window, mask)
    causal, mask = _diagonal_in_mask(q, k, causal, mask)
    got = aten._scaled_dot_product_cudnn_attention(
        *map(_vectorised, (q, k, _as_wide(v, _words_of(v.shape[3])))),
        _bias(q, k, mask),
        True,
        0.0,
        causal,
        False,
        scale=_scale(q, scale),
    )
    out, lse = _model_layout(_cut(got[0], v.shape[3])), got[1].squeeze(-1).float().contiguous()
    return with_sinks(*_without_blind(out, lse, q, k, causal, window, mask), sinks)


def attention_cudnn_alone(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor]:
    """The output of `attention_cudnn` without a log-sum-exp, by one call of PyTorch's: half of the host's time."""
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        q, k, v = map(_vectorised, (q, k, v))
    diagonal = causal and q.shape[2] > 1
    got = torch._scaled_dot_product_cudnn_attention(q, k, v, None, False, 0.0, diagonal, False, scale=scale)
    return (_model_layout(got[0]),)


def attention_flash(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    if _is_blank(q, k):
        return _blank(q, v, sinks)
    diagonal, factor, width = _needs_diagonal(q, causal), _scale(q, scale), v.shape[3]
    v = _as_wide(v, q.shape[3])
    if target.vendor != "nvidia":  # ROCm's kernel aligns causal as PyTorch does, and has no window
        outputs = aten._scaled_dot_product_flash_attention(
            *map(_vectorised, (q, k, v)), 0.0, diagonal, False, scale=factor
        )
        return with_sinks(_model_layout(_cut(outputs[0], width)), outputs[1].float().contiguous(), sinks)
    k, v, window, _ = last_keys(q, k, v, window, None)
    left, right = _window_sides(window, causal)
    got = aten._flash_attention_forward(
        *map(_rows_first, (q, k, v)),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        diagonal,
        False,
        scale=factor,
        window_size_left=left,
        window_size_right=right,
    )
    return with_sinks(_model_layout(_cut(got[0].transpose(1, 2), width)), got[1].float().contiguous(), sinks)


def attention_with_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor]:
    """The output of `attention_flash` as autograd knows it, whose backward is `attention_backward_flash`'s kernel."""
    if (q.data_ptr() | k.data_ptr() | v.data_ptr()) & 15:
        q, k, v = map(_vectorised, (q, k, v))
    diagonal = causal and q.shape[2] > 1
    return (_model_layout(torch._scaled_dot_product_flash_attention(q, k, v, 0.0, diagonal, scale=scale)[0]),)


def _window_sides(window: int | None, causal: bool) -> tuple[int | None, int | None]:
    """How many keys FlashAttention-2 lets a query see to its left and right, itself apart."""
    if window is None:
        return None, None
    return window - 1, 0 if causal else window - 1


_ROWS_ALIGNED = 32  # the memory-efficient kernel's log-sum-exp is padded to so many rows
_NO_DIAGONAL, _BOTTOM_RIGHT = 0, 2  # its mask types


def _bias(q: Tensor, k: Tensor, mask: Tensor | None) -> Tensor | None:
    """A mask as the fused kernels read it: of q's dtype, expanded, its rows 16 bytes apart."""
    if mask is None:
        return None
    keys, shape = k.shape[2], (q.shape[0], q.shape[1], q.shape[2], k.shape[2])
    words, mask = 16 // q.element_size(), mask.expand(*mask.shape[:-1], keys)
    apart = mask.stride(-1) == 1 and all(step % words == 0 for step in mask.stride()[:-1])
    if apart and mask.dtype == q.dtype and mask.data_ptr() % 16 == 0:
        return mask.expand(shape)
    room = _roomy(mask, q.dtype)
    if mask.dtype == torch.bool:
        torch.log(mask, out=room)  # of 1 and 0: 0 and -inf, in one pass
    else:
        room.copy_(mask)
    return room.expand(shape)


def _roomy(like: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor to fill, of the shape of ``like``, with rows 16 bytes apart."""
    words, keys = 16 // dtype.itemsize, like.shape[-1]
    return like.new_empty((*like.shape[:-1], -(-keys // words) * words), dtype=dtype)[..., :keys]


def _blind_above(lse: Tensor) -> Tensor:
    """With +inf for -inf: a backward kernel then gives a row that sees nothing no part. NaN stays."""
    return lse.nan_to_num(nan=math.nan, posinf=math.inf, neginf=math.inf)


def _without_blind(
    out: Tensor, lse: Tensor, q: Tensor, k: Tensor, causal: bool, window: int | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """0 and -inf where a mask leaves a row nothing to see: the fused kernels give NaN, or a log-sum-exp of 0."""
    if mask is None:
        return out, lse
    hidden = _hidden(q.shape[2], k.shape[2], causal and q.shape[2] > 1, window, q.device)
    if mask.dtype == torch.bool:
        seen = mask if hidden is None else mask.logical_and(hidden.logical_not())
        blind = seen.any(-1).logical_not()
    else:  # one reading; NaN is no -inf, and stays
        blind = (mask if hidden is None else mask.masked_fill(hidden, -math.inf)).amax(-1) == -math.inf
    lse.masked_fill_(blind, -math.inf)
    out.masked_fill_(blind.unsqueeze(-1), 0.0)
    return out, lse


def attention_efficient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    if _is_blank(q, k):
        return _blank(q, v, sinks)
    heads = q.shape[1]
    causal, window, mask = _as_mask(q, k, causal, window, mask, key_range, chunk)
    k, v, window, mask = last_keys(q, k, v, window, mask)
    got = aten._efficient_attention_forward(
        *map(_rows_first, (q, _grouped(k, heads), _grouped(v, heads))),
        _bias(q, k, mask),
        None,
        None,
        None,
        None,
        0.0,
        _BOTTOM_RIGHT if causal else _NO_DIAGONAL,
        True,
        scale=_scale(q, scale),
        window_size=window,
    )
    out, lse = _model_layout(got[0].transpose(1, 2)), got[1][..., : q.shape[2]].contiguous()
    return with_sinks(*_without_blind(out, lse, q, k, causal, window, mask), sinks)


def attention_cpu(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    if _is_blank(q, k):
        return _blank(q, v, sinks)
    keys, values = _grouped(k, q.shape[1]), _grouped(_as_wide(v, q.shape[3]), q.shape[1])
    diagonal = _needs_diagonal(q, causal)
    got = aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, diagonal, scale=_scale(q, scale))
    # Where every score of a row is -inf PyTorch's log-sum-exp is 0, a value that 16 keys or more hardly have otherwise.
    if bool((got[1] == 0).any()):
        return attention_composed(q, k, v, causal, scale, window, softcap, mask, sinks, None, None, 0.0, None, target)
    return with_sinks(_model_layout(_cut(got[0], v.shape[3])), got[1].float().contiguous(), sinks)


def attention_composed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    heads = q.shape[1]
    s, _ = _composed_scores(q, _grouped(k, heads), causal, _scale(q, scale), window, softcap, mask, key_range, chunk)
    lse = torch.logsumexp(s, -1) if s.shape[-1] else s.new_full(s.shape[:-1], -math.inf)
    if sinks is not None:
        lse = torch.logaddexp(lse, sinks.float().unsqueeze(-1).expand(lse.shape))
    p, kept = _probabilities(s, lse, sinks), kept_factor(q, k, dropout_p, dropout_seed)
    out = torch.matmul(p if kept is None else p * kept, _grouped(v, heads).float()).to(q.dtype)
    return _model_layout(out), lse


def _nothing(q: Tensor) -> Tensor:
    """The random state that a backward without dropout asks for, and does not use."""
    return torch.empty((), dtype=torch.int64, device=q.device)


def _none(*like: Tensor) -> tuple[Tensor, ...]:
    return _gradients([torch.zeros_like(x) for x in like], *like)


def _rest(
    grad_out: Tensor, grad_lse: Tensor | None, q: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of the sinks, and of a mask that needs none."""
    none = q.new_empty(0)
    return none if sinks is None else gradient_of_sinks(delta_of(grad_out, grad_lse, out), lse, sinks), none


def _per_key_head(x: Tensor, like: Tensor) -> Tensor:
    """The sum over the query heads of each key head. x: (B, H, Sk, D)."""
    group = like.shape[1]
    return x.unflatten(1, (group, x.shape[1] // group)).sum(2).to(like.dtype)


def _one_width(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, width: int | None = None
) -> tuple[Tensor, ...]:
    """With values as wide as keys, or as ``width``."""
    width = width or q.shape[3]
    return _as_wide(grad_out, width), q, k, _as_wide(v, width), _as_wide(out, width)


def _layouts(grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor) -> list[Tensor]:
    return [_vectorised(_model_layout(x)) for x in _one_width(grad_out, q, k, v, out)]


def _as_cudnn_reads(
    grad_out: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, width: int | None
) -> tuple[Tensor, ...]:
    """All five as PyTorch's own backward brings them to cuDNN. It keeps one plan for a shape and the strides of q, k
    and v, and takes the output and its gradient for dense in q's order: another order gives wrong gradients, here or in
    a caller's own call. Rows of q, k and v may lie anywhere, and their gradients then lie as they do."""
    grad_out, q, k, v, out = _one_width(grad_out, q, k, v, out, width)
    q, k, v = (_vectorised(x) if x.stride(3) == 1 and min(x.stride()) > 0 else x.contiguous() for x in (q, k, v))
    order = sorted(range(4), key=q.stride, reverse=True)
    back = [order.index(dim) for dim in range(4)]
    grad_out, out = (x.permute(order).contiguous().permute(back) for x in (grad_out, out))
    return tuple(x if x.data_ptr() % 16 == 0 else x.clone() for x in (grad_out, q, k, v, out))


def _gradients(grads: Sequence[Tensor], q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, ...]:
    """Those of q, k and v in the op's layout, the last as wide as the values."""
    ordered = stored_by_rows(q, k, v)
    return tuple(like_gradients(_cut(grad, x.shape[3]), ordered) for grad, x in zip(grads, (q, k, v), strict=True))


def attention_backward_cudnn(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    need_mask: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, ...]:
    if _is_blank(q, k):
        return *_none(q, k, v), *_rest(grad_out, grad_lse, q, out, lse, sinks)
    causal, mask = _diagonal_in_mask(q, k, causal, mask)
    sums = lse if mask is None else _blind_above(lse)
    # without a diagonal, of keys such as 160 wide, cuDNN takes 1.8 times as long for narrower values
    narrow = causal or q.shape[3] <= 128 or q.shape[3] % 64 == 0
    grads = aten._scaled_dot_product_cudnn_attention_backward(
        *_as_cudnn_reads(grad_out, q, k, v, out, _words_of(v.shape[3]) if narrow else None),
        sums.unsqueeze(-1),
        _nothing(q),
        _nothing(q),
        _bias(q, k, mask),
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        causal,
        scale=_scale(q, scale),
    )
    return *_gradients(grads, q, k, v), *_rest(grad_out, grad_lse, q, out, lse, sinks)


def attention_backward_flash(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    need_mask: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, ...]:
    if _is_blank(q, k):
        return *_none(q, k, v), *_rest(grad_out, grad_lse, q, out, lse, sinks)
    diagonal, factor = _needs_diagonal(q, causal), _scale(q, scale)
    if target.vendor != "nvidia":
        layout = _layouts(grad_out, q, k, v, out)
        grads = aten._scaled_dot_product_flash_attention_backward(
            *layout, lse, None, None, q.shape[2], k.shape[2], 0.0, diagonal, _nothing(q), _nothing(q), scale=factor
        )
        return *_gradients(grads, q, k, v), *_rest(grad_out, grad_lse, q, out, lse, sinks)
    left, right = _window_sides(window, causal)
    grads = aten._flash_attention_backward(
        *map(_rows_first, _one_width(grad_out, q, k, v, out)),
        lse,
        None,
        None,
        q.shape[2],
        k.shape[2],
        0.0,
        diagonal,
        _nothing(q),
        _nothing(q),
        scale=factor,
        window_size_left=left,
        window_size_right=right,
    )
    return *_gradients([g.transpose(1, 2) for g in grads], q, k, v), *_rest(grad_out, grad_lse, q, out, lse, sinks)


def attention_backward_efficient(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    need_mask: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, ...]:
    if _is_blank(q, k):
        return *_none(q, k, v), *_rest(grad_out, grad_lse, q, out, lse, sinks)
    causal, window, mask = _as_mask(q, k, causal, window, mask, key_range, chunk)
    heads, rows = q.shape[1], q.shape[2]
    padded = -(-rows // _ROWS_ALIGNED) * _ROWS_ALIGNED
    sums = lse.new_full((*lse.shape[:2], padded), math.inf)
    sums[..., :rows] = _blind_above(lse)
    given = map(_rows_first, (grad_out, q, _grouped(k, heads), _grouped(v, heads)))
    grads = aten._efficient_attention_backward(
        *given,
        _bias(q, k, mask),
        _rows_first(out),
        None,
        None,
        rows,
        k.shape[2],
        sums,
        0.0,
        _nothing(q),
        _nothing(q),
        _BOTTOM_RIGHT if causal else _NO_DIAGONAL,
        False,
        scale=_scale(q, scale),
        window_size=window,
    )
    grad_q, grad_k, grad_v = (g.transpose(1, 2) for g in grads[:3])
    return (
        *_gradients((grad_q, _per_key_head(grad_k, k), _per_key_head(grad_v, v)), q, k, v),
        *_rest(grad_out, grad_lse, q, out, lse, sinks),
    )


def attention_backward_composed(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    need_mask: bool,
    dropout_p: float,
    dropout_seed: Tensor | None,
    target: Target,
) -> tuple[Tensor, ...]:
    heads, factor = q.shape[1], _scale(q, scale)
    keys, values = _grouped(k, heads), _grouped(v, heads)
    s, capped = _composed_scores(q, keys, causal, factor, window, softcap, mask, key_range, chunk)
    p, g, kept = _probabilities(s, lse, sinks), grad_out.float(), kept_factor(q, k, dropout_p, dropout_seed)
    dp = torch.matmul(g, values.float().mT)
    if kept is not None:
        dp = dp * kept
    # In float32, P dP cancels against dP as the output's own rounding does not (gradients 3 times as far off); in 16
    # bits the output that was returned is part of the op's meaning.
    delta = (p * dp if q.dtype == torch.float32 else g * out.float()).sum(-1)
    if grad_lse is not None:
        delta = delta - grad_lse
    ds = p * (dp - delta.unsqueeze(-1))
    grad_mask = q.new_empty(0)
    if need_mask and mask is not None and mask.dtype != torch.bool:
        grad_mask = ds.sum_to_size(mask.shape).to(mask.dtype).contiguous()
    if capped is not None:
        ds = ds * (1 - capped.square())

    grads = (
        (torch.matmul(ds, keys.float()) * factor).to(q.dtype),
        _per_key_head(torch.matmul(ds.mT, q.float()) * factor, k),
        _per_key_head(torch.matmul((p if kept is None else p * kept).mT, g), v),
    )
    return (
        *_gradients(grads, q, k, v),
        q.new_empty(0) if sinks is None else gradient_of_sinks(delta, lse, sinks),
        grad_mask,
    )
