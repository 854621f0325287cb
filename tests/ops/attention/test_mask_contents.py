"""Masks by their contents, as `benchmarks/calls.py` and a drawn grid name them."""

from __future__ import annotations

import pytest
import torch

from ferryman.dispatch import registry
from ferryman.porting.inputs.cases import materialise


@pytest.mark.parametrize(
    ("kind", "share"),
    [("cache", (0.2, 0.55)), ("documents", (0.1, 0.4)), ("padding", (0.2, 0.5)), ("keys", (0.5, 1.0))],
)
def test_a_mask_hides_what_its_kind_hides(kind: str, share: tuple[float, float]) -> None:
    op = registry.primitive("attention")
    case = registry.evidence(op).named
    assert case is not None
    named = case(f"B4 H2/1 Q1024 K1024 D8 {kind}")
    mask = dict(zip(op.names, materialise(named, op, torch.float32, 0, torch.device("cpu")), strict=True))["mask"]
    assert mask.dtype == torch.bool and share[0] < float(mask.float().mean()) < share[1]
    if kind == "documents":
        assert bool(mask[0, 0, 700, 512]) and not mask[0, 0, 700, 511] and not mask[0, 0, 700, 701]
