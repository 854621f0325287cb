"""On a device with thread block clusters: cross entropy in CUDA C++ against float64, in every form; the same bits in
every run; a refused launch that has overwritten nothing."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.backends.base import Target
from ferryman.dispatch import registry, select
from ferryman.errors import LaunchError
from ferryman.ops.softmax import simt_loss_kernels as kernels
from ferryman.ops.softmax.simt_loss_kernels import Form
from tests.ops.softmax.loss_examples import EXAMPLES, IGNORED, Example, close, verify

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
WIDTHS = (32_000, 50_257, 128_256, 152_064)


@pytest.fixture(autouse=True)
def _clusters() -> None:
    profile = select.profile_for(GPU)
    if "clusters" not in profile.features or registry.probe("cuda", profile.vendor):
        pytest.skip("needs a device with thread block clusters and CuPy")


def target() -> Target:
    return select.target_of(select.profile_for(GPU))


def judged(e: Example, form: Form | None) -> None:
    memory = e.memory.clone()
    verify(e, *kernels.losses(form, e.view(memory), e.labels, IGNORED, e.smoothing, True, target()))
    assert close(e.view(memory), e.gradients[0], 2e-8)
    assert torch.equal(e.outside(memory), e.outside(e.memory)), "wrote beside its rows"
    verify(e, *kernels.losses(form, e.view(e.memory), e.labels, IGNORED, e.smoothing, False, target()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", kernels.forms(), ids=str)
def test_every_form_from_few_elements_to_all_that_it_holds(form: Form, dtype: torch.dtype) -> None:
    for make in EXAMPLES.values():
        if form.fits(make(dtype).n, dtype.itemsize, True):
            judged(make(dtype, "cuda"), form)
    most = form.packs * form.threads * form.cluster * 16 // dtype.itemsize
    for n, pad in ((most, 0), (most - 64, 1), (most // 2 + 3, 0)):
        if form.fits(n, dtype.itemsize, (n + pad) * dtype.itemsize % 128 != 0):
            judged(Example(5, n, dtype, pad=pad, smoothing=0.1, device="cuda"), form)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_backward_in_memory_of_its_own(dtype: torch.dtype) -> None:
    for e in [make(dtype, "cuda") for make in EXAMPLES.values()] + [Example(5, 50_257, dtype, device="cuda")]:
        given = (e.scale, e.view(e.memory), e.labels, e.lse.float(), IGNORED, e.smoothing)
        assert close(kernels.cross_entropy_backward(*given, target()), e.gradients[1], 2e-7)


@pytest.mark.parametrize("n", WIDTHS)
def test_every_run_and_every_replay_gives_the_same_bits(n: int) -> None:
    rows = 600
    logits = torch.randn(rows, n, device=GPU).bfloat16()
    labels = torch.randint(0, n, (rows,), device=GPU)
    labels[::7] = IGNORED
    busy, noise = torch.cuda.Stream(), torch.randn(2048, 2048, device=GPU)

    def once(given: Tensor) -> tuple[Tensor, Tensor]:
        return ops.cross_entropy_inplace_grad(given, labels), given

    with ferryman.use("cuda"), torch.no_grad(), ferryman.trace() as seen:
        first = once(logits.clone())
        for _ in range(100):  # a replay after the 64th call
            with torch.cuda.stream(busy):
                noise @ noise
            assert all(torch.equal(a, b) for a, b in zip(once(logits.clone()), first, strict=True))
        static, graph = logits.clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = once(static)
        for _ in range(3):
            static.copy_(logits)
            graph.replay()
            assert all(torch.equal(a, b) for a, b in zip(captured, first, strict=True))
    assert seen.calls == {("cross_entropy_inplace_grad", "cuda"): 102}


def test_addresses_that_are_not_those_of_the_first_calls() -> None:
    n = 50_257
    memory = torch.randn(40 * n + 64, device=GPU).bfloat16()
    labels = torch.randint(0, n, (40,), device=GPU)
    with ferryman.use("cuda"), torch.no_grad():
        for call in range(80):
            offset = (0, 8, 64, 1, 3)[call % 5] if call > 66 else 0
            given = (
                memory[offset : offset + 40 * n].clone() if offset == 0 else memory.clone()[offset : offset + 40 * n]
            )
            expected = torch.nn.functional.cross_entropy(given.view(40, n).double(), labels)
            loss = ops.cross_entropy_inplace_grad(given.view(40, n), labels)
            assert abs(loss.double() - expected) <= 1e-6 * expected, (call, offset)


def test_calls_on_several_streams_share_nothing() -> None:
    sets = [(torch.randn(200, n, device=GPU).bfloat16(), torch.randint(0, n, (200,), device=GPU)) for n in WIDTHS]
    with ferryman.use("cuda"), torch.no_grad():
        expected = [(x.clone(), labels) for x, labels in sets]
        losses = [ops.cross_entropy_inplace_grad(x, labels) for x, labels in expected]
        streams = [torch.cuda.Stream() for _ in sets]
        for _ in range(10):
            given = [x.clone() for x, _ in sets]
            concurrent_losses = []
            torch.cuda.synchronize()
            for stream, x, (_, labels) in zip(streams, given, sets, strict=True):
                with torch.cuda.stream(stream):
                    concurrent_losses.append(ops.cross_entropy_inplace_grad(x, labels))
            torch.cuda.synchronize()
            assert all(torch.equal(a, b) for a, b in zip(concurrent_losses, losses, strict=True))
            assert all(torch.equal(a, b) for a, (b, _) in zip(given, expected, strict=True))


def test_a_refused_launch_has_overwritten_nothing() -> None:
    logits = torch.randn(16, 200_000, device=GPU).bfloat16()
    before, labels = logits.clone(), torch.zeros(16, dtype=torch.int64, device=GPU)
    small = Form(8, 1, 128, 1)
    assert not small.fits(200_000, 2, False)
    with pytest.raises(LaunchError):
        kernels.losses(small, logits, labels, IGNORED, 0.0, True, target())
    torch.cuda.synchronize()
    assert torch.equal(logits, before)
