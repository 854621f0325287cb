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
    testbed = bench("llama", "bfloat16", faults={SHORT("1.mlp"): when_compiled})
    assert first_divergence(testbed.modules()) is None
    result = modes.compiled(testbed, judge, modes.Compiled(backend="aot_eager"))
    assert result.verdict == "FAIL" and result.first_divergence is not None, result.reason
    assert result.first_divergence.path == SHORT("1.mlp")
    assert result.reason.startswith(f"{SHORT('1.mlp')}: forward output is ")
    assert {m.path for m in result.modules if m.path.count(".") == 2} == {SHORT("0"), SHORT("1"), SHORT("2")}


@pytest.mark.skipif(modes.cannot_compile(torch.device("cpu")) is not None, reason="Inductor cannot compile here")
@pytest.mark.alternate("dtype", "backward")
@pytest.mark.parametrize(
    ("family", "dtype", "backward"),
    [
        ("qwen3", "bfloat16", False),
        *(pytest.param(f, d, True, marks=pytest.mark.slow) for f in FAMILIES for d in DTYPES),
    ],
)
def test_the_compiled_layers_pass(family: str, dtype: str, backward: bool) -> None:
    testbed = bench(family, dtype, layers=2, backward=backward)
    result = modes.compiled(testbed, judge)
    assert (result.verdict, result.reason) == ("PASS", "")
    assert [m.path for m in result.modules] == [SHORT("0"), SHORT("1")]
    beside = [m for t in result.modules[0].tensors for m in t.measures if m.name.startswith("against eager")]
    assert beside and "inductor" in result.how


def test_what_cannot_be_compiled_is_not_run_and_what_raises_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    testbed = bench("llama", layers=1, backward=False)
    with monkeypatch.context() as patch:
        patch.setattr(modes.shutil, "which", lambda name: None)
        patch.delenv("CXX", raising=False)
        result = modes.compiled(testbed, judge)
        assert result.verdict == "NOT_RUN" and "needs a compiler: none of g++, c++, clang++" in result.reason
        patch.setenv("CXX", "my-c++")
        assert "none of my-c++ is here" in str(modes.cannot_compile(torch.device("cpu")))

    def broken(module: nn.Module, args: Any, kwargs: Any) -> Any:
        raise RuntimeError("no such instruction")

    result = modes.compiled(testbed, judge, broken)
    assert result.verdict == "FAIL" and result.reason == "raised RuntimeError: no such instruction"


def test_graph_replay_is_not_applicable_on_a_cpu() -> None:
    result = modes.graph_replay(bench("llama", layers=1, backward=False))
    assert (result.verdict, result.reason) == ("NOT_RUN", "n/a: cpu has no CUDA graphs")


def replays(kind: str, path: str) -> modes.Capture:
    """A stand-in for a captured graph: what the step computes, or with a fault that graphs can have."""

    def capture(step: modes.Step, example: Tensor) -> modes.Step:
        first, count = step(example), 0

        def replayed(given: Tensor) -> dict[str, Tensor]:
            nonlocal count
            count += 1
            tensors = step(given)
            if kind == "stale":
                tensors[path] = first[path]
            elif kind == "accumulates":
                tensors[path] = tensors[path] * (1 + 0.05 * (count - 1))
            return tensors

        return replayed

    return capture


def test_a_graph_that_replays_what_eager_computes_passes() -> None:
    testbed = bench("qwen3", "bfloat16", layers=2)
    result = modes.graph_replay(testbed, replays("right", ""))
    assert (result.verdict, result.reason) == ("PASS", "")
    same, total = (int(n) for n in result.bitwise.split(" tensors")[0].split(" of "))
    assert same == total > 100
    tensors = {(m.path, t.tensor) for m in result.modules for t in m.tensors}
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

    result = modes.graph_replay(bench("llama", "bfloat16", layers=2), only)
    assert result.verdict == "FAIL" and result.first_divergence is not None
    assert result.first_divergence.path == path and result.first_divergence.measure.startswith(measured)


def test_a_step_that_cannot_be_captured_fails_and_says_why() -> None:
    def capture(step: modes.Step, example: Tensor) -> modes.Step:
        raise RuntimeError("operation not permitted when stream is capturing")

    result = modes.graph_replay(bench("llama", layers=1, backward=False), capture)
    assert result.verdict == "FAIL"
    assert result.reason == "raised RuntimeError: operation not permitted when stream is capturing"
