"""torch.compile(model, backend="ferryman"): what is placed, what stays, and that a model trains as it did."""

from __future__ import annotations

import importlib
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

import ferryman
from ferryman.device_profiles import profile
from ferryman.dispatch import registry
from ferryman.errors import ArgumentError, UnknownName
from ferryman.porting import graph
from ferryman.porting.graph import policy
from tests.graphs import far, normal, placed, rewritten

FAR = 2.0**-16  # float32, a few layers: the same sums in another order


class Norm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = x.float()
        return self.gain * (h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Layer(nn.Module):
    """A decoder layer that is in nobody's library."""

    def __init__(self, width: int = 32, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.a, self.b = heads, Norm(width), Norm(width)
        self.qkv, self.o = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in self.qkv(self.a(x)).chunk(3, -1))
        n = torch.arange(length, device=x.device)
        seen = n[None, :] <= n[:, None]
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=seen[None, None])
        x = x + self.o(mixed.transpose(1, 2).reshape(batch, length, width))
        gate, up = self.up(self.b(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


def _trained(model: Any, x: Tensor, parameters: list[Tensor]) -> tuple[Tensor, list[Tensor]]:
    for p in parameters:
        p.grad = None
    loss = model(x).square().mean()
    loss.backward()
    return loss.detach(), [p.grad.clone() for p in parameters]  # type: ignore[union-attr]


def _compiled(model: Any, **options: Any) -> Any:
    torch._dynamo.reset()
    dynamic = options.pop("dynamic", None)
    settled = {"place": "all", "inner": "aot_eager", **options}
    return torch.compile(model, backend=graph.backend, fullgraph=True, dynamic=dynamic, options=settled)


def test_a_model_by_hand_trains_the_same() -> None:
    torch.manual_seed(0)
    model, x, report = Layer(), normal(2, 9, 32), graph.Report()
    parameters = list(model.parameters())
    wanted = _trained(model, x, parameters)
    with ferryman.trace() as ran:
        got = _trained(_compiled(model, report=report), x, parameters)
    assert report.calls() == {
        "add_rms_norm": 1,
        "attention": 1,
        "linear": 4,
        "rms_norm": 1,
        "silu_mul": 1,
    }, str(report)
    for op, times in report.calls().items():
        assert sum(n for (name, _), n in ran.calls.items() if name == op) == times
        assert sum(n for (name, _), n in ran.calls.items() if name == f"{op}_backward") == times
    assert far(got[0], wanted[0]) < FAR and far(got[1], wanted[1]) < FAR
    (entry,) = [e for e in report.entries if e.op == "attention"]
    assert "its mask says causal" in entry.reason and entry.error is not None and entry.error < 2.0**-34
    assert report.share() == 1.0 and "attention x1: called as an op" in str(report)


def test_lengths_do_not_compile_again() -> None:
    model, report = Layer(), graph.Report()
    compiled = _compiled(model, report=report, dynamic=True)
    with torch.no_grad():
        compiled(normal(2, 9, 32))
        graphs = len(report.graphs)
        for length in (7, 21, 40):
            x = normal(2, length, 32)
            assert far(compiled(x), model(x)) < FAR
    assert len(report.graphs) == graphs
    assert report.graphs[-1].count("placed")["attention"] == 1


def test_what_checkpointing_recomputes_is_replaced_too() -> None:
    model, x, report = Layer(), normal(2, 9, 32), graph.Report()
    parameters = list(model.parameters())
    wanted = _trained(model, x, parameters)
    whole = _compiled(lambda t: checkpoint(model, t, use_reentrant=False), report=report)
    got = _trained(whole, x, parameters)
    assert report.calls()["rms_norm"] == 1 and far(got[1], wanted[1]) < FAR


def _norm(x: Tensor, w: Tensor) -> Tensor:
    return w * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def test_a_region_whose_inner_value_is_read_elsewhere_stays() -> None:
    def function(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        scale = torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return w * (x * scale), scale

    report, _, _ = rewritten(function, (normal(3, 64), normal(64)))
    assert placed(report) == {}
    assert any(e.op == "rms_norm" and "is read by" in e.reason for e in report.entries)


def test_a_tensor_written_over_in_a_region_stays() -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        y = x * 1.0
        scale = torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        y.add_(1.0)
        return w * (y * scale)

    args = (normal(3, 64), normal(64))
    report, _, output = rewritten(function, args)
    assert placed(report) == {} and torch.equal(output, function(*args))


def test_angles_that_are_learnt_keep_their_gradient() -> None:
    from tests.graph_spellings import ROPE

    angle = normal(1, 7, 32).requires_grad_()
    report, _, _ = rewritten(ROPE["sliced"], (normal(2, 4, 7, 32), normal(2, 2, 7, 32), angle, angle * 2))
    assert placed(report) == {}
    assert any("requires grad" in e.reason for e in report.entries)


def test_under_autocast_nothing_is_replaced() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        report, _, _ = rewritten(_norm, (normal(3, 64), normal(64)))
    assert placed(report) == {} and "autocast" in report.entries[0].reason


def test_on_a_cpu_everything_is_inductors_by_itself() -> None:
    report, _, _ = rewritten(_norm, (normal(3, 64), normal(64)), place="auto")
    assert [(e.op, e.verdict) for e in report.entries] == [("rms_norm", "left")]


def test_the_mask_alone_is_taken_out_where_attention_is_left() -> None:
    report, gm, _ = rewritten(Layer(), (normal(2, 9, 32),), place="auto")
    (node,) = [n for n in gm.graph.nodes if "scaled_dot_product" in getattr(n.target, "__name__", "")]
    assert node.kwargs["is_causal"] is True and node.kwargs["attn_mask"] is None
    assert [e.verdict for e in report.entries if e.op == "attention"] == ["simpler"]


def test_a_profile_says_which_ops_a_compiled_graph_calls() -> None:
    known = profile("h100-sxm")
    norm = registry.primitive("rms_norm")
    first = policy.judged_first(norm, known, "auto")
    assert first is not None and not first.opaque
    listed = policy.judged_first(norm, replace(known, compiled=frozenset({"rms_norm"})), "auto")
    assert listed is not None and listed.opaque and "h100-sxm" in listed.reason
    assert policy.judged_first(registry.primitive("attention"), known, "auto") is None
    with ferryman.use(rms_norm="torch"):
        asked = policy.judged_first(norm, known, "auto")
    assert asked is not None and asked.opaque


def test_options_that_are_wrong_are_named() -> None:
    for options, error in (
        ({"place": "some"}, ArgumentError),
        ({"place": ["rms_nrm"]}, UnknownName),
        ({"report": []}, ArgumentError),
    ):
        with pytest.raises(error):
            graph.backend(None, [], options=options)  # type: ignore[arg-type]


def test_the_backend_is_found_by_name(tmp_path: Path) -> None:
    info = tmp_path / "ferryman_graph_test-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ferryman-graph-test\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[torch_dynamo_backends]\nferryman = ferryman.porting.graph:backend\n")
    code = (
        f"import sys; sys.path.append({str(tmp_path)!r})\n"
        "from torch._dynamo.backends.registry import lookup_backend\n"
        "print(lookup_backend('ferryman').__module__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout.strip() == "ferryman.porting.graph.backend", done.stderr[-500:]


@pytest.mark.slow
def test_inductor_compiles_what_is_rewritten() -> None:
    model, x = Layer(), normal(2, 9, 32)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend=graph.backend, options={"place": "all"}, fullgraph=True)
    with torch.no_grad(), ferryman.trace() as ran:
        assert far(compiled(x), model(x)) < FAR
    assert ("rms_norm", "torch") in ran.calls


_TINY = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}
_GROUPED = {**_TINY, "num_key_value_heads": 2, "head_dim": 16}
_DRY = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_LLAMA = {"add_rms_norm": 4, "attention": 2, "linear": 15, "rope": 2}
_ENCODER = {"attention": 2, "bias_act": 3, "layer_norm": 1, "add_layer_norm": 4, "linear": 13}  # the pooler has a tanh
MODELS: dict[str, tuple[str, str, dict[str, Any], dict[str, int]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _GROUPED, {**_LLAMA, "rms_norm": 1, "silu_mul": 2}),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", _GROUPED, {**_LLAMA, "rms_norm": 5, "silu_mul": 2}),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GROUPED, {**_LLAMA, "rms_norm": 9, "gelu_mul": 2}),
    "gpt2": (
        "GPT2LMHeadModel",
        "GPT2Config",
        {
            "vocab_size": 96,
            "n_embd": 64,
            "n_layer": 2,
            "n_head": 4,
            "attn_pdrop": 0.0,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        {"attention": 2, "bias_act": 2, "layer_norm": 1, "add_layer_norm": 4, "linear": 9},
    ),
    "bert": ("BertModel", "BertConfig", {**_TINY, **_DRY}, _ENCODER),
    "vit": ("ViTModel", "ViTConfig", {**_TINY, **_DRY, "image_size": 32, "patch_size": 8}, _ENCODER),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_models_of_transformers_train_the_same(name: str) -> None:
    transformers = pytest.importorskip("transformers")
    model_name, config_name, options, calls = MODELS[name]
    torch.manual_seed(0)
    options = {k: v for k, v in options.items() if name != "vit" or k != "vocab_size"}
    model = getattr(transformers, model_name)(getattr(transformers, config_name)(**options))
    x = normal(2, 3, 32, 32) if name == "vit" else torch.arange(32).reshape(2, 16)
    report = graph.Report()

    def run(forward: Any) -> dict[str, Tensor]:
        model.zero_grad()
        out = forward(x)[0]
        # not its square: a norm's result has one length, and nothing would flow back
        (out * normal(*out.shape, seed=5)).sum().backward()
        return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    wanted = run(model)
    got = run(_compiled(model, report=report))
    assert report.graphs[-1].count("placed") == calls, str(report)
    # AOTAutograd gives zeros where eager PyTorch gives none: the pooler, whose result is not read here
    assert all(not bool(got[name].any()) for name in got.keys() - wanted.keys())
    # all as one vector: the gradient of a key's bias is 0 but for rounding
    ours, theirs = (torch.cat([grads[name].flatten() for name in wanted]) for grads in (got, wanted))
    assert float((ours - theirs).norm() / theirs.norm()) < 2.0**-18


def test_the_package_imports_without_it() -> None:
    assert importlib.import_module("ferryman.porting.graph").backend is graph.backend
