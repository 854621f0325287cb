"""In float64 every definition is what a source that shares no code with it computes, and no mutant of it is.

Inputs are drawn from the op's own fuzz domain. The source of an op stands in `tests/ops/FAMILY/independent.py`; that of
its backward is autograd of it.
"""

from __future__ import annotations

import ast
import datetime
import importlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from parity_support import CPU, OPS
from torch import Tensor

from ferryman.dispatch import registry
from ferryman.ops.domain import Sizes
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.inputs import fuzz
from ferryman.porting.inputs.cases import arguments, as_tuple, double, forward_of, output_gradients
from ferryman.porting.mutate import rewrites, rules
from tests.bounded import U64
from tests.independent import Source

FOLDERS = Path(__file__).parents[1] / "ops"
MODULES = sorted(FOLDERS.glob("*/independent.py"))
FACTOR = 64  # of what the op's own error terms allow: another order, other formulas
SMALLEST = 1e-290  # products underflow
WITHOUT_DERIVATIVE = ("nonfinite", "infinite_logits")
QUICK, LONG = 64, 200  # draws of an op
SMALL = Sizes(
    rows=(0, 1, 2, 3, 5),
    width=(0, 1, 2, 3, 17, 65, 130),
    depth=(0, 1, 2, 5, 18, 67),
    batch=(0, 1, 2, 3),
    queries=(0, 1, 2, 7, 17),
    keys=(0, 1, 3, 7, 19),
    head_dim=(1, 2, 8, 37),
    windows=(None, 1, 5),
)
ROUNDING = 4 / FACTOR  # of a room: what another order of sums makes of a definition; such a mutant is the definition
# the same variance in exact arithmetic: what it loses where the mean is large counts in float32
SAME_FUNCTION = ("squares_not_centred",)
TIGHT = 2.0**-20  # of the largest result: what a room is in some draws at least, so that a mutant can be told
ARGUMENTS = ("argument ignored", "argument wrong", "arguments swapped")
LOUD = (RuntimeError, LookupError, ValueError, TypeError, ArithmeticError)  # an argument that the op refuses


@dataclass(frozen=True)
class Drawn:
    """One call in float64: what the definition is given, what the source computes, and how far off one may be."""

    args: tuple[Any, ...]
    exact: tuple[Tensor, ...]
    rooms: tuple[Tensor, ...]


def sources_of(family: str) -> dict[str, Source]:
    """The ops' sources in a folder of `tests/ops/`."""
    return importlib.import_module(f"tests.ops.{family}.independent").SOURCES


def source(op: Primitive) -> Source:
    family = op.body.__module__.split(".")[-2]
    known = sources_of(family) if (FOLDERS / family / "independent.py").exists() else {}
    assert op.name in known, f"{op.name} has no independent source: tests/ops/{family}/independent.py, SOURCES"
    return known[op.name]


def drawn(op: Primitive, count: int, seed: int, sizes: Sizes) -> list[Drawn]:
    forward = forward_of(op) or op
    own, draws = source(forward), []
    for number, (case, dtype) in enumerate(fuzz.cases(op, count, seed, sizes)):
        ours = Case(case.name, {n: a for n, a in case.args.items() if n in forward.names})
        args = double(arguments(ours, forward, dtype, seed, CPU).values)
        if own.leaves_out(*args):
            continue
        if forward is op:
            with torch.no_grad():
                exact = as_tuple(own.compute(*args))
        elif any(isinstance(a, TensorSpec) and a.fill in WITHOUT_DERIVATIVE for a in ours.args.values()):
            continue
        else:
            args, exact = derivative(op, forward, own, case, args, number)
        draws.append(Drawn(args, exact, rooms(op, args, exact)))
    assert len(draws) >= count // 3, f"{op.name}: {len(draws)} of {count} draws have a source"
    tight = sum(map(is_tight, draws))
    assert tight >= len(draws) // 4, f"{op.name}: in {tight} of {len(draws)} draws the error terms tell anything"
    return draws


def derivative(
    op: Primitive, forward: Primitive, own: Source, case: Case, args: tuple[Any, ...], seed: int
) -> tuple[tuple[Any, ...], tuple[Tensor, ...]]:
    """A backward's arguments, with what the source's forward saves, and its results by autograd of the source."""
    given = dict(zip(forward.names, args, strict=True))
    owners = [names[0] for names in forward.gradient.owners]
    leaves = {
        n: given[n].clone().requires_grad_()
        for n in owners
        if isinstance(given[n], Tensor) and given[n].is_floating_point()
    }
    outputs = as_tuple(own.compute(*(given | leaves).values()))
    saved = dict(zip(forward.outputs, (o.detach() for o in outputs), strict=True))
    generator = torch.Generator().manual_seed(seed)
    cotangents: dict[str, Tensor | None] = {}
    live: list[tuple[Tensor, Tensor]] = []
    for name, place in output_gradients(op, forward).items():
        cotangent = torch.randn(outputs[place].shape, dtype=torch.float64, generator=generator)
        cotangents[name] = cotangent if case.args.get(name, True) else None
        if cotangents[name] is not None and outputs[place].requires_grad:
            live.append((outputs[place], cotangent))
    results: Sequence[Tensor] = [torch.zeros_like(leaf) for leaf in leaves.values()]
    if live and leaves:
        results = torch.autograd.grad(
            [o for o, _ in live],
            list(leaves.values()),
            [c for _, c in live],
            allow_unused=True,
            materialize_grads=True,
        )
    gradients = dict(zip(leaves, results, strict=True))
    exact = tuple(
        gradients[n] if n in leaves and case.args.get(f"need_{n}", True) else torch.empty(0, dtype=torch.float64)
        for n in owners
    )
    known = given | {f"out_{n}" if n in forward.names else n: o for n, o in saved.items()} | cotangents
    known |= {n: a for n, a in case.args.items() if n.startswith("need_")}
    return tuple(known[n] for n in op.names), exact


def rooms(op: Primitive, args: tuple[Any, ...], exact: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """What the op's error terms (docs/parity.md) allow in float64, and a roundoff of the largest result, or of what a
    gradient is made of and may cancel, for each term of its sums, `FACTOR` times. Whole numbers are exact."""
    with torch.no_grad():
        terms = op.limits.bound(args, exact)
    cotangents = [a for n, a in zip(op.names, args, strict=True) if n.startswith("grad") and isinstance(a, Tensor)]
    summed = max(1, op.limits.reduction(*args) if op.limits.reduction else 1)
    allowed = []
    for value, own in zip(exact, terms, strict=True):
        if not value.is_floating_point() or not value.numel():
            allowed.append(torch.zeros(value.shape, dtype=torch.float64))
            continue
        largest = max(float(t.abs().nan_to_num(0.0, posinf=0.0).max()) for t in (value, *cotangents) if t.numel())
        error = own["accumulate"].nan_to_num(0.0, posinf=0.0) + summed * largest
        allowed.append(FACTOR * U64 * error.expand(value.shape) + SMALLEST)
    return tuple(allowed)


def differs(results: Any, draw: Drawn) -> str:
    """Where results are not the source's; empty where they are. NaN and Inf alike."""
    outputs = as_tuple(results)
    if len(outputs) != len(draw.exact):
        return f"{len(outputs)} results of {len(draw.exact)}"
    for place, (got, exact, room) in enumerate(zip(outputs, draw.exact, draw.rooms, strict=True)):
        if got.shape != exact.shape or got.is_floating_point() != exact.is_floating_point():
            return f"result {place} is {got.dtype} {tuple(got.shape)}; the source's {exact.dtype} {tuple(exact.shape)}"
        if not exact.is_floating_point():
            if not torch.equal(got.long(), exact.long()):
                return f"result {place}"
            continue
        close = (got - exact).abs() <= room
        right = torch.where(exact.isfinite(), close, (got == exact) | (got.isnan() & exact.isnan()))
        if not bool(right.all()):
            worst = ((got - exact).abs() / room).nan_to_num(math.inf).max()
            at = (~right).nonzero()[0].tolist()
            return f"result {place} at {at}: {got[tuple(at)]}, not {exact[tuple(at)]} ({float(worst):.3g} rooms)"
    return ""


def is_tight(draw: Drawn) -> bool:
    pairs = [(e, r) for e, r in zip(draw.exact, draw.rooms, strict=True) if e.is_floating_point() and e.numel()]
    return all(
        bool((room <= TIGHT * exact.abs().nan_to_num(0.0, posinf=0.0).max() + SMALLEST).all()) for exact, room in pairs
    )


def values_of(op: Primitive, draws: Sequence[Drawn]) -> Iterator[tuple[str, set[Any]]]:
    for place, name in enumerate(op.names):
        yield name, {content(draw.args[place]) for draw in draws}


def content(value: Any) -> Any:
    """An argument as something that can be a member of a set."""
    if isinstance(value, list):
        return tuple(map(content, value))
    return (tuple(value.shape), str(value.dtype), repr(value.tolist())) if isinstance(value, Tensor) else value


def unexercised(op: Primitive, draws: Sequence[Drawn]) -> list[str]:
    """Arguments without two values over the draws, an absent one and a tensor where it may be absent; not those that
    the domain says have one value."""
    domain = fuzz.domain_of(op)
    missing = []
    for name, values in values_of(op, draws):
        form = domain.arguments.get(name) if domain else None
        if isinstance(form, tuple) and len(form) == 1:
            continue
        if len(values) < 2 or (op.types[name] == "Tensor?" and None not in values):
            missing.append(name)
    return missing


def mutants(op: Primitive, used: set[str]) -> Iterator[tuple[str, Callable[..., Any]]]:
    """The definition with its ATen operations replaced, and with an argument that it takes wrongly."""

    def rewritten(replaces: Any) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            with rewrites.Rewritten(replaces):
                return op.body(*args)

        return run

    for rewrite in rewrites.WRONG:
        if rewrite.applies(used):
            yield rewrite.name, rewritten(rewrite.replaces)
    yield "in_storage_precision", rewritten(rewrites.storage_arithmetic(torch.bfloat16))
    for rule in rules.RULES:
        if rule.operator in ARGUMENTS:
            for suffix, kernel in rule.make(op, op.body):
                yield f"{rule.name}.{suffix}", kernel


def is_caught(
    kernel: Callable[..., Any], right: Sequence[Any], draws: Sequence[Drawn], order: list[int]
) -> bool | None:
    """Whether some draw tells a mutant from the source; None where it is the definition, within rounding, or raises.
    The draw that tells it is the first in ``order`` for the next mutant: few draws tell most of them."""
    moved = False
    for place in tuple(order):
        draw, own = draws[place], right[place]
        try:
            got = kernel(*draw.args)
        except LOUD:
            continue
        if differs(got, draw):
            order.remove(place)
            order.insert(0, place)
            return True
        moved = moved or bool(differs(got, Drawn(draw.args, as_tuple(own), tuple(ROUNDING * r for r in draw.rooms))))
    return False if moved else None


def compared(op: Primitive, count: int, seed: int, sizes: Sizes) -> dict[str, bool | None]:
    """Mutant -> `is_caught`, after the definition was found right and every argument exercised."""
    draws, mode, right = drawn(op, count, seed, sizes), rewrites.Rewritten(), []
    missing = unexercised(op, draws)
    assert not missing, f"{op.name}: {count} draws give no second value to {', '.join(missing)}"
    with torch.no_grad():
        for draw in draws:
            with mode:
                right.append(op.body(*draw.args))
            problem = differs(right[-1], draw)
            assert not problem, f"{op.name}, {dict(zip(op.names, draw.args, strict=True))}: {problem}"
        order = list(range(len(draws)))
        return {name: is_caught(kernel, right, draws, order) for name, kernel in mutants(op, mode.used)}


def judged(op: Primitive, count: int, seed: int, sizes: Sizes) -> None:
    verdicts = compared(op, count, seed, sizes)
    missed = [n for n, caught in verdicts.items() if caught is False and n not in SAME_FUNCTION]
    assert not missed, f"{op.name}, seed {seed}: {count} draws do not tell the source from {', '.join(missed)}"
    assert True in verdicts.values(), f"{op.name}: no mutant of its definition is caught: {verdicts}"


@pytest.mark.daily(7)
@pytest.mark.parametrize("op", OPS)
def test_the_definition_is_its_independent_source_and_no_mutant_is(op: str) -> None:
    judged(registry.primitive(op), QUICK, 0, SMALL)


@pytest.mark.slow
@pytest.mark.alternate("seed")
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("seed", ("1", "today"))
def test_more_draws_and_those_of_today(op: str, seed: str) -> None:
    today = datetime.datetime.now(datetime.timezone.utc).date().toordinal()
    judged(registry.primitive(op), LONG, today if seed == "today" else int(seed), Sizes())


def test_sources_import_nothing_of_ferryman() -> None:
    assert MODULES
    for path in MODULES:
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [str(node.module)] if isinstance(node, ast.ImportFrom) else []
            assert not [n for n in names if n.split(".")[0] == "ferryman"], path


def test_every_source_is_of_an_op() -> None:
    for path in MODULES:
        assert set(sources_of(path.parent.name)) <= set(OPS), path


def test_an_op_without_a_source_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sources_of("softmax"), "softmax")
    with pytest.raises(AssertionError, match=r"softmax has no independent source: tests/ops/softmax/independent\.py"):
        judged(registry.primitive("softmax"), 1, 0, SMALL)
