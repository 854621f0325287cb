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
    return outputs


def whole() -> list[torch.Tensor]:
    x = torch.arange(N, dtype=torch.int32) * 46_341 - 123_456
    out = torch.zeros(5, N, dtype=torch.int32)
    integers[(1,)](x, out, N=N)
    return [out]


def error(launch: Callable[[], object]) -> str:
    try:
        launch()
    except InterpreterError as raised:
        return f"{type(raised).__name__}: {raised}"
    raise AssertionError("nothing was raised")


def all_of_it() -> tuple[list[torch.Tensor], list[str]]:
    x = torch.zeros(2 * N)
    refused = [error(lambda: unequal[(1,)](x, N=N)), error(lambda: odd[(1,)](x, N=N))]
    return floats() + whole(), refused


before, raised_before = all_of_it()
hasten()
for _ in range(2):  # once with nothing kept, once with everything
    after, raised_after = all_of_it()
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, after, strict=True))
    assert raised_after == raised_before, (raised_before, raised_after)
assert all(bool(t.isfinite().all()) for t in before[:1]), "the comparison is of numbers"
assert "incompatible dimensions" in raised_before[0] and "power of 2" in raised_before[1], raised_before
