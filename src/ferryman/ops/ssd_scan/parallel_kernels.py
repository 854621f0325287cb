"""`ssd_scan` in three passes, of which one alone goes from chunk to chunk, and has no matrix product.

1. `_parts`, all chunks at once: the sums of exponents, and what each chunk adds to the state.
2. `_states`, a program for some numbers of a head's state: the state before each chunk, in the place of what it adds.
3. `_outputs`, all chunks at once: y = exp(total) c h^T + weight x, weight = c b^T with decays and steps.

Products are of a float32 number by one that came in 16 bits, or by float32. bfloat16 on NVIDIA: a float32 number is the
sum of three bfloat16, exactly, so three products on the matrix units are as exact as one of float32; c b^T is one.
Otherwise three of tf32, or one of float32 on AMD.

Limit, for a chunk of 64 tokens of a head with P = 64, N = 128 in bfloat16: 2 C (C N + 3 (2 N P + C P)) operations, 9
MFLOP, 9 ns of an H100 at its peak; x, y and four times the state, 144 KB, are 45 ns of its memory where its cache does
not hold states.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded, strides
from ferryman.backends.triton_lang import INTERPRETED, exp, narrow, widen
from ferryman.ops.ssd_scan.triton_kernels import _cumulative, _power, _steps

PASSED = 512  # numbers of the state in a program of `_states`


@triton.jit
def _raw(ptr, rows, columns, row, column, known, PRECISION: tl.constexpr):
    """A tile of 16-bit numbers as they are, where matrix units take them."""
    x = tl.load(ptr + rows[:, None] * row + columns[None, :] * column, mask=known, other=0.0)
    if INTERPRETED or PRECISION == "ieee":
        x = widen(x)
    return x


@triton.jit
def _cut(a):
    """(the upper half of a's bits, which is a bfloat16, what is left): nothing is rounded, so both are finite."""
    upper = (a.to(tl.uint32, bitcast=True) & 0xFFFF0000).to(tl.float32, bitcast=True)
    return upper.to(tl.bfloat16), tl.where(tl.abs(a) == float("inf"), 0.0, a - upper)


@triton.jit
def _product(a, b, total, PRECISION: tl.constexpr):
    """total + a b, of a in float32."""
    if b.dtype == tl.bfloat16:
        for _ in tl.static_range(3):
            upper, a = _cut(a)
            total = tl.dot(upper, b, total)
    else:
        total = tl.dot(a, widen(b), total, input_precision=PRECISION)
    return total


@triton.jit
def _read(c, state, total, PRECISION: tl.constexpr):
    """total + c state^T, of the state in float32."""
    if c.dtype == tl.bfloat16:
        for _ in tl.static_range(3):
            upper, state = _cut(state)
            total = tl.dot(c, tl.trans(upper), total)
    else:
        total = tl.dot(widen(c), tl.trans(state), total, input_precision=PRECISION)
    return total


@triton.jit
def _place(heads, chunks, dim, BLOCK_P: tl.constexpr):
    """(sample, chunk, head, first dimension) of a program."""
    across = tl.cdiv(dim, BLOCK_P)
    program = tl.program_id(0) // across
    head = program % heads
    chunk = (program // heads) % chunks
    return (program // (heads * chunks)).to(tl.int64), chunk, head, (tl.program_id(0) % across) * BLOCK_P


@triton.jit(do_not_specialize=["length", "chunks"])
def _parts(
    x_ptr,
    dt_ptr,
    a_ptr,
    b_ptr,
    bias_ptr,
    part_ptr,
    step_ptr,
    total_ptr,
    low,
    high,
    length,
    chunks,
    heads,
    shared,
    dim,
    width,
    x_b,
    x_l,
    x_h,
    x_p,
    t_b,
    t_l,
    t_h,
    b_b,
    b_l,
    b_g,
    b_n,
    SOFTPLUS: tl.constexpr,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """part: (batch, chunks, heads, dim, width). step, total: (batch, chunks, heads, CHUNK), a token's step and the sum
    of its chunk's exponents up to it. All in float32."""
    sample, chunk, head, first = _place(heads, chunks, dim, BLOCK_P)
    p, q = first + tl.arange(0, BLOCK_P), tl.arange(0, CHUNK)
    token = tl.full([], CHUNK, tl.int64) * chunk
    live = q < length - token
    there = dt_ptr + sample * t_b + head * t_h + token * t_l
    step, _ = _steps(there, bias_ptr, low, high, t_l, head, q, live, SOFTPLUS)
    total = _cumulative(step * widen(tl.load(a_ptr + head)), q)
    end = tl.sum(tl.where(q == CHUNK - 1, total, 0.0), 0)
    place = (sample * chunks + chunk) * heads + head
    if first == 0:
        tl.store(step_ptr + place * CHUNK + q, step)
        tl.store(total_ptr + place * CHUNK + q, total)
    x_ptr += sample * x_b + head * x_h + token * x_l
    b_ptr += sample * b_b + (head // shared) * b_g + token * b_l
    x = widen(_raw(x_ptr, q, p, x_l, x_p, live[:, None] & (p < dim)[None, :], PRECISION))
    come = tl.trans(x * (exp(end - total) * step)[:, None])
    for column in tl.range(0, width, BLOCK_N, num_stages=1):
        n = column + tl.arange(0, BLOCK_N)
        b = _raw(b_ptr, q, n, b_l, b_n, live[:, None] & (n < width)[None, :], PRECISION)
        part = _product(come, b, tl.zeros([BLOCK_P, BLOCK_N], tl.float32), PRECISION)
        at = place * dim * width + p[:, None] * width + n[None, :]
        tl.store(part_ptr + at, part, mask=(p < dim)[:, None] & (n < width)[None, :])


@triton.jit(do_not_specialize=["chunks"])
def _states(
    part_ptr,
    total_ptr,
    state_ptr,
    final_ptr,
    chunks,
    heads,
    dim,
    width,
    s_b,
    s_h,
    s_p,
    s_n,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """part: what a chunk adds becomes the state before it."""
    size = dim * width
    across = tl.cdiv(size, BLOCK)
    head = (tl.program_id(0) // across) % heads
    sample = (tl.program_id(0) // (across * heads)).to(tl.int64)
    at = (tl.program_id(0) % across) * BLOCK + tl.arange(0, BLOCK)
    state = tl.zeros([BLOCK], tl.float32)
    if state_ptr is not None:
        there = state_ptr + sample * s_b + head * s_h + at // width * s_p + at % width * s_n
        state = widen(tl.load(there, mask=at < size, other=0.0))
    place = sample * chunks * heads + head
    own = tl.load(part_ptr + place * size + at, mask=at < size, other=0.0)
    for chunk in tl.range(0, chunks, num_stages=1):
        end = tl.load(total_ptr + place * CHUNK + CHUNK - 1)
        # the next part is on its way while this one is added
        after = tl.load(part_ptr + (place + heads) * size + at, mask=(at < size) & (chunk + 1 < chunks), other=0.0)
        tl.store(part_ptr + place * size + at, state, mask=at < size)
        state = state * exp(end) + own
        own = after
        place += heads
    tl.store(final_ptr + (sample * heads + head) * size + at, state, mask=at < size)


@triton.jit(do_not_specialize=["length", "chunks"])
def _outputs(
    x_ptr,
    b_ptr,
    c_ptr,
    d_ptr,
    state_ptr,
    step_ptr,
    total_ptr,
    y_ptr,
    length,
    chunks,
    heads,
    shared,
    dim,
    width,
    x_b,
    x_l,
    x_h,
    x_p,
    b_b,
    b_l,
    b_g,
    b_n,
    c_b,
    c_l,
    c_g,
    c_n,
    PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    sample, chunk, head, first = _place(heads, chunks, dim, BLOCK_P)
    p, q = first + tl.arange(0, BLOCK_P), tl.arange(0, CHUNK)
    token = tl.full([], CHUNK, tl.int64) * chunk
    live = q < length - token
    place = (sample * chunks + chunk) * heads + head
    x_ptr += sample * x_b + head * x_h + token * x_l
    b_ptr += sample * b_b + (head // shared) * b_g + token * b_l
    c_ptr += sample * c_b + (head // shared) * c_g + token * c_l
    state_ptr += place * dim * width
    scores = tl.zeros([CHUNK, CHUNK], tl.float32)
    y = tl.zeros([CHUNK, BLOCK_P], tl.float32)
    for column in tl.range(0, width, BLOCK_N, num_stages=1):
        n = column + tl.arange(0, BLOCK_N)
        known = live[:, None] & (n < width)[None, :]
        c = _raw(c_ptr, q, n, c_l, c_n, known, PRECISION)
        b = _raw(b_ptr, q, n, b_l, b_n, known, PRECISION)
        scores = tl.dot(c, tl.trans(b), scores, input_precision=PRECISION)
        inside = (p < dim)[:, None] & (n < width)[None, :]
        state = tl.load(state_ptr + p[:, None] * width + n[None, :], mask=inside, other=0.0)
        y = _read(c, state, y, PRECISION)
    step = tl.load(step_ptr + place * CHUNK + q)
    total = tl.load(total_ptr + place * CHUNK + q)
    tall = live[:, None] & (p < dim)[None, :]
    x = _raw(x_ptr, q, p, x_l, x_p, tall, PRECISION)
    seen = q[:, None] >= q[None, :]
    decay = exp(tl.where(seen, total[:, None] - total[None, :], 0.0))
    weight = tl.where(seen, decay * scores * step[None, :], 0.0)
    y = _product(weight, x, y * exp(total)[:, None], PRECISION)
    if d_ptr is not None:
        y += widen(tl.load(d_ptr + head)) * widen(x)
    out = ((sample * length + token) * heads + head) * dim + q[:, None] * (heads * dim) + p[None, :]
    tl.store(y_ptr + out, narrow(y, y_ptr.dtype.element_ty), mask=tall)


def _tiles(x: Tensor, width: int, target: Target) -> tuple[int, int, int, int]:
    """(tokens of a chunk, rows and columns of a state, warps) of a program."""
    rows = x.shape[3]
    if target.vendor == "amd":
        small = target.wave == 32  # RDNA multiplies float32 without matrix units: a lane holds a tile's operands
        return 16 if small else 32, _power(rows, 32 if small else 64), _power(width, 32), 4
    if "wgmma" in target.features and x.dtype != torch.float32:
        return 64, _power(rows, 64), _power(width, 64), 4
    many = "wgmma" in target.features or x.dtype == torch.bfloat16  # else `_outputs` spills on sm_80
    return 64 if many else 32, _power(rows, 64), _power(width, 32), 8 if many else 4


def ssd_scan(
    x: Tensor,
    dt: Tensor,
    a: Tensor,
    b: Tensor,
    c: Tensor,
    d: Tensor | None,
    dt_bias: Tensor | None,
    initial_state: Tensor | None,
    dt_softplus: bool,
    y_float32: bool,
    dt_min: float | None,
    dt_max: float | None,
    target: Target,
) -> tuple[Tensor, Tensor]:
    batch, length, heads, dim = x.shape
    groups, width = b.shape[2:]
    y = torch.empty(x.shape, dtype=torch.float32 if y_float32 else x.dtype, device=x.device)
    final = torch.empty(batch, heads, dim, width, dtype=torch.float32, device=x.device)
    if batch * heads * dim == 0:
        return y, final
    chunk, block_p, block_n, warps = _tiles(x, width, target)
    chunks = triton.cdiv(length, chunk)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": x.device}
    part = torch.empty(batch, chunks, heads, dim, width, **kind)
    step, total = (torch.empty(batch, chunks, heads, chunk, **kind) for _ in range(2))
    rate, skip, bias = (None if t is None else t.contiguous() for t in (a, d, dt_bias))
    sizes = (heads, heads // groups, dim, width)
    tiles = ("tf32x3" if target.vendor == "nvidia" else "ieee", chunk, block_p, block_n)
    grid = (batch * chunks * heads * triton.cdiv(dim, block_p),)
    launch(
        _parts,
        grid,
        x,
        dt,
        rate,
        b,
        bias,
        part,
        step,
        total,
        dt_min,
        dt_max,
        length,
        chunks,
        *sizes,
        *x.stride(),
        *dt.stride(),
        *b.stride(),
        dt_softplus,
        *tiles,
        device=x.device,
        num_warps=warps,
    )
    if width:  # else there is no state
        launch(
            _states,
            (batch * heads * triton.cdiv(dim * width, PASSED),),
            part,
            total,
            initial_state,
            final,
            chunks,
            heads,
            dim,
            width,
            *strides(initial_state, 4),
            chunk,
            PASSED,
            device=x.device,
            num_warps=4,
        )
    launch(
        _outputs,
        grid,
        x,
        b,
        c,
        skip,
        part,
        step,
        total,
        y,
        length,
        chunks,
        *sizes,
        *x.stride(),
        *b.stride(),
        *c.stride(),
        *tiles,
        device=x.device,
        num_warps=warps,
    )
    return y, final


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Mamba2's heads, Falcon-H1's wider state and small odd ones; a state and none."""
    kind = getattr(torch, dtype)

    def calls(heads: int, dim: int, groups: int, width: int, state: bool, wide: bool, low: float | None) -> None:
        x = torch.empty(2, 2048, heads, dim, dtype=kind, device="meta")
        b = torch.empty(2, 2048, groups, width, dtype=kind, device="meta")
        own = torch.empty(heads, dtype=torch.float32, device="meta")
        kept = torch.empty(2, heads, dim, width, dtype=torch.float32, device="meta") if state else None
        dt = torch.empty(2, 2048, heads, dtype=kind, device="meta")
        ssd_scan(x, dt, own, b, b, own, own, kept, True, wide, low, None, target)

    shapes = (
        (80, 64, 1, 128, False, False, None),
        (48, 64, 1, 256, True, True, None),
        (3, 13, 3, 11, True, False, 0.1),
    )
    return recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
