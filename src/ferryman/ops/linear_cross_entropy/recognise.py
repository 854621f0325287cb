"""A product with a module's matrix and the cross entropy of all that it gives, their mean or their sum, which may be
smoothed, in one part of a forward; and their mean where it is written out with the squares of the log-sum-exps.

A class that is none is an error in PyTorch and a loss of NaN here.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from ferryman.ops.recognition import Block, Layer

_WIDTH, _CLASSES = 24, 40  # short sides
_MOST = 1 << 15  # classes that a proof has, where the code says how many there are
_SAME = 2.0**-40
_DEFAULT = -100


@dataclass(frozen=True)
class _Form:
    """How x and its class numbers lie, and what of either is read. dims: of x. numbers: x's rows to their shape."""

    dims: tuple[int, ...]
    numbers: Callable[[tuple[int, ...]], tuple[int, ...]]
    guard: str
    x: str = "a0"
    target: str = "a1"


@dataclass(frozen=True)
class _Kind:
    """What becomes of the rows' losses."""

    smoothing: float
    summed: bool
    z: float = 0.0  # how much of the square of each row's log-sum-exp is added


_ROWS = "a0.numel() // a0.shape[-1]"
_BEFORE = "a0[:, :-1]"
_FORMS = (
    _Form((2, 3), lambda rows: rows, "a1.shape == a0.shape[:-1]"),
    _Form((2, 3), lambda rows: (math.prod(rows),), f"a1.dim() == 1 and a1.shape[0] == {_ROWS}", "a0.flatten(0, -2)"),
    *(_Form(dims, lambda rows: rows, "a1.shape == a0.shape[:-1]") for dims in ((2,), (3,))),
    _Form((3,), lambda rows: (rows[0] * rows[1],), f"a1.dim() == 1 and a1.shape[0] == {_ROWS}", "a0.flatten(0, 1)"),
    _Form((3,), lambda rows: rows, "a1.shape == a0.shape[:2] and a0.shape[1] > 1", _BEFORE, "a1[:, 1:]"),
    _Form(
        (3,),
        lambda rows: (rows[0], rows[1] - 1),
        "a1.shape == (a0.shape[0], a0.shape[1] - 1) and a0.shape[1] > 1",
        _BEFORE,
    ),
    _Form(
        (3,),
        lambda rows: (rows[0] * (rows[1] - 1),),
        "a1.shape == (a0.shape[0] * (a0.shape[1] - 1),) and a0.shape[1] > 1",
        f"{_BEFORE}.flatten(0, 1)",
    ),
)
# (rows of two dimensions, of three, magnitude, what the second row's class is instead, every row's)
_SEEDS: tuple[tuple[tuple[int, ...], tuple[int, ...], float, str], ...] = (
    ((7,), (2, 5), 1.0, ""),
    ((5,), (3, 4), 3.0, "ignored"),
    ((9,), (1, 9), 0.1, "all classes"),
    ((2,), (1, 2), 1.0, ""),
    ((4,), (2, 3), 1.0, "all ignored"),
    ((6,), (2, 4), 30.0, "ignored"),
    ((6,), (2, 3), 1.0, "default"),
    ((6,), (2, 3), 1.0, "one less than none"),
    ((6,), (2, 3), 1.0, "one too many"),
)
# of a loss that leaves out no row: it refuses what is no class
_COUNTED = tuple(
    (two, three, size, "" if odd == "ignored" else odd) for two, three, size, odd in _SEEDS if odd != "all ignored"
)
_NO_CLASS = -(2**31)
_DRAWN = 64  # the most rows
_REFUSED = 3  # the last ones: a class that is none is an error


def blocks(block: Block) -> Iterator[Layer]:
    matrices = [n for n, shape in block.tensors.items() if len(shape) == 2]
    vectors = [n for n, shape in block.tensors.items() if len(shape) == 1]
    if block.inputs != 2 or block.run is None or len(matrices) != 1 or len(vectors) > 1:
        return
    weight, bias = matrices[0], vectors[0] if vectors else None
    if len(block.tensors) != 1 + len(vectors):
        return
    for first in (True, False):
        classes, width = block.tensors[weight] if first else block.tensors[weight][::-1]
        if (bias and block.tensors[bias] != (classes,)) or min(classes, width) < 2:
            continue
        named = (n for n in block.integers.values() if abs(n) < 1 << 20)
        for ignored in dict.fromkeys((_DEFAULT, *named, _NO_CLASS)):
            yield from _layers(block, weight, bias, first, classes, width, ignored)


def _layers(
    block: Block, weight: str, bias: str | None, first: bool, classes: int, width: int, ignored: int
) -> Iterator[Layer]:
    """PyTorch's loss leaves out one number, which is drawn. Sides that the code says stay as they are; and with each
    side as it is the loss is the same."""
    few, narrow = min(max(_CLASSES, ignored + 8), classes), min(width, _WIDTH)
    agrees = functools.partial(_agrees, block, weight, bias, first, ignored)
    for form in _FORMS:
        for sides in ((few, narrow), (classes, narrow), (few, width), (classes, width)):
            sizes = {width: sides[1] - (sides[0] == sides[1] < width)} | {classes: sides[0]}
            if sides[0] > _MOST or any((n == ignored) != (now == ignored) for n, now in sizes.items()):
                continue  # a side of that number, which another has then
            sizes |= {ignored: ignored} if ignored not in (_DEFAULT, _NO_CLASS) else {}  # no length
            kind = agrees(form, sizes)
            if kind is None:
                continue
            if all(agrees(form, sizes | {side: side}) == kind for side in (classes, width)):
                yield from _of_form(block, form, weight, bias, first, ignored, sizes, kind)
            return


def _of_form(
    block: Block,
    form: _Form,
    weight: str,
    bias: str | None,
    first: bool,
    ignored: int,
    sizes: dict[int, int],
    kind: _Kind,
) -> Iterator[Layer]:
    own, added, shape = f"self.{weight}", f"self.{bias}" if bias else "None", block.tensors[weight]
    matrix = own if first else f"{own}.t()"
    guard = f"a0.dim() in {form.dims} and {form.guard} and a0.numel() > 0 and a1.dtype is torch.int64"
    guard += f" and a0.dtype is {own}.dtype and a0.dtype.itemsize < 8 and a0.dtype.is_floating_point"
    guard += f" and {own}.shape == {shape}" + (f" and {added}.dtype is a0.dtype" if bias else "")
    classes, width = (sizes[n] for n in (shape if first else shape[::-1]))
    draw = functools.partial(_draw, form, width, classes, ignored)
    guard += _laid_out(block, sizes, draw(1))
    longer = functools.partial(_longer, form, draw)
    smoothed = f", {kind.smoothing!r}" if kind.smoothing or kind.z else ""
    smoothed += f", {kind.z!r}" if kind.z else ""
    loss = f"ops.linear_cross_entropy({form.x}, {matrix}, {form.target}, {added}, {ignored}{smoothed})"
    if kind.summed:  # 0 where no row counts
        loss = (
            f"(lambda mean, rows: torch.where(rows > 0, mean * rows, 0.0))({loss}, ({form.target} != {ignored}).sum())"
        )
    for expression in (f"{loss}.to(a0.dtype)", loss):
        yield Layer(
            "linear_cross_entropy",
            expression,
            sizes,
            draw,
            len(_seeds(ignored)),
            guard,
            refused=_REFUSED,
            longer=longer,
            widths=(width,),
        )


def _laid_out(block: Block, sizes: dict[int, int], given: tuple[Tensor, ...]) -> str:
    """The tests that values lie in order, where the block raises for others: a view of those is an error."""
    tests = ""
    for i, value in enumerate(given):
        if value.dim() > 1 and block.run is not None:
            turned = value.transpose(0, 1).contiguous().transpose(0, 1)
            runs = block.run(sizes, (*given[:i], turned, *given[i + 1 :])) is not None
            tests += "" if runs else f" and a{i}.is_contiguous()"
    return tests


def _seeds(ignored: int) -> tuple[tuple[tuple[int, ...], tuple[int, ...], float, str], ...]:
    return _COUNTED if ignored == _NO_CLASS else _SEEDS


def _draw(form: _Form, width: int, classes: int, ignored: int, seed: int) -> tuple[Tensor, ...]:
    two, three, size, odd = _seeds(ignored)[seed]
    rows = three if form.dims[seed % len(form.dims)] == 3 else two
    if odd == "all classes":
        rows = (min(classes, _DRAWN),) if len(rows) == 1 else (1, min(classes, _DRAWN) + 1)
    generator = torch.Generator().manual_seed(seed)
    x = size * torch.randn(*rows, width, generator=generator, dtype=torch.float64)
    shape = form.numbers(rows)
    target = torch.randint(classes, shape, generator=generator)
    if odd == "all classes":
        target = (classes - 1 - torch.arange(target.numel()) % classes).view(shape)
    elif odd == "all ignored":
        target.fill_(ignored)
    elif odd:
        others = {"ignored": ignored, "default": _DEFAULT, "one less than none": -1}
        target.view(-1)[-1] = others.get(odd, classes)
    return x, target


def _longer(form: _Form, draw: Callable[[int], tuple[Tensor, ...]], length: int, width: int) -> tuple[Tensor, ...]:
    """So many rows, of classes that are drawn."""
    rows = (length,) if form.dims == (2,) else (1, length)
    generator = torch.Generator().manual_seed(length)
    x = torch.randn(*rows, width, generator=generator, dtype=torch.float64)
    some, shape = draw(0)[1].flatten(), form.numbers(rows)
    return x, some.repeat(length)[: math.prod(shape)].view(shape)


def _agrees(
    block: Block, weight: str, bias: str | None, first: bool, ignored: int, form: _Form, sizes: dict[int, int]
) -> _Kind | None:
    """Which loss of a form the block gives; None where it gives none."""
    shape = block.tensors[weight]
    classes, width = (sizes[n] for n in (shape if first else shape[::-1]))
    kinds: list[_Kind] = []
    for seed in (0, 1):
        x, target = given = _draw(form, width, classes, ignored, seed)
        outcome = block.run(sizes, given) if block.run is not None else None
        if outcome is None or not isinstance(outcome[0], Tensor) or outcome[0].shape != ():
            return None
        result, tensors = outcome
        x, target = (x[:, :-1] if _BEFORE in form.x else x), (target[:, 1:] if form.target != "a1" else target)
        matrix = tensors[weight] if first else tensors[weight].t()
        z = functional.linear(x.flatten(0, -2), matrix, tensors[bias] if bias else None)
        kinds = [
            k for k in kinds or _kinds(result, z, target.flatten(), ignored) if _gives(k, result, z, target, ignored)
        ]
    return kinds[0] if kinds else None


def _kinds(result: Tensor, z: Tensor, target: Tensor, ignored: int) -> list[_Kind]:
    """Without smoothing, and with that which a loss would have, for each way to put the rows' losses together."""
    known = [_Kind(0.0, False), _Kind(0.0, True)]
    if ignored == _NO_CLASS:  # a mean that is written out
        more = float((result - _loss(known[0], z, target, ignored)) / z.logsumexp(-1).square().mean())
        return [_Kind(0.0, False, float(f"{more:.9g}"))] if more > 0 else []
    for summed in (False, True):
        plain, whole = (_loss(_Kind(smoothing, summed), z, target, ignored) for smoothing in (0.0, 1.0))
        smoothing = float((result - plain) / (whole - plain))
        if 0.0 < smoothing <= 1.0:
            known.append(_Kind(float(f"{smoothing:.9g}"), summed))
    return known


def _loss(kind: _Kind, z: Tensor, target: Tensor, ignored: int) -> Tensor:
    reduction = "sum" if kind.summed else "mean"
    loss = functional.cross_entropy(
        z, target, ignore_index=ignored, label_smoothing=kind.smoothing, reduction=reduction
    )
    return loss + kind.z * z.logsumexp(-1).square().mean() if kind.z else loss


def _gives(kind: _Kind, result: Tensor, z: Tensor, target: Tensor, ignored: int) -> bool:
    wanted = _loss(kind, z, target.flatten(), ignored)
    return bool((result - wanted).abs() <= _SAME * wanted.abs())
