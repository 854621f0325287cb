"""Attention's forward in Triton for few queries: the rows of all heads of a group share tiles, each of which reads K
and V once, and the keys are divided over programs where few tiles would leave units idle."""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, recorded
from ferryman.ops.attention.tiling_kernels import Config, _decode_config, _family, _spills_allowed
from ferryman.ops.attention.triton_kernels import (
    _heads_together,
    _is_rich,
    _num_splits,
    _run_forward,
    blank,
    forms,
    outputs,
)

_KEYS_OF_A_ROW = 4  # at least, for two pieces


def _tile(target: Target, dtype: torch.dtype, head_dim: int, rows: int, rich: bool) -> Config:
    """Decoding's tile, in 16 bits of more rows: 64 where there are as many, else 32, as RDNA3's registers allow.
    ``rich``: `_is_rich`, which takes registers; more warps have more."""
    base = _decode_config(target, dtype, head_dim)
    small = _family(target) in ("nvidia-160k", "nvidia-99k")  # whose products take their operands from registers
    if dtype == torch.float32:
        return replace(base, num_warps=16) if rich and small and head_dim > 128 else base
    few = rows <= 32 or (target.vendor == "amd" and target.wave == 32)
    tile = replace(base, block_m=32 if few else 64)
    if small and not few and head_dim > 64:
        return replace(tile, num_warps=8, block_n=32 if head_dim <= 128 else 16)
    if target.vendor == "nvidia" and (rich or (head_dim > 128 and not few)):
        return replace(tile, num_warps=8, block_n=tile.block_n if few else 32)
    if rich and target.vendor == "amd":
        return replace(tile, num_warps=8 if head_dim > 128 else 4, block_n=min(tile.block_n, 32))
    return tile


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
    """The query rows of a key head's whole group in tiles; keys in one piece or several."""
    batch, heads, queries, dim = q.shape
    out, lse = outputs(q, v)
    if blank(q, k, out, lse, sinks):
        return out.transpose(1, 2), lse
    kv_heads, keys = k.shape[1], k.shape[2]
    rows = queries * (heads // kv_heads)
    hides = mask is not None or key_range is not None or chunk is not None
    rich = _is_rich(target, hides or dropout_p > 0, softcap, window)
    config = _tile(target, q.dtype, max(dim, v.shape[3]), rows, rich)
    programs = batch * kv_heads * -(-rows // config.block_m)
    seen = min(keys, (2 * window if window else keys) + queries, (chunk or keys) + queries)  # of a window both sides
    splits = _num_splits(target, programs, seen)
    # a second piece writes and reads each row's sum once more, which few keys of a row do not make up for
    if splits == 2 and seen < _KEYS_OF_A_ROW * queries:
        splits = 1
    _run_forward(
        q,
        k,
        v,
        out,
        lse,
        causal,
        scale,
        window,
        softcap,
        mask,
        sinks,
        key_range,
        chunk,
        dropout_p,
        dropout_seed,
        target,
        config,
        programs,
        splits,
        _heads_together(target, batch * kv_heads, keys, dim, k.element_size()),
        pack=True,
    )
    return out.transpose(1, 2), lse


# ---------------------------------------------------------------------------------------------- ahead-of-time compiling


def specialisations(
    target: Target, dtype: str, head_dims: tuple[int, ...] = (64, 80, 128, 256)
) -> list[Specialisation]:
    """What the launchers compile on ``target``: `triton_kernels.forms` of many rows, with few queries instead; those
    that have fewer registers than another are left out, and of tiles of 32 rows all but the least and the most."""
    kind = getattr(torch, dtype)
    calls = []
    for q, k, v, causal, scale, window, cap, mask, *rest in forms(target, kind, head_dims):
        plain, everything = not (cap or mask is not None or rest[-1] is not None), cap and mask is not None
        if q.shape[2] == 1 or (plain and (window or not causal)):
            continue
        # of a group of 4, with keys in pieces; of these the least and the most in one piece, too
        shapes = [(16, 4096), *[(8, 4096), (16, 128)] * bool(plain or everything)]
        for queries, keys in shapes:
            rows = None if mask is None else mask[:, :, :queries, :keys]
            given = (q[:, :, :queries], k[:, :, :keys], v[:, :, :keys], causal, scale, window, cap, rows, *rest, target)
            calls.append(functools.partial(attention, *given))
    return [replace(one, spills_allowed=_spills_allowed(target, kind, one.name)) for one in recorded(calls)]
