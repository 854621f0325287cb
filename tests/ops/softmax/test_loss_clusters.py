"""Cross entropy by clusters of blocks (`loss.cuh`), executed on the CPU: the gates on every case of the ops, and every
form, alignment and order of threads against float64."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.backends import cuda, simt_offline
from ferryman.dispatch import registry
from ferryman.errors import BackendUnavailable
from ferryman.ops.softmax import simt_loss_kernels as kernels
from ferryman.ops.softmax.simt_loss_kernels import Form
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell, prepare
from tests.compiled import compile_unit
from tests.ops.softmax.loss_examples import EXAMPLES, IGNORED, Example, close, verify
from tests.unit import simt_host as host
from tests.unit import simt_mutants as mutants

EDITS = 48
WIDEST = 2**18 - 64  # of the menu's condition
emulated = pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package")


def _runtime(folder: Path) -> host.EmulatedRuntime:
    """Every unit that a launch on Hopper may need, collected."""
    emulator = host.EmulatedRuntime(32, folder)
    emulator.collected = {u.name: u for u in kernels.units(simt_offline.target_for("sm_90"))}
    return emulator


@pytest.fixture(scope="module")
def runtime(request: pytest.FixtureRequest) -> Iterator[host.EmulatedRuntime]:
    emulator = _runtime(request.config.cache.mkdir("ferryman-simt"))
    emulator.load(emulator.compile_collected())
    with host.in_force(emulator):
        yield emulator


def _run(runtime: host.EmulatedRuntime, e: Example, form: Form | None) -> tuple[Tensor, ...]:
    """(loss, lse, memory) after the form's gradient went over the logits; what the other two kernels give. Checked."""
    where, memory = host.target(32), e.memory.clone()

    def over(x: Tensor, labels: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        return kernels.losses(form, x, labels, IGNORED, e.smoothing, True, target)

    def forward(x: Tensor, labels: Tensor, target: Any) -> tuple[Tensor, Tensor]:
        return kernels.losses(form, x, labels, IGNORED, e.smoothing, False, target)

    loss, lse = runtime.call(over, (e.view(memory), e.labels), where, over=(0,))
    verify(e, loss, lse)
    assert close(e.view(memory), e.gradients[0], 2e-8)
    assert torch.equal(e.outside(memory), e.outside(e.memory)), "wrote beside its rows"
    alone = runtime.call(forward, (e.view(e.memory), e.labels), where)
    verify(e, *alone)
    given = (e.scale, e.view(e.memory), e.labels, e.lse.float(), IGNORED, e.smoothing)
    gradient = runtime.call(kernels.cross_entropy_backward, given, where)
    assert close(gradient, e.gradients[1], 2e-7)
    return loss, lse, memory, *alone, gradient


@emulated
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", kernels.forms(), ids=str)
def test_every_form_in_every_order_of_its_threads(
    form: Form, dtype: torch.dtype, runtime: host.EmulatedRuntime
) -> None:
    for name, make in EXAMPLES.items():
        runs = []
        for runtime.order in (0, 1, 2):
            e = make(dtype)
            if form.fits(e.n, dtype.itemsize, True):
                runs.append(_run(runtime, e, form))
        for other in runs[1:]:
            for a, b in zip(runs[0], other, strict=True):
                assert torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8)), name


@emulated
@pytest.mark.parametrize(("n", "pad"), [(32_000, 0), (50_257, 0), (65_600, 1), (131_080, 0)])
def test_rows_as_long_as_their_forms(n: int, pad: int, runtime: host.EmulatedRuntime) -> None:
    for runtime.order in (0, 1):
        _run(runtime, Example(2, n, torch.bfloat16, pad=pad), None)


@emulated
@pytest.mark.parametrize("op", ["cross_entropy", "cross_entropy_inplace_grad", "cross_entropy_backward"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_the_gates(op: str, dtype: torch.dtype, runtime: host.EmulatedRuntime) -> None:
    primitive, line = registry.primitive(op), registry.implementation(op, "cuda")
    launcher = registry.launcher(line)
    over = tuple(place for place, _ in primitive.overwritten)
    runtime.order = 0

    def kernel(*args: Any) -> Any:
        return runtime.call(launcher, args[:-1], host.target(32), over)

    passed = 0
    for case in cases_of(primitive):
        if case.tier != "small" or any(s.layout == "last" for s in case.args.values() if hasattr(s, "layout")):
            continue
        prepared = prepare(primitive, case, dtype, torch.device("cpu"), 0)
        cell = check_cell(primitive, line, case, dtype, prepared=prepared, kernel=kernel)
        assert cell.verdict == "PASS", (case.name, cell.reason)
        passed += 1
    assert passed >= 15


def test_forms_hold_every_width_that_the_menu_admits() -> None:
    met = set()
    for itemsize in (2, 4):
        for shifted in (False, True):
            for n in (1, 7, 128, 1000, 4096, 32_000, 50_257, 65_536, 100_352, 128_256, 152_064, 202_048, WIDEST):
                form = kernels.choose(n, itemsize, shifted)
                met.add(form)
                waves = form.waves(n, itemsize, shifted)
                assert waves * 32 <= form.threads
                assert waves * form.cluster * 32 * form.packs * 16 >= n * itemsize + (112 if shifted else 0)
    assert met == set(kernels.forms()), f"never chosen: {set(kernels.forms()) - met}"


def test_every_kernel_compiles_for_hopper_without_spills() -> None:
    try:
        cuda.nvrtc()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert (
        kernels.units(simt_offline.target_for("sm_80")) == [] and kernels.units(simt_offline.target_for("gfx942")) == []
    )
    for unit in kernels.units(simt_offline.target_for("sm_90")):
        resources = compile_unit(unit, "sm_90").resources
        assert resources["spill_stores"] == resources["spill_loads"] == 0, (unit.name, resources)


@emulated
def test_edits_of_the_kernel_are_caught(request: pytest.FixtureRequest) -> None:
    """In one library: those that change a bit anywhere."""
    form = next(f for f in kernels.forms() if f.cluster == 8)
    runtime = _runtime(request.config.cache.mkdir("ferryman-simt"))
    runtime.collected = {name: u for name, u in runtime.collected.items() if "bf16" in name or "count" in name}
    examples = [make(torch.bfloat16) for make in EXAMPLES.values()]
    with host.in_force(runtime):
        planted = mutants.Planted(runtime, {"loss.cuh"}, EDITS, 0)
        records = planted.fates([lambda e=e: _run(runtime, e, form) for e in examples if form.fits(e.n, 2, True)])
    mutants.judge(records, at_least=EDITS // 2)
