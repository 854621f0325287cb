"""Functions of PyTorch that are an op, or a mode of one. They propose; the proof decides, as for any candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ferryman.dispatch import registry
from ferryman.porting.graph.nodes import hinted, name_of, value, widening
from ferryman.porting.graph.normal import Normal
from ferryman.porting.graph.region import Argument, Candidate

_Made = tuple[tuple[Any, ...], tuple[fx.Node, ...]]
_PROPOSERS: dict[str, tuple[str, Callable[..., _Made | None]]] = {}


def _of(function: str, op: str) -> Callable[[Callable[..., _Made | None]], Callable[..., _Made | None]]:
    def enter(proposer: Callable[..., _Made | None]) -> Callable[..., _Made | None]:
        _PROPOSERS[function] = (op, proposer)
        return proposer

    return enter


def proposed(graph: fx.Graph, normal: Normal) -> Iterator[Candidate]:
    """A candidate for each call of such a function whose arguments the op has."""
    for node in graph.nodes:
        if node.op != "call_function" or not isinstance(value(node), torch.Tensor):
            continue
        op, proposer = _PROPOSERS.get(name_of(node), ("", None))
        known = registry.primitives().get(op)
        if proposer is None or known is None:
            continue
        try:
            proposal = proposer(normal, node, *node.args, **node.kwargs)
        except TypeError:  # arguments that the proposer does not take
            continue
        if proposal is not None:
            args = tuple(Argument(a) if isinstance(a, fx.Node) else a for a in proposal[0])
            yield Candidate(known, args, {0: node}, (*proposal[1], node), casts=op == "cross_entropy")


def _source(node: fx.Node) -> tuple[fx.Node, list[fx.Node]]:
    """What a value was widened from, and the casts between."""
    between: list[fx.Node] = []
    while widening(node) and isinstance(node.args[0], fx.Node):
        between.insert(0, node)
        node = node.args[0]
    return node, between


@_of("linear", "linear")
def _linear(normal: Normal, node: fx.Node, x: Any, weight: Any, bias: Any = None) -> _Made | None:
    return ((x, weight, bias), ())


@_of("addmm", "linear")
def _addmm(
    normal: Normal, node: fx.Node, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1, out: Any = None
) -> _Made | None:
    """A weight that lies (K, N), as a Conv1D's of transformers."""
    if beta != 1 or alpha != 1 or out is not None or value(bias).dim() != 1:
        return None
    return ((x, Argument(weight, ("t", 0)), bias), ())


@_of("cross_entropy", "cross_entropy")
def _cross_entropy(
    normal: Normal,
    node: fx.Node,
    logits: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> _Made | None:
    plain = weight is None and size_average is None and reduce is None and reduction == "mean"
    if not plain or value(target).dtype != torch.int64 or value(logits).dim() != 2:
        return None
    x, between = _source(logits)
    if name_of(x) in ("view", "reshape") and isinstance(x.args[0], fx.Node):  # the cast may stand before the view
        inner, casts = _source(x.args[0])
        wide = value(inner)
        if casts and wide.dim() > 2 and wide.shape[-1] == value(x).shape[-1]:
            rows = Argument(inner, ("rows", 0))
            return ((rows, target, ignore_index, label_smoothing), (*casts, x, *between))
    return ((x, target, ignore_index, label_smoothing), tuple(between))


@_of("scaled_dot_product_attention", "attention")
def _attention(
    normal: Normal,
    node: fx.Node,
    query: Any,
    key: Any,
    value_: Any = None,
    attn_mask: Any = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> _Made | None:
    v = value_
    if not isinstance(v, fx.Node) or dropout_p != 0.0 or not isinstance(is_causal, bool):
        return None
    if is_causal and not same_size(size_of(query, 2), size_of(key, 2)):
        return None  # PyTorch aligns to the first key, the op to the last
    between: list[fx.Node] = []
    if not enable_gqa:
        mine, other = _repeated(key), _repeated(v)
        if mine is not None and other is not None:
            key, v, between = mine[0], other[0], [*mine[1], *other[1]]
    number = hinted(value(scale)) if scale is not None else None
    if scale is not None and number is None:
        return None
    return ((query, key, v, is_causal, number, None, 0.0, attn_mask, None, None, None, 0.0, None), tuple(between))


def size_of(node: Any, axis: int) -> Any:
    return value(node).shape[axis]


def same_size(a: Any, b: Any) -> bool:
    """Whether two sizes are equal whatever the dynamic ones are."""
    if isinstance(a, int) and isinstance(b, int):
        return a == b
    ours, theirs = (getattr(getattr(n, "node", None), "expr", n) for n in (a, b))
    return bool(ours == theirs)


def _repeated(node: Any) -> tuple[fx.Node, list[fx.Node]] | None:
    """Keys of fewer heads, and the nodes that repeat them for each query head of a group."""
    between: list[fx.Node] = []
    while isinstance(node, fx.Node) and name_of(node) in ("reshape", "expand", "contiguous"):
        between.insert(0, node)
        node = node.args[0]
    if not isinstance(node, fx.Node) or (not between and name_of(node) != "repeat_interleave"):
        return None
    before, after = value(node.args[0]) if node.args else None, value(between[-1] if between else node)
    if not isinstance(before, torch.Tensor) or before.dim() != 4 or after.dim() != 4:
        return None
    whole = name_of(node) in ("getitem", "unsqueeze", "repeat_interleave") and before.shape[0] == after.shape[0]
    if not whole or before.shape[3] != after.shape[3] or any(len(n.users) > 1 for n in (node, *between)):
        return None
    return node.args[0], [node, *between]  # type: ignore[return-value]
