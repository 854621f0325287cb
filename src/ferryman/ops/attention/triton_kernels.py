"""Attention in Triton, forward and backward, on NVIDIA, AMD and the interpreter: the launchers.

Few query rows have another backward (few_queries_kernels.py), which reads K and V once, and Hopper its own for both
passes (hopper_*_kernels.py): lines of the menu beside these.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import triton

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, interpreting, launch, recorded
from ferryman.ops.attention.arguments import stored_by_rows
from ferryman.ops.attention.backward_kernels import (
    attention_backward_dkv,
    attention_backward_dq,
    attention_backward_parts,
)
from ferryman.ops.attention.dropout_kernels import drop_below
from ferryman.ops.attention.forward_kernels import attention_forward, attention_merge
from ferryman.ops.attention.sink_gradient_kernels import gradient_of_sinks
from ferryman.ops.attention.sinks_kernels import delta_of
from ferryman.ops.attention.tiling_kernels import (
    Config,
    _block_d,
    _config,
    _decode_config,
    _family,
    _spills_allowed,
    _with_dropout,
)
from ferryman.ops.attention.window_kernels import last_keys

_LOG2E = 1.4426950408889634

# How a mask tensor is read; 0 is none.
_BOOL_MASK, _FLOAT_MASK = 1, 2


def _xcds(target: Target) -> int:
    # MI300X and MI355X: 8 dies, each with its own 4 MiB L2, programs dealt round-robin (amd.md); elsewhere one L2
    return 8 if target.arch in ("gfx942", "gfx950") else 1


def _is_rich(target: Target, mask: bool, softcap: float, window: int | None) -> bool:
    """Which half of the tables serves a call: a mask or a softcap takes registers. On AMD a window does too: its second
    edge is a third copy of the loop, whose addresses and masks lie in scalar registers with those of the others."""
    return mask or softcap > 0 or (window is not None and target.vendor == "amd")


def _precision(dtype: torch.dtype) -> str | None:
    return "ieee" if dtype == torch.float32 else None


def _unit_last(x: torch.Tensor) -> torch.Tensor:
    """The menu admits unit last strides only; autograd also brings expanded gradients."""
    return x if x.stride(-1) == 1 else x.contiguous()


def _mask_arguments(
    mask: torch.Tensor | None, shape: tuple[int, ...]
) -> tuple[torch.Tensor | None, int, tuple[int, ...]]:
    """(tensor as the kernels read it, kind, strides over (batch, head, query, key))."""
    if mask is None:
        return None, 0, (0, 0, 0, 0)
    kind = _BOOL_MASK if mask.dtype == torch.bool else _FLOAT_MASK
    view = mask.expand(shape)
    return (view.view(torch.int8) if kind == _BOOL_MASK else view), kind, view.stride()


def _score_factors(scale: float, softcap: float) -> tuple[float, float]:
    """What a raw q.k is multiplied by, and the softcap in base 2: s = tanh(qk * first) * second, or qk * first."""
    return (scale / softcap, softcap * _LOG2E) if softcap > 0 else (scale * _LOG2E, 0.0)


def _heads_together(target: Target, kv_heads: int, num_keys: int, head_dim: int, element_size: int) -> int:
    """How many KV heads' K and V fill half of the L2; at most all of them, as tiles x heads is a 32-bit number."""
    return max(1, min(kv_heads, target.l2_bytes // 2 // (2 * num_keys * head_dim * element_size)))


_LEAST_KEYS = 128  # of a piece that is worth a measurement
_MERGED_BLOCKS = 0.1  # what merging one piece more costs, in blocks of keys


def _splits_wanted(target: Target, programs: int) -> int:
    """For at most one wave of two programs per unit. From half a wave on bandwidth is what bounds it: two pieces where
    the last wave would be mostly empty."""
    slots = 2 * target.units
    if 2 * programs <= slots:
        return slots // programs
    last = (programs - 1) % slots + 1
    return 2 if programs < 2 * slots and last < 0.85 * slots else 1


def _num_splits(target: Target, programs: int, keys: int) -> int:
    """Pieces of 256 keys each: merging smaller ones costs more than it saves, but where a few of 128 keys reach units
    that would be idle."""
    programs = max(1, programs)
    most = max(keys // 256, min(6, target.units // programs, keys // _LEAST_KEYS), 1)
    return min(_splits_wanted(target, programs), most, 128)


def _reads_ahead(config: Config, target: Target, dtype: torch.dtype, head_dim: int, programs: int, keys: int) -> bool:
    """Whether so many decoding programs, of so many keys each, are one to a Hopper's unit and long: such a one loads a
    block further ahead than two that share a unit do."""
    alone = programs <= target.units and keys >= 16 * config.block_n
    return alone and 64 < head_dim <= 128 and dtype != torch.float32 and _family(target) == "nvidia-227k"


def _own_splits(config: Config, target: Target, dtype: torch.dtype, head_dim: int, programs: int, keys: int) -> int:
    """`_num_splits`, or where one piece for every unit reads ahead and few units have none, that: up to 6% on an H200
    at D128. At D64 half as many bytes are on their way, and it costs a quarter."""
    single = target.units // max(1, programs)
    filled = 1 < single <= 128 and 10 * single * programs >= 9 * target.units
    if filled and _reads_ahead(config, target, dtype, head_dim, single * programs, keys // single):
        return single
    return _num_splits(target, programs, keys)


def configurations(
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
) -> dict[str, float]:
    """In how many pieces the keys of a decoding call are read, for the menu: as `_own_splits` says, fewer, more. Their
    times in blocks of keys that a program reads, one wave of programs after another, and the merging of pieces."""
    k, v, window = _of_one_query(q, k, v, window, mask, key_range, chunk, dropout_p)
    keys, programs = k.shape[2], k.shape[0] * k.shape[1]
    if q.numel() == 0 or keys < 2 * _LEAST_KEYS:
        return {}
    config = _decode_config(target, q.dtype, q.shape[-1])
    blocks = -(-keys // config.block_n)

    def time(splits: int) -> float:
        return -(-programs * splits // (2 * target.units)) * -(-blocks // splits) + _MERGED_BLOCKS * splits

    own = _own_splits(config, target, q.dtype, q.shape[-1], programs, keys)
    most = min(128, keys // _LEAST_KEYS)
    others = {s for s in (own // 4, own // 2, 3 * own // 4, 3 * own // 2, 2 * own, 4 * own) if 1 <= s <= most} - {own}
    times = {s: max(time(s), time(own)) for s in sorted(others, key=time)}
    return {f"splits_{s}": t for s, t in {own: time(own), **times}.items()}


def _dropping(dropout_p: float) -> tuple[int | None, float | None]:
    """What the kernels compare words with, its bits those of an int32, and what the kept are multiplied by."""
    if not dropout_p:
        return None, None
    below = drop_below(dropout_p)
    return below - (2**32 if below >= 2**31 else 0), 1 / (1 - dropout_p)


def _too_wide(*spans: int) -> bool:
    return max(spans) >= 2**31


def outputs(q: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``out`` (B, Sq, H, Dv) and ``lse`` (B, H, Sq), to be written."""
    batch, heads, queries, _ = q.shape
    dim = v.shape[3]
    out = torch.empty((batch, queries, heads, dim), dtype=q.dtype, device=q.device)
    return out, torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)


def blank(q: torch.Tensor, k: torch.Tensor, out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor | None) -> bool:
    """Whether there is nothing to attend to, or nobody who does: then the result stands already."""
    if q.numel() == 0:
        return True
    if k.shape[2] == 0:
        out.zero_()
        lse.fill_(-math.inf)
        if sinks is not None:
            lse.copy_(sinks.unsqueeze(-1))
        return True
    return False


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
    """Query rows in tiles of their own head."""
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    out, lse = outputs(q, v)
    if blank(q, k, out, lse, sinks):
        return out.transpose(1, 2), lse
    hides = mask is not None or key_range is not None or chunk is not None
    rich = _is_rich(target, hides or dropout_p > 0, softcap, window)
    config = _config(target, q.dtype, max(dim, v.shape[3]), "forward", rich)
    programs = batch * heads * triton.cdiv(queries, config.block_m)
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size()) * (heads // kv_heads)
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
        1,
        together,
        pack=False,
    )
    return out.transpose(1, 2), lse


def _of_one_query(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    window: int | None,
    mask: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    dropout_p: float,
) -> tuple[torch.Tensor, torch.Tensor, int | None]:
    """(k, v, window): a window over one query as the keys that it leaves, so that those alone are divided into pieces.

    Not where a key's number says more, nor where addresses would be less aligned for some lengths than for others,
    which would be another compilation.
    """
    aligned = all(x.stride(2) * x.element_size() % 16 == 0 for x in (k, v))
    if mask is not None or key_range is not None or chunk is not None or dropout_p or not aligned:
        return k, v, window
    return last_keys(q, k, v, window, None)[:3]


def attention_decode(
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
    """The query rows of a key head's whole group in one tile; keys in one piece or several."""
    batch, _, _, dim = q.shape
    out, lse = outputs(q, v)
    if blank(q, k, out, lse, sinks):
        return out.transpose(1, 2), lse
    k, v, window = _of_one_query(q, k, v, window, mask, key_range, chunk, dropout_p)
    kv_heads, keys = k.shape[1], k.shape[2]
    config, programs = _decode_config(target, q.dtype, max(dim, v.shape[3])), batch * kv_heads
    named = target.configuration.removeprefix("splits_")
    splits = int(named) if named else _own_splits(config, target, q.dtype, dim, programs, keys)
    if _reads_ahead(config, target, q.dtype, dim, programs * splits, keys // splits):
        config = replace(config, num_stages=4)
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size())
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
        together,
        pack=True,
    )
    return out.transpose(1, 2), lse


def _run_forward(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
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
    config: Config,
    programs: int,
    splits: int,
    together: int,
    *,
    pack: bool,
) -> None:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    device = q.device
    q, k, v = _unit_last(q), _unit_last(k), _unit_last(v)
    scale = dim**-0.5 if scale is None else scale
    score_scale, score_cap = _score_factors(abs(scale), softcap)
    mask, mask_kind, mask_strides = _mask_arguments(mask, (batch, heads, queries, keys))
    sinks = None if sinks is None else sinks.contiguous()
    key_range = None if key_range is None else key_range.contiguous()
    width = v.shape[3]
    wide = _too_wide(
        config.block_n * k.stride(2),
        config.block_n * v.stride(2),
        config.block_n * mask_strides[3],
    )
    if splits > 1:
        to = torch.empty((splits, *lse.shape, width), dtype=torch.float32, device=device)
        to_lse = torch.empty((splits, *lse.shape), dtype=torch.float32, device=device)
    else:
        to, to_lse = out, lse
    launch(
        attention_forward,
        (programs, splits),
        q,
        k,
        v,
        mask,
        sinks,
        key_range,
        None if dropout_seed is None or not dropout_p else dropout_seed.contiguous(),
        to,
        to_lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *mask_strides,
        heads,
        heads // kv_heads,
        together,
        queries,
        keys,
        min(window or 0, queries + keys),
        min(chunk or 0, queries + keys),
        batch * heads,
        score_scale,
        score_cap,
        *_dropping(dropout_p),
        device=device,
        HAS_SINKS=sinks is not None and splits == 1,
        UNIT=_unit(q, k, v),
        **_forward_constexprs(
            config,
            target,
            q.dtype,
            (dim, width),
            key_range is not None or chunk is not None,
            causal,
            window is not None,
            softcap > 0,
            mask_kind,
            dropout_p > 0,
            wide,
            scale < 0,
            pack,
            splits > 1,
        ),
        **_options(config),
    )
    if splits > 1:
        launch(
            attention_merge,
            (lse.numel(),),
            to,
            to_lse,
            out,
            lse,
            sinks,
            heads,
            queries,
            splits,
            batch * heads,
            device=device,
            HEAD_DIM=width,
            BLOCK_D=_block_d(width),
            HAS_SINKS=sinks is not None,
            TOGETHER=16,
            num_warps=4,
            num_stages=1,
        )


def rest(
    q: torch.Tensor, sinks: torch.Tensor | None, delta: Callable[[], torch.Tensor], lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of the sinks, and of a mask that needs none."""
    none = q.new_empty(0)
    return none if sinks is None else gradient_of_sinks(delta(), lse, sinks), none


def gradients(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tensors for the gradients in the op's layout, to be written; zeros where no query meets a key."""
    make = torch.zeros if q.numel() == 0 or k.numel() == 0 else torch.empty
    ordered = stored_by_rows(q, k, v)

    def gradient(x: torch.Tensor) -> torch.Tensor:
        batch, heads, rows, dim = x.shape
        shape = (batch, rows, heads, dim) if ordered else x.shape
        grad = make(shape, dtype=x.dtype, device=x.device)
        return grad.transpose(1, 2) if ordered else grad

    return gradient(q), gradient(k), gradient(v)


def row_steps(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """How far apart, in rows, two rows of a head lie in the `gradients` of q, and of k and v."""
    return (q.shape[1], k.shape[1]) if stored_by_rows(q, k, v) else (1, 1)


def attention_backward(
    grad_out: torch.Tensor,
    grad_lse: torch.Tensor | None,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: torch.Tensor | None,
    sinks: torch.Tensor | None,
    key_range: torch.Tensor | None,
    chunk: int | None,
    need_mask: bool,
    dropout_p: float,
    dropout_seed: torch.Tensor | None,
    target: Target,
) -> tuple[torch.Tensor, ...]:
    batch, heads, queries, dim = q.shape
    kv_heads, keys = k.shape[1], k.shape[2]
    device = q.device
    grad_q, grad_k, grad_v = gradients(q, k, v)
    apart_q, apart_k = row_steps(q, k, v)
    if q.numel() == 0 or k.numel() == 0:
        return grad_q, grad_k, grad_v, *rest(q, sinks, lambda: delta_of(grad_out, grad_lse, out), lse)
    q, k, v, out, grad_out = (_unit_last(x) for x in (q, k, v, out, grad_out))
    lse = lse.contiguous()
    grad_lse = None if grad_lse is None else grad_lse.contiguous()
    scale = dim**-0.5 if scale is None else scale
    delta = torch.empty((batch, heads, queries), dtype=torch.float32, device=device)
    score_scale, score_cap = _score_factors(scale, softcap)
    mask, mask_kind, mask_strides = _mask_arguments(mask, (batch, heads, queries, keys))
    group = heads // kv_heads
    together = _heads_together(target, batch * kv_heads, keys, dim, k.element_size())
    seen, size = min(window or 0, queries + keys), min(chunk or 0, queries + keys)
    sinks = None if sinks is None else sinks.contiguous()
    key_range = None if key_range is None else key_range.contiguous()
    dropout_seed = None if dropout_seed is None or not dropout_p else dropout_seed.contiguous()
    bounded, dims = key_range is not None or chunk is not None, (dim, v.shape[3])
    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
    unit = _unit(q, k, v, out, grad_out)
    rich = _is_rich(target, mask_kind > 0 or bounded or dropout_p > 0, softcap, window)
    dq, dkv = (_config(target, q.dtype, max(dims), kernel, rich) for kernel in ("dq", "dkv"))
    dkv = _with_dropout(dkv, target, q.dtype, max(dims)) if dropout_p else dkv
    wide = _too_wide(
        max(dq.block_m, dkv.block_m) * max(q.stride(2), out.stride(2), grad_out.stride(2), mask_strides[2]),
        max(dq.block_n, dkv.block_n) * max(k.stride(2), v.stride(2), mask_strides[3]),
    )
    launch(
        attention_backward_dq,
        (batch * heads * triton.cdiv(queries, dq.block_m),),
        q,
        k,
        v,
        mask,
        sinks,
        key_range,
        dropout_seed,
        out,
        grad_out,
        grad_lse,
        lse,
        delta,
        grad_q,
        *strides,
        *out.stride()[:3],
        *grad_out.stride()[:3],
        *mask_strides,
        heads,
        group,
        together * group,
        queries,
        keys,
        seen,
        size,
        batch * heads,
        apart_q,
        score_scale,
        score_cap,
        scale,
        *_dropping(dropout_p),
        device=device,
        HAS_SINKS=sinks is not None,
        HAS_GRAD_LSE=grad_lse is not None,
        UNIT=unit,
        **_backward_constexprs(
            dq, target, q.dtype, dims, bounded, causal, window is not None, softcap > 0, mask_kind, dropout_p > 0, wide
        ),
        **_options(dq),
    )
    programs = batch * kv_heads * triton.cdiv(keys, dkv.block_n)
    # with dropout, whose generator takes registers, an MI300's scalar ones would spill
    share = group if dropout_p else _heads_of_a_program(target, programs, group, triton.cdiv(queries, dkv.block_m))
    shares, to_k, to_v = triton.cdiv(group, share), grad_k, grad_v
    if shares > 1:
        to_k, to_v = (torch.empty((shares, x.numel()), dtype=torch.float32, device=device) for x in (grad_k, grad_v))
    launch(
        attention_backward_dkv,
        (programs, shares),
        q,
        k,
        v,
        mask,
        key_range,
        dropout_seed,
        grad_out,
        lse,
        delta,
        to_k,
        to_v,
        *strides,
        *grad_out.stride()[:3],
        *mask_strides,
        heads,
        group,
        share,
        together,
        queries,
        keys,
        seen,
        size,
        batch * heads,
        apart_k,
        score_scale,
        score_cap,
        scale,
        *_dropping(dropout_p),
        device=device,
        SHARED=shares > 1,
        UNIT=unit,
        **_backward_constexprs(
            dkv, target, q.dtype, dims, bounded, causal, window is not None, softcap > 0, mask_kind, dropout_p > 0, wide
        ),
        **_options(dkv),
    )
    if shares > 1:
        sum_of(to_k, grad_k, 1.0)
        sum_of(to_v, grad_v, 1.0)
    return grad_q, grad_k, grad_v, *rest(q, sinks, lambda: delta, lse)


def _heads_of_a_program(target: Target, programs: int, group: int, blocks: int) -> int:
    """How many query heads of a key head's group one program of dK and dV sums: all of them, or so few that every unit
    has two programs, each with four ``blocks`` of queries. The parts are added by a kernel of their own."""
    if programs > target.units:
        return group
    shares = min(2 * target.units // programs, group * blocks // 4, group)
    return triton.cdiv(group, max(shares, 1))


def sum_of(parts: torch.Tensor, grad: torch.Tensor, scale: float) -> None:
    """``parts`` (splits, elements) float32, added, scaled and stored in ``grad``."""
    launch(
        attention_backward_parts,
        (triton.cdiv(grad.numel(), 1024),),
        parts,
        grad,
        grad.numel(),
        parts.shape[0],
        scale,
        device=grad.device,
        BLOCK=1024,
        num_warps=4,
        num_stages=1,
    )


def _options(config: Config) -> dict[str, Any]:
    own = {} if interpreting() else config.options  # the interpreter knows Triton's own options only
    return {"num_warps": config.num_warps, "num_stages": config.num_stages, **own}


def _blocks(dim: int, width: int) -> tuple[int, int]:
    """Sides of the tiles of keys and of values: the larger one for both, but for MLA's.

    Of 64 and 16 columns Triton 3.6 makes a kernel for sm_90 that reads beyond a block's shared memory, as
    compute-sanitizer says. 256 and 128 were judged on an H100.
    """
    sides = _block_d(dim), _block_d(width)
    return sides if sides == (256, 128) else (max(sides), max(sides))


def _unit(*tensors: torch.Tensor) -> int:
    """How many elements every stride is a multiple of, where Triton, which looks for 16, does not see that rows can be
    read 16 bytes at a time; else 1."""
    strides = [step for x in tensors for step in x.stride()[:3]]
    words = 16 // tensors[0].element_size()
    return words if any(step % 16 for step in strides) and not any(step % words for step in strides) else 1


def _backward_constexprs(
    config: Config,
    target: Target,
    dtype: torch.dtype,
    dims: tuple[int, int],
    bounded: bool,
    causal: bool,
    window: bool,
    cap: bool,
    mask: int,
    dropout: bool,
    wide: bool,
) -> dict[str, Any]:
    block_d, block_v = _blocks(*dims)
    return {
        "HEAD_DIM": dims[0],
        "BLOCK_D": block_d,
        "VALUE_DIM": dims[1],
        "BLOCK_V": block_v,
        "BLOCK_M": config.block_m,
        "BLOCK_N": config.block_n,
        "CAUSAL": causal,
        "HAS_WINDOW": window,
        "BOUNDED": bounded,
        "HAS_CAP": cap,
        "MASK": mask,
        "DROPOUT": dropout,
        "WIDE": wide,
        "FOLD": target.vendor == "amd",
        "NUM_XCD": _xcds(target),
        "PRECISION": _precision(dtype),
    }


def _forward_constexprs(
    config: Config,
    target: Target,
    dtype: torch.dtype,
    dims: tuple[int, int],
    bounded: bool,
    causal: bool,
    window: bool,
    cap: bool,
    mask: int,
    dropout: bool,
    wide: bool,
    negate: bool,
    pack: bool,
    split: bool,
) -> dict[str, Any]:
    shared = _backward_constexprs(config, target, dtype, dims, bounded, causal, window, cap, mask, dropout, wide)
    return {**shared, "NEGATE": negate, "PACK": pack, "SPLIT": split}


# ---------------------------------------------------------------------------------------------- ahead-of-time compiling


def forms(target: Target, dtype: torch.dtype, head_dims: tuple[int, ...]) -> list[tuple[Any, ...]]:
    """Calls without data that between them compile what the launchers compile on ``target``.

    Each is the arguments of `attention` but for the target: causal and full attention, a sliding window, with a softcap
    too, a padding mask, decoding (a batch that fills the device, too, whose keys are not split), everything at once
    (window, softcap, float mask), and causal attention with dropout.
    """
    kinds: list[tuple[int, bool, int | None, float, torch.dtype | None, int]] = [
        (4096, True, None, 0.0, None, 2),
        (4096, False, None, 0.0, None, 2),
        (4096, True, 512, 0.0, None, 2),
        (4096, True, 512, 20.0, None, 2),
        (4096, False, None, 0.0, torch.bool, 2),
        (4096, True, 512, 20.0, dtype, 2),
        (1, True, None, 0.0, None, 2),
        (1, True, 512, 0.0, None, 2),
        (1, True, 512, 20.0, dtype, 2),
        (1, True, None, 0.0, None, target.units),
    ]
    arguments: list[tuple[Any, ...]] = []
    for dim in head_dims:
        for queries, causal, window, cap, mask, batch in kinds:
            q = torch.empty((batch, 32, queries, dim), dtype=dtype, device="meta")
            k = torch.empty((batch, 8, 4096, dim), dtype=dtype, device="meta")
            rows = None if mask is None else torch.empty((2, 1, queries, 4096), dtype=mask, device="meta")
            arguments.append((q, k, k, causal, None, window, cap, rows, None, None, None, 0.0, None))
        q, k = (torch.empty((2, heads, 4096, dim), dtype=dtype, device="meta") for heads in (32, 8))
        seeds = torch.empty(2, dtype=torch.int64, device="meta")
        arguments.append((q, k, k, True, None, None, 0.0, None, None, None, None, 0.1, seeds))
    return arguments


def backward_arguments(form: tuple[Any, ...], with_lse: bool) -> tuple[Any, ...]:
    """The arguments of a backward of one of `forms`, but for the target."""
    q, k, v, *options = form
    out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format).transpose(1, 2)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device="meta")
    *given, dropout_p, seed = options
    return (q, lse if with_lse else None, q, k, v, out, lse, *given, False, dropout_p, seed)


def specialisations(
    target: Target, dtype: str, head_dims: tuple[int, ...] = (64, 80, 128, 256)
) -> list[Specialisation]:
    """What the launchers compile on ``target`` for "float32", "float16" or "bfloat16" inputs: `forms`, decoding in few
    long pieces, and backward also with a gradient of lse, and with few key heads."""
    kind = getattr(torch, dtype)

    def calls(form: tuple[Any, ...]) -> None:
        queries, cap, mask = form[0].shape[2], form[6], form[7]
        (attention if queries > 1 else attention_decode)(*(*form, target))
        if queries > 1 or not (cap or mask is not None):
            attention_backward(*(*backward_arguments(form, bool(cap) and mask is not None), target))

    def few_pieces(dim: int) -> None:
        q = torch.empty((1, 8, 1, dim), dtype=kind, device="meta")
        k = torch.empty((1, 1, 8192, dim), dtype=kind, device="meta")
        attention_decode(
            q, k, k, True, None, None, 0.0, None, None, None, None, 0.0, None, replace(target, configuration="splits_2")
        )

    def shared_heads(dim: int) -> None:
        q, k = (torch.empty((1, heads, 256, dim), dtype=kind, device="meta") for heads in (8, 1))
        form = (q, k, k, True, None, None, 0.0, None, None, None, None, 0.0, None)
        attention_backward(*(*backward_arguments(form, False), target))

    launches = [functools.partial(calls, form) for form in forms(target, kind, head_dims)]
    launches += [functools.partial(one, dim) for one in (few_pieces, shared_heads) for dim in head_dims]
    kernels = recorded(launches)
    return [replace(one, spills_allowed=_spills_allowed(target, kind, one.name)) for one in kernels]
