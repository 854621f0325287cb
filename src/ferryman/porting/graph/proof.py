"""Proof by running: a region and the op's definition on drawn tensors of the region's shapes, strides and dtypes.

In float64, casts left out, both must be one function. In 16 bits, the program's casts kept and its other roundings left
out, they must round where the op does: then single elements differ by a unit, where float32 sums in another order.
Sizes that are dynamic are drawn twice. A proof holds for every region that is written the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from ferryman.porting.graph.nodes import CASTS, HALF, name_of, value
from ferryman.porting.graph.region import Argument, Candidate, Draw, computed, evaluated, hint, symbols_of

# Both sides take the same sums in another order: 2^-53 each, over rows of up to 2^17 elements that cancel.
EXACT = 2.0**-34
FLIPPED = 32  # one element in so many may round the other way: float32's 2^-24 against half a unit of 2^-9 and more
LARGEST = 2**22  # elements of one argument; above, leading sizes are drawn smaller
_SMALL = (19, 23, 29, 31)


@dataclass(frozen=True)
class Verdict:
    """reason: why not, None where proven. error: the worst difference in float64, relative to the largest result."""

    reason: str | None
    error: float = 0.0
    flipped: float = 0.0


_proven: dict[Any, Verdict] = {}


def prove(candidate: Candidate) -> Verdict:
    """Whether the op is what the region computes. Runs on the device that the graph is for."""
    key = signature(candidate)
    verdict = _proven.get(key)
    if verdict is None:
        # a fused kernel's scores have fewer digits than float32's product
        with sdpa_kernel(SDPBackend.MATH):
            verdict = _proven[key] = _prove(candidate)
    return verdict


def signature(candidate: Candidate) -> Any:
    """Equal for regions that are written the same, on the same sizes and dtypes."""
    names = {a.node: f"input {n}" for n, a in candidate.inputs.items()}
    names |= {node: f"node {i}" for i, node in enumerate((*candidate.given, *candidate.region))}

    def written(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return names.get(item) or str(value(item))
        if isinstance(item, (tuple, list)):
            return tuple(written(i) for i in item)
        if isinstance(item, dict):
            return tuple((k, written(v)) for k, v in sorted(item.items()))
        return repr(item)

    lines = tuple((name_of(n), written(n.args), written(dict(n.kwargs))) for n in (*candidate.given, *candidate.region))
    facts = tuple(
        (
            n,
            str(tuple(value(a.node).shape)),
            str(value(a.node).stride()),
            value(a.node).dtype,
            str(value(a.node).device),
            a.view,
            names.get(a.node),
        )
        for n, a in candidate.inputs.items()
    )
    outputs = tuple((i, names[n], value(n).dtype) for i, n in candidate.outputs.items())
    return candidate.op.name, repr(candidate.options), lines, facts, outputs


def _prove(candidate: Candidate) -> Verdict:
    worst, flips = 0.0, 0.0
    for draw in _draws(candidate):
        try:
            verdict = _run(candidate, draw)
        except RuntimeError as error:  # a literal size that does not fit the smaller ones
            if not draw.small:
                return Verdict(f"it cannot be run on drawn tensors: {error}")
            draw.small = {}
            try:
                verdict = _run(candidate, draw)
            except RuntimeError as again:
                return Verdict(f"it cannot be run on drawn tensors: {again}")
        if verdict.reason is not None:
            return verdict
        worst, flips = max(worst, verdict.error), max(flips, verdict.flipped)
    return Verdict(None, worst, flips)


def _draws(candidate: Candidate) -> list[Draw]:
    """Ordinary values; so small that a small eps counts; off centre; and of other sizes."""
    epsilons = [v for v in candidate.options.values() if isinstance(v, float) and 0.0 < v < 1e-2]
    small = math.sqrt(min(epsilons)) if epsilons else 1e-2
    fills = [("normal", 1.0), ("normal", small), ("shifted", 1.0), ("normal", 30.0)]
    symbols = sorted(
        {s for a in candidate.inputs.values() for n in value(a.node).shape for s in symbols_of(n)}, key=str
    )
    draws = []
    for seed, (fill, scale) in enumerate(fills):
        sizes = dict(zip(symbols, itertools.cycle(_SMALL[seed % 2 :]), strict=False))
        draws.append(Draw(seed, fill, scale, _shrunk(candidate), sizes))
    return draws


def _shrunk(candidate: Candidate) -> dict[int, int]:
    """Smaller sizes for large leading dimensions, where tensors are large: rows are alike."""
    shapes = [tuple(n if isinstance(n, int) else 1 for n in value(a.node).shape) for a in candidate.inputs.values()]
    if max((math.prod(s) for s in shapes), default=0) <= LARGEST:
        return {}
    last = {s[-1] for s in shapes if s}
    leading = sorted({n for s in shapes for n in s[:-1] if n > 64 and n not in last})
    return dict(zip(leading, itertools.cycle(_SMALL), strict=False))


def _tensor(x: Tensor, draw: Draw, generator: torch.Generator, name: str, candidate: Candidate) -> Tensor:
    shape = [draw.size(n) for n in x.shape]
    order = sorted(range(len(shape)), key=lambda i: -hint(x.stride(i)))
    laid = [shape[i] for i in order]
    if x.dtype == torch.bool:
        drawn = torch.rand(laid, generator=generator) < 0.7
        if len(shape) > 1:
            drawn = drawn.movedim(order.index(len(shape) - 1), -1)
            drawn[..., 0] = True  # each row sees something
            drawn = drawn.movedim(-1, order.index(len(shape) - 1))
    elif not x.dtype.is_floating_point:
        most = max(
            (
                draw.size(value(a.node).shape[-1])
                for a in candidate.inputs.values()
                if value(a.node).dtype.is_floating_point
            ),
            default=2,
        )
        drawn = torch.randint(0, most, laid, generator=generator).to(x.dtype)
    else:
        drawn = torch.randn(laid, generator=generator, dtype=torch.float64)
        weight = len(shape) < 2
        if draw.fill == "shifted" or weight:
            drawn = drawn + (1.0 if weight else 3.0)
        if not weight:
            drawn = drawn * draw.scale
        drawn = drawn.to(x.dtype)
    back = [order.index(i) for i in range(len(shape))]
    return drawn.to(x.device).permute(back)


def _run(candidate: Candidate, draw: Draw) -> Verdict:
    generator = torch.Generator().manual_seed(1000 + draw.seed)
    given = {a.node: None for a in candidate.inputs.values()}
    drawn = {node: _tensor(value(node), draw, generator, node.name, candidate) for node in given}
    with torch.no_grad():
        precise = {n: x.double() if x.dtype.is_floating_point else x for n, x in drawn.items()}
        region = _evaluate(candidate, precise, draw, exact=True)
        defined = _defined(candidate, precise, candidate.op.body)
        error = 0.0
        for index in candidate.outputs:
            got, want = region[index], defined[index]
            if got.shape != want.shape:
                return Verdict(f"shapes {tuple(got.shape)} and {tuple(want.shape)} differ on drawn sizes")
            error = max(error, _distance(got.double(), want.double()))
        if not error <= EXACT:
            return Verdict(f"another function: float64 results differ by {error:.1e} of the largest")
        storage = value(candidate.outputs[min(candidate.outputs)]).dtype
        if storage not in HALF:
            return Verdict(None, error)
        flips = _roundings(candidate, drawn, draw)
    if flips is None or flips > 1 / FLIPPED:
        share = "by more than a unit" if flips is None else f"in {flips:.0%} of the elements"
        return Verdict(f"it rounds elsewhere: {str(storage).removeprefix('torch.')} results differ {share}")
    return Verdict(None, error, flips)


def _distance(got: Tensor, want: Tensor) -> float:
    """Largest difference relative to the largest value; infinite where one is NaN or infinite and the other is not."""
    if got.numel() == 0:
        return 0.0
    special = ~(torch.isfinite(got) & torch.isfinite(want))
    same = (got == want) | (torch.isnan(got) & torch.isnan(want))
    if bool((special & ~same).any()):
        return math.inf
    difference = torch.where(special, 0.0, (got - want).abs()).max()
    largest = torch.where(special, 0.0, want.abs()).max()
    return (
        float(difference / largest) if float(largest) > 0 else float(difference > 0) * math.inf if difference else 0.0
    )


def _roundings(candidate: Candidate, drawn: Mapping[fx.Node, Tensor], draw: Draw) -> float | None:
    """Share of elements that differ, at best over the roundings that the op permits; None: by more than a unit."""
    region = _evaluate(candidate, drawn, draw, exact=False)
    bodies: list[Callable[..., Any]] = [candidate.op.body]
    if candidate.op.limits.rounded is not None:
        names = [r.name for r in candidate.op.limits.roundings]
        bodies += [
            candidate.op.limits.rounded(frozenset(chosen))
            for count in range(1, len(names) + 1)
            for chosen in itertools.combinations(names, count)
        ]
    best: float | None = None
    for body in bodies:
        defined = _defined(candidate, drawn, body)
        share: float | None = 0.0
        for index, node in candidate.outputs.items():
            want, got = defined[index].to(value(node).dtype), region[index].to(value(node).dtype)
            if share is None or got.dtype not in HALF or got.numel() == 0:
                continue
            unit = torch.finfo(got.dtype).eps
            least = torch.finfo(got.dtype).smallest_normal * unit
            off = (got.double() - want.double()).abs()
            differs = ~((got == want) | (got.isnan() & want.isnan()))
            largest = torch.maximum(got.double().abs(), want.double().abs())
            # where a sum cancels, float32's own error is above a unit of the small result
            allowed = largest * unit + 2.0**-20 * largest.nan_to_num(0, 0, 0).max() + least
            if bool((differs & ~(off <= allowed)).any()):
                share = None
            else:
                share = max(share, max(0.0, float(differs.sum()) - 2) / got.numel())
        if share is not None and (best is None or share < best):
            best = share
    return best


def _defined(candidate: Candidate, drawn: Mapping[fx.Node, Tensor], body: Callable[..., Any]) -> tuple[Tensor, ...]:
    args = [a.of(drawn[a.node]) if isinstance(a, Argument) else a for a in candidate.args]
    outputs = body(*args)
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _evaluate(candidate: Candidate, drawn: Mapping[fx.Node, Tensor], draw: Draw, *, exact: bool) -> dict[int, Tensor]:
    """The region's outputs. exact: every cast is left out; else casts are kept, other roundings not."""
    known: dict[fx.Node, Any] = {n: x.float() if x.dtype in HALF and not exact else x for n, x in drawn.items()}
    known |= computed(candidate.given, draw)
    results = set(candidate.outputs.values())
    wide = torch.float64 if exact else torch.float32
    for node in candidate.region:
        dtype = value(node).dtype if isinstance(value(node), Tensor) else None
        output = known[node.args[0]] if name_of(node) in CASTS else evaluated(node, known, draw, wide)  # type: ignore[index]
        if dtype in HALF and not exact and (name_of(node) in CASTS or node in results):
            output = output.to(dtype).float()
        known[node] = output
    return {index: known[node] for index, node in candidate.outputs.items()}
