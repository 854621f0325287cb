"""Every backward with every forward on the CPU, in every dtype, against float64 autograd."""

from __future__ import annotations

import zlib

import pytest
import torch

from ferryman.errors import Unsupported
from ferryman.ops.primitive import Case
from tests import pairs

CPU = torch.device("cpu")


DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.mark.daily(7)
@pytest.mark.alternate(within="test_every_case_of_every_pair")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", pairs.differentiable(), ids=lambda op: op.name)
def test_every_backward_pairs_with_every_forward(op: pairs.Primitive, dtype: torch.dtype) -> None:
    """Each case in one dtype, in turn; below in all of them."""
    cases = enumerate(pairs.cases(op), start=zlib.crc32(op.name.encode()))
    _pairs_of(op, dtype, [case for i, case in cases if DTYPES[i % 3] is dtype])


@pytest.mark.slow
@pytest.mark.alternate("dtype")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("op", pairs.differentiable(), ids=lambda op: op.name)
def test_every_case_of_every_pair(op: pairs.Primitive, dtype: torch.dtype) -> None:
    _pairs_of(op, dtype, list(pairs.cases(op)))


def _pairs_of(op: pairs.Primitive, dtype: torch.dtype, cases: list[Case]) -> None:
    judged, served, failures = 0, set(), []
    lines = list(pairs.pairs(op, CPU))
    assert {(f.backend, b.backend) for f, b in lines} >= {("torch", "definition"), ("definition", "torch")}
    for case in cases:
        exact = pairs.Exact(op, case, dtype, CPU)
        for forward, backward in lines:
            try:
                ratio, where = pairs.worst_ratio(op, case, dtype, CPU, forward, backward, exact=exact)
            except Unsupported as error:  # the line's own conditions, by the names that were asked for
                assert "none of the requested implementations" in str(error), error
                continue
            judged += 1
            served |= {forward.backend, backward.backend}
            if not ratio <= 1:
                failures.append(f"{forward.name}+{backward.name}: {where} is {ratio:.2f} bounds out")
    assert not failures and served >= {"torch", "definition"} and judged >= 4 * len(cases)
