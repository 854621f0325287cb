"""Functions of PyTorch that are an op, as its folder says. They propose; the proof decides, as for any candidate."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import fx

from ferryman.dispatch import registry
from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Traced
from ferryman.porting.graph.nodes import hinted, name_of, value, widening
from ferryman.porting.graph.region import Argument, Candidate


class _Reader:
    """`ferryman.ops.recognition.Graph`."""

    example = staticmethod(value)
    name = staticmethod(name_of)

    def number(self, item: Any) -> float | None:
        return hinted(value(item))

    def narrow(self, node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
        between: list[fx.Node] = []
        while widening(node) and isinstance(node.args[0], fx.Node):
            between.insert(0, node)
            node = node.args[0]
        return node, between

    def same_size(self, a: Any, b: Any) -> bool:
        if isinstance(a, int) and isinstance(b, int):
            return a == b
        ours, theirs = (getattr(getattr(n, "node", None), "expr", n) for n in (a, b))
        return bool(ours == theirs)

    def view(self, node: fx.Node, kind: str) -> Argument:
        return Argument(node, (kind, 0))


@lru_cache(maxsize=1)
def _traced() -> list[tuple[str, Traced]]:
    return proposals("traced")


def proposed(graph: fx.Graph) -> Iterator[Candidate]:
    """A candidate for each call of such a function whose arguments the op has."""
    reader = _Reader()
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
            continue
        for traced in (t for name, t in _traced() if name == name_of(node)):
            try:
                proposal = traced.arguments(reader, *node.args, **node.kwargs)
            except TypeError:  # arguments that it does not take
                continue
            if proposal is not None:
                args = tuple(Argument(a) if isinstance(a, fx.Node) else a for a in proposal[0])
                known = registry.primitive(traced.op)
                yield Candidate(known, args, {0: node}, (*proposal[1], node), casts=traced.casts)
