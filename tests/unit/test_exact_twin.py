"""The exact twin computes in float64 what PyTorch itself has no float64 kernel for."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ferryman.porting.model import exact
from ferryman.porting.model.proof import prove


def test_a_product_of_rows_in_groups_is_made_in_float64() -> None:
    if not hasattr(torch, "_grouped_mm"):
        pytest.skip("this PyTorch has no grouped product")
    x = torch.randn(7, 8, dtype=torch.float64, requires_grad=True)
    weights = torch.randn(3, 8, 16, dtype=torch.float64)
    ends = torch.tensor([2, 2, 5], dtype=torch.int32)
    with exact.Widened(torch.float64):
        product = torch._grouped_mm(x, weights, offs=ends)
    wanted = torch.cat([x[:2] @ weights[0], x[2:5] @ weights[2], x.new_zeros(2, 16)])
    assert torch.equal(product, wanted) and product.requires_grad


def test_a_gradient_that_cancels_is_proven_and_a_wrong_one_is_not() -> None:
    """The first row of x moves nothing: in the original its gradient is what three terms leave of their noise."""
    x = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))

    def original(x: torch.Tensor) -> torch.Tensor:
        total = x.cumsum(0)
        return torch.cat([(total[i] - total[0]).exp()[None] * (i / 3) for i in range(1, 4)])

    def candidate(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        total = torch.cat([factor * x[1:2], x[2:]]).cumsum(0)
        return torch.cat([total[i].exp()[None] * ((i + 1) / 3) for i in range(3)])

    assert prove(original, candidate, [(x,)], storage=()).ok
    assert not prove(original, lambda x: candidate(x, 1 + 2.0**-30), [(x,)], storage=()).ok
    assert not prove(original, lambda x: candidate(x) + 2.0**-30 * (x[0] - x[0].detach()), [(x,)], storage=()).ok


def test_a_small_gradient_is_held_to_its_own_size_unless_it_cancelled() -> None:
    x = torch.randn(2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    sizes = torch.tensor([[1.0], [2.0**-60]], dtype=torch.float64)

    def scaled(x: torch.Tensor, wrong: float = 0.0) -> torch.Tensor:
        return x * sizes + wrong * (x - x.detach())

    assert prove(scaled, lambda x: sizes * x, [(x,)], storage=()).ok
    proof = prove(scaled, lambda x: scaled(x, 2.0**-62), [(x,)], storage=())
    assert "gradient 0 differs by" in proof.reason


def test_a_gradient_behind_a_sum_that_cancelled_is_held_to_what_units_of_the_inputs_move() -> None:
    """exp'(s) of a sum s of terms of 2^40 has 2^-12 of noise, in every row alone."""
    x = torch.randn(3, 64, dtype=torch.float64, generator=torch.Generator().manual_seed(3)) * 2.0**40
    x = x - x.mean(-1, keepdim=True)

    def original(x: torch.Tensor) -> torch.Tensor:
        return x + (torch.sin(x.sum(-1, keepdim=True)) - torch.sin(x.sum(-1, keepdim=True)).detach())

    def candidate(x: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
        total = x.flip(-1).cumsum(-1)[:, -1:]
        return x + factor * (torch.sin(total) - torch.sin(total).detach())

    assert prove(original, candidate, [(x,)], storage=()).ok
    assert not prove(original, lambda x: candidate(x, -1.0), [(x,)], storage=()).ok


def test_a_result_that_needs_no_gradient_has_a_gradient_of_zero() -> None:
    x = torch.randn(2, 3, dtype=torch.float64)
    assert prove(lambda x: torch.zeros_like(x), lambda x: x * 0.0, [(x,)], storage=()).ok
    assert not prove(lambda x: x.detach(), lambda x: x * 1.0, [(x,)], storage=()).ok


def test_a_gradient_beside_a_comparison_is_held_to_it() -> None:
    """A rounding turns ``p < t`` where t is one of p: what that moves is no measure for the gradient."""

    def original(x: Tensor) -> Tensor:
        p = x * 1.5
        least = p.topk(2, -1).values[..., -1:]
        return torch.where(p < least, 0.0, p)

    def candidate(x: Tensor, factor: float) -> Tensor:
        return original(x.detach()) + factor * (original(x) - original(x).detach())

    x = torch.randn(5, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert prove(original, lambda x: candidate(x, 1.0), [(x,)], storage=()).ok
    assert not prove(original, lambda x: candidate(x, 17.0), [(x,)], storage=()).ok


def test_a_second_run_may_differ_in_last_places_alone() -> None:
    runs = [0]

    def call(x: Tensor, by: float) -> Tensor:
        runs[0] += 1
        return 2.0 * x * (1.0 + by * (runs[0] % 2))

    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert prove(lambda x: call(x, 2.0**-51), lambda x: x + x, [(x,)], storage=()).ok
    proof = prove(lambda x: call(x, 2.0**-20), lambda x: x + x, [(x,)], storage=())
    assert not proof.ok
