"""On a real device: a replayed plan gives the launcher's bits, whatever changes between calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.backends import replay
from ferryman.dispatch import plan, registry, select
from ferryman.errors import ArgumentError
from ferryman.ops.menu import Implementation
from ferryman.ops.primitive import Primitive
from ferryman.porting.inputs.cases import arguments, as_tuple, cases_of
from tests import pairs

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Plans are replayed from their second call on."""
    monkeypatch.setattr(plan, "REPLAY_AFTER", 2)
    plan.drop_plans()
    yield
    plan.drop_plans()


def lines() -> list[tuple[Primitive, Implementation]]:
    vendor = select.profile_for(GPU).vendor if torch.cuda.is_available() else "nvidia"
    backends = registry.backends()
    return [
        (op, line)
        for op in registry.primitives().values()
        for line in registry.implementations(op.name)
        if line.replayable and vendor in backends[line.backend].vendors
    ]


def shifted(x: Tensor, by: int) -> Tensor:
    """The same memory, holes between rows included, copied to ``by`` elements into a storage of its own."""
    span = 1 + sum((n - 1) * s for n, s in zip(x.shape, x.stride(), strict=True)) if x.numel() else 0
    storage = torch.empty(span + by, dtype=x.dtype, device=x.device)
    storage[by:].copy_(x.as_strided((span,), (1,), x.storage_offset()))
    return storage.as_strided(x.shape, x.stride(), by)


def moved(args: tuple[Any, ...], by: int) -> tuple[Any, ...]:
    return tuple(shifted(a, by) if isinstance(a, Tensor) else a for a in args)


def same(actual: Any, expected: Any) -> bool:
    return all(
        a.shape == b.shape and a.stride() == b.stride() and torch.equal(a.nan_to_num(nan=7.5), b.nan_to_num(nan=7.5))
        for a, b in zip(as_tuple(actual), as_tuple(expected), strict=True)
    )


def replayed(op: Primitive) -> list[str]:
    files = [run.__code__.co_filename for _, run, *_ in plan.runner_of(op).hot.values() if hasattr(run, "__code__")]
    return [name for name in files if name.startswith("<ferryman replay of")]


def ways() -> list[tuple[Primitive, Implementation, bool]]:
    """Each line, and whether torch is asked to be deterministic: both, where the line's kernels depend on it."""
    return [
        (op, line, ask)
        for op, line in lines()
        for ask in ((False, True) if line.deterministic == "asked" else (False,))
    ]


@pytest.fixture
def asked(request: pytest.FixtureRequest) -> Iterator[bool]:
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(request.param)
    yield request.param
    torch.use_deterministic_algorithms(before)


@pytest.mark.parametrize(
    ("op", "line", "asked"),
    ways(),
    ids=lambda v: ("free", "asked")[v] if isinstance(v, bool) else v.name,
    indirect=["asked"],
)
def test_a_replay_gives_the_launchers_bits(op: Primitive, line: Implementation, asked: bool) -> None:
    """Fresh addresses, then unaligned ones, then aligned ones again; outputs kept alive so that none is reused. Of what
    two launches give differently (sums in the order in which tiles come) only the other results are compared."""
    judged, served, target = 0, 0, select.target_of(select.profile_for(GPU))
    launch, kept = registry.launcher(line), []
    with torch.no_grad():
        for case in (*cases_of(op), *cases_of(op, "standard")):
            if "exact" in case.name or (case.tier == "standard" and served):
                continue
            args = moved(arguments(case, op, torch.bfloat16, 0, GPU).values, 0)
            if pairs.refused(op, args, line, GPU):
                continue
            served += 1
            plan.drop_plans()
            expected, elsewhere, *again = (as_tuple(launch(*moved(args, by), target)) for by in (0, 1, 0, 0, 0))
            steady = [i for i, first in enumerate(expected) if all(same(first, other[i]) for other in again)]
            if not steady or (asked and len(steady) < len(expected)):
                continue
            with ferryman.use(**{op.name: line.name}):
                for call in range(7):
                    unaligned = call in (4, 6)
                    given = moved(args, int(unaligned))
                    result = op.namespace["_resolve"](*given)
                    kept.append((given, result))
                    right = elsewhere if unaligned else expected
                    for i in steady:
                        assert same(as_tuple(result)[i], right[i]), f"{case.name}, call {call}, result {i}"
            judged += bool(replayed(op))
    assert judged >= min(3, served) >= 1


def test_strides_divisibility_and_widths_that_change_between_calls() -> None:
    for name in ("triton", "cuda"):
        if registry.probe(name, select.profile_for(GPU).vendor):
            continue
        w = torch.randn(4096, device=GPU, dtype=torch.bfloat16)
        with ferryman.use(name):
            for _ in range(5):
                for rows, width, stride in (
                    (8, 1024, 1024),
                    (8, 1024, 1040),
                    (8, 1024, 1025),
                    (8, 1000, 1000),
                    (8, 1, 1),
                    (1, 1024, 4096),
                    (7, 1023, 4096),
                ):
                    x = torch.randn(rows, stride, device=GPU, dtype=torch.bfloat16)[:, :width]
                    y = ops.rms_norm(x, w[:width])
                    exact = ops.rms_norm.primitive.body(x.double(), w[:width].double(), 1e-6, False)
                    assert ((y.double() - exact).abs() <= 2.0**-8 * exact.abs() + 1e-6).all(), (name, width, stride)


def test_replays_run_on_the_current_stream_and_in_graphs() -> None:
    for name in ("triton", "cuda"):
        if registry.probe(name, select.profile_for(GPU).vendor):
            continue
        x = torch.ones(4096, 4096, device=GPU, dtype=torch.bfloat16)
        with ferryman.use(name):
            for _ in range(4):
                ops.rms_norm(x)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                x.zero_()
                torch.cuda._sleep(50_000_000)
                x += 1
                y = ops.rms_norm(x)
            torch.cuda.current_stream().wait_stream(stream)
            assert (y == 1).all()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = ops.rms_norm(x)
            x.copy_(torch.randn(4096, 4096, device=GPU))
            graph.replay()
            assert torch.equal(captured, ops.rms_norm(x))


def test_a_plan_may_be_recorded_while_a_graph_is_captured() -> None:
    """One warm-up call compiled the kernel; the second call, which records, is the captured one."""
    for name in ("triton", "cuda"):
        if registry.probe(name, select.profile_for(GPU).vendor):
            continue
        x = torch.randn(64, 768, device=GPU, dtype=torch.bfloat16)
        plan.drop_plans()
        with ferryman.use(name):
            expected = ops.rms_norm(x)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                captured = ops.rms_norm(x)
            captured.zero_()
            graph.replay()
            assert torch.equal(captured, expected) and torch.equal(ops.rms_norm(x), expected)


def test_a_thread_that_called_nothing_of_cuda_before() -> None:
    for name in ("triton", "cuda"):
        if registry.probe(name, select.profile_for(GPU).vendor):
            continue
        x = torch.randn(64, 768, device=GPU, dtype=torch.bfloat16)
        with ferryman.use(name):
            for _ in range(4):
                expected = ops.rms_norm(x)
        results: list[Any] = []

        def work(name: str = name, x: Tensor = x, results: list[Any] = results) -> None:
            try:
                with ferryman.use(name):
                    results.append(ops.rms_norm(x))
            except BaseException as error:  # noqa: BLE001 - judged below
                results.append(error)

        worker = threading.Thread(target=work)
        worker.start()
        worker.join()
        assert isinstance(results[0], Tensor) and torch.equal(results[0], expected), (name, results)


def test_triton_launch_hooks_see_every_launch() -> None:
    import triton

    x, seen = torch.randn(64, 768, device=GPU, dtype=torch.bfloat16), []

    def hook(metadata: Any) -> None:
        seen.append(metadata.get()["name"])

    with ferryman.use("triton"):
        for _ in range(4):
            expected = ops.rms_norm(x)
        triton.knobs.runtime.launch_enter_hook.add(hook)
        try:
            assert torch.equal(ops.rms_norm(x), expected)
        finally:
            triton.knobs.runtime.launch_enter_hook.remove(hook)
        assert seen == ["_norm"]
        ops.rms_norm(x)
        assert len(seen) == 1


def test_tf32_that_is_switched_between_calls() -> None:
    x, w = torch.randn(64, 512, device=GPU), torch.randn(256, 512, device=GPU)
    exact = x.double() @ w.double().t()
    before = torch.get_float32_matmul_precision()
    # 512 terms in float32: at most sqrt(512) units of 2**-24 in the norm; tf32 keeps 10 bits of each factor
    ieee, tf32 = ("highest", 0.0, 1.4e-6), ("high", 1e-5, 1e-3)
    try:
        with ferryman.use("triton"):
            for precision, low, high in (ieee, tf32, ieee):
                torch.set_float32_matmul_precision(precision)
                for _ in range(4):
                    error = ((ops.linear(x, w).double() - exact).norm() / exact.norm()).item()
                    assert low <= error <= high, (precision, error)
    finally:
        torch.set_float32_matmul_precision(before)


def served() -> list[str]:
    return [
        name
        for name in ("triton", "cuda", "hip")
        if name in registry.backends()
        and select.profile_for(GPU).vendor in registry.backends()[name].vendors
        and not registry.probe(name, select.profile_for(GPU).vendor)
    ]


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 2, 5])
@pytest.mark.parametrize("offset", [0, 1024, 3])
def test_a_freed_storage_is_refused_and_the_device_lives(grads: bool, calls: int, offset: int) -> None:
    """FSDP frees a flat parameter between uses; a view into it keeps a small address that is not 0."""
    assert served()
    for name in served():
        plan.drop_plans()
        x = torch.randn(64, 768, device=GPU, dtype=torch.bfloat16, requires_grad=grads)
        flat = torch.randn(4096, device=GPU, dtype=torch.bfloat16)
        w, size = flat[offset : offset + 768], flat.untyped_storage().nbytes()
        with ferryman.use(name):
            for _ in range(calls):
                ops.rms_norm(x, flat[offset : offset + 768])
            values = flat.clone()
            expected = ops.rms_norm(x.detach(), values[offset : offset + 768])
            flat.untyped_storage().resize_(0)
            assert w.data_ptr() == 2 * offset
            for _ in range(3):
                with pytest.raises(ArgumentError, match=r"weight.untyped_storage\(\).nbytes\(\) is 0"):
                    ops.rms_norm(x, w)
            flat.untyped_storage().resize_(size)
            flat.copy_(values)
            torch.cuda.synchronize()
            for _ in range(3):
                assert torch.equal(ops.rms_norm(x, w).detach(), expected), name
                assert ops.rms_norm(x, w).requires_grad == grads


def test_a_bit_that_negates_is_seen_before_and_after_a_replay() -> None:
    """`torch._neg_view` has its base's address, shape and strides; a kernel that went by those would lose the sign."""
    assert served()
    for name in served():
        plan.drop_plans()
        w = torch.randn(768, device=GPU)
        with ferryman.use(name):
            for _ in range(6):
                x = torch.randn(64, 768, device=GPU)
                flipped = torch._neg_view(x)
                assert flipped.is_neg() and flipped.data_ptr() == x.data_ptr()
                assert torch.equal(ops.rms_norm(flipped, w), -ops.rms_norm(x, w)), name
                assert torch.equal(ops.rms_norm(x, torch._neg_view(w)), -ops.rms_norm(x, w)), name
        assert replayed(ops.rms_norm.primitive)


def test_a_launcher_that_raises_on_stand_ins_serves_the_call_that_would_have_recorded_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At the call that a plan is recorded at, the user gets a result, and at every later one."""
    monkeypatch.undo()
    assert plan.REPLAY_AFTER == 64
    known, line = registry.launcher, registry.implementation("rms_norm", "triton.rows")
    launch, raised = known(line), []

    def odd(*args: Any) -> Tensor:
        if replay.recording() is not None:
            raised.append(1)
            raise RuntimeError("no kernel for the meta device")
        out: Tensor = launch(*args)
        return out

    monkeypatch.setattr(registry, "launcher", lambda asked: odd if asked is line else known(asked))
    plan.drop_plans()
    x = torch.randn(64, 768, device=GPU, dtype=torch.bfloat16)
    with ferryman.use("triton"):
        expected = launch(x, None, 1e-6, False, select.target_of(select.profile_for(GPU)))
        for _ in range(70):
            assert torch.equal(ops.rms_norm(x), expected)
    assert raised == [1] and not replayed(ops.rms_norm.primitive)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_current_device() -> None:
    x = torch.randn(64, 768, device="cuda:1", dtype=torch.bfloat16)
    for name in ("triton", "cuda"):
        with ferryman.use(name):
            expected = ops.rms_norm(x)
            for current in (0, 1, 1, 1, 1, 0, 0):
                with torch.cuda.device(current):
                    assert torch.equal(ops.rms_norm(x), expected) and torch.cuda.current_device() == current
