"""Every module of a ported model alone, forward and backward, against the exact result: which one goes astray first?

A module is given what the unported model gave it, and its outputs the gradients that they had there. So an error
belongs to the module that shows it, and to what contains that module; sequences of ops may differ freely.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.porting.model import exact, measure
from ferryman.porting.model.replay import (
    Call,
    Invoke,
    RunTensors,
    Watch,
    fed,
    invoke,
    record,
    replay,
    replay_exact,
    units,
    unwatched,
)
from ferryman.porting.model.results import (
    DEVIATIONS,
    SEEDS,
    Measure,
    ModuleErrors,
    TensorErrors,
    away,
    bias_allowed,
    limited,
)

CHUNK = 1 << 24  # elements compared in float64 at a time: 128 MiB for each side


@dataclass(frozen=True)
class Errors:
    """Relative errors: of the tensor as a whole, and of its ``worst`` row (a token's, or an output feature's).

    ``bias`` is the share of the result in the error. ``spread``: how far chance alone moves it, in units of
    ``relative``, if each element's error is independent and relative to it.
    """

    relative: float
    worst: float
    bias: float
    spread: float


def errors(actual: Tensor | None, wanted: Tensor) -> Errors:
    """Of actual against wanted, in float64; what is not there counts as zeros."""
    rows = wanted.reshape(-1, wanted.shape[-1]) if wanted.dim() > 1 else wanted.reshape(1, -1)
    given = None if actual is None else actual.reshape(rows.shape)
    step, place = max(1, CHUNK // max(rows.shape[1], 1)), _wide_device(wanted)
    sizes, differences, sums = [], [], torch.zeros(2, dtype=torch.float64, device=place)
    for start in range(0, rows.shape[0], step):
        w = rows[start : start + step].to(place, torch.float64)
        d = -w if given is None else given[start : start + step].to(place, torch.float64) - w
        squares = w.square()
        sizes.append(squares.sum(-1))
        differences.append(d.square().sum(-1))
        sums += torch.stack(((d * w).sum(), squares.square().sum()))
    size, difference = torch.cat(sizes), torch.cat(differences)
    worst = (difference / size.clamp_min(1e-300)).max()  # NaN stays
    total = max(size.sum().item(), 1e-300)
    along, fourth = sums.tolist()
    return Errors(
        math.sqrt(difference.sum().item() / total), math.sqrt(worst.item()), along / total, math.sqrt(fourth) / total
    )


def _wide_device(tensor: Tensor) -> torch.device:
    return tensor.device if tensor.device.type in ("cpu", "cuda") else torch.device("cpu")


@dataclass
class Floors:
    """What one ulp does to one tensor of the unported module, beside that module's own error.

    ``order``: the relative error that a float32 sum may have by its order alone, which no ulp of its terms shows.
    """

    own: Errors
    order: float = 0.0
    drawn: list[Errors] = field(default_factory=list)

    def judge(self, measured: Errors, eps: float, row: str | None, name: str = "") -> list[Measure]:
        most = max([self.own.relative, self.order, *(d.relative for d in self.drawn)])
        measures = [limited(f"{name}error", measured.relative, most)]
        if row is not None:
            worst = max(e.worst for e in (self.own, *self.drawn))
            measures.append(limited(f"{name}worst {row}", measured.worst, worst))
        chance = max(_rms([d.bias for d in self.drawn]), most * self.own.spread)
        limit = max(abs(self.own.bias), DEVIATIONS * chance) + bias_allowed(eps)
        bias = abs(measured.bias)
        measures.append(Measure(name=f"{name}bias", value=bias, floor=chance, limit=limit, ok=bias <= limit))
        return measures


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / max(len(values), 1))


@dataclass
class Unit:
    """One module's exact result and floors, which every candidate is judged by."""

    path: str
    module: str
    ported: bool
    call: Call
    wide: torch.dtype
    exact: RunTensors
    floors: dict[str, Floors]
    eps: float
    dtypes: dict[str, torch.dtype]

    def judge(self, actual: RunTensors, eager: RunTensors | None = None) -> ModuleErrors:
        tensors = [self._tensor(n, "forward", w, actual.forward, eager) for n, w in self.exact.forward.items()]
        tensors += [
            self._tensor(n, "backward", w, actual.backward, eager)
            for n, w in self.exact.backward.items()
            if w is not None
        ]
        furthest = max((t.away for t in tensors), default=0.0)
        return ModuleErrors(
            path=self.path,
            module=self.module,
            ported=self.ported,
            order=self.call.left,
            backward_order=-self.call.entered,
            exact="float64" if self.wide == torch.float64 else "float32",
            tensors=tensors,
            away=furthest,
            ok=furthest <= 1,
        )

    def uncalled(self) -> ModuleErrors:
        return self.judge(RunTensors({}, {})).model_copy(
            update={
                "tensors": [],
                "away": 0.0,
                "ok": True,
                "note": "the ported model does not call it; what contains it covers it",
            }
        )

    def _tensor(self, name: str, way: Any, wanted: Tensor, tensors: Any, eager: RunTensors | None) -> TensorErrors:
        floors, actual = self.floors[name], tensors.get(name)
        said: dict[str, Any] = {
            "tensor": name,
            "direction": way,
            "unported": floors.own.relative,
            "floor": max((d.relative for d in floors.drawn), default=0.0),
        }
        note = ""
        if actual is None:
            note = "the ported module does not give it"
        elif actual.shape != wanted.shape:
            note = f"its shape is {tuple(actual.shape)}; required: {tuple(wanted.shape)}"
        elif actual.dtype != self.dtypes.get(name, actual.dtype):
            note = f"its dtype is {actual.dtype}; required: {self.dtypes[name]}"
        if actual is not None and actual.shape != wanted.shape:
            return TensorErrors(**said, found=math.inf, ratio=None, measures=[], away=math.inf, note=note)
        seen = errors(actual, wanted)
        row = ("token" if way == "forward" else "row") if wanted.dim() > 1 else None
        measures = floors.judge(seen, self.eps, row)
        if eager is not None and actual is not None:
            beside = (eager.forward if way == "forward" else eager.backward)[name]
            if beside is not None and beside.shape == actual.shape:
                measures += floors.judge(errors(actual, beside), self.eps, row, "against eager: ")
        ratio = seen.relative / floors.own.relative if floors.own.relative else None
        wrong = actual is not None and bool(note)
        return TensorErrors(
            **said,
            found=seen.relative,
            ratio=ratio,
            measures=measures,
            note=note,
            away=math.inf if wrong else away(measures),
        )


def prepare(model: Any, path: str, ported: bool, call: Call, watch: Watch, eps: float, rows: dict[str, int]) -> Unit:
    """The exact result of an unported module and its floors. ``rows``: of the sums that give a vector its gradient."""
    module = model.get_submodule(path)
    wide = exact.dtype_for(_device_of(call, model), _bytes(module, call, model))
    weights = dict(module.named_parameters())

    def plain(seed: int | None) -> RunTensors:
        return replay(lambda args, kwargs: module(*args, **kwargs), module, call, weights, watch, seed=seed)

    truth, own = replay_exact(module, call, watch, wide), plain(None)
    pairs = {**truth.forward, **truth.backward}
    unported = {**own.forward, **own.backward}
    floors: dict[str, Floors] = {}
    for name, wanted in pairs.items():
        if wanted is not None:
            summed = rows.get(f"{path}.{name.removeprefix('gradient of ')}", 0)
            own_errors = errors(unported.get(name), wanted)
            floors[name] = Floors(own_errors, order=sequential(summed))
    for seed in SEEDS:
        moved = plain(seed)
        drawn = {**moved.forward, **moved.backward}
        for name, floor in floors.items():
            before = unported.get(name)
            if before is not None:
                floor.drawn.append(errors(drawn[name], before))
    dtypes = {name: t.dtype for name, t in unported.items() if t is not None}
    return Unit(path, type(module).__name__, ported, call, wide, truth, floors, eps, dtypes)


def sequential(terms: int) -> float:
    """Standard deviation, relative to the result, of a float32 sum made one term after the other.

    With u = 2^-24, each partial sum s_k is rounded by u |s_k| / sqrt(3). Terms of random sign have s_k = sqrt(k), so
    the error is u n / sqrt(6) on a result of sqrt(n); terms of one sign give less, u sqrt(n) / 3.
    """
    return 2.0**-24 * math.sqrt(terms / 6)


def _rows(model: Any, sites: set[str], calls: dict[str, Call]) -> dict[str, int]:
    """Of each vector parameter that a ported module holds itself: how many rows its gradient is summed over."""
    return {
        f"{path}.{name}": call.outputs[0].numel() // p.numel()
        for path, call in calls.items()
        if path in sites
        for name, p in model.get_submodule(path).named_parameters(recurse=False)
        if p.dim() == 1
    }


def _device_of(call: Call, model: Any) -> torch.device:
    return call.outputs[0].device if call.outputs else next(model.parameters()).device


def _bytes(module: nn.Module, call: Call, model: Any) -> int:
    """What the exact twin of a module takes: weights and gradients, what the backward keeps, attention's scores."""
    tensors = exact.tensors_of((call.args, call.kwargs)) + call.outputs
    scores = 0
    if any(m.__class__.__name__.endswith("Attention") for m in module.modules()):
        batch, length = call.outputs[0].shape[:2]
        scores = batch * int(model.config.num_attention_heads) * length * length
    return 8 * (3 * sum(p.numel() for p in module.parameters()) + 12 * sum(t.numel() for t in tensors) + 6 * scores)


class Bench:
    """A model and its ported twin, what each module was given in one pass of either, and how a module is judged."""

    def __init__(self, model: Any, ported: Any, tokens: Tensor, sites: set[str], backward: bool, watch: Watch) -> None:
        self.model, self.ported, self.sites, self.watch = model, ported, sites, watch
        named = units(model, sites)
        self.reference = record(model, tokens, named, backward)
        self.own = record(ported, tokens, named, False)
        self.eps = torch.finfo(model.dtype).eps
        self.rows = _rows(model, sites, self.reference)
        self.backward = backward
        self.paths = sorted(self.reference, key=lambda path: self.reference[path].left)
        decoder_layers = set(measure.layers_of(model))
        self.layers = [path for path, module in model.named_modules() if module in decoder_layers]
        self.reduced: list[str] = []  # paths whose twin is float32

    def unit(self, path: str, watch: Watch | None = None) -> Unit:
        unit = prepare(
            self.model, path, path in self.sites, self.reference[path], watch or self.watch, self.eps, self.rows
        )
        if unit.wide != torch.float64 and path not in self.reduced:
            self.reduced.append(path)
        return unit

    def run(self, path: str, way: Invoke = invoke, watch: Watch | None = None) -> RunTensors:
        """A module of the ported twin on the reference's numbers, with its own masks and flags."""
        module, given = self.ported.get_submodule(path), fed(self.own[path], self.reference[path])
        weights = dict(module.named_parameters())
        return replay(lambda args, kwargs: way(module, args, kwargs), module, given, weights, watch or self.watch)

    def modules(self) -> list[ModuleErrors]:
        """Every module, in the order in which the forward finished them."""
        judged = []
        for path in self.paths:
            unit = self.unit(path)
            judged.append(unit.judge(self.run(path)) if path in self.own else unit.uncalled())
        return judged

    def layers_run(self, way: Invoke) -> list[ModuleErrors]:
        """Every decoder layer run another way, against the exact result and against the eager one.

        Where a layer goes astray its ported modules are run so as well, one by one, to name the module.
        """
        judged, astray = [], []
        for path in self.layers:
            judged.append(self._beside(path, way))
            if not judged[-1].ok:
                astray += [p for p in self.paths if p in self.sites and p.startswith(f"{path}.") and p in self.own]
        return judged + [self._beside(path, way) for path in astray]

    def _beside(self, path: str, way: Invoke) -> ModuleErrors:
        unit = self.unit(path, unwatched)
        return unit.judge(self.run(path, way, unwatched), self.run(path, watch=unwatched))
