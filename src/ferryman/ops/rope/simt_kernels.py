"""rope and its backward in portable C++ (`rope.cuh`), for CUDA and HIP: q and k in one launch."""

from __future__ import annotations

import functools
import itertools
import operator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.simt import VECTOR_BYTES, Unit, family_source, grid_of, type_name, unit, vectorised
from ferryman.backends.simt_runtime import runtime

_FILE = Path(__file__).with_name("rope.cuh")
_THREADS = 128
_FORWARD, _OVER, _BACKWARD = "rope", "rope_over", "rope_backward"
# `rope_packs`. All of what follows was measured on an H200.
_PACKS_THREADS, _USUAL_THREADS = 256, 128  # at most
# Tokens and heads of a thread, for few packs, some, and many: few are spread over all threads. Of many, two tokens of
# two heads stay fast whether heads or tokens lie side by side in memory; over its input, a block takes whole tokens.
_FORMS = {
    _FORWARD: ((1, 1), (1, 2), (2, 2)),
    _OVER: ((1, 1), (1, 2), (1, 4)),
    _BACKWARD: ((1, 1), (2, 2), (2, 2)),
}
_FEW, _SOME = 1536, 12_000  # packs an SM
# Bytes of angles that are read again for the next heads and the next sample: all of them, as long as L2 keeps them.
# Over its input a block has all heads of its tokens, and only the samples follow.
_KEPT, _STRETCH, _STRETCH_OVER = 4 << 20, 1 << 19, 1 << 20
_LANES = frozenset(1 << i for i in range(7))  # of a head


@functools.lru_cache(maxsize=None)
def _unit(way: str, kind: str, table: str, width: int, interleaved: bool, form: tuple[int, int] | None = None) -> Unit:
    """``form``: tokens and heads of a thread of `rope_packs`; None is `rope`."""
    source, types = family_source(_FILE, False), (kind, table, width, interleaved, way == _OVER, way == _BACKWARD)
    if form is None:
        return unit(source, "FERRYMAN_ROPE", way, *types, _THREADS)
    kernel = unit(source, "FERRYMAN_ROPE_PACKS", f"{way}_packs", *types, _PACKS_THREADS, *form)
    return kernel._replace(overlapping=True)


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


def _takes_packs(target: Target) -> bool:
    """Not on AMD: all that the kernel is told does not fit 106 scalar registers there, and up to 61 spill."""
    return target.vendor != "amd"


class _Walk(NamedTuple):
    """How a kernel's threads go over (token, head, lane)."""

    unit: Unit
    threads: int
    blocks: int
    arguments: tuple[int, ...]  # as rope.cuh names them


@functools.lru_cache(maxsize=1024)
def _choose(
    kind: torch.dtype,
    table: torch.dtype,
    interleaved: bool,
    vector: bool,
    narrow: bool,
    way: str,
    sizes: tuple[int, ...],
    target: Target,
) -> _Walk:
    q_heads, k_heads, batch, tokens, dim, rotary = sizes
    names = type_name(kind), type_name(table)
    turned, over = rotary if interleaved else rotary // 2, way == _OVER
    # both halves of a head must start on a vector, and the untouched rest too
    vector = vector and vectorised(kind.itemsize, turned if over else dim | turned, 0)
    width = VECTOR_BYTES // kind.itemsize if vector else 1
    lanes = (rotary if over else dim) // width
    pairs = 2 * turned // width  # neighbouring lanes that hold both of every pair
    shuffled = interleaved or (pairs & (pairs - 1) == 0 and pairs <= target.wave and lanes % max(pairs, 1) == 0)
    narrow = narrow and tokens * dim < 2**31  # all that moves a pointer is a 32-bit integer
    if _takes_packs(target) and vector and narrow and rotary and shuffled and lanes in _LANES:
        packs = _Packs.of(sizes, lanes, way, table.itemsize, target)
        if packs.exact:
            chosen = _unit(way, *names, width, interleaved, packs.form)
            return _Walk(chosen, packs.threads, packs.work, packs.arguments)
    step = 2 if interleaved and width == 1 else width
    rest = 0 if over else -(-(dim - rotary) // width)
    lanes = min(max(turned // step + rest, 1), _THREADS)
    heads_at_once = min(q_heads + k_heads, _THREADS // lanes)
    tokens_at_once = max(1, _THREADS // (lanes * heads_at_once))
    blocks = grid_of(-(-batch * tokens // tokens_at_once), _THREADS)
    chosen = _unit(way, *names, width, interleaved)
    return _Walk(chosen, _THREADS, blocks, (lanes, heads_at_once, tokens_at_once, blocks))


def _power_of_two(n: int) -> int:
    """The least that is not below ``n``."""
    return 1 << (n - 1).bit_length()


def _whole_tokens(heads: int, of_thread: int, lanes: int, wave: int) -> tuple[int, int]:
    """(tokens, heads) side by side in a block of all heads of a token, or of a part where fewer threads are idle."""
    best = (0.0, 1, max(1, wave // lanes))
    for parts in range(1, 5):
        at_once = -(-heads // (of_thread * parts))
        side = 1
        while (threads := lanes * at_once * side) <= _PACKS_THREADS:
            busy = heads / (at_once * of_thread * parts)
            if threads >= 64 and threads % wave == 0 and busy > best[0]:
                best = busy, side, at_once
            side *= 2
    return best[1:]


class _Packs(NamedTuple):
    """How blocks go over tiles of tokens and shares of the heads: `RopeWalk` of rope.cuh."""

    form: tuple[int, int]  # tokens and heads of a thread
    lanes: int
    tokens: int  # side by side in a block
    heads: int
    stretch: int  # tiles
    stretches: int
    groups: int
    batch: int

    @classmethod
    def of(cls, sizes: tuple[int, ...], lanes: int, way: str, angle_bytes: int, target: Target) -> _Packs:
        q_heads, k_heads, batch, tokens, _, rotary = sizes
        heads, angles = q_heads + k_heads, tokens * rotary * 2 * angle_bytes
        packs, few, some, many = batch * tokens * heads * lanes / target.units, *_FORMS[way]
        form = few if packs <= _FEW or tokens == 1 else some if packs <= _SOME else many
        if way == _OVER and form == many:
            side, heads_side = _whole_tokens(heads, form[1], lanes, target.wave)
            stretches = -(-angles // _STRETCH_OVER)
        else:
            side = min(_USUAL_THREADS // lanes, _power_of_two(-(-tokens // form[0])))
            most = max(target.wave, lanes * side * _power_of_two(-(-heads // form[1])))
            heads_side = min(_USUAL_THREADS, most) // (lanes * side)
            stretches = 1 if angles < _KEPT else -(-angles // _STRETCH)
        tiles = -(-tokens // (side * form[0]))
        stretch = -(-tiles // min(stretches, tiles))
        groups = -(-heads // (heads_side * form[1]))
        return cls(form, lanes, side, heads_side, stretch, -(-tiles // stretch), groups, batch)

    @property
    def threads(self) -> int:
        return self.lanes * self.tokens * self.heads

    @property
    def work(self) -> int:
        return self.stretches * self.stretch * self.batch * self.groups

    @property
    def exact(self) -> bool:
        """Whether one launch holds all blocks, and the kernel's quotients are right: those by the inverse of n, of
        numbers below 2^32 / n."""
        most = self.work * max(self.groups, self.batch, self.stretch)
        return most < 2**32 and grid_of(self.work, self.threads) == self.work

    @property
    def arguments(self) -> tuple[int, ...]:
        return (
            self.lanes.bit_length() - 1,
            self.tokens.bit_length() - 1,
            self.heads,
            self.stretch,
            self.groups,
            *(-(-(2**32) // n) for n in (self.stretch, self.groups, self.batch)),
        )


def _unit_stride(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    return _elsewhere(q, k, cos, sin, interleaved, _FORWARD, target)


def rope_backward(
    grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target
) -> tuple[Tensor, Tensor]:
    return _elsewhere(grad_q, grad_k, cos, sin, interleaved, _BACKWARD, target)


def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, target: Target) -> tuple[Tensor, Tensor]:
    return _launch(q, k, cos, sin, interleaved, _OVER, q, k, target)


def _elsewhere(
    q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, way: str, target: Target
) -> tuple[Tensor, Tensor]:
    q_out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    return _launch(_unit_stride(q), _unit_stride(k), cos, sin, interleaved, way, q_out, k_out, target)


def _launch(
    q: Tensor,
    k: Tensor,
    cos: Tensor,
    sin: Tensor,
    interleaved: bool,
    way: str,
    q_out: Tensor,
    k_out: Tensor,
    target: Target,
) -> tuple[Tensor, Tensor]:
    if q_out.numel() + k_out.numel() == 0:
        return q_out, k_out
    cos, sin = _unit_stride(cos), _unit_stride(sin)
    lengths, arguments = _layout(q.shape, k.shape, cos.shape, (q.stride(), k.stride(), cos.stride(), sin.stride()))
    a, b, c, d, e, f = q.data_ptr(), k.data_ptr(), cos.data_ptr(), sin.data_ptr(), q_out.data_ptr(), k_out.data_ptr()
    vector = vectorised(q.element_size(), lengths, a | b | c | d | e | f)
    walk = _choose(q.dtype, cos.dtype, interleaved, vector, lengths < 2**31, way, arguments[-6:], target)
    runtime(target).launch(
        walk.unit, q.device, walk.blocks, walk.threads, 0, (a, b, c, d, e, f, *arguments, *walk.arguments)
    )
    return q_out, k_out


def units(target: Target) -> list[Unit]:
    """Every kernel of this family."""
    widths = {"f32": (1, 4), "f16": (1, 8), "bf16": (1, 8)}
    kernels = []
    for way, (kind, (one, vector)), table, interleaved in itertools.product(
        (_FORWARD, _OVER, _BACKWARD), widths.items(), widths, (False, True)
    ):
        kernels += [_unit(way, kind, table, width, interleaved) for width in (one, vector)]
        if _takes_packs(target):
            kernels += [_unit(way, kind, table, vector, interleaved, form) for form in dict.fromkeys(_FORMS[way])]
    return kernels
