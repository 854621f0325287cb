"""On Hopper: the CUDA forms of linear against float64, whichever form a shape gets; the same bits in every run."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import registry, select
from ferryman.errors import Unsupported
from ferryman.ops.matmul.hopper_kernels import Wide, forms, product
from ferryman.porting.judging.metrics import UNIT
from tests.bounded import U32

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def _hopper() -> None:
    profile = select.profile_for(GPU)
    if profile.arch != "sm_90" or registry.probe("cuda", profile.vendor):
        pytest.skip("needs a Hopper GPU and CuPy")


def operands(m: int, n: int, k: int, dtype: torch.dtype, pad: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """x and weight with ``pad`` elements between rows."""
    x = torch.randn(m, k + pad, device=GPU).to(dtype)[:, :k]
    w = torch.randn(n, k + pad, device=GPU).to(dtype)[:, :k]
    return x, w, torch.randn(n, device=GPU).to(dtype)


def worst(y: Tensor, x: Tensor, w: Tensor, bias: Tensor | None) -> float:
    """The largest error in units of its bound: one rounding, and sqrt(k) of float32 accumulation; NaN counts as inf."""
    exact = x.double() @ w.double().T
    size = x.double().abs() @ w.double().abs().T
    if bias is not None:
        exact, size = exact + bias.double(), size + bias.double().abs()
    bound = UNIT[y.dtype] * exact.abs() + 6 * math.sqrt(x.shape[-1]) * U32 * size
    return ((y.double() - exact).abs() / bound).nan_to_num(nan=math.inf).max().item()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", forms(), ids=str)
def test_every_form_on_ragged_shapes(form: Wide, dtype: torch.dtype) -> None:
    """Edges of tiles in every direction, rows further apart than they are long, fewer and more tiles than units; so
    short a k that a tile's last store is still read out when the next tile is staged."""
    target = select.target_of(select.profile_for(GPU))
    for m in (1, form.m - 1, form.m + 1, 4 * form.m + 5):
        short = 128 * max(2, form.split)
        for n, k, pad in ((8, 512, 0), (264, 1040, 8), (form.n * 140 + 8, 528, 16), (form.n * 300, short, 0)):
            x, w, bias = operands(m, n, k, dtype, pad)
            for given in (None, bias):
                assert worst(product(form, x, w, given, target), x, w, given) <= 1, (m, n, k, given is not None)


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [
        (1, 4096, 4096),
        (5, 1024, 4096),
        (16, 2048, 8192),
        (64, 8192, 2048),
        (77, 4104, 1032),
        (256, 4096, 4096),
        (1000, 4096, 4096),
    ],
)
def test_dispatch_runs_it_and_every_run_gives_the_same_bits(m: int, n: int, k: int) -> None:
    x, w, bias = operands(m, n, k, torch.bfloat16)
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=GPU)
    with ferryman.trace() as seen, ferryman.use("cuda"):
        first = ops.linear(x, w, bias)
        for _ in range(20):
            with torch.cuda.stream(busy):
                noise @ noise
            assert torch.equal(ops.linear(x, w, bias), first)
    assert seen.calls == {("linear", "cuda"): 21}
    assert worst(first, x, w, bias) <= 1


def test_capture_and_other_addresses() -> None:
    for m in (1, 33, 300):
        x, w, bias = operands(m, 4096, 4096, torch.bfloat16)
        with ferryman.use("cuda"):
            for _ in range(3):
                ops.linear(x, w, bias)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = ops.linear(x, w, bias)
            for _ in range(3):
                x.copy_(torch.randn(m, 4096, device=GPU))
                w.copy_(torch.randn(4096, 4096, device=GPU))
                graph.replay()
                assert torch.equal(captured, ops.linear(x.clone(), w.clone(), bias.clone()))


def test_two_streams_at_once() -> None:
    """Nothing is shared between launches: tensor maps and partial sums are each call's own."""
    sets = [operands(m, 2048, 4096, torch.bfloat16) for m in (1, 40, 200, 700)]
    with ferryman.use("cuda"):
        expected = [ops.linear(*s) for s in sets]
        streams = [torch.cuda.Stream() for _ in sets]
        torch.cuda.synchronize()
        for _ in range(30):
            outputs = []
            for stream, given in zip(streams, sets, strict=True):
                with torch.cuda.stream(stream):
                    outputs.append(ops.linear(*given))
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(outputs, expected, strict=True))


def test_unaligned_and_transposed_operands() -> None:
    x, w, bias = operands(40, 264, 520, torch.bfloat16)
    expected = ops.linear(x, w, bias)
    shifted = torch.empty(40 * 520 + 1, device=GPU, dtype=torch.bfloat16)[1:].view(40, 520).copy_(x)
    with ferryman.use("cuda"):
        assert worst(ops.linear(shifted, w, bias), x, w, bias) <= 1
        assert worst(ops.linear(x.t().contiguous().t(), w, bias), x, w, bias) <= 1
        assert expected.shape == ops.linear(x.view(5, 8, 520), w, bias).flatten(0, 1).shape
        for refused in (w.t().contiguous().t(), w[:, :516], w[:261]):
            with pytest.raises(Unsupported):
                ops.linear(x[:, : refused.shape[1]], refused)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("m", [8, 64, 300])
def test_each_product_reads_what_the_one_before_wrote(m: int, captured: bool) -> None:
    """Its blocks may have started before that one's last store: as activations, and as a weight."""
    weights = [(torch.randn(2048, 2048, device=GPU) / 2048**0.5).bfloat16() for _ in range(3)]
    first = torch.randn(m, 2048, device=GPU).bfloat16()
    made_weight = torch.empty_like(weights[0])

    def chain(between: Callable[[], None]) -> Tensor:
        x = first
        for i in range(12):
            x = ops.linear(x, weights[i % 3])
            between()
            made_weight.copy_(weights[i % 3])
            x = x + ops.linear(x, made_weight)
            between()
        return x

    with ferryman.use("cuda"):
        expected = chain(torch.cuda.synchronize)
        assert expected.isfinite().all()
        if not captured:
            assert all(torch.equal(chain(lambda: None), expected) for _ in range(5))
            return
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            output = chain(lambda: None)
    for _ in range(5):
        output.zero_()
        graph.replay()
        assert torch.equal(output, expected)
