"""rope in portable C++ (`rope.cuh`), for CUDA and HIP: q and k in one launch."""

from __future__ import annotations

import functools
import itertools
import operator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, family_source, grid_of, runtime, type_name, unit, vectorised

_FILE = Path(__file__).with_name("rope.cuh")
_THREADS = 128


@functools.lru_cache(maxsize=None)
def _unit(kind: str, table: str, width: int, interleaved: bool, over: bool) -> Unit:
    name = "rope_over" if over else "rope"
    return unit(family_source(_FILE, False), "FERRYMAN_ROPE", name, kind, table, width, interleaved, _THREADS, over)


class _Layout(NamedTuple):
    """What follows from shapes and strides. ``lengths``: the bitwise or of every length that moves a pointer."""

    lengths: int
    arguments: tuple[int, ...]  # strides of q, k, cos, sin; then the sizes, up to `rotary`


@functools.lru_cache(maxsize=1024)
def _layout(q: torch.Size, k: torch.Size, cos: torch.Size, strides: tuple[tuple[int, ...], ...]) -> _Layout:
    batch, q_heads, tokens, dim = q
    moves = [
        s for x, stride in zip((q, k), strides, strict=False) for s, n in zip(stride[:3], x[:3], strict=True) if n > 1
    ]
    # a batch of one is broadcast
    tables = [(stride[0] if cos[0] > 1 else 0, stride[1]) for stride in strides[2:]]
    moves += [s for pair in tables for s, n in zip(pair, (cos[0], tokens), strict=True) if n > 1]
    sizes = (q_heads, k[1], batch, tokens, dim, cos[-1])
    lengths = functools.reduce(operator.or_, moves, 0)
    return _Layout(lengths, (*strides[0][:3], *strides[1][:3], *tables[0], *tables[1], *sizes))


@functools.lru_cache(maxsize=1024)
def _choose(kind: torch.dtype, table: torch.dtype, interleaved: bool, vector: bool, over: bool,
            sizes: tuple[int, ...]) -> tuple[Unit, int, tuple[int, int, int, int]]:  # fmt: skip
    """(unit, blocks, (units of a head at once, heads at once, tokens at once, blocks))."""
    q_heads, k_heads, batch, tokens, dim, rotary = sizes
    turned = rotary if interleaved else rotary // 2
    # both halves of a head must start on a vector, and the untouched rest too
    vector = vector and vectorised(kind.itemsize, turned if over else dim | turned, 0)
    width = VECTOR_BYTES // kind.itemsize if vector else 1
    step = 2 if interleaved and width == 1 else width
    rest = 0 if over else -(-(dim - rotary) // width)
    lanes = min(max(turned // step + rest, 1), _THREADS)
    heads_at_once = min(q_heads + k_heads, _THREADS // lanes)
    tokens_at_once = max(1, _THREADS // (lanes * heads_at_once))
    blocks = grid_of(-(-batch * tokens // tokens_at_once), _THREADS)
    chosen = _unit(type_name(kind), type_name(table), width, interleaved, over)
    return chosen, blocks, (lanes, heads_at_once, tokens_at_once, blocks)


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    return _launch(_unit_stride(q), _unit_stride(k), cos, sin, interleaved, q_out, k_out, target)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    return _launch(q, k, cos, sin, interleaved, q, k, target)


def _launch(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, q_out: Tensor, k_out: Tensor, target: Target
) -> tuple[Tensor, Tensor]:
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    over = q_out is q
    cos, sin = _unit_stride(cos), _unit_stride(sin)
    lengths, arguments = _layout(q.shape, k.shape, cos.shape, (q.stride(), k.stride(), cos.stride(), sin.stride()))
    a, b, c, d, e, f = q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_out.data_ptr(), k_out.data_ptr()
    vector = vectorised(q.element_size(), lengths, a | b | c | d | e | f)
    chosen, blocks, walk = _choose(q.dtype, cos.dtype, interleaved, vector, over, arguments[-6:])
    runtime(target).launch(chosen, q.device, blocks, _THREADS, 0, (a, b, c, d, e, f, *arguments, *walk))
    return q_out, k_out


def units(target: Target) -> list[Unit]:
    """Every kernel of this family; the target's limits do not matter here."""
    widths = {"f32": (1, 4), "f16": (1, 8), "bf16": (1, 8)}
    return [
        _unit(kind, table, width, interleaved, over)
        for (kind, pair), table, interleaved, over in itertools.product(
            widths.items(), widths, (False, True), (False, True)
        )
        for width in pair
    ]
