"""What convolves causally in models: modules that pad on both sides and whose result is cut on the right; functions of
all tokens, and of the next ones after a state, which they renew.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.causal_conv1d.definition import ACTIVATIONS
from ferryman.ops.recognition import Block, Cut, Layer, Routine, Signature

# (batch, channels, length, width, magnitude) of a seed; the first has a bias, and every second one after it
_WHOLE = (
    (2, 3, 7, 4, 1.0),
    (1, 5, 9, 3, 2.0),
    (3, 4, 2, 4, 8.0),
    (2, 3, 6, 1, 1.0),
    (1, 2, 1, 4, 300.0),
    (2, 4, 5, 2, 1e-3),
)
# (batch, channels, new tokens, width, tokens that the state holds, magnitude)
_NEXT = ((2, 3, 1, 4, 4, 1.0), (1, 5, 1, 3, 2, 2.0), (3, 4, 2, 4, 4, 8.0), (2, 3, 5, 2, 3, 300.0), (1, 2, 1, 1, 1, 1.0))


def cuts(tensors: Mapping[str, tuple[int, ...]]) -> Iterator[Cut]:
    """A weight (channels, 1, width), and a bias or none."""
    weights = [n for n, shape in tensors.items() if len(shape) == 3 and shape[1] == 1]
    others = [n for n in tensors if n not in weights]
    if len(weights) != 1 or len(others) > 1:
        return
    (weight,) = weights
    channels, _, width = tensors[weight]
    bias = f"self.{others[0]}" if others else "None"
    if others and tensors[others[0]] != (channels,):
        return
    expression = f"ops.causal_conv1d(x, self.{weight}.squeeze(1), {bias})[0]"
    guard = f"x.dim() == 3 and x.dtype is self.{weight}.dtype and x.dtype.itemsize < 8"
    guard += f" and self.{weight}.shape[2] == {width}"  # what is padded is a number of its own
    yield Cut("causal_conv1d", expression, tuple((b, channels, n) for b, n in ((2, 7), (1, 1), (1, width + 8))), guard)


def blocks(block: Block) -> Iterator[Layer]:
    """What pads before it convolves: a weight (channels, 1, width) or (channels, width), and a bias or none. Channels
    stand before places, or after them."""
    weights = [n for n, shape in block.tensors.items() if len(shape) == 2 or (len(shape) == 3 and shape[1] == 1)]
    others = [n for n in block.tensors if n not in weights]
    if len(weights) != 1 or len(others) > 1 or block.inputs != 1:
        return
    (weight,) = weights
    shape = block.tensors[weight]
    channels, width = shape[0], shape[-1]
    if width > _WIDEST or channels > _MOST_CHANNELS or (others and block.tensors[others[0]] != (channels,)):
        return
    bias = f"self.{others[0]}" if others else "None"
    plain = f"self.{weight}{'.squeeze(1)' if len(shape) == 3 else ''}"
    guard = f"a0.dim() == 3 and a0.shape[2] > 0 and a0.dtype is self.{weight}.dtype and a0.dtype.itemsize < 8"
    guard += f" and a0.shape[1] == self.{weight}.shape[0] and self.{weight}.shape[-1] == {width}"
    sizes = {size: size for size in (*shape, channels)}
    for turned in (False, True):
        draw = functools.partial(_draw_channels, channels, width, turned)
        outcome = None if block.run is None else block.run(sizes, draw(0))
        if outcome is None or not isinstance(outcome[0], Tensor) or outcome[0].shape != draw(0)[0].shape:
            continue
        x = "a0.mT" if turned else "a0"
        given = guard.replace("a0.shape", f"{x}.shape")
        for activation in (None, "silu"):
            expression = f"ops.causal_conv1d({x}, {plain}, {bias}, None, {activation!r})[0]{'.mT' * turned}"
            axis = 1 if turned else 2
            yield Layer("causal_conv1d", expression, sizes, draw, len(_BATCHES), given, refused=1, axis=axis)


_WIDEST, _MOST_CHANNELS = 16, 1 << 14
# (batch, length beside the width, magnitude) of a seed; what shifts by padding may refuse the last, which is shorter
_BATCHES = ((2, 5, 1.0), (1, 2, 2.0), (3, 0, 8.0), (1, 11, 300.0), (2, 1, 1e-3), (1, -2, 2.0))


def _draw_channels(channels: int, width: int, turned: bool, seed: int) -> tuple[Tensor, ...]:
    batch, more, size = _BATCHES[seed]
    shape = (batch, channels, max(1, width + more))
    x = size * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (x.mT.contiguous() if turned else x,)


def routines(signature: Signature) -> Iterator[Routine]:
    """x, weight; x, state, weight: and a bias and an activation's name, required or not, in either order."""
    absent = [i for i, value in enumerate(signature.defaults) if value is None]
    if len(absent) != len(signature.defaults) or len(absent) > 2:
        return
    count = signature.required + len(absent)
    for tensors, stateful in ((2, False), (3, True)):
        if signature.required < tensors:
            continue
        more = range(tensors, count)
        for roles in itertools.permutations(("bias", "activation"), len(more)) if len(more) <= 2 else ():
            place = dict(zip(roles, more, strict=True))
            if place.get("activation", count) < signature.required:
                continue
            # a bias that is required is always given
            yield from _of(count, stateful, place, place.get("bias", count) < signature.required)


def _of(count: int, stateful: bool, place: dict[str, int], always: bool) -> Iterator[Routine]:
    bias = f"a{place['bias']}" if "bias" in place else "None"
    weight = "a2" if stateful else "a1"
    test = (
        f"a0.dim() == 3 and a0.shape[2] > 0 and {weight}.dim() == 2 and {weight}.shape[0] == a0.shape[1]"
        f" and a0.dtype is {weight}.dtype"
    )
    if bias != "None":
        test += f" and ({bias} is None or {bias}.dtype is a0.dtype)"
    if stateful:
        test += f" and a1.dim() == 3 and a1.dtype is a0.dtype and a1.shape[2] >= {weight}.shape[1] - 1"
    for activation in ACTIVATIONS:
        fixed = {place["activation"]: activation} if "activation" in place else {}
        if stateful:
            before = f"a1[..., a1.shape[2] - {weight}.shape[1] + 1 :]"
            expression = (
                f"(ops.causal_conv1d(a0, {weight}, {bias}, {before}, {activation!r})[0], "
                "torch.cat((a1, a0), -1)[..., a0.shape[2] :])"
            )
            draw = functools.partial(_draw_next, count, place, fixed, always)
            yield Routine("causal_conv1d", expression, draw, len(_NEXT), test, fixed, 1, gradient=False)
        else:
            expression = f"ops.causal_conv1d(a0, {weight}, {bias}, None, {activation!r})[0]"
            draw = functools.partial(_draw, count, place, fixed, always)
            yield Routine("causal_conv1d", expression, draw, len(_WHOLE), test, fixed)


def _given(
    count: int, tensors: list[Tensor], bias: Tensor | None, place: dict[str, int], fixed: dict[int, Any]
) -> tuple[Any, ...]:
    arguments: list[Any] = [*tensors, *([None] * (count - len(tensors)))]
    if "bias" in place:
        arguments[place["bias"]] = bias
    for at, value in fixed.items():
        arguments[at] = value
    return tuple(arguments)


def _draw(count: int, place: dict[str, int], fixed: dict[int, Any], always: bool, seed: int) -> tuple[Any, ...]:
    batch, channels, length, width, size = _WHOLE[seed]
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, channels, length), (channels, width), (channels,))
    x, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return _given(count, [size * x, weight], bias if always or seed % 2 == 0 else None, place, fixed)


def _draw_next(count: int, place: dict[str, int], fixed: dict[int, Any], always: bool, seed: int) -> tuple[Any, ...]:
    batch, channels, length, width, past, size = _NEXT[seed]
    generator = torch.Generator().manual_seed(seed)
    shapes = ((batch, channels, length), (batch, channels, past), (channels, width), (channels,))
    x, state, weight, bias = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
    return _given(count, [size * x, state, weight], bias if always or seed % 2 == 0 else None, place, fixed)
