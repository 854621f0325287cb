"""The emulation catches what it is there for: kernels broken in one place each must not pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.backends import simt, simt_runtime
from ferryman.ops.norm import simt_kernels as norm
from ferryman.ops.softmax import simt_kernels as softmax
from tests.unit import simt_host as host
from tests.unit import simt_mutants as mutants

EDITS, FEW = 48, 1280  # FEW: threads of a grid that takes rows in turns
pytestmark = pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package")


def _x(rows: int, n: int) -> Tensor:
    return torch.randn(rows, n, generator=torch.Generator().manual_seed(n)).bfloat16()


def _steps(rows: int, n: int) -> Tensor:
    """A thread's columns lie close together, those of another thread or wave elsewhere: whose mean it is matters."""
    return _x(rows, n) * 0.1 + torch.linspace(-4, 4, n).bfloat16() + (torch.arange(n) // 8 % 32 / 4 - 4).bfloat16()


def _far(rows: int, n: int) -> Tensor:
    """Means two thousand deviations from 0."""
    return torch.full((rows, n), 1000.0).index_fill_(1, torch.arange(0, n, 64), 1004.0).bfloat16()


# float NaNs whose mantissa is all ones: the rounding carry of a naive conversion makes them -0
FULL_NAN = torch.full((64,), 0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
Call = tuple[Callable[..., Any], tuple[Any, ...]]
FILES = {"rows": ("portable.cuh", "rows.cuh"), "clusters": ("whole.cuh", "cluster.cuh", "norm.cuh", "softmax.cuh")}
CALLS: dict[str, list[Call]] = {
    "rows": [
        (norm.rms_norm, (_x(3, 4104), None, 1e-6, False)),
        (norm.rms_norm, (_x(9, 1024), None, 1e-6, False)),
        (norm.rms_norm, (_x(3, 1000), None, 1e-6, False)),
        (norm.rms_norm, (_x(2, 64), FULL_NAN, 1e-6, False)),
        (norm.rms_norm, (_x(3, 80_000), None, 1e-6, False)),
        (softmax.softmax, (_x(5, 80_000),)),
    ],
    "clusters": [
        (norm.layer_norm, (torch.cat([_x(1, 20_008), _far(3, 20_008)]), None, None, 1e-6)),
        (norm.layer_norm, (_x(3, 20_008), _x(1, 20_008)[0], None, 1e-6)),
        (norm.layer_norm, (_steps(3, 50_264), None, None, 1e-6)),
        (norm.rms_norm, (_x(3, 20_008), _x(1, 20_008)[0], 1e-6, False)),
        (norm.rms_norm, (_x(3, 65_536), _x(1, 65_536)[0], 1e-6, False)),
        (softmax.softmax, (_x(3, 20_008) - 9,)),
        (softmax.softmax, (_x(2, 50_264),)),
    ],
}
# What the emulation itself says of some edits; the others give wrong results.
REFUSALS = {
    "rows": ("outside every buffer",),
    "clusters": ("outside every buffer", "before the cluster's first barrier"),
}
# What no operator makes, which add nothing and take no variable for another:
# name -> (what is replaced, by what, what is said of it, where, which call).
BY_HAND: dict[str, tuple[str, str, str, str, int]] = {
    "barrier_of_some": (
        "platform::barrier();\n            int part",
        "if (lane) platform::barrier();\n            int part",
        "deadlock",
        "rows",
        0,
    ),
    "slots_past_shared": (
        "shared[k * L::THREADS",
        "shared[(k + 1) * L::THREADS",
        "past dynamic shared memory",
        "rows",
        4,
    ),
    "far_mean_of_the_other_row": ("if (far[r]) variance[r]", "if (far[0]) variance[r]", "", "clusters", 0),
    "rows_share_their_sums": (
        "const float low = sums[k], high = sums[k | bit];",
        "const float low = sums[k], high = low;",
        "",
        "clusters",
        2,
    ),
}


def _right(kernel: Callable[..., Any], inputs: tuple[Any, ...], got: Any) -> bool:
    x, slack = inputs[0].double(), torch.tensor(1e-30)
    if kernel is softmax.softmax:
        expected = torch.softmax(x, -1)
    elif kernel is norm.layer_norm:
        scale = torch.rsqrt(x.var(-1, correction=0, keepdim=True) + 1e-6)
        expected = (x - x.mean(-1, keepdim=True)) * scale
        slack = 2.0**-22 * x.mean(-1, keepdim=True).abs() * scale  # the mean and its product with the scale are floats
    else:
        expected = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)
    if kernel is not softmax.softmax and inputs[1] is not None:
        expected, slack = expected * inputs[1].double(), slack * inputs[1].double().abs()
    close = (got.double() - expected).abs() <= 1.01 * 2.0**-8 * expected.abs() + slack
    return bool((close | (got.isnan() & expected.isnan())).all())


def _attempts(runtime: host.EmulatedRuntime, kind: str, turns: int = 2**31 - 1024) -> list[Callable[[], Any]]:
    """Every call of a kind, judged once there is a library. turns: threads that a grid may have."""
    where = host.target(32, 232_448, features=frozenset({"clusters"})) if kind == "clusters" else host.target(32)

    def attempt(kernel: Callable[..., Any], inputs: tuple[Any, ...]) -> tuple[Tensor, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(simt, "_MAX_THREADS", turns)
            got = runtime.call(kernel, inputs, where)
        assert not runtime._libraries or _right(kernel, inputs, got), "a wrong result"
        return (got,)

    calls = [call for call in CALLS[kind] if turns > FEW or call[1][0].shape[-1] <= 20_008]  # a longer row takes more
    return [functools.partial(attempt, *call) for call in calls]


@pytest.mark.parametrize("kind", CALLS)
def test_edits_of_a_kernel_do_not_pass(kind: str, request: pytest.FixtureRequest) -> None:
    """Those that change a bit anywhere, also where a block has several rows in turn."""
    runtime = host.EmulatedRuntime(32, Path(request.config.cache.mkdir("ferryman-simt")))
    with host.in_force(runtime):
        attempts = [*_attempts(runtime, kind), *_attempts(runtime, kind, FEW)]
        for attempt in attempts:
            attempt()  # collects
        records = mutants.Planted(runtime, FILES[kind], EDITS, 0).fates(attempts)
    mutants.judge(records, at_least=EDITS // 3)
    said = " ".join(r.reason or "" for r in records if r.outcome == "caught")
    assert all(words in said for words in REFUSALS[kind]), said


@pytest.mark.parametrize("name", BY_HAND)
def test_a_kernel_broken_by_hand_does_not_pass(name: str, request: pytest.FixtureRequest) -> None:
    old, new, said, kind, number = BY_HAND[name]
    runtime = host.EmulatedRuntime(32, Path(request.config.cache.mkdir("ferryman-simt")))
    with host.in_force(runtime):
        attempt = _attempts(runtime, kind)[number]
        attempt()  # collects
        host.assert_caught(runtime, (old, new, said), attempt)


def test_rows_beyond_a_grid_are_taken_in_turn(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same bits, whether a block has one row, four, or all seven; layer_norm's has two, and takes more launches."""
    n = 20_008
    calls: list[tuple[Callable[..., Any], tuple[Any, ...]]] = [
        (softmax.softmax, (_x(7, n),)),
        (softmax.softmax, (_x(7, 66_056),)),
        (norm.rms_norm, (_x(7, n), _x(1, n)[0], 1e-6, False)),
        (norm.add_rms_norm, (_x(7, n), _x(7, n) * 0.5, _x(1, n)[0], 1e-6, True)),
        (norm.layer_norm, (_x(7, n), _x(1, n)[0], None, 1e-6)),
    ]
    runtime = host.EmulatedRuntime(32, Path(request.config.cache.mkdir("ferryman-simt")))
    monkeypatch.setitem(simt_runtime._RUNTIMES, "emulated32", runtime)
    where = host.target(32, 232_448, features=frozenset({"clusters"}))
    for kernel, inputs in calls:
        runtime.call(kernel, inputs, where)
    runtime.load(runtime.compile_collected())
    for kernel, inputs in calls:
        results, launches = [], []
        for threads in (2**31 - 1024, 1280):
            monkeypatch.setattr(simt, "_MAX_THREADS", threads)
            runtime.launched.clear()
            got = runtime.call(kernel, inputs, where)
            results.append(got if isinstance(got, tuple) else (got,))
            launches.append(list(runtime.launched))
        ((name, many, _, _),), later = launches
        assert "WHOLE" in name and all(few < many for _, few, _, _ in later)
        assert (sum(few for _, few, _, _ in later) == many) if kernel is norm.layer_norm else len(later) == 1
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), name
