"""`check_model`: passes what is right, fails what is wrong, refuses bad input, and says all of it in JSON."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

pytest.importorskip("transformers")

import ferryman
import ferryman.ops.recognition  # it keeps the right definitions, whatever is planted
from ferryman.errors import ArgumentError, UnknownName, Unsupported
from ferryman.integrations.transformers import check_model
from ferryman.porting.model import config as model_config
from ferryman.porting.model import modes
from ferryman.porting.model.check import STAGES
from ferryman.porting.model.measure import divergences, one_ulp, relative, slope, worst_row
from ferryman.porting.model.results import ModelResult

ops = SimpleNamespace(**vars(ferryman.ops))  # the right ones, whatever is planted


def quick(model: Any = "qwen3", **options: Any) -> ModelResult:
    given = {"tiny": True, "layers": 2, "steps": 5, "backward": False, "run_modes": False, **options}
    return check_model(model, **given)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_a_right_port_passes_with_exact_counts(name: str, dtype: str) -> None:
    stages: list[str] = []
    # float16 multiplies slowly on a CPU
    tokens = 24 if dtype == "float16" else None
    result = quick(name, dtype=dtype, backward=True, tokens=tokens, progress=stages.append)
    assert (result.verdict, result.reasons) == ("PASS", [])
    assert stages == list(STAGES)
    norms = 2 * (4 if name == "qwen3" else 2) + 1
    wanted = {"attention": 2, "embedding": 1, "linear": 15, "rms_norm": norms - 2, "rope": 2, "silu_mul": 2}
    wanted["add_rms_norm"] = 2
    assert result.ported == wanted
    by_phase = {(c.phase, c.op): sum(c.served.values()) for c in result.calls}
    for op, n in result.ported.items():
        assert by_phase["forward", op] == by_phase["gradients", op] == by_phase["gradients", f"{op}_backward"] == n
        assert by_phase["greedy", op] == 5 * n
    assert by_phase["gradients", "cross_entropy"] == by_phase["gradients", "cross_entropy_backward"] == 1
    assert len(by_phase) == 4 * len(result.ported) + 2
    assert {m.name for m in result.gradients} == {"embedding", "layer 0", "layer 1", "head"}
    # In 16 bits two logits can be nearly equal, and then either token is right; float32 has no such ties here.
    assert result.greedy.ok and (dtype != "float32" or result.greedy.identical == 2)
    assert result.restored and not result.unsupported
    assert ModelResult.model_validate_json(result.model_dump_json()) == result
    assert all(m.floor > 0 for layer in result.layers for m in (layer.alone, layer.bias, layer.accumulated))
    assert result.first_divergence is None and result.exact == "float64" and not result.modes
    assert all(m.ok for m in result.modules) and len(result.modules) == norms - 2 + 2 + 2 + 2 + 3
    assert all(m.ok and m.value > 0 and m.limit >= m.floor > 0 for m in result.exact_logits if "top-1" not in m.name)


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma"])
def test_the_other_families_pass(name: str) -> None:
    result = quick(name)
    assert (result.verdict, result.reasons) == ("PASS", [])
    assert any("hidden_size 256 of" in cut for cut in result.cuts) and "vocab_size 1024 of" in str(result.cuts)


def test_a_request_binds_the_ported_model() -> None:
    with ferryman.use("definition"):
        result = quick("llama")
    assert result.verdict == "PASS"
    assert {name for c in result.calls for name in c.served} == {"definition"}
    with ferryman.use("hip"), pytest.raises(Unsupported):
        quick("llama")


def shifted(by: int) -> Callable[..., Tensor]:
    def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, mask: Tensor | None, **kw: Any) -> Any:
        if not causal or q.shape[2] == 1:
            return ops.attention(q, k, v, causal=causal, mask=mask, **kw)
        seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril(k.shape[2] - q.shape[2] + by)
        return ops.attention(q, k, v, causal=False, mask=seen, **kw)

    return attention


# Each changes what the model means a little; all are found in bfloat16, where one ulp of the embedding moves it by 1%.
MUTANTS: dict[str, dict[str, Callable[..., Any]]] = {
    "sees the future": {"attention": shifted(1)},
    "does not see itself": {"attention": shifted(-1)},
    "last key doubled": {
        "attention": lambda q, k, v, **kw: ops.attention(q, torch.cat((k[:, :, :-1], k[:, :, -2:-1]), 2), v, **kw)
    },
    "scale off by 2%": {"attention": lambda q, k, v, *, scale, **kw: ops.attention(q, k, v, scale=1.02 * scale, **kw)},
    "heads swapped": {"attention": lambda q, k, v, **kw: ops.attention(q, k.flip(1), v.flip(1), **kw)},
    "rotary interleaved": {"rope": lambda q, k, c, s: ops.rope(q, k, c, s, interleaved=True)},
    "rotary backwards": {"rope": lambda q, k, c, s: ops.rope(q, k, c, -s)},
    "gate and up swapped": {"silu_mul": lambda gate, up: ops.silu_mul(up, gate)},
    "gelu for silu": {"silu_mul": lambda gate, up: ops.gelu_mul(gate, up)},
    "activation 1% large": {"silu_mul": lambda gate, up: ops.silu_mul(gate, up) * 1.01},
    "eps 1e-5 for 1e-6": {"rms_norm": lambda x, w, eps, cast: ops.rms_norm(x, w, 10 * eps, cast)},
    "mean over N-1": {"rms_norm": lambda x, w, eps, cast: ops.rms_norm(x, w, eps, cast) * (1 - 1 / x.shape[-1]) ** 0.5},
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_port_fails(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for op, wrong in MUTANTS[name].items():
        monkeypatch.setattr(ferryman.ops, op, wrong)
    result = quick(steps=3)
    assert result.verdict == "FAIL"
    assert any(reason.startswith("layer 0") for reason in result.reasons), result.reasons
    (op,) = MUTANTS[name]
    where = {"rms_norm": "input_layernorm", "silu_mul": "mlp"}.get(op, "self_attn")
    if name == "mean over N-1":  # of 256: every bfloat16 rounds back to itself; the first with 128 is the queries' norm
        where = "self_attn.q_norm"
    assert result.first_divergence is not None and result.first_divergence.path == f"model.layers.0.{where}"
    assert result.restored


def test_the_other_ways_to_run_are_in_the_result(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(modes, "BACKEND", "aot_eager")
    result = quick("llama", layers=1, run_modes=True)
    assert (result.verdict, result.reasons) == ("PASS", [])
    compiled, graph = result.modes
    assert (compiled.mode, compiled.verdict, graph.mode) == ("torch.compile", "PASS", "CUDA graph")
    assert [m.path for m in compiled.modules] == ["model.layers.0"] and {m.ok for m in compiled.logits} == {True}
    assert graph.verdict == "NOT_RUN" and "no CUDA graphs" in graph.reason
    assert ModelResult.model_validate_json(result.model_dump_json()) == result


def test_a_missing_or_extra_call_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def twice(gate: Tensor, up: Tensor) -> Tensor:
        ops.silu_mul(gate, up)
        return ops.silu_mul(gate, up)

    def elsewhere(x: Tensor, weight: Tensor, eps: float, cast: bool) -> Tensor:
        return torch.nn.functional.rms_norm(x, x.shape[-1:], weight, eps)

    monkeypatch.setattr(ferryman.ops, "silu_mul", twice)
    monkeypatch.setattr(ferryman.ops, "rms_norm", elsewhere)
    result = quick("llama", dtype="float32")
    assert result.verdict == "FAIL"
    assert "forward: 4 calls of silu_mul; expected 2" in result.reasons
    assert "greedy: 0 calls of rms_norm; expected 15" in result.reasons


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_one_ulp_is_one_ulp(dtype: torch.dtype) -> None:
    x = torch.cat((torch.randn(4000), torch.tensor([0.0, -0.0, float("inf"), float("nan"), 1.0, -1.0]))).to(dtype)
    moved = one_ulp(x, torch.Generator().manual_seed(0))
    away, towards = torch.nextafter(x, x.sign() * float("inf")), torch.nextafter(x, torch.zeros_like(x))
    plain = x[:4000] != 0
    assert torch.all((moved == away) | (moved == towards) | ~torch.cat((plain, torch.zeros(6, dtype=torch.bool))))
    assert 0.4 < (moved[:4000] == away[:4000]).float().mean() < 0.6
    assert torch.equal(moved[4000:4003], x[4000:4003]) and moved[4003].isnan()
    top = torch.full((64,), torch.finfo(dtype).max, dtype=dtype)
    assert one_ulp(top, torch.Generator().manual_seed(0)).isfinite().all()
    leaf = torch.randn(9).to(dtype).requires_grad_()
    stepped = one_ulp(leaf, torch.Generator().manual_seed(0))
    stepped.sum().backward()
    assert torch.equal(leaf.grad, torch.ones_like(leaf))  # type: ignore[arg-type]
    assert torch.equal(stepped.detach(), one_ulp(leaf.detach(), torch.Generator().manual_seed(0)))


def test_measures() -> None:
    wanted = torch.randn(3, 50)
    actual = wanted.clone()
    actual[1] *= 1.5
    assert worst_row(actual, wanted) == pytest.approx(0.5)
    assert relative(actual, wanted) < 0.5
    assert slope(1.25 * wanted, wanted) == pytest.approx(0.25)
    assert relative(torch.zeros(2), torch.zeros(2)) == 0.0
    said = SimpleNamespace(tokens=torch.tensor([[1, 0], [1, 1]]), logits=[torch.eye(2), torch.tensor([[3.0, 1.0]] * 2)])
    other = SimpleNamespace(tokens=torch.tensor([[1, 1], [1, 1]]), logits=[])
    (parted,) = divergences(said, other)  # type: ignore[arg-type]
    assert (parted.sequence, parted.step, parted.gap) == (0, 1, 2.0)


def write(path: Path, **changes: Any) -> Path:
    data = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 32,
        "vocab_size": 128_256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500_000.0,
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "_attn_implementation": "kernels-community/elsewhere",
        "rope_scaling": {
            "factor": 8.0,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
            "rope_type": "llama3",
            "original_max_position_embeddings": 8192,
        },
    }
    path.write_text(json.dumps({k: v for k, v in {**data, **changes}.items() if v != "absent"}))
    return path


def test_a_local_config_file(tmp_path: Path) -> None:
    result = quick(write(tmp_path / "config.json"), dtype="float32")
    assert (result.verdict, result.reasons) == ("PASS", [])
    assert result.config["hidden_size"] == 64 and result.cuts == ["2 layers of 32", "vocab_size 1024 of 128256"]
    assert result.ignored_keys == ["_attn_implementation", "architectures", "torch_dtype"]
    assert quick(tmp_path, dtype="float32").config == result.config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; required: 'qwen3'"),
        ({"model_type": ["llama"]}, "model_type is"),
        ({"auto_map": {"AutoModel": "x.y"}}, "auto_map is present; required: absent"),
        ({"hidden_size": "64"}, "hidden_size is '64'; required: an integer from 1"),
        ({"hidden_size": "absent"}, "hidden_size is absent"),
        ({"vocab_size": 1 << 40}, "vocab_size is 1099511627776; required: an integer from 1 to 1048576"),
        ({"num_attention_heads": True}, "num_attention_heads is True"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "required: what transformers accepts"),
        ({"rope_scaling": 3}, "rope_scaling is 3; required: a JSON object"),
        ({"hidden_act": "no_such"}, "no_such"),
        ({"layer_types": 7}, "layer_types is 7; required: a list"),
    ],
)
def test_a_bad_config_file_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        quick(write(tmp_path / "config.json", **changes))
    assert message in str(caught.value)


def test_other_bad_input_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnknownName, match="nearest: qwen3"):
        quick("qwem3")
    with pytest.raises(ArgumentError, match="layers is 3; required: at least 4"):
        check_model("qwen3", layers=3)
    with pytest.raises(ArgumentError, match="dtype is float8"):
        quick(dtype="float8")
    with pytest.raises(ArgumentError, match="device is 'gpu'"):
        quick(device="gpu")
    with pytest.raises(ArgumentError, match="steps is 0"):
        quick(steps=0)
    with pytest.raises(ArgumentError, match="an existing config.json"):
        quick(tmp_path / "none.json")
    deep, broken, large = tmp_path / "deep.json", tmp_path / "broken.json", tmp_path / "large.json"
    deep.write_text("[" * 200_000)
    broken.write_text("{'model_type': 1}")
    large.write_text(" " * (model_config.SIZE_LIMIT + 1))
    for path, message in ((deep, "not JSON"), (broken, "not JSON"), (large, "at most 1048576")):
        with pytest.raises(ArgumentError, match=message):
            quick(path)
    monkeypatch.setattr(model_config, "free_bytes", lambda device: 1 << 30)
    with pytest.raises(ArgumentError, match="GiB free on cpu; take tiny"):
        check_model("qwen3")


def test_the_presets_are_the_published_widths() -> None:
    wanted = model_config.spec("qwen3", tiny=False, layers=4)
    assert wanted.cuts == ("4 layers",)
    config = model_config.config_of(wanted)
    assert (config.hidden_size, config.head_dim) == (4096, 128)
    assert (config.num_attention_heads, config.num_key_value_heads) == (32, 8)
    assert config.intermediate_size == 12_288 and config.rope_parameters["rope_theta"] == 1e6
    llama = model_config.config_of(model_config.spec("llama", tiny=False, layers=4))
    assert (llama.hidden_size, llama.head_dim, llama.intermediate_size) == (4096, 128, 14_336)
    small = model_config.spec("qwen3", tiny=True, layers=2)
    assert small.fields["head_dim"] == 128 and small.fields["hidden_size"] == 256
