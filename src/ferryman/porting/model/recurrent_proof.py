"""Proofs of loops that carry a state: which value is which, where each has its tokens, and that an op gives that."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ferryman import ops
from ferryman.dispatch.proposals import proposals
from ferryman.ops.recognition import Definitions, Recurrence, compiled
from ferryman.porting.model import casting, recurrent, steady
from ferryman.porting.model.distance import distance, flat
from ferryman.porting.model.exact import Widened
from ferryman.porting.model.nodes import Node
from ferryman.porting.model.part import Part
from ferryman.porting.model.part_rules import tensors
from ferryman.porting.model.proof import Proof, prove
from ferryman.porting.model.trace import Trace, Unproven

_DEFINITIONS = Definitions()
_DRAWN = 8  # a larger number in the code may bound what no draw reaches
_NARROW = 3
_TOKENS, _AMID = 150, 70  # more than a kernel takes at once, and one in the midst of a chunk
_WIDTHS = (*range(1, 17), 24, 32, 48, 64, 80, 96, 128, 160, 192, 256)
# Float32 evaluations in two orders differ by less; one that is rounded to 16 bits between by more
_CLOSE = 2.0**-15
_LOOSER = 16.0  # times the error of the code's own float32
Sizes = Mapping[str, int]


@dataclass(frozen=True)
class Shown:
    """What a loop is proven to be: ``expression`` over ``names``, one for each value of it, where ``tests`` hold."""

    op: str
    expression: str
    names: tuple[str, ...]
    tests: tuple[str, ...]


@dataclass(frozen=True)
class _Reading:
    """Which of an op's values each of the code's is, and the axes of each of those, and of the result, in the code."""

    one: Recurrence
    expression: str
    order: tuple[int, ...]
    words: tuple[str, ...]
    result: str
    fixed: Sizes
    packed: bool  # whether the code's result lies in one piece

    def inward(self, x: Tensor, place: int) -> Tensor:
        return x.permute(_turn(self.one.axes[place], self.words[place])).contiguous()

    def given(self, seed: int) -> tuple[Tensor, ...]:
        """The code's values of a seed."""
        drawn = self.one.draw({**self.one.sizes[seed], **self.fixed}, seed)
        return tuple(self.inward(drawn[place], place) for place in self.order)

    def text(self) -> str:
        """The op over the code's values."""

        text = self._turned(self.expression)
        moved = _permute(self.one.result, self.result)
        return text + moved + (".contiguous()" if moved and self.packed else "")

    def _turned(self, text: str) -> str:
        """An expression over the op's values, over the code's."""

        def turned(match: re.Match[str]) -> str:
            place = int(match[1])
            return match[0] + _permute(self.words[place], self.one.axes[place])

        return re.sub(r"\ba(\d)\b", turned, text)

    def steady(self) -> str:
        """The numbers for which the op gives what one token after another gives; "" for any."""
        if not self.one.steady:
            return ""
        bounds = [(f"a{place}", -steady.LARGEST, steady.LARGEST) for place in range(len(self.words))]
        bounds += [(self._turned(text), least, most) for text, least, most in self.one.steady]
        return f"[{', '.join(f'({text}, {least!r}, {most!r})' for text, least, most in bounds)}]"

    def guard(self) -> Iterator[str]:
        first: dict[str, str] = {}
        for place, word in enumerate(self.words):
            yield f"a{place}.dim() == {len(word)}"
            for axis, letter in enumerate(word):
                size = f"a{place}.shape[{axis}]"
                if letter in first:
                    yield f"{size} == {first[letter]}"
                elif letter in self.fixed:
                    yield f"{size} == {self.fixed[letter]}"
                first.setdefault(letter, size)
            yield f"a{place}.numel() > 0"
            if place:
                yield f"a{place}.dtype is a0.dtype"


def _turn(before: str, after: str) -> list[int]:
    return [before.index(letter) for letter in after]


def _permute(before: str, after: str) -> str:
    return "" if before == after else f".permute({', '.join(map(str, _turn(before, after)))})"


def of_loop(
    proving: Any,
    loop: Node,
    leaves: tuple[Node, ...],
    tree: ast.FunctionDef,
    plain: ast.FunctionDef,
    own: dict[str, Node],
) -> Part | None:
    """A part that is a loop which carries a state, of ``leaves``."""
    module = None if tensors(own) else proving.module_of(tree, own, tuple(range(len(leaves))))
    if module is None:
        return None
    trace, call = proving.followed(module, own)
    along, states = [recurrent.axis_of(loop, n) for n in leaves], recurrent.fixed_sizes(loop, proving.function)
    known = shown(call, trace, along, states)
    if known is None:
        return None
    forms = [((*proving.same(module, own), *known.tests), known.expression)]
    part: Part | None = proving.part_of(known.op, plain, own, [*known.names], forms, True, module, tuple(trace.reads))
    return part


def shown(
    call: Callable[..., Any], trace: Trace, along: list[int | None], states: list[list[int | None]]
) -> Shown | None:
    """What followed code is. along: the axis of each with its tokens, where the code says it;
    states: the sizes of each state, as far as it says them."""
    for reading in _readings(call, along, states):
        proof, tests = _proof(call, trace, reading)
        if proof.ok:
            names = tuple(f"a{place}" for place in reading.order)
            return Shown(reading.one.op, reading.text(), names, (*reading.guard(), *tests))
    return None


def _readings(call: Callable[..., Any], along: list[int | None], states: list[list[int | None]]) -> Iterator[_Reading]:
    """Those that a first draw does not refute."""
    count = len(along)
    names = tuple(f"a{i}" for i in range(count))
    for one in proposals("recurrences"):
        if len(one.axes) != count or len(states) != 1:
            continue
        for fixed in _fixed(one, states[0]):
            drawn = one.draw({**one.sizes[0], **fixed}, 0)
            results = [flat(compiled(text, names, ops=_DEFINITIONS)(*drawn))[0] for text in one.expressions]
            for words, order in itertools.product(_layouts(one.axes), itertools.permutations(range(count))):
                if not _goes_along([words[place] for place in order], along):
                    continue
                actual = _result(call, _Reading(one, "", order, words, one.result, fixed, False).given(0))
                packed = actual is not None and actual.is_contiguous()
                for text, result in zip(one.expressions, results, strict=True) if actual is not None else ():
                    for word in _places(one.result):
                        if _near(actual, result.permute(_turn(one.result, word))):
                            yield _Reading(one, text, order, words, word, fixed, packed)


def _goes_along(words: list[str], along: list[int | None]) -> bool:
    """Whether the code goes along the tokens' axis of each value of which it says an axis."""
    pairs = [(word, at) for word, at in zip(words, along, strict=True) if at is not None]
    return all(-len(word) <= at < len(word) and word[at] == "L" for word, at in pairs)


def _fixed(one: Recurrence, sides: list[int | None]) -> Iterator[Sizes]:
    """Sizes that the code names, by letter."""
    known: list[Sizes] = []
    for word in one.states:
        fixed: dict[str, int] = {}
        if len(word) == len(sides):
            pairs = [(letter, n) for letter, n in zip(word, sides, strict=True) if n is not None]
            fixed = dict(pairs)
            if any(fixed[letter] != n for letter, n in pairs):
                continue
        if fixed not in known:
            known.append(fixed)
            yield fixed


def _layouts(axes: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """Where the tokens of each value may be: of those with equal axes at the same place."""
    kinds = list(dict.fromkeys(axes))
    for chosen in itertools.product(*(_places(word) for word in kinds)):
        placed = dict(zip(kinds, chosen, strict=True))
        firsts = {word.startswith("L") for word in chosen if "L" in word}
        if len(firsts) == 1:
            yield tuple(placed[word] for word in axes)


def _places(word: str) -> tuple[str, ...]:
    """A word of axes with its tokens in place, after the next axis, and first."""
    if "L" not in word:
        return (word,)
    rest = word.replace("L", "")
    return word, f"{rest[:2]}L{rest[2:]}", f"L{rest}"


def _result(call: Callable[..., Any], given: tuple[Tensor, ...]) -> Tensor | None:
    try:
        with torch.no_grad(), Widened(torch.float64):
            result = call(*given)
    except Exception:  # noqa: BLE001 - foreign code ran on what it may not take
        return None
    return result if isinstance(result, Tensor) else None


def _near(actual: Any, wanted: Tensor) -> bool:
    return actual.dtype is wanted.dtype and actual.shape == wanted.shape and torch.allclose(actual, wanted, 1e-9, 1e-9)


def _proof(call: Callable[..., Any], trace: Trace, reading: _Reading) -> tuple[Proof, tuple[str, ...]]:
    """(the proof, what a call must have beside the reading's guard)."""
    one = reading.one
    names = tuple(f"a{place}" for place in reading.order)
    candidate = compiled(reading.text(), names, ops=_DEFINITIONS)
    inputs = [reading.given(seed) for seed in range(len(one.sizes))]
    for test in trace.tests:  # what was refused covers nothing
        test.seen.clear()
    for site in trace.sites:
        site.numbers.clear()
    proof = prove(call, candidate, inputs[: one.finite], storage=())
    if not proof.ok:
        return proof, ()
    beyond = prove(call, candidate, inputs[one.finite :], storage=(), gradients=False)
    if not beyond.ok:
        return beyond, ()
    if (reason := _apart(call, candidate, inputs[:_NARROW])) is not None:
        return Proof(False, reason), ()
    narrow = prove(call, candidate, inputs[:_NARROW], gradients=False)
    tests = [] if narrow.ok else ["a0.dtype is torch.float32"]
    try:
        guards = trace.guards(entered=True)
    except Unproven as error:
        return Proof(False, str(error)), ()
    if guards:
        return Proof(False, "it asks what it is given"), ()
    known = {*reading.fixed.values()}
    if any(abs(n) > _DRAWN and n not in known for n in trace.numbers | trace.computed()):
        return Proof(False, "it names a number that no input reaches"), ()
    if trace.sized(plain=False):
        if not _of_width(call, candidate, trace, reading):
            return Proof(False, "it computes with a size"), ()
        word, place = reading.words[0], one.axes[0][-1]
        tests.append(f"a0.shape[{word.index(place)}] in {_WIDTHS}")
    served = compiled(reading.text(), names, ops=ops)
    if (reason := _reaching(call, served, reading)) is not None:
        return Proof(False, reason), ()
    tests += casting.tests(one.op, call, served, inputs[0], "a0")
    bounds = reading.steady()
    tests += [f"ferryman_readable({', '.join(names)})", f"ferryman_within({bounds})"] if bounds else []
    return proof, tuple(tests)


def _of_width(call: Callable[..., Any], candidate: Callable[..., Any], trace: Trace, reading: _Reading) -> bool:
    """Whether what code computes of sizes follows from the first value's width alone, and agrees for each of those that
    are tried."""
    one, letter = reading.one, reading.one.axes[0][-1]

    def holds(sizes: Sequence[Sizes]) -> bool:
        inputs = [replace(reading, fixed={**reading.fixed, **some}).given(0) for some in sizes]
        return prove(call, candidate, inputs, storage=(), gradients=False).ok

    for site in trace.sites:
        site.numbers.clear()
    others = [{**sizes, letter: one.sizes[0][letter]} for sizes in one.sizes]
    widths = [{letter: width} for width in _WIDTHS]
    return letter not in reading.fixed and holds(others) and not trace.sized(plain=False) and holds(widths)


@torch.no_grad()
def _reaching(call: Callable[..., Any], served: Callable[..., Any], reading: _Reading) -> str | None:
    """Why what is not finite in one token reaches other results than in the code, and what a token's size does, and all
    tokens' sizes; None where it is alike. Definitions go token by token, which what serves a call may not do. Of values
    that a call refuses, nothing is asked."""
    one, bounds = reading.one, reading.steady()
    drawn = one.draw({**one.sizes[0], **reading.fixed, "L": _TOKENS}, 0)
    asked = None if not bounds else compiled(bounds, tuple(f"a{place}" for place in reading.order), ops=_DEFINITIONS)
    for place, axes in enumerate(one.axes):
        for what, changed in _hostile(drawn[place], axes, bool(bounds)):
            given = [changed if i == place else x for i, x in enumerate(drawn)]
            exact = [reading.inward(given[i], i) for i in reading.order]
            low = [x.float() for x in exact]
            if asked is not None and not steady.within(asked(*low)):
                continue
            try:
                wanted, own, actual = (flat(f(*x))[0] for f, x in ((call, exact), (call, low), (served, low)))
            except Exception as error:  # noqa: BLE001 - foreign code ran: what it raises is the reason
                return f"{type(error).__name__}: {error}"
            if not torch.equal(own.isfinite(), actual.isfinite()):
                return f"{what} reaches other results"
            own_error, served_error, size = (_length(x) for x in (own - wanted, actual - wanted, wanted))
            if served_error > _LOOSER * (own_error + 2.0**-24 * size):
                return f"{what} leaves fewer digits"
    return None


def _hostile(x: Tensor, axes: str, bounded: bool) -> Iterator[tuple[str, Tensor]]:
    """A value with one token that is not finite, or huge; where a call asks for bounds, tokens of all sizes, too."""
    sizes = (1e9, 1e6, 1e4, 300.0, 30.0, 20.0, 10.0, 3.0, 2.0, 1.0, 0.3) if bounded else (1e9,)
    for value in (torch.nan, torch.inf, -torch.inf, *sizes, *(-n for n in sizes)) if "L" in axes else ():
        changed = x.clone()
        changed[tuple(_AMID if letter == "L" else 0 for letter in axes)] = value
        yield f"a token of {value}", changed
    for times in (1e9, 1e4, 100.0, *(1.25**n for n in range(12, -13, -1)), 1e-2, 1e-4, 0.0) if bounded else ():
        yield f"tokens times {times}", x * times


def _length(x: Tensor) -> float:
    return float(x.nan_to_num(0.0, 0.0, 0.0).square().sum().sqrt())


@torch.no_grad()
def _apart(call: Callable[..., Any], candidate: Callable[..., Any], inputs: list[tuple[Tensor, ...]]) -> str | None:
    """Why float32 shows another computation than float64; None where it does not."""
    for given in inputs:
        low = [x.float() for x in given]
        try:
            distance("float32: result", flat(candidate(*low)), flat(call(*low)), _CLOSE)
        except Exception as error:  # noqa: BLE001 - foreign code ran: what it raises is the reason
            return f"{type(error).__name__}: {error}"
    return None
