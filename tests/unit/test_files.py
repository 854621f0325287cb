"""Files that others wrote: bounded in memory and time, whole, and no code from where another user can write."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from pydantic import BaseModel, FailFast

import ferryman
from ferryman import files, settings
from ferryman.backends import artefacts, triton_artefacts
from ferryman.backends.simt import launcher
from ferryman.dispatch import lockfile_document
from ferryman.errors import ArtefactError, CapsuleError, FerrymanError, LockfileError, ResultError, SettingError
from ferryman.porting.bench import document as bench
from ferryman.porting.capsule import compare, container
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule.replay_results import load as load_replay
from ferryman.porting.ci import history, merged, perf, record
from ferryman.porting.fingerprint import document as fingerprint
from ferryman.porting.judging import results
from ferryman.porting.judging.printable import printable

READERS: dict[str, tuple[Callable[[Path], object], type[FerrymanError]]] = {
    "results": (results.load, ResultError),
    "replay": (load_replay, ResultError),
    "bench": (bench.load, ResultError),
    "fingerprint": (fingerprint.load, ResultError),
    "lockfile": (lockfile_document.load, LockfileError),
    "capsule": (capsule.load, CapsuleError),
    "compare": (lambda p: compare.compare([p, p]), FerrymanError),
    "artefacts": (lambda p: artefacts.read(p.parent), ArtefactError),
}


@pytest.mark.parametrize("reader", READERS)
def test_a_pipe_is_refused_and_not_waited_for(reader: str, tmp_path: Path) -> None:
    load, error = READERS[reader]
    path = tmp_path / "manifest.json"
    os.mkfifo(path)
    with pytest.raises(error, match="no regular file"):
        load(path)  # nobody writes there: to wait would be to wait for pytest's time limit


def large() -> Iterator[bytes]:
    yield b"[" + b"{}," * 10_000_000 + b"{}]"
    yield b"[" + b"[]," * 10_000_000 + b"[]]"
    yield b"[" + b"0," * 12_000_000 + b"0]"
    yield b'{"kind": "ferryman-results", "schema_version": 2, "cells": [' + b"0," * 1_000_000 + b"0]}"  # that are none
    yield b"{" + b",".join(b'"%d": 0' % i for i in range(900_000)) + b"}"


def test_documents_that_would_take_gigabytes_are_refused_by_count(tmp_path: Path) -> None:
    """In a process of its own, whose peak is its alone."""
    paths = []
    for number, content in enumerate(large()):
        paths.append(tmp_path / f"{number}.json")
        paths[-1].write_bytes(content)
    script = (
        "import resource, sys, time\n"
        "from ferryman.errors import ResultError\n"
        "from ferryman.porting.judging import results\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "for path in sys.argv[1:]:\n"
        "    began = time.process_time()\n"
        "    try:\n        results.load(path)\n"
        "    except ResultError as error:\n        assert len(str(error)) < 600, error\n"
        "    else:\n        raise SystemExit(f'{path} was read')\n"
        "    assert time.process_time() - began < 5, path\n"
        "print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)\n"
    )
    command = [sys.executable, "-c", script, *map(str, paths)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 250


def test_a_small_capsule_that_inflates_is_refused(tmp_path: Path) -> None:
    manifest = '{"kind": "ops", "cases": [' + "{}," * 5_000_000 + "{}]}"
    raw = container.pack(manifest, {})
    assert len(raw) < 100_000
    began = time.process_time()
    with pytest.raises(CapsuleError, match=f"values; required: at most {files.MOST_VALUES}"):
        capsule.loads(raw)
    assert time.process_time() - began < 5


def test_a_cell_that_stands_twice_is_found_in_linear_time() -> None:
    cell = {"op": "o", "implementation": "i", "device": "cpu", "dtype": "f32", "verdict": "PASS"}
    cells = [results.Cell.model_validate({**cell, "case": f"c{n}"}) for n in range(8_000)]
    facts = results.Environment(
        device="cpu",
        device_name="",
        profile="",
        arch="",
        vendor="",
        versions={},
        flags={},
        platform="",
        time="",
        seed=0,
        tier="",
    )
    text = results.dumps(results.results(facts, [*cells, cells[-1]]))
    began = time.process_time()
    with pytest.raises(ResultError, match="c7999 stands twice"):
        results.parse(json.loads(text))
    assert time.process_time() - began < 5  # 8,000 counts of 8,000 took 10 s


def lists_of_models(model: type[BaseModel], seen: set[type]) -> Iterator[tuple[str, bool]]:
    """(field, whether the first wrong item ends its validation or few are allowed) of a document, at any depth."""
    if model in seen:
        return
    seen.add(model)
    for name, field in model.model_fields.items():
        inner = [part for part in (field.annotation, *get_args(field.annotation)) if isinstance(part, type)]
        models = [part for part in inner if issubclass(part, BaseModel)]
        if models and get_origin(field.annotation) is list:
            few = any(getattr(m, "max_length", None) is not None and m.max_length <= 1000 for m in field.metadata)
            yield f"{model.__name__}.{name}", few or any(isinstance(m, FailFast) for m in field.metadata)
        for one in models:
            yield from lists_of_models(one, seen)


def test_a_list_of_wrong_items_is_one_error() -> None:
    """50,000 empty objects, 200 KB, were 300,000 errors in 280 MB."""
    documents = (
        *(results.Results, bench.Benchmark, fingerprint.Fingerprint, capsule.Manifest, artefacts.Manifest),
        *(history.History, merged.Merged, perf.Baseline, record.Record),
    )
    lists = [one for document in documents for one in lists_of_models(document, set())]
    assert len(lists) >= 20 and [name for name, bounded in lists if not bounded] == []


NO_JSON = [b'{"a": NaN}', b'{"a": 1, "a": 2}', b'{"a": ' + b"9" * 6000 + b"}", b"\xff", b"[" * 9999]


@pytest.mark.parametrize("text", NO_JSON)
def test_what_is_no_json_is_a_value_error(text: bytes, tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(text)
    with pytest.raises(files.Unreadable, match="is not JSON"):
        files.document(path)


def test_texts_of_documents_say_nothing_to_terminals_and_logs() -> None:
    said = printable({"a\nb": ["x\n::error title=t::m", "::error::m", " ##[group]x", "\x1b[31mred", 3, {"d": "\r\n"}]})
    assert said == {"a | b": ["x | ::error title=t::m", r"\::error::m", r"\ ##[group]x", "\ufffd[31mred", 3, {"d": ""}]}


# --- code comes from no stranger ------------------------------------------------------------


def to_another(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if os.geteuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        me = os.geteuid()
        monkeypatch.setattr(files.os, "geteuid", lambda: me + 1)


@pytest.mark.skipif(sys.version_info < (3, 11), reason="no TOML reader")
@pytest.mark.parametrize("key", ["artefacts", "cache_dir"])
def test_the_working_directory_names_no_code(key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    (tmp_path / "pyproject.toml").write_text(f'[tool.ferryman]\n{key} = "evil"\n')
    settings.forget()
    with pytest.raises(SettingError, match=rf"{key} would load code .*; set FERRYMAN_{key.upper()}, or {key} in "):
        settings.get(key)
    (tmp_path / "pyproject.toml").write_text('[tool.ferryman]\nbackend = "torch"\n')
    own = tmp_path / "config" / "ferryman" / "config.toml"
    own.parent.mkdir(parents=True)
    own.write_text(f'{key} = "/mine"\nbackend = "definition"\n')
    settings.forget()
    assert settings.get(key) == Path("/mine") and settings.get("backend") == ("torch",)
    assert str(own) in settings.origin(key)
    monkeypatch.setenv(f"FERRYMAN_{key.upper()}", "/other")
    assert settings.get(key) == Path("/other") and settings.origin(key) == "environment"
    own.write_text("artefact = 1\n")
    settings.forget()
    with pytest.raises(FerrymanError, match=r"config\.toml: 'artefact'; nearest: artefacts"):
        settings.get("strict")
    monkeypatch.undo()
    ferryman.reload()


@pytest.mark.parametrize("how", ["another's", "writable"])
@pytest.mark.parametrize("what", [".", "objects", "manifest.json", "objects/file"])
def test_artefacts_that_another_could_have_written_are_refused(
    how: str, what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "artefacts"
    (folder / "objects").mkdir(parents=True)
    manifest = artefacts.Manifest(time="", toolchain={}, profiles=[], seconds=0, entries=[])
    (folder / "manifest.json").write_text(manifest.model_dump_json())
    (folder / "objects" / "file").write_bytes(b"")
    store = artefacts.Store(folder)
    if how == "writable":
        (folder / what).chmod(0o777)
    else:
        to_another(folder / what, monkeypatch)
    message = "writable by others" if how == "writable" else "belongs to user"
    if what == "objects/file":
        with pytest.raises(ValueError, match=message):
            store.content(what)
    else:
        with pytest.raises(ArtefactError, match=message):
            artefacts.Store(folder)


@pytest.mark.parametrize("how", ["another's", "writable", "homeless"])
def test_a_cache_that_another_could_have_written_is_not_used(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FERRYMAN_CACHE_DIR", str(tmp_path / "cache"))
    launcher.keep_image("k", b"image")
    assert launcher.cached_image("k") == b"image"
    if how == "writable":
        launcher.cache_directory().chmod(0o777)
    elif how == "another's":
        to_another(launcher.cache_directory(), monkeypatch)
    else:
        monkeypatch.delenv("FERRYMAN_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

        def unknown(path: Path) -> Path:
            raise RuntimeError("Could not determine home directory.")

        monkeypatch.setattr(Path, "expanduser", unknown)
    launcher._say_once.cache_clear()
    with pytest.warns(UserWarning, match="belongs to user|writable by others|no home is known"):
        assert launcher.cached_image("k") is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        launcher.keep_image("other", b"image")  # said once
    assert not (tmp_path / "cache" / "simt" / "other").exists()


def test_an_image_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FERRYMAN_CACHE_DIR", str(tmp_path))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(launcher.os, "replace", full)
    with pytest.warns(UserWarning, match="No space left"):
        launcher.keep_image("k", b"image")
    assert list(launcher.cache_directory().iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_fork_that_exits_leaves_its_parents_folders() -> None:
    script = (
        "import os, sys\nfrom ferryman.porting.aot import pool\nfrom ferryman.porting.mutate import sources\n"
        "echo = 'import sys; print({}, flush=True); sys.stdin.read()'\n"
        "worker = pool.Worker([sys.executable, '-c', echo])\nworker._start()\n"
        "folders = [sources._folder().path, worker._folder.path]\n"
        "child = os.fork()\n"
        "if child == 0:\n    sys.exit(0)\n"
        "os.waitpid(child, 0)\n"
        "assert all(folder.exists() for folder in folders), folders\n"
        "worker.stop()\nassert not folders[1].exists()\nprint(folders[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).exists()


# --- artefacts of Triton under threads ------------------------------------------------------------


def test_threads_that_build_one_kernel_read_whole_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each writes and reads files of its own: no other's half-written one, and none is left."""
    compiler = pytest.importorskip("triton.compiler")
    image, places, wrong = bytes(range(256)) * 4096, set(), []

    class Reading:
        def __init__(self, source: Any, group: dict[str, str], key: str) -> None:
            contents = {name.rsplit(".", 1)[1]: Path(path).read_bytes() for name, path in group.items()}
            places.add(Path(next(iter(group.values()))).parent)
            if contents["cubin"] != image or json.loads(contents["json"]) != {"name": "k"}:
                wrong.append(len(contents["cubin"]))

    monkeypatch.setattr(compiler, "CompiledKernel", Reading)

    def build() -> None:
        for _ in range(50):
            triton_artefacts.built(None, "k", {"cubin": image}, {"name": "k"}, "0" * 64)

    threads = [threading.Thread(target=build) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(places) == 400 and not any(place.exists() for place in places)


# --- packed documents -----------------------------------------------------------------------------


def test_a_packed_document_is_read_whole_or_refused(tmp_path: Path) -> None:
    packed, path = gzip.compress(b'{"cells": [1, 2]}'), tmp_path / "check.json.gz"
    path.write_bytes(packed)
    assert files.document(path) == {"cells": [1, 2]}
    damaged = packed[:12] + bytes(255 - byte for byte in packed[12:14]) + packed[14:]
    for data, message in (
        (packed[:-9], "cut"),
        (packed + packed, "follows"),
        (damaged, "gzip data is"),
        (gzip.compress(b"[" + b" " * 5000 + b"]"), "more than 1000 bytes"),  # a small file that unpacks to a large one
        (gzip.compress(b"no JSON"), "not JSON"),
    ):
        path.write_bytes(data)
        with pytest.raises(files.Unreadable, match=message):
            files.document(path, 1000)
