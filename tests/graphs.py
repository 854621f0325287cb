"""Graphs as Dynamo hands them to a backend, and what becomes of them: shared by the tests of the graph backend."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from ferryman.porting import graph
from ferryman.porting.graph.account import PLACED


def rewritten(
    function: Callable[..., Any], args: Sequence[Any], place: Any = "all", dynamic: bool | None = False
) -> tuple[graph.GraphReport, fx.GraphModule, Any]:
    """(report, rewritten graph, its results) of a function."""
    kept: list[Any] = []

    def backend(gm: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        kept.extend((graph.rewrite(gm, place)[0], gm))
        return gm.forward

    torch._dynamo.reset()
    results = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)(*args)
    return kept[0], kept[1], results


def placed(report: graph.GraphReport) -> dict[str, int]:
    return dict(report.count(PLACED))


def at_output(report: graph.GraphReport, gm: fx.GraphModule) -> list[str]:
    """Ops that make what the graph returns."""
    (output,) = (n for n in gm.graph.nodes if n.op == "output")
    op_names = []
    for node in output.all_input_nodes:
        while "ferryman" not in node.meta and node.all_input_nodes and node.target in ("to",):
            node = node.all_input_nodes[0]
        source = node.all_input_nodes[0] if getattr(node.target, "__name__", "") == "_getitem" else node
        if "ferryman" in source.meta:
            op_names.append(source.meta["ferryman"])
    return op_names


def far(got: Any, want: Any) -> float:
    """Largest difference relative to the largest value, over all results."""
    pairs = zip(got, want, strict=True) if isinstance(got, (tuple, list)) else [(got, want)]
    each = [(a.double() - b.double()).abs().max() / b.double().abs().max() for a, b in pairs]
    return float(torch.stack(each).max())  # NaN if any is


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
