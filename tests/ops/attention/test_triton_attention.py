"""Triton attention: numerics under the interpreter against a float64 evaluation, and ahead-of-time compilation.

A process either interprets Triton or compiles it, so both run in worker processes: this file, run as a script.
float32 and float16 only: the interpreter multiplies bfloat16 wrongly in tl.dot.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.dispatch import registry
from ferryman.ops.attention.arguments import stored_by_rows
from ferryman.porting.inputs.fills import SUBNORMAL
from ferryman.porting.judging.metrics import UNIT
from tests import compiled
from tests.bounded import U32

CPU = Target("cpu", "cpu", 1, 1 << 20, 1024, 8, 1 << 20)


def _nvidia(arch: str, shared: int, units: int) -> Target:
    features = frozenset({"wgmma"} if arch == "sm_90" else ())
    return Target(arch, "nvidia", 32, shared, 1024, units, 50 << 20, features)


def _amd(arch: str, shared: int, units: int, wave: int = 64) -> Target:
    return Target(arch, "amd", wave, shared, 1024, units, 4 << 20)


TARGETS = {
    target.arch: target
    for target in (
        CPU,
        _nvidia("sm_80", 166912, 108),
        _nvidia("sm_87", 166912, 16),
        _nvidia("sm_89", 101376, 58),
        _nvidia("sm_90", 232448, 132),
        _nvidia("sm_100", 232448, 148),
        _amd("gfx90a", 65536, 104),
        _amd("gfx942", 65536, 304),
        _amd("gfx950", 163840, 256),
        _amd("gfx1100", 65536, 96, wave=32),
    )
}


@dataclass(frozen=True)
class Shape:
    batch: int = 1
    heads: int = 2
    kv_heads: int = 1
    queries: int = 70
    keys: int = 70
    dim: int = 64
    dtype: str = "float32"
    causal: bool = False
    scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    mask: str | None = None  # "bool", "float", and the way it is broadcast
    layout: str = "bhsd"
    target: str = "cpu"
    offset: float = 0.0  # added to q and k: large scores


CASES: dict[str, Shape] = {
    "plain": Shape(batch=2),
    "plain-f16": Shape(batch=2, dtype="float16"),
    "causal": Shape(causal=True, queries=97, keys=97),
    "causal-f16": Shape(causal=True, queries=97, keys=97, dtype="float16"),
    "causal-more-keys": Shape(causal=True, queries=37, keys=101),
    "causal-fewer-keys": Shape(causal=True, queries=101, keys=37),
    "causal-fewer-keys-f16": Shape(causal=True, queries=101, keys=37, dtype="float16"),
    "window-causal": Shape(causal=True, window=19, queries=131, keys=131),
    "window-causal-one": Shape(causal=True, window=1, queries=67, keys=67),
    "window-causal-longer-keys": Shape(causal=True, window=40, queries=50, keys=131, dtype="float16"),
    "window-causal-fewer-keys": Shape(causal=True, window=20, queries=131, keys=50),
    "window-huge": Shape(causal=True, window=2**40, queries=40, keys=40),
    "window": Shape(window=23, queries=131, keys=131),
    "window-one": Shape(window=1, queries=67, keys=67),
    "window-fewer-keys": Shape(window=20, queries=131, keys=50),
    "window-more-keys": Shape(window=33, queries=50, keys=131, dtype="float16"),
    "softcap": Shape(softcap=5.0, causal=True),
    "softcap-large": Shape(softcap=50.0, offset=1.0, dtype="float16"),
    "softcap-window": Shape(softcap=3.0, causal=True, window=30, queries=90, keys=90),
    "mask-bool": Shape(mask="bool full"),
    "mask-bool-row": Shape(batch=2, mask="bool row", dtype="float16"),
    "mask-bool-head-strided": Shape(batch=2, mask="bool strided", causal=True),
    "mask-float": Shape(batch=2, mask="float full", dtype="float16"),
    "mask-float-2d": Shape(mask="float 2d", causal=True),
    "mask-float-column": Shape(mask="float column"),
    "mask-softcap-window": Shape(mask="float full", softcap=4.0, causal=True, window=31, queries=77, keys=80),
    "gqa-8-1": Shape(heads=8, kv_heads=1, causal=True, queries=45, keys=77),
    "mha": Shape(heads=3, kv_heads=3, dtype="float16", causal=True),
    "d80": Shape(dim=80, causal=True),
    "d96-f16": Shape(dim=96, dtype="float16"),
    "d72": Shape(dim=72, causal=True, dtype="float16"),
    "d1": Shape(dim=1, queries=33, keys=33),
    "d5": Shape(dim=5, queries=33, keys=40, causal=True),
    "d128": Shape(dim=128, dtype="float16", causal=True),
    "d256": Shape(dim=256, queries=40, keys=50, causal=True),
    "bshd": Shape(batch=2, layout="bshd", causal=True, dtype="float16"),
    "qkv-packed": Shape(batch=2, layout="packed", heads=2, kv_heads=2, dim=80),
    "batch-expanded": Shape(batch=2, layout="expanded"),
    "misaligned": Shape(layout="misaligned", dtype="float16"),
    "decode": Shape(queries=1, keys=83, causal=True),
    "decode-f16": Shape(batch=3, queries=1, keys=83, causal=True, heads=8, kv_heads=2, dtype="float16"),
    "decode-three": Shape(queries=3, keys=90, causal=True, heads=8, kv_heads=2),
    "decode-split": Shape(queries=1, keys=1111, causal=True, heads=4, kv_heads=1, dim=80, dtype="float16"),
    "decode-split-window": Shape(queries=2, keys=1111, causal=True, window=300, heads=4, kv_heads=2),
    "decode-split-mask": Shape(queries=2, keys=1030, mask="bool full", softcap=3.0, heads=2, kv_heads=1),
    "decode-three-f16": Shape(batch=2, queries=3, keys=90, causal=True, heads=8, kv_heads=2, dtype="float16"),
    "decode-full-f16": Shape(queries=2, keys=64, heads=4, kv_heads=2, dtype="float16", dim=128, layout="bshd"),
    "decode-fewer-keys-f16": Shape(queries=4, keys=2, causal=True, heads=4, kv_heads=1, dtype="float16"),
    "decode-split-window-f16": Shape(
        queries=2, keys=1111, causal=True, window=300, heads=4, kv_heads=2, dtype="float16"
    ),
    "decode-window-f16": Shape(queries=5, keys=77, window=7, heads=3, kv_heads=1, dim=72, dtype="float16"),
    "decode-fold-f16": Shape(
        target="gfx942", queries=5, keys=333, causal=True, window=70, heads=3, kv_heads=1, dtype="float16"
    ),
    "decode-gfx942-f16": Shape(
        target="gfx942", queries=3, keys=1100, causal=True, heads=4, kv_heads=1, dim=80, dtype="float16"
    ),
    "decode-sm90-f16": Shape(
        target="sm_90", batch=2, queries=1, keys=1100, causal=True, heads=8, kv_heads=2, dim=128, dtype="float16"
    ),
    "one-by-one": Shape(queries=1, keys=1),
    "one-by-one-f16": Shape(queries=1, keys=1, dtype="float16"),
    "scale": Shape(scale=0.3, causal=True),
    "scale-negative": Shape(scale=-0.2, causal=True, softcap=2.0),
    "scale-zero": Shape(scale=0.0),
    "large-scores": Shape(offset=3.0, causal=True),
    "tiles-sm90": Shape(
        target="sm_90", heads=2, kv_heads=1, queries=300, keys=333, dim=128, dtype="float16", causal=True
    ),
    "tiles-sm80-window": Shape(target="sm_80", heads=2, kv_heads=2, queries=300, keys=300, window=150, dtype="float16"),
    "tiles-gfx942": Shape(target="gfx942", batch=3, heads=4, kv_heads=2, queries=140, keys=150, dim=80, causal=True),
    "tiles-gfx1100": Shape(
        target="gfx1100", heads=3, kv_heads=3, queries=70, keys=90, window=45, causal=True, dtype="float16"
    ),
    # AMD's form of the bounds (FOLD), on tiles that their edges cross
    "fold-causal-fewer-keys": Shape(target="gfx942", causal=True, queries=101, keys=37, dtype="float16"),
    "fold-causal-more-keys": Shape(target="gfx942", causal=True, queries=37, keys=101),
    "fold-window-causal": Shape(target="gfx942", causal=True, window=19, queries=131, keys=131, dtype="float16"),
    "fold-window-one": Shape(target="gfx942", causal=True, window=1, queries=67, keys=67),
    "fold-window": Shape(target="gfx942", window=23, queries=131, keys=131),
    "fold-window-fewer-keys": Shape(target="gfx942", window=20, queries=131, keys=50),
    "fold-window-more-keys": Shape(target="gfx942", causal=True, window=40, queries=50, keys=131, dtype="float16"),
    "fold-mask-bool": Shape(target="gfx942", batch=2, mask="bool strided", causal=True),
    "fold-mask-row": Shape(target="gfx942", batch=2, mask="bool row", dtype="float16"),
    "fold-mask-softcap-window": Shape(
        target="gfx950", mask="float full", softcap=4.0, causal=True, window=31, queries=77, keys=80
    ),
    "fold-mask-column": Shape(target="gfx1100", mask="float column", dim=80, dtype="float16"),
    "fold-decode-window": Shape(target="gfx942", queries=2, keys=1111, causal=True, window=300, heads=4, kv_heads=2),
    "fold-decode-mask": Shape(target="gfx942", queries=2, keys=1030, mask="bool full", softcap=3.0),
}


# ---------------------------------------------------------------------------------------------- the meaning, in float64


def _visible(shape: Shape) -> Tensor:
    i = torch.arange(shape.queries)[:, None] + (shape.keys - shape.queries)
    j = torch.arange(shape.keys)[None, :]
    seen = torch.ones(shape.queries, shape.keys, dtype=torch.bool)
    if shape.causal:
        seen &= j <= i
    if shape.window is not None:
        seen &= (j > i - shape.window) if shape.causal else ((j - i).abs() < shape.window)
    return seen


def _meaning(
    shape: Shape, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(out, lse, P, the error of a float32 score relative to U32); k and v with repeated heads."""
    scale = shape.dim**-0.5 if shape.scale is None else shape.scale
    raw = q @ k.transpose(-1, -2) * scale
    scores = raw
    error = 6 * math.sqrt(shape.dim) * (q.abs() @ k.abs().transpose(-1, -2)) * abs(scale) + 4 * raw.abs()
    if shape.softcap > 0:
        scores = shape.softcap * torch.tanh(raw / shape.softcap)
        error = error + 6 * scores.abs()
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -math.inf)
    elif mask is not None:
        scores = scores + mask.double()
        error = error + 2 * mask.double().abs().nan_to_num(posinf=0.0) + 2 * scores.abs().nan_to_num(posinf=0.0)
    scores = scores.masked_fill(~_visible(shape), -math.inf)
    top = scores.detach().amax(-1, keepdim=True)
    top = torch.where(top == -math.inf, 0.0, top)
    weight = torch.exp(scores - top)
    total = weight.sum(-1, keepdim=True)
    empty = total == 0
    p = weight / torch.where(empty, 1.0, total)
    lse = torch.where(empty, -math.inf, top + torch.log(torch.where(empty, 1.0, total))).squeeze(-1)
    seen_error = torch.where(scores == -math.inf, 0.0, error).amax(-1, keepdim=True)
    return p @ v, lse, p, seen_error.detach()


# ----------------------------------------------------------------------------------------------------------- the worker


def _layout(x: Tensor, how: str) -> Tensor:
    """The same values in another storage."""
    if how == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    if how == "packed":
        b, h, s, d = x.shape
        wide = torch.full((b, s, h, 3 * d), math.nan, dtype=x.dtype)
        wide[..., d : 2 * d] = x.transpose(1, 2)
        return wide[..., d : 2 * d].transpose(1, 2)
    if how == "misaligned":
        flat = torch.full((x.numel() + 1,), math.nan, dtype=x.dtype)
        flat[1:] = x.reshape(-1)
        return flat[1:].view(x.shape)
    if how == "expanded":
        return x[:1].expand(x.shape)
    return x


def _mask(shape: Shape, generator: torch.Generator) -> Tensor | None:
    if shape.mask is None:
        return None
    kind, how = shape.mask.split()
    full = (shape.batch, shape.heads, shape.queries, shape.keys)
    size = {
        "full": full,
        "row": (shape.batch, 1, 1, shape.keys),
        "2d": full[2:],
        "column": (1, 1, shape.queries, 1),
        "strided": (shape.batch, 1, shape.keys, 2 * shape.queries),
    }[how]
    if kind == "bool":
        mask = torch.rand(size, generator=generator) < 0.6
        if how == "strided":
            return mask[..., ::2].transpose(-1, -2)
        if how == "full":
            mask[:, :, 0] = False  # rows that see nothing
        return mask
    mask = torch.randn(size, generator=generator)
    mask[torch.rand(size, generator=generator) < 0.2] = -math.inf
    return mask.to(getattr(torch, shape.dtype))


def _inputs(shape: Shape) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2024)
    dtype = getattr(torch, shape.dtype)

    def make(heads: int, length: int) -> Tensor:
        size = (shape.batch, heads, length, shape.dim)
        return _layout((torch.randn(size, generator=generator) + shape.offset).to(dtype), shape.layout)

    q, k, v = make(shape.heads, shape.queries), make(shape.kv_heads, shape.keys), make(shape.kv_heads, shape.keys)
    grad_out = make(shape.heads, shape.queries)
    grad_lse = torch.randn((shape.batch, shape.heads, shape.queries), generator=generator)
    return q, k, v, _mask(shape, generator), grad_out, grad_lse


PLAIN = (None, None, None, 0.0, None)  # no sinks, no key range, no chunks, no dropout


def _worst(name: str, got: Tensor, want: Tensor, bound: Tensor) -> float:
    """The worst error in units of its bound; infinite where a NaN, an Inf or a bound is out of place."""
    assert got.shape == want.shape, (name, got.shape, want.shape)
    got = got.double()
    special = ~want.isfinite() | ~got.isfinite()
    same = (want == got) | (want.isnan() & got.isnan())
    if bool((special & ~same).any()):
        return math.inf
    ratio = torch.where(special, 0.0, (got - want).abs() / bound)
    ratio = torch.where((got == want) & ~special, 0.0, ratio)
    return float(ratio.max()) if ratio.numel() else 0.0


def _measure(name: str, shape: Shape) -> dict[str, float]:
    from ferryman.ops.attention.triton_kernels import attention, attention_backward

    q, k, v, mask, grad_out, grad_lse = _inputs(shape)
    dtype, target = q.dtype, TARGETS[shape.target]
    tensors = [x for x in (q, k, v, mask, grad_out, grad_lse) if x is not None]
    before = [x.clone() for x in tensors]
    options = (shape.causal, shape.scale, shape.window, shape.softcap, mask, *PLAIN)
    later = (*options[:-2], False, *options[-2:])
    out, lse = attention(q, k, v, *options, target)
    assert out.transpose(1, 2).is_contiguous() and out.dtype == dtype and lse.dtype == torch.float32
    backward = (grad_out, grad_lse, q, k, v, out, lse, *later, target)
    grads = attention_backward(*backward)[:3]
    plain = attention_backward(grad_out, None, *backward[2:])[:3] if name in REPEATED else None
    by_rows = stored_by_rows(q, k, v)
    assert all((g.transpose(1, 2) if by_rows else g).is_contiguous() and g.dtype == dtype for g in grads)
    for _ in range(2 if name in REPEATED else 0):
        again = attention(q, k, v, *options, target)
        assert torch.equal(again[0], out) and torch.equal(again[1], lse)
        assert all(torch.equal(a, b) for a, b in zip(attention_backward(*backward)[:3], grads, strict=True))
    for x, y in zip(tensors, before, strict=True):
        assert torch.equal(x.nan_to_num(7.0), y.nan_to_num(7.0)), "an input was changed"

    group = shape.heads // shape.kv_heads
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    q64, k64, v64 = leaves[0], *(x.repeat_interleave(group, 1) for x in leaves[1:])
    want, want_lse, p, score_error = _meaning(shape, q64, k64, v64, mask)
    u = UNIT[dtype]
    # half of the smallest subnormal where P is rounded
    tiny = SUBNORMAL[dtype] / (1 if dtype == torch.float32 else 2)
    rounded = u if dtype != torch.float32 else 0.0  # P and dS in the input dtype
    s = 2 * U32 * score_error + 8 * U32  # relative error of P: its score, the row's sum, exp2
    long_keys, long_queries = 6 * math.sqrt(shape.keys) * U32, 6 * math.sqrt(shape.queries * group) * U32
    with torch.no_grad():
        size = p @ v64.abs()
        flush = tiny * v64.abs().sum(-2, keepdim=True) if rounded else 0.0  # P below the smallest subnormal
        out_error = (rounded + s + long_keys) * size + flush
        result = {"out": _worst("out", out, want, u * want.abs() + out_error + tiny)}
        lse_bound = 4 * U32 * want_lse.abs().nan_to_num(posinf=0.0) + s.squeeze(-1)
        result["lse"] = _worst("lse", lse, want_lse, lse_bound)
    go, gl = grad_out.double(), grad_lse.double()
    seen_lse = torch.where(want_lse == -math.inf, 0.0, want_lse)
    for label, got, weight in (("", grads, 1.0), ("no-lse-", plain, 0.0)):
        if got is None:
            continue
        wants = torch.autograd.grad((want * go).sum() + weight * (seen_lse * gl).sum(), leaves, retain_graph=True)
        with torch.no_grad():
            scale = abs(shape.dim**-0.5 if shape.scale is None else shape.scale)
            dp = go @ v64.transpose(-1, -2)
            delta = (want * go).sum(-1, keepdim=True) - weight * gl[..., None]
            ds = p * (dp - delta).abs()
            delta_error = (u * want.abs() + out_error + tiny + 6 * math.sqrt(shape.dim) * U32 * want.abs()) * go.abs()
            dp_error = (6 * math.sqrt(shape.dim) + 2) * U32 * (go.abs() @ v64.abs().transpose(-1, -2))
            ds_error = (rounded + s + 8 * U32) * ds + p * (
                dp_error + delta_error.sum(-1, keepdim=True) + U32 * delta.abs()
            )
            ds_error = ds_error + (tiny if rounded else 0.0) * (p > 0)
            p_error = (rounded + s + long_queries) * p + (tiny if rounded else 0.0)
            dq_bound = scale * ((ds_error + long_keys * ds) @ k64.abs())
            dk_bound = scale * ((ds_error + long_queries * ds).transpose(-1, -2) @ q64.abs())
            dv_bound = p_error.transpose(-1, -2) @ go.abs()
            grouped = (shape.batch, shape.kv_heads, group, shape.keys, shape.dim)
            bounds = (dq_bound, dk_bound.view(grouped).sum(2), dv_bound.view(grouped).sum(2))
            for tensor, g, w, bound in zip(("grad_q", "grad_k", "grad_v"), got, wants, bounds, strict=True):
                result[label + tensor] = _worst(tensor, g, w, u * w.abs() + bound + tiny)
    return result


REPEATED = {"causal-f16", "gqa-8-1", "decode-split", "window"}


def _check_planted() -> None:
    """NaN and Inf stay where the meaning puts them."""
    from ferryman.ops.attention.triton_kernels import attention, attention_backward

    plants = (("q", math.nan), ("k", math.nan), ("v", math.nan), ("q", math.inf), ("k", -math.inf), ("v", -math.inf))
    for dtype in ("float32", "float16"):
        for causal, queries in ((True, 37), (False, 37), (True, 1)):
            for what, value in plants:
                shape = Shape(heads=4, kv_heads=2, queries=queries, keys=37, causal=causal, dtype=dtype)
                q, k, v, _, grad_out, _ = _inputs(shape)
                planted = {"q": q, "k": k, "v": v}[what]
                planted[0, 1, 0 if what != "k" else 20, 3] = value  # key 0 of v is visible to every row
                options = (causal, None, None, 0.0, None, *PLAIN)
                out, lse = attention(q, k, v, *options, CPU)
                leaves = [x.double().requires_grad_() for x in (q, k, v)]
                wide = (leaves[0], *(x.repeat_interleave(2, 1) for x in leaves[1:]))
                want, want_lse, *_ = _meaning(shape, *wide, None)
                # an infinite score without a NaN: the sum is infinite, though each weight is inf/inf
                scores = (wide[0] @ wide[1].transpose(-1, -2)).masked_fill(~_visible(shape), -math.inf)
                want_lse = torch.where(scores.amax(-1) == math.inf, math.inf, want_lse)
                for got, expected in ((out, want), (lse, want_lse)):
                    assert torch.equal(got.isnan(), expected.isnan()), (shape, what, value)
                    assert torch.equal(got.isinf(), expected.isinf()), (shape, what, value)
                # where masked, the definition's 0 * NaN depends on how it is written
                if math.isnan(value) and not causal:
                    later = (*options[:-2], False, *options[-2:])
                    grads = attention_backward(grad_out, None, q, k, v, out, lse, *later, CPU)[:3]
                    wants = torch.autograd.grad((want * grad_out.double()).sum(), leaves)
                    for g, w in zip(grads, wants, strict=True):
                        assert torch.equal(g.isnan(), w.isnan()), (shape, what)


def _check_poison() -> None:
    """What comes later changes no bit of what came before; a NaN key that a mask hides changes nothing at all."""
    from ferryman.ops.attention.triton_kernels import attention

    for dtype in ("float32", "float16"):
        q, k, v, *_ = _inputs(Shape(dtype=dtype))
        out, lse = attention(q, k, v, True, None, None, 0.0, None, *PLAIN, CPU)
        k[:, :, 45:], v[:, :, 45:] = math.nan, 1e4
        again, again_lse = attention(q, k, v, True, None, None, 0.0, None, *PLAIN, CPU)
        assert torch.equal(again[:, :, :45], out[:, :, :45]) and torch.equal(again_lse[..., :45], lse[..., :45])
        assert bool(again[:, :, 45:].isnan().all())
        keep = torch.arange(70) < 45
        masked, masked_lse = attention(q, k, v, False, None, None, 0.0, keep, *PLAIN, CPU)
        short, short_lse = attention(q, k[:, :, :45], v[:, :, :45], False, None, None, 0.0, None, *PLAIN, CPU)
        assert torch.equal(masked, short) and torch.equal(masked_lse, short_lse)


def _check_empty() -> None:
    """Nothing to attend to, or nobody to attend: right shapes, zeros and -inf, no launch."""
    from ferryman.ops.attention.triton_kernels import attention, attention_backward

    for batch, heads, queries, keys in ((0, 4, 5, 5), (2, 0, 5, 5), (2, 4, 0, 5), (2, 4, 5, 0), (2, 4, 0, 0)):
        q = torch.randn(batch, heads, queries, 16)
        k, v = torch.randn(2, batch, heads // 2, keys, 16)
        if heads == 0:
            k, v = torch.randn(2, batch, 0, keys, 16)
        out, lse = attention(q, k, v, True, None, None, 0.0, None, *PLAIN, CPU)
        assert out.shape == q.shape and bool((out == 0).all()) and bool((lse == -math.inf).all())
        grads = attention_backward(
            torch.ones_like(q), None, q, k, v, out, lse, True, None, None, 0.0, None, *PLAIN[:3], False, *PLAIN[3:], CPU
        )[:3]
        for g, x in zip(grads, (q, k, v), strict=True):
            assert g.shape == x.shape and bool((g == 0).all())


def _check_expanded_gradient() -> None:
    """out.sum().backward() brings a gradient whose strides are all 0."""
    from ferryman.ops.attention.triton_kernels import attention, attention_backward

    q, k, v, *_ = _inputs(Shape(causal=True))
    out, lse = attention(q, k, v, True, None, None, 0.0, None, *PLAIN, CPU)
    more = (q, k, v, out, lse, True, None, None, 0.0, None, *PLAIN[:3], False, *PLAIN[3:], CPU)
    expanded = attention_backward(torch.ones(()).expand(out.shape), torch.ones(()).expand(lse.shape), *more)
    dense = attention_backward(torch.ones(out.shape), torch.ones(lse.shape), *more)
    assert all(torch.equal(a, b) for a, b in zip(expanded, dense, strict=True))


def _check_shares() -> None:
    """A group's query heads shared among programs, the last with fewer, give what one program gives."""
    from ferryman.ops.attention import triton_kernels

    options = (True, None, 40, 0.0, None)
    for layout in ("heads", "rows"):
        shape = (2, 14, 70, 24) if layout == "heads" else (2, 70, 14, 24)
        q, grad_out = (torch.randn(shape) for _ in range(2))
        k, v = (x[:, :2] if layout == "heads" else x[:, :, :2] for x in torch.randn(2, *shape))
        q, k, v, grad_out = (x if layout == "heads" else x.transpose(1, 2) for x in (q, k, v, grad_out))
        out, lse = triton_kernels.attention(q, k, v, *options, *PLAIN, CPU)
        given = (grad_out, None, q, k, v, out, lse, *options, *PLAIN[:3], False, *PLAIN[3:], CPU)
        results = []
        for share in (7, 3, 1):
            with mock.patch.object(triton_kernels, "_heads_of_a_program", lambda *_, share=share: share):
                results.append(triton_kernels.attention_backward(*given)[:3])
        for other in results[1:]:
            assert torch.equal(other[0], results[0][0])
            for mine, one in zip(other[1:], results[0][1:], strict=True):
                assert mine.shape == one.shape and mine.stride() == one.stride()
                # seven sums of a head in another order, and their own rounding
                assert float((mine - one).abs().max()) <= 16 * 2**-24 * float(one.abs().max())


CHECKS = {
    "shares": _check_shares,
    "planted": _check_planted,
    "poison": _check_poison,
    "empty": _check_empty,
    "expanded": _check_expanded_gradient,
}


def _interpret(names: list[str]) -> dict[str, Any]:
    # fills torch.empty with NaN, so that an element which no kernel writes shows
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    results: dict[str, Any] = {}
    for name in names:
        start = time.perf_counter()
        try:
            if name in CASES:
                results[name] = _measure(name, CASES[name])
            else:
                CHECKS[name]()
                results[name] = {}
        except Exception as error:  # noqa: BLE001 - reported to the process that asserts on it
            import traceback

            results[name] = {"error": f"{error!r}\n{traceback.format_exc()}"}
        results[name]["seconds"] = time.perf_counter() - start
    return results


def _ptxas_says(ptx: str) -> str:
    import triton

    with tempfile.NamedTemporaryFile("w", suffix=".ptx") as file:
        file.write(ptx)
        file.flush()
        command = [triton.knobs.nvidia.ptxas.path, "-v", "--gpu-name=sm_90a", file.name, "-o", os.devnull]
        return subprocess.run(command, check=True, capture_output=True, text=True, timeout=60).stderr


_FACTS = ("HEAD_DIM", "CAUSAL", "HAS_WINDOW", "HAS_CAP", "MASK", "PACK", "FUSED")


def _specialisations(arch: str, dtype: str, dims: tuple[int, ...]) -> list[Any]:
    """What all lines of the menu that Triton has launch."""
    modules = dict.fromkeys(
        line.where.partition(":")[0]
        for op in ("attention", "attention_backward")
        for line in registry.asked(op, ("triton",))
    )
    return [
        one for name in modules for one in importlib.import_module(name).specialisations(TARGETS[arch], dtype, dims)
    ]


def _compile(
    arch: str, dtype: str, dims: tuple[int, ...], most: int | None = None, hopper: bool = True
) -> list[dict[str, Any]]:
    """A row for each kernel. One that a row of ferryman.yaml compiles is not compiled here; but of Hopper's own kernels
    ptxas is asked here, where ``hopper``. most: so many of the tiles' forward alone."""
    from ferryman.backends.triton import TritonBackend
    from ferryman.errors import CompileError

    known = ROWS.get(arch) if most is None else None
    by_row = {} if known is None else compiled.by_row(known, "triton", ["attention"], dtype)
    rows = []
    wanted = [one for one in _specialisations(arch, dtype, dims) if most is None or one.name == "attention_forward"]
    for one in wanted[:most]:
        start = time.perf_counter()
        facts = {name: one.constexprs.get(name) for name in _FACTS}
        row: dict[str, Any] = {"kernel": one.name, "arch": arch, "dtype": dtype, **facts}
        row["allowed"] = one.spills_allowed
        row["by row"] = repr(one) in by_row and by_row[repr(one)].spills_allowed <= one.spills_allowed
        rows.append(row)
        if row["by row"] and not (hopper and one.name.endswith("_hopper")):
            continue
        try:
            image = TritonBackend().compile(one, None, arch, TARGETS[arch])
            # Triton replaces a kernel that exceeds tensor memory by a trap, and says nothing
            row |= {**image.resources, "traps": image.log.count("trap;")}
            if one.name.endswith("_hopper"):
                row["ptxas"] = _ptxas_says(image.log)
        except CompileError as error:
            row["error"] = str(error)[-2000:]
        row["seconds"] = round(time.perf_counter() - start, 1)
        sys.stderr.write(json.dumps(row) + "\n")
    return rows


def _worker(arguments: list[str], interpret: bool, timeout: float) -> Any:
    root = Path(__file__).resolve().parents[3]
    paths = os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "TRITON_INTERPRET": "1" if interpret else "0", "PYTHONPATH": paths}
    command = [sys.executable, str(Path(__file__).resolve()), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


# ten cases a test: one process each would spend 3 s importing, one for all would outlast the limit of a single test;
# from the sixtieth on they are other devices' tiles and folds
@pytest.mark.parametrize(
    "first", [pytest.param(n, marks=[pytest.mark.slow] if n >= 60 else []) for n in range(0, len(CASES), 10)]
)
def test_within_bounds_of_float64(first: int) -> None:
    cases = list(CASES)[first : first + 10]
    ratios = _worker(["interpret", *cases], True, 280)
    for case in cases:
        errors = {name: ratio for name, ratio in ratios[case].items() if name != "seconds"}
        assert "error" not in errors, (case, errors["error"])
        prefixes = ("", "no-lse-") if case in REPEATED else ("",)
        assert set(errors) == {"out", "lse"} | {f"{prefix}grad_{x}" for prefix in prefixes for x in "qkv"}, case
        assert all(ratio <= 1.0 for ratio in errors.values()), (case, errors)


def test_properties() -> None:
    results = _worker(["interpret", *CHECKS], True, 280)
    assert {name: result["error"] for name, result in results.items() if "error" in result} == {}
    assert list(results) == list(CHECKS)


def _check_compiled(rows: list[dict[str, Any]], arch: str, dtype: str, dims: tuple[int, ...]) -> None:
    assert not [row for row in rows if "error" in row]
    kernels = {"attention_forward", "attention_merge", "attention_backward_dq", "attention_backward_dkv"}
    kernels |= {"attention_masked", "attention_backward_bias"}
    wanted_rows = {(kernel, dim) for kernel in kernels for dim in dims}
    wanted_rows |= {("attention_mask_states", None), ("attention_mask_lists", None)}
    wanted_rows |= {("attention_backward_parts", None)}
    if arch != "gfx1100" and dtype != "float32":
        wanted_rows |= {("attention_backward_few", dim) for dim in dims}
    if arch == "sm_90" and dtype != "float32":
        hopper = ("forward_hopper", "backward_rows", "backward_dkv_hopper", "backward_dq_hopper")
        wanted_rows |= {(f"attention_{kernel}", dim) for kernel in hopper for dim in dims if dim in (64, 128)}
        wanted_rows |= {("attention_backward_cast", dim) for dim in dims if dim in (64, 128)}
        wanted_rows |= {("attention_backward_sum", dim) for dim in dims if dim in (64, 128)}
        # other head sizes are filled up
        filled = {dim: 128 if dim <= 128 else 256 for dim in dims if dim not in (64, 128)}
        wanted_rows |= {("attention_forward_hopper", columns) for columns in filled.values()}
        wanted_rows |= {("attention_keys_of_mask", None), ("attention_bits_of_mask", None)}
        forms = {(r["HEAD_DIM"], r["FUSED"]) for r in rows if r["kernel"] == "attention_backward_dkv_hopper"}
        # the fused one, and the one that is deterministic
        assert forms == {(dim, fused) for dim in (64, 128) if dim in dims for fused in (True, False)}
    assert {(row["kernel"], row["HEAD_DIM"]) for row in rows} == wanted_rows
    for row in rows:
        if arch in ("sm_80", "gfx942", "gfx950"):
            assert row["allowed"] == 0, row
        if "shared" not in row:  # a row of ferryman.yaml is red where it spills more, or has no room
            assert row["by row"] and ROWS[arch].shared_memory == TARGETS[arch].shared_memory
            continue
        assert row["shared"] <= TARGETS[arch].shared_memory and row["traps"] == 0, row
        if row["kernel"].endswith("_hopper"):
            assert "serialized" not in row["ptxas"], row  # ptxas waits after each product where registers run out
        spilled = max(row["vgpr_spills"], row["sgpr_spills"]) if arch.startswith("gfx") else row["spills"]
        assert spilled <= row["allowed"], row
        if arch in ("sm_80", "gfx942", "gfx950"):
            assert row["spills"] == 0, row


@pytest.mark.parametrize(
    ("arch", "dtype", "few"),
    [
        ("sm_90", "bfloat16", True),
        ("gfx942", "float16", True),
        ("gfx1100", "bfloat16", False),
        ("sm_90", "float32", False),
    ],
)
def test_one_query_has_a_backward_of_its_own(arch: str, dtype: str, few: bool) -> None:
    """But for a mask or a softcap, float32, and where it would spill."""
    names = [one.name for one in _specialisations(arch, dtype, (128,))]
    assert ("attention_backward_few" in names) == few
    assert "attention_backward_dkv" in names


def test_query_heads_are_shared_where_units_would_be_idle() -> None:
    """Two programs for each of 132 units; none with less than four blocks of queries."""
    from ferryman.ops.attention.triton_kernels import _heads_of_a_program

    hopper = TARGETS["sm_90"]
    heads = [_heads_of_a_program(hopper, programs, 16, 5) for programs in (1, 10, 60, 100, 132, 133, 1000)]
    assert heads == [1, 1, 4, 8, 8, 16, 16]
    assert [_heads_of_a_program(hopper, 4, 16, blocks) for blocks in (1, 2, 3)] == [4, 2, 2]
    assert _heads_of_a_program(hopper, 1, 1, 64) == 1


def test_keys_are_divided_for_two_programs_per_unit() -> None:
    """One wave of 264 programs on 132 units; two pieces of each where one would leave most of the last wave empty."""
    from ferryman.ops.attention.triton_kernels import _num_splits

    hopper = TARGETS["sm_90"]
    splits = [_num_splits(hopper, programs, 32768) for programs in (8, 64, 100, 132, 176, 177, 256, 1024)]
    assert splits == [33, 4, 2, 2, 2, 2, 1, 1]
    assert _num_splits(hopper, 1, 600) == 4 and _num_splits(hopper, 1, 10**6) == 128 and _num_splits(hopper, 8, 1) == 1


@pytest.mark.parametrize(
    ("arch", "dtype", "dim", "programs", "keys", "splits", "ahead"),
    [
        ("sm_90", torch.bfloat16, 128, 8, 32768, 16, True),
        ("sm_90", torch.float16, 80, 64, 8192, 2, True),
        ("sm_90", torch.bfloat16, 128, 48, 32768, 5, False),
        ("sm_90", torch.bfloat16, 128, 8, 4096, 16, False),
        ("sm_90", torch.bfloat16, 128, 132, 32768, 2, False),
        ("sm_90", torch.bfloat16, 64, 8, 32768, 33, False),
        ("sm_90", torch.bfloat16, 256, 8, 32768, 33, False),
        ("sm_90", torch.float32, 128, 8, 32768, 33, False),
        ("gfx942", torch.bfloat16, 128, 8, 32768, 76, False),
    ],
)
def test_long_pieces_have_a_hoppers_unit_for_themselves(
    arch: str, dtype: torch.dtype, dim: int, programs: int, keys: int, splits: int, ahead: bool
) -> None:
    """Where nearly every unit has one, of 16 blocks of keys or more, at D128; elsewhere two share a unit."""
    from ferryman.ops.attention import triton_kernels as kernels

    target = TARGETS[arch]
    config = kernels._decode_config(target, dtype, dim)
    split_count = kernels._own_splits(config, target, dtype, dim, programs, keys)
    assert split_count == splits
    assert kernels._reads_ahead(config, target, dtype, dim, programs * split_count, keys // split_count) == ahead


@pytest.mark.parametrize(
    ("dim", "dtype", "unit"),
    [
        (72, torch.bfloat16, 8),
        (40, torch.float16, 8),
        (40, torch.float32, 4),
        (80, torch.bfloat16, 1),  # of what 16 divides the compiler knows
        (5, torch.bfloat16, 1),
        (36, torch.bfloat16, 1),
    ],
)
def test_strides_are_in_whole_words(dim: int, dtype: torch.dtype, unit: int) -> None:
    from ferryman.ops.attention.triton_kernels import _unit

    rows = torch.empty((2, 3, 10, dim), dtype=dtype, device="meta")
    assert _unit(rows, rows.transpose(1, 2)) == unit
    assert _unit(rows[..., 1:], rows.new_empty((2, 3, 10, 1))) == 1


def test_odd_heads_are_read_in_whole_words() -> None:
    """An element at a time the forward of 72 columns spilled 1,128 bytes on sm_90."""
    rows = _worker(["compile-one", "sm_90", "bfloat16", "72"], False, 300)
    assert [row["kernel"] for row in rows] == ["attention_forward"]
    assert rows[0]["wide_loads"] == rows[0]["loads"] > 0 and rows[0]["spills"] == 0


DIMS = (64, 80, 128, 256)


ROWS = compiled.rows("triton")
_ARCHES = tuple(arch for arch in TARGETS if arch != "cpu")
_DTYPES = ("float32", "float16", "bfloat16")
_HOPPER = {f"attention_{kernel}_hopper" for kernel in ("forward", "backward_dkv", "backward_dq")}


def _matrix() -> list[tuple[str, str, tuple[int, ...]]]:
    """Every size of head on every arch that no row of ferryman.yaml compiles for, half of them in each dtype; and 72
    columns, which no row has, on sm_90 and gfx942. CI takes one size in one dtype for each arch a week."""
    combinations: list[tuple[str, str, tuple[int, ...]]] = []
    for i, arch in enumerate(_ARCHES):
        for j, dtype in enumerate(_DTYPES):
            some = tuple(sorted(DIMS[(i + j + n) % 4] for n in (0, 2)))
            combinations += [(arch, dtype, (size,)) for size in some if arch not in ROWS]
            combinations += [(arch, dtype, (72,))] if arch in ("sm_90", "gfx942") else []
    return combinations


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.alternate("dtype", "dims")
@pytest.mark.parametrize(("arch", "dtype", "dims"), _matrix(), ids=str)
def test_compile_matrix(arch: str, dtype: str, dims: tuple[int, ...]) -> None:
    _check_compiled(_worker(["compile", arch, dtype, *map(str, dims)], False, 1700), arch, dtype, dims)


@pytest.mark.slow
@pytest.mark.timeout(1000)
@pytest.mark.alternate("dtype", "dim")
@pytest.mark.parametrize(("dtype", "dim"), [(d, n) for d in ("bfloat16", "float16") for n in (64, 128)])
def test_products_of_hopper_do_not_wait(dtype: str, dim: int) -> None:
    """By what ptxas says of its kernels, of one size of head in one dtype each week."""
    rows = _worker(["compile", "sm_90", dtype, str(dim)], False, 900)
    assert {row["kernel"] for row in rows if "ptxas" in row} == _HOPPER
    _check_compiled(rows, "sm_90", dtype, (dim,))


def test_rows_compile_the_matrix_of_the_other_arches() -> None:
    """Every size of head in every dtype, and nothing is left for here; no row lets a kernel spill more than it may."""
    report = _worker(["listed", *ROWS], False, 280)
    assert ROWS.keys() == report.keys()
    for arch, by_dtype in report.items():
        for dtype, rows in by_dtype.items():
            assert all(row["by row"] for row in rows)
            _check_compiled(rows, arch, dtype, DIMS)


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["interpret", *names]:
            json.dump(_interpret(names), sys.stdout)
        case ["listed", *arches]:
            json.dump(
                {arch: {d: _compile(arch, d, DIMS, hopper=False) for d in _DTYPES} for arch in arches}, sys.stdout
            )
        case ["compile", arch, dtype, *dims]:
            json.dump(_compile(arch, dtype, tuple(map(int, dims))), sys.stdout)
        case ["compile-one", arch, dtype, dim]:
            json.dump(_compile(arch, dtype, (int(dim),), 1), sys.stdout)
        case other:
            sys.exit(f"unknown worker arguments {other}")
