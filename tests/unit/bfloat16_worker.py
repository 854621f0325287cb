"""Triton kernels on bfloat16, interpreted with the mended interpreter: exits with 0 where all are right."""

import math
import os

os.environ["TRITON_INTERPRET"] = "1"

import torch
import triton
import triton.language as tl

from ferryman.backends import triton_bfloat16

triton_bfloat16.mend()
BF16 = torch.bfloat16


@triton.jit
def cast(x, y, N: tl.constexpr):
    at = tl.arange(0, N)
    tl.store(y + at, tl.load(x + at).to(y.dtype.element_ty))


@triton.jit
def arithmetic(x, y, out, N: tl.constexpr):
    at = tl.arange(0, N)
    a, b = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, a + b)
    tl.store(out + N + at, a * b)
    tl.store(out + 2 * N + at, a - b)
    tl.store(out + 3 * N + at, tl.where(a < b, a, b))
    tl.store(out + 4 * N + at, tl.maximum(a, b))
    tl.store(out + 5 * N + at, tl.abs(a))
    tl.store(out + 6 * N + at, (a.to(tl.float32) / 3).to(tl.bfloat16))
    tl.store(out + 7 * N + at, -a)
    tl.store(out + 8 * N + at, a * 1.5)
    tl.store(out + 9 * N + at, tl.full((N,), 0.1, tl.bfloat16))


@triton.jit
def sums(x, out, M: tl.constexpr, N: tl.constexpr):
    at = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    rows = tl.arange(0, M)
    v = tl.load(x + at)
    tl.store(out + rows, tl.sum(v, 1))
    tl.store(out + M + rows, tl.max(v, 1))
    tl.store(out + 2 * M + rows, tl.sum(v.to(tl.float32), 1))


@triton.jit
def dot(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    x, y = tl.load(a + m[:, None] * K + k[None, :]), tl.load(b + k[:, None] * N + n[None, :])
    acc = tl.zeros((M, N), tl.float32)
    acc = tl.dot(x, y, acc)
    tl.store(c + m[:, None] * N + n[None, :], acc.to(c.dtype.element_ty))


def bits(x: torch.Tensor) -> torch.Tensor:
    """Bits of bfloat16, all NaNs as one."""
    return x.view(torch.int16).masked_fill(x.isnan(), 0x7FC0)


def same(actual: torch.Tensor, wanted: torch.Tensor, what: str) -> None:
    assert torch.equal(bits(actual), bits(wanted.to(BF16))), what


every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
wide = torch.empty(1 << 16)
cast[(1,)](every, wide, N=1 << 16)
assert torch.equal(bits(wide.to(BF16)), bits(every)) and torch.equal(wide.nan_to_num(), every.float().nan_to_num())
torch.manual_seed(0)
hard = torch.cat(
    [
        torch.randint(-(2**31), 2**31 - 1, (1 << 15,), dtype=torch.int64).to(torch.int32).view(torch.float32),
        (torch.randint(0, 1 << 16, (1 << 15,), dtype=torch.int32) << 16 | 0x8000).view(torch.float32),  # halfway
    ]
)
for dtype in (torch.float32, torch.float64, torch.float16, torch.int32):
    given = hard.to(dtype) if dtype.is_floating_point else torch.randint(-(2**24), 2**24, (1 << 16,), dtype=dtype)
    if dtype == torch.float64:
        given = given + given.abs() * 2.0**-40  # a little above halfway: two roundings would go to even
    out = torch.empty(1 << 16, dtype=BF16)
    cast[(1,)](given, out, N=1 << 16)
    if dtype != torch.float64:
        same(out, given.to(BF16), f"cast of {dtype}")
        continue
    # torch rounds twice: the nearest of three neighbours, which no value here is halfway between
    fine = torch.isfinite(given) & (given.abs() > 2.0**-120) & (given.abs() < 2.0**126)
    given, out = given[fine], out[fine]
    middle = given.float().to(BF16).view(torch.int16)
    near = torch.stack([(middle + step).view(BF16) for step in (-1, 0, 1)])
    best = near.gather(0, (near.double() - given).abs().argmin(0, keepdim=True))[0]
    same(out, best, "cast of float64")

x, y = torch.randn(256).to(BF16), torch.randn(256).to(BF16)
out = torch.empty(10, 256, dtype=BF16)
arithmetic[(1,)](x, y, out, N=256)
a, b = x.float(), y.float()
TENTH = torch.full((256,), 0.1)
wanted = [
    a + b,
    a * b,
    a - b,
    torch.minimum(a, b),
    torch.maximum(a, b),
    a.abs(),
    a / 3,
    -a,
    a * 1.5,
    torch.full((256,), 0.1),
]
for row, want in enumerate(wanted):
    same(out[row], want, f"arithmetic {row}")

v = torch.randint(-8, 9, (16, 32)).to(BF16)
got = torch.empty(3, 16, dtype=BF16)
sums[(1,)](v, got, M=16, N=32)
same(got[0], v.float().sum(1), "sum")
same(got[1], v.float().max(1).values, "max")
same(got[2], v.float().sum(1), "sum in float32")

p, q = torch.randn(32, 64).to(BF16), torch.randn(64, 16).to(BF16)
exact = p.double() @ q.double()
bound = 64 * 2.0**-24 * (p.double().abs() @ q.double().abs())
full = torch.empty(32, 16)
dot[(1,)](p, q, full, M=32, N=16, K=64)
assert bool(((full.double() - exact).abs() <= bound).all()), "dot"
low = torch.empty(32, 16, dtype=BF16)
dot[(1,)](p, q, low, M=32, N=16, K=64)
assert bool(((low.double() - exact).abs() <= bound + 2.0**-8 * exact.abs()).all()), "dot, rounded"
assert math.isfinite(float(full.sum()))

TINY = 2.0**-10
edges = [0.0, -0.0, math.nan, math.inf, -math.inf, 240, 448, 464, 465, 480, 57344, 61440, TINY, 3 * TINY]
for kind in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
    stored = torch.arange(256, dtype=torch.uint8).view(kind)
    steps = stored.float()[stored.float().isfinite()].sort().values
    for wide in (torch.float32, torch.float16, BF16):
        read = torch.empty(256, dtype=wide)
        cast[(1,)](stored, read, N=256)
        torch.testing.assert_close(read, stored.float().to(wide), rtol=0, atol=0, equal_nan=True)
        spread = torch.randn(2048) * 10 ** torch.linspace(-6, 6, 2048)
        halves = (steps[1:] + steps[:-1]) / 2  # ties
        given = torch.cat([torch.tensor(edges), halves, -halves, spread])
        given = torch.cat([given, torch.zeros(4096 - len(given))]).to(wide)
        low = torch.empty(4096, dtype=torch.uint8).view(kind)
        cast[(1,)](given, low, N=4096)
        most = torch.finfo(kind).max
        assert torch.equal(low.view(torch.uint8), given.float().clamp(-most, most).to(kind).view(torch.uint8)), kind
    p, q = torch.randn(32, 64).to(kind), torch.randn(64, 16).to(kind)
    exact = p.double() @ q.double()
    bound = 64 * 2.0**-24 * (p.double().abs() @ q.double().abs())
    dot[(1,)](p, q, full, M=32, N=16, K=64)
    assert bool(((full.double() - exact).abs() <= bound).all()), kind
    p.view(torch.uint8)[0, 0] = 0x80 if "fnuz" in str(kind) else 0x7F
    dot[(1,)](p, q, full, M=32, N=16, K=64)
    assert bool(full[0].isnan().all()) and not bool(full[1:].isnan().any()), kind
