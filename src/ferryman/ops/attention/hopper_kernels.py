"""Attention's forward pass on Hopper: the launcher of ``hopper_forward_kernels.attention_forward_hopper``.

Same meaning and rounding points as ``triton_kernels.attention_forward``, which serves whatever the menu keeps from it.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.ops.attention.arguments import OF_HOPPER, hiding
from ferryman.ops.attention.hopper_descriptor_kernels import describable, operand, strides
from ferryman.ops.attention.hopper_forward_kernels import attention_forward_hopper
from ferryman.ops.attention.hopper_place_kernels import _GIVEN, _LISTED, _OF_MASK, BLOCK_M, _block_n
from ferryman.ops.attention.hopper_softmax_kernels import _LOG2E
from ferryman.ops.attention.key_mask_kernels import keys_of_mask
from ferryman.ops.attention.pair_mask_kernels import tiles_of_mask
from ferryman.ops.attention.triton_kernels import _heads_together, blank, forms, outputs

HEAD_DIMS = (64, 128, 256)  # of tiles in shared memory; heads of other sizes are filled up with zeros, by TMA
_SPILLS = 32  # bytes of a thread, as kernels of wide heads have them (`_wide`)


def _bias(mask: torch.Tensor) -> torch.Tensor:
    """A float mask as (1 or B, 1 or H, Sq, Sk) whose rows a TMA descriptor can stand for."""
    bias = mask[(None,) * (4 - mask.dim())]
    bias = bias[tuple(slice(1) if bias.stride(i) == 0 else slice(None) for i in (0, 1))]
    if describable(bias, strides(bias)):
        return bias
    rows = bias.new_empty((*bias.shape[:3], -(-bias.shape[3] // 8) * 8))[..., : bias.shape[3]]
    return rows.copy_(bias)


def of_keys(mask: torch.Tensor, keys: int) -> bool:
    """Whether a bool mask has a column for each key, and one row for all queries and heads."""
    alike = all(mask.dim() < -d or mask.shape[d] == 1 or mask.stride(d) == 0 for d in (-2, -3))
    return alike and mask.dim() > 0 and mask.shape[-1] == keys


def _key_mask(mask: torch.Tensor, batch: int) -> torch.Tensor:
    """A bool mask of keys alone as uint8 (batch, 1, 1, Sk), whose keys lie side by side."""
    mask = mask.view(torch.uint8)[(None,) * (4 - mask.dim())][:, :1, :1]
    return (mask if mask.stride(3) == 1 else mask.contiguous()).expand(batch, 1, 1, mask.shape[3])


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, torch.Tensor]:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    out, lse = outputs(q, v)
    if blank(q, k, out, lse, sinks):
        return out.transpose(1, 2), lse
    tile = min(d for d in HEAD_DIMS if d >= dim)
    window, chunk = hiding(q, k, causal, window, key_range, chunk)
    key_range = None if key_range is None else key_range.contiguous()
    (q, over_q), (k, over_k), (v, over_v) = operand(q), operand(k), operand(v)
    biased = mask is not None and mask.dtype != torch.bool
    bias = _bias(mask) if mask is not None and biased else q
    kind, ranges, lists, own, apart, step = 0, lse, lse, q, 0, 0
    if mask is not None and not biased and not of_keys(mask, keys):
        kind, shape = _LISTED.value, (batch, heads, queries, keys)
        own, lists, ranges, apart, step = tiles_of_mask(mask, key_range, shape, causal, window, chunk, _block_n(tile))
        causal, window, chunk = False, None, None
    elif mask is not None and not biased:
        kind, own = _OF_MASK.value, _key_mask(mask, batch)
        ranges, apart, step = keys_of_mask(own, key_range, batch), own.stride(0), own.stride(3)
    elif key_range is not None:
        kind, ranges = _GIVEN.value, key_range
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size()) * (heads // kv_heads)
    # Tiles are dealt in advance: those of all heads end evenly, a group's do not. Many short ones at once wait for K
    # and V (B16 H32 S1024 D64: 227 us, in groups 210).
    if causal and 2 * k.numel() * k.element_size() <= 3 * target.l2_bytes and (queries > 1024 or dim > 64):
        together = batch * heads
    tiles = -(-queries // BLOCK_M.value) * batch * heads
    scale = dim**-0.5 if scale is None else scale
    launch(
        attention_forward_hopper,
        (min(tiles, target.units),),
        q,
        k,
        v,
        out,
        lse,
        lse if sinks is None else sinks.contiguous(),
        bias,
        ranges,
        lists,
        own,
        *over_q,
        *over_k,
        *over_v,
        *strides(out.transpose(1, 2)),
        *(strides(bias) if biased else over_q),
        apart,
        step,
        heads,
        kv_heads,
        heads // kv_heads,
        together,
        queries,
        keys,
        dim,
        v.shape[3],
        batch * heads,
        bias.shape[0],
        bias.shape[1],
        window or 0,
        chunk or 0,
        scale / softcap if softcap else scale * (1.0 if biased else _LOG2E.value),
        softcap,
        device=q.device,
        HEAD_DIM=tile,
        CAUSAL=causal,
        HAS_SINKS=sinks is not None,
        HAS_CAP=softcap > 0,
        HAS_BIAS=biased,
        RANGE=kind,
        HAS_SPAN=window is not None or chunk is not None or (biased and key_range is not None),
        num_warps=4,
    )
    return out.transpose(1, 2), lse


def runs_on(target: Target) -> bool:
    return target.arch == "sm_90" and "wgmma" in target.features


def specialisations(target: Target, dtype: str, head_dims: tuple[int, ...] = HEAD_DIMS) -> list[Specialisation]:
    """What `attention` compiles: causal and full, without sinks and a float mask, and with either or both; with a key
    range or a mask of keys; causal ones in a window, without and with sinks, and with a soft cap, without a window and
    in one; and with a mask of pairs, without and with sinks."""
    kind = getattr(torch, dtype)
    dims = tuple(d for d in head_dims if d in OF_HOPPER)
    if not runs_on(target) or kind == torch.float32 or not dims:
        return []
    plain = [
        f
        for f in forms(target, kind, dims)
        if f[0].shape[2] > 1 and f[4:] == (None, None, 0.0, None, None, None, None, 0.0, None)
    ]
    biased = [
        (*f[:7], torch.empty((1, f[0].shape[1], f[0].shape[2], f[1].shape[2]), dtype=kind, device="meta"), *f[8:])
        for f in plain
    ]
    sunk = [(*f[:8], torch.empty(f[0].shape[1], dtype=kind, device="meta"), *f[9:]) for f in (*plain, *biased)]
    ranges = torch.empty((2, 2), dtype=torch.int32, device="meta")
    ranged = [(*f[:9], ranges, *f[10:]) for f in plain]
    spans = [(*f[:5], 512, *f[6:]) for f in (*plain, *sunk[: len(plain)]) if f[3]]
    capped = [(*f[:6], 50.0, *f[7:]) for f in (*plain, *spans[: len(spans) // 2]) if f[3]]
    masked = [(*f[:7], torch.empty((2, 1, 1, 4096), dtype=torch.bool, device="meta"), *f[8:]) for f in plain]
    pairs = [
        (*f[:7], torch.empty((f[0].shape[2], f[1].shape[2]), dtype=torch.bool, device="meta"), *f[8:])
        for f in (*plain, *sunk[: len(plain)])
    ]
    every = (*plain, *biased, *sunk, *ranged, *spans, *capped, *masked, *pairs)
    kernels = recorded([functools.partial(attention, *(*form, target)) for form in every])
    return [replace(one, spills_allowed=_SPILLS) if _wide(one) else one for one in kernels]


def _wide(one: Specialisation) -> bool:
    """Whether a kernel has 256 columns of a head, or reads a mask beside 128, which leaves it no register."""
    columns = one.constexprs.get("HEAD_DIM", 0)
    hides = one.constexprs.get("HAS_BIAS") or one.constexprs.get("RANGE") == _OF_MASK.value
    return columns > 128 or (columns == 128 and bool(hides))
