"""Readings of error patterns, on errors that were put there."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ferryman.porting.judging import metrics
from ferryman.porting.judging.reading import Evidence, read

ROWS, COLS = 12, 256
UNIT = metrics.UNIT[torch.bfloat16]


def exact(*shape: int) -> Tensor:
    return torch.randn(shape or (ROWS, COLS), dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def reading(change: Callable[[Tensor], Tensor], *shape: int, sigma: float | None = None) -> str | None:
    """Of a result in bfloat16, changed before it is rounded."""
    right = exact(*shape)
    got = change(right.clone()).float().to(torch.bfloat16).double()
    bound = UNIT * right.abs() + 1e-9
    wrong = ~(((got - right).abs() <= bound) | (got == right) | (got.isnan() & right.isnan()))
    return read(Evidence(got, right, bound, wrong, UNIT, None if sigma is None else torch.full_like(right, sigma)))


def put(value: float | None, *where: object) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        x[where] = 3 + x[where].abs() * 2 if value is None else value  # type: ignore[index]
        return x

    return change


def swap(axis: int, a: int, b: int) -> Callable[[Tensor], Tensor]:
    def change(x: Tensor) -> Tensor:
        order = list(range(x.shape[axis]))
        order[a], order[b] = order[b], order[a]
        return x.index_select(axis, torch.tensor(order))

    return change


EVERY = slice(None)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (put(None, EVERY, -1), "the last column of every row is stale or wrong"),
        (put(None, EVERY, slice(128, None)), "only the columns from 128 on are wrong: the first tile is right"),
        (put(None, EVERY, slice(100, None)), "wrong in the columns from 100 on only"),
        (put(None, EVERY, slice(63, None, 64)), "wrong in every 64th column (from 63) only"),
        (put(None, EVERY, slice(2, None, 32)), "wrong in every 32nd column (from 2) only"),
        (put(None, slice(0, 3)), "wrong in the first 3 rows only"),
        (put(None, slice(4, 9)), "wrong in the rows 4 to 8 only"),
        (put(0.0, 5), "0 in row 5"),
        (put(0.0, -1), "0 in the last row"),
        (put(float("nan"), -1), "NaN in the last row"),
        (put(None, 3, 17), "one element alone is wrong"),
        (put(0.0), "every element is 0"),
        (put(float("nan")), "every element is NaN"),
        (swap(0, 4, 5), "rows 4 and 5 are swapped"),
        (swap(1, 8, 9), "columns 8 and 9 are swapped"),
        (lambda x: x.flip(0), "rows 0 to 11 are in reverse order"),
        (lambda x: x.roll(-1, 0), "rows 0 to 11 hold the next row's values"),
        (lambda x: 1.01 * x, "constant factor 1.01 of everything"),
        (lambda x: 1.001 * x, "constant factor 1.001 of everything"),
        (lambda x: -x, "the sign of everything is flipped"),
        (lambda x: x + 2.5, "2.5 is added to everything"),
        (lambda x: x * (1.1 + 0.1 * torch.arange(ROWS)[:, None]), "each row has a factor of its own"),
        (lambda x: x + torch.arange(1, ROWS + 1)[:, None], "each row has an offset of its own"),
    ],
)
def test_patterns_are_named(change: Callable[[Tensor], Tensor], text: str) -> None:
    diagnosis = reading(change)
    assert diagnosis is not None and diagnosis.startswith(text), diagnosis


def test_a_right_result_has_no_reading() -> None:
    assert reading(lambda x: x) is None


def test_heads_and_queries_are_told_apart() -> None:
    assert reading(put(0.0, EVERY, 1), 2, 3, 8, 16) == "0 in slice 1 of dimension 1"
    assert reading(put(0.0, EVERY, EVERY, slice(4, None)), 2, 3, 8, 16) == "0 in the rows from 4 on"
    assert (
        reading(put(None, 0, EVERY, EVERY, -1), 2, 3, 8, 16)
        == "wrong in the last column of slice 0 of dimension 0 only"
    )


def test_truncation_has_one_sign() -> None:
    right = exact(64, 64)
    bits = right.float().view(torch.int32) & -65536
    got = bits.view(torch.float32).double()
    bound = UNIT * right.abs()
    diagnosis = read(Evidence(got, right, bound, (got - right).abs() > bound, UNIT))
    assert diagnosis == "errors have one sign, toward zero: truncated instead of rounded"
    floor = torch.where(right < 0, (bits - 65536 * -1).view(torch.float32).double(), got)
    diagnosis = read(Evidence(floor, right, bound, (floor - right).abs() > bound, UNIT))
    assert diagnosis == "errors have one sign, downward: rounded down instead of to nearest"


def test_nan_that_became_zero() -> None:
    right = exact()
    right[3, 5] = float("nan")
    got = right.nan_to_num(nan=0.0)
    wrong = right.isnan()
    assert read(Evidence(got, right, right.abs() + 1, wrong, UNIT)) == "NaN became 0"


def test_sums_in_sixteen_bits_are_recognised_by_their_size() -> None:
    right = exact(64, 64)
    noise = torch.randn(64, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    sigma = 100.0  # of a sum whose roundings were 1: |a| |b| sqrt(K)
    for unit, name in ((2.0**-8, "bfloat16"), (2.0**-11, "float16")):
        got = right + 0.5 * unit * sigma * noise
        bound = UNIT * right.abs() + 2.0**-24 * sigma
        wrong = (got - right).abs() > bound
        diagnosis = read(Evidence(got, right, bound, wrong, UNIT, torch.full_like(right, sigma)))
        assert diagnosis is not None and f"sums kept in {name}:" in diagnosis


def test_scalars_and_empty_results_have_no_pattern() -> None:
    for shape in ((), (0, 4)):
        right = torch.zeros(shape, dtype=torch.float64)
        assert read(Evidence(right + 1, right, right, torch.ones(shape, dtype=torch.bool), UNIT)) is None
