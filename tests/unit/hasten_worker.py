"""Interpreted kernels before and after `triton_hasten.hasten`: exits with 0 where every bit and error is the same."""

import os

os.environ["TRITON_INTERPRET"] = "1"

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from triton.runtime.errors import InterpreterError

from ferryman.backends.triton_hasten import hasten

N = 16


@triton.jit
def weighted(x, scale):
    return x * scale + x


@triton.jit
def pair(x):
    return weighted(x, 2.5), weighted(x, -1)


@triton.jit
def shapes(x, out, N: tl.constexpr):
    rows, columns = tl.arange(0, N), tl.arange(0, N)
    block = tl.load(x + rows[:, None] * N + columns[None, :], mask=rows[:, None] < N - 3, other=-1.0)
    first, second = pair(block)
    extent = block.shape[0] + block.numel
    mixed = tl.where(first > second, first, tl.sum(second, 1)[:, None]) + tl.max(first, 0)[None, :] + extent
    turned = tl.trans(mixed) + tl.zeros((1, N), tl.float32) + tl.full((N, 1), 0.5, tl.float32)
    turned += tl.reshape(tl.cumsum(tl.reshape(mixed, (N * N,)), 0), (N, N))
    turned = tl.dot(block, tl.trans(block), turned)
    total = tl.zeros((), tl.float32)
    for row in range(tl.program_id(0) + 1):
        total += row * tl.load(x + row)
    tl.store(out + tl.program_id(0) * N * N + rows[:, None] * N + columns[None, :], turned + total)


@triton.jit
def integers(x, out, N: tl.constexpr):
    at = tl.arange(0, N)
    values = tl.load(x + at)
    tl.store(out + at, values * values + 2_147_483_647)  # both overflow
    tl.store(out + N + at, values - at * 65_537 * 65_537)
    tl.store(out + 2 * N + at, (values % 7) ^ (values // 3) & (at << 3))
    tl.store(out + 3 * N + at, (values.to(tl.int8) * values.to(tl.int8)).to(tl.int32))
    tl.store(out + 4 * N + at, (values.to(tl.int64) * 3_000_000_000 >> 7).to(tl.int32))


@triton.jit
def operators(x, y, out, N: tl.constexpr, C: tl.constexpr):
    """Every operator between blocks, rows and columns, scalars and numbers, from either side."""
    at = tl.arange(0, N)
    places = at[:, None] * N + at[None, :]
    a, b = tl.load(x + places), tl.load(y + places)
    row, column, one = tl.load(x + at)[None, :], tl.load(y + at)[:, None], tl.load(x + N + 1)
    total = a + b - column * row + (a - one) * (one - b) + (a + C - 2) * (3 - b) + (one + row) - (column + one)
    total += tl.where(a < b, a, b) + tl.where(a <= row, row, a) + tl.where(one > column, column, one)
    total += tl.where((a >= 0) & (b != 0) | (a == b) ^ (row < column), 2.0, -a)
    # whether an array is turned decides in which order its rows are summed
    turned = tl.trans(a * C) * 3 + 0.1 + one
    total += tl.sum(turned + tl.trans(b), 1)[:, None] + tl.sum(turned * row, 0)[None, :]
    total += tl.where(a > -2.5, a / 3, a / b) + 1 / (one + 7) + (b > C).to(tl.float32)
    tl.store(out + places, total)
    tl.store(out + N * N + places, tl.where(a < 0, -0.0, 0.0) + 0 - (a * 0))


@triton.jit
def widths(x, y, out, N: tl.constexpr):
    """The operators between integers of all widths and signs, the bits, the pointers, and casts among them."""
    at = tl.arange(0, N)
    a, b, one = tl.load(x + at), tl.load(y + at), tl.load(x + 3)
    tl.store(out + at, ((a + b) * 3 - one).to(tl.int64))
    tl.store(out + N + at, ((a & 7) | (b ^ one) & 6).to(tl.int64))
    tl.store(out + 2 * N + at, ((b | a) - (b & a)).to(tl.int64) + (a < 5).to(tl.int64) * 2 + (one != b))
    tl.store((out + 3 * N) + at.to(tl.int64), (a.to(tl.float32) * 0.5).to(tl.int32).to(tl.int64))
    wide = a.to(tl.int64) * 5 - b.to(tl.int64) + at
    tl.store(at + (out + 4 * N), tl.where(wide > at, wide, at.to(tl.int64)) + (b.to(tl.int16) == a.to(tl.int16)))
    tl.store(out + 5 * N + at, (a.to(tl.float16) + 0.5).to(tl.float32).to(tl.int64))


@triton.jit
def mixed(x, y, out, sums, N: tl.constexpr):
    """Integers of two widths, as strides and places are: scalars, rows, columns and turned blocks. How they lie in
    memory decides in which order floats that are made of them are summed."""
    at, one = tl.arange(0, N), tl.load(y + 5)
    a, b = tl.load(x + at), tl.load(y + at)
    step = tl.load(x + 7).to(tl.int64) * tl.program_id(0) + tl.load(x + 1) - one
    blocks = a[:, None] * b[None, :] - at[:, None].to(tl.int64) + step
    turned = tl.trans(blocks.to(tl.int32)) * step + tl.broadcast_to(a[None, :], (N, N))
    blocks += turned * one + (one - turned) * (at[:, None] < b[None, :]) + (step >= a)[:, None] * (a != one)[None, :]
    tl.store(out + at[:, None] * N + at[None, :], blocks.to(tl.int64))
    parts = (turned * a[:, None] + b[None, :]).to(tl.float32) * 0.1 + (turned - step).to(tl.float32) / 3
    tl.store(sums + at, tl.sum(parts, 0) + tl.sum((blocks * step).to(tl.float32) * 1.7, 1))


@triton.jit
def chosen(x, out, N: tl.constexpr, M: tl.constexpr):
    """Numbers where a condition or a mask is false, of every sign and kind, beside blocks and turned ones."""
    at = tl.arange(0, N)
    places = at[:, None] * N + at[None, :]
    inside = (places % 3 != 1) & (at[:, None] < N - 2)
    a = tl.load(x + places, mask=inside, other=-1.5)
    b = tl.load(x + places, mask=inside, other=0.0) + tl.load(x + places, mask=inside, eviction_policy="evict_first")
    c = tl.load(x + places, mask=inside, other=float("nan")) + tl.load(x + places, mask=inside, other=M)
    whole = tl.load(x + places, mask=inside, other=a) + tl.load(x + at, mask=at < 5, other=-0.0)[None, :]
    one = tl.load(x + 3, mask=N > 2, other=4)
    a, b = tl.where(a > 0, a, 0), tl.where(b > 0.5, -0.0, b) + tl.where(inside, float("-inf"), b)
    turned = tl.where(tl.trans(inside), tl.trans(a), 3) + tl.where(inside, 2.5, tl.trans(a)) + tl.where(at > 4, one, 1)
    counts = tl.where(inside, places, -1) + tl.where(at[None, :] > 2, places, 7)
    tl.store(out + places, turned + counts + tl.sum(turned * 0.1 + c, 0)[None, :])
    tl.store(out + N * N + places, a + b + tl.sum(tl.where(inside, turned, 0.1), 1)[:, None])
    tl.store(out + 2 * N * N + places, whole + tl.where(c == c, c, 1e30) + tl.where(at % 2 == 0, at, 9)[:, None])


@triton.jit
def no_such_hint(x, N: tl.constexpr):
    tl.store(x, tl.sum(tl.load(x + tl.arange(0, N), mask=tl.arange(0, N) < 3, other=0.0, cache_modifier=".zz"), 0))


@triton.jit
def below_zero(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), (tl.arange(0, N).to(tl.uint32) + -1).to(tl.float32))


@triton.jit
def too_large(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), (tl.arange(0, N).to(tl.int8) + 300).to(tl.float32))


@triton.jit
def half_a_place(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N) * 0.5, 1.0)


@triton.jit
def unequal(x, N: tl.constexpr):
    tl.store(x + tl.arange(0, N), tl.arange(0, N) + tl.arange(0, 2 * N))


@triton.jit
def odd(x, N: tl.constexpr):
    tl.store(x, tl.sum(tl.zeros((N - 1,), tl.float32), 0))


def floats() -> list[torch.Tensor]:
    x = torch.linspace(-3, 5, N * N, dtype=torch.float64)
    outputs = []
    for dtype in (torch.float32, torch.float16):
        out = torch.full((2, N, N), float("nan"), dtype=dtype)
        shapes[(2,)](x.to(dtype).reshape(N, N), out, N=N)
        outputs.append(out)
        out = torch.full((3, N, N), float("nan"), dtype=dtype)
        chosen[(1,)](x.to(dtype).reshape(N, N), out, N=N, M=6)
        outputs.append(out)
        a, b = x.to(dtype).reshape(N, N), (x.flip(0) * 0.75).round().to(dtype).reshape(N, N)
        a[2, 3], b[4, 5], a[6, 7], b[0, 0] = float("nan"), float("inf"), -0.0, 0.0
        for right in (b, b.t(), b.float()):
            out = torch.full((2, N, N), float("nan"), dtype=dtype)
            operators[(1,)](a, right, out, N=N, C=4)
            outputs.append(out)
    return outputs


def whole() -> list[torch.Tensor]:
    x = torch.arange(N, dtype=torch.int32) * 46_341 - 123_456
    out = torch.zeros(5, N, dtype=torch.int32)
    integers[(1,)](x, out, N=N)
    outputs = [out]
    kinds = (torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64)
    for left in kinds:
        for right in kinds:
            out = torch.zeros(6, N, dtype=torch.int64)
            a = torch.arange(N).mul(37).sub(90 if left.is_signed else 0).to(left)
            widths[(1,)](a, torch.arange(N).mul(11).to(right), out, N=N)
            outputs.append(out)
            out, sums = torch.zeros(N, N, dtype=torch.int64), torch.zeros(N)
            mixed[(2,)](a, torch.arange(N).mul(13).to(right), out, sums, N=N)
            outputs += [out, sums]
    return outputs


def error(launch: Callable[[], object]) -> str:
    try:
        launch()
    except InterpreterError as raised:
        return f"{type(raised).__name__}: {raised}"
    raise AssertionError("nothing was raised")


def all_of_it() -> tuple[list[torch.Tensor], list[str]]:
    x = torch.zeros(2 * N)
    kernels = (unequal, odd, below_zero, too_large, half_a_place, no_such_hint)
    refused = [error(lambda kernel=kernel: kernel[(1,)](x, N=N)) for kernel in kernels]
    return floats() + whole(), refused


before, raised_before = all_of_it()
hasten()
for _ in range(2):  # once with nothing kept, once with everything
    after, raised_after = all_of_it()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True))
    assert raised_after == raised_before, (raised_before, raised_after)
assert all(bool(t.isfinite().all()) for t in before[:1]), "the comparison is of numbers"
assert "incompatible dimensions" in raised_before[0] and "power of 2" in raised_before[1], raised_before
assert "negative scalar" in raised_before[2] and "out of range" in raised_before[3], raised_before
assert "IncompatibleTypeError" in raised_before[4] and "Cache modifier" in raised_before[5], raised_before
