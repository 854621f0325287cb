"""Candidates: regions of a graph that an op may take the place of, and why a region that looks like one stays."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from ferryman.porting.graph import functions
from ferryman.porting.graph.match import Binding, Matcher
from ferryman.porting.graph.nodes import disturbs, name_of, value, widening
from ferryman.porting.graph.normal import Normal
from ferryman.porting.graph.patterns import Pattern, all_patterns
from ferryman.porting.graph.region import Argument, Candidate, checked
from ferryman.porting.graph.terms import bare

# Inner values that may have users elsewhere: the op does not compute them, or they cost nothing.
_FREE = frozenset(
    (
        "getitem",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "chunk",
        "split",
        "narrow",
        "view",
        "reshape",
        "expand",
        "mT",
        "T",
        "t",
    )
)


@dataclass(frozen=True)
class Stayed:
    """A region that looks like an op and stays."""

    op: str
    where: str
    reason: str


@dataclass
class Survey:
    candidates: list[Candidate] = field(default_factory=list)
    stayed: list[Stayed] = field(default_factory=list)


def find(graph: fx.Graph) -> Survey:
    """All candidates of a graph, the largest regions first; none overlaps another."""
    normal = Normal(graph)
    order = {node: i for i, node in enumerate(graph.nodes)}
    barriers = [order[node] for node in graph.nodes if disturbs(node)]
    survey, taken = Survey(), set[fx.Node]()
    refused: dict[tuple[str, str], Stayed] = {}
    for candidate in _proposed(graph, normal, order, taken, refused):
        reason = _obstacle(candidate, order, barriers)
        if reason is None:
            taken.update(candidate.region)
            survey.candidates.append(candidate)
        else:
            refused.setdefault((candidate.op.name, candidate.where), Stayed(candidate.op.name, candidate.where, reason))
    placed = {node.name for node in taken}
    survey.stayed = [s for s in refused.values() if s.where not in placed]
    return survey


def _proposed(
    graph: fx.Graph,
    normal: Normal,
    order: Mapping[fx.Node, int],
    taken: set[fx.Node],
    refused: dict[tuple[str, str], Stayed],
) -> Iterator[Candidate]:
    for candidate in functions.proposed(graph):
        if not taken.intersection(candidate.region):
            yield candidate
    for pattern in all_patterns():
        matcher = Matcher(pattern, normal)
        for node in graph.nodes:
            if node in taken or node not in normal.term:
                continue
            for binding in matcher.at(node):
                completed = _completed(pattern, matcher, normal, node, binding, order, taken, refused)
                if completed is not None and not taken.intersection(completed.region):
                    yield completed
                    if node in taken:
                        break


def _completed(
    pattern: Pattern,
    matcher: Matcher,
    normal: Normal,
    node: fx.Node,
    binding: Binding,
    order: Mapping[fx.Node, int],
    taken: set[fx.Node],
    refused: dict[tuple[str, str], Stayed],
) -> Candidate | None:
    outputs = {0: node}
    for index in range(1, len(pattern.roots)):
        inner = (binding.roots or {}).get(index)
        if inner is not None:
            continue
        partner = _partner(pattern, matcher, normal, node, binding, index, order, taken)
        if partner is None:
            where = pattern.op.name, node.name
            why = f"nothing computes its {pattern.op.outputs[index]} with the same arguments"
            refused.setdefault(where, Stayed(*where, why))
            return None
        outputs[index], binding = partner
    stops = {bound.term: name for name, bound in binding.terms.items()}
    walked = _region(list(outputs.values()), stops, normal, order)
    if walked is None:
        return None
    region, bases = walked
    for index, term in (binding.roots or {}).items():
        if index in outputs:
            continue
        same = [n for n in region if normal.term.get(n) is term and value(n).dtype == binding.storage]
        if not same:
            return None
        outputs[index] = same[0]
    args: list[Any] = []
    for name in pattern.op.names:
        if name in binding.terms:
            if name not in bases:
                return None
            args.append(Argument(bases[name], binding.terms[name].view))
        elif name in binding.scalars:
            args.append(binding.scalars[name])
        elif name in pattern.fixed:
            args.append(pattern.fixed[name])
        else:
            return None  # a scalar that the region does not tell
    return Candidate(pattern.op, tuple(args), outputs, region)


def _partner(
    pattern: Pattern,
    matcher: Matcher,
    normal: Normal,
    node: fx.Node,
    binding: Binding,
    index: int,
    order: Mapping[fx.Node, int],
    taken: set[fx.Node],
) -> tuple[fx.Node, Binding] | None:
    """The nearest node beside one that is another output under the same binding."""
    same = bare(normal.term[node])
    nodes = [n for n in normal.term if bare(normal.term[n]) is not same and n not in taken]
    for other in sorted(nodes, key=lambda n: abs(order[n] - order[node])):
        for extended in matcher.rest(binding, index, other):
            if all(name in extended.terms for name in pattern.variables):
                return other, extended
    return None


def _region(
    roots: Sequence[fx.Node], stops: Mapping[Any, str], normal: Normal, order: Mapping[fx.Node, int]
) -> tuple[tuple[fx.Node, ...], dict[str, fx.Node]] | None:
    """(nodes from the arguments to the roots, the node of each argument); None where something else is read."""
    region: set[fx.Node] = set()
    bases: dict[str, fx.Node] = {}
    queue = list(roots)
    while queue:
        node = queue.pop()
        if node in region:
            continue
        term = normal.term.get(node)
        if term in stops and node not in roots:
            base = node
            while widening(base) and normal.term.get(base.args[0]) is term:  # type: ignore[arg-type]
                region.add(base)
                base = base.args[0]  # type: ignore[assignment]
            if bases.setdefault(stops[term], base) is not base:
                return None
            continue
        if node.op not in ("call_function", "call_method"):
            if isinstance(value(node), torch.Tensor):
                return None
            continue  # a size
        region.add(node)
        queue += [n for n in node.all_input_nodes if isinstance(value(n), (torch.Tensor, tuple, list))]
    return tuple(sorted(region, key=order.__getitem__)), bases


def _obstacle(candidate: Candidate, order: Mapping[fx.Node, int], barriers: Sequence[int]) -> str | None:
    """Why a region cannot be replaced as it stands in its graph."""
    region, outputs = set(candidate.region), set(candidate.outputs.values())
    for node in candidate.region:
        if node in outputs or name_of(node) in _FREE or widening(node):
            continue
        others = [user for user in node.users if user not in region]
        if others:
            return f"{node.name}, a value inside, is read by {others[0].name} too"
    first, last = order[candidate.region[0]], order[candidate.region[-1]]
    if any(first < at < last for at in barriers):
        return "a tensor is written over, or a mode changed, in its midst"
    ready = max((order[a.node] for a in candidate.inputs.values()), default=-1)
    wanted = [order[user] for node in outputs for user in node.users if user not in region]
    if wanted and min(wanted) <= ready:
        return "a result is read before all arguments are known"
    for name, argument in candidate.inputs.items():
        owners = {n for shared in candidate.op.gradient.owners for n in shared}
        if value(argument.node).requires_grad and name not in owners and candidate.op.gradient.backward:
            return f"{name} requires grad, and {candidate.op.name} gives it none"
    return checked(candidate)
