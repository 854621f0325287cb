"""A graph with calls of ops in the place of regions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from ferryman.porting.graph.nodes import value
from ferryman.porting.graph.region import Argument, Candidate


def place(graph: fx.Graph, candidates: Sequence[Candidate]) -> None:
    """Put ``torch.ops.ferryman.*`` in the place of each region; what nobody reads of it then is taken out."""
    moved: dict[fx.Node, fx.Node] = {}
    for number in {n for c in candidates for node in c.region for n in node.all_input_nodes}:
        if isinstance(value(number), torch.SymFloat):
            value(number).node.guard_float("", 0)  # it is a constant of the call now: another one compiles again
    for candidate in candidates:
        _one(graph, candidate, moved)
    for candidate in candidates:
        for node in reversed((*candidate.given, *candidate.region)):
            if not node.users and not node._erased:
                graph.erase_node(node)
    if candidates:
        _any_layout(graph)


def _one(graph: fx.Graph, candidate: Candidate, moved: dict[fx.Node, fx.Node]) -> None:
    op = candidate.op
    nodes = {name: moved.get(a.node, a.node) for name, a in candidate.inputs.items()}
    order = {node: i for i, node in enumerate(graph.nodes)}
    last = max(nodes.values(), key=order.__getitem__)
    while last.next.op in ("placeholder", "get_attr"):
        last = last.next
    where = last.next
    with graph.inserting_before(where):
        args: list[Any] = []
        for name, given in zip(op.names, candidate.args, strict=True):
            args.append(_viewed(graph, nodes[name], given) if isinstance(given, Argument) else given)
        call = graph.call_function(getattr(torch.ops.ferryman, op.name).default, tuple(args))
        call.meta["ferryman"] = op.name
        for index, node in candidate.outputs.items():
            replacement = call if len(op.outputs) == 1 else graph.call_function(_getitem, (call, index))
            replacement.meta["example_value"] = value(node)
            for key in ("stack_trace", "nn_module_stack", "source_fn_stack"):
                if key in node.meta:
                    replacement.meta[key] = call.meta[key] = node.meta[key]
            if candidate.casts:
                replacement = graph.call_method("to", (replacement, value(node).dtype))
                replacement.meta["example_value"] = value(node)
            node.replace_all_uses_with(replacement)
            moved[node] = replacement


def _getitem(parts: Any, index: int) -> Any:
    return parts[index]


def _viewed(graph: fx.Graph, node: fx.Node, argument: Argument) -> fx.Node:
    if argument.view is None:
        return node
    kind, dim = argument.view
    called = {"rows": ("flatten", (node, 0, -2)), "t": ("t", (node,))}.get(kind, (kind, (node, dim)))
    viewed = graph.call_method(*called)
    viewed.meta["example_value"] = argument.of(value(node))
    return viewed


def _any_layout(graph: fx.Graph) -> None:
    """An op's result is contiguous where the region's kept its inputs' strides: a view of it may have to copy."""
    for node in graph.nodes:
        if node.op == "call_method" and node.target == "view" and not isinstance(node.args[1], torch.dtype):
            node.target = "reshape"
