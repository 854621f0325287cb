"""Masks that are the same whatever the model's inputs hold: causal, or a window, said as a matrix.

A model that builds its mask from positions in the graph hands attention a matrix where two words would do. The nodes
that make it are run on the sizes that the graph has; of dynamic sizes, on several. Only what equals `visible` in every
one is taken for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor, fx

from ferryman.ops.attention.scores import visible
from ferryman.porting.graph.nodes import disturbs, name_of, value
from ferryman.porting.graph.region import Argument, Candidate, Draw, computed, symbols_of

_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "empty")
_MOST_NODES = 400


def folded(candidate: Candidate) -> Candidate | None:
    """The candidate with its mask said as ``causal`` and ``window``, or left out; None where it says more than that."""
    options = dict(zip(candidate.op.names, candidate.args, strict=True))
    mask = options.get("mask")
    if not isinstance(mask, Argument) or options.get("causal") is not False or options.get("window") is not None:
        return None
    nodes = constant(mask.node)
    if nodes is None:
        return None
    q, k = value(candidate.inputs["q"].node), value(candidate.inputs["k"].node)
    matrices = []
    for draw in _draws(q, k, candidate):
        try:
            matrices.append((draw, mask.of(computed(nodes, draw)[mask.node])))
        except RuntimeError:  # sizes that do not go together
            return None
    for causal, window in _readings(nodes):
        if all(_says(matrix, draw, q, k, causal, window) for draw, matrix in matrices):
            said = {"causal": causal, "window": window, "mask": None}
            args = tuple(said.get(n, a) if n in said else a for n, a in options.items())
            words = "causal" if causal else "everything"
            note = f"its mask says {words}{'' if window is None else f' within {window}'}"
            return replace(candidate, args=args, given=tuple(nodes), note=note)
    return None


def constant(node: fx.Node) -> list[fx.Node] | None:
    """The nodes that compute a value, in order, if it follows from sizes alone."""
    nodes: dict[fx.Node, None] = {}
    queue = [node]
    while queue:
        here = queue.pop()
        if here in nodes:
            continue
        if not isinstance(value(here), (Tensor, tuple, list)):
            continue  # a size
        if here.op not in ("call_function", "call_method") or disturbs(here) or len(nodes) > _MOST_NODES:
            return None
        if any(word in name_of(here) for word in _RANDOM):
            return None
        nodes[here] = None
        queue += here.all_input_nodes
    order = {n: i for i, n in enumerate(node.graph.nodes)}
    return sorted(nodes, key=order.__getitem__)


def _readings(nodes: list[fx.Node]) -> Iterator[tuple[bool, int | None]]:
    yield True, None
    yield False, None
    numbers = {a for n in nodes for a in (*n.args, *n.kwargs.values()) if isinstance(a, int) and a > 1}
    windows = {abs(a) + more for a in numbers for more in (0, 1, -1)}
    for window in sorted(w for w in windows if w >= 1):
        yield True, window


def _draws(q: Tensor, k: Tensor, candidate: Candidate) -> list[Draw]:
    """The graph's sizes; where they are dynamic, several lengths of queries and keys, and two of anything else."""
    every = {s for a in candidate.inputs.values() for n in value(a.node).shape for s in symbols_of(n)}
    if not every:
        return [Draw(0, "normal", 1.0)]
    lengths = {*symbols_of(q.shape[2]), *symbols_of(k.shape[2])}
    return [
        Draw(i, "normal", 1.0, {}, {s: n if s in lengths else 2 for s in every})
        for i, n in enumerate((2, 7, 33, 160, 700))
    ]


def _says(mask: Tensor, draw: Draw, q: Tensor, k: Tensor, causal: bool, window: int | None) -> bool:
    sq, sk = draw.size(q.shape[2]), draw.size(k.shape[2])
    if tuple(mask.shape[-2:]) != (sq, sk):
        return False
    seen = visible(sq, sk, causal, window, mask.device)
    wanted = torch.ones((sq, sk), dtype=torch.bool, device=mask.device) if seen is None else seen
    if mask.dtype == torch.bool:
        return bool((mask == wanted).all())
    return bool((torch.where(wanted, mask == 0, mask <= torch.finfo(mask.dtype).min / 2)).all())
