"""What profiles state about arithmetic, their files, and the comparison with what was measured."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.device_profiles import Profile, Provenance, catalogue, load, profile
from ferryman.device_profiles.schema import ARITHMETIC, FrozenMap
from ferryman.errors import ProfileError
from ferryman.porting import fingerprint as fp
from ferryman.porting.fingerprint import collect
from ferryman.porting.fingerprint.document import Fact, Fingerprint
from ferryman.porting.judging.results import failed, results
from tests.cli.run import ferryman
from tests.unit.fingerprint_units import measured_here

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def document() -> Fingerprint:
    return measured_here()


def _fact(key: str, value: Any, route: str = "torch", **more: Any) -> Fact:
    return Fact(key=key, route=route, value=value, reason=None if value is not None else "not asked", **more)


def _stating(**arithmetic: Any) -> Profile:
    return replace(profile("cpu"), arithmetic=FrozenMap({k.replace("__", "."): v for k, v in arithmetic.items()}))


@pytest.mark.parametrize(
    ("key", "stated", "measured", "outcome"),
    [
        ("matrix__bf16__block", 16, [16, 16], "confirmed"),
        ("matrix__bf16__block", 16, [16, 8], "contradicted"),
        ("matrix__bf16__accumulator_bits", 24, [25], "contradicted"),
        ("matrix__f16__subnormal_inputs", "flushed", ["kept"], "contradicted"),
        ("matrix__f16__subnormal_inputs", "flushed", ["flushed"], "confirmed"),
        ("ulp__torch__exp", 2.0, [1.9], "confirmed"),
        ("ulp__torch__exp", 2.0, [2.1], "contradicted"),
        ("ulp__torch__exp", 2.0, ["not finite"], "contradicted"),
        ("ulp__torch__exp", 2.0, [None], "not measured"),
        ("ulp__torch__exp", 2.0, [], "not measured"),
    ],
)
def test_a_stated_fact(key: str, stated: Any, measured: list[Any], outcome: str) -> None:
    said = _stating(**{key: stated})
    facts = [_fact(key.replace("__", "."), v, f"route {i}") for i, v in enumerate(measured)]
    (finding,) = fp.compare(said, facts)
    assert (finding.outcome, finding.stated) == (outcome, stated)
    assert finding.path == "numerics.arithmetic." + key.replace("__", ".")
    assert (finding.reason is None) == (outcome == "confirmed")
    assert fp.contradicted([finding]) == (outcome == "contradicted")


def test_a_lower_bound_confirms_what_lies_above_it() -> None:
    facts = [_fact("matrix.f16.aligned_bits", 28, detail={"at_least": True})]
    assert fp.compare(_stating(matrix__f16__aligned_bits=26), facts)[0].outcome == "confirmed"
    assert fp.compare(_stating(matrix__f16__aligned_bits=30), facts)[0].outcome == "contradicted"


@pytest.mark.parametrize(
    ("name", "dtype", "facts", "outcome"),
    [
        ("fp32", "bf16", {"accumulator_bits": 24}, "confirmed"),
        ("fp32", "bf16", {"accumulator_bits": 32}, "confirmed"),
        ("fp32", "bf16", {"accumulator_bits": 14}, "contradicted"),
        ("tf32-rne", "tf32", {"input_bits": 11, "input_rounding": "nearest-even"}, "confirmed"),
        ("tf32-rne", "tf32", {"input_bits": 11, "input_rounding": "nearest-away"}, "confirmed"),
        ("tf32-rne", "tf32", {"input_bits": 11, "input_rounding": "toward-zero"}, "contradicted"),
        ("tf32-rne", "tf32", {"input_bits": 11}, "not measured"),
        ("tf32-rz", "tf32", {"input_bits": 11, "input_rounding": "toward-zero"}, "confirmed"),
        ("xf32-rd", "tf32", {"input_bits": 11, "input_rounding": "down"}, "confirmed"),
        ("xf32-rd", "tf32", {"input_bits": 11, "input_rounding": "nearest-even"}, "contradicted"),
        ("fp8-14bit", "fp8", {"accumulator_bits": 14}, "confirmed"),
        ("fp8-14bit", "fp8", {"accumulator_bits": 24}, "contradicted"),
        ("int32-exact", "i8", {"exact": "yes"}, "confirmed"),
        ("int32-exact", "i8", {"exact": "no"}, "contradicted"),
        ("split-k", "bf16", {"accumulator_bits": 24}, "not measured"),
    ],
)
def test_accumulation_classes(name: str, dtype: str, facts: dict[str, Any], outcome: str) -> None:
    said = replace(profile("cpu"), accumulation=FrozenMap({dtype: name}))
    findings = fp.compare(said, [_fact(f"matrix.{dtype}.{k}", v) for k, v in facts.items()], unstated=False)
    assert [(f.path, f.outcome) for f in findings] == [(f"numerics.accumulation.{dtype}", outcome)]


def test_what_a_profile_could_state_is_listed(document: Fingerprint) -> None:
    findings = {f.path: f for f in fp.compare(profile("cpu"), document.facts)}
    assert findings["numerics.arithmetic.matrix.i8.exact"].outcome == "not stated"
    assert findings["numerics.arithmetic.matrix.i8.exact"].measured == "yes"
    assert all(path.removeprefix("numerics.arithmetic.") in ARITHMETIC for path in findings)


def test_a_bias_is_not_measured_and_says_why() -> None:
    said = fp.compare(profile("mi300x"), [], unstated=False)
    assert {f.path: f.outcome for f in said}["numerics.bias.tf32"] == "not measured"
    assert all(f.outcome == "not measured" and f.reason for f in said)


def test_the_flavour_is_the_one_that_is_multiplied() -> None:
    def facts(served: str) -> list[Fact]:
        return [
            _fact("matrix.fp8.order", "fused" if form == served else None, format=form)
            for form in ("e4m3fn", "e4m3fnuz", "e5m2")
        ]

    cuda = torch.device("cuda", 0)
    assert collect.flavour(facts("e4m3fnuz"), cuda).value == "e4m3fnuz"
    assert collect.flavour(facts("none"), cuda).value is None
    assert collect.flavour(facts("e4m3fn"), CPU).value is None
    assert fp.compare(profile("mi300x"), [collect.flavour(facts("e4m3fn"), cuda)])[0].outcome == "contradicted"


def test_verify_measures_only_what_is_stated(monkeypatch: pytest.MonkeyPatch) -> None:
    assert fp.verify(profile("cpu"), "cpu") == []
    asked: list[str] = []
    plain = collect._ask
    monkeypatch.setattr(collect, "_ask", lambda step: (asked.append(f"{step.prefix} {step.names[0]}"), plain(step))[1])
    findings = fp.verify(_stating(ulp__torch__exp=4.0, matrix__i8__exact="yes", ulp__triton__exp=2.0), "cpu")
    assert [f.outcome for f in findings] == ["confirmed", "confirmed", "not measured"]
    assert sorted(asked) == ["matrix.i8 exact", "ulp.torch exp"]
    findings = fp.verify(_stating(ulp__torch__exp=0.1), "cpu")
    assert (
        fp.contradicted(findings)
        and findings[0].reason is not None
        and findings[0].reason.startswith("torch: ulp.torch.exp")
    )


def test_check_fails_where_the_profile_is_contradicted(document: Fingerprint) -> None:
    said = results(document.environment, [])
    assert not failed(said)
    numerics = fp.compare(_stating(matrix__i8__exact="no"), document.facts, unstated=False)
    assert failed(said.model_copy(update={"numerics": numerics}))
    numerics = fp.compare(_stating(matrix__i8__exact="yes"), document.facts, unstated=False)
    assert not failed(said.model_copy(update={"numerics": numerics}))


# -- profile files

FILE = """schema: 1
name: probed
title: a probed device
extends: generic-hopper
sources: {{fingerprint: ferryman fingerprint on one test device}}
numerics:
  arithmetic:
    {lines}
"""


def _load(tmp_path: Path, lines: str) -> Profile:
    path = tmp_path / "probed.yaml"
    path.write_text(FILE.format(lines=lines))
    return load(path)


def test_a_profile_states_arithmetic(tmp_path: Path) -> None:
    cell = "kind: measured, source: fingerprint"
    said = _load(
        tmp_path,
        f"matrix: {{f16: {{block: {{value: 16, {cell}}}}}}}\n    ulp: {{torch: {{exp: {{value: 1.5, {cell}}}}}}}",
    )
    assert dict(said.arithmetic) == {"matrix.f16.block": 16, "ulp.torch.exp": 1.5}
    assert said.provenance["numerics.arithmetic.ulp.torch.exp"].kind == "measured"


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ("matrix: {f16: {blok: {value: 16, kind: measured, source: fingerprint}}}", "did you mean 'block'"),
        ("matrix: {f17: {block: {value: 16, kind: measured, source: fingerprint}}}", "unknown key 'f17'"),
        ("matrix: {f16: {block: {value: 0, kind: measured, source: fingerprint}}}", "whole number"),
        ("matrix: {f16: {block: 16}}", "required: {value: .., kind: .., source: ..}"),
        ("matrix: {f16: {aligned_rounding: {value: rne, kind: measured, source: fingerprint}}}", "nearest-even"),
        ("subnormals: {f32: {value: lost, kind: measured, source: fingerprint}}", "one of kept, flushed"),
        ("ulp: {torch: {exp: {value: 2, kind: guessed, source: fingerprint}}}", "one of datasheet"),
        ("ulp: {torch: {exp: {value: 2, kind: measured, source: nowhere}}}", "unknown key 'nowhere'"),
    ],
)
def test_a_wrong_statement_is_refused_with_its_line(tmp_path: Path, lines: str, message: str) -> None:
    with pytest.raises(ProfileError) as caught:
        _load(tmp_path, lines)
    assert message in str(caught.value) and "probed.yaml:8:" in str(caught.value)


def test_shipped_statements() -> None:
    assert profile("generic-cdna2").arithmetic["matrix.bf16.subnormal_inputs"] == "flushed"
    assert dict(profile("mi300x").arithmetic) == {}, "CDNA 3 does not flush"
    for known in catalogue().values():
        assert set(known.arithmetic) <= set(ARITHMETIC)
        for key in known.arithmetic:
            assert isinstance(known.provenance[f"numerics.arithmetic.{key}"], Provenance)


def test_the_yaml_of_a_fingerprint_is_a_profile_s(
    tmp_path: Path, document: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp, "fingerprint", lambda device, progress: document)
    printed = ferryman("fingerprint", "--device", "cpu", "--yaml")
    assert printed.code == 0
    path = tmp_path / "here.yaml"
    path.write_text(f"schema: 1\nname: here\ntitle: this host\nextends: cpu\n{printed.out}")
    said = load(path)
    assert len(said.arithmetic) > 15
    assert not fp.contradicted(fp.compare(said, document.facts))
    assert all(f.outcome == "confirmed" for f in fp.compare(said, document.facts, unstated=False))


def test_yaml_leaves_out_what_routes_disagree_about(
    tmp_path: Path, document: Fingerprint, monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = [
        _fact("contraction.simt", "fused"),
        _fact("contraction.simt", "separate", "b"),
        _fact("ulp.simt.exp", 1.25),
    ]
    facts += [_fact("matrix.f16.block", 16), _fact("matrix.f16.block", 8, "triton"), _fact("matrix.bf16.block", 8)]
    both = document.model_copy(update={"facts": facts})
    monkeypatch.setattr(fp, "fingerprint", lambda device, progress: both)
    printed = ferryman("fingerprint", "--device", "cpu", "--yaml").out
    assert "# contraction.simt: torch fused; b separate" in printed
    path = tmp_path / "here.yaml"
    path.write_text(f"schema: 1\nname: here\ntitle: this host\nextends: cpu\n{printed}")
    assert dict(load(path).arithmetic) == {"ulp.simt.exp": 1.25, "matrix.bf16.block": 8}
