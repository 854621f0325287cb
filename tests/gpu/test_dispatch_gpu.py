"""On a real device: every pair of forward and backward, graph capture, streams, devices, compilation."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.dispatch import plan, registry, select
from ferryman.errors import CaptureError, Unsupported
from ferryman.ops.primitive import Primitive
from ferryman.porting.bench.rotation import spared
from ferryman.porting.inputs.cases import arguments, as_tuple, cases_of
from tests import pairs

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
FORWARD = [op for op in registry.primitives().values() if not op.name.endswith("_backward")]


def usable(op: Primitive) -> list[Any]:
    profile = select.profile_for(GPU)
    backends = registry.backends()
    return [
        line
        for line in registry.implementations(op.name)
        if profile.vendor in backends[line.backend].vendors and not registry.probe(line.backend, profile.vendor)
    ]


def test_the_device_has_its_own_profile_and_all_its_backends() -> None:
    profile = select.profile_for(GPU)
    assert not profile.generic
    for backend in ("triton", "cuda") if profile.vendor == "nvidia" else ("triton", "hip"):
        assert registry.probe(backend, profile.vendor) == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", pairs.differentiable(), ids=lambda op: op.name)
def test_every_backward_pairs_with_every_forward(op: Primitive, dtype: torch.dtype) -> None:
    failures, judged = [], set()
    for forward, backward in pairs.pairs(op, GPU):
        for case in pairs.cases(op):
            args = arguments(case, op, dtype, 0, GPU).values
            if pairs.refused(op, args, forward, GPU):
                continue
            try:
                ratio, where = pairs.worst_ratio(op, case, dtype, GPU, forward, backward)
            except Unsupported:
                assert backward.when, (backward.name, case.name)  # only conditions refuse
                continue
            judged.add((forward.backend, backward.backend))
            if not ratio <= 1:
                failures.append(f"{forward.name}+{backward.name}: {where} is {ratio:.2f} bounds out")
    assert not failures, failures[:20]
    assert {(one, other) for one in ("torch", "triton") for other in ("torch", "triton")} <= judged


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_compiled_attention_is_the_vendors_call_with_the_right_gradients(dtype: torch.dtype, head_dim: int) -> None:
    """Against the float64 definition, on lengths that were not compiled for, and on storage that is not aligned.

    Compiled for aligned storage, Inductor copies what comes unaligned; compiled for the latter, the op stays whole.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return ops.attention(q, k, v, causal=True)

    for lengths, calls in (
        (((64, 0), (77, 0), (301, 0), (129, 1)), 0),
        (((67, 1), (301, 1)), 1),
    ):
        torch._dynamo.reset()
        function = torch.compile(attend, fullgraph=True, dynamic=True)
        for length, shift in lengths:
            inputs = [
                torch.randn(2 * heads * length * head_dim + shift, device=GPU)
                .to(dtype)[shift:]
                .view(2, length, heads, head_dim)
                .transpose(1, 2)
                .requires_grad_()
                for heads in (4, 2, 2)
            ]
            wide = [x.detach().double().requires_grad_() for x in inputs]
            with ferryman.trace() as seen:
                out = function(*inputs)
            exact = ops.attention.primitive.body(*wide, True, None, None, 0.0, None)[0]
            grad = torch.randn_like(out)
            results = [out, *torch.autograd.grad(out, inputs, grad)]
            expected = [exact, *torch.autograd.grad(exact, wide, grad.double())]
            assert sum(seen.calls.values()) == calls
            assert {(op, registry.implementation(op, name).backend) for op, name in seen.calls} <= {
                ("attention", "torch"),
                ("attention", "triton"),
            }
            for got, want in zip(results, expected, strict=True):
                assert (got.double() - want).norm() <= 2 * torch.finfo(dtype).eps * want.norm()


def _captured(call: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, tuple[Tensor, ...]]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = as_tuple(call())
    return graph, outputs


@pytest.mark.parametrize("op", FORWARD, ids=lambda op: op.name)
def test_a_captured_graph_replays_on_new_inputs(op: Primitive) -> None:
    captured = set()
    for line in usable(op):
        if line.backend == "definition":  # it may read values on the host
            continue
        for case in [c for c in cases_of(op) if "nonfinite" not in c.name][:3]:
            values = arguments(case, op, torch.bfloat16, 0, GPU).values
            again = arguments(case, op, torch.bfloat16, 1, GPU).values
            if pairs.refused(op, values, line, GPU):
                continue
            with ferryman.use(**{op.name: line.name}):
                try:
                    graph, outputs = _captured(functools.partial(op.namespace["_resolve"], *values))
                except Unsupported as error:  # a line that reads the device's values says so
                    assert "capture" in str(error), line.name
                    continue
                captured.add(line.backend)
                for mine, other in zip(values, again, strict=True):
                    if isinstance(mine, Tensor) and mine.numel():
                        mine.copy_(other)
                for out in outputs:
                    if not any(out is value for value in values):  # else it is an input, which the op writes over
                        out.fill_(17)
                graph.replay()
                expected = as_tuple(op.namespace["_resolve"](*again))
            for got, right in zip(outputs, expected, strict=True):
                assert torch.equal(got.nan_to_num(nan=3.5), right.nan_to_num(nan=3.5)), f"{line.name} {case.name}"
    assert "triton" in captured


@pytest.mark.parametrize("backend", ["triton", "cuda"])
def test_compiling_during_capture_is_a_clear_error_and_leaves_the_process_usable(backend: str) -> None:
    x = torch.randn(64, 1536 + (64 if backend == "cuda" else 0), device=GPU, dtype=torch.float16)
    weight = torch.ones(x.shape[-1], device=GPU, dtype=torch.bfloat16)  # a combination that nothing else compiles
    with ferryman.use(backend):
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                ops.layer_norm(x, weight, None, 1e-3)
        except CaptureError as error:
            assert "captur" in str(error)
        else:
            pytest.skip("the kernel was compiled already")
        torch.cuda.synchronize()
        assert torch.isfinite(ops.layer_norm(x, weight, None, 1e-3)).all()


def test_work_is_ordered_on_the_current_stream() -> None:
    for line in usable(ops.rms_norm.primitive):
        stream = torch.cuda.Stream()
        with ferryman.use(line.name), torch.cuda.stream(stream):
            x = torch.zeros(4096, 4096, device=GPU, dtype=torch.bfloat16)
            ops.rms_norm(x)
            torch.cuda._sleep(50_000_000)
            x += 1
            y = ops.rms_norm(x)
        torch.cuda.current_stream().wait_stream(stream)
        assert (y == 1).all(), line.name


def test_threads_on_their_own_streams_agree() -> None:
    x = torch.randn(512, 1024, device=GPU, dtype=torch.bfloat16)
    expected = {line.name: _under(line.name, x) for line in usable(ops.rms_norm.primitive)}
    plan.drop_plans()
    wrong: list[str] = []

    def work(name: str) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                got = _under(name, x)
                torch.cuda.current_stream().synchronize()
                if not torch.equal(got, expected[name]):
                    wrong.append(name)

    workers = [threading.Thread(target=work, args=(name,)) for name in expected for _ in range(2)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert not wrong


def _under(name: str, x: Tensor) -> Tensor:
    with ferryman.use(name):
        return ops.rms_norm(x)


def test_backward_on_autograds_device_thread_follows_the_request() -> None:
    x = torch.randn(64, 256, device=GPU, dtype=torch.bfloat16, requires_grad=True)
    with ferryman.trace() as seen, ferryman.use("cuda", rms_norm_backward="triton"):
        y = ops.rms_norm(x)
    y.sum().backward()
    assert seen.calls == {("rms_norm", "cuda"): 1, ("rms_norm_backward", "triton.rows"): 1}


def test_autocast_on_the_device() -> None:
    x = torch.randn(8, 64, device=GPU, requires_grad=True)
    w = torch.randn(64, 64, device=GPU)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        for mine, torchs in (
            (ops.linear(x, w), torch.nn.functional.linear(x, w)),
            (ops.rms_norm(x.bfloat16()), torch.nn.functional.rms_norm(x.bfloat16(), (64,))),
            (ops.layer_norm(x.bfloat16()), torch.nn.functional.layer_norm(x.bfloat16(), (64,))),
            (ops.softmax(x.bfloat16()), torch.softmax(x.bfloat16(), -1)),
        ):
            assert mine.dtype == torchs.dtype


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("op", FORWARD, ids=lambda op: op.name)
def test_the_tensors_device_counts_not_the_current_one(op: Primitive) -> None:
    other = torch.device("cuda", 1)
    torch.cuda.set_device(0)
    for line in usable(op):
        for case in [c for c in cases_of(op) if "nonfinite" not in c.name][:4]:
            here, there = (arguments(case, op, torch.bfloat16, 0, device).values for device in (GPU, other))
            if pairs.refused(op, here, line, GPU):
                continue
            with ferryman.use(line.name):
                first, second = (as_tuple(op.namespace["_resolve"](*args)) for args in (here, there))
            assert torch.cuda.current_device() == 0
            for a, b in zip(first, second, strict=True):
                assert b.device == other and torch.equal(a.cpu().nan_to_num(), b.cpu().nan_to_num()), (
                    line.name,
                    case.name,
                )
    wanted = {n for shared in op.gradient.owners for n in shared}
    args = tuple(
        v.detach().requires_grad_() if isinstance(v, Tensor) and n in wanted else v
        for n, v in zip(
            op.names, arguments(registry.evidence(op).cases()[1], op, torch.bfloat16, 0, other).values, strict=True
        )
    )
    with ferryman.use("triton"):
        outputs = as_tuple(op.namespace["_resolve"](*spared(op, args)))
        outputs[0].float().sum().backward()
    assert all(a.grad is not None and a.grad.device == other for a in args if isinstance(a, Tensor) and a.requires_grad)


def test_inductor_with_requested_kernels() -> None:
    weight = torch.nn.Parameter(torch.randn(512, device=GPU, dtype=torch.bfloat16))

    def block(x: Tensor) -> Tensor:
        return ops.silu_mul(ops.rms_norm(x, weight), x)

    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(block, fullgraph=True, backend=counter)
    for rows in (16, 17, 33, 64, 100):
        x = torch.randn(rows, 512, device=GPU, dtype=torch.bfloat16, requires_grad=True)
        with ferryman.use("triton"), ferryman.trace() as seen:
            compiled(x).float().sum().backward()
        assert seen.calls["rms_norm", "triton.rows"] == 1 and seen.calls["silu_mul", "triton"] == 1
    assert counter.frame_count <= 2
