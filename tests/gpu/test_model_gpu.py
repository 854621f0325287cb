"""Real widths on a real device: `check_model` with every op on the device's own kernels, and the compiled layer."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import ferryman
from ferryman.dispatch import registry, select
from ferryman.integrations.transformers import check_model, port, watch
from ferryman.porting.model import config as model_config
from ferryman.porting.model import modes
from ferryman.porting.model.modules import Bench
from ferryman.porting.model.replay import twin
from ferryman.porting.model.results import first_divergence

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]
# the library's, as dispatch has them
PRODUCTS = {"linear": "torch", "linear_backward": "torch"}


def native() -> str:
    return "cuda" if select.profile_for(GPU).vendor == "nvidia" else "hip"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_real_widths_on_the_devices_own_kernels(name: str, dtype: str) -> None:
    """Forward and backward, Ferryman's kernels alone: neither torch nor the definition may serve a call that is no
    product."""
    modes_too = dtype == "bfloat16"  # a compilation takes most of a minute
    with ferryman.use(native(), "triton", **PRODUCTS):
        result = check_model(name, device=GPU, dtype=dtype, run_modes=modes_too)
    assert result.verdict == "PASS", "\n".join(result.reasons)
    assert result.cuts == ["4 layers"] and not result.unsupported
    served = {(c.op, by.partition(".")[0]) for c in result.calls for by in c.served}
    assert {by for op, by in served if op not in PRODUCTS} <= {native(), "triton"}, served
    forward = {c.op for c in result.calls if c.phase == "forward"}
    assert forward == {"add_rms_norm", "attention", "embedding", "linear", "rms_norm", "rope", "silu_mul"}
    ran = {m.mode: m.verdict for m in result.modes}
    assert ran == ({"torch.compile": "PASS", "CUDA graph": "PASS"} if modes_too else {})
    assert result.exact == "float64" and result.first_divergence is None


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_real_widths_as_dispatch_chooses(name: str) -> None:
    result = check_model(name, device=GPU, dtype="bfloat16")
    assert result.verdict == "PASS", "\n".join(result.reasons)
    assert not result.fallbacks


def bench(family: str, dtype: torch.dtype, backward: bool = True, faults: Any = None, tiny: bool = True) -> Bench:
    wanted = model_config.spec(family, tiny=tiny, layers=4)
    model = model_config.build(wanted, GPU, dtype, 0, copies=1.0)
    tokens = torch.randint(1024, (2, 128), generator=torch.Generator().manual_seed(0)).to(GPU)
    also = twin(model)
    sites = {site.path for site in port(also).ported}
    for path, wrap in (faults or {}).items():
        plant(also, path, wrap)
    return Bench(model, also, tokens, sites, backward, watch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("name", ["qwen3", "llama", "qwen2", "mistral", "gemma"])
def test_no_module_of_a_right_port_diverges(name: str, dtype: torch.dtype) -> None:
    """Forward and backward, on the device's own kernels, against float64. Products are the library's, as dispatch has
    them: limits come from what its own sums err, in whatever order it takes them."""
    with ferryman.use(native(), "triton", **PRODUCTS):
        modules = bench(name, dtype).modules()
    assert first_divergence(modules) is None, first_divergence(modules)
    assert {m.exact for m in modules} == {"float64"}


@pytest.mark.parametrize(
    ("path", "fault", "direction"),
    [
        ("model.layers.2.mlp", lambda self, own, x: own(x) * 1.01, "forward"),
        ("model.layers.1.self_attn.k_norm", lambda self, own, x: own(x) * 0.99, "forward"),
        ("model.layers.3.self_attn.q_norm", lambda self, own, x: own(Scaled.apply(x, 1.02)), "backward"),
    ],
)
def test_a_planted_fault_is_named(path: str, fault: Any, direction: str) -> None:
    with ferryman.use(native(), "triton"):
        first = first_divergence(bench("qwen3", torch.bfloat16, faults={path: fault}).modules())
    assert first is not None and (first.path, first.direction) == (path, direction), first


class Scaled(torch.autograd.Function):
    """The identity, whose gradient is scaled."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:  # type: ignore[override]
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * ctx.factor, None


def plant(model: Any, path: str, wrap: Any) -> None:
    module = model.get_submodule(path)
    own = type(module).forward
    forward = {"forward": lambda self, *args, **kwargs: wrap(self, functools.partial(own, self), *args, **kwargs)}
    module.__class__ = type(type(module).__name__, (type(module),), forward)


def no_limits(distance: Any) -> list[Any]:
    return []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_compiled_layers_match_eager_ones(dtype: torch.dtype) -> None:
    model_bench = bench("qwen3", dtype)
    result = modes.compiled(model_bench, no_limits)
    assert (result.verdict, result.reason) == ("PASS", "")
    assert [m.path for m in result.modules] == model_bench.layers


def test_a_fault_that_only_the_compiled_module_has_is_named() -> None:
    def when_compiled(self: Any, own: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = own(x)
        return out * 1.02 if torch.compiler.is_compiling() else out

    model_bench = bench("qwen3", torch.bfloat16, faults={"model.layers.2.mlp": when_compiled})
    assert first_divergence(model_bench.modules()) is None
    result = modes.compiled(model_bench, no_limits)
    assert result.verdict == "FAIL" and result.first_divergence is not None, result.reason
    assert result.first_divergence.path == "model.layers.2.mlp"


@pytest.mark.parametrize("name", ["torch", "own"])
def test_graph_replay_matches_eager(name: str) -> None:
    """On the captured input, on another, and again; forward alone, and forward with backward."""
    with ferryman.use(*(("torch",) if name == "torch" else (native(), "triton"))):
        model_bench = bench("qwen3", torch.bfloat16)
        result = modes.graph_replay(model_bench)
    assert (result.verdict, result.reason) == ("PASS", "")
    assert "tensors are bitwise those of the eager run" in result.bitwise
    assert {t.direction for m in result.modules for t in m.tensors} == {"forward", "backward"}


def test_a_fault_that_only_the_captured_module_has_is_named() -> None:
    def when_captured(self: Any, own: Any, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = own(x)
        return out * 1.05 if torch.cuda.is_current_stream_capturing() else out

    model_bench = bench("llama", torch.bfloat16, backward=False, faults={"model.layers.1.mlp": when_captured})
    result = modes.graph_replay(model_bench)
    assert result.verdict == "FAIL" and result.first_divergence is not None, result.reason
    assert result.first_divergence.path == "model.layers.1.mlp"


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma"])
def test_the_other_families(name: str) -> None:
    with ferryman.use(native(), "triton"):
        result = check_model(name, device=GPU, dtype="bfloat16", backward=False, run_modes=False)
    assert (result.verdict, result.reasons) == ("PASS", [])


def test_a_padded_batch_generates_the_same_text() -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=512,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=1024,
        num_hidden_layers=3,
        vocab_size=1000,
        eos_token_id=None,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    with GPU:
        model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        prompt, mask = torch.randint(1, 1000, (3, 41)), torch.ones(3, 41, dtype=torch.long)
    mask[0, :13] = 0
    ask: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 24, "do_sample": False}
    before = model.generate(prompt, **ask)
    port(model)
    with ferryman.use(native(), "triton"), ferryman.trace() as traced:
        assert torch.equal(model.generate(prompt, **ask), before)
    lines = {name: count for (op, name), count in traced.calls.items() if op == "attention"}
    assert sum(lines.values()) == 3 * 24
    assert {registry.implementation("attention", name).backend for name in lines} == {"triton"}


def test_the_compiled_layer_keeps_its_speed_and_its_graph() -> None:
    """0.98 of the unported layer's speed in every forward case, and no recompilation for new lengths.

    By the device's time; and as called, where the host can keep the device busy.
    """
    path = os.pathsep.join(p for p in ("src", os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, "benchmarks/compiled_layer.py", "--json"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    again = report["recompilations_on_unseen_lengths"]
    assert again["forward"]["ported"] == 0
    assert again["training"]["ported"] <= again["training"]["unported"]  # Inductor's own guards
    forward = [c for c in report["cases"] if c["mode"] == "forward"]
    slow = [c for c in forward if c["replayed"]["speed"] < 0.98]
    busy = [c for c in forward if c["unported_us"] < 1.1 * c["replayed"]["unported_us"]]
    assert len(forward) == 4 and busy and slow == [], json.dumps(forward)
    assert [c for c in busy if c["speed"] < 0.98] == [], json.dumps(forward)


def test_every_op_has_a_kernel_of_ours_here() -> None:
    """In Triton; and what C++ has for the other vendor it has for this one."""
    vendor = select.profile_for(GPU).vendor
    assert registry.probe("triton", vendor) == () == registry.probe(native(), vendor)
    for op in registry.primitives():
        backends = {line.backend for line in registry.implementations(op)}
        assert "triton" in backends, op
        assert "hip" not in backends or native() in backends, op
