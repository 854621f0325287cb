"""Keys and values of new tokens, written into their places of a paged cache: meaning."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Limits, primitive, public

_INTEGERS = (torch.int64, torch.int32)


def _check(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
) -> None:
    op, floats = "kv_append", {"k": k, "v": v, "k_cache": k_cache, "v_cache": v_cache}
    checks.one_device(op, **floats, slots=slots)
    checks.floating(op, **floats)
    checks.same_dtype(op, **floats)
    for name, x in (("k", k), ("v", v)):
        if x.dim() != 3:
            raise ArgumentError(op, f"{name}.shape", tuple(x.shape), "(tokens, heads, head_dim)")
    for name, cache, new in (("k_cache", k_cache, k), ("v_cache", v_cache, v)):
        if cache.dim() != 4 or cache.shape[2:] != new.shape[1:]:
            required = f"(pages, page_size, {new.shape[1]}, {new.shape[2]}), to match {name[0]} {tuple(new.shape)}"
            raise ArgumentError(op, f"{name}.shape", tuple(cache.shape), required)
    if v_cache.shape[:2] != k_cache.shape[:2]:
        required = f"pages and page_size of k_cache {tuple(k_cache.shape)}"
        raise ArgumentError(op, "v_cache.shape", tuple(v_cache.shape), required)
    if v.shape[0] != k.shape[0]:
        raise ArgumentError(op, "v.shape[0]", v.shape[0], f"{k.shape[0]}, the tokens of k")
    if slots.dtype not in _INTEGERS:
        raise ArgumentError(op, "slots.dtype", slots.dtype, "torch.int64 or torch.int32")
    checks.shaped(op, "slots", slots, k.shape[0])
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale is not None:
            raise ArgumentError(op, name, "a tensor", "None: a cache of float32, float16 or bfloat16 has no scale")
    checks.writable(op, k_cache=k_cache, v_cache=v_cache)


def _appended(new: Tensor, cache: Tensor, slots: Tensor) -> Tensor:
    """The cache with every token in its slot; of tokens with the same slot, the last."""
    places, (tokens, heads, dim) = cache.shape[0] * cache.shape[1], new.shape
    old = cache.reshape(places, heads, dim)
    if tokens == 0:
        return old.reshape(cache.shape).clone()
    wanted = slots.long()
    inside = (wanted >= 0) & (wanted < places)
    owner = wanted.new_full((places + 1,), -1)  # the last place takes the tokens that are skipped
    number = torch.arange(tokens, device=slots.device)
    owner = owner.scatter_reduce(0, torch.where(inside, wanted, places), number, "amax")[:places]
    taken = (owner >= 0)[:, None, None]
    return torch.where(taken, new[owner.clamp(min=0)], old).reshape(cache.shape)


def _like(cache: Tensor) -> Tensor:
    return cache.new_empty_strided(cache.shape, cache.stride())


@primitive(
    name="kv_append",
    outputs=("k_cache", "v_cache"),
    check=_check,
    meta=lambda k, v, k_cache, v_cache, *rest: (_like(k_cache), _like(v_cache)),
    cost=lambda k, v, k_cache, v_cache, slots, *rest: Cost(
        0.0, float(2 * (k.numel() + v.numel()) * k.element_size() + slots.numel() * slots.element_size())
    ),
    limits=Limits(
        bound=lambda args, outputs: tuple({"accumulate": torch.zeros_like(o)} for o in outputs),  # nothing is rounded
        batch="all tokens share the caches",
        reduction=lambda *args: 1,
    ),
    mutates={"k_cache": "k_cache", "v_cache": "v_cache"},
    dtypes={"slots": _INTEGERS},
)
def kv_append_over(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """What `kv_append` leaves in k_cache and v_cache."""
    return _appended(k, k_cache, slots), _appended(v, v_cache, slots)


@public(kv_append_over)
def kv_append(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> tuple[Tensor, Tensor]:
    """Write each new token's key and value into its slot of a paged cache, in place. Returns (k_cache, v_cache).

    k: (tokens, heads, head_dim); v: (tokens, heads, value_dim); any strides. k_cache, v_cache: (pages, page_size,
    heads, head_dim or value_dim), any strides, whose elements share no memory. All are float32, or all float16, or all
    bfloat16. slots: (tokens,), int64 or int32: slot s is place ``s % page_size`` of page ``s // page_size``.
    A slot below 0 means: skip this token. A slot past the cache is skipped too; nothing outside is written. Slots that
    are not skipped differ from each other: where two agree, each element there is that of one of their tokens.
    Nothing is rounded. Not differentiable. The op's schema has k_scale and v_scale for quantised caches, which are None
    for these dtypes. Raises ArgumentError.
    """
    return kv_append_over(k, v, k_cache, v_cache, slots, None, None)
