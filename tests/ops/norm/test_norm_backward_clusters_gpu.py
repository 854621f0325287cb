"""On a device with thread block clusters: the norms' gradients over wide rows in CUDA C++, against float64; the same
bits in every run, replay and captured graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import registry, select
from ferryman.ops.norm import simt_backward_kernels as kernels
from ferryman.ops.norm.implementations import WIDE_BYTES
from tests.bounded import off

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
OPS = ("rms_norm_backward", "add_rms_norm_backward", "layer_norm_backward")
WIDTHS = (8200, 12_296, 16_384, 20_480, 32_768, 53_248, 65_536, 98_304, 131_064, 131_072)


@pytest.fixture(autouse=True)
def _clusters() -> None:
    profile = select.profile_for(GPU)
    if "clusters" not in profile.features or registry.probe("cuda", profile.vendor):
        pytest.skip("needs a device with thread block clusters and CuPy")


def _args(op: str, rows: int, n: int, dtype: torch.dtype, weight: torch.dtype | None, pad: int = 0) -> tuple[Any, ...]:
    torch.manual_seed(rows + n)

    def tensor(shift: float = 0.0) -> Tensor:
        return (torch.randn(rows, n + pad, device=GPU) + shift).to(dtype)[:, :n]

    w = None if weight is None else (1 + 0.2 * torch.randn(n, device=GPU)).to(weight)
    given: tuple[Any, ...] = (tensor(), tensor(), tensor(3.0)) if op.startswith("add") else (tensor(), tensor(3.0))
    return (*given, w, torch.randn(n, device=GPU), 1e-5) if op.startswith("layer") else (*given, w, 1e-6)


def _judge(op: str, args: tuple[Any, ...], outputs: tuple[Tensor, ...]) -> None:
    assert off(registry.primitive(op), args, outputs, args[0].dtype) <= 1, op


@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("n", WIDTHS)
def test_rows_of_every_width(op: str, n: int) -> None:
    target = select.target_of(select.profile_for(GPU))
    # few rows, more than clusters, and several for each of them; rows apart, and rows that do not begin on 16 bytes
    for rows, dtype, weight, pad in (
        (1, BF16, BF16, 0),
        (77, BF16, F32, 0),
        (301, BF16, BF16, 8),
        (301, F32, F32, 0),
        (66, F16, None, 1),
    ):
        if n * dtype.itemsize > WIDE_BYTES:
            continue
        args = _args(op, rows, n, dtype, weight, pad)
        runs = [kernels.launch(op, args, target) for _ in range(3)]
        _judge(op, args, runs[0])
        for other in runs[1:]:
            assert all(torch.equal(a, b) for a, b in zip(runs[0], other, strict=True))


@pytest.mark.parametrize("n", [16_384, 131_072])
def test_every_run_and_every_replay_gives_the_same_bits(n: int) -> None:
    grad, x, w, eps = _args("rms_norm_backward", 200, n, BF16, BF16)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=GPU)
    with ferryman.use("cuda"), torch.no_grad(), ferryman.trace() as seen:
        first = ops.rms_norm_backward(grad, x, w, eps)
        for _ in range(100):  # a replay after the 64th call
            with torch.cuda.stream(busy):
                noise @ noise
            again = ops.rms_norm_backward(grad.clone(), x, w, eps)
            assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = ops.rms_norm_backward(grad, x, w, eps)
        for _ in range(3):
            for result in captured:
                result.zero_()
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, first, strict=True))
    assert seen.calls == {("rms_norm_backward", "cuda"): 102}
