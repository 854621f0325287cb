"""A ported model run other ways: compiled, and replayed from a graph. A fault that only these have is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("transformers")

from ferryman.porting.model import measure, modes
from ferryman.porting.model.results import first_divergence
from tests.unit.model_bench import DTYPES, FAMILIES, SHORT, bench


def judge(distance: measure.LogitDistance) -> list[Any]:
    return []


def when_compiled(self: Any, own: Any, x: Tensor) -> Tensor:
    out: Tensor = own(x)
    return out * 1.02 if torch.compiler.is_compiling() else out


def test_a_fault_that_only_the_compiled_module_has_is_named() -> None:
    held = bench("llama", "bfloat16", faults={SHORT("1.mlp"): when_compiled})
    assert first_divergence(held.modules()) is None
    found = modes.compiled(held, judge, modes.Compiled(backend="aot_eager"))
    assert found.verdict == "FAIL" and found.first_divergence is not None, found.reason
    assert found.first_divergence.path == SHORT("1.mlp")
    assert found.reason.startswith(f"{SHORT('1.mlp')}: forward output is ")
    assert {m.path for m in found.modules if m.path.count(".") == 2} == {SHORT("0"), SHORT("1"), SHORT("2")}


@pytest.mark.skipif(modes.cannot_compile(torch.device("cpu")) is not None, reason="Inductor cannot compile here")
@pytest.mark.parametrize(
    ("family", "dtype", "backward"),
    [
        ("qwen3", "bfloat16", False),
        *(pytest.param(f, d, True, marks=pytest.mark.slow) for f in FAMILIES for d in DTYPES),
    ],
)
def test_the_compiled_layers_pass(family: str, dtype: str, backward: bool) -> None:
    held = bench(family, dtype, layers=2, backward=backward)
    found = modes.compiled(held, judge)
    assert (found.verdict, found.reason) == ("PASS", "")
    assert [m.path for m in found.modules] == [SHORT("0"), SHORT("1")]
    beside = [m for t in found.modules[0].tensors for m in t.measures if m.name.startswith("against eager")]
    assert beside and "inductor" in found.how


def test_what_cannot_be_compiled_is_not_run_and_what_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    held = bench("llama", layers=1, backward=False)
    with monkeypatch.context() as patch:
        patch.setattr(modes.shutil, "which", lambda name: None)
        patch.delenv("CXX", raising=False)
        found = modes.compiled(held, judge)
        assert found.verdict == "NOT_RUN" and "needs a compiler: none of g++, c++, clang++" in found.reason
        patch.setenv("CXX", "my-c++")
        assert "none of my-c++ is here" in str(modes.cannot_compile(torch.device("cpu")))

    def broken(module: nn.Module, args: Any, kwargs: Any) -> Any:
        raise RuntimeError("no such instruction")

    found = modes.compiled(held, judge, broken)
    assert found.verdict == "FAIL" and found.reason == "raised RuntimeError: no such instruction"


def test_graph_replay_is_not_applicable_on_a_cpu() -> None:
    found = modes.graph_replay(bench("llama", layers=1, backward=False))
    assert (found.verdict, found.reason) == ("NOT_RUN", "n/a: cpu has no CUDA graphs")


def replays(kind: str, path: str) -> modes.Capture:
    """A stand-in for a captured graph: what the step computes, or with a fault that graphs can have."""

    def capture(step: modes.Step, example: Tensor) -> modes.Step:
        first, count = step(example), 0

        def replayed(given: Tensor) -> dict[str, Tensor]:
            nonlocal count
            count += 1
            made = step(given)
            if kind == "stale":
                made[path] = first[path]
            elif kind == "accumulates":
                made[path] = made[path] * (1 + 0.05 * (count - 1))
            return made

        return replayed

    return capture


def test_a_graph_that_replays_what_eager_computes_passes() -> None:
    held = bench("qwen3", "bfloat16", layers=2)
    found = modes.graph_replay(held, replays("right", ""))
    assert (found.verdict, found.reason) == ("PASS", "")
    same, total = (int(n) for n in found.bitwise.split(" tensors")[0].split(" of "))
    assert same == total > 100
    tensors = {(m.path, t.tensor) for m in found.modules for t in m.tensors}
    assert {("lm_head", "output"), (SHORT("0"), "gradient of the input")} <= tensors
    assert (SHORT("1"), "gradient of mlp.up_proj.weight") in tensors


@pytest.mark.parametrize(
    ("kind", "tensor", "path", "measured"),
    [
        ("stale", SHORT("1.mlp"), SHORT("1.mlp"), "new input: "),
        ("accumulates", SHORT("0.self_attn"), SHORT("0.self_attn"), ""),
        ("stale", f"gradient of {SHORT('0')}.mlp.up_proj.weight", SHORT("0"), "new input: "),
    ],
)
def test_a_graph_with_a_fault_is_named(kind: str, tensor: str, path: str, measured: str) -> None:
    def only(step: modes.Step, example: Tensor) -> modes.Step:
        return replays(kind if tensor in step(example) else "right", tensor)(step, example)

    found = modes.graph_replay(bench("llama", "bfloat16", layers=2), only)
    assert found.verdict == "FAIL" and found.first_divergence is not None
    assert found.first_divergence.path == path and found.first_divergence.measure.startswith(measured)


def test_a_step_that_cannot_be_captured_fails_and_says_why() -> None:
    def capture(step: modes.Step, example: Tensor) -> modes.Step:
        raise RuntimeError("operation not permitted when stream is capturing")

    found = modes.graph_replay(bench("llama", layers=1, backward=False), capture)
    assert found.verdict == "FAIL"
    assert found.reason == "raised RuntimeError: operation not permitted when stream is capturing"
