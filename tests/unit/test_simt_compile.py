"""SIMT kernels compile for devices that are not here, from PyPI packages alone, and fit their registers."""

from __future__ import annotations

import importlib.util
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from ferryman.backends import code_objects, cuda, nvrtc, simt, simt_offline
from ferryman.backends.base import Artefact
from ferryman.backends.simt import Unit, resources, vendor_of, wave_of
from ferryman.errors import ArgumentError, BackendUnavailable, CompileError
from ferryman.ops.matmul import hopper_kernels
from ferryman.porting.aot import groups
from tests import families
from tests.compiled import by_row, compile_unit, rows
from tests.unit import simt_host
from tests.unit.simt_cases import TYPES


def _missing(arch: str) -> str | None:
    if vendor_of(arch) == "amd":
        absent = [p for p in ("ziglang", "triton", "msgpack") if importlib.util.find_spec(p) is None]
        return f"needs {', '.join(absent)}" if absent else None
    try:
        cuda.nvrtc()
    except BackendUnavailable as error:
        return str(error)
    return None


def _require(arch: str) -> None:
    reason = _missing(arch)
    if reason is not None:
        pytest.skip(reason)


def _check(artefact: Artefact, names: list[str], arch: str) -> None:
    usage = artefact.resources
    assert artefact.arch == arch
    if vendor_of(arch) == "nvidia":  # resources: the largest over the kernels
        assert artefact.kind == "cubin" and artefact.image[:4] == b"\x7fELF"
        assert all(f".text.{name}\0".encode() in artefact.image for name in names)
        assert 0 < usage["registers"] <= 255
        assert usage["spill_stores"] == 0, f"{names} spill {usage['spill_stores']} bytes"
        return
    kernels = resources.kernels(artefact.image)
    assert artefact.kind == "hsaco" and sorted(kernel[".name"] for kernel in kernels) == sorted(names)
    assert usage["wave"] == wave_of(arch) and 0 < usage["registers"] <= 256
    assert usage["scratch"] == 0, f"{names} use {usage['scratch']} bytes of scratch"
    # static shared memory is the reduction's partials, nothing else
    assert usage["shared"] <= 256
    # the launcher's arguments: 64-bit each, and numbers in 32
    for kernel in kernels:
        sizes = [a[".size"] for a in kernel[".args"] if not a[".value_kind"].startswith("hidden")]
        assert set(sizes) <= {4, 8} and sizes.count(4) == simt_host.numbers_of(kernel[".name"])


@pytest.mark.parametrize("binding", [nvrtc.CupyNvrtc, nvrtc.BindingsNvrtc])
def test_every_binding_of_nvrtc_gives_a_whole_cubin(binding: type[nvrtc.Nvrtc]) -> None:
    try:
        known = binding()
    except nvrtc.NOT_LOADABLE as error:
        pytest.skip(str(error))
    for scale in range(2, 6):  # names of other lengths: the file's length is any number of bytes
        name = "f" * scale
        source = f'extern "C" __global__ void {name}(float* x) {{ x[threadIdx.x] *= {scale}; }}'
        image, _ = known.compile(source, "f.cu", ["--gpu-architecture=sm_90a"])
        assert image is not None
        code_objects.check(image, "sm_90a")
        # an empty log is one byte: it may not be written into Python's own, of which there is one in a process
        assert [i for i in range(256) if bytes([i])[0] != i] == []
        with pytest.raises(ValueError, match="truncated"):
            code_objects.check(image[:-1], "sm_90a")
    image, log = known.compile("nonsense", "f.cu", ["--gpu-architecture=sm_90a"])
    assert image is None and "nonsense" in log


@pytest.mark.parametrize("arch", simt_offline.ARCHES)
def test_three_kernels_of_every_op(arch: str) -> None:
    _require(arch)
    units = simt_host.some_units(arch)
    assert len(units) >= 18
    for unit in units:
        artefact = compile_unit(unit, arch)
        assert artefact.kernel == unit.name
        _check(artefact, [unit.name], arch)


def _instructions(image: bytes, folder: Path) -> str:
    triton = pytest.importorskip("triton")
    file = folder / "unit.cubin"
    file.write_bytes(image)
    command = [triton.knobs.nvidia.nvdisasm.path, "-c", str(file)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
def test_an_overlapping_kernel_touches_no_memory_before_it_waits(tmp_path: Path) -> None:
    _require("sm_90")
    units = [u for u in simt_host.some_units("sm_90") if u.overlapping]
    # all that read weights at once, in the block of instructions that the wait stands in
    units += [u for u in simt_host.all_units("sm_90") if "norm_bf16_bf16_" in u.name and "_8_512_1_1_EXACT" in u.name]
    units += [u for u in hopper_kernels.units(simt_offline.target_for("sm_90")) if "_bf16_" in u.name]
    assert len({u.name.split("_")[0] for u in units}) >= 10 and all(u.overlapping for u in units)
    for unit in units:
        artefact = compile_unit(unit, "sm_90")
        text = _instructions(artefact.image, tmp_path)
        before, _, after = text.partition("ACQBULK")
        assert re.search(r"\b(LDG|UBLKCP|UTMALDG)", after) and re.search(r"\b(STG|UTMASTG)", after), unit.name
        assert not re.search(r"\b(LDG|STG|LDGSTS|UBLKCP|UTMA\w+|ATOMG|RED|LD|ST)\b", before), unit.name


# Of both waves one arch; those of rows are compiled there, and what a unit is made of is the same for all of wave 64.
WAVES = ("gfx90a", "gfx1100")


@pytest.mark.slow
@pytest.mark.alternate("arch", "part")
@pytest.mark.parametrize("arch", WAVES)
@pytest.mark.parametrize("part", (0, 1))
def test_every_kernel(arch: str, part: int) -> None:
    """Every other file for one wave a week; three kernels of every op are compiled for all arches each time."""
    _require(arch)
    units = simt_host.all_units(arch)
    joined = simt_host.joined(units)
    assert sum(len(names) for _, names in joined) == len(units)
    for unit, names in joined[part::2]:
        _check(compile_unit(unit, arch), names, arch)


@pytest.mark.parametrize("arch", simt_offline.ARCHES)
def test_rows_compile_every_kernel_of_the_other_arches(arch: str) -> None:
    """The same units, none of which may spill."""
    units = {unit.name: unit for unit in simt_host.all_units(arch)}
    assert all(unit.spills_allowed == 0 for unit in units.values())
    if wave_of(arch) == 64:
        assert units == {unit.name: unit for unit in simt_host.all_units("gfx90a")}
    if arch not in WAVES:
        backend = "cuda" if vendor_of(arch) == "nvidia" else "hip"
        known = rows(backend)[arch]
        listed = by_row(known, backend, groups.families_of(None), groups.ANY_DTYPE)
        assert all(listed[name] == unit for name, unit in units.items())
        assert known.vendor == "amd" or known.registers_per_thread == 255


def test_units_cover_every_combination_of_dtypes() -> None:
    names = [u.name for u in simt_host.all_units("gfx942")]
    assert len(set(names)) == len(names)
    wanted = [start for m in families.modules("simt_cases").values() for x in TYPES for start in m.compiled(x)]
    assert len(wanted) > 100 and [start for start in wanted if not any(n.startswith(start) for n in names)] == []


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_bad_source_gives_the_compilers_log(arch: str) -> None:
    _require(arch)
    with pytest.raises(CompileError, match="nonsense") as caught:
        simt_offline.compile_unit(Unit("broken", "nonsense here;"), arch)
    assert caught.value.arch == arch and "error" in caught.value.log


def test_a_wave_width_is_required() -> None:
    _require("gfx942")
    unit = simt_host.some_units("gfx942")[0]
    with pytest.raises(CompileError, match="must define FERRYMAN_WAVE"):
        simt_offline.compile_unit(unit._replace(source="#undef FERRYMAN_WAVE\n" + unit.source), "gfx942")


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real: Any = importlib.util.find_spec
    monkeypatch.setattr(simt_offline.importlib.util, "find_spec", lambda n: None if n == "ziglang" else real(n))
    simt_offline.tools.cache_clear()
    with pytest.raises(BackendUnavailable, match="pip install ziglang triton"):
        simt_offline.compile_unit(Unit("u", ""), "gfx942")
    simt_offline.tools.cache_clear()


@pytest.mark.parametrize(
    ("arch", "version"), [("gfx90a", 9010), ("gfx942", 9402), ("gfx950", 9500), ("gfx1100", 11000)]
)
def test_isa_version(arch: str, version: int) -> None:
    assert simt_offline._isa_version(arch) == version
    assert f"@__oclc_ISA_version = linkonce_odr hidden local_unnamed_addr addrspace(4) constant i32 {version}\n" in (
        simt_offline._controls(arch)
    )


def test_unknown_architectures_are_typed_errors() -> None:
    for arch in ("gfx", "sm_", "avx512"):
        with pytest.raises(ArgumentError):
            simt_offline.compile_unit(Unit("u", ""), arch)


def test_metadata_of_what_is_no_code_object() -> None:
    with pytest.raises(ValueError, match="not a 64-bit ELF"):
        resources.kernels(b"nonsense")


def test_no_load_looks_like_arithmetic_to_the_compiler() -> None:
    """LLVM moves an asm that is not volatile out of its `if`, and layer_norm so read past its weights."""
    text = (simt.HERE / "portable.cuh").read_text()
    assert len(re.findall(r'asm volatile\(\s*"ld', text)) >= 5 and not re.findall(r'asm\(\s*"ld', text)
