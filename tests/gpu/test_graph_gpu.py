"""torch.compile(model, backend="ferryman") on a device: kernels of ours run."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import ferryman
from ferryman.porting import graph
from tests.unit.test_graph_backend import Layer

pytestmark = pytest.mark.gpu


def _layer(dtype: torch.dtype) -> tuple[Layer, torch.Tensor]:
    torch.manual_seed(0)
    return Layer(512, 8).to("cuda", dtype), torch.randn(2, 256, 512, device="cuda", dtype=dtype)


def _eager(dtype: torch.dtype) -> torch.Tensor:
    model, x = _layer(dtype)
    with torch.no_grad():
        return model(x)


def _run(mode: str | None, place: Any, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, graph.Report, Any]:
    model, x = _layer(dtype)
    report = graph.Report()
    torch._dynamo.reset()
    compiled = (
        torch.compile(
            model, backend=graph.backend, mode=mode, fullgraph=True, options={"place": place, "report": report}
        )
        if mode is None
        else torch.compile(
            model,
            backend=lambda gm, inputs: graph.backend(gm, inputs, mode=mode, options={"place": place, "report": report}),
            fullgraph=True,
        )
    )
    with torch.no_grad():
        for _ in range(3):
            compiled(x)
        with ferryman.trace() as ran:
            result = compiled(x).clone()
        exact = model.double()(x.double())
    return result, exact, report, ran


@pytest.mark.parametrize("place", ["all", "auto"])
@pytest.mark.parametrize("mode", [None, "reduce-overhead"])
def test_a_layer_is_as_near_to_float64_as_without_our_ops(place: str, mode: str | None) -> None:
    """An op that is placed rounds its results, as eager PyTorch does; Inductor keeps some of them in float32."""
    result, exact, report, ran = _run(mode, place, torch.bfloat16)
    plain = _eager(torch.bfloat16) if place == "all" else _run(mode, "none", torch.bfloat16)[0]
    ours, theirs = ((m.double() - exact).abs().mean() for m in (result, plain))
    assert ours <= 1.1 * theirs  # fewer or the same roundings
    if place == "all":
        assert report.calls()["rms_norm"] == 1 and report.calls()["attention"] == 1
        if mode is None:  # a graph that is replayed calls nothing
            assert any(op == "rms_norm" and name != "definition" for op, name in ran.calls)


def test_what_the_policy_places_is_no_library_call() -> None:
    _, _, report, _ = _run(None, "auto", torch.bfloat16)
    for entry in report.entries:
        assert entry.verdict != "placed" or not entry.implementation.startswith(("torch", "definition"))
