"""Every backward with every forward on the CPU, in every dtype, against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from ferryman.errors import Unsupported
from tests import pairs

CPU = torch.device("cpu")


@pytest.mark.alternate("dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", pairs.differentiable(), ids=lambda op: op.name)
def test_every_backward_pairs_with_every_forward(op: pairs.Primitive, dtype: torch.dtype) -> None:
    judged, served, failures = 0, set(), []
    lines = list(pairs.pairs(op, CPU))
    assert {(f.backend, b.backend) for f, b in lines} >= {("torch", "definition"), ("definition", "torch")}
    for case in pairs.cases(op):
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
    assert not failures and served >= {"torch", "definition"} and judged >= 4 * len(pairs.cases(op))
