"""Real widths on a real device: `check_model` with every op on the device's own kernels, and the compiled layer."""

from __future__ import annotations

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
from ferryman.integrations.transformers import check_model, port

pytestmark = pytest.mark.gpu
GPU = torch.device("cuda", 0)
ROOT = Path(__file__).parents[2]


def native() -> str:
    return "cuda" if select.profile_for(GPU).vendor == "nvidia" else "hip"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_real_widths_on_the_devices_own_kernels(name: str, dtype: str) -> None:
    """Forward and backward, Ferryman's kernels alone: neither torch nor the definition may serve a call."""
    with ferryman.use(native(), "triton"):
        found = check_model(name, device=GPU, dtype=dtype)
    assert (found.verdict, found.reasons) == ("PASS", [])
    assert found.cuts == ["4 layers"] and not found.unsupported
    served = {by for c in found.calls for by in c.served}
    assert served <= {native(), "triton"}, served
    forward = {c.op: set(c.served) for c in found.calls if c.phase == "forward"}
    assert set(forward) == {"attention", "rms_norm", "rope", "silu_mul"}


@pytest.mark.parametrize("name", ["qwen3", "llama"])
def test_real_widths_as_dispatch_chooses(name: str) -> None:
    found = check_model(name, device=GPU, dtype="bfloat16")
    assert (found.verdict, found.reasons) == ("PASS", [])
    assert not found.fallbacks


@pytest.mark.parametrize("name", ["qwen2", "mistral", "gemma"])
def test_the_other_families(name: str) -> None:
    with ferryman.use(native(), "triton"):
        found = check_model(name, device=GPU, dtype="bfloat16", backward=False)
    assert (found.verdict, found.reasons) == ("PASS", [])


def test_a_padded_batch_generates_the_same_text() -> None:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        hidden_size=512, num_attention_heads=8, num_key_value_heads=2, head_dim=64, intermediate_size=1024,
        num_hidden_layers=3, vocab_size=1000, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
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
    assert traced.calls["attention", "triton"] == 3 * 24


def test_the_compiled_layer_keeps_its_speed_and_its_graph() -> None:
    """0.98 of the unported layer's speed in every forward case, and no recompilation for new lengths."""
    done = subprocess.run(
        [sys.executable, "benchmarks/compiled_layer.py", "--json"], cwd=ROOT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": "src"}, timeout=280, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout)
    again = found["recompilations_on_unseen_lengths"]
    assert again["forward"]["ported"] == 0
    assert again["training"]["ported"] <= again["training"]["unported"]  # Inductor's own guards
    assert found["speed_forward_worst"] >= 0.98, found["cases"]


def test_every_ported_op_has_a_kernel_of_ours_here() -> None:
    for op in ("attention", "rms_norm", "rope", "silu_mul", "gelu_mul"):
        names = {line.backend for line in registry.implementations(op)}
        assert {"triton"} <= names and (op == "attention" or native() in names)
        assert registry.probe("triton", select.profile_for(GPU).vendor) == ()
