"""`torch.softmax` over the last dimension, in the dtype of its input, or cast back to that; the mean cross entropy of
class numbers, and its sum. A class that is none is an error in PyTorch and a loss of NaN here; beside a logit of +inf
a mean loss is NaN there, and +inf here.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from ferryman.ops.recognition import Block, Candidate, Graph, Layer, Leaf, Served, Traced
from ferryman.ops.softmax.definition import cross_entropy as op_cross_entropy
from ferryman.ops.softmax.definition import cross_entropy_with_lse
from ferryman.ops.softmax.definition import softmax as op_softmax

_DTYPES = frozenset((torch.float32, torch.float16, torch.bfloat16))


def modules(leaf: Leaf) -> Iterator[Candidate]:
    """Written out, over the last dimension."""
    if not (leaf.lines or leaf.matrices or leaf.scalars):
        # the gradient of a largest number that is taken off cancels, and leaves rounding where rows are saturated
        for gradient in (True, False):
            yield Candidate("softmax", "ops.softmax(x)", 96, gradient=gradient)


def blocks(block: Block) -> Iterator[Layer]:
    """The mean cross entropy of logits (.., classes), of two dimensions or three, and class numbers (..) or (.., 1),
    written out; or of a matrix of logits and as many numbers, of one dimension or two, in order."""
    if block.tensors or block.inputs != 2 or block.run is None:
        return
    both = ("rows", "column")
    for dims, lying in [((2, 3), both[0]), ((2, 3), both[1]), ((2,), "any"), *itertools.product(((2,), (3,)), both)]:
        draw = functools.partial(_draw_logits, dims, lying)
        outcomes = [block.run({}, draw(seed)) for seed in range(2)]
        if any(o is None or not isinstance(o[0], Tensor) or o[0].shape != () for o in outcomes):
            continue
        guard = f"a0.dim() in {dims} and {_LYING[lying]} and a0.numel() > 0"
        guard += " and a1.dtype is torch.int64 and a0.dtype.itemsize < 8 and a0.dtype.is_floating_point"
        guard += " and not a0.is_meta and not torch.is_autocast_enabled(a0.device.type)"
        numbers = "a1.flatten()"
        if block.run({}, draw(_FROM_THE_END)) is not None:
            numbers = f"torch.where(a1 < 0, a1 + a0.shape[-1], a1).flatten(), {_NO_CLASS}"
        if block.run({}, draw(len(_LOGITS) - 1)) is not None:  # so takes `torch.take_along_dim` numbers of no class
            numbers = f"torch.remainder(a1, a0.shape[-1]).flatten(), {_NO_CLASS}"
        smoothed = _smoothing(draw(0), outcomes[0])
        loss = f"ops.cross_entropy(a0.flatten(0, -2), {numbers}{f', label_smoothing={smoothed!r}' if smoothed else ''})"
        for expression in (f"{loss}.to(a0.dtype)", loss):
            yield Layer("cross_entropy", expression, {}, draw, len(_LOGITS), guard, refused=3)


def _smoothing(given: tuple[Tensor, ...], outcome: Any) -> float:
    """With how much smoothing a mean loss is what code gave, as far as its digits say."""
    logits, numbers = given[0].flatten(0, -2), given[1].flatten()
    plain, whole = (functional.cross_entropy(logits, numbers, label_smoothing=most) for most in (0.0, 1.0))
    smoothing = float(f"{float((outcome[0] - plain) / (whole - plain)):.9g}")
    return smoothing if 1e-6 < smoothing <= 1.0 else 0.0


# How numbers lie beside logits
_LYING = {
    "rows": "a1.shape == a0.shape[:-1]",
    "column": "a1.shape == (*a0.shape[:-1], 1)",
    "any": "a1.numel() == a0.shape[0] and (a1.dim() == 1 or (a1.dim() == 2 and a1.is_contiguous()))",
}
_NO_CLASS = -(2**31)  # a number of rows that the op leaves out: no index of a class is so low

# (rows, classes, magnitude, a number that is no class) of a seed; what has none for it refuses the last
_LOGITS = (
    (6, 11, 1.0, None),
    (3, 40, 4.0, None),
    (1, 5, 1.0, None),
    (9, 2, 30.0, None),
    (4, 7, 1.0, -100),
    (4, 7, 1.0, -1),
    (4, 7, 1.0, 16),
)
_FROM_THE_END = 5
# Of numbers that lie anyhow: of two dimensions more than one long, neither is as long as there are rows
_SIDES = ((2, 3), (3,), (1, 1), (9, 1), (2, 2), (2, 2), (1, 4))


def _draw_logits(dims: tuple[int, ...], lying: str, seed: int) -> tuple[Tensor, ...]:
    rows, classes, size, other = _LOGITS[seed]
    lead = (rows, 3) if dims[seed % len(dims)] == 3 else (rows,)
    generator = torch.Generator().manual_seed(seed)
    logits = size * torch.randn(*lead, classes, generator=generator, dtype=torch.float64)
    numbers = torch.randint(classes, lead, generator=generator)
    if other is not None:
        numbers[1] = other
    if lying == "any":
        return logits, numbers.view(_SIDES[seed])
    return logits, numbers.unsqueeze(-1) if lying == "column" else numbers


def functional_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    if (
        (dtype is None or dtype is input.dtype)
        and dim is not None
        and (dim == (n := input.dim()) - 1 or dim == -1)
        and n > 0
        and input.dtype in _DTYPES
    ):
        return op_softmax(input)
    return functional.softmax(input, dim, _stacklevel + 1, dtype)


def torch_softmax(input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    if (
        (dtype is None or dtype is input.dtype)
        and (dim == (n := input.dim()) - 1 or dim == -1)
        and n > 0
        and input.dtype in _DTYPES
    ):
        return op_softmax(input)
    return torch.softmax(input, dim, dtype=dtype)


def functional_narrowed(
    to: torch.dtype, input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Tensor:
    """Of an input in ``to``, computed in float32: the op accumulates so, and rounds once."""
    if (
        to is input.dtype
        and (dtype is torch.float32 or dtype is None)
        and dim is not None
        and (dim == (n := input.dim()) - 1 or dim == -1)
        and n > 0
        and to in _DTYPES
    ):
        return op_softmax(input)
    return functional_softmax(input, dim, _stacklevel + 1, dtype).to(to)


def torch_narrowed(to: torch.dtype, input: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    return functional_narrowed(to, input, dim, 4, dtype)


def cross_entropy(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Tensor:
    """Of a matrix. Under autocast PyTorch's gives float32."""
    if (
        weight is None
        and size_average is None
        and reduce is None
        and type(ignore_index) is int
        and (reduction == "mean" or (reduction == "sum" and input.numel() > 0))
        and input.dtype in _DTYPES
        and target.dtype is torch.int64
        and input.dim() == 2
        and target.shape == input.shape[:1]
        and not input.is_meta  # which autocast does not know
        and not torch.is_autocast_enabled(input.device.type)
    ):
        if reduction == "sum":
            return _summed(input, target, ignore_index, label_smoothing).to(input.dtype)
        return op_cross_entropy(input, target, ignore_index, label_smoothing).to(input.dtype)
    return functional.cross_entropy(
        input,
        target,
        weight,
        size_average,
        ignore_index,
        reduce,
        reduction,
        label_smoothing,
    )


def _summed(logits: Tensor, target: Tensor, ignore_index: int, label_smoothing: float) -> Tensor:
    """The mean times the rows that count, 0 where none does, NaN where the log-sum-exp of one is not finite."""
    loss, lse = cross_entropy_with_lse(logits, target, ignore_index, label_smoothing)
    counted = target != ignore_index
    count = counted.sum()
    odd = torch.where(counted, lse - lse, 0.0).sum()
    return torch.where(count > 0, loss * count, 0.0) + odd


def functions() -> Mapping[Any, Served]:
    return {
        functional.softmax: Served("softmax", functional_softmax, functional_narrowed),
        functional.cross_entropy: Served("cross_entropy", cross_entropy),
        torch.softmax: Served("softmax", torch_softmax, torch_narrowed),
        torch.Tensor.softmax: Served("softmax", torch_softmax),
    }


def method_softmax(input: Any, *given: Any, **options: Any) -> Any:
    """``input.softmax(..)``, of whatever has such a method."""
    if isinstance(input, Tensor):
        return torch_softmax(input, *given, **options)
    return input.softmax(*given, **options)


def methods() -> Mapping[str, Served]:
    return {"softmax": Served("softmax", method_softmax)}


# In graphs ---------------------------------------------------------------------------------------------------


def _traced_loss(
    graph: Graph,
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> tuple[tuple[Any, ...], tuple[fx.Node, ...]] | None:
    plain = weight is None and size_average is None and reduce is None and reduction == "mean"
    if not plain or graph.example(target).dtype != torch.int64 or graph.example(logits).dim() != 2:
        return None
    x, between = graph.narrow(logits)
    if graph.name(x) in ("view", "reshape") and isinstance(x.args[0], fx.Node):  # the cast may stand before the view
        inner, casts = graph.narrow(x.args[0])
        wide = graph.example(inner)
        if casts and wide.dim() > 2 and wide.shape[-1] == graph.example(x).shape[-1]:
            rows = graph.view(inner, "rows")
            return (rows, target, ignore_index, label_smoothing), (*casts, x, *between)
    return (x, target, ignore_index, label_smoothing), tuple(between)


def traced() -> Mapping[str, Traced]:
    return {"cross_entropy": Traced("cross_entropy", _traced_loss, casts=True)}


def _term(n: Any, node: fx.Node, x: Any, dim: Any = None, _stacklevel: int = 3, dtype: Any = None) -> Any:
    return n.pool.call("softmax", (-1,), n.of(x)) if n.axis(x, dim) == -1 else None


def rules() -> Mapping[str, Callable[..., Any]]:
    return {"softmax": _term}
