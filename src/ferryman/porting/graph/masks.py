"""Tensor arguments that are the same whatever the model's inputs hold, and that an op has words for: a causal mask.

A model that builds its mask from positions in the graph hands attention a matrix where two words would do. The nodes
that make such a tensor are run on the sizes that the graph has; of dynamic sizes, on several. A reading of it, which
the op's folder proposes, is taken where it says the same in every one.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import Tensor, fx

from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Folding
from ferryman.porting.graph.nodes import disturbs, name_of, value
from ferryman.porting.graph.region import Candidate, Draw, computed, symbols_of

_RANDOM = ("rand", "dropout", "bernoulli", "normal", "multinomial", "empty")
_MOST_NODES = 400


@lru_cache(maxsize=1)
def _foldings() -> list[Folding]:
    return proposals("foldings")


def folded(candidate: Candidate) -> Candidate | None:
    """The candidate with a tensor said by other arguments, or left out; None where none says that alone."""
    return next((c for f in _foldings() if f.op == candidate.op.name and (c := _folded(candidate, f))), None)


def _folded(candidate: Candidate, folding: Folding) -> Candidate | None:
    given = candidate.inputs.get(folding.argument)
    nodes = None if given is None else constant(given.node)
    if given is None or nodes is None:
        return None
    numbers = {a for n in nodes for a in (*n.args, *n.kwargs.values()) if isinstance(a, int)}
    readings = list(folding.readings(candidate.options, numbers))
    sizes = [value(candidate.inputs[name].node).shape[axis] for name, axis in folding.sizes]
    tensors = []
    for draw in _draws(sizes, candidate) if readings else ():
        try:
            tensors.append((given.of(computed(nodes, draw)[given.node]), tuple(map(draw.size, sizes))))
        except RuntimeError:  # sizes that do not go together
            return None
    for arguments, words in readings:
        if all(folding.says(tensor, drawn, arguments) for tensor, drawn in tensors):
            said = {**arguments, folding.argument: None}
            args = tuple(said.get(n, a) for n, a in zip(candidate.op.names, candidate.args, strict=True))
            return replace(candidate, args=args, given=tuple(nodes), note=f"its {folding.argument} says {words}")
    return None


def simplify(candidate: Candidate) -> bool:
    """PyTorch's own function without the tensor of a folded candidate. Whether it has words for it."""
    node, given = candidate.outputs[0], candidate.given
    for folding in (f for f in _foldings() if given and f.op == candidate.op.name):
        plain = folding.plain(candidate.options)
        if plain is not None and all(
            v is not None or isinstance(node.kwargs.get(n), fx.Node) for n, v in plain.items()
        ):
            node.kwargs = {**node.kwargs, **plain}
            return True
    return False


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


def _draws(sizes: list[Any], candidate: Candidate) -> list[Draw]:
    """The graph's sizes; where they are dynamic, several of ``sizes``, and two of anything else."""
    every = {s for a in candidate.inputs.values() for n in value(a.node).shape for s in symbols_of(n)}
    if not every:
        return [Draw(0, "normal", 1.0)]
    long = {s for n in sizes for s in symbols_of(n)}
    return [
        Draw(i, "normal", 1.0, {}, {s: n if s in long else 2 for s in every})
        for i, n in enumerate((2, 7, 33, 160, 700))
    ]
