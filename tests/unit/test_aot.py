"""`ferryman compile`: targets, processes that die or hang, the cache, and the folder that it writes."""

from __future__ import annotations

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ferryman.backends import artefacts
from ferryman.device_profiles import catalogue
from ferryman.errors import ArgumentError, UnknownName
from ferryman.porting import aot
from ferryman.porting.aot import cache, groups, pool, targets
from tests import compiled

ARCHES = {"gfx942", "gfx950", "gfx90a", "gfx1100", "sm_80", "sm_87", "sm_89", "sm_90", "sm_100"}


def names(*words: str) -> list[tuple[str, str]]:
    return [(p.name, p.arch) for p in aot.profiles_for(words)]


def test_targets_are_profiles_aliases_and_arches() -> None:
    assert names("mi300x,H100") == [("mi300x", "gfx942"), ("h100-sxm", "sm_90")]
    assert names("gfx90a", "sm_100,orin-agx") == [
        ("generic-cdna2", "gfx90a"),
        ("generic-blackwell", "sm_100"),
        ("orin-agx", "sm_87"),
    ]
    assert names("gfx1151") == [("generic-rdna3.gfx1151", "gfx1151")]  # its family's profile stands for several arches
    assert names("mi300x", "MI300X,gfx942,gfx942") == [("mi300x", "gfx942"), ("generic-cdna3", "gfx942")]


def test_all_is_every_card_and_every_arch() -> None:
    profiles = aot.profiles_for(["all"])
    assert {p.name for p in catalogue().values() if not p.generic and p.vendor in ("nvidia", "amd")} <= {
        p.name for p in profiles
    }
    assert {p.arch for p in profiles} >= ARCHES


@pytest.mark.parametrize(
    ("words", "error", "message"),
    [
        ([], ArgumentError, "--target is ''; required: names of profiles, arches, or 'all'"),
        (["mi300x,"], ArgumentError, "--target is 'mi300x,'"),
        (["mi300"], UnknownName, "unknown device profile 'mi300'; nearest: mi300x"),
        (["sm_75"], UnknownName, "unknown device profile 'sm_75'"),
        (["cpu"], ArgumentError, "--target is cpu; required: an NVIDIA or AMD device"),
    ],
)
def test_a_target_that_is_none(words: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        aot.profiles_for(words)


def test_a_family_is_compiled_for_small_and_large_devices() -> None:
    (family,) = aot.profiles_for(["gfx90a"])
    assert [t.units for t in targets.launch_targets(family)] == [16, 72, 160]
    (card,) = aot.profiles_for(["mi300x"])
    assert [t.units for t in targets.launch_targets(card)] == [304]


# ------------------------------------------------------------------------------------ processes that are not compilers

READY = "import json, os, sys, time\ndef say(**a): print(json.dumps(a), flush=True)\nsay(ready=True)\n"
# Six kernels: what a toolchain can do to its process, and resources that no device has.
TOOLCHAIN = (
    READY
    + """
NAMES = ["good", "aborts", "hangs", "refused", "spills", "option"]
RESOURCES = {"registers": 64, "spills": 0, "shared": 1024, "threads": 128, "code_bytes": 4096}
for line in sys.stdin:
    request = json.loads(line)
    if "key" not in request:
        rows = [{"kernel": n, "key": f"{i:064x}", "spills_allowed": 4, "aligned": False} for i, n in enumerate(NAMES)]
        rows[5]["refused"] = "ArgumentError: options is ['bogus']"
        say(kernels=rows, modules={f"{6:064x}": "__triton_launcher"}, toolchain={"fake": "1"})
        continue
    name = [*NAMES, "launcher"][int(request["key"], 16)]
    if name == "launcher":
        say(error="Failed to find C compiler")
        continue
    if name == "aborts":
        sys.stderr.write("LLVM ERROR: Cannot select: 0x1234\\n")
        sys.stderr.flush()
        os.abort()
    if name == "hangs":
        time.sleep(600)
    if name == "refused":
        say(error="PassManager::run failed")
        continue
    used = {**RESOURCES, "spills": 8} if name == "spills" else RESOURCES
    say(entry="e" * 64, sha256="0" * 64, kind="cubin", metadata={}, resources=used, seconds=0.1, cached=False)
"""
)


def command(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_toolchain_that_dies_hangs_or_refuses_costs_its_kernel_alone() -> None:
    seen: list[str] = []
    began = time.monotonic()
    compilation = aot.compile_all(
        aot.profiles_for(["h200"]),
        ops=["rope"],
        backends=["cuda"],
        jobs=2,
        timeout=1.5,
        command=command(TOOLCHAIN),
        progress=lambda done, total, label: seen.append(f"{done}/{total} {label}"),
    )
    assert time.monotonic() - began < 60
    verdicts = {e.kernel: (e.verdict, e.reason) for e in compilation.manifest.entries}
    assert verdicts["good"] == ("COMPILED_ONLY", None)
    verdict, reason = verdicts["aborts"]
    assert verdict == "QUARANTINED" and "ended with code -6" in str(reason) and "Cannot select" in str(reason)
    assert verdicts["hangs"] == ("QUARANTINED", "no result within 2 s (time limit); its process was killed")
    assert verdicts["refused"] == ("QUARANTINED", "PassManager::run failed")
    assert verdicts["option"] == ("QUARANTINED", "ArgumentError: options is ['bogus']")
    assert verdicts["spills"] == ("FAIL", "spills: 8 bytes a thread, required at most 4")
    assert compilation.manifest.counts() == {"COMPILED_ONLY": 1, "FAIL": 1, "QUARANTINED": 4}
    assert compilation.manifest.toolchain == {"fake": "1"}
    launchers = [(m.name, m.file, m.reason) for m in compilation.manifest.modules]
    assert launchers == [("__triton_launcher", None, "Failed to find C compiler")]
    assert seen[0] == "1/1 listing h200 cuda rope" and sorted(seen[1:])[-1].startswith("7/7 ")


def test_a_worker_that_cannot_start_is_an_entry_for_all_its_kernels() -> None:
    compilation = aot.compile_all(
        aot.profiles_for(["h200"]), ops=["rope"], backends=["cuda"], command=command("raise SystemExit('no toolchain')")
    )
    (entry,) = compilation.manifest.entries
    assert (entry.kernel, entry.verdict) == ("all", "QUARANTINED")
    assert entry.reason == "its process ended with code 1: no toolchain"


def test_a_killed_worker_takes_its_children_and_starts_again(tmp_path: Path) -> None:
    mark = tmp_path / "alive"
    child = f"import time, pathlib; [(time.sleep(.2), pathlib.Path({str(mark)!r}).touch()) for _ in range(900)]"
    code = READY + (
        "import subprocess\nfor line in sys.stdin:\n"
        "    if 'go' in line: say(pid=os.getpid())\n"
        f"    else: subprocess.run([sys.executable, '-c', {child!r}])\n"
    )
    worker = pool.Worker(command(code))
    first = worker.ask({"group": "go"}, 10)["pid"]
    assert worker.ask({"group": "go"}, 10)["pid"] == first
    with pytest.raises(pool.Lost, match="time limit"):
        worker.ask({"group": "hang"}, 1.0)
    mark.unlink(missing_ok=True)
    time.sleep(0.6)
    assert not mark.exists()  # the compiler that it had started is gone too
    assert worker.ask({"group": "go"}, 10)["pid"] != first
    worker.stop()


def test_what_cannot_be_compiled_is_said_before_anything_starts() -> None:
    profiles = aot.profiles_for(["mi300x"])
    for given, error, message in (
        ({"backends": ["cuda"]}, ArgumentError, "--backend is cuda; required: one that has kernels .*: hip, triton"),
        ({"backends": ["cudda"]}, UnknownName, "unknown backend 'cudda'"),
        ({"ops": ["rms_nrom"]}, UnknownName, "nearest: rms_norm"),
        ({"ops": ["linear"], "backends": ["hip"]}, ArgumentError, "--backend is hip"),
    ):
        with pytest.raises(error, match=message):
            aot.compile_all(profiles, command=["/nowhere"], **given)  # type: ignore[arg-type]


# ----------------------------------------------------------------------------------------------------------- the cache


def test_the_cache_returns_what_was_kept_or_says_what_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRYMAN_CACHE_DIR", str(tmp_path))
    name = "ab" + "0" * 62
    assert cache.get(name) is None
    cache.put(name, {"kind": "cubin"}, b"\x7fELF\n\0image")
    assert cache.get(name) == ({"kind": "cubin"}, b"\x7fELF\n\0image")
    path = cache.folder() / "ab" / name
    whole = path.read_bytes()
    for damaged in (whole[:-1], b"", whole[:40] + b"x" + whole[41:]):
        path.write_bytes(damaged)
        with pytest.raises(cache.DamagedEntry, match=f"{name} is damaged: {len(damaged)} bytes"):
            cache.get(name)
    assert [p.name for p in path.parent.iterdir()] == [name]  # no temporary file is left


def test_the_cache_knows_source_target_and_toolchain(monkeypatch: pytest.MonkeyPatch) -> None:
    first = cache.key("k", "hip", "gfx942")
    assert first == cache.key("k", "hip", "gfx942")
    assert first not in (cache.key("l", "hip", "gfx942"), cache.key("k", "hip", "gfx950"))
    monkeypatch.setattr(cache, "toolchain", lambda backend, arch: {"ziglang": "9"})
    assert cache.key("k", "hip", "gfx942") != first


# -------------------------------------------------------------------------------------------- real kernels, end to end


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """(folder, what was compiled, the cache): rope in bfloat16 by Triton for Hopper and CDNA 3, and by HIP."""
    kept, compilation = compiled.rope(tmp_path_factory)
    own = tmp_path_factory.mktemp("cache")  # tests damage it
    shutil.copytree(kept, own, dirs_exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FERRYMAN_CACHE_DIR", str(own))
        out = tmp_path_factory.mktemp("artefacts")
        aot.write(compilation, out)
        yield out, compilation


def test_every_kernel_is_in_the_manifest_with_its_file(folder: Any) -> None:
    out, compilation = folder
    manifest = artefacts.read(out)
    assert manifest == compilation.manifest and manifest.counts()["COMPILED_ONLY"] == len(manifest.entries) > 60
    assert {(e.profile, e.arch, e.backend, e.kind) for e in manifest.entries} == {
        ("h200", "sm_90", "triton", "cubin"),
        ("mi300x", "gfx942", "triton", "hsaco"),
        ("mi300x", "gfx942", "hip", "hsaco"),
    }
    assert {"triton", "ptxas", "ziglang"} <= set(manifest.toolchain)
    store = artefacts.Store(out)
    for entry in manifest.entries:
        assert store.image(entry) is not None
        assert {"registers", "code_bytes"} <= set(entry.resources)
        gates = {gate.name for gate in entry.gates}
        assert {"registers", "code_bytes"} <= gates and all(gate.passed for gate in entry.gates)
        if entry.backend == "triton":
            assert entry.signature and entry.options["num_warps"] > 0 and "occupancy" in gates
    assert [m.reason for m in manifest.modules if m.file is None] == [] and len(manifest.modules) >= 2
    files = {e.file for e in (*manifest.entries, *manifest.modules)} | {
        e.metadata for e in manifest.entries if e.metadata
    }
    assert {f"objects/{p.name}" for p in (out / "objects").iterdir()} == files


def test_the_manifest_fits_the_published_schema(folder: Any) -> None:
    import jsonschema

    published = Path(__file__).resolve().parents[2] / "docs" / "schema" / f"artefacts-v{artefacts.SCHEMA_VERSION}.json"
    schema = json.loads(published.read_text("utf-8"))
    jsonschema.Draft202012Validator.check_schema(schema)
    raw = json.loads((folder[0] / "manifest.json").read_text())
    validator = jsonschema.Draft202012Validator(schema)
    assert list(validator.iter_errors(raw)) == []
    raw["entries"][0]["file"] = "../../etc/passwd"
    assert [list(e.absolute_path) for e in validator.iter_errors(raw)] == [["entries", 0, "file"]]


def test_a_second_run_compiles_nothing_and_rebuilds_what_is_damaged(
    folder: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, compilation = folder
    monkeypatch.setattr(groups, "DTYPES", ("bfloat16",))
    name = compilation.images[compilation.manifest.entries[0].file]
    spoilt = cache.folder() / name[:2] / name
    spoilt.write_bytes(spoilt.read_bytes()[:-5])
    again = aot.compile_all(aot.profiles_for(["h200"]), ops=["rope"], backends=["triton"], jobs=1)
    assert [e.cached for e in again.manifest.entries].count(False) == 1
    assert len(again.damaged) == 1 and spoilt.name in again.damaged[0]
    first = {e.key: e.sha256 for e in compilation.manifest.entries}
    assert all(first[e.key] == e.sha256 for e in again.manifest.entries)  # compilation is reproducible
    aot.write(again, tmp_path)
    (tmp_path / "objects" / ("f" * 64 + ".cubin")).write_bytes(b"of an older manifest")
    (tmp_path / "notes.txt").write_text("the user's own")
    aot.write(again, tmp_path)
    assert {p.name for p in tmp_path.iterdir()} == {"manifest.json", "objects", "notes.txt"}
    assert not (tmp_path / "objects" / ("f" * 64 + ".cubin")).exists()


def test_a_cache_that_loses_an_entry_leaves_the_old_folder(folder: Any, tmp_path: Path) -> None:
    out, compilation = folder
    (tmp_path / "manifest.json").write_text("the old one")
    name = next(iter(compilation.images.values()))
    path = cache.folder() / name[:2] / name
    whole = path.read_bytes()
    for damage, message in ((lambda: path.write_bytes(whole[:-1]), "is damaged"), (path.unlink, "the cache lost")):
        damage()
        with pytest.raises(OSError, match=f"{message}.*run it again"):
            aot.write(compilation, tmp_path)
        assert (tmp_path / "manifest.json").read_text() == "the old one"
    path.write_bytes(whole)
    assert artefacts.read(out) == compilation.manifest
