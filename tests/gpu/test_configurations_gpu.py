"""Every configuration that a launcher ranks for a call is right there, not its own plan alone."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ferryman.dispatch import registry, select

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda")


def _ranked(op: str, name: str, args: tuple[Any, ...]) -> tuple[Any, list[str]]:
    line = registry.implementation(op, name)
    profile = select.profile_for(GPU)
    if select.refusals(line, select.View.of(registry.primitive(op), args, profile), profile):
        pytest.skip(f"{name} does not serve {op} here")
    return line, list(line.ranked_configurations(args, select.target_of(profile)))


@pytest.mark.parametrize(
    "shape", [(1, 4096, 4096), (7, 1024, 528), (64, 6152, 2048), (171, 4104, 4096), (515, 520, 8200)]
)
def test_forms_of_linear(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    x, weight = (torch.randn(rows, k, device=GPU, dtype=torch.bfloat16) for rows in (m, n))
    bias = torch.randn(n, device=GPU, dtype=torch.bfloat16)
    line, names = _ranked("linear", "cuda", (x, weight, bias))
    exact = x.double() @ weight.double().T + bias.double()
    # rounding of the output, and sums in float32 in any order
    bound = exact.abs() * 2**-8 + 6 * math.sqrt(k) * 2**-24 * (x.double().abs() @ weight.double().abs().T) + 1e-30
    assert len(names) > 1
    for name in names:
        y = registry.launcher(line)(x, weight, bias, select.target_of(select.profile_for(GPU), name))
        assert bool(((y.double() - exact).abs() <= bound).all()), name


@pytest.mark.parametrize("shape", [(1, 32, 8, 32_768), (3, 8, 2, 1111), (32, 32, 8, 4096)])
def test_pieces_of_decoding_attention(shape: tuple[int, int, int, int]) -> None:
    batch, heads, kv, keys = shape
    q = torch.randn(batch, heads, 1, 128, device=GPU, dtype=torch.bfloat16)
    k, v = (torch.randn(batch, kv, keys, 128, device=GPU, dtype=torch.bfloat16) for _ in range(2))
    args = (q, k, v, True, None, None, 0.0, None, None, None, None, 0.0, None)
    line, names = _ranked("attention", "triton.decode", args)
    wide = [t.double().repeat_interleave(heads // kv, 1) for t in (k, v)]
    scores = q.double() @ wide[0].mT / math.sqrt(128)
    exact, lse = torch.softmax(scores, -1) @ wide[1], torch.logsumexp(scores, -1)
    assert len(names) > 1
    for name in names:
        out, got = registry.launcher(line)(*args, select.target_of(select.profile_for(GPU), name))
        # the output is rounded to bf16, P too: relative to the values' size
        assert float((out.double() - exact).abs().max()) <= 2**-7 * float(exact.abs().max()), name
        assert float((got.double() - lse).abs().max()) <= 1e-4, name


def test_the_first_that_is_ranked_is_the_launcher_s_own_plan() -> None:
    x, weight = (torch.randn(rows, 4096, device=GPU, dtype=torch.bfloat16) for rows in (1, 4096))
    line, names = _ranked("linear", "cuda", (x, weight, None))
    targets = [select.target_of(select.profile_for(GPU), name) for name in ("", names[0])]
    assert torch.equal(*(registry.launcher(line)(x, weight, None, target) for target in targets))
