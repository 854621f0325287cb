"""A function's calls of PyTorch as an FX graph of the level that Dynamo hands a backend."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode, resolve_name

_WRITERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ipow__", "__ifloordiv__", "__imod__"}
_WRITERS |= {"__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__"}
_ASKS = {"shape", "dtype", "device", "requires_grad", "is_cuda", "is_cpu", "layout", "ndim", "names", "grad_fn"}


class _Recorder(TorchFunctionMode):
    def __init__(self, graph: fx.Graph, nodes: dict[int, fx.Node]) -> None:
        super().__init__()
        self.graph, self.nodes, self.kept = graph, nodes, []  # type: ignore[var-annotated]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _writes(func, kwargs):
            raise RuntimeError(f"{resolve_name(func) or func} writes over a tensor")
        result = func(*args, **(kwargs or {}))
        name = getattr(getattr(func, "__self__", None), "__name__", "")
        if name in _ASKS or not _holds_tensor(result):
            return result
        node = self.graph.call_function(func, self._named(tuple(args)), self._named(dict(kwargs or {})))
        node.meta["example_value"] = result
        self._enter(result, node)
        return result

    def _enter(self, result: Any, node: fx.Node) -> None:
        self.kept.append(result)  # an id is one object's while that object lives
        if isinstance(result, torch.Tensor):
            self.nodes.setdefault(id(result), node)
            return
        for index, part in enumerate(result):
            if isinstance(part, torch.Tensor):
                taken = self.graph.call_function(_getitem, (node, index))
                taken.meta["example_value"] = part
                self.nodes[id(part)] = taken

    def _named(self, item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            node = self.nodes.get(id(item))
            if node is None:
                node = self.graph.create_node("get_attr", f"constant_{len(self.kept)}")
                node.meta["example_value"] = item
                self._enter(item, node)
            return node
        if isinstance(item, tuple):
            return tuple(self._named(i) for i in item)
        if isinstance(item, list):
            return [self._named(i) for i in item]
        if isinstance(item, dict):
            return {k: self._named(v) for k, v in item.items()}
        return item


def _getitem(parts: Sequence[Any], index: int) -> Any:
    return parts[index]


_getitem.__name__ = "getitem"


def _writes(func: Any, kwargs: Mapping[str, Any] | None) -> bool:
    """What a call writes over has a node of before: the graph would say another value."""
    name = getattr(func, "__name__", "")
    return name in _WRITERS or (name.endswith("_") and not name.endswith("__")) or "out" in (kwargs or {})


def _holds_tensor(result: Any) -> bool:
    return isinstance(result, torch.Tensor) or (
        isinstance(result, (tuple, list)) and any(isinstance(part, torch.Tensor) for part in result)
    )


def record(
    function: Callable[..., Any], names: Sequence[str], args: Mapping[str, Any]
) -> tuple[fx.Graph, dict[str, fx.Node], tuple[fx.Node, ...]]:
    """(graph, the placeholder of each argument that is a tensor, the nodes of what the function returns).

    args: by name, in order; tensors may be on "meta". Raises what the function raises, and RuntimeError at the first
    call that writes over a tensor, and where a result is no tensor that the function made.
    """
    graph = fx.Graph()
    nodes: dict[int, fx.Node] = {}
    inputs: dict[str, fx.Node] = {}
    for name in names:
        if isinstance(args[name], torch.Tensor):
            inputs[name] = graph.placeholder(name)
            inputs[name].meta["example_value"] = args[name]
            nodes[id(args[name])] = inputs[name]
    recorder = _Recorder(graph, nodes)
    with recorder:
        result = function(*(args[name] for name in names))
    results = result if isinstance(result, tuple) else (result,)
    outputs = []
    for part in results:
        node = nodes.get(id(part))
        if node is None:
            raise RuntimeError(f"{resolve_name(function) or function}: a result was made by no call of PyTorch")
        outputs.append(node)
    graph.output(tuple(outputs))
    return graph, inputs, tuple(outputs)
