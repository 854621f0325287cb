"""SIMT kernels on the device that is here: right, on the right device and stream, under graph capture, and fast."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.backends import cuda, hip, simt, simt_offline
from ferryman.backends.base import Target
from ferryman.dispatch import registry
from ferryman.errors import CaptureError
from ferryman.ops.activation import simt_kernels as activation
from ferryman.ops.norm import simt_kernels as norm
from ferryman.ops.rope import simt_kernels as rope
from ferryman.ops.softmax import simt_kernels as softmax
from ferryman.ops.softmax.simt_softmax_backward_kernels import softmax_backward
from tests import families
from tests.bounded import must_be_right

pytestmark = pytest.mark.gpu

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
Kernel = Callable[..., Any]


def _target(index: int = 0) -> Target:
    p = torch.cuda.get_device_properties(index)
    arch = f"sm_{p.major}{p.minor}" if torch.version.hip is None else p.gcnArchName.split(":")[0]
    shared = getattr(p, "shared_memory_per_block_optin", 65_536)
    return Target(
        arch,
        simt.vendor_of(arch),
        simt.wave_of(arch),
        shared,
        1024,
        p.multi_processor_count,
        p.L2_cache_size,
        simt_offline.target_for(arch).features,
    )


@pytest.fixture(scope="module")
def target() -> Target:
    device_target = _target()
    backend = cuda.CudaBackend() if device_target.vendor == "nvidia" else hip.HipBackend()
    assert backend.probe(device_target.vendor) == ()
    return device_target


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0, device: str = "cuda") -> Tensor:
    torch.manual_seed(sum(shape))
    return (torch.randn(shape, device=device) * scale).to(dtype)


def _thrice(kernel: Kernel, *args: Any) -> tuple[Tensor, ...]:
    """The result of three runs, bitwise equal, and right."""
    runs = [_tuple(kernel(*args)) for _ in range(3)]
    for other in runs[1:]:
        for a, b in zip(runs[0], other, strict=True):
            assert torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))
    must_be_right(kernel.__name__, args[:-1], runs[0])
    return runs[0]


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


WIDTHS = (
    1,
    8,
    96,
    127,
    768,
    1000,
    1024,
    2048,
    4096,
    4104,
    5120,
    8191,
    8192,
    11_008,
    16_384,
    20_008,
    32_768,
    50_257,
    50_264,
    65_536,
    66_056,
    100_008,
    131_072,
    131_080,
    152_064,
    262_144,
)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("n", WIDTHS)
def test_rows_of_every_width(n: int, dtype: torch.dtype, target: Target) -> None:
    if dtype is F16 and n not in (1, 1000, 4104, 11_008, 50_257, 65_536):
        pytest.skip("float16 differs from bfloat16 in its conversions alone")
    # a number of rows has its form: 8 blocks a row, up to 1024 threads, fewer, rows in turn
    for rows in (1, *((7, 67) if dtype is BF16 else ()), 9001 if n <= 8192 else 301):
        x, r = _random(rows, n, dtype=dtype), _random(rows, n, dtype=dtype, scale=2.0)
        w, b = _random(n, dtype=F32), _random(n, dtype=dtype)
        _thrice(norm.rms_norm, x, w, 1e-6, False, target)
        _thrice(norm.add_rms_norm, x, r, b, 1e-6, True, target)
        _thrice(norm.layer_norm, x, w, b, 1e-5, target)
        (p,) = _thrice(softmax.softmax, x, target)
        _thrice(softmax_backward, r, p, target)


@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_activations(dtype: torch.dtype, target: Target) -> None:
    for shape in ((1,), (7, 257), (4099,), (33, 14_336), (2, 3, 130)):
        g, u = _random(*shape, dtype=dtype, scale=4.0), _random(*shape, dtype=dtype)
        grad = _random(*shape, dtype=dtype, scale=2.0).flip(-1)
        _thrice(activation.silu_mul, g, u, target)
        _thrice(activation.silu_mul_backward, grad, g, u, target)
        for how in ("tanh", "none"):
            _thrice(activation.gelu_mul, g, u, how, target)
            _thrice(activation.gelu_mul_backward, grad, g, u, how, target)
    g, u = _random(33, 2 * 1032, dtype=dtype).split(1032, -1)
    _thrice(activation.silu_mul, g, u, target)
    _thrice(activation.silu_mul_backward, _random(33, 1032, dtype=dtype), g, u, target)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("x", "c"), list(itertools.product((F32, F16, BF16), (F32, BF16))), ids=str)
def test_rope(x: torch.dtype, c: torch.dtype, interleaved: bool, target: Target) -> None:
    for b, hq, hk, s, d, r in (
        (2, 32, 8, 77, 128, 128),
        (1, 4, 1, 1, 80, 80),
        (1, 3, 3, 5, 96, 32),
        (1, 2, 1, 9, 67, 32),
        (3, 9, 2, 1021, 64, 64),
        (2, 5, 3, 301, 128, 64),
        (25, 1, 1, 149, 128, 128),
        (9, 8, 1, 643, 128, 128),
        (32, 32, 8, 1, 128, 128),
    ):
        q, k = (_random(b, s, h, d, dtype=x).transpose(1, 2) for h in (hq, hk))
        cos, sin = _random(1, s, r, dtype=c), _random(1, s, r, dtype=c, scale=0.5)
        got = _thrice(rope.rope, q, k, cos, sin, interleaved, target)
        assert all(torch.equal(out[..., r:], one[..., r:]) for out, one in zip(got, (q, k), strict=True))
        over = [tensor.clone() for tensor in (q, k)]
        rope.rope_(*over, cos, sin, interleaved, target)
        assert all(torch.equal(a, b) for a, b in zip(over, got, strict=True))
        grads = [_random(*one.shape, dtype=one.dtype, scale=2.0) for one in (q, k)]
        back = _thrice(rope.rope_backward, *grads, cos, sin, interleaved, target)
        assert all(torch.equal(out[..., r:], grad[..., r:]) for out, grad in zip(back, grads, strict=True))


@pytest.mark.parametrize("n", [20_008, 65_536, 131_080])
def test_hostile_values_in_rows_over_a_cluster(n: int, target: Target) -> None:
    """Each row has its own: nothing of a row reaches the next one in its stage, nor the block that has it beside."""
    for rows in (2, 601):
        for dtype in (F32, BF16):
            x = _random(rows, n, dtype=dtype)
            for row, (column, value) in enumerate([(n - 1, float("nan")), (0, float("inf"))]):
                x[row::7, column] = value
            if rows > 7:
                x[2::7], x[3::7, 1:], x[4::7] = float("-inf"), float("-inf"), 0.0
            _thrice(softmax.softmax, x, target)
            _thrice(norm.rms_norm, x, None, 1e-6, False, target)
            for eps in (0.0, 1e-6):
                got = norm.layer_norm(x, None, None, eps, target)
                d = x.double()
                wanted = (d - d.mean(-1, keepdim=True)) * torch.rsqrt(d.var(-1, correction=0, keepdim=True) + eps)
                assert torch.equal(got.isnan(), wanted.isnan())


def test_scales_that_are_powers_of_two_are_exact(target: Target) -> None:
    """The mean of squares is 4^k: so is its division by any width, and 1 / sqrt of it leaves no rounding."""
    for n in (1000, 768, 4099, 20_008, 65_544):
        for k in (-30, -1, 0, 3, 30):
            x = torch.full((3, n), 2.0**k, device="cuda")
            x[1, ::2] *= -1
            assert torch.equal(norm.rms_norm(x, None, 0.0, False, target), x.sign())
    zero = norm.rms_norm(torch.zeros(2, 1000, device="cuda"), None, 0.0, False, target)
    assert bool(zero.isnan().all()), "0 / sqrt(0)"


def test_nan_and_infinity(target: Target) -> None:
    norm_of = registry.primitive("rms_norm").body
    for value in (float("nan"), float("inf"), float("-inf")):
        for dtype in (F32, F16, BF16):
            x = _random(4, 520, dtype=dtype)
            x[1, 17] = value
            for got, wanted in (
                (softmax.softmax(x, target), torch.softmax(x.double(), -1)),
                (norm.rms_norm(x, None, 1e-6, False, target), norm_of(x.double(), None, 1e-6, False)),
                (activation.silu_mul(x, x, target), torch.nn.functional.silu(x.double()) * x.double()),
                (activation.gelu_mul(x, x, "none", target), torch.nn.functional.gelu(x.double()) * x.double()),
            ):
                assert torch.equal(got.isnan(), wanted.isnan()) and torch.equal(got.isinf(), wanted.to(dtype).isinf())
    full = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32, device="cuda").view(F32)
    assert bool(norm.rms_norm(_random(3, 64, dtype=BF16), full, 1e-6, False, target).isnan().all())


def test_a_tensor_beyond_32_bit_offsets(target: Target) -> None:
    if torch.cuda.mem_get_info()[0] < 24 << 30:
        pytest.skip("needs 24 GiB of free device memory")
    rows = 2**31 // 4096 + 3
    x = torch.ones(rows, 4096, dtype=BF16, device="cuda")
    x[-1] = _random(4096, dtype=BF16)
    must_be_right("rms_norm", (x[-2:], None, 1e-6, False), (norm.rms_norm(x, None, 1e-6, False, target)[-2:],))
    y = activation.silu_mul(x, x, target)
    must_be_right("silu_mul", (x[-1], x[-1]), (y[-1],))


def test_streams_and_graph_capture(target: Target) -> None:
    x, w = _random(64, 4096, dtype=BF16), _random(4096, dtype=BF16)
    expected = norm.rms_norm(x, w, 1e-6, False, target)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        other = norm.rms_norm(x, w, 1e-6, False, target)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(other, expected)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = norm.rms_norm(x, w, 1e-6, False, target)
    x.mul_(-1)
    graph.replay()
    assert torch.equal(captured, -expected)
    with pytest.raises(CaptureError, match="before capturing"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        norm.rms_norm(x[:, :1234], None, 1e-6, False, target)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_other_device() -> None:
    x = _random(64, 4096, dtype=BF16, device="cuda:1")
    assert torch.cuda.current_device() == 0
    with torch.cuda.device(0):
        y = norm.rms_norm(x, None, 1e-6, False, _target(1))
    assert y.device == x.device and torch.cuda.current_device() == 0
    must_be_right("rms_norm", (x, None, 1e-6, False), (y,))


def _seconds(call: Callable[[], Any], repeat: int = 20) -> float:
    """Median time of a call on the device, the second-level cache flushed before each."""
    flush = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    call()
    times = []
    for _ in range(repeat):
        flush.zero_()
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        call()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return sorted(times)[repeat // 2]


@pytest.mark.slow
@pytest.mark.parametrize("n", [1024, 2048, 4096, 8192, 16_384, 32_768, 65_536, 131_072])
def test_bandwidth(n: int, target: Target, record_property: Callable[[str, object], None]) -> None:
    """256 MiB of bf16 rows against a copy that moves as many bytes. The floor only catches a kernel that went wrong."""
    x = _random((256 << 20) // 2 // n, n, dtype=BF16)
    other, w = x.flip(0), _random(n, dtype=BF16)
    out = torch.empty_like(x)
    copy = 2 * x.nbytes / _seconds(lambda: out.copy_(x))
    shares = {}
    for name, (tensors, kernel, given) in families.table("simt_cases", "MOVED").items():
        args = (*given(x, other, w), target)
        shares[name] = tensors * x.nbytes / _seconds(lambda kernel=kernel, args=args: kernel(*args)) / copy
    assert len(shares) >= 5
    print(f"n={n}: copy {copy / 1e12:.2f} TB/s; " + ", ".join(f"{k} {v:.3f}" for k, v in shares.items()))  # noqa: T201
    for name, share in shares.items():
        record_property(f"{name}_of_copy", round(share, 4))
        assert share > 0.5, f"{name} reaches {share:.2f} of the copy's bandwidth"
