"""Rotary position embedding: meaning and error terms."""

from __future__ import annotations

import torch
from torch import Tensor

from ferryman.errors import ArgumentError
from ferryman.ops import checks
from ferryman.ops.primitive import Cost, Gradient, Limits, primitive, public, wide


def _turn(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, transposed: bool = False) -> Tensor:
    """Turn each pair (a, b) of the first rotary_dim elements: (a cos_a - b sin_a, b cos_b + a sin_b); or transposed."""
    width = cos.shape[-1]
    first, second = (
        (slice(0, None, 2), slice(1, None, 2)) if interleaved else (slice(width // 2), slice(width // 2, None))
    )
    h, c, s = wide(x[..., :width]), wide(cos).unsqueeze(1), wide(sin).unsqueeze(1)
    a, b, sin_a, sin_b = h[..., first], h[..., second], s[..., first], s[..., second]
    if transposed:
        sin_a, sin_b = -sin_b, -sin_a
    pair = ((a * c[..., first] - b * sin_a).to(x.dtype), (b * c[..., second] + a * sin_b).to(x.dtype))
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)


def _partner(x: Tensor, interleaved: bool) -> Tensor:
    """Each element's partner in its pair."""
    if interleaved:
        return torch.stack((x[..., 1::2], x[..., 0::2]), -1).flatten(-2)
    half = x.shape[-1] // 2
    return torch.cat((x[..., half:], x[..., :half]), -1)


def _lowered(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """The same in the form that Inductor fuses into the preceding norm; results keep the inputs' strides, which saves
    attention a copy."""

    def turn(x: Tensor) -> Tensor:
        width = cos.shape[-1]
        h, c, s = wide(x[..., :width]), wide(cos).unsqueeze(1), wide(sin).unsqueeze(1)
        if interleaved:
            other = torch.stack((-h[..., 1::2], h[..., 0::2]), -1).flatten(-2)
        else:
            other = torch.cat((-h[..., width // 2 :], h[..., : width // 2]), -1)
        turned = (h * c + other * s).to(x.dtype)
        return turned if width == x.shape[-1] else torch.cat((turned, x[..., width:]), -1)

    return turn(q), turn(k)


def _bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    """Two products and a sum: three roundings of each term's magnitude."""
    *inputs, cos, sin, interleaved = args
    bounds = []
    for x in inputs:
        width = cos.shape[-1]
        a, c, s = x.abs(), cos.abs().unsqueeze(1), sin.abs().unsqueeze(1)
        turned = a[..., :width]
        error = 3 * (turned * c + _partner(turned, interleaved) * s)
        bounds.append({"accumulate": torch.cat((error, torch.zeros_like(a[..., width:])), -1)})
    return tuple(bounds)


def _gradient_bound(args: tuple, outputs: tuple[Tensor, ...]) -> tuple[dict[str, Tensor], ...]:
    *grads, cos, sin, interleaved = args
    bounds = []
    for g in grads:
        width = cos.shape[-1]
        a, c, s = g.abs(), cos.abs().unsqueeze(1), sin.abs().unsqueeze(1)
        error = 3 * (a[..., :width] * c + _partner(a[..., :width] * s, interleaved))
        bounds.append({"accumulate": torch.cat((error, torch.zeros_like(a[..., width:])), -1)})
    return tuple(bounds)


def _check(op: str, cos: Tensor, sin: Tensor, **pair: Tensor) -> None:
    checks.one_device(op, **pair, cos=cos, sin=sin)
    checks.floating(op, **pair, cos=cos, sin=sin)
    checks.same_dtype(op, **pair)
    checks.same_dtype(op, cos=cos, sin=sin)
    (first, q), (second, k) = pair.items()
    for name, x in pair.items():
        if x.dim() != 4:
            raise ArgumentError(op, f"{name}.shape", tuple(x.shape), "(batch, heads, seq, head_dim)")
    if (q.shape[0], *q.shape[2:]) != (k.shape[0], *k.shape[2:]):
        raise ArgumentError(
            op, f"{second}.shape", tuple(k.shape), f"batch, seq and head_dim of {first} {tuple(q.shape)}"
        )
    batch, _, seq, head_dim = q.shape
    if cos.dim() != 3 or cos.shape[0] not in (1, batch) or cos.shape[1] != seq:
        raise ArgumentError(op, "cos.shape", tuple(cos.shape), f"({batch} or 1, {seq}, rotary_dim)")
    checks.shaped(op, "sin", sin, *cos.shape)
    if cos.shape[2] > head_dim or cos.shape[2] % 2:
        raise ArgumentError(op, "cos.shape[-1]", cos.shape[2], f"an even rotary_dim <= head_dim {head_dim}")


def _empty(x: Tensor) -> Tensor:
    return x.new_empty(x.shape)


def _cost(q: Tensor, k: Tensor, cos: Tensor, touched: float = 1.0) -> Cost:
    moved = 2 * touched * (q.numel() + k.numel()) * q.element_size() + 2 * cos.numel() * cos.element_size()
    return Cost(3.0 * (q.numel() + k.numel()), float(moved))


@primitive(
    outputs=("q", "k"),
    check=lambda q, k, cos, sin, interleaved: _check("rope", cos, sin, q=q, k=k),
    meta=lambda q, k, cos, sin, interleaved: (_empty(q), _empty(k)),
    cost=lambda q, k, cos, sin, interleaved: _cost(q, k, cos),
    limits=Limits(bound=_bound, batch={"q": 3, "k": 3, "cos": 2, "sin": 2}, reduction=lambda *args: 2),
    name="rope",
    gradient=Gradient(backward="rope_backward", grads=("q", "k")),
    lower=_lowered,
)
def rope_both(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """`rope` with every argument positional."""
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


@public(rope_both)
def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """Rotary position embedding: ``x * cos + rotate(x) * sin`` on the first rotary_dim of each head, the rest copied.

    q: (batch, heads, seq, head_dim); k: the same with its own heads; any strides; float32, float16 or bfloat16.
    cos, sin: (batch or 1, seq, rotary_dim), any of these dtypes, rotary_dim even and <= head_dim; not differentiable.
    interleaved False pairs element i with i + rotary_dim/2 (Llama, NeoX); True pairs 2i with 2i + 1 (GPT-J, GLM).
    Returns (q, k) rotated, contiguous, in their dtype; float32 arithmetic, one rounding. Raises ArgumentError.
    Source: Su et al., arXiv:2104.09864.
    """
    return rope_both(q, k, cos, sin, interleaved)


@primitive(
    outputs=("q", "k"),
    check=lambda grad_q, grad_k, cos, sin, interleaved: _check("rope_backward", cos, sin, grad_q=grad_q, grad_k=grad_k),
    meta=lambda grad_q, grad_k, cos, sin, interleaved: (_empty(grad_q), _empty(grad_k)),
    cost=lambda grad_q, grad_k, cos, sin, interleaved: _cost(grad_q, grad_k, cos),
    limits=Limits(
        bound=_gradient_bound,
        reduction=lambda *args: 2,
        batch={"grad_q": 3, "grad_k": 3, "cos": 2, "sin": 2, "q": 3, "k": 3},
    ),
)
def rope_backward(grad_q: Tensor, grad_k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """Gradients of `rope` for q and k: the transposed rotation."""
    return _turn(grad_q, cos, sin, interleaved, True), _turn(grad_k, cos, sin, interleaved, True)


def _check_writable(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> None:
    _check("rope_", cos, sin, q=q, k=k)
    checks.writable("rope_", q=q, k=k)


@primitive(
    outputs=("q", "k"),
    check=_check_writable,
    meta=lambda q, k, cos, sin, interleaved: (
        q.new_empty_strided(q.shape, q.stride()),
        k.new_empty_strided(k.shape, k.stride()),
    ),
    cost=lambda q, k, cos, sin, interleaved: _cost(q, k, cos, cos.shape[-1] / q.shape[-1] if q.shape[-1] else 1.0),
    limits=Limits(bound=_bound, batch={"q": 3, "k": 3, "cos": 2, "sin": 2}, reduction=lambda *args: 2),
    name="rope_",
    gradient=Gradient(backward="rope_backward", grads=("q", "k")),
    lower=_lowered,
    mutates={"q": "q", "k": "k"},
)
def rope_over(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> tuple[Tensor, Tensor]:
    """What `rope_` leaves in q and k."""
    return _turn(q, cos, sin, interleaved), _turn(k, cos, sin, interleaved)


def _same_place(q: Tensor, k: Tensor) -> bool:
    same = q.untyped_storage()._cdata == k.untyped_storage()._cdata
    return same and q.numel() > 0 and k.numel() > 0 and q.storage_offset() == k.storage_offset()


@public(rope_over)
def rope_(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *, interleaved: bool = False) -> tuple[Tensor, Tensor]:
    """`rope`, written over q and k: half of the memory, and what lies beyond rotary_dim is not moved. Returns (q, k).

    Arguments as `rope`'s; q and k keep their strides, and share no element, neither with each other nor within
    themselves. Under autograd it is ``q.copy_(rope(q, ...))`` without the copy: views and earlier uses of q are dealt
    with by PyTorch's own rules for in-place operations, a leaf that requires grad is refused, the backward is the
    transposed rotation of the gradients, and nothing but cos and sin is kept for it.
    Raises ArgumentError.
    """
    if q is k or (not torch.compiler.is_dynamo_compiling() and _same_place(q, k)):
        raise ArgumentError("rope_", "k", "q itself", "another tensor: it would be rotated twice")
    return rope_over(q, k, cos, sin, interleaved)
