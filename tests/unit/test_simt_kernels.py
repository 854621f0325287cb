"""Every SIMT kernel, executed on the CPU for waves of 32 and 64 lanes, against the ops' definitions in float64 and the
bounds that these derive.

The launchers, their plans and the C++ are those of the GPU; `simt_emulation.h` stands in for the device and refuses
accesses outside the buffers, misaligned vectors, divergent barriers and writes to inputs.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.activation import simt_kernels as activation
from tests import families
from tests.bounded import U32, must_be_right
from tests.unit import simt_host as host
from tests.unit.simt_cases import Case

pytestmark = pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package")


CASES: list[Case] = [case for module in families.modules("simt_cases").values() for case in module.CASES]
ROWS = [op for op in families.table("simt_cases", "ROWS") if len(registry.primitive(op).outputs) == 1]


@pytest.mark.parametrize("op", ROWS)
def test_a_result_that_is_a_little_off_is_refused(op: str) -> None:
    """Of 1000 terms: a factor of 2^-17 is 128 of float32's units."""
    primitive = registry.primitive(op)
    x = torch.randn(3, 1000, generator=torch.Generator().manual_seed(0))
    args = (x, *(p.default for p in primitive.parameters[1:]))
    y = primitive.body(*args)
    must_be_right(op, args, (y,))
    for wrong in (y * (1 + 2.0**-17), y.roll(1, -1), y.masked_fill(y == y[1].max(), torch.nan)):
        with pytest.raises(AssertionError, match="bounds away|is nan"):
            must_be_right(op, args, (wrong,))
    with pytest.raises(AssertionError, match="must be exact"):
        must_be_right(op, args, (torch.nextafter(y, 2 * y),), exact=True)
    with pytest.raises(AssertionError, match="stride"):
        must_be_right(op, args, (y.T.contiguous().T,))


def test_case_names_are_unique() -> None:
    assert len({c.name for c in CASES}) == len(CASES)


@pytest.fixture(scope="module")
def runtimes(request: pytest.FixtureRequest) -> Iterator[dict[int, Any]]:
    folder = request.config.cache.mkdir("ferryman-simt")
    by_wave = {wave: host.EmulatedRuntime(wave, folder) for wave in (32, 64)}
    with host.in_force(by_wave[32]), host.in_force(by_wave[64]):
        for case in CASES:
            inputs = case.make()
            for wave, runtime in by_wave.items():
                if case.features and wave == 64:
                    continue
                runtime.call(case.kernel, inputs, host.target(wave, case.shared, case.units, case.features))
        with contextlib.ExitStack() as unlocking:
            building = []
            for runtime in by_wave.values():
                building.append((runtime, runtime.compile_collected()))
                unlocking.callback(runtime.unlock)  # the second's, where the first cannot be loaded
            for runtime, compiler in building:
                runtime.load(compiler)
        yield by_wave


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
    must_be_right(case.kernel.__name__, inputs, outputs[0], exact=case.exact)
    for was, now in zip(before, [t for t in inputs if isinstance(t, Tensor)], strict=True):
        assert torch.equal(was.nan_to_num(), now.nan_to_num()), "an input was changed"


@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelus_far_gates_keep_their_digits(approximate: str, runtimes: dict[int, Any]) -> None:
    """The op's bound allows the cancellation of 1 + tanh and 1 + erf for negative gates. These kernels have none."""
    gate = torch.linspace(-14, 14, 4001)
    got = runtimes[32].call(activation.gelu_mul, (gate, torch.ones(4001), approximate), host.target(32))
    g = gate.double()
    z = 2 * math.sqrt(2 / math.pi) * (g + 0.044715 * g**3)
    exact = g * (torch.sigmoid(z) if approximate == "tanh" else 0.5 * torch.erfc(-g * 0.5**0.5))
    steep = 8 + 8 * (g.abs() + g.abs() ** 3).clamp(max=400)
    room = steep * U32 * exact.abs() + torch.finfo(torch.float32).tiny * g.abs()
    assert bool(((got.double() - exact).abs() <= room).all())
