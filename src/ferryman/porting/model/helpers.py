"""What a function that modules call computes, such as one that rotates queries and keys, shown by proof."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import math
import re
import types
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch

from ferryman import ops
from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Definitions, Helper, compiled
from ferryman.porting.model import casting, serving, source
from ferryman.porting.model.branches import follow_function
from ferryman.porting.model.distance import flat
from ferryman.porting.model.exact import Widened
from ferryman.porting.model.proof import Proof, prove
from ferryman.porting.model.trace import Read, Trace, Unproven, meaning

_DEFINITIONS = Definitions()
_LONGEST = 1000  # tokens of the longest draw
_WIDEST = 512  # heads whose width code names
_OF_COMPLEX = {f.__name__ for f in (torch.real, torch.imag, torch.view_as_real)}


@dataclass(frozen=True)
class Form:
    """One proven meaning of a helper: ``fixed`` are values of its further parameters for which it holds."""

    helper: Helper
    guard: str
    fixed: tuple[tuple[str, Any], ...]
    proof: Proof
    reads: tuple[Read, ...] = ()


# By function, not by code: equal code in two files may call different helpers of the same name.
_helpers: dict[types.FunctionType, tuple[Form, ...]] = {}


def forms_of(function: Any) -> tuple[Form, ...]:
    """What a plain function is proven to compute, for the calls that its forms describe; empty for most."""
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return ()
    if function not in _helpers:
        _helpers[function] = tuple(_forms_of(function))
    return _helpers[function]


def _forms_of(function: types.FunctionType) -> Iterator[Form]:
    code = function.__code__
    if code.co_flags & (inspect.CO_VARARGS | inspect.CO_VARKEYWORDS) or code.co_kwonlyargcount:
        return
    names = code.co_varnames[: code.co_argcount]
    defaults = dict(zip(reversed(names), reversed(function.__defaults__ or ()), strict=False))
    required = [n for n in names if n not in defaults]
    trace = Trace()
    called = {name for part in source.codes_of(function) for name in part.co_names}
    wanted = [h for h in proposals("helpers") if h.parameters == len(required) and not h.never & called]
    if not wanted or tuple(required) != names[: len(required)]:
        return
    try:
        followed = follow_function(function, trace)
    except Unproven:
        return
    variants: list[dict[str, Any]] = [defaults]
    for name, value in defaults.items():
        if isinstance(value, int) and not isinstance(value, bool):
            variants += [defaults | {name: other} for other in (0, 1, 2) if other != value]
    for variant in variants:
        for form in _shown(functools.partial(followed, **variant), wanted, trace):
            if form is None:
                return
            yield replace(form, fixed=tuple(variant.items()))


def able(count: int, labels: Set[str], names: Set[str]) -> list[Helper]:
    """The helpers of so many tensors that code may be. labels: functions of PyTorch that it calls; names: all in it, of
    which one makes numbers of what is complex."""
    return [
        h
        for h in proposals("helpers")
        if h.parameters == count and not h.never & labels and (h.joined != "complex" or _OF_COMPLEX & names)
    ]


def forms_of_call(call: Any, trace: Trace, wanted: list[Helper]) -> list[Form]:
    """What a followed call is proven to compute of some helpers; empty for most."""
    forms = [*_shown(call, wanted, trace)]
    return [f for f in forms if f is not None] if None not in forms else []


def _shown(call: Any, wanted: list[Helper], trace: Trace) -> Iterator[Form | None]:
    """Its forms; None, the last, where no proof follows a branch of it."""
    shown: list[Helper] = []
    results: dict[Any, Any] = {}
    sized = _sized(call, wanted, trace, shown, results)
    for helper in itertools.chain(wanted, sized):
        if not all(_beside(helper, h) for h in shown) or not _near(call, helper, results):
            continue
        proof = _prove_helper(call, helper, trace)
        if not proof.ok:
            continue
        try:
            if trace.guards():
                yield None
                return
        except Unproven:
            yield None
            return
        shown.append(helper)
        guard = helper.guard if _mixed(call, helper) else f"{helper.guard} and {helper.strict}"
        long = [n for n in trace.numbers | trace.computed() if abs(n) >= _LONGEST]
        guard += f" and a0.numel() <= {int(min(map(abs, long)))}" if long else ""
        given = [a.detach() for a in helper.draw(0)]
        tests = casting.tests(helper.op, _parts(call, helper.joined), _meant(helper, ops), given, "a0")
        yield Form(helper, " and ".join([guard, *tests]), (), proof, tuple(trace.reads))


def _sized(
    call: Any, wanted: list[Helper], trace: Trace, shown: list[Helper], results: dict[Any, Any]
) -> Iterator[Helper]:
    """Helpers of the widths that the code may name, where none holds for all, and a draw gives what one may."""
    if shown:
        return
    numbers = trace.numbers | trace.computed()  # what runs until here computed
    whole = {int(abs(n)) for n in numbers if n == int(n) and 2 <= abs(n) <= _WIDEST}
    able = [helper for helper in wanted if _takes_width(helper.draw)]
    # of two numbers, pairs of neighbours and of halves are one: code that turns others seems right there
    widths = sorted(n for n in whole | {2 * n for n in whole} if n % 2 == 0 and n > 2)
    # code that says how many numbers of a head it turns does for heads of any width, and for those of that one
    for width in widths:
        for helper in [h for h in able if h.turned]:
            yield from _drawn_so(call, helper, helper.turned, results, turned=width)
    widths = [n for n in widths if any(h.guard.endswith(f" == {n}") for h in shown)] if shown else widths
    able = [h for h in able if not h.turned] if shown else able
    for width in widths:
        for helper in able:
            yield from _drawn_so(call, helper, "a0.shape[-1]", results, width=width)


def _drawn_so(call: Any, helper: Helper, size: str, results: dict[Any, Any], **named: int) -> Iterator[Helper]:
    """A helper of a size that code names, if its draw gives what one may."""
    draw = _of_width(helper.draw, **named)
    if _result(call, draw, helper.joined, results) is not None:
        yield replace(helper, draw=draw, guard=f"{helper.guard} and {size} == {next(iter(named.values()))}")


@functools.cache
def _takes_width(draw: Any) -> bool:
    return "width" in _parameters(draw.func if isinstance(draw, functools.partial) else draw)


@functools.lru_cache(maxsize=1 << 14)
def _of_width(draw: Any, **named: int) -> Any:
    return functools.partial(draw, **named)


@functools.cache
def _parameters(function: Any) -> frozenset[str]:
    return frozenset(inspect.signature(function).parameters)


def _parts(call: Any, joined: str) -> Any:
    """A call as a function of what the draw gives: of an argument that joins two, its parts."""
    if not joined:
        return call

    def of_parts(*given: Any) -> Any:
        if joined == "pairs":
            return call(*given[:-2], torch.stack(given[-2:], -1))
        real, imaginary = (a if a.dtype is torch.float64 else a.float() for a in given[-2:])
        return call(*given[:-2], torch.complex(real, imaginary))

    return of_parts


def _meant(helper: Helper, of: Any = _DEFINITIONS) -> Any:
    """The helper's expression, as a function of what the draw gives."""
    names = tuple(f"a{i}" for i in range(helper.parameters + bool(helper.joined)))
    return compiled(helper.proof or helper.expression, names, ops=of)


def _near(call: Any, helper: Helper, results: dict[Any, Any]) -> bool:
    """Whether a first draw gives the helper's result, nearly: no proof begins where it does not."""
    wanted = _result(call, helper.draw, helper.joined, results)
    if wanted is None:
        return False
    first = _first(helper.draw, helper.joined)
    place = (helper.proof or helper.expression, helper.parameters, first.number)
    if place not in _expected:
        if len(_expected) >= _MOST_EXPECTED:
            _expected.clear()
        try:
            with torch.no_grad():
                _expected[place] = flat(_meant(helper)(*first.given))
        except Exception:  # noqa: BLE001 - the op refuses such a draw
            _expected[place] = None
    actual = _expected[place]
    return (
        actual is not None
        and len(actual) == len(wanted)
        and all(
            a.shape == w.shape and a.dtype is w.dtype and torch.allclose(a, w, 1e-6, 1e-6)
            for a, w in zip(actual, wanted, strict=True)
        )
    )


@dataclass(frozen=True)
class _First:
    """A first draw. ``number``: equal for draws of equal tensors; ``shapes``: for those of equal shapes."""

    given: tuple[torch.Tensor, ...]
    number: int
    shapes: int


_MOST_EXPECTED = 4096
_expected: dict[Any, list[torch.Tensor] | None] = {}  # what helpers give of their first draws
_numbered: dict[Any, int] = {}


@functools.lru_cache(maxsize=1 << 14)
def _first(draw: Any, joined: str) -> _First:
    given = tuple(a.detach() for a in draw(0))
    shapes = (joined, *((a.dtype, *a.shape) for a in given))
    digest = hashlib.sha256()
    for a in given:
        digest.update(a.contiguous().view(torch.uint8).numpy().tobytes())
    numbers = (_numbered.setdefault(key, -1 - len(_numbered)) for key in ((*shapes, digest.digest()), shapes))
    return _First(given, *numbers)


def _result(call: Any, draw: Any, joined: str, results: dict[int, Any]) -> list[torch.Tensor] | None:
    """What a call gives of a first draw; None where no helper gives such. Equal draws have one result; what
    refuses a draw refuses all of its shapes."""
    first = _first(draw, joined)
    if first.shapes in results:
        return None
    if first.number not in results:
        try:
            with torch.no_grad(), Widened(torch.float64):
                result = flat(_parts(call, joined)(*(a.clone() for a in first.given)))  # it may write over them
        except Exception:  # noqa: BLE001 - foreign code may raise what it likes
            result = None
        if result is None or [w.dim() for w in result] != [first.given[0].dim()] * len(result):
            results[first.shapes] = None
            return None
        results[first.number] = result
    known: list[torch.Tensor] | None = results[first.number]
    return known


def _beside(one: Helper, other: Helper) -> bool:
    """Whether a form may stand beside one that is proven: another case of its expression, or calls of other sizes."""
    if one.expression == other.expression:
        return one.guard != other.guard
    sizes = [dict(re.findall(r"(\w+\.(?:dim\(\)|shape\[-1\])) == (\d+)", h.guard)) for h in (one, other)]
    single = [set(re.findall(r"(\w+\.shape\[\d\]) == 1\b", h.guard)) for h in (one, other)]
    return single[0] != single[1] or any(n != sizes[1].get(name, n) for name, n in sizes[0].items())


def _prove_helper(call: Any, helper: Helper, trace: Trace) -> Proof:
    call, expression = _parts(call, helper.joined), _meant(helper)
    inputs = [helper.draw(seed) for seed in range(3)]
    queries = [(*inputs[0][:-2], *(a.detach() for a in inputs[0][-2:]))]
    quick = prove(call, expression, queries, storage=(), gradients=False)
    if not quick.ok:
        return quick
    # angles need no gradient: the op gives none
    proof = prove(_fixed_tail(call), _fixed_tail(expression), inputs)
    if not proof.ok:
        return proof
    # other sizes, and what the code's numbers may bound
    more = [helper.draw(seed) for seed in range(3, 5)]
    numbers = {abs(n) for n in trace.numbers | trace.computed()}
    for value in (*sorted(numbers - {0.0}), math.inf, -math.inf, math.nan):
        x, *rest = helper.draw(1)
        odd = x.clone()
        odd.view(-1)[3] = value
        more.append((x * value if math.isfinite(value) else odd, *rest))
    for n in sorted(n for n in numbers if 2 < n < _LONGEST and n == int(n)):
        given = helper.draw(0)
        size = given[0].shape[0]  # of batches, or of tokens
        longer = -(-int(n + 1) // size)
        more.append(tuple(a.repeat(longer, *(1,) * (a.dim() - 1)) if a.shape[0] == size else a for a in given))
    beyond = prove(call, expression, more, storage=(), gradients=False)
    return proof if beyond.ok else beyond


def _fixed_tail(call: Any) -> Any:
    def run(*given: Any) -> Any:
        return call(*given[:-2], *(a.detach() for a in given[-2:]))

    return run


def _mixed(call: Any, helper: Helper) -> bool:
    """Whether it also holds for first arguments in a storage dtype and the others in float32."""
    call, expression, given = _parts(call, helper.joined), _meant(helper), helper.draw(0)
    head, tail = given[:-2], [a.float() for a in given[-2:]]

    def at(function: Any) -> Any:
        return lambda *xs: function(*xs, *tail)

    try:
        return prove(at(call), at(expression), [head], limit=2.0**-20, gradients=False).ok
    except RuntimeError:
        return False


def served_helper(function: types.FunctionType, forms: Sequence[Form]) -> types.FunctionType:
    """The function with its proven calls served; the others go to the function itself."""
    code = function.__code__
    names = code.co_varnames[: code.co_argcount]
    lines = [f"def {function.__name__}({', '.join(names)}):"]
    if left := serving.left(form.helper.op for form in forms):
        lines += [f"    if {left}:", f"        return _original({', '.join(names)})"]
    known: dict[str, Any] = {"ops": ops, "torch": torch, "_original": function, **serving.LEFT_MEANING}
    known |= meaning(forms[-1].reads)  # what a table holds is read by one form after the other
    lines.append("    " + ", ".join(f"a{i}" for i in range(len(names))) + " = " + ", ".join(names))
    for i, form in enumerate(forms):
        tests = []
        for j, name in enumerate(names[form.helper.parameters :]):
            value = dict(form.fixed)[name]
            known[f"_fixed_{i}_{j}"] = value
            if not unread(code, name):
                tests.append(f"{name} {'is' if value is None or isinstance(value, bool) else '=='} _fixed_{i}_{j}")
        tests += [read.test(j) for j, read in enumerate(form.reads)]
        lines.append(f"    if {' and '.join([*tests, form.guard])}:")
        lines.append(f"        return {form.helper.expression}")
    lines.append(f"    return _original({', '.join(names)})")
    text = "\n".join(lines) + "\n"
    exec(compile(text, f"<ferryman {function.__name__}>", "exec"), known)  # noqa: S102 - our own text, their identifiers
    served: types.FunctionType = known[function.__name__]
    served.__defaults__ = function.__defaults__
    served.__doc__ = function.__doc__
    return served


def unread(code: types.CodeType, name: str) -> bool:
    """A parameter that no instruction loads."""
    import dis

    return not any(step.argval == name and "LOAD" in step.opname for step in dis.get_instructions(code)) and (
        name not in code.co_cellvars
    )
