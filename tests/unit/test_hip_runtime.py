"""HIP without a device: what a launch packs against the kernels' own metadata, and what is missing or does not fit.

Where Debian's hipRTC is installed, tests/unit/test_simt_hiprtc.py has the same from a real hipRTC.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from ferryman.backends import hip
from ferryman.backends.simt import Unit, resources
from ferryman.errors import BackendUnavailable, CompileError
from tests.compiled import compile_unit
from tests.unit import hip_launches, simt_host


def _require(*packages: str) -> None:
    absent = [p for p in packages if importlib.util.find_spec(p) is None]
    if absent:
        pytest.skip(f"needs {', '.join(absent)}")


@pytest.mark.parametrize("arch", ["gfx942", pytest.param("gfx1100", marks=pytest.mark.slow)])
def test_every_familys_arguments_lie_where_its_kernels_read_them(monkeypatch: pytest.MonkeyPatch, arch: str) -> None:
    _require("ziglang", "triton", "msgpack")
    launches = hip_launches.recorded(monkeypatch, arch)
    stems = {unit.name.split("_")[0] for unit, _ in launches}
    assert stems == {kernel.__name__.split("_")[0] for kernel, _ in hip_launches.calls()} and len(launches) > 60
    by_stem: dict[tuple[str, int], Any] = {}
    for unit, args in launches:  # one of each layout: two kernels of a family differ in what they instantiate
        by_stem.setdefault((unit.name.rsplit("_", 5)[0], len(args)), (unit, args))
    launched = {unit.name: args for unit, args in by_stem.values()}
    for joined, names in simt_host.joined([unit for unit, _ in by_stem.values()]):
        kernels = resources.kernels(compile_unit(joined, arch).image)
        assert sorted(kernel[".name"] for kernel in kernels) == sorted(names)
        for kernel in kernels:
            hip_launches.check_packing(kernel, launched[kernel[".name"]])


def test_a_wrong_packing_is_found() -> None:
    _require("msgpack")
    declared = [
        {".offset": 0, ".size": 8, ".value_kind": "global_buffer"},
        {".offset": 8, ".size": 8, ".value_kind": "by_value"},
        {".offset": 16, ".size": 4, ".value_kind": "by_value"},
        {".offset": 24, ".size": 8, ".value_kind": "hidden_block_count_x"},
    ]
    kernel = {".name": "k", ".args": declared, ".kernarg_segment_size": 32, ".kernarg_segment_align": 8}
    hip_launches.check_packing(kernel, (4096, -1, 0.5))
    for args in ((4096, -1), (4096, -1, 1, 2)):
        with pytest.raises(AssertionError):
            hip_launches.check_packing(kernel, args)
    moved = [*declared[:1], {**declared[1], ".offset": 12}, *declared[2:]]
    with pytest.raises(AssertionError):
        hip_launches.check_packing({**kernel, ".args": moved}, (4096, -1, 0.5))


WITHOUT = """
import json
from ferryman.backends import hip
from ferryman.backends.simt import Unit
from ferryman.errors import FerrymanError
found = {"reasons": hip.HipBackend().probe("amd")}
for name, do in (
    ("compile", lambda: hip.HipBackend().compile(Unit("k", "int x;"), None, "gfx90a")),
    ("runtime", lambda: hip.HipRuntime().toolchain()),
):
    try:
        do()
    except (FerrymanError, RuntimeError) as error:
        found[name] = [type(error).__name__, str(error)]
print(json.dumps(found))
"""


def test_without_rocms_libraries_everything_says_so() -> None:
    _require("hip")
    env = {k: v for k, v in os.environ.items() if k != "LD_LIBRARY_PATH"}
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT], env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    said = " ".join(report["reasons"])
    assert "the HIP runtime cannot be loaded" in said and "hipRTC cannot be loaded" in said and "install ROCm" in said
    assert report["compile"][0] == "BackendUnavailable" and "install ROCm's hiprtc" in report["compile"][1]
    assert report["runtime"][0] == "RuntimeError" and "libamdhip64" in report["runtime"][1]


def test_without_hip_python_everything_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(hip.importlib, "import_module", absent)
    hip._bindings.cache_clear()
    try:
        with pytest.raises(BackendUnavailable, match=r"hip-python cannot be imported .*pip install ferryman\[rocm7\]"):
            hip.HipBackend().compile(Unit("k", "int x;"), None, "gfx90a")
        with pytest.raises(BackendUnavailable, match="hip-python cannot be imported"):
            hip.HipRuntime()
    finally:
        hip._bindings.cache_clear()


def runtime_of(monkeypatch: pytest.MonkeyPatch, version: int) -> list[str]:
    """A HIP whose runtime is of ``version`` and whose hipRTC notes what it is asked for."""
    asked: list[str] = []

    def create(*args: Any) -> tuple[int, Any]:
        asked.append("hiprtcCreateProgram")
        return 11, None

    fake, rtc = SimpleNamespace(hipRuntimeGetVersion=lambda: (0, version)), SimpleNamespace(hiprtcCreateProgram=create)
    monkeypatch.setattr(hip, "_bindings", lambda: (fake, rtc))
    return asked


@pytest.mark.parametrize(
    ("version", "arch", "known"),
    [
        (50_221_153, "gfx90a", True),
        (50_221_153, "gfx942", False),
        (50_221_153, "gfx1100", False),
        (60_032_830, "gfx942", True),
        (60_032_830, "gfx950", False),
        (60_240_092, "gfx1201", False),
        (70_226_015, "gfx950", True),
        (70_226_015, "gfx1201", True),
    ],
)
def test_a_hiprtc_older_than_the_device_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, version: int, arch: str, known: bool
) -> None:
    """5.2.3 aborts the process on an arch that it does not know: it must not come so far."""
    asked = runtime_of(monkeypatch, version)
    error = hip.HipError if known else CompileError
    with pytest.raises(error) as caught:
        hip.HipBackend().compile(Unit("k", "int x;"), None, arch)
    assert asked == (["hiprtcCreateProgram"] if known else [])
    if not known:
        major, minor = version // 10_000_000, version // 100_000 % 100
        assert f"hipRTC of ROCm {major}.{minor} does not know {arch}; required: " in str(caught.value)
