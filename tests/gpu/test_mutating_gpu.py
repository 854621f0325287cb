"""On a real device: ops that write over arguments give the other ops' results, run after run, in half of the memory."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import registry, select
from ferryman.porting import bench

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
PEERS = Path(__file__).parents[2] / "benchmarks" / "peers"
RUNS = 20  # a thread that reads what another has written would show in some of them


def backends(op: str) -> list[str]:
    vendor, known = select.profile_for(GPU).vendor, registry.backends()
    return [
        line.name
        for line in registry.implementations(op)
        if line.name not in ("torch", "definition")
        and vendor in known[line.backend].vendors
        and not registry.probe(line.backend, vendor)
    ]


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("seq", "dim", "rotary"), [(4096, 128, 128), (1, 128, 128), (1021, 80, 32), (515, 64, 64)])
def test_rope_over_its_arguments_has_the_bits_of_rope(
    dtype: torch.dtype, interleaved: bool, seq: int, dim: int, rotary: int
) -> None:
    cos, sin = (torch.randn(1, seq, rotary, device=GPU, dtype=dtype) for _ in range(2))
    for heads_first, name in itertools.product((False, True), backends("rope_")):
        inputs = [torch.randn(2, seq, heads, dim, device=GPU, dtype=dtype).transpose(1, 2) for heads in (32, 8)]
        if heads_first:
            inputs = [x.contiguous() for x in inputs]
        with ferryman.use(name):
            expected = ops.rope(*inputs, cos, sin, interleaved=interleaved)
            for _ in range(RUNS):
                given = [x.clone() for x in inputs]
                rotated = ops.rope_(*given, cos, sin, interleaved=interleaved)
                assert all(f is g and torch.equal(f, e) for f, g, e in zip(rotated, given, expected, strict=True)), name


@pytest.mark.parametrize(
    ("rows", "width"),
    [
        (4096, 128_256),
        (512, 50_257),
        (3, 152_064),
        (8192, 1000),
        (1024, 8192),
        (256, 32_000),
    ],
)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_gradient_over_the_logits_is_the_backwards(rows: int, width: int, smoothing: float) -> None:
    logits = torch.randn(rows, width, device=GPU, dtype=torch.bfloat16)
    labels = torch.randint(0, width, (rows,), device=GPU)
    labels[::7] = -100
    one = torch.ones((), device=GPU)
    with ferryman.use("triton"), torch.no_grad():
        loss, lse = torch.ops.ferryman.cross_entropy(logits, labels, -100, smoothing)
        gradient = ops.cross_entropy_backward(one, logits, labels, lse, -100, smoothing)
        first: Tensor | None = None
        for _ in range(RUNS if rows < 4096 else 3):
            given = logits.clone()
            got = ops.cross_entropy_inplace_grad(given, labels, label_smoothing=smoothing)
            assert float((got - loss).abs()) <= 1e-5 * float(loss.abs())
            if first is None:
                first = given
                unit = 2.0**-7  # bfloat16's neighbours lie up to that far apart
                close = (given.float() - gradient.float()).abs() <= unit * gradient.float().abs() + 1e-12
                assert bool(close.all())
            assert torch.equal(given, first)


def test_a_training_step_neither_waits_nor_holds_a_second_matrix() -> None:
    rows, width = 1024, 50_257
    labels = torch.randint(0, width, (rows,), device=GPU)
    source = torch.randn(rows, width, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    matrix = source.numel() * source.element_size()
    for scale in (1.0, 128.0):
        exact = torch.softmax(source.detach().double(), -1)
        exact[torch.arange(rows), labels] -= 1
        exact *= scale / rows
        for measured in (False, True):  # compiled first
            logits = source * 1
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            torch.cuda.set_sync_debug_mode("error" if measured else "default")
            try:
                loss = ops.cross_entropy_inplace_grad(logits, labels) * scale
                (gradient,) = torch.autograd.grad(loss, source)
            finally:
                torch.cuda.set_sync_debug_mode("default")
        assert torch.cuda.max_memory_allocated() - before <= 1.1 * matrix  # what `source * 1` hands back
        # rounded once (the scales are powers of two), from float32 sums that are 1e-6 off at most
        error = (gradient.double() - exact).abs() / (2.0**-8 * exact.abs() + 1e-6 * scale / rows)
        assert error.max() <= 1, error.max()


def test_ligers_forms_in_place_are_timed_beside_ours() -> None:
    benchmark = bench.run(
        ops=["rope_", "cross_entropy_inplace_grad"], device="cuda", peer_names=["liger"], peers_from=PEERS
    )
    if benchmark.peers[0].reason is not None:
        pytest.skip(benchmark.peers[0].reason)
    assert len(benchmark.cells) == 2
    for cell in benchmark.cells:
        assert cell.untrusted == [], cell.untrusted
        times = {t.name: t for t in cell.times}
        ours = [t for name, t in times.items() if name.startswith("triton") and t.skipped is None]
        assert times["liger"].skipped is None and ours, (cell.op, times["liger"].skipped)
        assert all(t.warm_seconds is None for t in ours)  # the second call would find other inputs
