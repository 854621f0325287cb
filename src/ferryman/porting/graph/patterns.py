"""Patterns from definitions: what an op computes, in normal form, for each combination of its options.

A definition is recorded on tensors of one of the op's own cases, on "meta", with numbers in place of its scalars that
occur nowhere else. So a constant of the record is known to be a scalar argument, a size of an argument, or the
definition's own.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import torch

from ferryman.dispatch import registry
from ferryman.errors import ArgumentError
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.graph.normal import Normal
from ferryman.porting.graph.record import record
from ferryman.porting.graph.terms import Pool, Term, bare

_KINDS = {"Tensor", "Tensor?", "float", "float?", "int", "int?", "bool", "str"}  # arguments that are enumerated
_STORAGES = (torch.bfloat16, torch.float32)


@dataclass(frozen=True, eq=False)
class Pattern:
    """One meaning of an op.

    roots: a term for each output, without its last rounding. variables: argument -> its term. scalars: argument -> the
    number that stands for it. fixed: arguments that this pattern is for. half: recorded in 16 bits. sizes: a number of
    the record -> the sizes it may be: (argument, axis, divisor). whole: what computes it, as the op's body does.
    """

    op: Primitive
    roots: tuple[Term, ...]
    variables: Mapping[str, Term]
    scalars: Mapping[str, float]
    fixed: Mapping[str, Any]
    half: bool
    sizes: Mapping[int, tuple[tuple[str, int, int], ...]]
    weight: int
    ranks: Mapping[str, int] = field(default_factory=dict)

    @property
    def skips(self) -> int:
        """Roundings of the program that the op's may lack: it permits as many of its own."""
        return len(self.op.limits.roundings) if self.half else 0


def _sentinel(index: int) -> float:
    return 0.01234567 * (1 + 0.17 * index)


def _options(op: Primitive, cases: list[Case]) -> Iterator[dict[str, Any]]:
    """Every combination of flags, of absent and present, of numbers that a definition may branch on."""
    choices: dict[str, list[Any]] = {}
    for index, name in enumerate(op.names):
        kind = op.types[name]
        if name in op.added:  # what came later has functions of its own, if any: each would double the patterns
            choices[name] = [op.added[name]]
            continue
        seen = [case.args[name] for case in cases if name in case.args]
        if kind == "Tensor?":
            choices[name] = [None, TensorSpec]
        elif kind == "bool":
            choices[name] = [False, True]
        elif kind == "str":
            choices[name] = sorted(set(seen))
        elif kind.startswith("float"):
            special = {v for v in seen if v is None or v == 0.0}
            default = next(p.default for p in op.parameters if p.name == name)
            choices[name] = [_sentinel(index), *(v for v in (None, 0.0) if v in special and v == default)]
        elif kind.startswith("int"):
            choices[name] = [7919 + index, *([None] if kind.endswith("?") else [])]
    for combination in itertools.product(*choices.values()):
        yield dict(zip(choices, combination, strict=True))


def _functions(op: Primitive) -> list[Callable[..., Any]]:
    """Whatever computes the op: its definition, with the roundings that it permits, and what torch.compile traces."""
    functions: list[Callable[..., Any]] = [op.body]
    if op.limits.rounded is not None:
        names = [r.name for r in op.limits.roundings]
        for count in range(1, len(names) + 1):
            functions += [op.limits.rounded(frozenset(chosen)) for chosen in itertools.combinations(names, count)]
    if op.lower is not None and op.lower is not op.body:
        functions.append(op.lower)
    return functions


def _shape_case(op: Primitive, cases: list[Case]) -> list[Case]:
    """Cases whose shapes stand for others: small, of the most arguments, no size of 0 or 1 in the last dimension."""

    def fits(case: Case) -> bool:
        specs = [v for v in case.args.values() if isinstance(v, TensorSpec)]
        return case.tier == "small" and all(s.shape and min(s.shape) > 0 and s.shape[-1] > 8 for s in specs)

    def several(case: Case) -> int:
        return len([v for v in case.args.values() if isinstance(v, TensorSpec)])

    ranked = sorted((c for c in cases if fits(c)), key=several, reverse=True)
    # one of each arrangement of sizes: of partial rotary embedding the angles are narrower
    kinds: dict[Any, Case] = {}
    for case in ranked:
        shapes = [v.shape for v in case.args.values() if isinstance(v, TensorSpec)]
        kinds.setdefault((len(shapes), len({s[-1] for s in shapes}), several(case)), case)
    return list(kinds.values())


def of(op: Primitive) -> list[Pattern]:
    """Every pattern of an op, the most specific first. None without cases, with lists, or where a call has no rule."""
    if not set(op.types.values()) <= _KINDS:
        return []
    cases = list(registry.evidence(op).cases())
    patterns: dict[Any, Pattern] = {}
    for case, storage, options in itertools.product(_shape_case(op, cases), _STORAGES, list(_options(op, cases))):
        args: dict[str, Any] = {}
        missing = False
        for name in op.names:
            wanted, given = options.get(name, TensorSpec), case.args.get(name)
            if wanted is TensorSpec:
                if not isinstance(given, TensorSpec):
                    missing = True
                    break
                dtype = storage if given.dtype == "storage" else getattr(torch, given.dtype)
                args[name] = torch.empty(given.shape, dtype=dtype, device="meta")
            else:
                args[name] = wanted
        if missing:
            continue
        for function in _functions(op):
            pattern = _recorded(op, function, args, options, storage in (torch.bfloat16,))
            if pattern is not None:
                key = (
                    pattern.half,
                    _key(pattern),
                    tuple(sorted((k, v) for k, v in pattern.fixed.items() if v is None)),
                )
                patterns.setdefault(key, pattern)
    return sorted(patterns.values(), key=lambda p: -p.weight)


def _recorded(
    op: Primitive, function: Callable[..., Any], args: dict[str, Any], options: Mapping[str, Any], half: bool
) -> Pattern | None:
    pool = Pool()
    try:
        op.check(*args.values())
        graph, inputs, outputs = record(function, op.names, args)
        normal = Normal(graph, pool)
    except (
        ArgumentError,
        RuntimeError,
        NotImplementedError,
    ):  # options that exclude each other; data
        return None
    roots = tuple(_unrounded(normal.term[node]) for node in outputs[: len(op.outputs)])
    scalars = {n: v for n, v in options.items() if _is_sentinel(op, n, v)}
    variables = {name: normal.term[node] for name, node in inputs.items()}
    known = [node for term in roots for node in _leaves(term)]
    if any(node.op != "placeholder" for node in known) or not known:
        return None  # something in it has no rule: no pattern
    sizes: dict[int, list[tuple[str, int, int]]] = {}
    for name, node in inputs.items():
        shape = node.meta["example_value"].shape
        for axis, divisor in itertools.product(range(-1, -len(shape) - 1, -1), (1, 2)):
            if shape[axis] % divisor == 0 and shape[axis] // divisor > 1:
                sizes.setdefault(shape[axis] // divisor, []).append((name, axis, divisor))
    fixed = {n: v for n, v in options.items() if n not in scalars and v is not TensorSpec}
    return Pattern(
        op,
        roots,
        variables,
        scalars,
        fixed,
        half,
        {k: tuple(v) for k, v in sizes.items()},
        sum(_size(term) for term in roots),
        {name: node.meta["example_value"].dim() for name, node in inputs.items()},
    )


def _is_sentinel(op: Primitive, name: str, value: Any) -> bool:
    kind = op.types[name]
    if value is None or isinstance(value, bool) or kind.startswith(("Tensor", "str", "bool")):
        return False
    return math.isclose(value, _sentinel(op.names.index(name))) or value == 7919 + op.names.index(name)


def _unrounded(term: Term) -> Term:
    return term.args[2] if term.kind == "round" else term


def parts(term: Term) -> tuple[Term, ...]:
    """The terms that a term is made of."""
    if term.kind in ("leaf", "const"):
        return ()
    if term.kind in ("mul", "add"):
        return tuple(t for t, _ in term.args[1])
    if term.kind == "round":
        return (term.args[2],)
    return term.args[1]


def _leaves(term: Term) -> Iterator[Any]:
    if term.kind == "leaf":
        yield term.args[0]
    for inner in parts(term):
        yield from _leaves(inner)


def _size(term: Term) -> int:
    return 1 + sum(_size(inner) for inner in parts(term))


def _key(pattern: Pattern) -> Any:
    names = {term: name for name, term in pattern.variables.items()}
    stood = {round(v, 12): n for n, v in pattern.scalars.items()}

    def written(term: Term) -> Any:
        if term in names:
            return names[term]
        if term.kind == "const":
            return stood.get(round(term.args[0], 12), term.args[0])
        if term.kind in ("mul", "add"):
            shown = stood.get(round(term.args[0], 12), term.args[0])
            return (term.kind, shown, tuple(sorted(((written(t), float(c)) for t, c in term.args[1]), key=repr)))
        if term.kind == "round":
            return ("round", written(term.args[2]))
        return (term.kind, *(pattern.sizes.get(p, p) for p in term.args[0]), *(written(t) for t in term.args[1]))

    return tuple(written(root) for root in pattern.roots)


@lru_cache(maxsize=1)
def all_patterns() -> tuple[Pattern, ...]:
    """Of every op that has a backward or none, forward ops only: a gradient belongs to its forward. Largest first."""
    known = registry.primitives()
    backwards = {op.gradient.backward for op in known.values()}
    patterns = [p for op in known.values() if op.name not in backwards and not op.mutates for p in of(op)]
    return tuple(sorted(patterns, key=lambda p: -p.weight))


__all__ = ["Pattern", "all_patterns", "bare", "of", "parts"]
