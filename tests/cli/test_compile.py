"""`ferryman compile` as a user meets it: bad targets, the table, exit codes, options that Triton would ignore."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from ferryman.backends import artefacts
from ferryman.porting.aot import groups, pool
from tests.cli.run import ferryman
from tests.unit.test_aot import TOOLCHAIN

# The worker with one configuration of rope that asks Triton for what it does not know, and one that no device can run.
MISTAKEN = """
import dataclasses
from ferryman.ops.rope import triton_kernels as rope
listed = rope.specialisations
def specialisations(target, dtype):
    first, second, third, *_ = listed(target, dtype)
    return [
        dataclasses.replace(first, options={**first.options, "wavs_per_eu": 2}),
        dataclasses.replace(second, num_warps=32),
        third,
    ]
rope.specialisations = specialisations
from ferryman.porting.aot import groups
groups.launched = lambda *given: {}  # no calls of models
from ferryman.porting.aot.worker import main
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "compile: --target is ''; required: names of profiles, arches, or 'all'"),
        (("--target", "mi300"), "unknown device profile 'mi300'; nearest: mi300x"),
        (("--target", "mi300x,,"), "compile: --target is 'mi300x,,'"),
        (("--target", "cpu"), "compile: --target is cpu"),
        (("--target", "mi300x", "--op", "rms_nrom"), "unknown op 'rms_nrom'"),
        (("--target", "mi300x", "--backend", "cuda"), "compile: --backend is cuda"),
    ],
)
def test_bad_use_is_one_message_and_writes_nothing(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    done = ferryman("compile", *arguments, "--out", str(tmp_path / "out"))
    assert (done.code, done.out) == (2, "") and done.err.startswith(f"ferryman: {says}")
    assert list(tmp_path.iterdir()) == []


def test_out_must_be_a_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine")
    done = ferryman("compile", "--target", "mi300x", "--out", str(tmp_path / "file"))
    assert done.code == 2 and "required: the name of a folder" in done.err
    assert (tmp_path / "file").read_text() == "mine"


def test_the_table_and_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-c", TOOLCHAIN])
    arguments = ("compile", "--target", "h200", "--op", "rope", "--backend", "cuda", "--timeout", "1", "--jobs", "1")
    done = ferryman(*arguments)
    assert done.code == 1 and done.err == ""
    assert "6 kernels for 1 targets in" in done.out
    row = next(line.split() for line in done.out.splitlines() if line.startswith("h200"))
    assert row == ["h200", "sm_90", "cuda", "1", "1", "4", "1", "0"]
    assert "FAIL h200 spills any (): spills: 8 bytes a thread, required at most 4" in done.out
    assert "QUARANTINED h200 hangs any (): no result within 1 s (time limit)" in done.out
    manifest = artefacts.Manifest.model_validate(json.loads(ferryman(*arguments, "--json").out))
    assert manifest.counts() == {"COMPILED_ONLY": 1, "FAIL": 1, "QUARANTINED": 4}


def test_options_that_triton_would_ignore_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(pool, "COMMAND", [sys.executable, "-c", MISTAKEN])
    monkeypatch.setattr(groups, "DTYPES", ("bfloat16",))
    done = ferryman(
        "compile",
        "--target",
        "mi300x",
        "--op",
        "rope",
        "--backend",
        "triton",
        "--json",
        "--out",
        str(tmp_path / "out"),
        FERRYMAN_CACHE_DIR=str(tmp_path / "cache"),
    )
    assert done.code == 1
    entries = json.loads(done.out)["entries"]
    assert [e["verdict"] for e in entries].count("COMPILED_ONLY") == 1
    refused = next(e for e in entries if e["verdict"] == "QUARANTINED")
    assert "options is ['wavs_per_eu']; required: options of gfx942" in refused["reason"]
    assert refused["file"] is None
    failed = next(e for e in entries if e["verdict"] == "FAIL")
    assert failed["reason"] == "threads: 2048 a block, required at most 1024"
    # what failed is in the folder's manifest, so that a launch is refused; what was never compiled has no file
    written = artefacts.read(tmp_path / "out")
    assert [e.model_dump() for e in written.entries] == entries
