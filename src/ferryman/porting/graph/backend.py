"""``torch.compile(model, backend="ferryman")``: Dynamo's graph with ops in it, handed to Inductor."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.porting.graph import account, candidates, masks, place, policy, proof
from ferryman.porting.graph.account import Entry, GraphReport, Report
from ferryman.porting.graph.nodes import VIEWS, name_of, value, widening
from ferryman.porting.graph.region import Argument, Candidate, checked, meta_of

_NAME = "torch.compile(backend='ferryman')"
# Higher-order calls whose body runs as it stands, once for each call.
_INLINE = ("tag_activation_checkpoint", "invoke_subgraph", "wrap")


def backend(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """Compile a graph of Dynamo's.

    mode: as for Inductor. options: ``place``: "auto" (see `policy`), "all", "none", or names of ops; ``inner``: the
    backend that compiles the rewritten graph, by name or as a callable, default "inductor"; ``report``: a
    `account.Report` that the graph's report is appended to. Any other option is Inductor's configuration.
    Raises ArgumentError, UnknownName.
    """
    chosen = dict(options or {})
    wanted = policy.check_place(chosen.pop("place", "auto"), registry.primitives())
    inner = chosen.pop("inner", "inductor")
    report = chosen.pop("report", None)
    if report is not None and not isinstance(report, Report):
        raise ArgumentError(_NAME, "options['report']", type(report).__name__, "a ferryman.porting.graph.Report")
    for graph_report in rewrite(gm, wanted):
        account.enter(graph_report)
        if report is not None:
            report.graphs.append(graph_report)
    return _compiled(gm, example_inputs, inner, mode, chosen)


def rewrite(gm: fx.GraphModule, wanted: str | tuple[str, ...] = "auto") -> list[GraphReport]:
    """Put ops into a graph of Dynamo's, in place, and into the bodies of its checkpoints; what became of each."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    reports = []
    with unset_fake_temporarily():
        for each in [gm, *_bodies(gm)]:
            started = time.perf_counter()
            report = _rewritten(each, wanted)
            report.seconds = time.perf_counter() - started
            reports.append(report)
    return reports


def _bodies(gm: fx.GraphModule) -> list[fx.GraphModule]:
    bodies: list[fx.GraphModule] = []
    for node in gm.graph.nodes:
        if node.op != "call_function" or getattr(node.target, "__name__", "") not in _INLINE:
            continue
        for argument in node.args:
            if isinstance(argument, fx.Node) and argument.op == "get_attr":
                body = getattr(gm, str(argument.target), None)
                if isinstance(body, fx.GraphModule) and body not in bodies:
                    bodies += [body, *_bodies(body)]
    return bodies


def _rewritten(gm: fx.GraphModule, wanted: str | tuple[str, ...]) -> GraphReport:
    report = GraphReport()
    if _under_autocast(gm.graph):
        report.entries.append(Entry("", "", account.STAYED, "autocast is on: casts are not in the graph to be seen"))
        return report
    survey = candidates.find(gm.graph)
    regions = {node for c in survey.candidates for node in c.region}
    report.others = Counter(
        name_of(n)
        for n in gm.graph.nodes
        if n.op in ("call_function", "call_method") and n not in regions and _computes(n)
    )
    placed: list[Candidate] = []
    changed = False
    for candidate in survey.candidates:
        kept, entry = _judged(candidate, wanted)
        if entry.verdict == account.PLACED:
            placed.append(kept)
        elif entry.verdict == account.SIMPLER:
            changed = True
        report.entries.append(entry)
    report.entries += [Entry(s.op, s.where, account.STAYED, s.reason) for s in survey.stayed]
    place.place(gm.graph, placed)
    if placed or changed:
        gm.graph.lint()
        gm.recompile()
    return report


def _judged(candidate: Candidate, wanted: str | tuple[str, ...]) -> tuple[Candidate, Entry]:
    op, profile = candidate.op, policy.profile_of(candidate)
    cost = op.cost(*(meta_of(a) if isinstance(a, Argument) else a for a in candidate.args))

    def entry(verdict: str, reason: str, **more: Any) -> Entry:
        return Entry(op.name, candidate.where, verdict, reason, flops=cost.flops, bytes=cost.bytes, **more)

    early = policy.judged_first(op, profile, wanted)
    if early is not None and not early.opaque:
        return candidate, entry(account.LEFT, early.reason)
    simpler = masks.folded(candidate)
    if simpler is not None and checked(simpler) is None and proof.prove(simpler).reason is None:
        candidate = simpler
    choice = policy.judged(candidate, profile, wanted)
    if not choice.opaque and not candidate.given:
        return candidate, entry(account.LEFT, choice.reason, implementation=choice.implementation)
    verdict = proof.prove(candidate)
    known = {"implementation": choice.implementation, "error": verdict.error}
    if verdict.reason is not None:
        return candidate, entry(account.REFUSED, verdict.reason)
    note = f"{candidate.note}; " if candidate.note else ""
    if choice.opaque:
        return candidate, entry(account.PLACED, note + choice.reason, **known)
    if masks.simplify(candidate):
        return candidate, entry(account.SIMPLER, note + choice.reason, **known)
    return candidate, entry(account.LEFT, note + choice.reason, **known)


def _computes(node: fx.Node) -> bool:
    tensor = isinstance(value(node), torch.Tensor) and value(node).is_floating_point()
    return tensor and name_of(node) not in VIEWS and not widening(node)


def _under_autocast(graph: fx.Graph) -> bool:
    """Casts that autocast makes are in no graph: an op would get other dtypes than the functions."""
    devices = {value(n).device.type for n in graph.nodes if isinstance(value(n), torch.Tensor)}
    on = any(torch.is_autocast_enabled(d) for d in devices if torch.amp.is_autocast_available(d))
    return on or any("autocast" in getattr(n.target, "__name__", "") for n in graph.nodes if n.op == "call_function")


def _compiled(
    gm: fx.GraphModule, example_inputs: Sequence[Any], inner: Any, mode: str | None, options: dict[str, Any]
) -> Callable[..., Any]:
    if inner == "inductor":
        from torch._inductor import list_mode_options
        from torch._inductor.compile_fx import compile_fx

        patches = {**(list_mode_options(mode) if mode and mode != "default" else {}), **options}
        by_inductor: Any = compile_fx(gm, list(example_inputs), config_patches=patches or None)
        return by_inductor
    if options or mode:
        raise ArgumentError(
            _NAME, "options", sorted(options) or mode, f"none beside inner={inner!r}: they are Inductor's"
        )
    if not callable(inner):
        from torch._dynamo.backends.registry import lookup_backend

        inner = lookup_backend(inner)
    compiled: Callable[..., Any] = inner(gm, list(example_inputs))
    return compiled
