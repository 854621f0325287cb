"""Cases that nobody thought of: any op's arguments drawn from its domain, judged like the op's own cases.

`case` takes its decisions from ``choose``, one option out of several, so that the same data serves a counter
(`cases`, for a device) and Hypothesis, which shrinks what fails (tests/parity/test_fuzz.py).
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

import torch

from ferryman.dispatch import registry
from ferryman.errors import EvidenceError, UnknownName
from ferryman.ops.domain import Choose, Domain, Form, Sizes, Symbols
from ferryman.ops.evidence import Evidence
from ferryman.ops.primitive import Case, Primitive, TensorSpec
from ferryman.porting.inputs.cases import APART, forward_of, output_gradients
from ferryman.porting.inputs.fills import DTYPES, strided
from ferryman.porting.inputs.fills import fill as filled

__all__ = [
    "Form",
    "Sizes",
    "case",
    "cases",
    "described",
    "domain_of",
    "known",
    "name_of",
    "numbered",
    "numbers",
    "refilled",
    "undrawable",
    "variants",
]

_FLOATS = ("storage", "float32", "bfloat16", "float16")
_MOST_TRIES = 100  # draws for each case that is wanted in one of some dtypes


def domain_of(op: Primitive) -> Domain | None:
    """What an op's arguments are drawn from; a backward has its forward's. None: from its cases."""
    return registry.evidence(op).fuzz


def case(op: Primitive, choose: Choose, sizes: Sizes | None = None, name: str = "fuzz") -> tuple[Case, torch.dtype]:
    """A case of an op and the storage dtype to run it in. Raises UnknownName for an op without evidence."""
    forward = forward_of(op) or op
    evidence = registry.evidences().get(forward.name)
    if evidence is None:
        raise UnknownName("op that fuzzing knows", forward.name, registry.evidences())
    args = _drawn(evidence, forward, choose, sizes or Sizes())
    if forward is not op:
        args |= {n: choose((True, False)) for n in op.names if n.startswith("need_")}
        absent = [n for n in output_gradients(op, forward) if op.types[n] == "Tensor?"]
        args |= {n: choose((True, False)) for n in absent}
    dtype = choose(evidence.dtypes)
    if evidence.fuzz is not None and evidence.fuzz.defined is not None:
        evidence.fuzz.defined(args, dtype)
    gradients = None if forward is op else choose((None, *APART, "offset"))
    return Case(name, args, gradients=gradients), dtype


def _drawn(evidence: Evidence, op: Primitive, choose: Choose, sizes: Sizes) -> dict[str, Any]:
    if evidence.fuzz is None:
        return _varied(evidence, op, choose, sizes)
    domain = evidence.fuzz
    symbols = Symbols(choose, sizes, domain)
    args: dict[str, Any] = {}
    fills: dict[str, str] = {}
    dtypes: dict[str, str] = {}
    for parameter, form in domain.arguments.items():
        if isinstance(form, str):
            args[parameter] = choose(getattr(sizes, form))
        elif isinstance(form, tuple):
            args[parameter] = choose(form)
        elif form.optional and choose((False, True)):
            args[parameter] = None
        else:
            key = form.group or parameter
            fills.setdefault(key, choose(form.fills))
            if form.mixed:
                dtypes.setdefault(key, choose(_FLOATS))
            try:
                many = symbols[form.count] if form.count else 1
                specs = [_spec(form, symbols, fills[key], dtypes.get(key, form.dtype)) for _ in range(many)]
                args[parameter] = specs if form.count else specs[0]
            except UnknownName as error:
                raise EvidenceError(f"{op.name}: the form {form.dims!r} of {parameter}: {error}") from error
    if domain.drawn is not None:
        domain.drawn(args, symbols)
    return args


def _varied(evidence: Evidence, op: Primitive, choose: Choose, sizes: Sizes) -> dict[str, Any]:
    """One of the op's own small cases, its float tensors filled as another case fills that argument, all laid out anew.

    Sizes and scalars stay: only the op's author knows which fit each other.
    """
    own = [c for c in evidence.cases() if c.tier == "small"]
    if not own:
        raise UnknownName("op with a small case", evidence.op, ())
    template = choose(own)
    args = dict(template.args)
    for name, value in args.items():
        seen = dict.fromkeys(s.fill for c in own if not c.exact for s in _specs(c.args.get(name)))
        varied = []
        for spec in _specs(value):
            fill = choose(list(seen)) if spec.dtype == "storage" and seen else spec.fill
            layout = _layout(spec.shape, choose, sizes, name not in op.mutates)
            varied.append(replace(spec, fill=fill, layout=layout))
        if varied:
            args[name] = varied[0] if isinstance(value, TensorSpec) else varied
    return args


def _specs(value: Any) -> list[TensorSpec]:
    """An argument's tensors: itself, or those of a list."""
    return [v for v in (value if isinstance(value, list | tuple) else [value]) if isinstance(v, TensorSpec)]


def cases(
    op: Primitive, count: int, seed: int = 0, sizes: Sizes | None = None, first: int = 0
) -> Iterator[tuple[Case, torch.dtype]]:
    """``count`` cases from a counter: the same on every machine, whatever part of them is asked for."""
    for number in range(first, first + count):
        yield numbered(op, number, seed, sizes)


def numbered(op: Primitive, number: int, seed: int = 0, sizes: Sizes | None = None) -> tuple[Case, torch.dtype]:
    """The case that the counter gives at one number."""
    draw = random.Random(f"{seed}/{op.name}/{number}")
    return case(op, draw.choice, sizes, name_of(number))


def name_of(number: int) -> str:
    return f"fuzz_{number}"


def numbers(op: Primitive, count: int, seed: int = 0, dtypes: Collection[torch.dtype] | None = None) -> list[int]:
    """The numbers of the first ``count`` cases, of those that are drawn in one of ``dtypes``.

    A domain that raises has its number listed, too: who runs the case says so. Fewer come back where draws seldom have
    these dtypes.
    """
    if dtypes is None:
        return list(range(count))
    taken: list[int] = []
    for number in range(count * _MOST_TRIES):
        try:
            wanted = numbered(op, number, seed)[1] in dtypes
        except Exception:  # noqa: BLE001 - another package's domain may be wrong itself
            wanted = True
        if wanted:
            taken.append(number)
        if len(taken) == count:
            break
    return taken


def variants(
    op: Primitive, templates: int, each: int, seed: int = 0, sizes: Sizes | None = None
) -> Iterator[tuple[Case, torch.dtype]]:
    """``templates`` cases, each with ``each`` different contents: few shapes, strides and dtypes, so that a compiler of
    specialised kernels is called as often as there are templates."""
    for t, (template, dtype) in enumerate(cases(op, templates, seed, sizes)):
        for i in range(each):
            yield refilled(op, template, dtype, f"{t}_{i}", seed), dtype


def refilled(op: Primitive, template: Case, dtype: torch.dtype, which: str, seed: int = 0) -> Case:
    """A case with other contents, ``which`` of them: of other fills, where the op has a domain."""
    domain, draw = domain_of(op), random.Random(f"{seed}/{op.name}/{which.replace('_', '/')}")
    args = dict(template.args)
    if domain is not None:
        args = _refilled(domain, args, dtype, draw.choice)
    return replace(template, name=f"fuzz_{which}", args=args)  # its name alone makes other contents


def _refilled(domain: Domain, args: dict[str, Any], dtype: torch.dtype, choose: Choose) -> dict[str, Any]:
    fills: dict[str, str] = {}
    for name, value in args.items():
        form = domain.arguments.get(name)
        specs = _specs(value)
        if isinstance(form, Form) and specs and all(_floating(spec.dtype) for spec in specs):
            options = [f for f in form.fills if not filled(f).boolean]
            fill = fills.setdefault(form.group or name, choose(options))
            others = [replace(spec, fill=fill) for spec in specs]
            args[name] = others[0] if isinstance(value, TensorSpec) else others
    if domain.defined is not None:
        domain.defined(args, dtype)
    return args


def described(drawn: Case, dtype: torch.dtype) -> str:
    """A case as Python that makes it again: an infinity or NaN is a call of ``float``: its repr is no Python."""
    return f"({replace(drawn, args={name: _written(value) for name, value in drawn.args.items()})!r}, {dtype})"


class _NonFinite(float):
    def __repr__(self) -> str:
        return f"float('{float(self)}')"


def _written(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_written(one) for one in value)
    return _NonFinite(value) if isinstance(value, float) and not math.isfinite(value) else value


def _floating(dtype: str) -> bool:
    return dtype == "storage" or DTYPES[dtype].is_floating_point


def _spec(form: Form, symbols: Symbols, fill: str, dtype: str) -> TensorSpec:
    shape: tuple[int, ...] = ()
    for symbol in form.dims.split():
        shape += symbols.leading() if symbol == "..." else (int(symbol) if symbol.isdigit() else symbols[symbol],)
    if filled(fill).boolean:
        dtype = "bool"
    layout = _layout(shape, symbols.choose, symbols.sizes, not form.over) if form.layouts else "contiguous"
    if _floating(dtype) or dtype == "bool":
        return TensorSpec(shape, dtype, fill, layout)
    low, high = (symbols[n] if isinstance(n, str) else n for n in (form.low, form.high))
    return TensorSpec(shape, dtype, None if fill == "integer" else fill, layout, low, high)


def _layout(shape: tuple[int, ...], choose: Choose, sizes: Sizes, sharing: bool = True) -> str:
    """Contiguous as often as not; else any order of the dimensions, padding, misalignment and, where elements may share
    memory, repetition and overlap."""
    kinds = ("contiguous", "permuted", "padded", "offset")
    kind = choose(("contiguous", "permuted", "padded", "expanded", "overlapping", "offset") if sharing else kinds)
    if kind == "contiguous":
        return "contiguous"
    order = list(range(len(shape)))
    if kind == "permuted" and len(shape) > 1:
        first = choose(order)
        order = [first, *(i for i in order if i != first)]
    strides = [0] * len(shape)
    span = choose((1, 2)) if kind == "padded" else 1
    for i in reversed(order):
        strides[i] = span
        span = span * max(shape[i], 1) + (choose(sizes.padding) if kind == "padded" else 0)
    if kind == "expanded" and shape:
        strides[choose(order)] = 0
    if kind == "overlapping" and len(shape) > 1:
        i = choose(order[:-1])
        strides[i] = max(strides[i] // 2, 1)
    return strided(tuple(strides), choose(sizes.offset))


def undrawable(op: Primitive) -> str | None:
    """Why no case of an op can be drawn; None where some can."""
    forward = forward_of(op) or op
    if forward.name not in registry.evidences():
        return f"no evidence.py has a record of {forward.name}"
    evidence = registry.evidence(op)
    if evidence.fuzz is None and not any(c.tier == "small" for c in evidence.cases()):
        return f"the evidence of {forward.name} has no domain and no small case"
    return None


def known() -> tuple[str, ...]:
    """The ops that can be fuzzed: those with evidence, and their backwards."""
    evidences = registry.evidences()
    return tuple(p.name for p in registry.primitives().values() if (forward_of(p) or p).name in evidences)
