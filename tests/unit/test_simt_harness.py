"""The emulation catches what it is there for: kernels broken in one place each must not pass."""

from __future__ import annotations

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
# name -> (what is replaced, by what, kernel, inputs)
MUTANTS: dict[str, tuple[str, str, Callable[..., Any], tuple[Any, ...]]] = {
    "none": ("", "", norm.rms_norm, (_x(3, 4104), None, 1e-6, False)),
    "whole_far_none": ("", "", norm.layer_norm, (_far(3, 20_008), None, None, 1e-6)),
    "whole_softmax_none": ("", "", softmax.softmax, (_x(9, 20_008),)),
    "whole_layer_none": ("", "", norm.layer_norm, (_steps(3, 50_264), None, None, 1e-6)),
    "no_barrier": ("            platform::barrier();\n", "", norm.rms_norm, (_x(3, 4104), None, 1e-6, False)),
    "one_scratch": ("half ^= 1;", "", softmax.softmax, (_x(5, 80_000),)),
    "divergent_barrier": (
        "platform::barrier();\n            int part",
        "if (lane) platform::barrier();\n            int part",
        norm.rms_norm,
        (_x(3, 4104), None, 1e-6, False),
    ),
    "half_a_wave": ("int mask = WIDTH / 2", "int mask = WIDTH / 4", norm.rms_norm, (_x(9, 1024), None, 1e-6, False)),
    "tail_dropped": ("column < end;", "column + L::V < end;", norm.rms_norm, (_x(3, 1000), None, 1e-6, False)),
    "read_past_the_end": (
        "return L::FIT != RAGGED || column < end;",
        "return true;",
        norm.rms_norm,
        (_x(3, 1000), None, 1e-6, False),
    ),
    "slots_past_shared": (
        "shared[k * L::THREADS",
        "shared[(k + 1) * L::THREADS",
        norm.rms_norm,
        (_x(3, 80_000), None, 1e-6, False),
    ),
    "nan_lost": (
        "return (bits & 0x7fffffffu) > 0x7f800000u ? (bits >> 16) | 0x40u : nearest_even;",
        "return nearest_even;",
        norm.rms_norm,
        (_x(2, 64), FULL_NAN, 1e-6, False),
    ),
    "truncated": (
        "(bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16",
        "bits >> 16",
        norm.rms_norm,
        (_x(9, 64), None, 1e-6, False),
    ),
    "whole_weights_not_waited_for": (
        "if (Op::PLACED > 0 && end > first) platform::arrival_wait(reduction.arrivals + 2, 0);",
        "",
        norm.rms_norm,
        (_x(3, 20_008), _x(1, 20_008)[0], 1e-6, False),
    ),
    "whole_weights_of_another_block": (
        "platform::copy_to_shared(placed, data + first,",
        "platform::copy_to_shared(placed, data,",
        norm.rms_norm,
        (_x(3, 65_536), _x(1, 65_536)[0], 1e-6, False),
    ),
    "whole_row_not_turned": ("op.advance(n);", "", norm.rms_norm, (_x(3, 20_008), None, 1e-6, False)),
    "whole_last_row_dropped": (
        "(row + each < rows ? row + each : rows) - 1;",
        "(row + each < rows ? row + each : rows - 1) - 1;",
        norm.rms_norm,
        (_x(3, 20_008), None, 1e-6, False),
    ),
    "whole_fetched_past_the_end": (
        "if (row >= rows || bytes <= 0) return;",
        "if (bytes <= 0) return;",
        softmax.softmax,
        (_x(3, 20_008),),
    ),
    "whole_absent_columns_counted": (
        "if (p >= live) x[p].word[i] = minus_infinities<T>();",
        "",
        softmax.softmax,
        (_x(3, 20_008) - 9,),
    ),
    "whole_maximum_of_a_wave_alone": (
        "return part.value[1] * exp_of<T>(part.value[0] - from);",
        "return part.value[1];",
        softmax.softmax,
        (_x(3, 20_008),),
    ),
    "whole_far_means_not_seen": (
        "far[r] = !(square <= FAR * variance[r]);",
        "far[r] = false;",
        norm.layer_norm,
        (_far(3, 20_008), None, None, 1e-6),
    ),
    "whole_far_mean_of_the_other_row": (
        "if (far[r]) variance[r]",
        "if (far[0]) variance[r]",
        norm.layer_norm,
        (torch.cat([_x(1, 20_008), _far(1, 20_008)]), None, None, 1e-6),
    ),
    "whole_rows_share_their_sums": (
        "const float low = sums[k], high = sums[k | bit];",
        "const float low = sums[k], high = low;",
        norm.layer_norm,
        (_steps(3, 50_264), None, None, 1e-6),
    ),
    "whole_second_row_over_the_first": (
        "op.begin(row, two ? n : 0, n);",
        "op.begin(row, 0, n);",
        norm.layer_norm,
        (_x(4, 20_008), None, None, 1e-6),
    ),
    "whole_pair_past_the_end": (
        "if (two) from += x.stride;",
        "from += x.stride;",
        norm.layer_norm,
        (_x(3, 20_008), None, None, 1e-6),
    ),
    "whole_pair_weights_not_waited_for": (
        "if (end > first) platform::arrival_wait(reduction.arrivals + 2, 0);",
        "",
        norm.layer_norm,
        (_x(3, 20_008), _x(1, 20_008)[0], None, 1e-6),
    ),
    "cluster_of_strangers": (
        "if (lane < SIZE) post",
        "if (lane == platform::cluster_rank()) post",
        softmax.softmax,
        (_x(2, 50_264),),
    ),
    "cluster_not_met": (
        "static FERRYMAN_DEVICE void meet() { platform::cluster_wait(); }",
        "static FERRYMAN_DEVICE void meet() {}",
        softmax.softmax,
        (_x(2, 50_264),),
    ),
    "cluster_partials_overwritten": (
        "(V*)(scratch + (count & 1) * PARTIALS)",
        "(V*)scratch",
        norm.layer_norm,
        (_far(4, 20_008), None, None, 1e-6),
    ),
}
# what the emulation itself says; the others give wrong results
REFUSALS = {
    "divergent_barrier": "deadlock",
    "read_past_the_end": "outside every buffer",
    "slots_past_shared": "past dynamic shared memory",
    "whole_fetched_past_the_end": "outside every buffer",
    "whole_pair_past_the_end": "outside every buffer",
    "cluster_of_strangers": "deadlock",
    "cluster_not_met": "before the cluster's first barrier",
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
        expected = expected if inputs[1] is None else expected * inputs[1].double()
    close = (got.double() - expected).abs() <= 1.01 * 2.0**-8 * expected.abs() + slack
    return bool((close | (got.isnan() & expected.isnan())).all())


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_kernel_does_not_pass(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new, kernel, inputs = MUTANTS[name]
    if name == "whole_row_not_turned":  # a grid of one block, for all rows
        monkeypatch.setattr(simt, "_MAX_THREADS", 1280)
    runtime = host.EmulatedRuntime(32, Path(request.config.cache.mkdir("ferryman-simt")))
    clusters = name.startswith(("whole", "cluster"))
    where = host.target(32, 232_448, features=frozenset({"clusters"})) if clusters else host.target(32)

    def attempt() -> None:
        assert _right(kernel, inputs, runtime.call(kernel, inputs, where)), "a wrong result"

    with host.in_force(runtime):
        runtime.call(kernel, inputs, where)  # collects
        said = None if name.endswith("none") else REFUSALS.get(name, "")
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
