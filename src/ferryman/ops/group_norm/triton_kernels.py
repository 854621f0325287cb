"""group_norm in Triton. A group that registers hold is read once (`triton.rows`); a longer one in tiles of some of its
channels and places (`triton.long`): its moments first, as those of parts, then the result.

A tile is (channels, places) whatever the strides are, so that either may be the dense one. Sums of gradients stay those
of channels until the weight's are taken; no sum depends on the number of samples.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ferryman.backends.base import Target
from ferryman.backends.triton import Specialisation, launch, recorded
from ferryman.backends.triton_lang import inverse_root, narrow, widen
from ferryman.backends.triton_rows import lanes
from ferryman.ops.group_norm import layout

TILE = 2048  # elements of a long group that a program holds at a time
WARPS = 4
TILES_A_PART = 4  # at least: a part's moments cost each program of the next pass a read
PARTS = 64  # of a group, or of a channel's places, at most
CHANNELS = 32  # columns of a program that sums over samples


@triton.jit
def _place(sample, channel, place, of_sample, of_channel, of_place):
    """Elements from a tensor's first to these."""
    return sample.to(tl.int64) * of_sample + channel.to(tl.int64) * of_channel + place.to(tl.int64) * of_place


@triton.jit
def _of_channels(vector, channel, inside):
    """A weight's or a bias's element for each channel."""
    return widen(tl.load(vector + channel, mask=inside, other=0.0))


@triton.jit
def _groups(groups, num_groups, per_group, places, ROWS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr):
    """(samples, channels and places of a program's whole groups; which channels, and which elements, there are)."""
    group = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None, None]
    c = tl.arange(0, BLOCK_C)[None, :, None]
    p = tl.arange(0, BLOCK_P)[None, None, :]
    known = (group < groups) & (c < per_group)
    return group // num_groups, (group % num_groups) * per_group + c, p, known, known & (p < places)


@triton.jit
def _sum_of_group(x):
    """Sums of groups (ROWS, channels, places), one axis after the other: Triton 3.6 sums a reshaped tile wrongly where
    its last axis lies in lanes that are not neighbours."""
    return tl.sum(tl.sum(x, 2, keep_dims=True), 1, keep_dims=True)


@triton.jit
def _mean_and_inverse(x, count, inside, eps):
    """(centred values, 0 outside; reciprocal deviations) of groups (ROWS, channels, places)."""
    centred = tl.where(inside, x - _sum_of_group(x) / count, 0.0)
    return centred, inverse_root(_sum_of_group(centred * centred) / count + eps)


@triton.jit
def rows_kernel(
    x,
    weight,
    bias,
    y,
    groups,
    num_groups,
    per_group,
    places,
    x_sample,
    x_channel,
    x_place,
    y_sample,
    y_channel,
    y_place,
    count,
    eps,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """ROWS whole groups a program."""
    sample, channel, p, known, inside = _groups(groups, num_groups, per_group, places, ROWS, BLOCK_C, BLOCK_P)
    values = widen(tl.load(x + _place(sample, channel, p, x_sample, x_channel, x_place), mask=inside, other=0.0))
    out, r = _mean_and_inverse(values, count, inside, eps)
    out *= r
    if weight is not None:
        out *= _of_channels(weight, channel, known)
    if bias is not None:
        out += _of_channels(bias, channel, known)
    where = y + _place(sample, channel, p, y_sample, y_channel, y_place)
    tl.store(where, narrow(out, y.dtype.element_ty), mask=inside)


@triton.jit
def rows_backward_kernel(
    grad,
    x,
    weight,
    grad_x,
    products,
    sums,
    groups,
    num_groups,
    per_group,
    places,
    g_sample,
    g_channel,
    g_place,
    x_sample,
    x_channel,
    x_place,
    o_sample,
    o_channel,
    o_place,
    count,
    eps,
    ROWS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """ROWS whole groups a program. products, sums: (samples, channels) of grad * n and grad, or None."""
    sample, channel, p, known, inside = _groups(groups, num_groups, per_group, places, ROWS, BLOCK_C, BLOCK_P)
    values = widen(tl.load(x + _place(sample, channel, p, x_sample, x_channel, x_place), mask=inside, other=0.0))
    g = widen(tl.load(grad + _place(sample, channel, p, g_sample, g_channel, g_place), mask=inside, other=0.0))
    n, r = _mean_and_inverse(values, count, inside, eps)
    n *= r
    product = tl.sum(g * n, 2, keep_dims=True)
    total = tl.sum(g, 2, keep_dims=True)
    line = sample.to(tl.int64) * (num_groups * per_group) + channel
    if products is not None:
        tl.store(products + line, product, mask=known)
    if sums is not None:
        tl.store(sums + line, total, mask=known)
    if weight is not None:
        w = _of_channels(weight, channel, known)
        g *= w
        product *= w
        total *= w
    slope = tl.sum(product, 1, keep_dims=True) / count
    inner = g - tl.sum(total, 1, keep_dims=True) / count - n * slope
    where = grad_x + _place(sample, channel, p, o_sample, o_channel, o_place)
    tl.store(where, narrow(inner * r, grad_x.dtype.element_ty), mask=inside)


@triton.jit
def _tile(tile, tiles_in_row, per_group, places, BLOCK_C: tl.constexpr, BLOCK_P: tl.constexpr):
    """(channels within the group, places, which elements there are, their number) of one of a group's tiles."""
    first_c = (tile // tiles_in_row) * BLOCK_C
    first_p = (tile % tiles_in_row) * BLOCK_P
    c = first_c + tl.arange(0, BLOCK_C)[:, None]
    p = first_p + tl.arange(0, BLOCK_P)[None, :]
    number = tl.minimum(per_group - first_c, BLOCK_C) * tl.minimum(places - first_p, BLOCK_P)
    return c, p, (c < per_group) & (p < places), number


@triton.jit
def moments_kernel(
    x,
    moments,
    num_groups,
    per_group,
    places,
    x_sample,
    x_channel,
    x_place,
    tiles,
    tiles_in_row,
    tiles_a_part,
    parts,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One part of a group: (number of values, mean, sum of squares about it), tile by tile."""
    group = tl.program_id(0) // parts
    part = tl.program_id(0) % parts
    number = 0.0
    mean = 0.0
    square = 0.0
    for tile in range(part * tiles_a_part, tl.minimum((part + 1) * tiles_a_part, tiles)):
        c, p, inside, more = _tile(tile, tiles_in_row, per_group, places, BLOCK_C, BLOCK_P)
        channel = (group % num_groups) * per_group + c
        where = x + _place(group // num_groups, channel, p, x_sample, x_channel, x_place)
        values = widen(tl.load(where, mask=inside, other=0.0))
        own = tl.sum(tl.reshape(values, (BLOCK_C * BLOCK_P,)), 0) / more
        centred = tl.where(inside, values - own, 0.0)
        apart = own - mean
        share = more / (number + more)
        square += tl.sum(tl.reshape(centred * centred, (BLOCK_C * BLOCK_P,)), 0) + apart * (apart * (number * share))
        mean += apart * share
        number += more
    where = moments + tl.program_id(0).to(tl.int64) * 3
    tl.store(where, number)
    tl.store(where + 1, mean)
    tl.store(where + 2, square)


@triton.jit
def _joined(moments, group, parts, count, eps, PARTS: tl.constexpr):
    """(mean, reciprocal deviation) of a group, from its parts' moments."""
    part = tl.arange(0, PARTS)
    where = moments + (group.to(tl.int64) * parts + part) * 3
    share = tl.load(where, mask=part < parts, other=0.0) / count
    means = tl.load(where + 1, mask=part < parts, other=0.0)
    squares = tl.load(where + 2, mask=part < parts, other=0.0)
    mean = tl.sum(share * means, 0)
    apart = means - mean
    return mean, inverse_root(tl.sum(squares / count + apart * (apart * share), 0) + eps)


@triton.jit
def long_kernel(
    x,
    weight,
    bias,
    y,
    moments,
    num_groups,
    per_group,
    places,
    x_sample,
    x_channel,
    x_place,
    y_sample,
    y_channel,
    y_place,
    count,
    eps,
    tiles,
    tiles_in_row,
    parts,
    PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One tile of a group."""
    group = tl.program_id(0) // tiles
    mean, r = _joined(moments, group, parts, count, eps, PARTS)
    c, p, inside, _ = _tile(tl.program_id(0) % tiles, tiles_in_row, per_group, places, BLOCK_C, BLOCK_P)
    sample = group // num_groups
    channel = (group % num_groups) * per_group + c
    values = widen(tl.load(x + _place(sample, channel, p, x_sample, x_channel, x_place), mask=inside, other=0.0))
    out = (values - mean) * r
    if weight is not None:
        out *= _of_channels(weight, channel, c < per_group)
    if bias is not None:
        out += _of_channels(bias, channel, c < per_group)
    where = y + _place(sample, channel, p, y_sample, y_channel, y_place)
    tl.store(where, narrow(out, y.dtype.element_ty), mask=inside)


@triton.jit
def sums_kernel(
    grad,
    x,
    moments,
    products,
    sums,
    num_groups,
    per_group,
    places,
    g_sample,
    g_channel,
    g_place,
    x_sample,
    x_channel,
    x_place,
    count,
    eps,
    parts,
    blocks,
    tiles_in_row,
    tiles_a_piece,
    pieces,
    PARTS: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Of some channels of a group, over a piece of their places: the sums of grad * n and of grad.

    products, sums: (samples, pieces, channels). blocks: of channels in a group.
    """
    piece = tl.program_id(0) % pieces
    block = tl.program_id(0) // pieces
    group = block // blocks
    mean, r = _joined(moments, group, parts, count, eps, PARTS)
    sample = group // num_groups
    product = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    total = tl.zeros((BLOCK_C, BLOCK_P), tl.float32)
    first = (block % blocks) * tiles_in_row
    for tile in range(piece * tiles_a_piece, tl.minimum((piece + 1) * tiles_a_piece, tiles_in_row)):
        c, p, inside, _ = _tile(first + tile, tiles_in_row, per_group, places, BLOCK_C, BLOCK_P)
        channel = (group % num_groups) * per_group + c
        g = widen(tl.load(grad + _place(sample, channel, p, g_sample, g_channel, g_place), mask=inside, other=0.0))
        values = widen(tl.load(x + _place(sample, channel, p, x_sample, x_channel, x_place), mask=inside, other=0.0))
        total += g
        product += tl.where(inside, g * ((values - mean) * r), 0.0)
    own = (block % blocks) * BLOCK_C + tl.arange(0, BLOCK_C)
    where = (sample.to(tl.int64) * pieces + piece) * (num_groups * per_group) + (group % num_groups) * per_group + own
    tl.store(products + where, tl.sum(product, 1), mask=own < per_group)
    tl.store(sums + where, tl.sum(total, 1), mask=own < per_group)


@triton.jit
def long_backward_kernel(
    grad,
    x,
    weight,
    grad_x,
    moments,
    products,
    sums,
    num_groups,
    per_group,
    places,
    g_sample,
    g_channel,
    g_place,
    x_sample,
    x_channel,
    x_place,
    o_sample,
    o_channel,
    o_place,
    count,
    eps,
    tiles,
    tiles_in_row,
    parts,
    pieces,
    PARTS: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """One tile of a group's gradient, from its channels' sums."""
    group = tl.program_id(0) // tiles
    mean, r = _joined(moments, group, parts, count, eps, PARTS)
    sample = group // num_groups
    origin = (group % num_groups) * per_group
    slope = tl.zeros((BLOCK_S,), tl.float32)
    shift = tl.zeros((BLOCK_S,), tl.float32)
    for first in range(0, per_group * pieces, BLOCK_S):
        i = first + tl.arange(0, BLOCK_S)
        known = i < per_group * pieces
        channel = origin + i % per_group
        where = (sample.to(tl.int64) * pieces + i // per_group) * (num_groups * per_group) + channel
        product = tl.load(products + where, mask=known, other=0.0)
        total = tl.load(sums + where, mask=known, other=0.0)
        if weight is not None:
            w = _of_channels(weight, channel, known)
            product *= w
            total *= w
        slope += product
        shift += total
    c, p, inside, _ = _tile(tl.program_id(0) % tiles, tiles_in_row, per_group, places, BLOCK_C, BLOCK_P)
    channel = origin + c
    values = widen(tl.load(x + _place(sample, channel, p, x_sample, x_channel, x_place), mask=inside, other=0.0))
    inner = widen(tl.load(grad + _place(sample, channel, p, g_sample, g_channel, g_place), mask=inside, other=0.0))
    if weight is not None:
        inner *= _of_channels(weight, channel, c < per_group)
    inner -= tl.sum(shift, 0) / count + (values - mean) * r * (tl.sum(slope, 0) / count)
    where = grad_x + _place(sample, channel, p, o_sample, o_channel, o_place)
    tl.store(where, narrow(inner * r, grad_x.dtype.element_ty), mask=inside)


@triton.jit
def columns_kernel(products, sums, grad_weight, grad_bias, lines, channels, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr):
    """Sums of columns, of what is not None: samples' and pieces' become the vectors' gradients."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    product = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    total = tl.zeros((BLOCK, BLOCK_C), tl.float32)
    for first in range(0, lines, BLOCK):
        line = first + tl.arange(0, BLOCK)[:, None]
        inside = (line < lines) & (c < channels)
        where = line.to(tl.int64) * channels + c
        if grad_weight is not None:
            product += tl.load(products + where, mask=inside, other=0.0)
        if grad_bias is not None:
            total += tl.load(sums + where, mask=inside, other=0.0)
    if grad_weight is not None:
        out = narrow(tl.sum(product, 0, keep_dims=True), grad_weight.dtype.element_ty)
        tl.store(grad_weight + c, out, mask=c < channels)
    if grad_bias is not None:
        out = narrow(tl.sum(total, 0, keep_dims=True), grad_bias.dtype.element_ty)
        tl.store(grad_bias + c, out, mask=c < channels)


class _Tiles(NamedTuple):
    """How a long group is divided: (channels, places) of a tile, tiles in all and along the places."""

    channels: int
    places: int
    blocks: int
    in_row: int

    @property
    def all(self) -> int:
        return self.blocks * self.in_row


def _tiles(per_group: int, places: int) -> _Tiles:
    block_p = min(layout.power(places), TILE)
    block_c = min(layout.power(per_group), TILE // block_p)
    return _Tiles(block_c, block_p, triton.cdiv(per_group, block_c), triton.cdiv(places, block_p))


def _parts(tiles: int) -> tuple[int, int]:
    """(tiles of a part, parts), by a group's size alone, so that a sample's sums are the same in any batch."""
    of_a_part = max(TILES_A_PART, triton.cdiv(tiles, PARTS))
    return of_a_part, triton.cdiv(tiles, of_a_part)


class _Rows(NamedTuple):
    """Groups of a program that holds whole ones, and its warps: 16 elements a thread, 4 warps at least. These follow
    from a group's size alone, too."""

    groups: int
    warps: int

    @classmethod
    def of(cls, padded: int, target: Target) -> _Rows:
        wave = lanes(target)
        groups = max(1, 64 * wave // padded)
        return cls(groups, min(max(4, groups * padded // (16 * wave)), target.max_threads // wave))


def group_norm(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> Tensor:
    y = layout.empty_like(x)
    if not y.numel():
        return y
    samples, channels, places = layout.sizes(x)
    per_group, groups = channels // num_groups, samples * num_groups
    count = float(per_group * places)
    x, steps = layout.flat(x)
    _, out = layout.flat(y)
    tile = _Rows.of(layout.padded(x, num_groups), target)
    launch(
        rows_kernel,
        (triton.cdiv(groups, tile.groups),),
        x,
        _dense(weight),
        _dense(bias),
        y,
        groups,
        num_groups,
        per_group,
        places,
        *steps,
        *out,
        count,
        eps,
        device=x.device,
        ROWS=tile.groups,
        BLOCK_C=layout.power(per_group),
        BLOCK_P=layout.power(places),
        num_warps=tile.warps,
    )
    return y


def group_norm_long(
    x: Tensor, num_groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, target: Target
) -> Tensor:
    y = layout.empty_like(x)
    if not y.numel():
        return y
    samples, channels, places = layout.sizes(x)
    per_group, groups = channels // num_groups, samples * num_groups
    count = float(per_group * places)
    x, steps = layout.flat(x)
    _, out = layout.flat(y)
    tiles = _tiles(per_group, places)
    moments, parts = _moments(x, steps, num_groups, per_group, places, groups, tiles)
    launch(
        long_kernel,
        (groups * tiles.all,),
        x,
        _dense(weight),
        _dense(bias),
        y,
        moments,
        num_groups,
        per_group,
        places,
        *steps,
        *out,
        count,
        eps,
        tiles.all,
        tiles.in_row,
        parts,
        device=x.device,
        PARTS=layout.power(parts),
        BLOCK_C=tiles.channels,
        BLOCK_P=tiles.places,
        num_warps=WARPS,
    )
    return y


def _moments(
    x: Tensor, steps: tuple[int, int, int], num_groups: int, per_group: int, places: int, groups: int, tiles: _Tiles
) -> tuple[Tensor, int]:
    of_a_part, parts = _parts(tiles.all)
    moments = torch.empty((groups, parts, 3), dtype=torch.float32, device=x.device)
    launch(
        moments_kernel,
        (groups * parts,),
        x,
        moments,
        num_groups,
        per_group,
        places,
        *steps,
        tiles.all,
        tiles.in_row,
        of_a_part,
        parts,
        device=x.device,
        BLOCK_C=tiles.channels,
        BLOCK_P=tiles.places,
        num_warps=WARPS,
    )
    return moments, parts


def _dense(vector: Tensor | None) -> Tensor | None:
    return None if vector is None else vector.contiguous()


class _Wanted(NamedTuple):
    """A backward's results; of the vectors those that are wanted, else None."""

    x: Tensor
    weight: Tensor | None
    bias: Tensor | None

    @classmethod
    def of(cls, x: Tensor, weight: Tensor | None, bias: Tensor | None, need_weight: bool, need_bias: bool) -> _Wanted:
        """Of a call without elements the vectors' are zeros."""
        make = x.new_empty if x.numel() else x.new_zeros
        of_weight, of_bias = (
            make(x.shape[1]) if vector is not None and needed else None
            for vector, needed in ((weight, need_weight), (bias, need_bias))
        )
        return cls(layout.empty_like(x), of_weight, of_bias)

    def results(self) -> tuple[Tensor, Tensor, Tensor]:
        weight, bias = (self.x.new_empty(0) if v is None else v for v in (self.weight, self.bias))
        return self.x, weight, bias

    def columns(self, products: Tensor | None, sums: Tensor | None, lines: int, channels: int) -> None:
        if self.weight is None and self.bias is None:
            return
        block = min(layout.power(lines), 32)
        launch(
            columns_kernel,
            (triton.cdiv(channels, CHANNELS),),
            products,
            sums,
            self.weight,
            self.bias,
            lines,
            channels,
            device=self.x.device,
            BLOCK=block,
            BLOCK_C=CHANNELS,
            num_warps=4,
        )


def group_norm_backward(
    grad: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    need_weight: bool,
    need_bias: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = _Wanted.of(x, weight, bias, need_weight, need_bias)
    if not x.numel():
        return wanted.results()
    samples, channels, places = layout.sizes(x)
    per_group, groups = channels // num_groups, samples * num_groups
    count = float(per_group * places)
    x, steps = layout.flat(x)
    grad, of_grad = layout.flat(grad)
    _, out = layout.flat(wanted.x)
    tile = _Rows.of(layout.padded(x, num_groups), target)
    products, sums = (
        None if v is None else torch.empty((samples, channels), dtype=torch.float32, device=x.device)
        for v in (wanted.weight, wanted.bias)
    )
    launch(
        rows_backward_kernel,
        (triton.cdiv(groups, tile.groups),),
        grad,
        x,
        _dense(weight),
        wanted.x,
        products,
        sums,
        groups,
        num_groups,
        per_group,
        places,
        *of_grad,
        *steps,
        *out,
        count,
        eps,
        device=x.device,
        ROWS=tile.groups,
        BLOCK_C=layout.power(per_group),
        BLOCK_P=layout.power(places),
        num_warps=tile.warps,
    )
    wanted.columns(products, sums, samples, channels)
    return wanted.results()


def group_norm_backward_long(
    grad: Tensor,
    x: Tensor,
    num_groups: int,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    need_weight: bool,
    need_bias: bool,
    target: Target,
) -> tuple[Tensor, Tensor, Tensor]:
    wanted = _Wanted.of(x, weight, bias, need_weight, need_bias)
    if not x.numel():
        return wanted.results()
    samples, channels, places = layout.sizes(x)
    per_group, groups = channels // num_groups, samples * num_groups
    count = float(per_group * places)
    x, steps = layout.flat(x)
    grad, of_grad = layout.flat(grad)
    _, out = layout.flat(wanted.x)
    tiles = _tiles(per_group, places)
    moments, parts = _moments(x, steps, num_groups, per_group, places, groups, tiles)
    of_a_piece, pieces = _parts(tiles.in_row)
    products, sums = (torch.empty((samples, pieces, channels), dtype=torch.float32, device=x.device) for _ in range(2))
    blocks: dict[str, Any] = {"PARTS": layout.power(parts), "BLOCK_C": tiles.channels, "BLOCK_P": tiles.places}
    launch(
        sums_kernel,
        (groups * tiles.blocks * pieces,),
        grad,
        x,
        moments,
        products,
        sums,
        num_groups,
        per_group,
        places,
        *of_grad,
        *steps,
        count,
        eps,
        parts,
        tiles.blocks,
        tiles.in_row,
        of_a_piece,
        pieces,
        device=x.device,
        **blocks,
        num_warps=WARPS,
    )
    launch(
        long_backward_kernel,
        (groups * tiles.all,),
        grad,
        x,
        _dense(weight),
        wanted.x,
        moments,
        products,
        sums,
        num_groups,
        per_group,
        places,
        *of_grad,
        *steps,
        *out,
        count,
        eps,
        tiles.all,
        tiles.in_row,
        parts,
        pieces,
        device=x.device,
        BLOCK_S=min(layout.power(per_group * pieces), 1024),
        **blocks,
        num_warps=WARPS,
    )
    wanted.columns(products, sums, samples * pieces, channels)
    return wanted.results()


# (samples, channels, places), groups: of few places, of a picture's, of a group that is read in parts
_SHAPES = (((64, 256), 32), ((8, 320, 16), 32), ((8, 640, 8, 8), 32), ((2, 320, 64, 64), 32), ((2, 128, 256, 256), 32))


def specialisations(target: Target, dtype: str) -> list[Specialisation]:
    """What `ferryman compile` compiles: the launchers' own calls on tensors without data, in either order of memory."""
    calls = []
    for shape, num_groups in _SHAPES:
        x = torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
        forms = [x] if x.dim() != 4 else [x, x.contiguous(memory_format=torch.channels_last)]
        line = torch.empty(shape[1], dtype=x.dtype, device="meta")
        for form in forms:
            calls += _calls(form, num_groups, line, target)
    return recorded(calls)


def _calls(x: Tensor, num_groups: int, line: Tensor, target: Target) -> list[Any]:
    calls: list[Any] = []
    if layout.fits(x, num_groups, target.max_threads, 1):
        calls.append(lambda: group_norm(x, num_groups, line, line, 1e-5, target))
    else:
        calls.append(lambda: group_norm_long(x, num_groups, line, line, 1e-5, target))
    if layout.fits(x, num_groups, target.max_threads, 2):
        calls.append(lambda: group_norm_backward(x, x, num_groups, line, line, 1e-5, True, True, target))
    else:
        calls.append(lambda: group_norm_backward_long(x, x, num_groups, line, line, 1e-5, True, True, target))
    return calls
