"""What norms look like in models: leaf modules, and `torch.nn.functional`'s own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ferryman.ops.norm.definition import layer_norm as op_layer_norm
from ferryman.ops.norm.definition import rms_norm as op_rms_norm
from ferryman.ops.norm.residual import blocks as _with_residuals
from ferryman.ops.recognition import Block, Candidate, Layer, Leaf, Served

_LARGEST_EPS = 0.1
_MOST_HEADS = 512


def modules(leaf: Leaf) -> Iterator[Candidate]:
    """RMS norms with a weight, an offset weight or none, rounded before the weight or not; layer norms."""
    tensors = leaf.lines
    if leaf.wholes or len(tensors) > 2:
        return
    widths = {width for width, _ in tensors.values()} or set(leaf.widths) or {96}
    if len(widths) > 1:
        return
    (width,) = widths
    spelled = {n: text for n, (_, text) in tensors.items()}
    names = tuple(tensors)
    for eps in eps_of(leaf):
        for weight in names if len(names) < 2 else ():
            plain = spelled[weight]
            offset = f"1.0 + {plain}.to(torch.promote_types(self.{weight}.dtype, torch.float32))"
            for scale, cast in ((plain, True), (plain, False), (offset, False), (offset, True)):
                yield _candidate("rms_norm", f"{scale}, {eps}, {cast}", width, (weight,))
        if not names:
            yield _candidate("rms_norm", f"None, {eps}, False", width)
        for pair in _pairs(names):
            used = tuple(n for n in pair if n is not None)
            given = ", ".join("None" if n is None else spelled[n] for n in pair)
            yield _candidate("layer_norm", f"{given}, {eps}", width, used)
    for eps in eps_of(leaf):
        yield from _by_heads(leaf, eps, width if names else 0)


def _by_heads(leaf: Leaf, eps: str, width: int) -> Iterator[Candidate]:
    """RMS norms of each head of a row, whose number or width the module holds: with a weight of the whole row, or of
    a head."""
    lines = list(leaf.lines.items())
    if len(lines) > 1:
        return
    weight, plain = (lines[0][0], lines[0][1][1]) if lines else ("", "")
    used = (weight,) if weight else ()
    for name, count in leaf.integers.items():
        if not 1 < count <= _MOST_HEADS:
            continue
        for inside in (f"x.unflatten(-1, (self.{name}, -1))", f"x.unflatten(-1, (-1, self.{name}))"):
            if weight and width % count == 0 and count < width:
                normed = f"ops.rms_norm({inside}, None, {eps}, False).flatten(-2)"
                yield Candidate("rms_norm", f"{normed} * {plain}", width, used)
        if weight:
            inside = f"x.unflatten(-1, (self.{name}, -1))"
            for cast in (True, False):
                normed = f"ops.rms_norm({inside}, {plain}, {eps}, {cast}).flatten(-2)"
                yield Candidate("rms_norm", normed, width * count, used)


def _candidate(op: str, rest: str, width: int, uses: tuple[str, ...] = ()) -> Candidate:
    """A norm of x, and with an addition before it."""
    return Candidate(
        op, f"ops.{op}(x, {rest})", width, uses, added=f"ops.add_{op}(x, addend, {rest})", added_op=f"add_{op}"
    )


def eps_of(leaf: Leaf) -> Iterator[str]:
    """What a norm may add to its mean square: the module's own numbers, those in its code, none."""
    for name, value in leaf.numbers.items():
        if 0 <= value <= _LARGEST_EPS:
            yield f"self.{name}"
    for value in dict.fromkeys(leaf.constants):
        if 0 < value <= _LARGEST_EPS:
            yield repr(value)
    yield "0.0"


def _pairs(names: Sequence[str]) -> Iterator[tuple[str | None, str | None]]:
    if not names:
        yield None, None
    elif len(names) == 1:
        yield names[0], None
        yield None, names[0]
    else:
        yield names[0], names[1]
        yield names[1], names[0]


def blocks(block: Block) -> Iterator[Layer]:
    """A residual that is added before."""
    yield from _with_residuals(block)


_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


# Both serve rows of the last dimension, in one dtype. What is not served passes as few tests as can be.


def layer_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    if (
        len(normalized_shape) == 1
        and (dtype := input.dtype) in _DTYPES
        and (weight is None or weight.dtype is dtype)
        and (bias is None or bias.dtype is dtype)
        and input.dim() > 0
    ):
        return op_layer_norm(input, weight, bias, eps)
    return functional.layer_norm(input, normalized_shape, weight, bias, eps)


def rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """Without an eps PyTorch takes the epsilon of a dtype that depends on its version: left to it."""
    if (
        eps is not None
        and len(normalized_shape) == 1
        and (dtype := input.dtype) in _DTYPES
        and (weight is None or weight.dtype is dtype)
        and input.dim() > 0
    ):
        return op_rms_norm(input, weight, eps)
    return functional.rms_norm(input, normalized_shape, weight, eps)


def functions() -> Mapping[Any, Served]:
    return {functional.layer_norm: Served("layer_norm", layer_norm), functional.rms_norm: Served("rms_norm", rms_norm)}


# In graphs ---------------------------------------------------------------------------------------------------


def _layer_term(
    n: Any,
    node: fx.Node,
    x: Any,
    shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    if len(shape) != 1:
        return None
    h = n.of(x)
    centred = n.pool.total(0.0, [(h, 1.0), (n.mean(h, -1), -1.0)])
    normed = _over_root(n, centred, n.variance(h, -1), eps, weight)
    return normed if bias is None else n.pool.total(0.0, [(normed, 1.0), (n.of(bias), 1.0)])


def _rms_term(n: Any, node: fx.Node, x: Any, shape: Any, weight: Any = None, eps: float | None = None) -> Any:
    if len(shape) != 1 or eps is None:
        return None
    h = n.of(x)
    return _over_root(n, h, n.mean(n.pool.power(h, Fraction(2)), -1), eps, weight)


def _over_root(n: Any, x: Any, square: Any, eps: Any, weight: Any) -> Any:
    """x / sqrt(square + eps), times a weight. eps may be an argument of the compiled function."""
    factors = [(x, Fraction(1)), (n.pool.total(0.0, [(square, 1.0), (n.of(eps), 1.0)]), Fraction(-1, 2))]
    return n.pool.product_of(1.0, factors if weight is None else [*factors, (n.of(weight), Fraction(1))])


def rules() -> Mapping[str, Callable[..., Any]]:
    return {"layer_norm": _layer_term, "rms_norm": _rms_term}
