"""What a function with options that modules call computes, such as a convolution or a scan, shown by proof.

Unlike a helper's, its arguments may be None, flags and names; each form holds for the values that it names. A function
may write over one of its arguments, a state: then what it leaves there is compared, too. A decorator may stand around
it that hands the call on, if its code is known here.
"""

from __future__ import annotations

import ast
import functools
import inspect
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ferryman import ops
from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Definitions, Routine, Signature, compiled
from ferryman.porting.model import casting, source
from ferryman.porting.model.branches import follow_function
from ferryman.porting.model.exact import Widened
from ferryman.porting.model.helpers import unread
from ferryman.porting.model.proof import Proof, prove
from ferryman.porting.model.trace import Read, Trace, Unproven, meaning

_DEFINITIONS = Definitions()
# Draws have as many tokens, and more: what a larger number in the code bounds, they do not show.
_DRAWN = 8
# Code of a library's decorators -> whether one of them hands calls on to what it wraps, not to another implementation.
# It may act on keywords beyond the wrapped function's own parameters; their names stand in its code.
wrappers: dict[types.CodeType, Callable[[types.FunctionType], bool]] = {}


@dataclass(frozen=True)
class Form:
    """One proven meaning of a function. ``guards``: tests of its own that came out one way; ``reads``: names of files
    that it reads."""

    routine: Routine
    guards: tuple[tuple[str, bool], ...]
    proof: Proof
    reads: tuple[Read, ...] = ()


@dataclass(frozen=True)
class ServedRoutine:
    """``replacement`` serves the calls that a form describes; the others go to the function. ``gradient``: as a
    routine's."""

    replacement: types.FunctionType
    op: str
    gradient: bool


_served: dict[types.FunctionType, ServedRoutine | None] = {}


def served_routine(function: Any) -> ServedRoutine | None:
    """What serves a function; None for most."""
    if not isinstance(function, types.FunctionType):
        return None
    if function not in _served:
        _served[function] = None  # a function that calls itself
        inner = _wrapped(function)
        forms = () if inner is None else tuple(_forms_of(inner))
        if inner is not None and forms:
            first = forms[0].routine
            _served[function] = ServedRoutine(_replacement(function, inner, forms), first.op, first.gradient)
    return _served[function]


def _wrapped(function: Any) -> types.FunctionType | None:
    """The function inside known decorators; None inside any other."""
    while hasattr(function, "__wrapped__"):
        known = wrappers.get(getattr(function, "__code__", None))  # type: ignore[arg-type]
        if known is None or not known(function):
            return None
        function = function.__wrapped__
    return function if isinstance(function, types.FunctionType) else None


def _forms_of(function: types.FunctionType) -> Iterator[Form]:
    code = function.__code__
    if code.co_flags & inspect.CO_VARARGS or code.co_kwonlyargcount or code.co_posonlyargcount:
        return
    names = code.co_varnames[: code.co_argcount]
    if code.co_flags & inspect.CO_VARKEYWORDS and not unread(code, code.co_varnames[code.co_argcount]):
        return
    defaults = function.__defaults__ or ()
    signature = Signature(len(names) - len(defaults), defaults)
    routines = proposals("routines", signature)
    ours = {"ops", "torch", *(f"a{i}" for i in range(len(names)))}
    if not routines or ours & set(names):
        return
    trace = Trace()
    try:
        followed = follow_function(function, trace)
    except Unproven:
        return
    op, shown = "", set()
    refuted: set[Any] = set()
    for routine in routines:
        fixed = frozenset(routine.fixed.items())
        if fixed in shown or (op and routine.op != op) or not _quick(followed, routine, refuted):
            continue
        proof = _prove(followed, routine, trace)
        if not proof.ok:
            continue
        try:
            guards = tuple(trace.guards(routine.entered))
        except Unproven:
            continue
        asked = {n.value for text, _ in guards for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Constant)}
        if any(abs(n) > _DRAWN and n not in {*defaults, *asked} for n in trace.numbers | trace.computed()):
            continue
        op = routine.op
        shown.add(fixed)
        tests = casting.tests(op, *_both(followed, routine, ops), routine.draw(0), "a0")
        routine = replace(routine, guard=" and ".join([routine.guard, *tests]))
        yield Form(routine, guards, proof, tuple(trace.reads))


def _quick(followed: Any, routine: Routine, refuted: set[Any]) -> bool:
    """Whether a first draw shows nothing against it. refuted: draws that the function refuses, and what was not what it
    says of one, of those before."""
    draw = routine.draw
    drawn = (draw.func, repr(draw.args), repr(draw.keywords)) if isinstance(draw, functools.partial) else id(draw)
    if drawn in refuted or (drawn, routine.expression) in refuted:
        return False
    given = routine.draw(0)
    if not _accepted(functools.partial(_with_written, followed, routine.writes), given):
        refuted.add(drawn)
        return False
    original, expression = _both(followed, routine, _DEFINITIONS)
    if prove(original, expression, [given], storage=(), gradients=False).ok:
        return True
    refuted.add((drawn, routine.expression))
    return False


def _prove(followed: Any, routine: Routine, trace: Trace) -> Proof:
    given = [routine.draw(seed) for seed in range(routine.seeds - routine.refused)]
    original, expression = _both(followed, routine, _DEFINITIONS)
    more = [routine.draw(seed) for seed in range(routine.seeds - routine.refused, routine.seeds)]
    given += [values for values in more if _accepted(original, values)]
    for test in trace.tests:  # what was refused covers nothing
        test.seen.clear()
    wide = routine.wide if routine.apart else frozenset[int]()
    proof = prove(original, expression, given, gradients=routine.gradient, wide=wide)
    if proof.ok and routine.wide - wide:
        mixed = prove(original, expression, given[:3], gradients=False, wide=routine.wide)
        return proof if mixed.ok else mixed
    return proof


def _both(followed: Any, routine: Routine, of: Any) -> tuple[Any, Any]:
    """(the function with what it writes, the routine's expression)."""
    names = tuple(f"a{i}" for i in range(len(routine.draw(0))))
    return functools.partial(_with_written, followed, routine.writes), compiled(routine.expression, names, ops=of)


def _accepted(original: Any, given: tuple[Any, ...]) -> bool:
    try:
        with Widened(torch.float64), torch.no_grad():
            original(*given)
    except Exception:  # noqa: BLE001 - foreign code ran: whatever it raises, it gives no result
        return False
    return True


def _with_written(function: Any, writes: int | None, *given: Any) -> Any:
    """The result, and what stands in the argument that is written over: a copy of it."""
    if writes is None:
        return function(*given)
    mine = list(given)
    mine[writes] = given[writes].clone()
    return function(*mine), mine[writes]


def _graded(*given: Any) -> bool:
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in given)


def _narrow(*given: Any) -> bool:
    """Floating tensors, if any, are of at most 32 bits: what ops take."""
    return all(not isinstance(t, Tensor) or (t.dtype.is_floating_point and t.dtype.itemsize < 8) for t in given)


def _read_by_wrappers(function: Any) -> tuple[str, ...]:
    """Words in the code of a function's decorators: keywords that they may act on."""
    words: dict[str, None] = {}
    while hasattr(function, "__wrapped__"):
        words |= dict.fromkeys(c for c in function.__code__.co_consts if isinstance(c, str) and c.isidentifier())
        function = function.__wrapped__
    return tuple(words)


def _replacement(function: types.FunctionType, inner: types.FunctionType, forms: tuple[Form, ...]) -> Any:
    code = inner.__code__
    names = code.co_varnames[: code.co_argcount]
    ours = ", ".join(f"a{i}" for i in range(len(names)))
    rest = code.co_varnames[code.co_argcount] if code.co_flags & inspect.CO_VARKEYWORDS else ""
    known = source.names_read(inner, [text for form in forms for text, _ in form.guards])
    known |= {"ops": ops, "torch": torch, "_original": function, "_graded": _graded, "_narrow": _narrow}
    known |= meaning(forms[-1].reads)  # what a table holds is read by one form after the other
    known["_read"] = _read_by_wrappers(function)
    lines = [
        f"def served({', '.join(names)}{f', **{rest}' if rest else ''}):",
        f"    {ours} = {', '.join(names)}",
    ]
    more = f"all({rest}.get(name) is None for name in _read)" if rest and known["_read"] else "True"
    lines.append(f"    if {more} and _narrow({ours}):")
    for i, form in enumerate(forms):
        routine, tests = form.routine, []
        for place, value in routine.fixed.items():
            known[f"_fixed_{i}_{place}"] = value
            same = "is" if value is None or isinstance(value, bool) else "=="
            tests.append(f"a{place} {same} _fixed_{i}_{place}")
        tests.append(routine.guard)
        if not routine.gradient or routine.writes is not None:
            tests.append(f"not _graded({ours})")
        tests += [f"bool({text}) is {outcome}" for text, outcome in form.guards]
        tests += [read.test(j) for j, read in enumerate(form.reads)]
        lines.append(f"        if {' and '.join(tests)}:")
        if routine.writes is None:
            lines.append(f"            return {routine.expression}")
        else:
            lines.append(f"            made, becomes = {routine.expression}")
            lines.append(f"            a{routine.writes}.copy_(becomes)")
            lines.append("            return made")
    lines.append(f"    return _original({', '.join(names)}{f', **{rest}' if rest else ''})")
    text = "\n".join(lines) + "\n"
    exec(compile(text, f"<ferryman {inner.__name__}>", "exec"), known)  # noqa: S102 - our own text, their identifiers
    replacement: types.FunctionType = known["served"]
    replacement.__name__ = inner.__name__
    replacement.__defaults__ = inner.__defaults__
    replacement.__doc__ = inner.__doc__
    return replacement
