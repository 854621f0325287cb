"""Every SIMT kernel, executed on the CPU for waves of 32 and 64 lanes, against float64.

The launchers, their plans and the C++ are those of the GPU; `simt_emulation.h` stands in for the device and refuses
accesses outside the buffers, misaligned vectors, divergent barriers and writes to inputs.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.unit import simt_host as host
from tests.unit.simt_cases import CASES, Case
from tests.unit.simt_references import ETA, UNIT

pytestmark = pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package")


def _wide(x: Any) -> Any:
    return x.double() if isinstance(x, Tensor) else x


def test_case_names_are_unique() -> None:
    assert len({c.name for c in CASES}) == len(CASES)


@pytest.fixture(scope="module")
def runtimes(request: pytest.FixtureRequest) -> Iterator[dict[int, Any]]:
    folder = request.config.cache.mkdir("ferryman-simt")
    found = {wave: host.EmulatedRuntime(wave, folder) for wave in (32, 64)}
    with host.in_force(found[32]), host.in_force(found[64]):
        for case in CASES:
            inputs = case.make()
            for wave, runtime in found.items():
                if case.features and wave == 64:
                    continue
                runtime.call(case.kernel, inputs, host.target(wave, case.shared, case.units, case.features))
        with contextlib.ExitStack() as held:
            building = []
            for runtime in found.values():
                building.append((runtime, runtime.compile_collected()))
                held.callback(runtime.unlock)  # the second's, where the first cannot be loaded
            for runtime, compiler in building:
                runtime.load(compiler)
        yield found


def _check(actual: Tensor, expected: Tensor, slack: Tensor, label: str) -> None:
    dtype = actual.dtype
    rounded = expected.to(dtype)
    assert torch.equal(actual.isnan(), expected.isnan()), f"{label}: NaN elsewhere"
    exact = slack < 0
    same = (actual == rounded) | rounded.isnan()
    assert bool(same[exact].all()), f"{label}: must be exact"
    bound = UNIT[dtype] * expected.abs() * (1 + 2.0**-10) + slack.clamp(min=0) + ETA[dtype]
    error = (actual.double() - expected).abs()
    wrong = ~(same | (error <= bound))
    assert not bool(wrong.any()), (
        f"{label}: {int(wrong.sum())} of {wrong.numel()} wrong; first at {wrong.nonzero()[0].tolist()}: "
        f"{actual[wrong][0]} against {expected[wrong][0]}"
    )


@pytest.mark.parametrize("wave", [32, 64])
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.name)
def test_kernel(case: Case, wave: int, runtimes: dict[int, Any]) -> None:
    if case.features and wave == 64:
        pytest.skip("clusters are NVIDIA's, of warps of 32")
    runtime = runtimes[wave]
    inputs = case.make()
    before = [t.clone() for t in inputs if isinstance(t, Tensor)]
    outputs: list[tuple[Tensor, ...]] = []
    for order in (0, 1) if inputs[0].numel() > 100_000 else (0, 1, 2):
        runtime.order = order
        runtime.launched.clear()
        got = runtime.call(case.kernel, inputs, host.target(wave, case.shared, case.units, case.features))
        outputs.append(got if isinstance(got, tuple) else (got,))
        (name, grid, block, _) = runtime.launched[0]
        assert len(runtime.launched) == 1 and case.fit in name, f"{name} is not a {case.fit} kernel"
        assert grid >= 1 and block % 32 == 0
    for other in outputs[1:]:
        for first, second in zip(outputs[0], other, strict=True):
            same = first.view(-1).view(torch.uint8), second.view(-1).view(torch.uint8)
            assert torch.equal(*same), "the result depends on the order of the threads"
    expected = case.reference(*[_wide(i) for i in inputs])
    assert len(expected) == len(outputs[0])
    for i, (actual, (wanted, slack)) in enumerate(zip(outputs[0], expected, strict=True)):
        assert actual.is_contiguous() and actual.dtype == inputs[0].dtype and actual.shape == wanted.shape
        _check(actual, wanted, slack, f"{case.name} output {i}")
    for was, now in zip(before, [t for t in inputs if isinstance(t, Tensor)], strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num()), "an input was changed"
