"""`gated_delta_rule_backward` in five passes, of which the two walks alone go from chunk to chunk.

1. `_systems`, all chunks of 32 tokens at once: tables (`span_kernels`).
2. `_forth` and `_back`, a program for 64 columns of a state: what spans of two chunks begin and end with.
3. `_slopes`, all spans at once, and `_ends`: all gradients that no walk gives (`slope_kernels`).

Products are of bfloat16 pieces on Hopper's matrix units (`chunk_kernels._product`): float32's digits at a cost of three
products or six, and bfloat16 operands of any order. No atomics: each sum has a fixed order.

Limit, for a token of a head with K = V = 128 and two heads to a query on an H100. Operations: tables 0.05 M, `_forth`
0.22 M, `_back` 0.32 M, `_slopes` 0.8 M: 1.4 ns at the peak. Memory: tables 576 bytes, both states 2 KB, u and what is
asked 1 KB, dq and dk 0.5 KB, what pairs bring 0.5 KB, each written and read; arguments and results about 2 KB: 10 KB, 3
ns. 3 x 15,376 tokens of 32 heads: 4.4 ms. A walk is L / 32 steps of three dependent products, or five.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import triton
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, strides
from ferryman.ops.gated_delta_rule.backward_kernels import begun
from ferryman.ops.gated_delta_rule.parallel_kernels import called
from ferryman.ops.gated_delta_rule.slope_kernels import _ends, _slopes
from ferryman.ops.gated_delta_rule.span_kernels import ROWS, _back, _forth, _systems
from ferryman.ops.gated_delta_rule.triton_kernels import _power

CHUNK = 32  # tokens; two are a span


def gated_delta_rule_backward(
    grad_y: Tensor,
    grad_final_state: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor | None,
    beta: Tensor,
    initial_state: Tensor | None,
    scale: float | None,
    qk_l2norm: bool,
    target: Target,
) -> tuple[Tensor, ...]:
    batch, length, groups, width = q.shape
    heads, dim = v.shape[2:]
    dq, dk, dv, dg, dbeta, ds = results = begun(q, k, v, g, beta, initial_state)
    if batch * length * heads * width * dim == 0:
        for t in results:
            t.zero_()
        if initial_state is not None and grad_final_state is not None:
            ds.copy_(grad_final_state)
        return tuple(results)
    factor = float(width**-0.5 if scale is None else scale)
    span, chunk, each, shared = 2 * CHUNK, CHUNK, 2, heads // groups
    spans, keys = triton.cdiv(length, span), _power(width, 64, 32)
    kind: dict[str, Any] = {"dtype": torch.float32, "device": v.device}
    chunks = spans * each
    table = (batch, heads, chunks, 3, chunk, chunk)
    forth, back, weight = (torch.empty(table, dtype=torch.bfloat16, device=v.device) for _ in range(3))
    rows = torch.empty(batch, heads, chunks, ROWS.value, chunk, **kind)
    columns = _power(dim, 64)
    dims, every = columns * triton.cdiv(dim, columns), keys * triton.cdiv(width, keys)
    before, late = (torch.empty(batch, heads, spans, dims, every, **kind) for _ in range(2))
    wrong, asked = (torch.empty(batch, heads, spans, dims, span, **kind) for _ in range(2))
    pair = torch.empty(batch, groups, spans, 2, span, span, **kind)
    part = torch.empty(batch, groups, spans, 2, span, every, **kind)
    sizes = (chunks, heads, shared, width)
    launch(
        _systems,
        (batch * heads * chunks,),
        q,
        k,
        g,
        beta,
        forth,
        back,
        weight,
        rows,
        factor,
        length,
        *sizes,
        *q.stride(),
        *k.stride(),
        *strides(g, 3),
        *beta.stride(),
        qk_l2norm,
        chunk,
        16,
        _power(width, 64),
        device=v.device,
        num_warps=4,
    )
    options = (chunk, each, width > keys, keys, columns, 2)
    grid = (batch * heads * (dims // columns),)
    launch(
        _forth,
        grid,
        k,
        v,
        initial_state,
        forth,
        rows,
        before,
        wrong,
        length,
        *sizes,
        dim,
        *k.stride(),
        *v.stride(),
        *strides(initial_state, 4),
        *options,
        device=v.device,
        num_warps=4,
    )
    launch(
        _back,
        grid,
        grad_y,
        grad_final_state,
        q,
        k,
        back,
        weight,
        rows,
        late,
        asked,
        dv,
        None if initial_state is None else ds,
        length,
        *sizes,
        dim,
        *grad_y.stride(),
        *strides(grad_final_state, 4),
        *q.stride(),
        *k.stride(),
        *options,
        device=v.device,
        num_warps=4,
    )
    launch(
        _slopes,
        (batch * groups * spans,),
        grad_y,
        q,
        k,
        rows,
        before,
        late,
        wrong,
        asked,
        pair,
        part,
        None if g is None else dg,
        dbeta,
        length,
        spans,
        *sizes[1:],
        dim,
        *grad_y.stride(),
        *q.stride(),
        *k.stride(),
        span,
        chunk,
        columns,
        every,
        keys,
        16,
        device=v.device,
        num_warps=4,
    )
    launch(
        _ends,
        (2 * batch * groups * spans,),
        part,
        q,
        k,
        rows,
        dq,
        dk,
        length,
        spans,
        *sizes[1:],
        *q.stride(),
        *k.stride(),
        qk_l2norm,
        span,
        chunk,
        every,
        keys,
        device=v.device,
        num_warps=4,
    )
    return tuple(results)


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    if "wgmma" not in target.features or dtype != "bfloat16":
        return []

    def run(q: Tensor, k: Tensor, v: Tensor, g: Any, beta: Tensor, kept: Any, scale: Any, norm: bool) -> None:
        gated_delta_rule_backward(v, kept, q, k, v, g, beta, kept, scale, norm, target)

    # bytes of a thread that are written once, before a loop: where a state is given, or keys are few
    allowed = {"_back": 32, "_slopes": 8}
    return [replace(one, spills_allowed=allowed.get(one.name, 0)) for one in called(run, torch.bfloat16)]
