"""Record and replay through the engine: who is right is the oracle's verdict, and differences are explained."""

from __future__ import annotations

import importlib.util
import json
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.errors import ResultError, UnknownName
from ferryman.ops.primitive import Case, Primitive
from ferryman.porting.capsule import cases, replay_judge, replay_results
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule.container import digest
from ferryman.porting.capsule.record import record
from ferryman.porting.capsule.replay import LARGE, replay
from ferryman.porting.capsule.replay_results import Explained, Replay, Side, load
from ferryman.porting.inputs.cases import cases_of
from ferryman.porting.judging.results import Cell, summarise
from tests.unit.capsules import SMALL, forged, small, two_implementations

PLANTED = Path(__file__).resolve().parents[1] / "data" / "record_planted.py"


def replayed(raw: bytes, **options: Any) -> Replay:
    return replay(capsule.loads(raw), "cpu", **options)


def explanations(document: Replay, **wanted: str) -> Counter[str]:
    return Counter(e.explanation for e in document.explained if all(getattr(e, k) == v for k, v in wanted.items()))


def test_the_same_machine_gives_the_same_bits() -> None:
    document = replayed(two_implementations())
    assert set(explanations(document, implementation="torch")) == {"equal"}
    assert not replay_results.failed(document)
    assert {c.capsule for c in document.replayed.cells} == {document.capsule}
    ran = [c for c in document.replayed.cells if c.implementation in ("torch", "definition")]
    assert ran and {c.verdict for c in ran} == {"PASS"}


def test_an_implementation_that_a_lacks_is_run_and_never_counted_as_agreement() -> None:
    document = replayed(two_implementations())
    assert set(explanations(document, implementation="definition")) == {"A did not run"}
    assert all(e.b.verdict == "PASS" for e in document.explained if e.implementation == "definition")
    for line in ("triton.rows", "triton.long"):
        assert set(explanations(document, implementation=line)) == {"neither ran"}


def test_a_capsule_holds_inputs_outputs_errors_gradients_and_the_machine() -> None:
    loaded = capsule.loads(two_implementations())
    manifest = loaded.manifest
    assert {c.op for c in manifest.cases} == {"softmax", "softmax_backward"}  # the backward primitive: the gradients
    assert all(given.hashes for given in manifest.inputs)
    backward = [g for g in manifest.inputs if manifest.cases[g.case].op == "softmax_backward"]
    assert backward and all(set(g.stored) == {"y"} for g in backward)  # what the float64 forward gave
    whole = [o for run in manifest.runs for o in run.outputs if o.tiles is None]
    tiled = [o for run in manifest.runs for o in run.outputs if o.tiles is not None]
    assert len(whole) > 20 and len(tiled) > 20
    assert all(digest(loaded.tensors[o.stored]) == o.hash for o in whole if o.stored)
    assert {c.ratio is not None for c in loaded.results.cells if c.verdict == "PASS"} >= {True}
    facts = loaded.results.environment
    assert facts.versions["torch"] == str(torch.__version__) and "float32_matmul_precision" in facts.flags
    assert "cuda_matmul_tf32" in manifest.machine.flags and manifest.machine.memory_bytes
    assert loaded.results.timings


@pytest.fixture(scope="module")
def planted() -> bytes:
    spec = importlib.util.spec_from_file_location("record_planted", PLANTED)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    raw: bytes = module.planted("cpu", dtypes=["bf16"], backends=["torch", "definition"])
    return raw


def test_a_planted_error_is_named(planted: bytes) -> None:
    document = replayed(planted)
    wrong = [e for e in document.explained if e.explanation == "A is wrong"]
    assert len(wrong) > 10 and replay_results.failed(document)
    assert {(e.op, e.implementation, e.dtype) for e in wrong} == {("rms_norm", "torch", "bfloat16")}
    for e in wrong:
        assert e.a.worst is not None and e.detail is not None and e.detail.startswith("A: y[")
        assert e.b.verdict == "PASS" and e.a.verdict == "FAIL"
    by_case = {e.case: e for e in wrong}
    columns = {c.case: c.args["x"].shape[-1] for c in capsule.loads(planted).manifest.cases if c.op == "rms_norm"}  # type: ignore[union-attr]
    assert all(e.a.worst is not None and e.a.worst.index[-1] == columns[case] - 1 for case, e in by_case.items())
    assert set(explanations(document, op="softmax", implementation="torch")) == {"equal"}
    assert set(explanations(document, op="rms_norm", implementation="definition")) == {"equal"}


def test_a_planted_error_whose_record_says_pass_is_named_all_the_same(planted: bytes) -> None:
    """Its outputs are judged by the oracle here, whatever the record says."""

    def whitewash(manifest: dict[str, Any]) -> None:
        document = manifest["results"]
        for cell in document["cells"]:
            if cell["verdict"] == "FAIL":
                cell.update(verdict="PASS", gates={}, ratio=0.1)
                cell.pop("reason"), cell.pop("worst"), cell.pop("reading", None)
        document["summary"] = _summary(document)

    document = replayed(forged(planted, whitewash))
    wrong = [e for e in document.explained if e.explanation == "A is wrong"]
    assert len(wrong) > 10
    assert all(e.detail is not None and "which its outputs contradict" in e.detail for e in wrong)
    assert all(e.a.worst is not None for e in wrong)


def _summary(document: dict[str, Any]) -> list[dict[str, Any]]:
    from ferryman.porting.judging.results import Cell, summarise

    rows = summarise([Cell.model_validate(c) for c in document["cells"]])
    return [row.model_dump(mode="json") for row in rows]


def test_a_wrong_kernel_here_is_b_and_a_stays_right() -> None:
    def doubled(*args: Any) -> Any:
        return registry.launcher(registry.implementation("softmax", "torch"))(*args) * 2

    document = replayed(two_implementations(), kernels={("softmax", "torch"): doubled}, ops=["softmax"])
    counts = explanations(document, implementation="torch")
    assert counts["B is wrong"] > 20 and counts["A is wrong"] == counts["both are wrong"] == 0
    assert replay_results.failed(document)


def test_another_order_of_summation_is_within_both_bounds() -> None:
    def reversed_rows(x: Tensor, target: Any) -> Any:
        return registry.launcher(registry.implementation("softmax", "torch"))(x.flip(-1), target).flip(-1)

    document = replayed(two_implementations(), kernels={("softmax", "torch"): reversed_rows}, ops=["softmax"])
    counts = explanations(document, implementation="torch", dtype="float32")
    assert counts["both within bounds"] > 3
    assert counts["both within bounds"] + counts["equal"] == counts.total()


def test_other_inputs_are_mistrusted_with_the_reason() -> None:
    def other(manifest: dict[str, Any]) -> None:
        hashes = manifest["inputs"][0]["hashes"]
        hashes[sorted(hashes)[0]] = "0" * 64

    document = replayed(forged(small(), other))
    first = document.explained[0]
    assert first.explanation == "not judged" and first.detail is not None
    assert first.detail.startswith("inputs differ: ") and "recorded 000000000000" in first.detail
    cells = [c for c in document.replayed.cells if c.verdict == "MISTRUSTED"]
    assert {c.case for c in cells} == {first.case} and replay_results.failed(document)
    assert explanations(document)["equal"] > 10


@pytest.mark.parametrize("change", ["shape", "layout", "fill", "seed", "low"])
def test_inputs_that_a_counter_makes_otherwise_are_noticed(change: str) -> None:
    """The case, and with it every hash but that of the changed tensor, is as recorded."""

    def edit(manifest: dict[str, Any]) -> None:
        spec = manifest["cases"][0]["args"]
        name = next(n for n in spec if isinstance(spec[n], dict) and (change != "low") == ("high" not in spec[n]))
        if change == "seed":
            manifest["results"]["environment"]["seed"] = 5
        elif change == "shape":
            spec[name]["shape"] = [*spec[name]["shape"][:-1], spec[name]["shape"][-1] + 1]
        else:
            spec[name][change] = {"layout": "last", "fill": "uniform", "low": 1}[change]

    assert explanations(replayed(forged(small(), edit)))["not judged"] >= 1


def test_a_stored_input_that_was_exchanged_is_noticed() -> None:
    def exchange(manifest: dict[str, Any]) -> None:
        given = [g for g in manifest["inputs"] if g.get("stored")]
        given[0]["stored"]["y"] = given[1]["stored"]["y"]

    raw = two_implementations()
    first = capsule.loads(raw).manifest
    stored = [g for g in first.inputs if g.stored]
    assert stored[0].stored["y"] != stored[1].stored["y"]

    def prune(tensors: dict[str, Tensor]) -> None:
        still = {g.stored["y"] for g in stored[1:]} | {o.stored for r in first.runs for o in r.outputs}
        if stored[0].stored["y"] not in still:
            del tensors[stored[0].stored["y"]]

    document = replayed(forged(raw, exchange, prune))
    assert explanations(document)["not judged"] >= 1


def test_elements_that_another_machine_may_round_apart_are_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of tensors too large to be stored: the few whose float64 value lies next to where rounding turns."""
    monkeypatch.setattr(cases, "STORED_BYTES", 0)
    monkeypatch.setattr(cases, "NOISE", 2.0**-32)  # a small case has too few elements for 2^-40
    raw = record(ops=["softmax_backward"], device="cpu", dtypes=["f32"], backends=["definition"])
    loaded = capsule.loads(raw)
    patched = [given for given in loaded.manifest.inputs if given.patched]
    assert patched
    assert all(loaded.tensors[h].numel() == 0 for given in loaded.manifest.inputs for h in given.stored.values())
    counts = [len(loaded.tensors[p.at]) for given in patched for p in given.patched.values()]
    elements = sum(torch.Size(c.args["x"].shape).numel() for c in loaded.manifest.cases)  # type: ignore[union-attr]
    assert 20 < sum(counts) < elements / 50
    honest, at_risk = cases.arguments, patched[0].patched["y"]

    def elsewhere(*args: Any) -> Any:
        arguments = honest(*args)
        if "y" in arguments.buffers and args[0].name == loaded.manifest.cases[patched[0].case].case:
            place = torch.unravel_index(loaded.tensors[at_risk.at], arguments.buffers["y"].tensor.shape)
            arguments.buffers["y"].tensor[place] *= 1 + 2.0**-23  # the next float32
        return arguments

    monkeypatch.setattr(cases, "arguments", elsewhere)
    assert explanations(replay(loaded, "cpu"), implementation="definition").keys() == {"equal"}

    def unpatched(manifest: dict[str, Any]) -> None:
        manifest["inputs"] = [{**given, "patched": {}} for given in manifest["inputs"]]

    def prune(tensors: dict[str, Tensor]) -> None:
        for given in patched:
            for p in given.patched.values():
                tensors.pop(p.at, None), tensors.pop(p.values, None)

    assert explanations(replayed(forged(raw, unpatched, prune)))["not judged"] > 0


def test_an_op_or_an_argument_that_is_unknown_here_is_not_run() -> None:
    def unknown(manifest: dict[str, Any]) -> None:
        cells = manifest["results"]["cells"]
        for case in manifest["cases"]:
            case["op"] = "of_tomorrow"
        for cell in cells:
            cell["op"] = "of_tomorrow"
        manifest["results"]["timings"] = []
        manifest["results"]["summary"] = _summary(manifest["results"])

    document = replayed(forged(small(), unknown))
    assert set(explanations(document)) == {"B did not run"} and replay_results.failed(document)
    assert not document.replayed.cells

    def strange(manifest: dict[str, Any]) -> None:
        manifest["cases"][0]["args"]["temperature"] = 2.0

    document = replayed(forged(small(), strange))
    assert document.explained[0].explanation == "B did not run"
    assert "has no argument temperature here" in (document.explained[0].detail or "")


def test_a_case_with_numbers_that_are_not_finite_is_judged_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def one(op: Primitive, tier: str) -> list[Case]:
        usual = cases_of(op)[0]
        return [replace(usual, name="no_limits", args={**usual.args, "dt_min": -math.inf, "dt_max": math.inf})]

    monkeypatch.setattr("ferryman.porting.capsule.record.tier_cases", one)
    raw = record(ops=["ssd_scan"], device="cpu", dtypes=["f32"], backends=["torch"])
    document = replayed(raw, backends=["torch"])
    assert [(e.case, e.explanation, e.b.verdict) for e in document.explained] == [("no_limits", "equal", "PASS")]


def test_standard_sizes_wait_for_full_on_a_cpu() -> None:
    def standard(manifest: dict[str, Any]) -> None:
        for case in manifest["cases"]:
            case["tier"] = "standard"

    raw = forged(small(), standard)
    document = replayed(raw)
    assert {c.verdict for c in document.replayed.cells} == {"NOT_RUN"}
    assert LARGE in {c.reason for c in document.replayed.cells}
    assert replay_results.failed(document), "nothing was judged, so nothing is shown"
    assert set(explanations(replayed(raw, full=True), implementation="definition")) == {"equal"}


def test_ops_and_backends_are_chosen_by_name() -> None:
    document = replayed(two_implementations(), ops=["softmax"], backends=["torch"])
    assert {(e.op, e.implementation) for e in document.explained} == {("softmax", "torch")}
    with pytest.raises(UnknownName, match="nothing_such"):
        replayed(small(), ops=["nothing_such"])
    with pytest.raises(UnknownName):
        record(ops=["nothing_such"], device="cpu")
    with pytest.raises(UnknownName):
        record(ops=[SMALL], device="cpu", backends=["nothing_such"])


def _rounded_p(*args: Any) -> Any:
    """Attention with its probabilities rounded to the storage dtype: honest where it is declared."""
    attention = registry.primitive("attention")
    assert attention.limits.rounded is not None
    return attention.limits.rounded(frozenset({"p"}))(*args[:-1])


def test_a_declared_class_that_explains_a_difference_is_named() -> None:
    """Rounding P leaves the bare bound; the declaration's own term takes it in again."""
    recorded = record(
        ops=["attention"],
        device="cpu",
        dtypes=["bf16"],
        backends=["definition"],
        kernels={("attention", "definition"): _rounded_p},
    )
    before = explanations(replayed(recorded), implementation="definition")
    assert before["A is wrong"] > 5

    def declare(manifest: dict[str, Any]) -> None:
        for cell in manifest["results"]["cells"]:
            cell["roundings"] = ["p"]
            if cell["verdict"] == "FAIL":
                cell.update(verdict="PASS", gates={})
                for key in ("reason", "worst", "reading"):
                    cell.pop(key, None)
        manifest["results"]["summary"] = _summary(manifest["results"])

    document = replayed(forged(recorded, declare))
    named = [e for e in document.explained if e.explanation == "A's declared class explains it"]
    assert named
    for e in named:
        assert e.a.plain is not None and e.a.ratio is not None and e.a.ratio <= 1 < e.a.plain
        assert e.detail is not None and "A declares fp32 with p rounded" in e.detail
    found_here = explanations(document, implementation="definition")
    # what was wrong without the declaration is explained by it; what was within the bare bound stays as it was
    assert found_here == before - Counter({"A is wrong": before["A is wrong"]}) + Counter(
        {"A's declared class explains it": before["A is wrong"]}
    )


def test_a_rounding_that_the_op_does_not_permit_excuses_nothing() -> None:
    def declare(manifest: dict[str, Any]) -> None:
        for cell in manifest["results"]["cells"]:
            cell["roundings"] = ["accumulate"]

    document = replayed(forged(small(), declare))
    wrong = [e for e in document.explained if e.explanation == "A is wrong"]
    assert len(wrong) > 10
    assert all("declares roundings that cross_entropy does not permit" in (e.detail or "") for e in wrong)


PASS, FAIL = Side(verdict="PASS", hash="a" * 64), Side(verdict="FAIL", reason="G2: far off")
OTHER = Side(verdict="PASS", hash="b" * 64)
BEYOND = Side(verdict="PASS", hash="c" * 64, ratio=0.5, plain=3.0, declared="split-k")
IDLE, MISTRUSTED = Side(verdict="NOT_RUN", reason="absent"), Side(verdict="MISTRUSTED", reason="inputs differ")


@pytest.mark.parametrize(
    ("a", "b", "fault", "expected"),
    [
        (PASS, PASS, None, "equal"),
        (PASS, OTHER, None, "both within bounds"),
        (BEYOND, OTHER, None, "A's declared class explains it"),
        (OTHER, BEYOND, None, "B's declared class explains it"),
        (BEYOND, BEYOND.model_copy(update={"hash": "d" * 64}), None, "both declared classes explain it"),
        (FAIL, OTHER, None, "A is wrong"),
        (PASS, OTHER, "y[0] is 1", "A is wrong"),
        (PASS, FAIL, None, "B is wrong"),
        (FAIL, FAIL, None, "both are wrong"),
        (FAIL, IDLE, None, "A is wrong"),
        (IDLE, FAIL, None, "B is wrong"),
        (IDLE, PASS, None, "A did not run"),
        (PASS, IDLE, None, "B did not run"),
        (IDLE, IDLE, None, "neither ran"),
        (PASS, MISTRUSTED, None, "not judged"),
        (MISTRUSTED, PASS, None, "not judged"),
        (Side(verdict="SIMULATED", hash="a" * 64), PASS, None, "A did not run"),
    ],
)
def test_every_pair_has_its_explanation(a: Side, b: Side, fault: str | None, expected: str) -> None:
    explanation, detail = replay_judge.explain(a, b, fault)
    assert explanation == expected
    assert (detail is None) == (expected in ("equal", "both within bounds"))


def test_a_replay_is_written_and_read_back(tmp_path: Path) -> None:
    document = replayed(small())
    path = tmp_path / "replay.json"
    path.write_text(document.model_dump_json(), encoding="utf-8")
    assert replay_results.load(path) == document


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda d: d.update(schema_version=2), "has schema version 2"),
        (lambda d: d.update(schema_version="1"), "schema_version is '1'"),
        (lambda d: d["replayed"].update(schema_version=99), "replayed has schema version 99"),
        (lambda d: d.update(recorded=None), "recorded is not a Ferryman result document"),
        (lambda d: d.update(extra=1), "is damaged: extra"),
        (lambda d: d["explained"][0].update(explanation="fine"), "is damaged: explained.0.explanation"),
        (lambda d: d.update(kind="other"), "not a Ferryman result document"),
    ],
)
def test_a_damaged_replay_is_refused(tmp_path: Path, change: Callable[[dict[str, Any]], None], says: str) -> None:
    import json

    raw = json.loads(replayed(small()).model_dump_json())
    change(raw)
    path = tmp_path / "replay.json"
    path.write_text(json.dumps(raw), encoding="utf-8")
    with pytest.raises(ResultError, match=says):
        replay_results.load(path)


def test_every_explanation_has_its_place_in_the_order() -> None:
    assert sorted(replay_results.ORDER) == sorted(Explained.model_fields["explanation"].annotation.__args__)  # type: ignore[union-attr]


def _planted(document: dict[str, Any]) -> None:
    cell = next(c for c in document["replayed"]["cells"] if c["verdict"] == "PASS")
    cell.update(verdict="FAIL", reason="G2: planted")
    cells = [Cell(**c) for c in document["replayed"]["cells"]]
    document["replayed"]["summary"] = [row.model_dump(mode="json") for row in summarise(cells)]


def _unexplained(document: dict[str, Any]) -> None:
    document["explained"] = []


@pytest.mark.parametrize(("edit", "says"), [(_planted, "explained as PASS"), (_unexplained, "nothing explains it")])
def test_a_replay_that_contradicts_itself_is_refused(tmp_path: Path, edit: Any, says: str) -> None:
    document = json.loads(replayed(two_implementations()).model_dump_json())
    path = tmp_path / "replay.json"
    path.write_text(json.dumps(document))
    load(path)
    edit(document)
    path.write_text(json.dumps(document))
    with pytest.raises(ResultError, match=says):
        load(path)


def test_text_of_others_is_safe_to_print(tmp_path: Path) -> None:
    document = json.loads(replayed(two_implementations()).model_dump_json())
    document["recorded"]["environment"]["device_name"] = "\x1b[31mred\ud800"
    path = tmp_path / "replay.json"
    path.write_text(json.dumps(document))
    loaded = load(path)
    assert isinstance(loaded, Replay) and loaded.recorded.environment.device_name == "\ufffd[31mred\ufffd"
