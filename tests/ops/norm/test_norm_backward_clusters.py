"""The norms' gradients by clusters of blocks (`norm_backward.cuh`), executed on the CPU: the gates on the ops' cases,
and every form, in every order of its threads, against float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.backends import cuda, simt_offline
from ferryman.backends.base import Target
from ferryman.dispatch import registry
from ferryman.errors import BackendUnavailable
from ferryman.ops.norm import simt_backward_kernels as kernels
from ferryman.ops.norm.implementations import WIDE_BYTES, WIDE_SHARED_MEMORY
from ferryman.ops.norm.simt_backward_kernels import Form
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.parity import check_cell, prepare
from tests.bounded import off
from tests.compiled import compile_unit
from tests.unit import simt_host as host
from tests.unit import simt_mutants as mutants

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
HOPPER = simt_offline.target_for("sm_90")
EDITS = 48
OPS = ("rms_norm_backward", "add_rms_norm_backward", "layer_norm_backward")
emulated = pytest.mark.skipif(host.host_compiler() is None, reason="needs g++ or the ziglang package")
Args = tuple[Any, ...]
ALL = list(dict.fromkeys(form for forms in (*kernels.FORMS.values(), kernels._WIDER) for form in forms))


def _where(form: Form, clusters: int = 2) -> Target:
    """A device with room for so many clusters, so that each takes several rows."""
    units = clusters * form.cluster
    return host.target(32, HOPPER.shared_memory, units + (units // 10 if form.cluster > 2 else 0))


def _random(*shape: int, dtype: torch.dtype, scale: float = 1.0, shift: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * scale + shift).to(dtype)


def _args(op: str, rows: int, n: int, dtype: torch.dtype, weight: torch.dtype | None, bias: torch.dtype | None) -> Args:
    grad, x = _random(rows, n, dtype=dtype, seed=1), _random(rows, n, dtype=dtype, scale=2.0, shift=3.0, seed=2)
    w = None if weight is None else _random(n, dtype=weight, scale=0.2, shift=1.0)
    b = None if bias is None else _random(n, dtype=bias)
    if op == "add_rms_norm_backward":
        return grad, _random(rows, n, dtype=dtype, seed=3), x, w, 1e-6
    return (grad, x, w, 1e-6) if op == "rms_norm_backward" else (grad, x, w, b, 1e-5)


def _judge(op: str, args: Args, outputs: tuple[Tensor, ...]) -> None:
    assert off(registry.primitive(op), args, outputs, args[0].dtype) <= 1, op


def _run(runtime: host.EmulatedRuntime, op: str, args: Args, form: Form, where: Target) -> tuple[Tensor, ...]:
    def kernel(*given: Any) -> tuple[Tensor, ...]:
        return kernels.launch(op, given[:-1], given[-1], form)

    outputs: tuple[Tensor, ...] = runtime.call(kernel, args, where)
    return outputs


# of x, weight and bias
_TYPES = [
    (BF16, BF16, BF16),
    (F16, F16, F32),
    (F32, F32, F32),
    (BF16, F32, None),
    (F32, BF16, F16),
    (F16, None, F16),
    (BF16, None, None),
]


# Each third of them has rows of its own shape. An op takes one of each third: a form meets all types and shapes,
# and an op each type in some form: every pair of form, op, types and shape. `ALL_TYPES` is the whole product.
_THIRDS = ((0, 3, 6), (1, 4), (2, 5))
ALL_TYPES = tuple(range(len(_TYPES)))
_WIDE, _PLAIN = next(form for form in ALL if form.cluster == 8), _TYPES.index((F32, F32, F32))


def _met(form: Form, op: str) -> tuple[int, ...]:
    turn = ALL.index(form) + OPS.index(op)
    return tuple(third[turn % len(third)] for third in _THIRDS)


def _examples(form: Form, types: tuple[int, ...] | None = None) -> Iterator[tuple[str, Args]]:
    for op in OPS:
        for i in _met(form, op) if types is None else types:
            dtype, weight, bias = _TYPES[i]
            columns = form.cluster * form.packs * 32 * 16 // dtype.itemsize  # of one wave in each block
            rows, n = ((13, columns + columns // 3 // 64 * 64 + 8), (9, columns // 2 - 8), (1, 2 * columns))[i % 3]
            yield op, _args(op, rows, n, dtype, weight, bias)


def _collect(folder: Any, types: tuple[int, ...] | None = None) -> host.EmulatedRuntime:
    emulator = host.EmulatedRuntime(32, folder)
    with host.in_force(emulator):
        for form in ALL:
            for op, args in _examples(form, types):
                _run(emulator, op, args, form, _where(form))
    return emulator


@pytest.fixture(scope="module")
def runtime(request: pytest.FixtureRequest) -> Iterator[host.EmulatedRuntime]:
    emulator = _collect(request.config.cache.mkdir("ferryman-simt"))
    with host.in_force(emulator):
        for op, args in _examples(_WIDE, (_PLAIN,)):
            _run(emulator, op, args, _WIDE, _where(_WIDE))
        for op in OPS:  # the gates' cases
            kernel = registry.launcher(registry.implementation(op, "cuda"))
            for dtype in (F32, F16, BF16):
                for _, args in _small_cases(op, dtype):
                    emulator.call(kernel, args, host.target(32, 232_448, 2))
        emulator.load(emulator.compile_collected())
        yield emulator


def _in_every_order(runtime: host.EmulatedRuntime, form: Form, types: tuple[int, ...] | None = None) -> None:
    for op, args in _examples(form, types):
        runs = []
        for runtime.order in (0, 1, 2):
            runs.append(_run(runtime, op, args, form, _where(form)))
        _judge(op, args, runs[0])
        for other in runs[1:]:
            for a, b in zip(runs[0], other, strict=True):
                assert torch.equal(a.view(torch.uint8), b.view(torch.uint8)), (op, args[0].shape)


@emulated
@pytest.mark.parametrize("form", ALL, ids=str)
def test_every_form_in_every_order_of_its_threads(form: Form, runtime: host.EmulatedRuntime) -> None:
    assert {i for op in OPS for i in _met(form, op)} == set(ALL_TYPES)
    _in_every_order(runtime, form)


@emulated
@pytest.mark.slow
def test_every_form_of_every_op_with_all_types(request: pytest.FixtureRequest) -> None:
    runtime = _collect(request.config.cache.mkdir("ferryman-simt"), ALL_TYPES)
    with host.in_force(runtime):
        runtime.load(runtime.compile_collected())
        for form in ALL:
            _in_every_order(runtime, form, ALL_TYPES)


@functools.cache  # what is compiled is collected on them, and then they are judged
def _small_cases(op: str, dtype: torch.dtype) -> list[tuple[Any, Args]]:
    primitive, ready = registry.primitive(op), []
    for case in cases_of(primitive):
        layouts = [s.layout for s in case.args.values() if hasattr(s, "layout")]
        if case.tier != "small" or "last" in layouts:
            continue
        prepared = prepare(primitive, case, dtype, torch.device("cpu"), 0)
        if prepared.args.values[0].shape[-1] % 8 == 0:
            ready.append((prepared, prepared.args.values))
    return ready


@emulated
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
def test_the_gates(op: str, dtype: torch.dtype, runtime: host.EmulatedRuntime) -> None:
    primitive, line = registry.primitive(op), registry.implementation(op, "cuda")
    launcher = registry.launcher(line)
    runtime.order = 0

    def kernel(*args: Any) -> Any:
        return runtime.call(launcher, args[:-1], host.target(32, 232_448, 2))

    passed = 0
    for prepared, _ in _small_cases(op, dtype):
        cell = check_cell(primitive, line, prepared.case, dtype, prepared=prepared, kernel=kernel)
        assert cell.verdict == "PASS", (prepared.case.name, cell.reason)
        passed += 1
    assert passed >= 12


@emulated
def test_means_that_dwarf_the_deviation_and_values_that_are_not_finite(runtime: host.EmulatedRuntime) -> None:
    form = _WIDE
    n = next(args[0].shape[-1] for _, args in _examples(form, (_PLAIN,)))
    runtime.order = 0
    for make in (lambda x: x * 1e-3 + 1e3, lambda x: torch.where(torch.arange(n) % 4 == 0, 1e4, x), torch.zeros_like):
        grad, x, w, b, eps = _args("layer_norm_backward", 5, n, F32, F32, F32)
        args = (grad, make(x), w, b, eps)
        _judge("layer_norm_backward", args, _run(runtime, "layer_norm_backward", args, form, _where(form)))
    for op in OPS:
        args = _args(op, 5, n, F32, F32, F32)
        args[0][1, n - 1], args[-4 if op == "layer_norm_backward" else -3][3, 8] = float("nan"), float("inf")
        oracle = registry.primitive(op).body(*[a.double() if isinstance(a, Tensor) else a for a in args])
        for actual, expected in zip(_run(runtime, op, args, form, _where(form)), oracle, strict=True):
            assert torch.equal(actual.isnan(), expected.isnan()), op


def test_rows_of_all_widths_that_the_menu_admits_have_a_form() -> None:
    met = set()
    widths = (*range(8200, 20_000, 808), 32_768, 40_000, 53_248, 65_536, 98_304, 131_072)
    for kind, itemsize, n, weight, few in itertools.product(kernels.FORMS, (2, 4), widths, (0, 2, 4), (False, True)):
        if n * itemsize > WIDE_BYTES:
            continue
        form = kernels.choose(kind, n, itemsize, weight, few, HOPPER.shared_memory)
        assert form.fits(n, itemsize, 3 if kind == "added" else 2, weight, HOPPER.shared_memory)
        assert form.lanes(n, itemsize) * form.cluster * form.packs * 16 >= n * itemsize
        assert form.cluster == 8 or not few
        for rows in (1, 20, 999):
            assert 1 <= form.clusters(rows, HOPPER.units) <= min(rows, HOPPER.units // form.cluster)
        met.add(form)
    assert met == set(ALL), f"never chosen: {set(ALL) - met}"


@pytest.mark.slow
@pytest.mark.alternate("arch")
@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_every_kernel_compiles_without_spills(arch: str) -> None:
    try:
        cuda.nvrtc()
    except BackendUnavailable as error:
        pytest.skip(str(error))
    assert (
        kernels.units(simt_offline.target_for("sm_80")) == [] and kernels.units(simt_offline.target_for("gfx942")) == []
    )
    target = dataclasses.replace(simt_offline.target_for(arch), shared_memory=WIDE_SHARED_MEMORY)
    for unit, names in host.joined(kernels.units(target)):
        resources = compile_unit(unit, arch).resources
        assert max(resources["spill_stores"], resources["spill_loads"]) <= unit.spills_allowed, (names, resources)
        assert arch != "sm_90" or unit.spills_allowed == 0


@emulated
def test_edits_of_the_kernels_are_caught(request: pytest.FixtureRequest) -> None:
    """In one library: those that change a bit anywhere, with an eps that counts, too."""
    runtime = host.EmulatedRuntime(32, request.config.cache.mkdir("ferryman-simt"))

    def attempt(op: str, form: Form, args: Args) -> tuple[Tensor, ...]:
        outputs = _run(runtime, op, args, form, _where(form))
        if runtime._libraries:
            _judge(op, args, outputs)
        return outputs

    attempts = []
    for op, forms in zip(OPS, kernels.FORMS.values(), strict=True):
        args = _args(op, 9, 1160, BF16, BF16, BF16)
        attempts += [functools.partial(attempt, op, forms[-1], (*args[:-1], eps)) for eps in (args[-1], 4.0)]
    with host.in_force(runtime):
        for one in attempts:
            one()  # collects
        records = mutants.Planted(runtime, {"norm_backward.cuh"}, EDITS, 0).fates(attempts)
    mutants.judge(records, at_least=EDITS // 2)
