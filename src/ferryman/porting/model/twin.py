"""A twin of a leaf module with short sides and drawn tensors, in the dimensions that the module takes."""

from __future__ import annotations

import functools
import math
import types
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ferryman.ops.recognition import Candidate, Definitions, Leaf, compiled
from ferryman.porting.model import beyond, source
from ferryman.porting.model.distance import LIMIT, Disagreement, distance, flat
from ferryman.porting.model.leaf import NARROW, names_reached, settings_of
from ferryman.porting.model.trace import Trace, numbers_in

_OF_MODE = {"training", "__dict__", "vars", "getattr", "eval", "exec", "copy", "deepcopy"}  # by what code reads a mode
_LARGEST = 1 << 22  # elements of a twin's matrix that keeps rows which its module names


def narrowed(module: nn.Module, leaf: Leaf, numbers: frozenset[float]) -> dict[str, Any]:
    """A module's state with sides of matrices cut to a few tens, and the numbers that name them too."""
    sides = {s for shape in leaf.matrices.values() for s in shape}
    state = dict(module.__dict__)
    cut = {size: 24 + 8 * i for i, size in enumerate(sorted(s for s in sides if s > NARROW))}
    # a number that is no side may be that of a row: the row stays, unless the twin gets large
    named = {int(abs(n)) for n in numbers if n == int(n)}
    rows = [v for v in (*state.values(), *named) if isinstance(v, int) and not isinstance(v, bool) and v not in sides]
    kept = {size: max(short, 2 + max((v for v in rows if v < size), default=0)) for size, short in cut.items()}
    if all(kept.get(a, a) * kept.get(b, b) <= _LARGEST for a, b in leaf.matrices.values()):
        cut = kept
    for name, value in state.items():
        if isinstance(value, int) and not isinstance(value, bool) and value in cut:
            state[name] = cut[value]
    state["ferryman_cut"], state["ferryman_named"] = cut, named
    state["ferryman_modes"] = (False, True) if _OF_MODE & names_reached(type(module)) else (False,)
    return state


def shortened(state: dict[str, Any], width: int, short: int) -> dict[str, Any]:
    """A twin's state with rows of ``short`` in place of ``width``, and the numbers that name them."""
    width = state["ferryman_cut"].get(width, width)

    def cut(value: Any) -> Any:
        if isinstance(value, tuple):
            return type(value)(map(cut, value)) if type(value) in (tuple, torch.Size) else value
        return short if isinstance(value, int) and not isinstance(value, bool) and value == width else value

    sides = {side: cut(now) for side, now in state["ferryman_cut"].items()} | {width: short}
    return {name: cut(value) for name, value in state.items()} | {"ferryman_cut": sides}


def own_numbers(module: nn.Module) -> set[float]:
    """Those in attributes of a module, or of its class, that its forward may read."""
    reached = names_reached(type(module))
    own = source.members(type(module)) | vars(module)
    read = {name: settings_of(value, reached) or value for name, value in own.items() if name in reached}
    return {n for value in read.values() for n in numbers_in(value)}


def tensors_of(state: dict[str, Any], names: Sequence[str], seed: int) -> list[Tensor]:
    cut: dict[int, int] = state["ferryman_cut"]
    weights = {**state["_parameters"], **state["_buffers"]}
    generator = torch.Generator().manual_seed(seed)
    shapes = [[cut.get(s, s) for s in weights[n].shape] for n in names]
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def dimensions(kind: type[nn.Module], state: dict[str, Any], names: Sequence[str], candidate: Candidate) -> list[int]:
    if candidate.rows:
        return [1, 2, 3]
    run = functools.partial(original, kind, state, names, False)
    tensors, width = tensors_of(state, names, 7), state["ferryman_cut"].get(candidate.width, candidate.width)
    taken = beyond.dimensions(
        run, lambda x: (x, *(beyond.gating(x, 0) if candidate.gate else ()), *tensors), width, candidate
    )
    return taken if max(taken, default=1) > 1 or candidate.axis != -1 else [2, 3]


def shaped(inputs: Iterator[Tensor], state: dict[str, Any], candidate: Candidate) -> Iterator[Tensor]:
    """Inputs of dimensions that the module takes, their width where the candidate has it."""
    dims = state["ferryman_dims"]
    for x in inputs:
        while x.dim() not in dims and x.dim() < max(dims):
            x = x.unsqueeze(0)
        yield beyond.laid(x, candidate)


def original(kind: Any, state: dict[str, Any], names: Sequence[str], training: bool, *given: Tensor) -> Any:
    twin = kind.__new__(kind)
    twin.__dict__.update(state | {n: t for n, t in state.get("ferryman_fixed", {}).items() if n in state})
    count = len(given) - len(names)
    tensors = dict(zip(names, given[count:], strict=True))
    tensors |= state.get("ferryman_fixed", {})
    twin.__dict__["_parameters"] = {n: tensors.get(n) for n in state["_parameters"]}
    twin.__dict__["_buffers"] = {n: tensors.get(n) for n in state["_buffers"]}
    twin.__dict__["training"] = training
    return twin.forward(*given[:count])


def _of_other_rows(
    run: Any, state: dict[str, Any], names: Sequence[str], candidate: Candidate, tensors: Sequence[Tensor]
) -> None:
    """Rows that are not finite say nothing of others. Raises Disagreement."""
    table = names.index(str(candidate.rows))
    odd = [t.clone() for t in tensors]
    odd[table][0, 0], odd[table][1 % len(odd[table]), -1] = math.inf, math.nan
    ids = torch.arange(len(odd[table])).unsqueeze(0)
    expression = compiled(candidate.expression, ("self", "x"), ops=Definitions())
    with torch.no_grad():
        own = types.SimpleNamespace(**(state | dict(zip(names, odd, strict=True))))
        actual, wanted = flat(expression(own, ids)), flat(run(ids, *odd))
        distance("of a table that is not finite: result", actual, wanted, LIMIT)


def _of_any_number(
    run: Any, state: dict[str, Any], names: Sequence[str], candidate: Candidate, tensors: Sequence[Tensor]
) -> None:
    """What it gives for numbers of no row, of which it refuses none. Raises Disagreement."""
    rows = len(tensors[names.index(candidate.rows)])
    ids = torch.tensor([[-1, rows, -rows - 1, 2 * rows + 1], [-5 * rows - 2, 7 * rows - 1, 2**40 + 3, -(2**40) - 1]])
    expression = compiled(candidate.expression, ("self", "x"), ops=Definitions())
    with torch.no_grad():
        own = types.SimpleNamespace(**(state | dict(zip(names, tensors, strict=True))))
        distance("of numbers of no row: result", flat(expression(own, ids)), flat(run(ids, *tensors)), LIMIT)


def _takes(run: Any, number: int, tensors: Sequence[Tensor]) -> bool:
    """Whether it gives something for the number of no row."""
    try:
        with torch.no_grad():
            run(torch.tensor([[number, 0]]), *tensors)
    except (IndexError, RuntimeError):
        return False
    return True


def left_out(
    kind: type[nn.Module],
    state: dict[str, Any],
    names: Sequence[str],
    candidate: Candidate,
    numbers: frozenset[float],
    trace: Trace,
) -> list[str]:
    """Tests that a call must pass beside. Raises Disagreement where no drawn input showed that the two differ."""
    if candidate.rows:
        run = functools.partial(original, kind, state, names, False)
        tensors = tensors_of(state, names, 7)
        _of_other_rows(run, state, names, candidate, tensors)
        if "remainder(x" in candidate.expression:
            _of_any_number(run, state, names, candidate, tensors)
            return []
        if "x < 0" not in candidate.expression and _takes(run, -1, tensors):
            raise Disagreement("it takes numbers below zero")
        if "x < 0" in candidate.expression and _takes(run, -1 - len(tensors[names.index(candidate.rows)]), tensors):
            raise Disagreement("it takes any number below zero")
        return []
    expression = compiled(candidate.expression, ("self", "x", "gate")[: 2 + candidate.gate], ops=Definitions())

    def both(state: dict[str, Any], shorter: beyond.Beyond | None) -> beyond.Beyond:
        run = functools.partial(original, kind, state, names, False)
        tensors, width = tensors_of(state, names, 7), state["ferryman_cut"].get(candidate.width, candidate.width)
        given = (run, expression, candidate, state, tuple(names), tuple(tensors), width, numbers, trace)
        return beyond.Beyond(*given, shorter)

    short = shortened(state, candidate.width, beyond.SHORT)
    whole = both(state, both(short, None))
    state["ferryman_dims"] = beyond.agreeing(whole, state["ferryman_dims"])
    return beyond.shown(whole, state["ferryman_dims"])
