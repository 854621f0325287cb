"""Triton's matrix product and elementwise functions as probes can ask them. Importing this imports triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra import libdevice

from ferryman.backends.triton import launch
from ferryman.porting.fingerprint.formats import FORMATS
from ferryman.porting.fingerprint.routes import Product, Route, refusable

_BLOCK_K = 64
_PROMOTE = 64  # promoted fp8: every so many products the partial sum goes to float32 registers
_BLOCK = 1024


@triton.jit
def product_kernel(
    left,
    right,
    out,
    K: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PROMOTE: tl.constexpr,
    INTEGER: tl.constexpr,
):
    rows = tl.arange(0, TILE)
    depth = tl.arange(0, BLOCK_K)
    if INTEGER:
        total = tl.zeros((TILE, TILE), tl.int32)
    else:
        total = tl.zeros((TILE, TILE), tl.float32)
    for k in range(0, K, BLOCK_K):
        a = tl.load(left + rows[:, None] * K + (k + depth)[None, :])
        b = tl.load(right + rows[None, :] * K + (k + depth)[:, None])
        if INTEGER:
            total = tl.dot(a, b, total, out_dtype=tl.int32)
        else:
            total = tl.dot(a, b, total, input_precision=PRECISION, max_num_imprecise_acc=PROMOTE)
    tl.store(out + rows[:, None] * TILE + rows[None, :], total)


@triton.jit
def elementwise_kernel(x, y, z, out, n, OP: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < n
    a = tl.load(x + at, mask, other=1.0)
    b = tl.load(y + at, mask, other=1.0)
    c = tl.load(z + at, mask, other=1.0)
    if OP == "exp":
        r = tl.exp(a)
    elif OP == "exp2":
        r = tl.exp2(a)
    elif OP == "log":
        r = tl.log(a)
    elif OP == "rsqrt":
        r = tl.rsqrt(a)
    elif OP == "sqrt":
        r = tl.sqrt(a)
    elif OP == "div":
        r = a / b
    elif OP == "tanh":
        r = libdevice.tanh(a)
    elif OP == "add":
        r = a + b
    elif OP == "mul":
        r = a * b
    elif OP == "fma":
        r = tl.fma(a, b, c)
    elif OP == "contraction":
        r = a * b + c
    else:
        r = a
    tl.store(out + at, r.to(out.dtype.element_ty), mask)


def product(precision: str, promote: int | None, result: torch.dtype = torch.float32) -> Product:
    def run(left: Tensor, right: Tensor) -> Tensor:
        out = torch.empty(left.shape[0], right.shape[0], dtype=result, device=left.device)
        launch(
            product_kernel,
            (1,),
            left.contiguous(),
            right.contiguous(),
            out,
            device=left.device,
            K=left.shape[1],
            TILE=left.shape[0],
            BLOCK_K=_BLOCK_K,
            PRECISION=precision,
            PROMOTE=promote,
            INTEGER=result == torch.int32,
            num_warps=8,
            num_stages=1,
        )
        return out

    return run


def routes(device: torch.device) -> list[Route]:
    """tl.dot in every format. fp8 as it is by default (on Hopper, without promotion) and promoted every 64 products."""
    all_routes = [
        Route("triton ieee", FORMATS["float32"], torch.float32, device, product("ieee", None)),
        Route("triton", FORMATS["tf32"], torch.float32, device, product("tf32", None)),
        Route("triton", FORMATS["float16"], torch.float32, device, product("ieee", None)),
        Route("triton", FORMATS["bfloat16"], torch.float32, device, product("ieee", None)),
    ]
    for name in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"):
        all_routes.append(Route("triton", FORMATS[name], torch.float32, device, product("ieee", None)))
        all_routes.append(Route("triton promoted", FORMATS[name], torch.float32, device, product("ieee", _PROMOTE)))
    return all_routes


def integer(device: torch.device) -> Product:
    """int8 products through tl.dot."""
    inner = product("ieee", None, torch.int32)

    def run(left: Tensor, right: Tensor) -> Tensor:
        with refusable(device):
            return inner(left.to(device), right.to(device))

    return run


def elementwise(device: torch.device, op: str, x: Tensor, y: Tensor, z: Tensor, result: torch.dtype) -> Tensor:
    """``op`` on tensors of one shape and dtype; a name that is no function is a cast to ``result``."""
    sides = [t.to(device).contiguous() for t in (x, y, z)]
    out = torch.empty(x.shape, dtype=result, device=device)
    grid = (triton.cdiv(x.numel(), _BLOCK),)
    launch(elementwise_kernel, grid, *sides, out, x.numel(), device=device, OP=op, BLOCK=_BLOCK, num_warps=4)
    return out.cpu()
