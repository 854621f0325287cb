"""Calls of these SIMT launchers, every kind of plan, dtype, layout and special value: tests/unit/test_simt_kernels.py
judges each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from ferryman.ops.softmax import simt_kernels as softmax
from ferryman.ops.softmax.simt_softmax_backward_kernels import softmax_backward
from tests.unit.simt_cases import (
    BF16,
    CLUSTERS,
    F16,
    F32,
    FEW_ROWS,
    ROW_SHAPES,
    STREAM,
    STREAMED,
    Case,
    Inputs,
    Launch,
    Rows,
    layouts,
    misaligned,
    plain,
    planted,
    random,
    short_and_long,
)

ROWS = {"softmax": Rows(lambda wave, itemsize, weights: softmax.demand(wave, itemsize), 262_144)}


def _softmax_cases() -> Iterator[Case]:
    def case(name: str, make: Callable[[], Tensor], *where: Any) -> Case:
        return Case(f"softmax_{name}", softmax.softmax, lambda: (make(),), *where)

    def of(rows: int, n: int, dtype: torch.dtype = BF16, scale: float = 3.0) -> Callable[[], Tensor]:
        return lambda: random(rows, n, dtype=dtype, scale=scale)

    for rows, n, fit in ROW_SHAPES:
        yield case(f"{n}", of(rows, n), fit)
    for dtype in (F32, F16):
        yield case(plain(dtype), of(3, 1000, dtype, 9.0))
    for n in (16_384, 50_000):  # float rows: four elements a pack
        yield case(f"float32_{n}", of(3, n, F32, 9.0))
    for name, n in STREAMED:
        yield Case(f"stream_softmax_{name}", softmax.softmax, lambda n=n: (random(3, n, dtype=BF16),), *STREAM)
    for name, (view, fit) in layouts().items():
        yield case(name, view, fit)
    for label, planted_rows in planted().items():
        yield case(label, planted_rows)


def _cluster_cases() -> Iterator[Case]:
    def case(name: str, make: Callable[[], Tensor], fit: str, where: tuple[Any, ...] = CLUSTERS) -> Case:
        return Case(name, softmax.softmax, lambda: (make(),), fit, *where)

    def of(rows: int, n: int) -> Callable[[], Tensor]:
        return lambda: random(rows, n, dtype=BF16, scale=3.0)

    for rows, n, fit in ((7, 8264, "160_1_4_WHOLE_6_2"), (5, 20_008, "WHOLE_6_4"), (3, 66_056, "160_1_8_WHOLE_6_8")):
        yield case(f"cluster_softmax_{n}", of(rows, n), fit)
    wide = lambda: random(5, 16_388, dtype=F32, scale=9.0)  # noqa: E731
    yield case("cluster_softmax_float32_16388", wide, "160_1_8_WHOLE_3_4")
    for rows, n, fit in ((1, 65_536, "256_1_4_EXACT_1_8"), (16, 8192, "1024_1_1_EXACT_1_1")):
        yield case(f"few_softmax_{n}", of(rows, n), fit, FEW_ROWS)

    def hostile() -> Tensor:
        x = random(6, 65_544, dtype=BF16)
        x[0, 65_543], x[1, 9], x[2], x[3, 1:] = math.nan, math.inf, -math.inf, -math.inf
        return x

    yield case("cluster_softmax_hostile", hostile, "WHOLE")


def _special_cases() -> Iterator[Case]:
    inf = math.inf
    yield Case("softmax_no_key", softmax.softmax, lambda: (torch.full((2, 40), -inf, dtype=BF16),))
    yield Case("softmax_no_key_long", softmax.softmax, lambda: (torch.full((2, 9001), -inf, dtype=BF16),), *STREAM)

    def masked() -> Inputs:
        x = random(3, 80_000, dtype=BF16)
        x[0, :79_999], x[1, 1:], x[2, 40_000:] = -inf, -inf, -inf
        return (x,)

    yield Case("softmax_masked", softmax.softmax, masked, *STREAM)
    yield Case("softmax_huge", softmax.softmax, lambda: (random(3, 200, dtype=BF16, scale=1e38),))
    yield Case("softmax_equal", softmax.softmax, lambda: (torch.full((3, 1024), 77.7),), exact=True)


def _softmax_backward_cases() -> Iterator[Case]:
    """Rows of part of a wave, of a block, beyond one (LONG), of a cluster; views; values that are not finite."""

    def make(rows: int, n: int, dtype: torch.dtype) -> Inputs:
        return random(rows, n, dtype=dtype), random(rows, n, dtype=dtype, scale=3.0).float().softmax(-1).to(dtype)

    def case(name: str, inputs: Callable[[], Inputs], fit: str, *where: Any) -> Case:
        return Case(f"softmax_backward_{name}", softmax_backward, inputs, fit, *where)

    for rows, n, fit in (
        (3, 1, "EXACT"),
        (65, 8, "EXACT"),
        (9, 96, "RAGGED"),
        (3, 127, "_1_"),
        (9, 1024, "EXACT"),
        (2, 1021, "_1_"),
        (3, 4096, "EXACT"),
        (2, 4104, "RAGGED"),
        (3, 16_384, "EXACT"),
        (2, 20_008, "RAGGED"),
        (3, 65_536, "LONG"),
        (2, 80_008, "LONG"),
        (2, 20_011, "LONG"),
    ):
        yield case(f"{n}", lambda r=rows, n=n: make(r, n, BF16), fit)
    for dtype in (F32, F16):
        yield case(f"{dtype}".removeprefix("torch."), lambda d=dtype: make(3, 1000, d), "RAGGED")
    for rows, n, fit in (
        (5, 1000, "_128_1_1_RAGGED_12_1"),
        (5, 4096, "_512_1_1_EXACT_3_1"),
        (5, 8192, "_512_1_2_EXACT_3_1"),
        (5, 8200, "_288_1_2_RAGGED_5_2"),
        (5, 16_384, "_512_1_2_RAGGED_3_2"),
        (5, 20_008, "_320_1_2_RAGGED_4_4"),
        (9, 32_768, "_512_1_2_RAGGED_3_4"),
        (3, 50_264, "_416_1_4_RAGGED_2_4"),
        (5, 65_536, "_512_1_4_RAGGED_2_4"),
        (3, 66_056, "_288_1_4_RAGGED_3_8"),
        (2, 131_064, "_512_1_4_RAGGED_2_8"),
        (2, 262_152, "LONG"),
    ):
        yield case(f"cluster_{n}", lambda r=rows, n=n: make(r, n, BF16), fit, *CLUSTERS)
    yield case("cluster_float32", lambda: make(5, 16_388, F32), "_288_1_4_RAGGED_3_4", *CLUSTERS)
    for rows, n, fit in (
        (2, 4096, "_512_1_1_EXACT_3_1"),
        (1, 9000, "_160_1_1_RAGGED_6_8"),
        (3, 20_008, "_160_1_2_RAGGED_6_8"),
        (20, 32_768, "_512_1_2_RAGGED_3_4"),
        (1, 66_056, "_288_1_4_RAGGED_3_8"),
    ):
        yield case(f"few_{n}", lambda r=rows, n=n: make(r, n, BF16), fit, *FEW_ROWS)
    base = random(6, 4, 520, dtype=BF16)
    layouts: dict[str, tuple[Callable[[], Tensor], str]] = {
        "row_stride": (lambda: random(6, 1040, dtype=BF16)[:, 520:], "_8_"),
        "odd_stride": (lambda: random(6, 521, dtype=BF16)[:, :520], "_1_"),
        "misaligned": (lambda: misaligned(random(6, 520, dtype=BF16)), "_1_"),
        "transposed": (lambda: base.transpose(0, 1)[:2, :3].reshape(6, 520), "_8_"),
        "broadcast": (lambda: random(520, dtype=BF16).expand(6, 520), "_8_"),
        "strided_last": (lambda: random(6, 1040, dtype=BF16)[:, ::2], "_8_"),
    }
    for name, (view, fit) in layouts.items():
        yield case(name, lambda v=view: (v(), make(6, 520, BF16)[1]), fit)
        yield case(f"{name}_of_y", lambda v=view: (make(6, 520, BF16)[0], v()), fit)

    def hostile(n: int) -> Inputs:
        grad, y = make(6, n, BF16)
        grad[0, n - 1], grad[1, 9], grad[2, 0], y[3, 5], y[4] = math.nan, math.inf, -math.inf, math.nan, 0.0
        return grad, y

    yield case("hostile", lambda: hostile(1000), "RAGGED")
    yield case("hostile_long", lambda: hostile(65_544), "LONG")
    yield case("hostile_cluster", lambda: hostile(65_544), "RAGGED", *CLUSTERS)


CASES = [*_softmax_cases(), *_cluster_cases(), *_special_cases(), *_softmax_backward_cases()]


def launches(dtype: torch.dtype) -> Iterator[Launch]:
    for x, _ in short_and_long(dtype):
        yield softmax.softmax, (x,)
        yield softmax_backward, (x, x)


def compiled(x: str) -> Iterator[str]:
    """How names of kernels for a dtype begin."""
    yield from (f"softmax_{x}_", f"softmax_backward_{x}_")


# On a device, of rows x, others and a weight: how many tensors are moved, the kernel, and its arguments.
MOVED = {"softmax": (2, softmax.softmax, lambda x, other, w: (x,))}
