"""Damaged, forged and foreign files: each is refused with a typed error that says what is wrong."""

from __future__ import annotations

import hashlib
import io
import json
import math
import pickle
import random
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors.torch import save
from torch import Tensor

from ferryman import files
from ferryman.dispatch import registry
from ferryman.errors import CapsuleError, FerrymanError
from ferryman.ops.primitive import TensorSpec
from ferryman.porting.capsule import container
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule.cases import case_of, misfit, recorded
from ferryman.porting.capsule.contents import CaseRecord
from ferryman.porting.capsule.replay import replay
from ferryman.porting.inputs.cases import TIERS, cases_of
from ferryman.porting.judging.results import Cell, summarise
from tests.unit.capsules import forged, small

PLACES = 2000


def test_a_capsule_is_read_back() -> None:
    loaded = capsule.loads(small())
    assert loaded.size == len(small()) < 32_000
    assert {cell.op for cell in loaded.results.cells} == {"cross_entropy"}
    assert {cell.verdict for cell in loaded.results.cells} == {"PASS"}
    assert loaded.sha256 == capsule.loads(small()).sha256


def test_every_case_of_every_op_travels() -> None:
    """Tensors, numbers, lists and dtypes: what a case holds comes back as it was, through JSON."""
    for op in registry.primitives().values():
        for tier in TIERS:
            for case in cases_of(op, tier):
                record = CaseRecord.model_validate_json(recorded(op, case).model_dump_json())
                assert case_of(record) == case, (op.name, case.name)


NON_FINITE = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


@pytest.mark.parametrize("spelling", NON_FINITE)
@pytest.mark.parametrize("op", ["ssd_scan", "ssd_scan_backward"])
def test_a_number_that_is_not_finite_travels(op: str, spelling: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through JSON that any parser reads, which has no such numbers; a backward has its forward's parameters, too."""
    primitive = registry.primitive(op)
    own = cases_of(primitive)[0]
    case = replace(own, args={**own.args, "dt_max": NON_FINITE[spelling]})
    text = recorded(primitive, case).model_dump_json()
    data = files.parse(text.encode())
    assert data["args"]["dt_max"] == spelling
    again = case_of(CaseRecord.model_validate(data))
    assert isinstance(again.args["dt_max"], float) and repr(again) == repr(case)
    other = replace(own, args={**own.args, "dt_max": float(spelling)})  # a NaN that is another object
    monkeypatch.setattr("ferryman.porting.capsule.cases._own", lambda op: {case.name: other})
    monkeypatch.setattr("ferryman.porting.capsule.cases.arguments", None)  # what is no case of the op's is evaluated
    assert misfit(primitive, again) is None


def test_strides_of_gradients_and_of_saved_results_travel() -> None:
    """A transposed gradient's layout has a comma."""
    op = registry.primitive("softmax_backward")
    own = cases_of(op)[0]
    for layout in ("rows", "last", "strided:1,19+0"):
        case = replace(own, gradients=layout, saved=layout)
        assert case_of(CaseRecord.model_validate_json(recorded(op, case).model_dump_json())) == case
    with pytest.raises(ValidationError):
        recorded(op, replace(own, gradients="__import__('os')"))


def test_a_string_that_spells_a_number_stays_a_string() -> None:
    op = registry.primitive("bias_act")
    own = cases_of(op)[0]
    case = replace(own, args={**own.args, "activation": "Infinity"})
    again = case_of(CaseRecord.model_validate_json(recorded(op, case).model_dump_json()))
    assert again.args["activation"] == "Infinity"
    unknown = recorded(op, case).model_copy(update={"op": "of_another_version"})
    assert case_of(unknown).args["activation"] == "Infinity"


def test_tensors_of_every_dtype_are_held() -> None:
    """What an argument or an output may be: dtypes of storage and of indices."""
    names = ("float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool")
    tensors = [torch.arange(6).reshape(2, 3).to(getattr(torch, name)) for name in names]
    _, unpacked, _ = container.unpack(container.pack("{}", {container.digest(x): x for x in tensors}))
    for x in tensors:
        assert unpacked[container.digest(x)].dtype == x.dtype and torch.equal(unpacked[container.digest(x)], x)


def test_a_flipped_bit_is_refused_at_every_place() -> None:
    raw, chance = small(), random.Random(7)
    places = sorted({*range(200), *chance.sample(range(len(raw)), PLACES)})
    assert len(places) >= PLACES
    for at in places:
        changed = bytearray(raw)
        changed[at] ^= 1 << chance.randrange(8)
        with pytest.raises(CapsuleError):
            capsule.loads(bytes(changed))


def test_a_truncated_file_is_refused_at_every_place() -> None:
    raw = small()
    places = sorted({*range(200), *random.Random(8).sample(range(len(raw)), PLACES)})
    for at in places:
        with pytest.raises(CapsuleError):
            capsule.loads(raw[:at])


@pytest.mark.parametrize("extra", [b"\0", b"}", b"more bytes than there should be"])
def test_bytes_that_follow_are_refused(extra: bytes) -> None:
    with pytest.raises(CapsuleError, match="bytes too many"):
        capsule.loads(small() + extra)


def _facts(**changed: str) -> dict[str, str]:
    return {"format": "ferryman-capsule", "version": "1", "sha256": "0" * 64, "manifest_sha256": "0" * 64} | changed


def _manifest(text: bytes = b"{}") -> Tensor:
    return torch.frombuffer(bytearray(zlib.compress(text)), dtype=torch.uint8)


def _sealed(tensors: dict[str, Tensor], **facts: str) -> bytes:
    """A safetensors file with a right hash over all of it."""
    raw = save(tensors, _facts(**facts))
    empty = b'"sha256":"' + b"0" * 64
    assert raw.count(empty) == 1
    return raw.replace(empty, b'"sha256":"' + hashlib.sha256(raw).hexdigest().encode())


def _payload() -> bytes:
    return pickle.dumps({"weights": [1, 2, 3]}, protocol=4)


def _torch_saved() -> bytes:
    file = io.BytesIO()
    torch.save({"weights": torch.ones(2)}, file)
    return file.getvalue()


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b"", "truncated, or no capsule"),
        (b"{}", "truncated, or no capsule"),
        (_payload(), "is a pickle, which is never read"),
        (_torch_saved(), "may carry pickle, which is never read"),
        (b"\xff" * 64, "truncated, or no capsule"),
        ((10**12).to_bytes(8, "little") + b"{}", "a header of 1000000000000"),
        (save({"manifest": _manifest()}), "names no format"),
        (save({"manifest": _manifest()}, {"format": "other"}), "its format is 'other'"),
        (save({"manifest": _manifest()}, _facts(version="2")), "has version 2; this Ferryman reads up to 1"),
        (save({"manifest": _manifest()}, _facts(version="-1")), "version is '-1'"),
        (save({"manifest": _manifest()}, _facts(more="x")), "its metadata has"),
        (save({"../../etc/passwd": _manifest(), "manifest": _manifest()}, _facts()), "named '../../etc/passwd'"),
        (save({"a/b": _manifest(), "manifest": _manifest()}, _facts()), "required: a hash"),
        (save({"f" * 64: _manifest()}, _facts()), "has no manifest"),
        (save({"manifest": _manifest().float()}, _facts()), "has no manifest"),
        (save({"manifest": _manifest()}, _facts()), "the manifest's hash does not match"),
        (save({"manifest": torch.ones(8, dtype=torch.uint8)}, _facts()), "cannot be inflated"),
        (save({"manifest": _manifest()[:-1]}, _facts()), "is truncated, or has more than"),
        (save({"manifest": torch.cat([_manifest(), _manifest()])}, _facts()), "bytes follow the manifest"),
    ],
)
def test_a_foreign_file_is_refused(raw: bytes, says: str) -> None:
    with pytest.raises(CapsuleError, match=says):
        capsule.loads(raw)


def test_a_manifest_whose_hash_does_not_match_is_refused_though_the_file_hash_does() -> None:
    raw = _sealed({"manifest": _manifest(b'{"kind": "ops"}')}, manifest_sha256="1" * 64)
    with pytest.raises(CapsuleError, match="the manifest's hash does not match"):
        capsule.loads(raw)


def test_a_tensor_whose_hash_does_not_match_is_named() -> None:
    def swap(tensors: dict[str, Tensor]) -> None:
        name = next(n for n, t in tensors.items() if t.numel() and t.dim())
        same = tensors[name].contiguous()  # other bits, whatever they mean: NaN + 1 and 512 + 1 may be what they were
        tensors[name] = (same.view(torch.uint8) ^ 1).view(same.dtype)

    with pytest.raises(CapsuleError, match="the hash of tensor [0-9a-f]{16} does not match"):
        capsule.loads(forged(small(), lambda manifest: None, swap))


def test_a_deflate_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "MANIFEST_LIMIT", 100_000)
    with pytest.raises(CapsuleError, match="has more than 100000 bytes"):
        capsule.loads(save({"manifest": _manifest(b" " * 10_000_000)}, _facts()))


def test_an_oversized_file_is_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(container, "SIZE_LIMIT", 4096)
    path = tmp_path / "large.capsule"
    path.write_bytes(small())
    with pytest.raises(CapsuleError, match="cannot be read: it has [0-9]+ bytes; required: at most 4096"):
        capsule.load(path)
    with pytest.raises(CapsuleError, match="required: at most 4096"):
        container.pack("{}", {"x": torch.zeros(2000)})


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CapsuleError, match="cannot be read"):
            capsule.load(path)
    with pytest.raises(CapsuleError, match="no regular file"):
        capsule.load("/dev/zero")


def test_a_header_that_asks_for_a_terabyte_allocates_nothing() -> None:
    entry = {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}
    header = json.dumps({"__metadata__": _facts(), "manifest": {**entry, "dtype": "U8"}, "0" * 64: entry}).encode()
    with pytest.raises(CapsuleError, match=r"truncated or damaged: \d+ bytes by its shape"):
        capsule.loads(len(header).to_bytes(8, "little") + header + bytes(64))


STRANGE = ['{"a": 1, "a": 2}', '{"a": NaN}', "[1]", "[" * 100_000, '{"a": ' + "9" * 5000 + "}", "\x00"]


@pytest.mark.parametrize("text", STRANGE, ids=lambda t: t[:8])
def test_strange_json_is_refused(text: str) -> None:
    with pytest.raises(CapsuleError, match="JSON"):
        container.parse_json(text.encode(), "it")
    with pytest.raises(CapsuleError):
        capsule.loads(len(text).to_bytes(8, "little") + text.encode())


Edit = Callable[[dict[str, Any]], None]


def _set(*path: Any, value: Any) -> Edit:
    def edit(manifest: dict[str, Any]) -> None:
        place = manifest
        for key in path[:-1]:
            place = place[key]
        place[path[-1]] = value

    return edit


def _unstored(manifest: dict[str, Any]) -> None:
    for out in manifest["runs"][0]["outputs"]:
        out.pop("stored", None)
        out.pop("tiles", None)


def _nothing_ran(manifest: dict[str, Any]) -> None:
    manifest["runs"], manifest["inputs"] = [], []


def _twice(manifest: dict[str, Any]) -> None:
    results = manifest["results"]
    results["cells"].append(results["cells"][0])
    results["summary"] = [row.model_dump(mode="json") for row in summarise([Cell(**c) for c in results["cells"]])]


FORGERIES: dict[str, tuple[Edit, str]] = {
    "a newer result schema": (_set("results", "schema_version", value=99), "has schema version 99"),
    "no results": (_set("results", value={}), "not a Ferryman result document"),
    "an op that escapes": (_set("cases", 0, "op", value="../../etc"), "cases.0.op"),
    "a case that escapes": (_set("cases", 0, "case", value="/etc/passwd"), "cases.0.case"),
    "an argument's name": (_set("cases", 0, "args", value={"__class__": 1}), "cases.0.args"),
    "a fill that is code": (_set("cases", 0, "args", "logits", "fill", value="__import__('os')"), "cases.0.args"),
    "a negative shape": (_set("cases", 0, "args", "logits", "shape", value=[-1, 4]), "cases.0.args"),
    "a shape of text": (_set("cases", 0, "args", "logits", "shape", value=["4"]), "cases.0.args"),
    "an unknown field": (_set("machine", value={"run": "rm"}), "machine.run"),
    "an unknown kind": (_set("kind", value="pickle"), "kind"),
    "an index outside": (_set("runs", 0, "cell", value=10**6), "which are not there"),
    "a case outside": (_set("inputs", 0, "case", value=10**6), "refers to case 1000000"),
    "another cell": (_set("runs", 0, "cell", value=1), "stands beside|a cell has two runs"),
    "a reference to nothing": (_set("runs", 0, "outputs", 0, "stored", value="0" * 64), "not stored"),
    "no reference": (_set("runs", value=[]), "tensors that nothing refers to"),
    "tiles outside": (_set("runs", 0, "outputs", 0, "tiles", value=[10**9]), "out of order or outside"),
    "another output shape": (_set("runs", 0, "outputs", 0, "shape", value=[2, 2]), "required: float32 .2, 2."),
    "a huge output": (_set("runs", 0, "outputs", 0, "shape", value=[2**31, 2**31]), "elements; required: at most"),
    "control characters": (_set("machine", value={"driver": "\x1b[2J"}), "control characters"),
    "half a character": (_set("machine", value={"driver": "\ud800"}), "control characters"),
    "outputs by their hash alone": (_unstored, "none of them stored, and says PASS"),
    "another hash than the tensor's": (_set("runs", 0, "outputs", 0, "hash", value="0" * 64), "another hash"),
    "verdicts that nothing backs": (_nothing_ran, "says PASS, and no run backs it"),
    "a cell twice": (_twice, "stands twice"),
    "a class of its own": (_set("results", "cells", 0, "accumulation", value="anything"), "accumulation is anything"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_a_forged_manifest_is_refused(name: str) -> None:
    edit, says = FORGERIES[name]
    spare = dict.clear if name == "verdicts that nothing backs" else None
    with pytest.raises(CapsuleError, match=says):
        capsule.loads(forged(small(), edit, spare))


def test_the_forgeries_differ_from_the_capsule_only_by_their_edit() -> None:
    assert capsule.loads(forged(small(), lambda manifest: None)).manifest == capsule.loads(small()).manifest


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ({"shape": [2**19, 2**19]}, "asks for 2199023255552 bytes"),
        ({"shape": [4, 96], "layout": "strided:999999999,999999999+0"}, "asks for"),
    ],
)
def test_a_case_that_asks_for_a_terabyte_is_refused_before_anything_runs(spec: dict[str, Any], says: str) -> None:
    def edit(manifest: dict[str, Any]) -> None:
        manifest["cases"][0]["args"]["logits"] = spec

    loaded = capsule.loads(forged(small(), edit))
    with pytest.raises(CapsuleError, match=says):
        replay(loaded, "cpu")


def test_an_intermediate_that_is_too_large_is_refused_before_anything_runs() -> None:
    heads = TensorSpec((1, 1, 2**20, 1))  # 8 MiB each, and scores of 8 TiB
    attention = registry.primitive("attention")
    own = cases_of(attention)[0]
    strange = replace(own, name="scores", args={**own.args, "q": heads, "k": heads, "v": heads})
    with pytest.raises(CapsuleError, match=r"attention scores: aten.* asks for \d+ bytes"):
        misfit(attention, strange)
    assert misfit(attention, own) is None
    assert misfit(attention, replace(own, name="elsewhere")) is None


def test_every_error_is_one_that_a_user_can_meet() -> None:
    assert issubclass(CapsuleError, FerrymanError) and issubclass(CapsuleError, ValueError)
