"""The digest of an op's kernels: it changes with what launchers reach, and with nothing else."""

from __future__ import annotations

import importlib
import itertools
import json
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ferryman import files
from ferryman.device_profiles import resolve
from ferryman.dispatch import kernel_code, lockfile, lockfile_document, lockfile_entry, lockfile_migrate, registry
from ferryman.ops.moe import implementations as moe
from ferryman.ops.norm import implementations

KERNELS = '''
"""What it is."""
from other_kernels import helper as aid
from ferryman.backends.triton_lang import exp
import other_kernels as others

BLOCK = 32
FILE = "own.cuh"
if BLOCK > 16:
    WARPS = 4

def launch(x, target):
    """A docstring."""
    return aid(x) + others.second(x) + exp(BLOCK) + WARPS  # a comment

def in_cpp(x, target):
    return FILE

def sibling(x, target):
    return x
'''
OTHERS = """
STEP = 1

def helper(x):
    doubled = inner(x)
    return doubled + STEP

def inner(x):
    return x * 2

def second(x):
    return x

def apart(x):
    return x
"""

NUMBER = itertools.count()
SHIPPED = sorted(Path(lockfile_document.__file__).parents[1].glob("device_profiles/data/*.lock.json.gz"))


@pytest.fixture
def digest_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    """(kernels, others, C++, function) -> digest, of a package whose files are these."""
    monkeypatch.syspath_prepend(tmp_path)

    def digest(kernels: str = KERNELS, others: str = OTHERS, cpp: str = "int a;", function: str = "launch") -> str:
        package = f"kernels_of_{next(NUMBER)}"
        (tmp_path / package).mkdir()
        for name, text in (("__init__", ""), ("kernels", kernels), ("other_kernels", others)):
            text = text.replace("from other_", f"from {package}.other_").replace(
                "import other_", f"import {package}.other_"
            )
            (tmp_path / package / f"{name}.py").write_text(textwrap.dedent(text))
        (tmp_path / package / "own.cuh").write_text(cpp)
        importlib.invalidate_caches()
        line = SimpleNamespace(where=f"{package}.kernels:{function}")
        monkeypatch.setattr(registry, "implementations", lambda op: (line,))
        return kernel_code.digest.__wrapped__("an op")

    return digest


def test_what_no_launcher_reaches_does_not_count(digest_of) -> None:  # type: ignore[no-untyped-def]
    first = digest_of()
    assert digest_of(KERNELS.replace("return x\n", "return x + 1\n")) == first  # the sibling
    assert digest_of(others=OTHERS.replace("def apart(x):\n    return x", "def apart(x):\n    return 7")) == first
    assert digest_of(KERNELS.replace("# a comment", "").replace("A docstring", "Another")) == first
    assert digest_of(KERNELS.replace("+ exp(", "+\\\n            exp(")) == first
    assert digest_of(cpp="int b;") == first
    assert digest_of(KERNELS + "\ndef further(x, target):\n    return BLOCK\n") == first


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("BLOCK = 32", "BLOCK = 64"),
        ("WARPS = 4", "WARPS = 8"),
        ("+ WARPS", "- WARPS"),
        ("others.second", "others.apart"),
    ],
)
def test_a_launcher_and_its_constants_count(digest_of, before: str, after: str) -> None:  # type: ignore[no-untyped-def]
    assert digest_of(KERNELS.replace(before, after)) != digest_of()


@pytest.mark.parametrize(("before", "after"), [("x * 2", "x * 3"), ("STEP = 1", "STEP = 2"), ("inner(x)", "second(x)")])
def test_what_is_reached_through_other_files_counts(digest_of, before: str, after: str) -> None:  # type: ignore[no-untyped-def]
    assert digest_of(others=OTHERS.replace(before, after)) != digest_of()


def test_a_local_variables_name_does_not_count(digest_of) -> None:  # type: ignore[no-untyped-def]
    assert digest_of(others=OTHERS.replace("doubled", "product")) == digest_of()
    assert digest_of(others=OTHERS.replace("doubled", "apart")) != digest_of(), "its file has a function of that name"
    assert digest_of(others=OTHERS.replace("return doubled", "return x")) != digest_of()


def test_a_variable_that_hides_an_imported_module_is_named(digest_of) -> None:  # type: ignore[no-untyped-def]
    text = "import math\nimport cmath\n\ndef helper(x):\n    y = math.pi\n    math = x\n    return y + math\n"
    other = text.partition("def")[0] + "def" + text.partition("def")[2].replace("math", "cmath")
    assert digest_of(others=OTHERS.replace("def helper", "def before") + text) != digest_of(
        others=OTHERS.replace("def helper", "def before") + other
    )


def test_cpp_counts_without_its_comments(digest_of) -> None:  # type: ignore[no-untyped-def]
    first = digest_of(function="in_cpp")
    assert digest_of(function="in_cpp", cpp="int  a; // more\n/* of it */") == first
    assert digest_of(function="in_cpp", cpp="int b;") != first


def test_an_ops_parts_are_those_of_its_kernels() -> None:
    """Of real ops: the kernels that run, those that families share, the C++; and no launching code."""
    rms, backward = kernel_code.parts("rms_norm"), kernel_code.parts("rms_norm_backward")
    assert {"norm.cuh", "portable.cuh", "triton_lang.widen", "simt_kernels.rms_norm"} <= set(rms)
    assert "norm_backward.cuh" in backward and "norm_backward.cuh" not in rms
    assert not any(part.startswith(("triton.", "launcher.", "definition.")) for part in {**rms, **backward})


@pytest.mark.parametrize("file", SHIPPED, ids=lambda f: f.stem)
def test_a_lockfile_that_ships_was_measured_with_todays_kernels(file: Path) -> None:
    """A stale region is dead weight: its op runs as on a device that nobody tuned, and nothing says so.

    Who changes a kernel measures its regions again on the device (`ferryman tune`), or takes them out of the file.
    """
    document = lockfile_document.load(file)
    assert resolve(str(document.stamp["profile"])).vendor
    stale = {
        (op, why)
        for op, entries in document.choices.items()
        for region, entry in entries.items()
        if (why := lockfile_document.stale(op, entry, region)) is not None
    }
    assert not stale and document.choices


def test_a_region_holds_while_the_lines_that_it_tried_are_what_was_measured() -> None:
    """A line that came since changes none of its times; one that it tried does."""
    document = lockfile_document.load(next(file for file in SHIPPED if file.name == "h200.lock.json.gz"))
    op = "layer_norm_backward"
    region, entry = next(iter(document.choices[op].items()))
    tried = frozenset(c.implementation for c in entry.candidates)
    assert "triton.rows" in tried < {line.name for line in registry.implementations(op)}

    def reason(names: frozenset[str]) -> str | None:
        measured = entry.model_copy(update={"kernels": kernel_code.digest(op, names)})
        return lockfile_document.stale(op, measured.sealed(op, region), region)

    assert kernel_code.digest(op, tried) != kernel_code.digest(op)
    assert reason(tried) is None
    assert reason(tried - {"triton.rows"}) == "its kernels changed since it was measured"


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("measured", ["with these kernels", "before"])
def test_a_lockfile_of_an_earlier_version_keeps_its_times(version: int, measured: str, tmp_path: Path) -> None:
    shipped = next(file for file in SHIPPED if file.name == "h200.lock.json.gz")
    raw = files.document(shipped)
    region, entry = next(iter(raw["choices"]["rms_norm_backward"].items()))
    earlier = {4: lockfile_migrate._raw_digest, 5: lockfile_migrate._parsed_digest}[version]
    entry["kernels"] = earlier("rms_norm_backward") if measured == "with these kernels" else "0" * 64
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({**raw, "version": version, "choices": {"rms_norm_backward": {region: entry}}}))
    migrated = lockfile_migrate.migrate(path)
    (after,) = lockfile_document.load(path).choices["rms_norm_backward"].values()
    assert (migrated.valid, migrated.stale) == ((1, 0) if measured == "with these kernels" else (0, 1))
    assert (after.seconds, len(after.candidates)) == (entry["seconds"], len(entry["candidates"]))
    assert (after.kernels == kernel_code.digest("rms_norm_backward")) is (migrated.valid == 1)


@pytest.mark.parametrize("measured", ["all lines", "those tried", "as they were called before"])
def test_version_7_counted_the_names_of_local_variables(measured: str, tmp_path: Path) -> None:
    shipped = next(file for file in SHIPPED if file.name == "h200.lock.json.gz")
    raw, op = files.document(shipped), "layer_norm_backward"
    region, entry = next(iter(raw["choices"][op].items()))
    lines = frozenset(c["implementation"] for c in entry["candidates"]) if measured == "those tried" else None
    entry["kernels"] = kernel_code.digest(op, lines, by_name=True)
    if measured == "as they were called before":
        _, (_, entry["kernels"]) = implementations.SAME_KERNELS[op]
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({**raw, "version": 7, "choices": {op: {region: entry}}}))
    migrated = lockfile_migrate.migrate(path)
    after = lockfile_document.load(path).choices[op][region]
    assert (migrated.valid, migrated.stale) == (1, 0)
    assert entry["kernels"] != after.kernels == kernel_code.digest(op, lines)
    assert lockfile_document.stale(op, after, region) is None and after.seconds == entry["seconds"]


def test_earlier_code_launched_the_kernels_of_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """After an edit of a kernel they are not today's any more."""
    op = registry.primitive("rms_norm_backward")
    then, earlier = implementations.SAME_KERNELS[op.name]
    assert then == kernel_code.digest(op.name) and lockfile_migrate._same_kernels(op) == earlier
    monkeypatch.setitem(implementations.SAME_KERNELS, op.name, ("0" * 64, earlier))
    assert lockfile_migrate._same_kernels(op) == ()


@pytest.mark.parametrize("measured", ["with these kernels", "before"])
def test_what_a_launcher_chose_between_has_names_of_its_own(measured: str, tmp_path: Path) -> None:
    """In version 6 "triton" was whichever of its kernels served a call of the region."""
    shipped = next(file for file in SHIPPED if file.name == "h200.lock.json.gz")
    raw = files.document(shipped)
    op = "rms_norm_backward"
    choices: dict[str, Any] = {}
    for region, entry in raw["choices"][op].items():
        line = next(c["implementation"] for c in entry["candidates"] if c["implementation"].startswith("triton."))
        if line in choices:
            continue
        for one in (entry, *entry["candidates"]):
            one["implementation"] = one["implementation"].partition(".")[0]
        _, (earlier, *_) = implementations.SAME_KERNELS[op]
        entry["kernels"] = earlier if measured == "with these kernels" else "0" * 64
        choices[line] = {region: entry}
    assert choices.keys() == {"triton.rows", "triton.columns", "triton.long"}
    for line, entries in choices.items():
        path = tmp_path / f"{line}.json"
        path.write_text(json.dumps({**raw, "version": 6, "choices": {op: entries}}))
        migrated = lockfile_migrate.migrate(path)
        assert (migrated.valid, migrated.stale) == ((1, 0) if measured == "with these kernels" else (0, 1))
        (after,) = lockfile_document.load(path).choices[op].values()
        ((region, before),) = entries.items()
        assert line in after.times and "triton" not in after.times and after.is_sealed(op, region)
        assert after.times[line] == next(c["seconds"] for c in before["candidates"] if c["implementation"] == "triton")


@pytest.mark.parametrize("edited", [False, True])
def test_a_file_of_this_version_gets_the_names_that_lines_have_now(edited: bool, tmp_path: Path) -> None:
    """What was edited is not sealed anew."""
    raw = files.document(next(file for file in SHIPPED if file.name == "h200.lock.json.gz"))
    op = "silu_mul"
    region, entry = next(iter(raw["choices"][op].items()))
    for one in (entry, *entry["candidates"]):
        one["implementation"] = one["implementation"].partition(".")[0]
    before = lockfile_entry.Entry.model_validate(entry).sealed(op, region)
    entry = before.model_dump() | {"case": "another bfloat16"} if edited else before.model_dump()
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({**raw, "choices": {op: {region: entry}}}))
    migrated = lockfile_migrate.migrate(path)
    (after,) = lockfile_document.load(path).choices[op].values()
    assert (migrated.valid, migrated.stale) == ((0, 1) if edited else (1, 0))
    assert after.implementation == ("cuda" if edited else "cuda.flat") and after.seconds == before.seconds
    assert after.is_sealed(op, region) is not edited
    assert (lockfile_document.stale(op, after, region) is None) is not edited


@pytest.mark.parametrize(("tokens", "line"), [(512, "triton.ranks"), (1024, "triton.counted")])
def test_experts_whose_order_the_launcher_chose_keep_their_times(tokens: int, line: str, tmp_path: Path) -> None:
    raw = files.document(next(file for file in SHIPPED if file.name == "h200.lock.json.gz"))
    op, bfloat16 = "moe_experts", torch.bfloat16
    shapes = {"x": (tokens, 2048), "gate_up": (128, 1536, 2048), "down": (128, 2048, 768)}
    args: list[Any] = [torch.empty(shape, dtype=bfloat16, device="meta") for shape in shapes.values()]
    args += [torch.empty(tokens, 8, dtype=dtype, device="meta") for dtype in (torch.int32, torch.float32)]
    region = lockfile.region(registry.primitive(op), [*args, "silu", None])
    _, (*_, earlier) = moe.SAME_KERNELS[op]
    times = {"triton": 1e-4, "torch.loop": 1e-3}
    candidates = [lockfile_entry.Candidate(implementation=name, seconds=time) for name, time in times.items()]
    before = lockfile_entry.Entry(implementation="triton", seconds=1e-4, kernels=earlier, candidates=candidates)
    path = tmp_path / "lock.json"
    path.write_text(json.dumps({**raw, "choices": {op: {region: before.sealed(op, region).model_dump()}}}))
    migrated = lockfile_migrate.migrate(path)
    (after,) = lockfile_document.load(path).choices[op].values()
    assert (migrated.valid, migrated.stale) == (1, 0) and lockfile_document.stale(op, after, region) is None
    assert after.times == {line: 1e-4, "torch.loop": 1e-3} and after.implementation == line
