"""The numeric fingerprint on the device that is here: complete, repeatable, quick to verify, true where it is known."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch

from ferryman.device_profiles import detect
from ferryman.device_profiles.schema import FUNCTIONS
from ferryman.porting import fingerprint as fp
from ferryman.porting.fingerprint import collect
from ferryman.porting.fingerprint.document import Fact, Fingerprint

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def document() -> Fingerprint:
    return fp.fingerprint("cuda")


def _facts(document: Fingerprint, key: str) -> dict[str, Any]:
    return document.values(key)


def _matrix(document: Fingerprint, dtype: str, name: str) -> dict[str, Any]:
    matrix = document.values(f"matrix.{dtype}.{name}")
    assert matrix, f"nothing measured {dtype} {name}"
    return matrix


def test_the_table_is_complete(document: Fingerprint) -> None:
    assert [f for f in document.facts if (f.value is None) == (f.reason is None)] == []
    measured = {f.route.split()[0] for f in document.facts if f.value is not None}
    assert measured == {"torch", "triton", "simt"}
    for dtype in ("f32", "f16", "bf16"):
        for name in ("order", "block", "accumulator_bits", "accumulator_rounding", "subnormal_inputs", "order_4096"):
            routes = {r.split()[0] for r in _matrix(document, dtype, name)}
            assert routes == {"torch", "triton"}, f"{dtype} {name}"
    for route in ("torch", "triton", "simt"):
        assert _facts(document, f"contraction.{route}")
        for function in FUNCTIONS:
            assert _facts(document, f"ulp.{route}.{function}"), f"{route} {function}"


def test_every_probe_answered(document: Fingerprint) -> None:
    assert [f for f in document.facts if f.reason == "the probe gave no answer"] == []
    failed = [f for f in document.facts if f.reason is not None and "does not work here" in f.reason]
    # a device lacks flavours of fp8; everything else works
    assert {f.format for f in failed} <= {"e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz"}, failed[:3]


def test_what_is_certain_of_every_device(document: Fingerprint) -> None:
    for dtype in ("f16", "bf16", "f32"):
        assert min(_matrix(document, dtype, "accumulator_bits").values()) >= 23
    assert set(_matrix(document, "f32", "input_bits").values()) == {24}
    assert set(_matrix(document, "i8", "exact").values()) == {"yes"}
    assert set(_matrix(document, "f32", "accumulator_rounding").values()) == {"nearest-even"}
    for name in ("float16", "bfloat16"):
        assert set(_facts(document, f"rounding.torch.{name}").values()) == {"nearest-even"}
        assert set(_facts(document, f"rounding.triton.{name}").values()) == {"nearest-even"}
    fused = [f.value for f in document.facts if f.key == "subnormals.f32" and f.route == "simt fma"]
    assert fused == ["kept"], "the SIMT kernels are compiled without flushing"
    assert all(value <= 0.5 for value in _facts(document, "ulp.simt.div").values()), "IEEE division"
    assert all(value <= 0.5 for value in _facts(document, "ulp.simt.sqrt").values()), "IEEE square root"


@pytest.mark.skipif(torch.version.hip is not None, reason="NVIDIA's tensor cores")
def test_what_is_certain_of_hopper(document: Fingerprint) -> None:
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("not Hopper")
    for dtype in ("f16", "bf16", "tf32"):
        assert min(_matrix(document, dtype, "block").values()) >= 4, "tensor cores add several products at once"
    assert set(_matrix(document, "tf32", "input_bits").values()) == {11}
    inner = _matrix(document, "fp8", "accumulator_bits")
    assert {int(value) for value in inner.values()} == {14}, inner
    assert document.values("fp8") == {"torch": "e4m3fn"}
    short = {
        f"{f.route} {f.format}": str(f.detail["words"])
        for f in document.facts
        if f.key == "matrix.fp8.order_4096" and f.value is not None
    }
    assert short["torch e4m3fn"] != short["torch fast e4m3fn"], "promotion shows in the order"


def test_it_is_repeatable(document: Fingerprint) -> None:
    again = {_name(f): f.value for f in fp.fingerprint("cuda").facts}
    assert {_name(f): f.value for f in document.facts} == again


def _name(fact: Fact) -> tuple[str, str, str]:
    return fact.key, fact.route, fact.format


def test_the_profile_is_not_contradicted(document: Fingerprint) -> None:
    findings = fp.compare(detect("cuda"), document.facts, unstated=False)
    assert [f for f in findings if f.outcome == "contradicted"] == []


def test_verifying_is_quick_and_agrees(document: Fingerprint) -> None:
    profile = detect("cuda")
    fp.verify(profile, "cuda")  # the libraries start
    began = time.perf_counter()
    findings = fp.verify(profile, "cuda")
    assert time.perf_counter() - began < 2.0
    assert findings and {f.path: f.outcome for f in findings if f.outcome == "contradicted"} == {}
    whole = {f.path: f.outcome for f in fp.compare(profile, document.facts, unstated=False)}
    assert all(whole[f.path] == "confirmed" for f in findings if f.outcome == "confirmed")


def test_flags_are_left_alone() -> None:
    matmul = torch.backends.cuda.matmul
    before = (matmul.allow_tf32, matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction)
    fp.verify(detect("cuda"), "cuda")
    assert (matmul.allow_tf32, matmul.fp32_precision, matmul.allow_bf16_reduced_precision_reduction) == before


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
def test_the_second_device_while_the_first_is_current() -> None:
    place = torch.device("cuda", 1)
    torch.cuda.set_device(0)
    facts = collect.measure(collect.steps(place, detect(place)))
    here = {_name(f): f.value for f in facts}
    there = {_name(f): f.value for f in fp.fingerprint("cuda:0").facts}
    assert {k: v for k, v in there.items() if k in here} == here
    assert torch.cuda.current_device() == 0
