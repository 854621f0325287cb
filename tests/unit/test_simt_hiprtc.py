"""hip-python's binding against a real hipRTC (Debian's 5.2.3, which `ci/setup-hiprtc.sh` installs). No AMD device.

hipRTC 5.2.3 aborts on gfx942 and gfx1100: gfx90a is what it can compile.
"""

from __future__ import annotations

import ctypes

import pytest

from ferryman.backends import hip
from ferryman.backends.simt import Unit, resources
from ferryman.errors import BackendUnavailable, CompileError
from tests.unit import hip_launches, simt_host

ARCH = "gfx90a"


def _missing() -> str | None:
    try:
        hip.hiprtc_version()
    except (BackendUnavailable, RuntimeError) as error:
        return f"hipRTC cannot be loaded: {error}; run ci/setup-hiprtc.sh"
    return None


_MISSING = _missing()
pytestmark = [pytest.mark.hiprtc, pytest.mark.skipif(_MISSING is not None, reason=_MISSING or "")]


def test_kernels_of_every_op_compile() -> None:
    backend = hip.HipBackend()
    for unit in simt_host.some_units(ARCH):
        artefact = backend.compile(unit, None, ARCH)
        (kernel,) = resources.kernels(artefact.image)
        assert kernel[".name"] == unit.name and kernel[".wavefront_size"] == 64
        assert artefact.kind == "hsaco" and artefact.resources["registers"] > 0
        # what the launcher packs is what the kernel reads: pointers and integers of 8 bytes, numbers of 4
        sizes = [a[".size"] for a in kernel[".args"] if not a[".value_kind"].startswith("hidden")]
        assert set(sizes) <= {8, 4} and sizes.count(4) == simt_host.numbers_of(unit.name)


def test_bad_source_gives_the_log() -> None:
    with pytest.raises(CompileError, match="unknown type name 'nonsense'") as caught:
        hip.HipBackend().compile(Unit("broken", "nonsense here;"), None, ARCH)
    assert caught.value.arch == ARCH and caught.value.backend == "hip"


def test_no_device_is_a_reason_and_not_an_exception() -> None:
    reasons = hip.HipBackend().probe("amd")
    assert any("hipErrorNoDevice" in r for r in reasons), reasons


def test_calls_without_a_device_raise_a_typed_error() -> None:
    """The whole path to hipModuleLaunchKernel: HIP takes the arguments as packed, and refuses for want of a device."""
    runtime = hip.HipRuntime()
    assert "hiprtc" in runtime.toolchain()
    unit = simt_host.some_units(ARCH)[0]
    image = runtime.build(unit, ARCH)
    with pytest.raises(hip.HipError, match="hipModuleLoadData failed"):
        runtime.open(image, unit)
    with pytest.raises(hip.HipError, match="hipModuleLaunchKernel failed"):
        runtime.start((0, None, image), 0, 0, 1, 64, 0, (1, 2.5, 3))


def test_every_familys_arguments_lie_where_hiprtcs_kernels_read_them(monkeypatch: pytest.MonkeyPatch) -> None:
    backend, seen = hip.HipBackend(), set()
    for unit, args in hip_launches.recorded(monkeypatch, ARCH):
        layout = (unit.name.rsplit("_", 5)[0], len(args))
        if layout in seen:
            continue
        seen.add(layout)
        (kernel,) = resources.kernels(backend.compile(unit, None, ARCH).image)
        assert kernel[".name"] == unit.name
        hip_launches.check_packing(kernel, args)
    assert {name.split("_")[0] for name, _ in seen} == {
        kernel.__name__.split("_")[0] for kernel, _ in hip_launches.calls()
    }


def test_a_device_newer_than_hiprtc_is_an_error_and_no_abort() -> None:
    """Debian's hipRTC is of ROCm 5.2, which would end the process on gfx942."""
    major, minor = hip.runtime_version()
    if (major, minor) >= (5, 6):
        pytest.skip(f"ROCm {major}.{minor} knows gfx942")
    with pytest.raises(CompileError, match=f"hipRTC of ROCm {major}.{minor} does not know gfx942"):
        hip.HipBackend().compile(simt_host.some_units("gfx942")[0], None, "gfx942")


def test_a_code_object_that_is_none_is_not_loaded() -> None:
    runtime = hip.HipRuntime()
    unit = simt_host.some_units(ARCH)[0]
    for image in (b"", b"nonsense", runtime.build(unit, ARCH)[:-200]):
        with pytest.raises((hip.HipError, ValueError), match="hipModuleLoadData failed|not a 64-bit ELF|truncated"):
            runtime.open(image, unit)


def test_packed_arguments_match_the_kernel_abi() -> None:
    packed = hip.pack_arguments((1, 2.5, 3))
    assert bytes(packed) == bytes.fromhex("010000000000000000002040000000000300000000000000")
    assert ctypes.sizeof(hip.pack_arguments((7, 7, 0.5))) == 24
