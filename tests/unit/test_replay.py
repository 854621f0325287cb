"""A launcher's replay launches what the launcher would, and dispatch puts it in a plan's place and in no other's."""

from __future__ import annotations

import ctypes
import functools
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ferryman
from ferryman import ops
from ferryman.backends import replay
from ferryman.backends.replay import STREAM, Step
from ferryman.backends.simt import as_rows, pointer
from ferryman.dispatch import plan, registry
from ferryman.dispatch.serving import serving
from ferryman.errors import ArgumentError
from ferryman.ops.menu import Implementation
from tests.lines import planted

CPU = torch.device("cpu")


@functools.cache
def worker(vendor: str = "nvidia") -> dict[str, Any]:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, str(Path(__file__).with_name("replay_worker.py")), vendor]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def menus() -> Iterator[Implementation]:
    for op in registry.primitives():
        yield from registry.implementations(op)


@pytest.mark.parametrize(("vendor", "simt"), [("nvidia", "cuda"), ("amd", "hip")])
def test_every_replay_launches_what_its_launcher_does(vendor: str, simt: str) -> None:
    """Same specialisations, grids and arguments, for fresh, aligned and unaligned tensors; same results returned."""
    judged = worker(vendor)["judged"]
    assert judged["wrong"] == []
    lines = {f"{line.op} {line.name}" for line in menus() if line.replayable and line.backend in ("triton", simt)}
    hoppers = {f"{line.op} {line.name}" for line in menus() if any("wgmma" in clause.text for clause in line.when)}
    served = set(judged["served"])
    assert set(judged["frozen"]) == served and lines - served <= (hoppers if vendor == "amd" else set())
    assert len(served) >= 27 and served <= lines
    # past the Python part of Triton's launcher for NVIDIA, whose C function is known
    assert judged["direct"] > 1000 if vendor == "nvidia" else judged["direct"] == 0


FILL = {f"a call of TensorBase.{name}" for name in ("zero_", "fill_", "new_zeros")}
COPY = {"a call of TensorBase.copy_", "a call of TensorBase.clone", "a copy of something that is no argument"}
SUM = {"a call of TensorBase.sum", "a call of TensorBase.float"}


@pytest.mark.parametrize("vendor", ["nvidia", "amd"])
def test_only_launchers_that_fill_sum_or_copy_are_left_as_they_are(vendor: str) -> None:
    """Results of nothing are filled; a gradient may be summed from another; what a kernel cannot read, or write where
    it lies, is copied. Most calls of each line are replayed."""
    gradients = {op.gradient.backward for op in registry.primitives().values()}
    judged = worker(vendor)["judged"]
    assert judged["refused"]
    for line, cases in judged["refused"].items():
        op = line.partition(" ")[0]
        for case, why in cases.items():
            assert why in FILL | COPY or (why in SUM and op in gradients), (line, case, why)
        assert judged["frozen"][line] > len(cases), (line, cases)


def test_launch_hooks_are_honoured_and_scratch_is_allocated() -> None:
    assert worker()["hooks"] == {
        "quiet": "direct",
        "chained": "called",
        "frozen with a hook": False,
        "removed": "direct",
        "replaced": "called",
        "scratch": "called",
    }


# ------------------------------------------------------------------------------------------------------ freeze alone


def freeze(launcher: Any, *args: Any) -> Any:
    return replay.freeze(launcher, [f"a{i}" for i in range(len(args))], args, None, CPU)


def recorded(*arguments: Any) -> list[tuple[Any, ...]]:
    """Record a step and return what a replay of it is called with."""
    calls: list[tuple[Any, ...]] = []
    recording = replay.recording()
    assert recording is not None
    recording.add(Step(lambda *given: calls.append(given), arguments))
    return calls


def test_addresses_of_views_copies_and_new_tensors() -> None:
    seen: list[Any] = []

    def launcher(x: Tensor, target: None) -> tuple[Tensor, Tensor]:
        out = torch.empty(2, 3, 4, dtype=x.dtype, device=torch.device(x.device.type))
        half = x[:, 4:]
        dense = x.contiguous()
        inner = out.transpose(0, 1)[1]
        seen.append(recorded(x, half, x.data_ptr(), dense, out, inner, None, 1.5, float("inf"), STREAM))
        return out.transpose(0, 1), x

    x = torch.randn(3, 16)[:, :8]
    frozen = freeze(launcher, x)
    other = torch.randn(3, 16)[:, :8]
    out, same = frozen(other, None)
    ((base, half, raw, dense, new, inner, *rest),) = seen[0]
    assert (half - base, raw, inner - new) == (16, base, 16) and base == other.data_ptr()
    assert dense not in (base, new) and new == out.data_ptr() and rest == [None, 1.5, float("inf"), 0]
    assert same is other and out.shape == (3, 2, 4) and out.stride() == (4, 12, 1) and not out._is_view()


def test_the_launcher_sees_the_calls_own_device() -> None:
    seen: list[Any] = []

    def launcher(x: Tensor, target: None) -> Tensor:
        seen.append((x.device, x.is_cpu, x.is_cuda, x.is_meta))
        return x.new_empty(3) if x.shape[0] == 2 else torch.empty(3, device=x.device)

    for rows in (1, 2):
        frozen = freeze(launcher, torch.randn(rows))
        assert frozen(torch.randn(rows), None).device == CPU
    assert seen == [(CPU, True, False, False)] * 2


def test_two_arguments_that_were_the_same_tensor_are_told_apart() -> None:
    seen: list[Any] = []

    def launcher(x: Tensor, y: Tensor, target: None) -> Tensor:
        seen.append(recorded(x, y))
        return torch.empty_like(x)

    x, y = torch.randn(4), torch.randn(4)
    frozen = freeze(launcher, x, x)
    frozen(x, y, None)
    assert seen[0] == [(x.data_ptr(), y.data_ptr())]


@pytest.mark.parametrize(
    "unfit",
    [
        lambda x: x.clone(),
        lambda x: torch.zeros_like(x),
        lambda x: torch.empty_like(x).zero_(),
        lambda x: x + 1,
        lambda x: x.item(),
        lambda x: torch.empty(3),
        lambda x: torch.empty(3, device="meta"),
        lambda x: OUTSIDE,
        lambda x: x.t().contiguous().t().reshape(-1)[1:].contiguous(),
        lambda x: x[0],
    ],
)
def test_what_cannot_be_repeated_is_refused(unfit: Any) -> None:
    def launcher(x: Tensor, target: None) -> Any:
        return unfit(x)

    assert freeze(launcher, torch.randn(1, 1)) is None
    assert replay.recording() is None


OUTSIDE = torch.empty(1)


def test_a_launcher_that_raises_on_stand_ins_is_left_as_it_is() -> None:
    for error in (RuntimeError("no meta"), ZeroDivisionError(), NotImplementedError(), IndexError()):

        def launcher(x: Tensor, target: None, error: Exception = error) -> Tensor:
            if replay.recording() is not None:
                raise error
            return torch.empty_like(x)

        assert freeze(launcher, torch.randn(3)) is None and replay.recording() is None


def test_unaligned_tensors_are_left_to_the_launcher() -> None:
    def launcher(x: Tensor, target: None) -> Tensor:
        if replay.recording() is None:
            return x
        recorded(x)
        return torch.empty_like(x)

    aligned, unaligned = torch.randn(4), torch.randn(5)[1:]
    assert freeze(launcher, unaligned) is None
    frozen = freeze(launcher, aligned)
    assert frozen(unaligned, None) is unaligned and frozen(aligned, None) is not aligned


# ------------------------------------------------------------------------------------------------------ under dispatch


class Scaling:
    """rms_norm's arguments, x * weight in fact: by address, so that a wrong address or stride is a wrong result."""

    def __init__(self) -> None:
        self.launchers = self.launches = 0

    def __call__(self, x: Tensor, weight: Tensor | None, eps: float, cast: bool, target: Any) -> Tensor:
        self.launchers += 1
        y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rows_of, rows, stride = as_rows(x)
        weight = None if weight is None else weight.contiguous()
        arguments = (STREAM, rows_of.data_ptr(), stride, pointer(weight), y.data_ptr(), rows, x.shape[-1])
        recording = replay.recording()
        if recording is None:
            self.launch(*arguments)
        else:
            recording.add(Step(self.launch, arguments))
        return y

    def launch(self, stream: Any, x: int, stride: int, weight: int, y: int, rows: int, width: int) -> None:
        self.launches += 1
        array = ctypes.c_float * width
        factors = array.from_address(weight) if weight else array(*[1.0] * width)
        for row in range(rows):
            source, result = array.from_address(x + 4 * row * stride), array.from_address(y + 4 * row * width)
            for i in range(width):
                result[i] = source[i] * factors[i]

    __name__ = "scaling"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Scaling]:
    """A replayable implementation of rms_norm, first on its menu, on a CPU that plans are replayed on."""
    line = Implementation(op="rms_norm", name="torch", where="nowhere:none", replayable=True)
    kernel = Scaling()
    planted(monkeypatch.setattr, {line: kernel})
    monkeypatch.setattr(plan, "REPLAYED", "cpu")
    monkeypatch.setattr(plan, "REPLAY_AFTER", 2)
    ferryman.reload()
    yield kernel
    monkeypatch.undo()
    ferryman.reload()


def runs() -> list[Any]:
    return [run for _, run, *_ in plan.runner_of(ops.rms_norm.primitive).hot.values()]


def expect(x: Tensor, w: Tensor | None) -> None:
    y = ops.rms_norm(x, w)
    assert torch.equal(y, x if w is None else x * w) and y.is_contiguous()


@pytest.mark.parametrize("after", [2, 3, 7])
def test_a_plan_is_replayed_from_its_nth_call_on(after: int, scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "REPLAY_AFTER", after)
    for calls in range(1, after + 6):
        expect(torch.randn(4, 16), torch.randn(16))
        # once for each call before, once for the recording, which launches nothing
        assert (scaling.launchers, scaling.launches) == (min(calls, after), calls)
    (run,) = runs()
    assert run.__code__.co_filename.startswith("<ferryman replay of")


def test_lengths_that_grow_by_the_token_are_not_recorded(scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many calls with one shape as a model has layers, then another shape."""
    monkeypatch.setattr(plan, "REPLAY_AFTER", 64)
    for tokens in range(1, 4):
        for _ in range(32):
            expect(torch.randn(tokens, 16), torch.randn(16))
    assert scaling.launchers == scaling.launches == 96  # a recording would be a call of the launcher without a launch


FLIPS = {
    "rows": lambda: (torch.randn(5, 16), torch.randn(16)),
    "width": lambda: (torch.randn(4, 17), torch.randn(17)),
    "row stride": lambda: (torch.randn(4, 32)[:, :16], torch.randn(16)),
    "odd row stride": lambda: (torch.randn(4, 17)[:, :16], torch.randn(16)),
    "last stride": lambda: (torch.randn(4, 32)[:, ::2], torch.randn(16)),
    "permuted": lambda: (torch.randn(2, 4, 16).transpose(0, 1), torch.randn(16)),
    "alignment": lambda: (torch.randn(65)[1:].view(4, 16), torch.randn(16)),
    "the weight's alignment": lambda: (torch.randn(4, 16), torch.randn(17)[1:]),
    "both": lambda: (torch.randn(65)[1:].view(4, 16), torch.randn(17)[1:]),
    "strided weight": lambda: (torch.randn(4, 16), torch.randn(32)[::2]),
    "no weight": lambda: (torch.randn(4, 16), None),
    "plain": lambda: (torch.randn(4, 16), torch.randn(16)),
}


@pytest.mark.parametrize("grads", [False, True])
@pytest.mark.parametrize("calls", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("offset", [0, 4, 1])
@pytest.mark.parametrize("strided", [False, True])
def test_a_freed_storage_is_refused_at_every_call_and_served_once_it_is_filled(
    scaling: Scaling, calls: int, offset: int, strided: bool, grads: bool
) -> None:
    """As FSDP frees a flat parameter, whose views keep their offsets. The weight is copied where it is strided."""

    def weight() -> tuple[Tensor, Tensor]:
        flat = torch.randn(64)
        return flat, flat[offset : offset + 32 : 2] if strided else flat[offset : offset + 16]

    x = torch.randn(4, 16, requires_grad=grads)
    for _ in range(calls):
        ops.rms_norm(x, weight()[1])
    flat, w = weight()
    launches, (size, values) = scaling.launches, (flat.untyped_storage().nbytes(), flat.clone())
    for _ in range(2):
        flat.untyped_storage().resize_(0)
        assert w.data_ptr() == 4 * offset
        with pytest.raises(ArgumentError, match=r"weight.untyped_storage\(\).nbytes\(\) is 0"):
            ops.rms_norm(x, w)
        assert scaling.launches == launches
        flat.untyped_storage().resize_(size)
        flat.copy_(values)
        expect(x, w)
        launches = scaling.launches


def test_a_freed_storage_is_refused_where_the_launcher_is_not_replayed(
    scaling: Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replay, "freeze", lambda *args: None)
    x = torch.randn(4, 16)
    for _ in range(5):
        expect(x, None)
    x.untyped_storage().resize_(0)
    with pytest.raises(ArgumentError, match="gather them first"):
        ops.rms_norm(x)


@pytest.mark.parametrize("flip", FLIPS)
def test_a_replayed_call_notices(flip: str, scaling: Scaling) -> None:
    for _ in range(4):
        expect(torch.randn(4, 16), torch.randn(16))
    for _ in range(4):
        expect(*FLIPS[flip]())
        expect(torch.randn(4, 16), torch.randn(16))


def test_the_unaligned_first_and_the_aligned_after(scaling: Scaling) -> None:
    for x in (torch.randn(65)[1:].view(4, 16), torch.randn(4, 16)):
        for _ in range(4):
            expect(x, None)


def test_a_differentiated_plan_is_replayed_too(scaling: Scaling) -> None:
    w = torch.nn.Parameter(torch.randn(16))
    for calls in range(1, 6):
        y = ops.rms_norm(torch.randn(4, 16), w)
        assert y.requires_grad and y.grad_fn is not None
        assert (scaling.launchers, scaling.launches) == (min(calls, 2), calls)
    with torch.no_grad():
        assert not ops.rms_norm(torch.randn(4, 16), w).requires_grad


def test_dropped_plans_do_not_come_back(scaling: Scaling) -> None:
    runner = plan.runner_of(ops.rms_norm.primitive)
    x = torch.randn(4, 16)
    ops.rms_norm(x)
    ((key, (again, young, _)),) = runner.plans.items()
    assert again is runner.again
    plan.drop_plans()
    assert torch.equal(again(x, None, 1e-6, False, young), x)
    assert key not in runner.plans
    with ferryman.use("definition"):
        assert not torch.equal(ops.rms_norm(x), x)


def test_traced_calls_run_the_launcher(scaling: Scaling) -> None:
    with ferryman.trace() as seen:
        for _ in range(4):
            expect(torch.randn(4, 16), None)
    assert scaling.launchers == 4 and seen.calls == {("rms_norm", "torch"): 4}


def test_threads_replay_side_by_side(scaling: Scaling) -> None:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for i in range(30):
                expect(torch.randn(1 + i % 3, 16), torch.randn(16))
                if i % 10 == 0:
                    plan.drop_plans()
        except BaseException as error:  # noqa: BLE001 - reported below
            failures.append(error)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for w in workers:
        w.start()
    for w in workers:
        w.join()
    assert failures == []


# ------------------------------------------------------------------------------------------------------- what serves


def now(*args: Any) -> Any:
    return serving(ops.rms_norm.primitive, (*args, 1e-6, False))


def test_a_plan_says_what_serves_it_and_from_when_it_is_a_replay(scaling: Scaling) -> None:
    x, w = torch.randn(4, 16), torch.randn(16)
    assert now(x, w) is None
    ops.rms_norm(x, w)
    young = now(x, w)
    assert young.line == "torch" and young.why == "it was called 1 times; a replay begins with call 2"
    for _ in range(3):
        ops.rms_norm(x, w)
    frozen = now(x, w)
    assert frozen.why == "" and replay.is_replay(frozen.run) and [frozen.run] == runs()
    launches = scaling.launches
    assert torch.equal(frozen.run(x, w, 1e-6, False, frozen.extra), x * w) and scaling.launches == launches + 1
    assert now(torch.randn(5, 16), w) is None  # another call's
    learning = torch.nn.Parameter(w.clone())
    for _ in range(4):
        ops.rms_norm(x, learning)
    assert now(x, learning).why == "" and not replay.is_replay(now(x, learning).run)  # the Function around it
    assert now(x, w).run is frozen.run


def test_a_plan_that_is_no_replay_says_why(scaling: Scaling, monkeypatch: pytest.MonkeyPatch) -> None:
    def repeated(x: Tensor, w: Tensor | None) -> str:
        for _ in range(4):
            ops.rms_norm(x, w)
        return str(now(x, w).why)

    shifted = torch.randn(65)[1:].view(4, 16)
    assert repeated(shifted, None) == "x does not lie at a multiple of 16 bytes"
    with ferryman.use("definition"):
        assert repeated(torch.randn(4, 16), None) == "the menu line definition does not say that it is replayable"
    own = Scaling.__call__

    def summing(self: Scaling, x: Tensor, *rest: Any) -> Tensor:
        return own(self, x, *rest).add_(0)

    monkeypatch.setattr(Scaling, "__call__", summing)
    assert repeated(torch.randn(6, 16), None) == "a call of TensorBase.add_"

    def raising(self: Scaling, x: Tensor, *rest: Any) -> Tensor:
        if replay.recording() is not None:
            raise ZeroDivisionError("no data")
        return own(self, x, *rest)

    monkeypatch.setattr(Scaling, "__call__", raising)
    assert repeated(torch.randn(7, 16), None) == "on tensors without data it raises ZeroDivisionError: no data"
    monkeypatch.setattr(Scaling, "__call__", own)
    monkeypatch.setattr(plan, "REPLAYED", "cuda")
    plan.drop_plans()
    assert "devices of type cuda; this one is cpu" in repeated(torch.randn(8, 16), None)
