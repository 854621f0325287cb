"""Every backward with every forward on the CPU, in every dtype, against float64 autograd."""

from __future__ import annotations

import pytest
import torch

from tests import pairs

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", pairs.differentiable(), ids=lambda op: op.name)
def test_every_backward_pairs_with_every_forward(op: pairs.Primitive, dtype: torch.dtype) -> None:
    judged, failures = 0, []
    found = list(pairs.pairs(op, CPU))
    assert {(f.name, b.name) for f, b in found} >= {("torch", "definition"), ("definition", "torch")}
    for forward, backward in found:
        for case in pairs.cases(op):
            ratio, where = pairs.worst_ratio(op, case, dtype, CPU, forward, backward)
            judged += 1
            if not ratio <= 1:
                failures.append(f"{forward.name}+{backward.name}: {where} is {ratio:.2f} bounds out")
    assert not failures and judged >= 4 * len(pairs.cases(op))
