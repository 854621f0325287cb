"""Keys and values into a paged cache in portable C++ (`append.cuh`), for CUDA and HIP: one launch."""

from __future__ import annotations

import functools
import itertools
import operator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, family_source, grid_of, unit, vectorised
from ferryman.backends.simt_runtime import runtime

_FILE = Path(__file__).with_name("append.cuh")
_THREADS = 128
_PACKS = (1, 2, 4)  # of a thread
_FULL = 2048  # threads of an SM or CU


class _Layout(NamedTuple):
    """What follows from shapes and strides. ``lengths``: the bitwise or of all that a pack must divide."""

    lengths: int
    strides: tuple[int, ...]  # of k, v, k_cache, v_cache
    dims: tuple[int, int]  # elements of a head; of a token, where its heads lie one after the other in both
    sizes: tuple[int, int]  # of a token


@functools.lru_cache(maxsize=1024)
def _layout(shapes: tuple[torch.Size, torch.Size], strides: tuple[tuple[int, ...], ...]) -> _Layout:
    """shapes: of k and v. strides: of k, v and their caches."""
    k, v, k_cache, v_cache = strides
    lengths, dims = 0, []
    for (_, heads, dim), new, cache in zip(shapes, (k, v), (k_cache, v_cache), strict=True):
        if not heads * dim:
            dims.append(1)
            continue
        joined = all(s[-1] == 1 and (s[-2] == dim or heads == 1) for s in (new, cache))
        dims.append(heads * dim if joined else dim)
        # an element apart from its neighbour, in either, is moved alone: 1 has the lowest bit set
        alone = int(dim > 1 and (new[-1] != 1 or cache[-1] != 1))
        apart = () if joined else (new[-2], cache[-2])
        lengths |= functools.reduce(operator.or_, (dims[-1], alone, new[0], *cache[:2], *apart))
    sizes = (shapes[0][1] * shapes[0][2], shapes[1][1] * shapes[1][2])
    return _Layout(lengths, (*k, *v, *k_cache, *v_cache), (dims[0], dims[1]), sizes)


@functools.lru_cache(maxsize=None)
def _unit(itemsize: int, vector: bool, packs: int) -> Unit:
    width = VECTOR_BYTES // itemsize if vector else 1
    one = unit(family_source(_FILE, False), "FERRYMAN_APPEND", "kv_append", itemsize, width, packs, _THREADS)
    return one._replace(overlapping=True)


@functools.lru_cache(maxsize=4096)
def _choose(itemsize: int, vector: bool, tokens: int, sizes: tuple[int, int], units: int) -> tuple[Unit, int, int, int]:
    """(unit, blocks, bits of the lanes along a token, chunks of a token)."""
    along = sum(sizes) // (VECTOR_BYTES // itemsize if vector else 1)
    bits = min((along - 1).bit_length(), _THREADS.bit_length() - 1)
    many = tokens * along > units * _FULL
    packs = next((p for p in _PACKS if p << bits >= along), _PACKS[-1]) if many else 1
    chunks = -(-along // (packs << bits))
    blocks = grid_of(-(-tokens // (_THREADS >> bits)) * chunks, _THREADS)
    return _unit(itemsize, vector, packs), blocks, bits, chunks


def kv_append(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    tokens, page_size = k.shape[0], k_cache.shape[1]
    places = k_cache.shape[0] * page_size
    layout = _layout((k.shape, v.shape), (k.stride(), v.stride(), k_cache.stride(), v_cache.stride()))
    if not tokens * sum(layout.sizes) * places:
        return k_cache, v_cache
    slots, itemsize = slots.contiguous(), k.element_size()
    pointers = [x.data_ptr() if x.numel() else 0 for x in (k, v, k_cache, v_cache)]
    vector = vectorised(itemsize, layout.lengths, functools.reduce(operator.or_, pointers))
    chosen, blocks, bits, chunks = _choose(itemsize, vector, tokens, layout.sizes, target.units)
    width = VECTOR_BYTES // itemsize if vector else 1
    packs = [size // width for size in layout.sizes]
    numbers = (*layout.strides, *layout.dims, *packs, int(slots.dtype == torch.int64), tokens, places, page_size)
    args = (*pointers, slots.data_ptr(), *numbers, bits, chunks, blocks)
    runtime(target).launch(chosen, k.device, blocks, _THREADS, 0, args)
    return k_cache, v_cache


def units(target: Target) -> list[Unit]:
    """Every kernel of this family; the target's limits do not matter here."""
    return [_unit(*form) for form in itertools.product((2, 4), (False, True), _PACKS)]
