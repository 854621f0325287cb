"""Which of Triton's kernels serves how many tokens: what its launcher chose before each was a line of the menu."""

from __future__ import annotations

import pytest
import torch

from ferryman.device_profiles import profile
from tests.lines import launched

pytest.importorskip("triton")


@pytest.mark.parametrize("device", ["h200", "mi300x"])
@pytest.mark.parametrize("tokens", [0, 1, 2, 2048])
def test_one_token_has_a_kernel_of_its_own(tokens: int, device: str) -> None:
    line, kernel = ("triton.blocks", "_blocks") if tokens > 1 else ("triton.tokens", "_scan")
    x, b = torch.empty(2, tokens, 96, device="meta"), torch.empty(2, tokens, 16, device="meta")
    a = torch.empty(96, 16, device="meta")
    args = (x, x, a, b, b, None, None, None, None, True)
    assert launched("selective_scan", args, profile(device)) == (line, [kernel])
