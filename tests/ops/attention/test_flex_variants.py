"""FlexAttention's variants in one process: more than Dynamo makes of one code by itself."""

from __future__ import annotations

import pytest
import torch

from ferryman.ops.attention import flex_kernels, flex_variants


def test_more_variants_than_dynamos_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor's part is left out: what it would compile is run as it is."""
    compile_fx = "torch._inductor.compile_fx.compile_fx"
    monkeypatch.setattr(compile_fx, lambda graph, inputs: graph.forward)
    limit = torch._dynamo.config.recompile_limit
    captures = 0
    for heads in range(1, limit + 3):
        q, k, v = (torch.randn(1, heads, 160, 32) for _ in range(3))
        variant = flex_variants.variant_of(q, k, v, True, None, 0.0, None, None, None)
        given = flex_kernels._given(variant, q, k, v, 1.0, None, 0.0, None, None, None)
        seen, _ = flex_kernels._split(given)
        captured = flex_kernels._Captured(flex_kernels._tables(variant), seen, True)
        captures += captured(*seen) is not None
    assert captures == limit + 2 and torch._dynamo.config.recompile_limit == limit
