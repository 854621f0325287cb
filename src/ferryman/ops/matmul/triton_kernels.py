"""Linear layers in Triton: one tiled matrix product with any two strides; the backward passes are the same kernel."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.precision import float32_precision
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import INTERPRETED, narrow, widen
from ferryman.backends.triton_rows import collapse_rows
from ferryman.errors import Unsupported


def _matmul(
    a_ptr,
    b_ptr,
    bias_ptr,
    c_ptr,
    m,
    n,
    k,
    a_row,
    a_col,
    b_row,
    b_col,
    A_DENSE_K: tl.constexpr,
    B_DENSE_K: tl.constexpr,
    EVEN_K: tl.constexpr,
    PRECISION: tl.constexpr,
    WIDE: tl.constexpr,
    XCDS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """c (m, n), dense = a (m, k) @ b (k, n) + bias (n), accumulated in float32."""
    down = tl.cdiv(m, BLOCK_M)
    across = tl.cdiv(n, BLOCK_N)
    program = tl.program_id(0)
    if XCDS > 1:
        # consecutive programs go to different XCDs, each with an L2 of its own: give every XCD a run of tiles instead
        total = down * across
        each = tl.cdiv(total, XCDS)
        full = total - (each - 1) * XCDS  # XCDs that have `each` programs; the others have one less
        xcd = program % XCDS
        program = program // XCDS + tl.where(xcd < full, xcd * each, full * each + (xcd - full) * (each - 1))
    # tiles in groups of GROUP rows, column by column: the blocks in flight share rows of a and columns of b in L2
    group = program // (GROUP * across)
    tall = tl.minimum(down - group * GROUP, GROUP)
    within = program % (GROUP * across)
    tile_m = (group * GROUP + within % tall) * BLOCK_M
    tile_n = (within // tall) * BLOCK_N

    row = tl.arange(0, BLOCK_M)
    col = tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    # past the edge: clamp along a dimension that is not the dense one (what is read twice is not stored), mask along
    # the dense one, where a clamped index would break the 16-byte loads
    a_inside = row < m - tile_m
    b_inside = col < n - tile_n
    a_place = row
    b_place = col
    if A_DENSE_K:
        a_place = tl.minimum(row, m - tile_m - 1)
    if B_DENSE_K:
        b_place = tl.minimum(col, n - tile_n - 1)
    inner = depth
    if WIDE:  # a tile spans more than 2^31 elements of a, b or c
        a_place = a_place.to(tl.int64)
        b_place = b_place.to(tl.int64)
        inner = depth.to(tl.int64)
        row = row.to(tl.int64)
    a_ptrs = a_ptr + tile_m.to(tl.int64) * a_row + (a_place[:, None] * a_row + inner[None, :] * a_col)
    b_ptrs = b_ptr + tile_n.to(tl.int64) * b_col + (inner[:, None] * b_row + b_place[None, :] * b_col)
    total_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, k, BLOCK_K):
        if EVEN_K and A_DENSE_K:
            a = tl.load(a_ptrs)
        elif A_DENSE_K:
            a = tl.load(a_ptrs, mask=(depth < k - start)[None, :], other=0.0)
        else:
            a = tl.load(a_ptrs, mask=a_inside[:, None] & (depth < k - start)[None, :], other=0.0)
        if EVEN_K and B_DENSE_K:
            b = tl.load(b_ptrs)
        elif B_DENSE_K:
            b = tl.load(b_ptrs, mask=(depth < k - start)[:, None], other=0.0)
        else:
            b = tl.load(b_ptrs, mask=(depth < k - start)[:, None] & b_inside[None, :], other=0.0)
        total_sum = tl.dot(a, b, total_sum, input_precision=PRECISION)
        a_ptrs += BLOCK_K * a_col
        b_ptrs += BLOCK_K * b_row
    if bias_ptr is not None:
        total_sum += widen(tl.load(bias_ptr + tile_n + col, mask=b_inside, other=0.0))[None, :]
    c_ptrs = c_ptr + tile_m.to(tl.int64) * n + tile_n + (row[:, None] * n + col[None, :])
    tl.store(c_ptrs, narrow(total_sum, c_ptr.dtype.element_ty), mask=a_inside[:, None] & b_inside[None, :])


# The number of tokens changes from call to call, so it must not be compiled in: it is m in the forward pass and in the
# gradient of x, and k in the gradient of the weight.
_by_rows = triton.jit(do_not_specialize=["m"])(_matmul)
_over_rows = triton.jit(do_not_specialize=["k"])(_matmul)


class Tile(NamedTuple):
    m: int
    n: int
    k: int
    warps: int
    stages: int
    options: Mapping[str, Any] = {}


_CDNA = {"waves_per_eu": 2, "matrix_instr_nonkdim": 16}
# Per family and kind of product: tiles from the largest to the smallest, the last ones for 16 rows or fewer.
# Shared memory: stages x (m + n) x k x itemsize on NVIDIA, (stages - 1) x that on AMD, inside each family's limit.
_TILES: dict[str, dict[str, tuple[Tile, ...]]] = {
    "hopper": {  # 227 KiB: sm_90, sm_100
        "half": (
            Tile(128, 256, 64, 8, 4),
            Tile(128, 128, 64, 8, 4),
            Tile(64, 64, 64, 4, 5),
            Tile(64, 32, 128, 4, 4),
            Tile(16, 64, 256, 4, 4),
            Tile(16, 32, 128, 4, 6),
        ),
        "tf32": (Tile(128, 128, 32, 8, 4), Tile(64, 64, 64, 4, 4), Tile(64, 32, 64, 4, 4), Tile(16, 32, 128, 4, 4)),
        "ieee": (Tile(64, 64, 16, 4, 3), Tile(32, 32, 32, 4, 3), Tile(16, 32, 64, 4, 3)),
    },
    "ampere": {  # 163 KiB: sm_80, sm_87
        "half": (
            Tile(128, 128, 32, 4, 4),
            Tile(64, 64, 64, 4, 4),
            Tile(64, 32, 128, 4, 4),
            Tile(16, 64, 128, 4, 4),
            Tile(16, 32, 128, 4, 6),
        ),
        "tf32": (Tile(128, 128, 32, 8, 3), Tile(64, 64, 64, 4, 3), Tile(64, 32, 64, 4, 4), Tile(16, 32, 128, 4, 4)),
        "ieee": (Tile(64, 64, 16, 4, 3), Tile(32, 32, 32, 4, 3), Tile(16, 32, 64, 4, 3)),
    },
    "ada": {  # 99 KiB: sm_86, sm_89, sm_120
        "half": (
            Tile(128, 128, 32, 4, 3),
            Tile(64, 64, 64, 4, 4),
            Tile(64, 32, 128, 4, 3),
            Tile(16, 64, 128, 4, 4),
            Tile(16, 32, 128, 4, 6),
        ),
        "tf32": (Tile(128, 128, 32, 8, 2), Tile(64, 64, 32, 4, 4), Tile(64, 32, 64, 4, 3), Tile(16, 32, 128, 4, 3)),
        "ieee": (Tile(64, 64, 16, 4, 3), Tile(32, 32, 32, 4, 3), Tile(16, 32, 64, 4, 3)),
    },
    "cdna3": {  # 64 KiB: gfx90a, gfx942
        "half": (
            Tile(256, 256, 64, 8, 2, _CDNA),
            Tile(128, 128, 128, 8, 2, _CDNA),
            Tile(64, 64, 128, 4, 2, _CDNA),
            Tile(64, 32, 128, 4, 2, _CDNA),
            Tile(16, 64, 256, 4, 2, _CDNA),
            Tile(16, 32, 256, 4, 2, _CDNA),
        ),
        "ieee": (Tile(128, 128, 32, 8, 2, _CDNA), Tile(64, 64, 64, 4, 2, _CDNA), Tile(16, 32, 128, 4, 2, _CDNA)),
    },
    "cdna4": {  # 160 KiB: gfx950
        "half": (
            Tile(256, 256, 64, 8, 2, _CDNA),
            Tile(128, 128, 128, 8, 2, _CDNA),
            Tile(64, 64, 128, 4, 3, _CDNA),
            Tile(64, 32, 128, 4, 3, _CDNA),
            Tile(16, 64, 256, 4, 2, _CDNA),
            Tile(16, 32, 256, 4, 3, _CDNA),
        ),
        "ieee": (Tile(128, 128, 32, 8, 2, _CDNA), Tile(64, 64, 64, 4, 2, _CDNA), Tile(16, 32, 128, 4, 2, _CDNA)),
    },
    "rdna": {  # 64 KiB, 32 lanes: gfx11, gfx12. 128 x 128 on 4 warps, or with 2 stages, spills
        "half": (Tile(128, 128, 32, 8, 1), Tile(64, 64, 64, 4, 2), Tile(16, 32, 128, 2, 2)),
        "ieee": (Tile(64, 64, 16, 8, 1), Tile(32, 32, 32, 4, 1), Tile(16, 32, 32, 2, 1)),
    },
}


def _family(target: Target) -> str:
    if target.vendor == "amd":
        return "rdna" if target.wave == 32 else "cdna3" if target.shared_memory < 100_000 else "cdna4"
    return "hopper" if target.shared_memory > 200_000 else "ampere" if target.shared_memory > 150_000 else "ada"


def _precision(target: Target, dtype: torch.dtype) -> str:
    # AMD's xf32 (gfx942 alone) rounds down, a bias that torch's "high" does not promise: IEEE there
    wanted = dtype == torch.float32 and float32_precision() == "tf32"
    return "tf32" if wanted and target.vendor == "nvidia" else "ieee"


def _shared_bytes(tile: Tile, vendor: str, itemsize: int) -> int:
    """What a block keeps in shared memory: the stages in flight, one less on AMD, whose next is in registers."""
    buffers = tile.stages if vendor == "nvidia" else max(1, tile.stages - 1)
    return buffers * (tile.m + tile.n) * tile.k * itemsize


@functools.cache
def _candidates(target: Target, itemsize: int, precision: str) -> tuple[Tile, ...]:
    """The family's tiles without those that cannot run on this very device (a part of a card may have less)."""
    tiles = _TILES[_family(target)]["half" if itemsize == 2 else precision]
    if target.vendor not in ("nvidia", "amd"):
        return tiles
    able = [
        t
        for t in tiles
        if t.warps * target.wave <= target.max_threads
        and _shared_bytes(t, target.vendor, itemsize) <= target.shared_memory
    ]
    # of 16 rows and of more, where only one kind fits that one serves both
    return tuple(able) or (min(tiles, key=lambda t: _shared_bytes(t, target.vendor, itemsize)),)


# Of b dense along k (a linear layer's weight), H200, bf16, 48 shapes: 128 x 128 takes 0.57 to 0.88 of 128 x 256's time
# (8192^3: 0.69, cuBLAS's own), and for 16 rows or fewer 16 x 64 x 256 takes 0.76 to 1.01 of 16 x 32 x 128's, few tiles
# or many. The gradients' products are dense the other way: at 8192^3 they take cuBLAS's time with 128 x 256.
_POOR_ALONG_K = ((128, 256), (16, 32))


def _tile(target: Target, itemsize: int, precision: str, m: int, n: int, along_k: bool = False) -> Tile:
    """The largest tile that is not mostly past the edge and leaves no unit idle; else the smallest one. ``along_k``: b
    is dense along k."""
    candidates = _candidates(target, itemsize, precision)
    if along_k and itemsize == 2 and target.arch == "sm_90":
        candidates = tuple(t for t in candidates if (t.m, t.n) not in _POOR_ALONG_K)
    usable = [t for t in candidates if (t.m == 16) == (m <= 16)] or candidates
    for tile in usable:
        if 2 * m > tile.m and triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n) >= target.units:
            return tile
    return usable[-1]


def _product(a: Tensor, b: Tensor, bias: Tensor | None, target: Target, precision: str | None = None) -> Tensor:
    """a (m, k) @ b (k, n) + bias; each operand has a dimension of stride 1. Rows change in number, widths do not:
    whichever of m and k is dense in neither operand is the number of rows."""
    (m, k), n = a.shape, b.shape[1]
    c = torch.empty(m, n, dtype=a.dtype, device=a.device)
    if INTERPRETED and a.dtype == torch.bfloat16:
        raise Unsupported("linear: Triton's interpreter multiplies bfloat16 as raw integers; use float16 or float32")
    a_dense, b_dense = a.stride(1) == 1, b.stride(0) == 1
    precision = precision or _precision(target, a.dtype)
    tile = _tile(target, a.element_size(), precision, m, n, b_dense)
    if any(t.data_ptr() % 16 or max(t.stride()) % 16 for t in (a, b)):
        # element by element, every load of a stage sits in registers with its mask: 128 deep, they spill
        tile = tile._replace(k=min(tile.k, 32))
    wide = max(tile.m * a.stride(0), tile.k * a.stride(1), tile.k * b.stride(0), tile.n * b.stride(1), tile.m * n)
    launch(
        _by_rows if a_dense else _over_rows,
        (triton.cdiv(m, tile.m) * triton.cdiv(n, tile.n),),
        a,
        b,
        bias,
        c,
        m,
        n,
        k,
        *a.stride(),
        *b.stride(),
        a_dense,
        b_dense,
        a_dense and k % tile.k == 0,
        precision,
        wide >= 2**31,
        8 if target.arch in ("gfx942", "gfx950") else 1,
        8,
        tile.m,
        tile.n,
        tile.k,
        device=a.device,
        num_warps=tile.warps,
        num_stages=tile.stages,
        **tile.options,
    )
    return c


def _rows(x: Tensor) -> Tensor:
    """x as (rows, width), dense along the width."""
    width = x.shape[-1]
    x, rows, stride = collapse_rows(x)
    return torch.as_strided(x, (rows, width), (stride, 1))


def _matrix(w: Tensor) -> Tensor:
    return w if 1 in w.stride() else w.contiguous()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, target: Target) -> Tensor:
    shape = (*x.shape[:-1], weight.shape[0])
    if x.numel() == 0 or weight.numel() == 0:
        y = torch.zeros(shape, dtype=x.dtype, device=x.device)
        return y if bias is None else y.copy_(bias.expand(shape))
    bias = None if bias is None else bias.contiguous()
    return _product(_rows(x), _matrix(weight).t(), bias, target).view(shape)


def linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, need_x: bool, need_weight: bool, target: Target
) -> tuple[Tensor, Tensor, Tensor]:
    nothing = torch.empty(0, dtype=x.dtype, device=x.device)
    empty = grad.numel() == 0 or x.numel() == 0
    grad_x = grad_weight = grad_bias = nothing
    if need_x:
        if empty or weight.numel() == 0:
            grad_x = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
        else:
            grad_x = _product(_rows(grad), _matrix(weight), None, target).view(x.shape)
    if need_weight:
        if empty:
            grad_weight = torch.zeros(weight.shape, dtype=weight.dtype, device=x.device)
        else:
            grad_weight = _product(_rows(grad).t(), _rows(x), None, target)
    if bias is not None:
        rows = math.prod(grad.shape[:-1])  # reshape(-1, 0) would be ambiguous
        grad_bias = grad.reshape(rows, weight.shape[0]).sum(0, dtype=torch.float32).to(bias.dtype)
    return grad_x, grad_weight, grad_bias


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """Decoding to prefill rows, projections of 4k models and a vocabulary, and shapes off every tile."""
    kind = getattr(torch, dtype)

    def calls(rows: int, inputs: int, outputs: int) -> None:
        x = torch.empty(rows, inputs, dtype=kind, device="meta")
        w = torch.empty(outputs, inputs, dtype=kind, device="meta")
        grad = torch.empty(rows, outputs, dtype=kind, device="meta")
        linear(x, w, w[:, 0], target)
        linear(x, w, None, target)
        if kind == torch.float32 and target.vendor == "nvidia":
            _product(x, w.t(), None, target, "tf32")
        linear_backward(grad, x, w, None, True, True, target)

    shapes = [(r, k, n) for r in (1, 16, 60, 300, 8192) for k, n in ((4096, 4096), (4096, 14336))]
    shapes += [(512, 4096, 128256), (61, 257, 131), (9, 1, 17), (33, 65, 1)]  # sizes of 1 are compiled in
    kernels = recorded(lambda s=s: calls(*s) for s in shapes)  # type: ignore[misc]
    # the float32 tile spills two words where ptxas keeps six blocks of it on an SM
    allowed = 8 if dtype == "float32" and target.arch in ("sm_87", "sm_89") else 0
    return [replace(one, spills_allowed=allowed) for one in kernels]
