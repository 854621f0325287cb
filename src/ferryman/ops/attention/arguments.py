"""What the arguments of attention must be. What is wrong raises ArgumentError."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks

MAX_HEAD_DIM = 256
OF_HOPPER = range(40, 257, 8)  # head sizes that the kernel for Hopper takes
NO_DROPOUT = 0.0  # one object, by which dispatch knows a call that leaves it out


def most_rows(head_dim: int) -> int:
    """How many query rows for a key head a tile of Hopper's has at most on the backward pass: more, of wide heads, do
    not fit beside K and V."""
    return 128 if head_dim <= 128 else 64


def hiding(
    q: Tensor, k: Tensor, causal: bool, window: int | None, key_range: Tensor | None, chunk: int | None
) -> tuple[int | None, int | None]:
    """(window, chunk), each None where it hides no key that is seen without it: one of all keys, as models of long
    contexts give it with a short prompt."""
    queries, keys = q.shape[2], k.shape[2]
    if window is not None and window >= (keys if causal else max(queries, keys)):
        window = None
    # without a diagonal a query before the first key is in a chunk of no keys, and sees nothing
    if chunk is not None and chunk >= keys and (causal or (key_range is None and queries <= keys)):
        chunk = None
    return window, chunk


def stored_by_rows(*tensors: Tensor) -> bool:
    """Whether tensors (B, H, S, D) are stored row by row, (B, S, H, D), as models bring them: so are their gradients
    then. Only the order of strides counts, which compilers keep where they copy."""
    return all(x.stride(2) > x.stride(1) for x in tensors if x.shape[1] > 1 and x.shape[2] > 1)


def by_rows(x: Tensor) -> Tensor:
    """``x`` (B, H, S, D), dense as (B, S, H, D), which is how a model reads it back; a copy where it is not."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


def like_gradients(x: Tensor, ordered: bool) -> Tensor:
    """``x`` (B, H, S, D), dense in the order of `stored_by_rows`; a copy where it is not."""
    return by_rows(x) if ordered else x.contiguous()


def check(
    op: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None,
    key_range: Tensor | None,
    chunk: int | None,
    dropout_p: float,
    dropout_seed: Tensor | None,
    **others: Tensor | None,
) -> None:
    given: dict[str, Tensor | None] = {"q": q, "k": k, "v": v}
    tensors = {"mask": mask, "sinks": sinks, "key_range": key_range, "dropout_seed": dropout_seed}
    checks.one_device(op, **given, **tensors, **others)
    checks.floating(op, **given)
    checks.same_dtype(op, **given)
    for name, x in given.items():
        if x is not None and x.dim() != 4:
            raise ArgumentError(op, f"{name}.shape", tuple(x.shape), "(batch, heads, seq, head_dim)")
    batch, heads, sq, head_dim = q.shape
    if not 1 <= head_dim <= MAX_HEAD_DIM:
        raise ArgumentError(op, "q.shape[-1]", head_dim, f"a head_dim from 1 to {MAX_HEAD_DIM}")
    if k.shape[0] != batch or k.shape[3] != head_dim:
        raise ArgumentError(op, "k.shape", tuple(k.shape), f"({batch}, heads, seq, {head_dim})")
    checks.shaped(op, "v", v, *k.shape[:3], v.shape[3])
    if not 1 <= v.shape[3] <= MAX_HEAD_DIM:
        raise ArgumentError(op, "v.shape[-1]", v.shape[3], f"a value width from 1 to {MAX_HEAD_DIM}")
    if k.shape[1] == 0 or heads % k.shape[1]:
        raise ArgumentError(op, "k.shape[1]", k.shape[1], f"a divisor of q's {heads} heads")
    if scale is not None and not -math.inf < scale < math.inf:
        raise ArgumentError(op, "scale", scale, "a finite number or None")
    if window is not None and window < 1:
        raise ArgumentError(op, "window", window, "None or an integer >= 1 (keys seen, self included)")
    checks.non_negative(op, softcap=softcap)
    checks.floating(op, sinks=sinks)
    checks.shaped(op, "sinks", sinks, heads)
    if key_range is not None and key_range.dtype != torch.int32:
        raise ArgumentError(op, "key_range.dtype", key_range.dtype, "torch.int32")
    checks.shaped(op, "key_range", key_range, batch, 2)
    if chunk is not None and chunk < 1:
        raise ArgumentError(op, "chunk", chunk, "None or an integer >= 1 (positions of a chunk)")
    if not 0.0 <= dropout_p < 1.0:
        raise ArgumentError(op, "dropout_p", dropout_p, "at least 0 and less than 1")
    if dropout_p and dropout_seed is None:
        raise ArgumentError(op, "dropout_seed", None, f"an int64 tensor ({batch},), with dropout_p={dropout_p}")
    if dropout_seed is not None and dropout_seed.dtype != torch.int64:
        raise ArgumentError(op, "dropout_seed.dtype", dropout_seed.dtype, "torch.int64")
    checks.shaped(op, "dropout_seed", dropout_seed, batch)
    if mask is not None:
        if mask.dtype != torch.bool:
            checks.floating(op, mask=mask)
        full = (batch, heads, sq, k.shape[2])
        if mask.dim() > 4 or any(m not in (1, f) for m, f in zip(reversed(mask.shape), reversed(full), strict=False)):
            raise ArgumentError(op, "mask.shape", tuple(mask.shape), f"broadcastable to {full}")


def check_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float,
    mask: Tensor | None,
    sinks: Tensor | None = None,
    key_range: Tensor | None = None,
    chunk: int | None = None,
    need_mask: bool = False,
    dropout_p: float = NO_DROPOUT,
    dropout_seed: Tensor | None = None,
) -> None:
    op = "attention_backward"
    saved = {"grad_out": grad_out, "grad_lse": grad_lse, "out": out, "lse": lse}
    check(op, q, k, v, scale, window, softcap, mask, sinks, key_range, chunk, dropout_p, dropout_seed, **saved)
    for name, x in (("grad_out", grad_out), ("out", out)):
        checks.shaped(op, name, x, *q.shape[:3], v.shape[3])
    for name, rows in (("grad_lse", grad_lse), ("lse", lse)):
        checks.shaped(op, name, rows, *q.shape[:3])
