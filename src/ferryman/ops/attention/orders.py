"""Orders in which code has queries, keys, values and masks, and inputs that are drawn in them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

# (batch, key heads, queries, keys, head size, magnitude) of a seed; in the last a query is NaN
SIZES = (
    (2, 2, 6, 6, 8, 1.0),
    (1, 1, 5, 9, 12, 1.0),
    (2, 3, 4, 4, 16, 3.0),
    (1, 2, 7, 7, 5, 300.0),
    (2, 1, 3, 8, 8, 2.0**-10),
    (1, 2, 1, 1, 8, 1.0),
    (1, 2, 6, 6, 8, 1.0),
)

WIDTHS = (*range(4, 129, 4), 144, 160, 176, 192, 224, 256)  # head sizes
VALUES = (4, 8, 8, 7, 12, 4, 4)  # sizes of values in these, where the code takes others than of keys


# how a fourth input hides: the text that makes it the op's mask. "truth": as `keep`, of any dtype that compares with 0
MASKS = {"truth": "({} != 0)", "keep": "{}", "hide": "{}.logical_not()", "bias": "{}"}


SIZED = "size"  # the fourth input is (B, S, any): how many rows it has says where the diagonal ends


@dataclass(frozen=True)
class Layout:
    """rows, heads, size: the axes of queries or keys, of heads, and of a head's numbers; -1: heads are part of the
    batch. inward, outward: to the op's order and back."""

    rows: int
    heads: int
    inward: str
    outward: str
    size: int = -1

    @property
    def dims(self) -> int:
        return 3 if self.heads < 0 else 4

    def of(self, x: Tensor) -> Tensor:
        """(B, H, S, D) in this order."""
        x = x if self.size == -1 else x.mT
        if self.heads < 0:
            return x.flatten(0, 1)
        return x.transpose(1, 2) if self.heads == 2 else x

    def turned(self) -> Layout | None:
        """With the size before the rows, as keys lie before a product; None where nobody has it."""
        if self.heads == 2:
            return None
        return replace(
            self, rows=self.rows + 1, inward=self.inward.format("{}.mT"), outward=f"{self.outward}.mT", size=-2
        )


HEADS_FIRST = Layout(2, 1, "{}", "{}")


ROWS_FIRST = Layout(1, 2, "{}.transpose(1, 2)", "{}.transpose(1, 2)")


ONE_BATCH = Layout(1, -1, "{}.unsqueeze(1)", "{}.squeeze(1)")


LAYOUTS = (HEADS_FIRST, ROWS_FIRST, ONE_BATCH)


# of queries, and of keys and values: those without an axis of heads are one head of all queries
ORDERS = (*((layout, layout) for layout in LAYOUTS), (HEADS_FIRST, ONE_BATCH), (ROWS_FIRST, ONE_BATCH))


@dataclass(frozen=True)
class Reading:
    """Which input is which, and how: ``places`` of q, k, v and a mask, and the layouts of the first three, of which
    ``inner`` has the order. group: query heads for a key head, 0: any; one: a single key head serves all, too. shared:
    the mask may be (Sq, Sk), too. heads: so many key heads alone; 0: any. mean: a row that sees nothing is the mean of
    the values, and not NaN. sinks: an expression of a logit for each query head, of which there are ``total`` then.
    added: what is hidden has -inf added, so that a row of NaN stays one. alone: the mask is (Sq, Sk) alone. apart:
    values may have another size than keys."""

    places: tuple[int, ...]
    inner: Layout
    own: tuple[Layout, ...]
    outer: Layout
    group: int
    mask: str
    causal: bool
    scale: float | None
    softcap: float
    one: bool = False
    shared: bool = True
    square: bool = True
    heads: int = 0
    mean: bool = False
    sinks: str = ""
    total: int = 0
    added: bool = False
    alone: bool = False
    apart: bool = False

    @property
    def single(self) -> bool:
        """Whether keys and values are one head, without an axis of heads, beside queries that have one."""
        return self.inner.heads >= 0 > self.own[1].heads

    def draw(self, seed: int) -> tuple[Tensor, ...]:
        batch, heads, queries, keys, width, size = SIZES[seed]
        keys = queries if self.square else keys
        group = self.group or (2, 1, 3)[seed % 3]
        if self.one and seed % 2 and not self.heads:
            heads, group = 1, 2
        heads = self.heads or heads
        heads, group = self.of_total(heads, group)
        values = VALUES[seed] if self.apart else width
        given = inputs_of(self, batch, heads, group, queries, keys, width, seed, size, values)
        if seed == len(SIZES) - 1:
            self.own[0].of(given[self.places[0]])[..., 0, 0] = math.nan
        return tuple(given)

    def longer(self, length: int, width: int) -> tuple[Tensor, ...]:
        """Of many heads where the length is little. Of values that are apart, the largest size beside the least."""
        heads, group = self.of_total(self.heads or (64 if length < 9 else 1), self.group or 1)
        values = WIDTHS[-1 - WIDTHS.index(width)] if self.apart else width
        return tuple(inputs_of(self, 1, heads, group, length, length, width, 0, 1.0, values))

    def of_total(self, heads: int, group: int) -> tuple[int, int]:
        """Numbers of key heads, and of query heads for each, with as many query heads as there are logits for."""
        if not self.total:
            return heads, group
        group = group if self.total % group == 0 else 1
        return self.total // group, group


def inputs_of(
    reading: Reading,
    batch: int,
    heads: int,
    group: int,
    queries: int,
    keys: int,
    width: int,
    seed: int,
    size: float,
    values: int | None = None,
) -> list[Tensor]:
    """``values``: their size, where it is another than that of queries and keys."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return size * torch.randn(shape, generator=draw, dtype=torch.float64)

    sides = [(heads * group, queries, width), (heads, keys, width), (heads, keys, values or width)]
    qkv = [normal(batch, *side) for side in sides]
    far = size == max(known[-1] for known in SIZES)
    if far:  # what two queries see of the first key is less than many a number that hides the rest
        qkv[0][:, :, :2] = -qkv[1][:, :, :1].repeat_interleave(group, 1)
    own = [layout.of(x) for layout, x in zip(reading.own, qkv, strict=True)]
    own[0] = own[0].clone()
    if reading.mask == SIZED:
        own.append(normal(batch, queries, 7 + 2 * seed))
    elif reading.mask:
        own.append(_mask(reading, batch, heads * group, queries, keys, seed > 2, seed % 2 == 1, draw, far))
    given = [torch.empty(0)] * len(own)
    for place, x in zip(reading.places, own, strict=True):
        given[place] = x
    return given


def mask_shape(reading: Reading, batch: int, heads: int, queries: int, keys: int) -> tuple[int, ...]:
    if reading.alone:
        return queries, keys
    return (batch * heads, queries, keys) if reading.inner is ONE_BATCH else (batch, 1, queries, keys)


def _mask(
    reading: Reading,
    batch: int,
    heads: int,
    queries: int,
    keys: int,
    blind: bool,
    alone: bool,
    draw: torch.Generator,
    far: bool = False,
) -> Tensor:
    """One in whose rows some key is seen, but for the first row of each sequence where it is ``blind``; ``alone``: of
    all sequences, where the code takes one; ``far``: the second row sees the first key alone."""
    shape = mask_shape(reading, batch, heads, queries, keys)
    if reading.shared and alone and not reading.alone:
        # of each head or of all, where the code takes both
        shape = (heads, queries, keys) if reading.inner is not ONE_BATCH and queries == 4 else (queries, keys)
    seen = torch.rand(shape, generator=draw) < 0.6
    seen[..., 0] = True
    seen[..., :1, :] &= not blind
    if blind and reading.causal and queries > 2:  # of the third row, all that is no later key is hidden
        seen[..., 2, :3], seen[..., 2, 3:] = False, True
    if far and queries > 1:
        seen[..., 1, 1:] = False
    if reading.mask == "bias":
        return torch.randn(shape, generator=draw, dtype=torch.float64).masked_fill(~seen, -math.inf)
    if reading.mask == "truth" and not blind:
        return seen.double()
    return ~seen if reading.mask == "hide" else seen
