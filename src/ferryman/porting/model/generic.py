"""Is a ported model still the same model, whatever it is? Outputs and gradients against the unported one's.

The limit is twice the floor: what the same measure becomes when every parameter of the unported model moves by one unit
in the last place. It holds because both models differ from the exact result by about the floor. A tensor beyond it is
compared with the exact result too, and its floor drawn more often where it has few elements: one within the floor of
the exact one is right, and the distance is the unported model's own error (PyTorch's CPU kernel sums a layer norm's
16-bit gradients of weight and bias in 16 bits).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.dispatch import trace
from ferryman.porting.model import exact as model_exact
from ferryman.porting.model.first import Divergence, first_divergence, moved
from ferryman.porting.model.port import port, unport
from ferryman.porting.model.results import AMPLITUDE, SEEDS
from ferryman.porting.model.sites import PortReport

Run = Callable[[nn.Module], Any]
# The norm of many elements is about the same in every draw; the largest of three draws of one number is below half of
# its standard deviation in one case of eighteen, of twelve draws in one of a hundred thousand.
FEW = 16
MORE_SEEDS = tuple(range(4, 13))


@dataclass(frozen=True)
class Distance:
    """A relative difference in the 2-norm, and what it may be. ``where`` names the worst tensor.

    exact: the ported tensor's distance from the exact result, measured where ``value`` is beyond the limit.
    """

    what: str
    value: float
    floor: float
    limit: float
    where: str
    exact: float | None = None

    @property
    def ok(self) -> bool:
        return self.value <= self.limit or (self.exact is not None and self.exact <= self.floor)


@dataclass(frozen=True)
class Parity:
    """``reasons`` is empty where the ported model is the same within its limits.

    calls: of each op in one forward, and backward where that was compared. runs: how often the ported modules ran that
    did not run once. miscounted: ops whose forward calls differ from what the report says for these runs, as
    (said, made). first: the first module that computes something else, looked for where something is beyond its limit.
    """

    report: PortReport
    distances: tuple[Distance, ...]
    calls: Mapping[str, int]
    restored: bool
    reasons: tuple[str, ...]
    runs: Mapping[str, int] = field(default_factory=dict)
    miscounted: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    first: Divergence | None = None

    @property
    def ok(self) -> bool:
        return not self.reasons


def tensors_in(value: Any, name: str = "output") -> Iterator[tuple[str, Tensor]]:
    """Floating tensors of a result, by name: dictionaries, tuples, dataclasses of any depth."""
    if isinstance(value, Tensor):
        if value.is_floating_point() or value.is_complex():
            yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from tensors_in(item, f"{name}.{key}")
    elif isinstance(value, tuple | list):
        for i, item in enumerate(value):
            yield from tensors_in(item, f"{name}[{i}]")
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for item in dataclasses.fields(value):
            yield from tensors_in(getattr(value, item.name), f"{name}.{item.name}")


def observe(
    model: nn.Module, run: Run, backward: bool, storage: Mapping[str, torch.dtype] | None = None
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(outputs, gradients of all parameters for a fixed cotangent), from seed 0. The model's state is put back.

    storage: what each output's cotangent is rounded to; by default the output's own dtype.
    """
    state = {name: b.clone() for name, b in model.named_buffers()}
    model.zero_grad(set_to_none=True)
    with torch.set_grad_enabled(backward), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        outputs = dict(tensors_in(run(model)))
        slopes: dict[str, Tensor] = {}
        reached = {n: t for n, t in outputs.items() if t.requires_grad}
        if backward and reached:
            dtypes = {n: (storage or {}).get(n, t.dtype) for n, t in reached.items()}
            weights = [
                torch.cos(torch.arange(t.numel(), device=t.device).float()).to(dtypes[n]).reshape(t.shape).to(t.dtype)
                for n, t in reached.items()
            ]
            torch.autograd.backward(list(reached.values()), weights)
            slopes = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad(set_to_none=True)
    with torch.no_grad():
        for name, b in model.named_buffers():
            if name in state and b.shape == state[name].shape:
                b.copy_(state[name])
    return {n: t.detach() for n, t in outputs.items()}, slopes


def compare(model: nn.Module, run: Run, backward: bool = True) -> Parity:
    """Run a model unported, with its parameters moved by one unit, ported, and unported again.

    run: makes inputs (drawn under a seed that is set) and calls the model once. The model must be in the mode in which
    it is compared, and deterministic. Raises PortError where nothing can be ported, and what the model raises.
    """
    plain, slopes = observe(model, run, backward)
    floors: dict[str, dict[str, float]] = {"output": {}, "gradient": {}}
    for seed in SEEDS:
        moved, moved_slopes = _moved(model, run, backward, seed)
        for what, perturbed, wanted in (("output", moved, plain), ("gradient", moved_slopes, slopes)):
            for name in wanted:
                if name in perturbed:
                    floors[what][name] = max(floors[what].get(name, 0.0), relative(perturbed[name], wanted[name]))
    report = port(model)
    try:
        with trace() as traced:
            outputs, found_slopes = observe(model, run, backward)
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            runs = report.runs_of(model, run)
    finally:
        unport(model)
    after, _ = observe(model, run, backward)
    restored = all(torch.equal(after[n], plain[n]) for n in plain)
    distances, reasons = [], []
    exact: list[tuple[dict[str, Tensor], dict[str, Tensor]]] = []
    for what, ours, wanted in (("output", outputs, plain), ("gradient", found_slopes, slopes)):
        if ours.keys() != wanted.keys():
            reasons.append(f"{what}s: {sorted(ours.keys() ^ wanted.keys())[:3]} on one side only")
            continue
        measured = _measured(what, ours, wanted, floors[what])
        few = [d.where for d in measured if not d.ok and wanted[d.where].numel() <= FEW]
        if few:
            for seed in MORE_SEEDS:
                again = dict(zip(floors, _moved(model, run, backward, seed), strict=True))[what]
                for name in few:
                    floors[what][name] = max(floors[what].get(name, 0.0), relative(again[name], wanted[name]))
            measured = _measured(what, ours, wanted, floors[what])
        if not all(d.ok for d in measured):
            exact = exact or [_exact(model, run, backward, {n: t.dtype for n, t in plain.items()})]
            measured = [_against(d, ours, exact[0][what == "gradient"]) for d in measured]
        worst = max(measured, key=_beyond, default=None)
        if worst is not None:
            distances.append(worst)
            if not worst.ok:
                reasons.append(
                    f"{what} {worst.where}: {worst.value:.3g}; limit {worst.limit:.3g} (floor {worst.floor:.3g})"
                    + ("" if worst.exact is None else f", {worst.exact:.3g} from the exact one")
                )
    calls: dict[str, int] = {}
    for (op, _), n in traced.calls.items():
        calls[op] = calls.get(op, 0) + n
    if not restored:
        reasons.append("after unport the outputs are not bit for bit what they were")
    first = None
    if reasons:
        paths = [site.path for site in report.ported]
        first = first_divergence(model, run, paths, lambda: port(model), lambda: unport(model), farthest)
        reasons.append("no ported module alone is beyond its limit" if first is None else first.text)
    calls = dict(sorted(calls.items()))
    return Parity(
        report,
        tuple(distances),
        calls,
        restored,
        tuple(reasons),
        runs,
        _miscounted(report, calls, runs, backward),
        first,
    )


def farthest(actual: Any, wanted: Any) -> float:
    """The largest `relative` difference of two results' tensors; infinite where they are not of the same kind."""
    ours, theirs = dict(tensors_in(actual)), dict(tensors_in(wanted))
    if ours.keys() != theirs.keys():
        return float("inf")
    return max((relative(ours[n], theirs[n]) for n in theirs), default=0.0)


def _miscounted(
    report: PortReport, calls: Mapping[str, int], runs: Mapping[str, int], gradients: bool
) -> dict[str, tuple[int, int]]:
    said, open_ended = report.calls(runs=runs, gradients=gradients), report.maybe()
    forward_calls = {op: n for op, n in calls.items() if not op.endswith("_backward")}
    return {
        op: (said.get(op, 0), forward_calls.get(op, 0))
        for op in sorted(said.keys() | forward_calls.keys())
        if forward_calls.get(op, 0) != said.get(op, 0)
        and not (op in open_ended and forward_calls.get(op, 0) > said.get(op, 0))
    }


def _measured(
    what: str, actual: Mapping[str, Tensor], wanted: Mapping[str, Tensor], floors: Mapping[str, float]
) -> list[Distance]:
    """Of every tensor. Its floor is at least the median one's: rounding does not spare a tensor for good because three
    draws did."""
    common = sorted(floors.values())[len(floors) // 2] if floors else 0.0
    distances = []
    for name, tensor in wanted.items():
        floor = max(floors.get(name, 0.0), common)
        distances.append(Distance(what, relative(actual[name], tensor), floor, AMPLITUDE * floor, name))
    return distances


def _beyond(d: Distance) -> tuple[bool, float]:
    """The tensor that is farthest beyond its limit is the largest; one that the exact result shows right is none."""
    return not d.ok, d.value / d.limit if d.limit else (1.0 if d.value else 0.0)


def _against(d: Distance, actual: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> Distance:
    if d.ok or d.where not in exact:
        return d
    return dataclasses.replace(d, exact=relative(actual[d.where], exact[d.where]))


def _exact(
    model: nn.Module, run: Run, backward: bool, storage: Mapping[str, torch.dtype]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The unported model's own code in float64, on the same inputs and cotangents; nothing where that cannot run."""
    size = sum(t.numel() for t in model.parameters())
    device = next((t.device for t in model.parameters()), torch.device("cpu"))
    # parameters, their gradients, and about as much again for what backward keeps
    if model_exact.dtype_for(device, 8 * 4 * size) is not torch.float64:
        return {}, {}
    mode = contextlib.ExitStack()

    def enter(module: nn.Module, args: Any, kwargs: Any) -> Any:
        mode.enter_context(model_exact.Widened(torch.float64))
        return tuple(model_exact.mapped(value, lambda t, name: t.double()) for value in (args, kwargs))

    try:
        twin = copy.deepcopy(model).double()
        twin.register_forward_pre_hook(enter, with_kwargs=True, prepend=True)
        twin.register_forward_hook(lambda module, args, out: mode.close(), always_call=True)
        return observe(twin, run, backward, storage)
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError):
        return {}, {}  # it cannot be copied, or reads a dtype itself
    finally:
        mode.close()


def relative(actual: Tensor, wanted: Tensor) -> float:
    """2-norm of the difference over that of what is wanted; infinite where shapes differ or one is not finite."""
    if actual.shape != wanted.shape:
        return float("inf")
    f, w = actual.double(), wanted.double()
    same = (f == w) | (torch.isnan(f) & torch.isnan(w))
    if not bool(torch.isfinite(f[~same]).all() and torch.isfinite(w[~same]).all()):
        return float("inf")
    difference = float(torch.linalg.vector_norm(torch.where(same, 0.0, f - w)))
    size = float(torch.linalg.vector_norm(w[torch.isfinite(w)]))
    return difference / size if size else (0.0 if difference == 0 else float("inf"))


def _moved(model: nn.Module, run: Run, backward: bool, seed: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What a model gives with each parameter element moved by one unit in its last place, up or down or not at all."""
    with moved(model, torch.Generator().manual_seed(seed)):
        return observe(model, run, backward)
