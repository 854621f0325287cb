"""The fingerprint document and its command: complete, repeatable, leaving no flag changed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ferryman.device_profiles.schema import ARITHMETIC, FUNCTIONS
from ferryman.errors import ResultError
from ferryman.porting import fingerprint as fp
from ferryman.porting.fingerprint import collect, matrix, routes
from ferryman.porting.fingerprint.document import Fingerprint
from ferryman.porting.fingerprint.formats import FORMATS
from tests.cli.run import Done, ferryman
from tests.unit.fingerprint_units import Unit, measured_here

CPU = torch.device("cpu")
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


@pytest.fixture(scope="module")
def document() -> Fingerprint:
    return measured_here()


def _value(document: Fingerprint, key: str, route: str = "torch", form: str = "") -> Any:
    (fact,) = [f for f in document.facts if f.key == key and f.route == route and form in ("", f.format)]
    return fact.value


# -- the document


def test_every_fact_has_a_value_or_a_reason(document: Fingerprint) -> None:
    assert len(document.facts) > 150
    assert [f for f in document.facts if (f.value is None) == (f.reason is None)] == []
    assert len({(f.key, f.route, f.format) for f in document.facts}) == len(document.facts)


def test_every_probe_answers_for_every_name_that_it_promises(document: Fingerprint) -> None:
    said = {(f.key, f.format) for f in document.facts}
    for step in collect.torch_steps(CPU):
        assert {(key, step.format) for key in step.keys} <= said
    assert not [f for f in document.facts if f.reason == "the probe gave no answer"]
    assert {k for k in ARITHMETIC if k.startswith(("ulp.", "contraction.", "overflow."))} <= {k for k, _ in said}


def test_a_cpu_says_nothing_through_triton_or_simt(document: Fingerprint) -> None:
    others = [f for f in document.facts if f.route.split()[0] in ("triton", "simt")]
    assert len(others) > 30 and all(f.value is None for f in others)
    assert "interpreter says nothing" in str(next(f for f in others if f.route == "triton").reason)


def test_what_is_certain_of_this_cpu(document: Fingerprint) -> None:
    bits = _value(document, "matrix.f32.accumulator_bits")
    # a BLAS that sums in another order at the edges of a tile shows no width
    assert bits >= 24 if bits is not None else _value(document, "matrix.f32.order") == "irregular"
    assert _value(document, "matrix.f32.input_bits") == 24
    assert _value(document, "matrix.i8.exact") == "yes"
    assert _value(document, "rounding.torch.bfloat16") == "nearest-even"
    assert [f.value for f in document.facts if f.key == "subnormals.f32" and f.route.startswith("torch")] == [
        "kept"
    ] * 2
    for name in FUNCTIONS:
        assert 0.4 < _value(document, f"ulp.torch.{name}") < 4
    tf32 = [f for f in document.facts if f.key.startswith("matrix.tf32") and f.route == "torch"]
    assert all("no tf32 unit" in str(f.reason) for f in tf32) or _value(document, "matrix.tf32.input_bits") < 24


def test_the_document_survives_a_file(document: Fingerprint, tmp_path: Path) -> None:
    path = tmp_path / "fp.json"
    path.write_text(fp.dumps(document))
    assert fp.load(path) == document
    assert fp.schema()["properties"]["kind"]["const"] == "ferryman-fingerprint"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema_version": 2}, "schema version 2"),
        ({"schema_version": True}, "schema version True"),
        ({"kind": "ferryman-results"}, "not a fingerprint"),
        ({"facts": [{"key": "../etc", "route": "torch"}]}, "damaged: facts.0.key"),
        ({"surprise": 1}, "damaged: surprise"),
    ],
)
def test_a_wrong_document_is_refused(
    document: Fingerprint, tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    path = tmp_path / "fp.json"
    path.write_text(json.dumps({**json.loads(fp.dumps(document)), **change}))
    with pytest.raises(ResultError, match=message):
        fp.load(path)


def test_a_missing_truncated_or_huge_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "fp.json"
    with pytest.raises(ResultError, match="cannot be read"):
        fp.load(path)
    path.write_text('{"kind": "ferryman-f')
    with pytest.raises(ResultError, match="is not JSON"):
        fp.load(path)
    monkeypatch.setattr("ferryman.porting.fingerprint.document.SIZE_LIMIT", 4)
    with pytest.raises(ResultError, match="at most 4"):
        fp.load(path)


# -- global state


def _flags() -> tuple[Any, ...]:
    matmul = torch.backends.cuda.matmul
    return (
        torch.get_float32_matmul_precision(),
        matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
        matmul.allow_fp16_reduced_precision_reduction,
        matmul.allow_bf16_reduced_precision_reduction,
    )


@pytest.fixture
def restored() -> Iterator[None]:
    before = _flags()
    yield
    torch.set_float32_matmul_precision(before[0])
    torch.backends.cuda.matmul.fp32_precision, torch.backends.mkldnn.matmul.fp32_precision = before[1:3]


@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_flags_are_put_back_even_after_an_error(precision: str, restored: None) -> None:
    torch.set_float32_matmul_precision(precision)
    before = _flags()
    with pytest.raises(KeyError), routes.matmul_precision("high" if precision == "highest" else "highest"):
        assert _flags()[0] != precision
        assert not torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        raise KeyError
    assert _flags() == before


def test_flags_that_were_set_in_both_ways_are_put_back(restored: None) -> None:
    torch.set_float32_matmul_precision("highest")
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    with routes.matmul_precision("highest"):
        assert torch.backends.cuda.matmul.fp32_precision == "ieee"
    assert torch.backends.cuda.matmul.fp32_precision == "tf32"


def test_a_route_that_refuses_gives_reasons_and_leaves_the_flags(restored: None) -> None:
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("no such kernel\nand more")

    before = _flags()
    route = routes.Route("torch", FORMATS["tf32"], F32, CPU, product, "high")
    facts = collect.measure(collect._matrix_steps(route))
    assert {f.reason for f in facts} == {"the route does not work here: no such kernel"}
    assert _flags() == before


def test_running_out_of_memory_is_raised() -> None:
    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("no memory")

    route = routes.Route("torch", FORMATS["float16"], F16, CPU, product)
    with pytest.raises(torch.OutOfMemoryError):
        collect.measure(collect._matrix_steps(route))


def test_a_probe_that_forgets_a_name_is_noticed() -> None:
    step = collect.Step("torch", "order", ("sum", "lost"), lambda: [matrix.Answer("sum", "pairwise")])
    facts = collect.measure([step])
    assert [(f.key, f.value, f.reason) for f in facts] == [
        ("order.sum", "pairwise", None),
        ("order.lost", None, "the probe gave no answer"),
    ]


# -- the command


@pytest.fixture
def measured(document: Fingerprint, monkeypatch: pytest.MonkeyPatch) -> None:
    """The command prints what was measured above; `test_the_command_measures_the_same_facts_again` lets it measure."""
    monkeypatch.setattr(fp, "fingerprint", lambda device, progress: document)


def _run(*arguments: str) -> Done:
    return ferryman("fingerprint", "--device", "cpu", *arguments)


def test_the_command_measures_the_same_facts_again(document: Fingerprint) -> None:
    shown = _run("--json")
    assert shown.code == 0 and json.loads(shown.out)["facts"] == json.loads(fp.dumps(document))["facts"]


def test_the_table(tmp_path: Path, measured: None) -> None:
    path = tmp_path / "fp.json"
    shown = _run("--out", str(path), "--against", str(_kept(tmp_path)))
    assert shown.code == 0, shown.err
    for words in ("accumulator", "float32", "torch error", "beyond the largest", "profile cpu: 0 confirmed"):
        assert words in shown.out
    assert fp.load(path).environment.profile == "cpu"
    assert "1 facts differ" in shown.out


def _kept(tmp_path: Path) -> Path:
    """A fingerprint of this host with one other fact."""
    document = json.loads(_run("--json").out)
    fact = next(f for f in document["facts"] if f["key"] == "contraction.torch")
    fact["value"] = "neither"
    path = tmp_path / "earlier.json"
    path.write_text(json.dumps(document))
    return path


def test_a_contradicted_profile_exits_with_one(measured: None) -> None:
    shown = _run("--profile", "generic-cdna2")  # no CPU flushes float16 subnormals in a product
    assert shown.code == 1
    assert "contradicted numerics.arithmetic.matrix.f16.subnormal_inputs: stated flushed, measured kept" in shown.out
    assert "confirmed numerics.accumulation.i8: stated int32-exact" in shown.out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--profile", "h2000"), "unknown device profile"),
        (("--against", "/dev/null/fp.json"), "cannot be read"),
        (("--out", "/dev/null/fp.json"), "cannot be written"),
        (("--json", "--yaml"), "one of the two"),
    ],
)
def test_bad_use(arguments: tuple[str, ...], message: str, measured: None) -> None:
    shown = _run(*arguments)
    assert shown.code == 2 and message in shown.err


def test_a_device_that_is_not_here() -> None:
    for name in ("mi300x", "mps"):
        shown = ferryman("fingerprint", "--device", name)
        assert shown.code == 2 and "a device that is here" in shown.err


def test_simulated_unit_through_a_route(restored: None) -> None:
    """The whole path of a route: factors, padding to tiles, the diagonal, flags."""
    unit = Unit(16, 26, stored=24, rule="toward-zero")
    asked: list[str] = []

    def product(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        assert left.shape[0] == right.shape[0] == routes.TILE and left.dtype == F16
        asked.append(torch.get_float32_matmul_precision())
        return torch.diag(unit.multiply(left.double(), right.double()))

    route = routes.Route("torch", FORMATS["float16"], F32, CPU, product, "high")
    facts = {f.key: f.value for f in collect.measure(collect._matrix_steps(route)[:1])}
    assert facts["matrix.f16.block"] == 16 and facts["matrix.f16.accumulator_rounding"] == "toward-zero"
    assert set(asked) == {"high"} and torch.get_float32_matmul_precision() != "high"
