"""Planning, launching and probing of the SIMT backends, without a device."""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import threading
import types
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ferryman.backends import cuda, hip, simt, simt_runtime
from ferryman.backends.base import Backend, Target
from ferryman.backends.simt import Unit, launcher, rows
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, BackendUnavailable, CaptureError, LaunchError
from tests import families
from tests.unit.simt_cases import Rows

H200 = Target("sm_90", "nvidia", 32, 232_448, 1024, 132, 50 << 20)


# ---------------------------------------------------------------------------------------------------- planning


@pytest.mark.parametrize(
    ("arch", "wave"), [("sm_80", 32), ("sm_90a", 32), ("gfx90a", 64), ("gfx942", 64), ("gfx1100", 32), ("gfx1201", 32)]
)
def test_wave_of(arch: str, wave: int) -> None:
    assert simt.wave_of(arch) == wave
    assert simt.defines_for(Unit("u", "", ("X=1",)), arch) == (f"FERRYMAN_WAVE={wave}", "X=1")


def test_unknown_arch_is_a_typed_error() -> None:
    with pytest.raises(ArgumentError, match="arch is 'cpu'"):
        simt.wave_of("cpu")
    for backend in (cuda.CudaBackend(), hip.HipBackend()):
        with pytest.raises(ArgumentError, match="arch is"):
            backend.compile(Unit("u", ""), None, "rv64")


@pytest.mark.parametrize(
    ("make", "rows_", "stride", "copied"),
    [
        (lambda: torch.zeros(6, 4, 8), 24, 8, False),
        (lambda: torch.zeros(8), 1, 8, False),
        (lambda: torch.zeros(6, 16)[:, 8:], 6, 16, False),
        (lambda: torch.zeros(6, 4, 16)[..., :8], 24, 16, False),
        (lambda: torch.zeros(6, 4, 8)[:, 0], 6, 32, False),
        (lambda: torch.zeros(8).expand(5, 3, 8), 15, 0, False),
        (lambda: torch.zeros(6, 1, 8)[::2], 3, 16, False),
        (lambda: torch.zeros(6, 4, 8).transpose(0, 1), 24, 8, True),
        (lambda: torch.zeros(6, 4, 8)[:, ::2], 12, 16, False),
        (lambda: torch.zeros(6, 5, 8)[:, ::2], 18, 8, True),
        (lambda: torch.zeros(6, 16)[:, ::2], 6, 8, True),
        (lambda: torch.zeros(6, 1), 6, 1, False),
    ],
)
def test_as_rows(make: Any, rows_: int, stride: int, copied: bool) -> None:
    x = make()
    view, count, step = simt.as_rows(x)
    assert (count, step, view.data_ptr() != x.data_ptr()) == (rows_, stride, copied)


def test_vectors_need_aligned_pointers_strides_and_lengths() -> None:
    assert simt.vectorised(2, 64 | 128, 16 | 4096)
    assert not simt.vectorised(2, 60 | 64, 0)
    assert not simt.vectorised(2, 64 | 65, 0)
    assert not simt.vectorised(2, 64, 0 | 2)
    assert simt.vectorised(4, 60 | 64, 0)


ROW_OPS: dict[str, Rows] = families.table("simt_cases", "ROWS")


def weights_of(op: str, *bytes_: int) -> tuple[int, ...]:
    """Those of an op's weight and bias, of ``bytes_`` in this order; nothing for an op without a weight."""
    return bytes_ if "weight" in registry.primitive(op).names else ()


def demand(op: str, wave: int, itemsize: int, *weights: int) -> rows.Demand:
    return ROW_OPS[op].demand(wave, itemsize, weights or (0,))


@given(
    n=st.integers(1, 400_000),
    itemsize=st.sampled_from([2, 4]),
    vector=st.booleans(),
    kind=st.sampled_from(sorted(ROW_OPS)),
    weight=st.sampled_from([0, 2, 4]),
    bias=st.sampled_from([0, 2, 4]),
    device=st.sampled_from([(32, False), (32, True), (64, False)]),
    shared=st.sampled_from([4096, 65_536, 232_448]),
    count=st.integers(1, 2**40),
)
@settings(max_examples=600, deadline=None)
def test_every_plan_is_one_that_the_kernel_can_run(
    n: int,
    itemsize: int,
    vector: bool,
    kind: str,
    weight: int,
    bias: int,
    device: tuple[int, bool],
    shared: int,
    count: int,
) -> None:
    wave, clusters = device
    if vector:
        n = -(-n * itemsize // 16) * 16 // itemsize
    need, weights = demand(kind, wave, itemsize, weight, bias), sum(weights_of(kind, weight, bias))
    tensors = need.tensors
    plan = rows.row_plan(n, itemsize, vector, wave, 132, shared, need, rows.threads_a_row(count, 132), clusters)
    width, lanes, per_block, packs, fit, bound, cluster = plan.arguments
    assert bound >= 1 and bound * plan.threads <= 1024
    assert plan.threads == lanes * per_block <= 1024 and plan.threads % 32 == 0
    assert lanes % wave == 0 if lanes > wave else wave % lanes == 0
    assert lanes <= wave or per_block == 1
    assert cluster in ((1, 2, 4, 8) if clusters and vector else (1,)) and (cluster == 1 or lanes > wave)
    columns = -(-n // width) if cluster == 1 else rows._up(-(-n // width), 8 * cluster) // cluster
    capacity = width * lanes * packs * cluster
    inside = columns <= lanes * packs  # what a block takes, in whole lines
    exact = n == capacity and columns == lanes * packs
    assert {"EXACT": exact, "RAGGED": inside and not exact, "WHOLE": inside, "LONG": n > capacity}[fit]
    assert packs * max(1, width * itemsize // 4) * tensors <= 64, "registers"
    assert plan.shared <= max(0, shared - 1024)
    if fit == "WHOLE":
        assert plan.shared == columns * width * weights <= shared - 8192
        assert lanes > wave and per_block == 1 and plan.slots >= 1 and plan.resident == 0
        ahead = max(form.ahead for form in need.whole if form.packs == packs)
        assert plan.slots == 1 or plan.slots * n * itemsize * tensors <= ahead * 132 * 32 * 1024
    else:
        assert plan.slots == 0 or (fit == "LONG" and tensors == 1)
        assert plan.slots <= -(-(n - capacity) // (width * lanes)) if fit == "LONG" else plan.slots == 0
    blocks = plan.blocks(count)
    assert 1 <= blocks <= -(-count // plan.rows_per_block) * cluster and blocks * plan.threads < 2**31
    assert plan.rows_per_block >= per_block and (fit == "WHOLE" or plan.rows_per_block == per_block)
    assert blocks % cluster == 0


def test_threads_a_row() -> None:
    given = [rows.threads_a_row(count, 132) for count in (1, 16, 17, 132, 133, 264, 265, 2112, 2113, 2**40)]
    assert given == [8192, 8192, 4096, 1024, 512, 512, 256, 64, 0, 0]
    assert {rows.threads_a_row(count, 132) for count in range(1, 4000)} == {0, *rows.SPREADS}


HOPPER = dataclasses.replace(H200, features=frozenset({"clusters"}))


@pytest.mark.parametrize("kind", ROW_OPS)
def test_widths_of_models_are_read_once_from_memory(kind: str) -> None:
    """On an H200, few rows and many: no second read."""
    for n in filter(ROW_OPS[kind].widest.__ge__, (1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072, 262_144)):
        for count in (1, 16, 132, 1024, 1 << 20):
            plan = rows.plan_for(n, 2, True, HOPPER, demand(kind, 32, 2), rows.threads_a_row(count, 132))
            width, lanes, _, packs, _, _, cluster = plan.arguments
            slots = plan.slots if plan.arguments[4] == "LONG" else 0
            assert cluster * width * lanes * (packs + slots) >= n, (kind, n, count)


@pytest.mark.parametrize("kind", ROW_OPS)
def test_wide_rows_take_one_exchange(kind: str) -> None:
    """Many rows of more than 16 KiB, to the widest that registers hold: two blocks or more an SM, 1024 threads."""
    need = demand(kind, 32, 2, *(2 for name in registry.primitive(kind).names if name in ("weight", "bias")))
    for n in (8200, 11_008, 16_384, 20_008, 32_768, 65_536, 131_072, 262_144):
        plan = rows.plan_for(n, 2, True, HOPPER, need)
        if n * 2 <= need.alone * simt.VECTOR_BYTES:
            assert plan.arguments[4] in ("EXACT", "RAGGED") and plan.cluster == 1
            continue
        assert plan.arguments[4] == "WHOLE" and plan.on_hopper, n
        assert plan.blocks(1000) == -(-1000 // plan.rows_per_block) * plan.cluster
        if n <= 131_072:
            words = plan.arguments[3] * 4 * need.turns
            assert (512 if words > 32 else 704) <= plan.arguments[5] * plan.threads <= 1024 and plan.arguments[5] >= 2
    assert rows.plan_for(262_152, 2, True, HOPPER, need).arguments[4] == "LONG"
    assert rows.plan_for(8192, 2, True, HOPPER, need).arguments[4] == "EXACT"
    assert rows.plan_for(16_384, 2, False, HOPPER, need).arguments[4] == "LONG", "no whole words"


def test_widths_of_models_stay_on_the_chip_without_clusters() -> None:
    for n in (1024, 4096, 8192, 16_384, 32_768, 65_536, 131_072):
        for kind in (op for op in ROW_OPS if demand(op, 32, 2).tensors == 1):
            plan = rows.plan_for(n, 2, True, H200, demand(kind, 32, 2))
            width, lanes, _, packs, *_ = plan.arguments
            assert plan.cluster == 1 and width * lanes * (packs + plan.slots) >= n, (kind, n)


def test_a_family_names_its_kernels_after_their_arguments() -> None:
    name, line = simt.instance("FERRYMAN_X", "x", "bf16", True, 8)
    assert (name, line) == ("x_bf16_true_8", "FERRYMAN_X(x_bf16_true_8, bf16, true, 8)")
    with pytest.raises(ArgumentError, match="identifiers"):
        simt.instance("FERRYMAN_X", "x", "bf16) evil(")


# --------------------------------------------------------------------------------------------------- launching


class _Fake(launcher.LoadedUnits):
    backend = "fake"

    def __init__(self) -> None:
        super().__init__()
        self.built: list[str] = []
        self.opened: list[tuple[bytes, str, int]] = []
        self.started: list[tuple[Any, int, int, tuple[int | float, ...]]] = []

    def device_arch(self, index: int) -> str:
        return "sm_90" if index < 2 else "sm_80"

    def toolchain(self) -> str:
        return "fake 1"

    def build(self, unit: Unit, arch: str) -> bytes:
        self.built.append(f"{unit.name} {arch}")
        return f"{unit.name} for {arch}".encode()

    def open(self, image: bytes, unit: Unit) -> Any:
        self.opened.append((image, unit.name, torch.cuda.current_device()))
        return unit.name

    def start(
        self,
        function: Any,
        stream: int,
        index: int,
        grid: int,
        block: int,
        shared: int,
        args: Any,
        overlapping: bool = False,
    ) -> None:
        self.started.append((function, stream, torch.cuda.current_device(), args))


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[types.SimpleNamespace]:
    """Three devices that torch believes in, and an empty cache."""
    state = types.SimpleNamespace(current=0, capturing=False)

    class Guard:
        def __init__(self, index: int) -> None:
            self.index, self.before = index, state.current

        def __enter__(self) -> None:
            state.current = self.index

        def __exit__(self, *_: Any) -> None:
            state.current = self.before

    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "device", Guard)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(launcher, "current_stream", lambda index: 1000 + index)
    monkeypatch.setenv("FERRYMAN_CACHE_DIR", str(tmp_path))
    yield state


def _launch(loaded: _Fake, name: str, index: int | None, *args: int | float) -> None:
    loaded.launch(Unit(name, f"source of {name}"), torch.device("cuda", index), 1, 32, 0, args)


def test_a_unit_is_compiled_once_and_loaded_on_every_device(devices: Any) -> None:
    loaded = _Fake()
    for index in (0, 0, 1, 2, 2, None):
        _launch(loaded, "a", index, 7)
    assert loaded.built == ["a sm_90", "a sm_80"]
    assert [(image, index) for image, _, index in loaded.opened] == [
        (b"a for sm_90", 0),
        (b"a for sm_90", 1),
        (b"a for sm_80", 2),
    ]
    # each on its own device and that device's stream, and the current one is 0 again
    assert [(stream, device) for _, stream, device, _ in loaded.started] == [
        (1000, 0),
        (1000, 0),
        (1001, 1),
        (1002, 2),
        (1002, 2),
        (1000, 0),
    ]
    assert torch.cuda.current_device() == 0


def test_images_are_kept_for_the_next_process(devices: Any) -> None:
    _launch(_Fake(), "a", 0)
    second = _Fake()
    _launch(second, "a", 0)
    assert second.built == [] and second.opened[0][0] == b"a for sm_90"
    second.toolchain = lambda: "fake 2"  # type: ignore[method-assign]
    _launch(second, "b", 0)
    _launch(second, "a", 1)
    assert second.built == ["b sm_90", "a sm_90"], "another compiler's image was taken"


def test_a_damaged_image_is_reported_and_built_again(devices: Any) -> None:
    _launch(_Fake(), "a", 0)
    (kept,) = launcher.cache_directory().iterdir()
    for damage in (kept.read_bytes()[:-1], b"", b"x" * 100):
        kept.write_bytes(damage)
        loaded = _Fake()
        with pytest.warns(UserWarning, match="is damaged"):
            _launch(loaded, "a", 0)
        assert loaded.built == ["a sm_90"]
    again = _Fake()
    _launch(again, "a", 0)
    assert again.built == []


def test_an_unusable_cache_directory_is_reported(devices: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("in the way")
    monkeypatch.setenv("FERRYMAN_CACHE_DIR", str(blocked))
    loaded = _Fake()
    with pytest.warns(UserWarning, match=r"cannot be (kept|read)"):
        _launch(loaded, "a", 0)
    assert len(loaded.started) == 1


def test_nothing_is_compiled_or_loaded_while_a_graph_is_captured(devices: Any) -> None:
    loaded = _Fake()
    _launch(loaded, "a", 0)
    devices.capturing = True
    _launch(loaded, "a", 0)
    with pytest.raises(CaptureError, match="before capturing"):
        _launch(loaded, "b", 0)
    with pytest.raises(CaptureError):
        _launch(loaded, "a", 1)
    assert loaded.built == ["a sm_90"] and devices.current == 0
    devices.capturing = False
    _launch(loaded, "b", 0)


def test_threads_share_one_compilation(devices: Any) -> None:
    loaded = _Fake()
    threads = [threading.Thread(target=_launch, args=(loaded, "a", 0)) for _ in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert loaded.built == ["a sm_90"] and len(loaded.opened) == 1 and len(loaded.started) == 8


class _DriverError(RuntimeError):
    def __init__(self, status: int) -> None:
        super().__init__(f"status {status}")
        self.status = status


def _cuda_runtime() -> Any:
    """A CudaRuntime on a stand-in for CuPy."""
    runtime = cuda.CudaRuntime.__new__(cuda.CudaRuntime)
    launcher.LoadedUnits.__init__(runtime)
    runtime._cupy = types.SimpleNamespace(cuda=types.SimpleNamespace(ExternalStream=lambda raw: ["stream", raw]))
    runtime._float32 = lambda v: ("float32", v)
    runtime.attributes = []
    runtime._driver = types.SimpleNamespace(
        CUDADriverError=_DriverError, funcSetAttribute=lambda *a: runtime.attributes.append(a)
    )
    runtime._streams, runtime._starts_early = {}, {}
    return runtime


class _Function:
    def __init__(self, status: int = 0) -> None:
        self.ptr, self.status = 99, status
        self.calls: list[Any] = []

    def __call__(self, *args: Any) -> None:
        self.calls.append(args)
        if self.status:
            raise _DriverError(self.status)


def test_cuda_launches_on_torchs_stream_with_32_bit_floats() -> None:
    runtime, function = _cuda_runtime(), _Function()
    runtime.start(function, 5, 0, 3, 256, 0, (2**40, 1e-6, 7))
    runtime.start(function, 5, 0, 3, 256, 65_536, (1,))
    assert function.calls[0] == ((3, 1, 1), (256, 1, 1), (2**40, ("float32", 1e-6), 7), 0, ["stream", 5])
    assert function.calls[0][4] is function.calls[1][4], "the stream object is kept"
    assert runtime.attributes == [(99, 8, 65_536)], "more than 48 KiB of shared memory must be asked for"


def test_a_refused_launch_is_a_launch_error_and_everything_else_rises() -> None:
    for status in (1, 701):
        with pytest.raises(LaunchError, match="refused 3 blocks of 256 threads"):
            _cuda_runtime().start(_Function(status), 0, 0, 3, 256, 0, ())
    for status in (2, 700):  # out of memory, illegal address
        with pytest.raises(_DriverError):
            _cuda_runtime().start(_Function(status), 0, 0, 3, 256, 0, ())


class _Driver:
    """libcuda's functions: what a launch passes, read back through the pointers as the driver would."""

    def __init__(self, statuses: Iterable[int] = (), version: int = 13_000) -> None:
        self.statuses, self.launches, self.contexts = iter(statuses), [], []
        self.cuDriverGetVersion = lambda where: setattr(where._obj, "value", version)
        pointer = ctypes.c_void_p
        launch = ctypes.CFUNCTYPE(
            ctypes.c_int,
            ctypes.POINTER(cuda._Configuration),
            pointer,
            ctypes.POINTER(pointer),
            pointer,
        )
        self.cuLaunchKernelEx = launch(self._launch)
        self.cuCtxGetCurrent = lambda where: setattr(where._obj, "value", 0xC0FFEE)
        self.cuCtxSetCurrent = lambda context: self.contexts.append(context.value)

    def _launch(self, where: Any, function: int, parameters: Any, extra: int | None) -> int:
        config = where.contents
        kinds = (ctypes.c_int64, ctypes.c_float, ctypes.c_int64, ctypes.c_int64)
        read = [kind.from_address(parameters[i]).value for i, kind in enumerate(kinds)]
        sizes = (
            list(config.grid),
            list(config.block),
            config.shared,
            config.stream or 0,
            config.attributes,
            config.number,
        )
        self.launches.append((function, sizes, read, extra))
        return next(self.statuses, 0)


def _bound(driver: _Driver, shared: int = 0) -> tuple[Any, Any]:
    runtime = _cuda_runtime()
    runtime._library = driver
    return runtime, runtime.bind(_Function(), 0, 3, 256, shared, (2**40, 0.5, 7, 8), (0, 3))


def test_a_bound_launch_packs_its_arguments_for_the_driver() -> None:
    assert ctypes.sizeof(cuda._Configuration) == 56 and cuda._Configuration.stream.offset == 32
    driver = _Driver()
    runtime, launch = _bound(driver, 65_536)
    launch(5, 2**41 + 1, 2**62)
    launch(2**40, 3, 4)
    gc.collect()
    launch(5, -1, 6)
    sizes = ([3, 1, 1], [256, 1, 1], 65_536)
    assert driver.launches == [
        (99, (*sizes, 5, None, 0), [2**41 + 1, 0.5, 7, 2**62], None),
        (99, (*sizes, 2**40, None, 0), [3, 0.5, 7, 4], None),
        (99, (*sizes, 5, None, 0), [-1, 0.5, 7, 6], None),
    ]
    assert runtime.attributes == [(99, 8, 65_536)], "asked for once, when bound"


@pytest.mark.parametrize(
    ("capability", "version", "number"),
    [((9, 0), 12_030, 1), ((12, 0), 13_000, 1), ((8, 9), 13_000, 0), ((9, 0), 12_020, 0)],
)
def test_an_overlapping_kernel_is_launched_early_where_device_and_driver_can(
    capability: tuple[int, int], version: int, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    driver, runtime = _Driver(version=version), _cuda_runtime()
    runtime._library = driver
    launch = runtime.bind(_Function(), 0, 3, 256, 0, (2**40, 0.5, 7, 8), (0, 3), overlapping=True)
    gc.collect()
    for stream in (5, 6):
        launch(stream, 1, 2)
    function = _Function()
    runtime.start(function, 7, 0, 3, 256, 65_536, (2**41, 0.25, 7, 8), overlapping=True)
    assert runtime.attributes == [(99, 8, 65_536)] and len(function.calls) == 1 - number, (
        "no launch of CuPy's where early"
    )
    assert len(driver.launches) == 2 + number
    if number:
        assert driver.launches[-1][:1] + driver.launches[-1][2:] == (99, [2**41, 0.25, 7, 8], None)
        assert driver.launches[-1][1][:3] == ([3, 1, 1], [256, 1, 1], 65_536)
    assert ctypes.sizeof(cuda._Attribute) == 72 and cuda._Attribute.value.offset == 8
    for (_, sizes, _, _), stream in zip(driver.launches, (5, 6, 7)[: 2 + number], strict=True):
        *_, passed, attributes, count = sizes
        assert passed == stream and count == number and (attributes is None) == (number == 0)
        if attributes is not None:
            attribute = cuda._Attribute.from_address(attributes)
            assert (attribute.id, attribute.value) == (6, 1)  # programmatic stream serialization, on


def test_an_early_launch_types_its_errors_and_leaves_a_thread_without_context_to_cupy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, 0))

    def start(status: int) -> _Function:
        runtime, function = _cuda_runtime(), _Function()
        runtime._library = _Driver([status])
        runtime.start(function, 0, 0, 3, 256, 0, (2**40, 0.5, 7, 8), overlapping=True)
        return function

    assert start(0).calls == []
    (call,) = start(201).calls
    assert call[2] == (2**40, ("float32", 0.5), 7, 8)
    with pytest.raises(LaunchError, match="refused 3 blocks of 256 threads"):
        start(701)
    with pytest.raises(_DriverError):
        start(700)


def test_bound_launches_of_many_threads_do_not_share_arguments() -> None:
    driver = _Driver()
    _, launch = _bound(driver)
    threads = [threading.Thread(target=lambda n=n: [launch(0, n * 1000 + i, n) for i in range(200)]) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    read = sorted(tuple(r[2]) for r in driver.launches)
    assert read == [(n * 1000 + i, 0.5, 7, n) for n in range(8) for i in range(200)]


def test_a_bound_launch_types_its_errors_and_brings_its_context() -> None:
    driver = _Driver([201, 0])
    _bound(driver)[1](0, 1, 2)
    assert driver.contexts == [0xC0FFEE] and len(driver.launches) == 2
    with pytest.raises(LaunchError, match="refused 3 blocks of 256 threads"):
        _bound(_Driver([701]))[1](0, 1, 2)
    for status in (2, 700):
        with pytest.raises(_DriverError):
            _bound(_Driver([status]))[1](0, 1, 2)


def test_a_driver_without_the_newer_launch_is_served_through_cupy() -> None:
    runtime, function = _cuda_runtime(), _Function()
    runtime._library = types.SimpleNamespace()
    runtime.bind(function, 0, 3, 256, 0, (2**40, 0.5, 7, 8), (0, 3))(5, 1, 2)
    assert function.calls[0][2] == (1, ("float32", 0.5), 7, 2)


class _FakeHip:
    def __init__(self, status: int = 0) -> None:
        self.status, self.calls = status, []

    def hipModuleLaunchKernel(self, *args: Any) -> tuple[int]:  # noqa: N802
        self.calls.append(args)
        return (self.status,)


def test_hip_launch_packs_its_arguments_and_types_its_errors() -> None:
    def start(status: int) -> _FakeHip:
        runtime = hip.HipRuntime.__new__(hip.HipRuntime)
        launcher.LoadedUnits.__init__(runtime)
        runtime._hip = _FakeHip(status)
        runtime.start(("kernel", "module", b""), 77, 0, 3, 256, 4096, (2**40, 0.5))
        return runtime._hip

    (call,) = start(0).calls
    assert call[:10] == ("kernel", 3, 1, 1, 256, 1, 1, 4096, 77, None)
    assert bytes(call[10][0]) == (2**40).to_bytes(8, "little") + b"\0\0\0\x3f" + b"\0" * 4
    with pytest.raises(LaunchError, match="refused"):
        start(701)
    with pytest.raises(hip.HipError) as caught:
        start(700)
    assert caught.value.status == 700


# ----------------------------------------------------------------------------------------------------- probing


@pytest.mark.parametrize("backend", [cuda.CudaBackend(), hip.HipBackend()], ids=lambda b: b.name)
def test_probe_gives_reasons_here(backend: Any) -> None:
    assert isinstance(backend, Backend)
    assert any("vendor is 'cpu'" in r for r in backend.probe("cpu"))
    if not torch.cuda.is_available():
        (vendor,) = backend.vendors
        assert backend.probe(vendor), "no device, and no reason"


def _cupy(monkeypatch: pytest.MonkeyPatch, driver: int, needed: int, count: Any) -> None:
    def device_count() -> int:
        if isinstance(count, Exception):
            raise count
        return int(count)

    fake = types.SimpleNamespace(
        driverGetVersion=lambda: driver, runtimeGetVersion=lambda: needed, getDeviceCount=device_count
    )
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(cuda.importlib, "import_module", lambda name: fake)
    monkeypatch.setattr(cuda, "nvrtc", lambda: object())
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "13.0")


def test_cuda_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    probe = cuda.CudaBackend().probe
    _cupy(monkeypatch, 13_000, 13_000, 1)
    assert probe("nvidia") == ()
    _cupy(monkeypatch, 13_000, 13_020, 1)
    assert probe("nvidia") == (), "a driver runs every runtime of its major version"
    _cupy(monkeypatch, 12_090, 13_000, 1)
    assert any("driver supports CUDA 12.9" in r and "13.0" in r for r in probe("nvidia"))
    _cupy(monkeypatch, 13_000, 13_000, RuntimeError("cudaErrorNoDevice"))
    assert any("no device: cudaErrorNoDevice" in r for r in probe("nvidia"))
    _cupy(monkeypatch, 0, 13_000, 0)
    assert any("no NVIDIA driver" in r for r in probe("nvidia"))
    monkeypatch.setattr(cuda.importlib.util, "find_spec", lambda name: None)
    assert any("pip install ferryman[cuda13]" in r for r in probe("nvidia"))


def test_hip_probe_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: Any) -> Any:
        raise RuntimeError("failed to dlopen 'libamdhip64.so'")

    fake = types.SimpleNamespace(hipGetDeviceCount=missing, hiprtcVersion=missing)
    monkeypatch.setattr(hip.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(hip, "_bindings", lambda: (fake, fake))
    reasons = hip.HipBackend().probe("amd")
    assert any("libamdhip64" in r for r in reasons) and any("hipRTC" in r for r in reasons)
    fake.hipGetDeviceCount = lambda: (100, 0)
    assert any("(100)" in r for r in hip.HipBackend().probe("amd"))
    fake.hipGetDeviceCount, fake.hiprtcVersion = (lambda: (0, 1)), (lambda: (0, 9, 0))
    fake.hipRuntimeGetVersion = lambda: (0, 70226015)
    monkeypatch.setattr(torch.version, "hip", "7.2")
    assert hip.HipBackend().probe("amd") == ()
    fake.hipRuntimeGetVersion = lambda: (0, 50221153)
    (reason,) = hip.HipBackend().probe("amd")
    assert "loader's path is ROCm 5.2" in reason and "is built for ROCm 7.2" in reason
    monkeypatch.setattr(hip.importlib.util, "find_spec", lambda name: None)
    assert any("pip install ferryman[rocm7]" in r for r in hip.HipBackend().probe("amd"))


def test_runtime_is_one_per_vendor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simt_runtime, "_RUNTIMES", {})
    with pytest.raises(BackendUnavailable, match="vendor is 'cpu'"):
        simt_runtime.runtime(Target("cpu", "cpu", 1, 0, 1, 1, 0))
    marker = object()
    simt_runtime._RUNTIMES["nvidia"] = marker  # type: ignore[assignment]
    assert simt_runtime.runtime(H200) is marker
