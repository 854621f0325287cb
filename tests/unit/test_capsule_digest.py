"""The hash of a tensor: order, layout, dtype and every bit count; the payload of a NaN does not."""

from __future__ import annotations

import pytest
import torch

from ferryman.dispatch import registry
from ferryman.porting.capsule.cases import hashes
from ferryman.porting.capsule.container import digest
from ferryman.porting.capsule.record import elements, positions, sampled
from ferryman.porting.inputs.cases import arguments, cases_of


def test_order_sign_dtype_and_shape_count() -> None:
    x = torch.arange(12.0)
    seen = {digest(t) for t in (x, x.flip(0), -x, x.reshape(3, 4), x.reshape(4, 3), x.double(), x.half(), x[:11])}
    assert len(seen) == 8
    zero = torch.zeros(1)
    assert digest(zero) != digest(-zero)
    assert digest(x) == digest(x.clone()) == digest(x.reshape(3, 4).t().contiguous().t().reshape(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_all_nans_are_one(dtype: torch.dtype) -> None:
    nan = torch.tensor([1.0, float("nan")], dtype=dtype)
    words = {2: torch.int16, 4: torch.int32, 8: torch.int64}[nan.element_size()]
    other = (nan.view(words) ^ torch.tensor([0, 1], dtype=words)).view(dtype)
    assert bool(other[1].isnan()) and not torch.equal(other.view(words), nan.view(words))
    assert digest(nan) == digest(other) == digest(torch.cat([nan[:1], -nan[1:]]))
    assert digest(nan) != digest(torch.tensor([1.0, float("inf")], dtype=dtype))


def test_a_large_tensor_hashes_by_chunks_and_each_counts() -> None:
    x = torch.zeros(3 * 2**20)  # 12 MiB: three chunks
    first = digest(x)
    for at in (0, 2**20, 3 * 2**20 - 1):
        changed = x.clone()
        changed[at] = 1
        assert digest(changed) != first
    assert digest(x) == first


def test_empty_tensors_of_different_shapes_differ() -> None:
    assert digest(torch.empty(0, 3)) != digest(torch.empty(3, 0)) == digest(torch.empty(3, 0))


def test_the_layout_of_an_input_counts() -> None:
    rms_norm = registry.primitive("rms_norm")
    case = cases_of(rms_norm)[0]
    given = arguments(case, rms_norm, torch.float32, 0, torch.device("cpu"))
    again = arguments(case, rms_norm, torch.float32, 0, torch.device("cpu"))
    other = arguments(case, rms_norm, torch.float32, 1, torch.device("cpu"))
    assert hashes(given) == hashes(again) and hashes(given) != hashes(other)
    x = given.buffers["x"].tensor
    assert digest(x, "[8, 1]+0") != digest(x, "[8, 1]+4") != digest(x, "[1, 8]+4")


def test_tiles_are_spread_and_hold_the_worst_element() -> None:
    tiles = sampled("rms_norm/case/float32/y", 100_000, 8, at=77_777)
    assert tiles == sorted(set(tiles)) and len(tiles) == 8
    assert tiles[0] == 0 and tiles[-1] == (100_000 - 1) // 32 and 77_777 // 32 in tiles
    assert tiles[1:-1] != list(range(1, 7))
    assert set(tiles) - {77_777 // 32} <= set(sampled("rms_norm/case/float32/y", 100_000, 9))
    assert sampled("short", 40, 8) == [0, 1]
    x = torch.arange(100.0).reshape(10, 10)
    assert elements(x, [1, 3]).tolist() == [*range(32, 64), *range(96, 100)]
    assert positions(100, [3]).tolist() == [96, 97, 98, 99]
