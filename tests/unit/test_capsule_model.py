"""A model in a capsule: the weights are proven by hash, and the layer that is wrong is named."""

from __future__ import annotations

import functools
import types
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from ferryman.errors import CapsuleError
from ferryman.integrations import transformers as porter
from ferryman.porting.capsule import contents as capsule
from ferryman.porting.capsule import model as capsule_model
from ferryman.porting.capsule.model import ModelCapsule
from ferryman.porting.capsule.record_model import record_model
from ferryman.porting.capsule.replay_model import ModelReplay, replay_model
from ferryman.porting.model.results import away
from tests.cli.run import ferryman
from tests.unit.capsules import forged, small


@functools.cache
def recorded() -> bytes:
    return record_model("qwen3", porter=porter, device="cpu", tiny=True, layers=2, tokens=16)


def replayed(raw: bytes, port: Any = porter) -> ModelReplay:
    loaded = capsule_model.loads(raw)
    assert isinstance(loaded, ModelCapsule)
    return replay_model(loaded, porter=port, device="cpu")


class Broken:
    """Ports, and then one layer's second norm gives 2% too much."""

    def port(self, model: Any) -> Any:
        report = porter.port(model)
        norm = model.base_model.layers[1].post_attention_layernorm
        forward = type(norm).forward
        norm.forward = types.MethodType(lambda module, x: forward(module, x) * 1.02, norm)
        self.norm = norm
        return report

    def unport(self, model: Any) -> None:
        del self.norm.forward
        porter.unport(model)


def test_every_layer_forward_and_backward_is_equal_on_the_same_machine() -> None:
    document = replayed(recorded())
    assert document.verdict == "PASS" and document.reasons == [] and document.exact == "float64"
    assert [(e.layer, e.tensor) for e in document.layers] == [
        (0, "output"),
        (0, "gradient"),
        (1, "output"),
        (1, "gradient"),
    ]
    assert {e.explanation for e in document.layers} == {"equal"}
    for e in document.layers:
        assert 0 < away(e.a) <= 1 and 0 < away(e.b) <= 1 and 0 < e.judged <= e.elements
        assert {m.name for m in e.a} == {"error", "bias"}
        assert {m.name for m in e.b} == {"error", "bias"} | ({"worst token"} if e.tensor == "output" else set())
    assert document.served_b["rms_norm"] and document.served_b["attention_backward"]


def test_a_fault_in_one_layer_of_a_is_named_with_an_element() -> None:
    raw = record_model("qwen3", porter=Broken(), device="cpu", tiny=True, layers=2, tokens=16)
    document = replayed(raw)
    wrong = [e for e in document.layers if e.explanation == "A is wrong"]
    assert document.verdict == "FAIL" and {e.layer for e in wrong} == {1}
    worst = wrong[0].worst
    assert worst is not None and len(worst.index) == 3 and worst.value != worst.expected
    assert any("layer 1" in reason and "A's worst element" in reason for reason in document.reasons)
    assert {e.explanation for e in document.layers if e.layer == 0} == {"equal"}


def test_a_fault_in_one_layer_here_is_named_as_b() -> None:
    document = replayed(recorded(), Broken())
    wrong = [e for e in document.layers if e.explanation not in ("equal", "both within bounds")]
    assert document.verdict == "FAIL"
    assert {(e.layer, e.explanation) for e in wrong} == {(1, "B is wrong")}


@pytest.mark.parametrize("which", ["lm_head.weight", "hidden.1", "cotangent.0", "tokens"])
def test_other_weights_or_inputs_are_mistrusted(which: str) -> None:
    document = replayed(forged(recorded(), lambda manifest: manifest["hashes"].update({which: "0" * 64})))
    assert document.verdict == "MISTRUSTED" and document.layers == []
    assert document.reasons[0].startswith(f"{which} has hash") and "recorded 000000000000" in document.reasons[0]


def test_weights_come_from_counters_whatever_the_random_state() -> None:
    spec = capsule_model.spec_of("llama", True, 1)
    torch.manual_seed(1)
    one = capsule_model.filled(spec, torch.device("cpu"), torch.bfloat16, 0)
    torch.manual_seed(2)
    two = capsule_model.filled(spec, torch.device("cpu"), torch.bfloat16, 0)
    other = capsule_model.filled(spec, torch.device("cpu"), torch.bfloat16, 1)
    pairs = list(zip(one.named_parameters(), two.parameters(), other.parameters(), strict=True))
    assert len(pairs) > 8
    for (name, a), b, c in pairs:
        assert torch.equal(a, b) and not torch.equal(a, c), name
        assert abs(float(a.double().std()) / (0.1 if a.dim() == 1 else a.shape[-1] ** -0.5) - 1) < 0.2, name


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "../../model"}, "model"),
        ({"model": "gpt"}, "the model is 'gpt'; required: one of"),
        ({"layers": 10**9}, "layers"),
        ({"layers": 3}, "2 layers of 3"),
        ({"tokens": 2**16}, "x 65536 tokens"),
        ({"batch": 2**20}, "batch"),
        ({"dtype": "float8"}, "dtype"),
        ({"buffers": {}}, "that nothing refers to"),
        ({"found": []}, "0 layers of 2"),
        ({"environment": {}}, "environment"),
    ],
)
def test_a_forged_model_capsule_is_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(CapsuleError, match=says):
        capsule_model.loads(forged(recorded(), lambda manifest: manifest.update(changes)))


def test_the_two_kinds_are_told_apart() -> None:
    with pytest.raises(CapsuleError, match="holds a model, not ops"):
        capsule.loads(recorded())
    assert isinstance(capsule_model.loads(small()), capsule.Capsule)


def test_by_command(tmp_path: Any) -> None:
    path = tmp_path / "m.capsule"
    done = ferryman("record", "--out", str(path), "--model", "llama", "--tiny", "--layers", "1", "--device", "cpu")
    assert done.code == 0 and "Llama-3-8B, 1 layers in bfloat16" in done.out
    done = ferryman("replay", str(path), "--device", "cpu", "--out", str(tmp_path / "r"))
    assert done.code == 0 and done.out.startswith("PASS: Llama-3-8B") and (tmp_path / "r/replay-model.json").exists()
    for arguments, says in (
        (("replay", str(path), "--op", "rope"), "this one holds a model"),
        (("record", "--out", str(path), "--model", "llama", "--op", "rope"), "no --model beside it"),
        (("record", "--out", str(path), "--tiny"), "--model beside it"),
        (("record", "--out", str(path), "--model", "gpt", "--device", "cpu"), "only these travel"),
    ):
        refused = ferryman(*arguments)
        assert refused.code == 2 and says in refused.err, refused
