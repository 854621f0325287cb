"""Rules over devices and streams, which need a GPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ferryman.ops.primitive import Primitive
from ferryman.porting.mutate.rule import Kernel, Named, like, mapped, results_of, rule, tensors_of

NO_STREAMS = "a CPU has no streams"


@rule("side stream", NO_STREAMS)
def written_on_a_side_stream(op: Primitive, right: Kernel) -> Named:
    """The work is left on a stream that nobody waits for."""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            torch.cuda._sleep(20_000_000)
            for y in results_of(result):
                y.add_(1)
        return result

    yield "", kernel


@rule("stale graph replay", NO_STREAMS)
def graph_replayed_on_old_inputs(op: Primitive, right: Kernel) -> Named:
    """A graph of an earlier call is replayed, with that call's inputs."""
    graphs: dict[Any, Any] = {}

    def kernel(*args: Any) -> Any:
        facts = tuple((tuple(a.shape), a.dtype, a.stride()) for a in tensors_of(args[:-1]))
        key = facts, *(a for a in args[:-1] if not isinstance(a, Tensor | list))
        if key not in graphs:
            kept = [mapped(Tensor.clone, a) for a in args]
            right(*kept)
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                result = right(*kept)
            graphs[key] = graph, result
        graph, result = graphs[key]
        graph.replay()
        return result

    yield "", kernel


@rule("wrong device", "a CPU is the host")
def result_on_the_host(op: Primitive, right: Kernel) -> Named:
    """The result comes back on the host."""

    def kernel(*args: Any) -> Any:
        result = right(*args)
        first, *rest = results_of(result)
        return like((first.cpu(), *rest), result)

    yield "", kernel
