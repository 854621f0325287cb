"""Proofs of a leaf module's candidates: its twin against what each says, and with an addition before it."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ferryman.ops.recognition import Candidate, Definitions, compiled
from ferryman.porting.model import adding, beyond
from ferryman.porting.model.distance import flat
from ferryman.porting.model.proof import STORAGE, First, Proof
from ferryman.porting.model.proof import prove as prove_calls
from ferryman.porting.model.twin import original, shaped, tensors_of

_WIDE = 3  # inputs that a proven candidate is rounded on once more
_DEFINITIONS = Definitions()
Runs = dict[Any, dict[int, Any]]  # what a module gave of inputs, by mode and kind of these


def refuted(first: First, state: dict[str, Any], names: Sequence[str], candidate: Candidate) -> Proof | None:
    """Why a candidate is none, where the first of its inputs shows it; what the proof would say."""
    if candidate.rows:
        return None
    width = state["ferryman_cut"].get(candidate.width, candidate.width)

    def given() -> tuple[Any, ...]:
        x = next(shaped(beyond.inputs_of(width, candidate.axis), state, candidate))
        return (x, *(beyond.gating(x, 0) if candidate.gate else ()), *tensors_of(state, names, 7))

    key = width, candidate.axis, candidate.gate, tuple(state["ferryman_dims"])
    return first.refuted(key, given, _meaning(state, names, candidate), candidate.gradient)


def _meaning(state: dict[str, Any], names: Sequence[str], candidate: Candidate) -> Callable[..., Any]:
    """A candidate's expression, as a function of what its module is given and has."""
    count = 2 if candidate.gate else 1
    expression = compiled(candidate.expression, ("self", "x", "gate")[: 1 + count], ops=_DEFINITIONS)
    return lambda *given: expression(
        types.SimpleNamespace(**(state | dict(zip(names, given[count:], strict=True)))), *given[:count]
    )


def prove(
    kind: type[nn.Module],
    state: dict[str, Any],
    names: Sequence[str],
    candidate: Candidate,
    wide: frozenset[int] = frozenset(),
    runs: Runs | None = None,
) -> Proof:
    """The instrumented module against the candidate's expression, in both modes if it can tell them apart. wide:
    tensors that are float32 where the others are narrower, of a candidate that is proven with all of one dtype. runs:
    of this module."""
    cut: dict[int, int] = state["ferryman_cut"]
    tensors = tensors_of(state, names, 7)
    inputs: list[tuple[Any, ...]]
    if candidate.rows:
        # rows of any length: what bounds a row's norm shows, whatever the bound
        known = [v for v in (*state.values(), *state["ferryman_named"]) if isinstance(v, int) and v is not True]
        table = tensors[names.index(candidate.rows)].shape[0]
        drawn_ids = list(
            beyond.taken(beyond.ids(table, known), functools.partial(original, kind, state, names, False), tensors)[0]
        )
        inputs = [(ids, *tensors) for ids in drawn_ids]
        inputs += [(drawn_ids[0], *(t * 2.0**power for t in tensors)) for power in (-200, 200)]
    else:
        width = cut.get(candidate.width, candidate.width)
        inputs = [
            (x, *(beyond.gating(x, i) if candidate.gate else ()), *tensors)
            for i, x in enumerate(shaped(beyond.inputs_of(width, candidate.axis), state, candidate))
        ]
    proof = Proof(False)
    for training in state["ferryman_modes"]:
        key = training, candidate.kind, candidate.width, candidate.gradient, tuple(state.get("ferryman_dims", ()))
        proof = prove_calls(
            functools.partial(original, kind, state, names, training),
            _meaning(state, names, candidate),
            inputs[: _WIDE if wide else None],
            storage=() if "ferryman_wide" in state else STORAGE,
            gradients=candidate.gradient,
            wide=wide,
            runs=None if runs is None else runs.setdefault(key, {}),
        )
        if proof.ok and not candidate.gradient and not _of_one_mode(kind, state, names, training, inputs[0]):
            proof = Proof(False, "it gives something else where gradients are on")
        if not proof.ok:
            break
    return proof


def _of_one_mode(
    kind: type[nn.Module], state: dict[str, Any], names: Sequence[str], training: bool, given: Sequence[Any]
) -> bool:
    """Whether it gives without gradients, where it was proven, what it gives as they are on and none is needed."""
    results = []
    for mode in (torch.no_grad, torch.enable_grad):
        with mode():
            results.append(flat(original(kind, state, names, training, *(x.clone() for x in given))))
    pairs = list(zip(*results, strict=True))
    return all(a.shape == b.shape and torch.allclose(a, b, 1e-6, 1e-6, equal_nan=True) for a, b in pairs)


def takes_addition(
    kind: type[nn.Module],
    state: dict[str, Any],
    names: Sequence[str],
    candidate: Candidate,
    runs: dict[int, Any],
    wide: frozenset[int] = frozenset(),
) -> bool:
    tensors = tensors_of(state, names, 9)
    expression = compiled(candidate.added, ("self", "x", "addend"), ops=_DEFINITIONS)
    return adding.proven(
        functools.partial(original, kind, state, names, False),
        lambda x, r, *given: expression(types.SimpleNamespace(**(state | dict(zip(names, given, strict=True)))), x, r),
        [(x, *tensors) for x in shaped(beyond.inputs_of(candidate.width), state, candidate)][: _WIDE if wide else None],
        wide,
        runs,
    )
