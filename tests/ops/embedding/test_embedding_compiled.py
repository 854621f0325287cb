"""A ported table under torch.compile: the op's gradient where many ids meet in a row, the module's own elsewhere."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import ferryman


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(32, 16)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.table(ids)
        return y


@pytest.mark.parametrize(("ids", "grad", "ours"), [(511, True, False), (512, True, True), (512, False, False)])
def test_many_ids_of_a_row_keep_the_op(ids: int, grad: bool, ours: bool) -> None:
    torch._dynamo.reset()
    torch.manual_seed(0)
    net = Net()
    ferryman.port(net)
    targets: list[str] = []

    def looking(graph: torch.fx.GraphModule, _: Any) -> Any:
        targets.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph.forward

    x = torch.randint(32, (ids,))
    with torch.set_grad_enabled(grad):
        y = torch.compile(net, backend=looking, fullgraph=True)(x)
    assert any("ferryman.embedding" in name for name in targets) is ours, targets
    assert torch.equal(y, net.table.weight[x])
    if grad:
        y.sum().backward()
        counted = torch.bincount(x, minlength=32).float()[:, None].expand(32, 16)
        assert net.table.weight.grad is not None and torch.equal(net.table.weight.grad, counted)
