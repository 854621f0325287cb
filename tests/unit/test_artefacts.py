"""Kernels compiled ahead of time serve launches that match, and nothing else: manifests, damaged files, the JIT."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ferryman.backends import artefacts, code_objects, simt_offline, triton_host
from ferryman.backends.simt import Unit, defines_for, launcher
from ferryman.backends.triton import jit_source
from ferryman.device_profiles import profile
from ferryman.dispatch.select import target_of
from ferryman.errors import ArtefactError, CompileError
from ferryman.ops.rope import simt_kernels as rope
from ferryman.ops.rope import triton_kernels as rope_triton
from ferryman.porting import aot
from tests import compiled
from tests.compiled import compile_unit

WORKER = Path(__file__).with_name("artefacts_worker.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """rope in bfloat16 by Triton for an H200, and in all dtypes by HIP for an MI300X."""
    kept, compilation = compiled.rope(tmp_path_factory)
    out = tmp_path_factory.mktemp("artefacts")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FERRYMAN_CACHE_DIR", str(kept))
        aot.write(compilation, out)
    return out


@pytest.fixture
def copy(folder: Path, tmp_path: Path) -> Path:
    shutil.copytree(folder, tmp_path / "artefacts")
    return tmp_path / "artefacts"


def change(folder: Path, do: Any) -> None:
    """Edits the manifest as somebody with an editor would."""
    raw = json.loads((folder / "manifest.json").read_text())
    do(raw)
    (folder / "manifest.json").write_text(json.dumps(raw))


def jit(profile: str, artefacts_folder: Path | None, cache: Path, dtype: str = "bfloat16") -> dict[str, Any]:
    """What Triton's JIT does in a fresh process with an empty cache (artefacts_worker.py)."""
    env = {**os.environ, "TRITON_CACHE_DIR": str(cache), "OMP_NUM_THREADS": "1"}
    if artefacts_folder is not None:
        env["FERRYMAN_ARTEFACTS"] = str(artefacts_folder)
    command = [sys.executable, str(WORKER), profile, "rope", dtype]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report: dict[str, Any] = json.loads(done.stdout)
    return report


# ---------------------------------------------------------------------------------------------------- Triton's own JIT


@pytest.mark.parametrize("profile", ["h200", "mi300x"])
def test_a_launch_that_matches_compiles_nothing(folder: Path, tmp_path: Path, profile: str) -> None:
    report = jit(profile, folder, tmp_path)
    assert report["compiled"] == [] and report["warnings"] == [] and report["refused"] == []
    # every launch was served by an ELF file, under the very key that the JIT's arguments have
    assert len(report["loaded"]) >= 40 and set(report["loaded"]) == {b"\x7fELF".hex()}
    assert all(report["keys"])
    # and so is the C module that Triton builds for its signature, and its driver's; AMD's are built on the machine
    assert report["hosted"] == [True] * (2 * len(report["loaded"]) if profile == "h200" else 0)
    assert not list(tmp_path.iterdir())  # Triton's own cache stays empty


@pytest.mark.parametrize(("profile", "dtype"), [("l4", "bfloat16"), ("h200", "float16")])
def test_a_launch_that_does_not_match_is_compiled(folder: Path, tmp_path: Path, profile: str, dtype: str) -> None:
    report = jit(profile, folder, tmp_path, dtype)
    assert report["loaded"] == [] and len(report["compiled"]) >= 40 and report["warnings"] == []


def test_damaged_and_refused_artefacts(copy: Path, tmp_path: Path) -> None:
    entries = [e for e in artefacts.read(copy).entries if e.profile == "h200"]
    cut, swapped, gone, blank, failing = entries[0], entries[1], entries[2], entries[3], entries[4]
    path = copy / str(cut.file)
    path.write_bytes(path.read_bytes()[:-100])
    (copy / str(swapped.file)).write_bytes((copy / str(entries[5].file)).read_bytes())  # another kernel's code
    (copy / str(gone.file)).unlink()
    (copy / str(blank.metadata)).unlink(missing_ok=True)

    def fail(raw: Any) -> None:
        for entry in raw["entries"]:
            if entry["key"] == failing.key:
                entry.update(verdict="FAIL", reason="shared: 300000 bytes a block, required at most 232448")

    change(copy, fail)
    report = jit("h200", copy, tmp_path / "cache")
    damaged = {e.key for e in entries if not (copy / str(e.file)).exists() or e.key in (cut.key, swapped.key)}
    damaged |= {e.key for e in entries if not (copy / str(e.metadata)).exists()}
    assert len(report["warnings"]) == len(damaged - {failing.key})  # one for each kernel, not for each launch
    assert all("is not used (" in text and "compiling instead" in text for text in report["warnings"])
    assert set(report["refused"]) == {
        "refused by its resource gates: shared: 300000 bytes a block, required at most 232448"
    }
    assert report["compiled"] and report["loaded"]


# --------------------------------------------------------------------------------------- Triton's modules for the host


@pytest.fixture
def building(copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[str, str], bytes]]:
    """Triton's own build step, with the artefacts and no C compiler; gives the bytes of what it made."""
    knobs, build = pytest.importorskip("triton.knobs"), pytest.importorskip("triton.runtime.build")
    monkeypatch.setenv("FERRYMAN_ARTEFACTS", str(copy))
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setattr(triton_host, "_unloadable", lambda path: None)  # libcuda is not here

    def built(name: str, text: str) -> bytes:
        (tmp_path / "given.c").write_text(text)
        return Path(build._build(name, str(tmp_path / "given.c"), str(tmp_path), [], [], [], [])).read_bytes()

    with knobs.build.scope():
        for _ in range(2):
            triton_host.serve()
        assert knobs.build.impl.before is None  # there once
        yield built


def launcher_of_rope() -> tuple[str, str]:
    target = target_of(profile("h200"))
    source = next(s for s in rope_triton.specialisations(target, "bfloat16"))
    return triton_host.LAUNCHER, triton_host.texts(jit_source(source, "sm_90"))[triton_host.LAUNCHER]


def test_triton_takes_its_modules_from_the_artefacts(
    building: Callable[[str, str], bytes], copy: Path, recwarn: pytest.WarningsRecorder
) -> None:
    name, text = launcher_of_rope()
    module = next(m for m in artefacts.read(copy).modules if m.source == triton_host.digest(text))
    driver = [m for m in artefacts.read(copy).modules if m.name == triton_host.DRIVER]
    assert module.name == name and len(driver) == 1 and {module.abi, driver[0].abi} == {triton_host.abi()}
    path = copy / str(module.file)
    image = path.read_bytes()
    assert building(name, text) == image and image.startswith(b"\x7fELF") and b"libcuda.so.1" in image
    assert not [w for w in recwarn if "artefact" in str(w.message)]
    # another text is built; so is what is damaged, or gone
    with pytest.raises(FileNotFoundError, match="/no/such/compiler"):
        building(name, text + "\n")
    for damage in (lambda: path.write_bytes(image[:-1]), path.unlink):
        damage()
        artefacts._opened.cache_clear()
        with (
            pytest.warns(UserWarning, match="Triton's __triton_launcher in .* is not used"),
            pytest.raises(FileNotFoundError, match="/no/such/compiler"),
        ):
            building(name, text)


def test_a_module_that_cannot_be_loaded_is_built_here(
    building: Callable[[str, str], bytes], copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()  # with libcuda away, as with another libc
    monkeypatch.setenv("CC", "/no/such/compiler")
    monkeypatch.setenv("FERRYMAN_ARTEFACTS", str(copy))
    if triton_host._unloadable(Path("libcuda.so.1")) is None:
        pytest.skip("NVIDIA's driver is here")
    with (
        pytest.warns(UserWarning, match="Triton's __triton_launcher in .* is not used .libcuda.so.1: cannot open"),
        pytest.raises(FileNotFoundError, match="/no/such/compiler"),
    ):
        building(*launcher_of_rope())


def test_modules_for_another_python_are_built_here(
    building: Callable[[str, str], bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_host, "abi", lambda: "cpython-399-x86_64-linux-gnu")
    for turn in range(2):  # told once
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with pytest.raises(FileNotFoundError, match="/no/such/compiler"):
                building(*launcher_of_rope())
        messages = [str(w.message) for w in said]
        assert len(messages) == (turn == 0)
        assert all("and this is cpython-399-x86_64-linux-gnu" in text for text in messages)


def test_a_users_own_way_to_build_comes_after_the_artefacts(
    building: Callable[[str, str], bytes], copy: Path, tmp_path: Path
) -> None:
    import triton

    (tmp_path / "own.so").write_bytes(b"the user's")
    triton.knobs.build.impl = lambda *given: str(tmp_path / "own.so")
    triton_host.serve()
    name, text = launcher_of_rope()
    assert building(name, text).startswith(b"\x7fELF")
    assert building(name, "int x;\n") == b"the user's"


def test_a_module_that_cannot_be_built_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "/no/such/compiler")
    with pytest.raises(CompileError, match="/no/such/compiler"):
        triton_host.build(*launcher_of_rope())
    monkeypatch.delenv("CC")
    with pytest.raises(CompileError, match="CalledProcessError"):
        triton_host.build("__triton_launcher", "this is no C")


# ---------------------------------------------------------------------------------------------------------- the folder


def test_a_folder_that_cannot_be_used_says_why_once(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: list[tuple[Any, str]] = [
        (lambda raw: raw.update(schema_version=2), "schema_version is 2; required: 1"),
        (lambda raw: raw["entries"][0].update(file="objects/../../x.cubin"), r"invalid at entries\.0\.file"),
        (lambda raw: raw["entries"][0].update(key="short"), r"invalid at entries\.0\.key"),
        (lambda raw: raw.update(extra=1), "invalid at extra"),
        (lambda raw: raw.pop("entries"), "invalid at entries"),
    ]
    original = (copy / "manifest.json").read_bytes()
    for do, message in bad:
        (copy / "manifest.json").write_bytes(original)
        change(copy, do)
        with pytest.raises(ArtefactError, match=message):
            artefacts.read(copy)
    (copy / "manifest.json").write_bytes(original[:1000])
    with pytest.raises(ArtefactError, match="is not JSON: .*; run `ferryman compile --out` again"):
        artefacts.read(copy)
    with pytest.raises(ArtefactError, match="cannot be read"):
        artefacts.read(tmp_path / "nowhere")
    monkeypatch.setenv("FERRYMAN_ARTEFACTS", str(tmp_path / "nowhere"))
    artefacts._opened.cache_clear()
    with pytest.warns(UserWarning, match="artefacts are not used: .*nowhere/manifest.json cannot be read"):
        assert artefacts.store() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert artefacts.store() is None


def test_an_image_for_another_arch_is_not_loaded(copy: Path) -> None:
    """A manifest whose hashes are right, and whose code is for another device."""
    manifest = artefacts.read(copy)
    entry = next(e for e in manifest.entries if e.profile == "h200")
    foreign = (copy / str(next(e.file for e in manifest.entries if e.backend == "hip"))).read_bytes()
    digest = hashlib.sha256(foreign).hexdigest()
    (copy / f"objects/{digest}.cubin").write_bytes(foreign)
    wrong = entry.model_copy(update={"file": f"objects/{digest}.cubin", "sha256": digest})
    with pytest.warns(UserWarning, match="code for gfx942; required: sm_90"):
        assert artefacts.Store(copy).image(wrong) is None


# ---------------------------------------------------------------------------------------------------------------- SIMT


class Runtime(launcher.LoadedUnits):
    """Loads nothing; says what it would load, and what it would have had to compile."""

    backend = "hip"

    def __init__(self) -> None:
        super().__init__()
        self.built: list[str] = []

    def device_arch(self, index: int) -> str:
        return "gfx942"

    def toolchain(self) -> str:
        return "a toolchain"

    def build(self, unit: Unit, arch: str) -> bytes:
        self.built.append(unit.name)
        return compile_unit(unit, arch).image

    def open(self, image: bytes, unit: Unit) -> Any:
        return image

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
        raise AssertionError("nothing is launched here")


def test_a_simt_unit_is_taken_from_the_folder_without_its_toolchain(
    copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRYMAN_ARTEFACTS", str(copy))
    monkeypatch.setenv("FERRYMAN_CACHE_DIR", str(tmp_path / "cache"))
    artefacts._opened.cache_clear()
    target = simt_offline.target_for("gfx942")
    unit, other, third, *_ = rope.units(target)
    runtime = Runtime()
    monkeypatch.setattr(runtime, "toolchain", lambda: pytest.fail("the toolchain was asked for its version"))
    image = runtime._image(unit, "gfx942")
    assert runtime.built == [] and unit.name.encode() in image and code_objects.arch_of(image) == "gfx942"
    monkeypatch.undo()
    monkeypatch.setenv("FERRYMAN_ARTEFACTS", str(copy))
    monkeypatch.setenv("FERRYMAN_CACHE_DIR", str(tmp_path / "cache"))
    # another source under the same name, another arch: compiled
    changed = unit._replace(source=unit.source + "\n// changed\n")
    assert runtime._image(changed, "gfx942") and runtime.built == [unit.name]
    assert code_objects.arch_of(runtime._image(unit, "gfx90a")) == "gfx90a" and len(runtime.built) == 2
    # damaged: a warning, and compiled; refused by its gates: an error, which dispatch quarantines
    store = artefacts.store()
    assert store is not None
    keys = [artefacts.simt_key("gfx942", defines_for(u, "gfx942"), u.source) for u in (other, third)]
    entry = store.find(keys[0], "hip", "gfx942")
    assert entry is not None
    (copy / str(entry.file)).write_bytes(b"\x7fELF")
    with pytest.warns(UserWarning, match=f"artefact of {other.name} for gfx942 .* compiling instead"):
        assert runtime._image(other, "gfx942")
    assert runtime.built[-1] == other.name

    def fail(raw: Any) -> None:
        for one in raw["entries"]:
            if one["key"] == keys[1]:
                one.update(verdict="FAIL", reason="vgpr_spills: 9 registers, required at most 0")

    change(copy, fail)
    artefacts._opened.cache_clear()
    with pytest.raises(CompileError, match="refused by its resource gates: vgpr_spills: 9 registers"):
        runtime._image(third, "gfx942")
    artefacts._opened.cache_clear()


# -------------------------------------------------------------------------------------------------------- code objects


@pytest.mark.parametrize("arch", simt_offline.ARCHES)
def test_code_objects_are_whole_and_for_their_arch(arch: str) -> None:
    unit = rope.units(simt_offline.target_for(arch))[0]
    image = compile_unit(unit, arch).image
    code_objects.check(image, arch)
    assert code_objects.arch_of(image) == arch
    assert 500 < code_objects.code_bytes(image) < len(image)
    other = "sm_75" if arch != "sm_75" else "sm_80"
    with pytest.raises(ValueError, match=f"code for {arch}; required: {other}"):
        code_objects.check(image, other)
    for length in (0, 3, 60, 64, 500, len(image) // 2, len(image) - 1):
        with pytest.raises(ValueError, match=r"not a 64-bit ELF file|truncated"):
            code_objects.check(image[:length], arch)


def test_an_elf_file_of_another_machine() -> None:
    with pytest.raises(ValueError, match="an ELF file for machine"):
        code_objects.arch_of(Path(sys.executable).resolve().read_bytes())


_CHAIN = """
import triton
import triton.language as tl
FACTOR = tl.constexpr({factor})
@triton.jit
def inner(x):
    return x {operator} FACTOR
@triton.jit
def middle(x):
    return inner(x)
@triton.jit
def outer(x):
    return middle(x)
@triton.jit
def kernel(p):
    tl.store(p, outer(tl.load(p)))
"""


def _chain(folder: Path, factor: int = 2, operator: str = "*", first: str = "") -> str:
    """`triton_artefacts.code` of a kernel, in a process that asked for Triton's key of another function first."""
    (folder / "chain.py").write_text(_CHAIN.format(factor=factor, operator=operator))
    prelude = f"chain.{first}.cache_key; " if first else ""
    script = f"import chain; {prelude}from ferryman.backends import triton_artefacts as t; print(t.code(chain.kernel))"
    path = os.pathsep.join([str(folder), *sys.path])
    environment = {**os.environ, "PYTHONPATH": path, "TRITON_INTERPRET": "0", "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    return done.stdout.strip()


def test_a_triton_kernels_key_follows_from_its_code_alone(tmp_path: Path) -> None:
    plain = _chain(tmp_path)
    assert len(plain) == 64 and {_chain(tmp_path, first=name) for name in ("inner", "outer")} == {plain}
    assert len({plain, _chain(tmp_path, factor=3), _chain(tmp_path, operator="+")}) == 3
