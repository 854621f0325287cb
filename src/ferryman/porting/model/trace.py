"""What a proof saw of the code that it ran: its tests with their outcomes, and what it trusts."""

from __future__ import annotations

import contextlib
import copy
import dis
import enum
import functools
import math
import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

_TRUSTED = ("torch", "math", "builtins", "operator", "typing", "_operator")
# Functions of a library without arguments that say in which mode PyTorch runs, such as export: a proof holds for the
# answer that it got, and a call asks again.
modes: set[Any] = set()
_PLAIN = bool | int | float | str | None | torch.dtype


class Unproven(Exception):
    """Code that a proof cannot follow; the text says what and where."""


@dataclass
class Test:
    """A condition and how it came out. ``guard``: its source, where it may stand before the whole call instead.

    Of an equality with an attribute of the module, ``against``: which one; ``sides``: by run, the two numbers each time
    it was asked.
    """

    text: str
    line: int
    guard: str | None
    seen: set[bool] = field(default_factory=set)
    loop: bool = False
    against: str = ""
    sides: dict[int, list[tuple[float, float]]] = field(default_factory=dict)


@dataclass
class Site:
    """Where code computes a number: which it was, up to two. ``plain``: of sizes it makes another size."""

    plain: bool
    numbers: set[float] = field(default_factory=set)


@dataclass(frozen=True)
class Read:
    """A name of a file that code reads, and its value then: others may put another there. ``home``: the file's module,
    or where it has none, the dictionary of its names; or the class whose function it is; or a table, of a key."""

    home: Any
    name: Any
    value: Any = field(hash=False)

    def test(self, index: int) -> str:
        """Whether it still has that value; `meaning` says what the names in it are."""
        home = f"ferryman_home_{index}"
        now = f"{home}.get({self.name!r})" if isinstance(self.home, Mapping) else f"{home}.{self.name}"
        if isinstance(self.value, list | dict | set) and lasts(self.value):
            return f"ferryman_same({now}, {self.value!r})"
        same = "==" if isinstance(self.value, int | float | str | tuple) else "is"
        return f"{now} {same} ferryman_read_{index}"

    def current(self) -> bool:
        now = self.home.get(self.name) if isinstance(self.home, Mapping) else getattr(self.home, self.name, None)
        return now is self.value or (type(now) is type(self.value) and lasts(now) and bool(now == self.value))

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self.home, type):
            return Read, (self.home, self.name, self.value)
        named = self.home.__name__ if isinstance(self.home, types.ModuleType) else None
        return _read_again, (named, self.name, self.value)


def lasts(value: Any) -> bool:
    """Whether a list, dictionary or set is what its text says: numbers, words, dtypes."""
    if isinstance(value, list | set | dict):
        parts = [*value.keys(), *value.values()] if isinstance(value, dict) else value
        return type(value) in (list, set, dict) and bool(value) and all(map(lasts, parts))
    return type(value) in (bool, int, str, type(None), torch.dtype) or (type(value) is float and math.isfinite(value))


def lasting(value: Any) -> bool:
    """Whether a value cannot change in place; a module's own settings are its own affair."""
    if isinstance(value, tuple):
        return all(map(lasting, value))
    if isinstance(value, functools.partial):
        return lasting(value.func) and all(map(lasting, (*value.args, *value.keywords.values())))
    if isinstance(value, types.MethodType):
        return unbound(value) is not None
    functions = type | types.FunctionType | types.BuiltinFunctionType | staticmethod | classmethod | property
    return isinstance(value, _PLAIN | complex | bytes | torch.device | enum.Enum | nn.Module | functions)


def unbound(value: Any) -> types.FunctionType | None:
    """The function of a method that does not read what it is bound to; None for any other value."""
    function = getattr(value, "__func__", None) if isinstance(value, types.MethodType) else None
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        return None
    code = function.__code__
    name = code.co_varnames[0] if code.co_argcount else ""
    read = any(step.argval == name and "LOAD" in step.opname for step in dis.get_instructions(code))
    return None if not name or read or name in code.co_cellvars else function


def bound(value: Any) -> bool:
    """Whether a module may hold it for a function: a partial of a function of PyTorch, or of one that lasts with what
    is given; a method as `unbound` has it."""
    if isinstance(value, functools.partial):
        return trusted(value.func) or (isinstance(value.func, types.FunctionType) and lasting(value))
    return unbound(value) is not None


def meant(value: Any) -> Any:
    """What a function that a module holds computes by, so that two that are equal in it compute the same."""
    if isinstance(value, types.MethodType):
        return types.MethodType, unbound(value)
    if isinstance(value, functools.partial) and lasting(value):
        given = (*enumerate(value.args), *value.keywords.items())
        return functools.partial, value.func, *((n, type(v), str(v), v) for n, v in given)
    return value


def _read_again(named: str | None, name: str, value: Any) -> Read:
    return Read({} if named is None else sys.modules.get(named, {}), name, value)


def meaning(reads: Sequence[Read]) -> dict[str, Any]:
    """What the names in the tests of some names mean."""
    homes = {f"ferryman_home_{i}": read.home for i, read in enumerate(reads)}
    return homes | {f"ferryman_read_{i}": read.value for i, read in enumerate(reads)}


@dataclass
class Trace:
    """All conditions of the code that was followed. ``run``: whoever runs it counts the runs that he tells apart.
    ``numbers``: in that code, and that it reads. ``reads``: names of files that it reads, but for modules. ``sites``:
    where it computes numbers; ``settled``: those of which no more is noted."""

    tests: list[Test] = field(default_factory=list)
    run: int = 0
    numbers: set[float] = field(default_factory=set)
    reads: list[Read] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    settled: set[int] = field(default_factory=set)

    def site(self, plain: bool) -> int:
        self.sites.append(Site(plain))
        return len(self.sites) - 1

    def number(self, index: int, value: Any) -> Any:
        """What code computes there, noted if it is a number."""
        numbers = self.sites[index].numbers
        if type(value) in (int, float) and len(numbers) < 2 and index not in self.settled:
            numbers.add(value)
        return value

    def changed(self, index: int, operator: Any, left: Any, right: Any) -> Any:
        """The right side of ``left *= right``, whose result is noted."""
        if type(left) in (int, float) and type(right) in (int, float):
            self.number(index, operator(left, right))
        return right

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Runs with other sizes of what is fixed say nothing of numbers that are known."""
        before = self.settled
        self.settled = before | {i for i, site in enumerate(self.sites) if site.numbers}
        yield
        self.settled = before

    def computed(self) -> set[float]:
        """Numbers that were the same in every run."""
        return {n for site in self.sites if len(site.numbers) == 1 for n in numbers_in(tuple(site.numbers))}

    def sized(self, plain: bool) -> bool:
        """Whether code computes numbers of sizes, otherwise than by adding and multiplying; or (plain) at all."""
        return any(len(s.numbers) > 1 and (plain or not s.plain or float in map(type, s.numbers)) for s in self.sites)

    def read(self, names: dict[str, Any], name: str, table: bool = False) -> None:
        """Note that code reads a name of a file. Raises Unproven for what may change in place. table: one whose entries
        are asked for alone."""
        value = names[name]
        known = table or lasting(value) or lasts(value) or (callable(value) and trusted(value))
        if isinstance(value, functools.partial) or not known:
            raise Unproven(f"it reads {name}, a {type(value).__name__} of its file, which may change in place")
        home = sys.modules.get(names.get("__name__", ""))
        self.note(home if home is not None and vars(home) is names else names, name, value)
        self.numbers |= numbers_in(value)

    def note(self, home: Any, name: Any, value: Any) -> None:
        if all(name != known.name or home is not known.home for known in self.reads):
            kept = copy.deepcopy(value) if isinstance(value, list | dict | set) and lasts(value) else value
            self.reads.append(Read(home, name, kept))

    def maybe(self, index: int, value: Any) -> Any:
        """A comparison outside of tests: of tensors it is none."""
        return self.seen(index, value) if isinstance(value, bool) else value

    def seen(self, index: int, value: Any) -> Any:
        self.tests[index].seen.add(bool(value))
        return value

    def same(self, index: int, left: Any, right: Any) -> Any:
        self.tests[index].sides.setdefault(self.run, []).append((_number(left), _number(right)))
        return self.seen(index, left == right)

    def each(self, index: int, items: Any) -> Iterator[Any]:
        taken = False
        for item in items:
            taken = self.seen(index, True)
            yield item
        if not taken:
            self.seen(index, False)

    def guards(
        self, entered: bool = False, never: Callable[[Test], bool] = lambda test: False
    ) -> list[tuple[str, bool]]:
        """(condition, the outcome that was proven) of what came out one way only. Raises Unproven without a guard.

        entered: whoever asks has a guard of its own, by which every loop that always had items has some. never: whether
        a test that was never true cannot be.
        """
        guards = []
        for test in self.tests:
            if len(test.seen) == 1:
                if entered and test.loop and True in test.seen:
                    continue
                if True not in test.seen and never(test):
                    continue
                if test.guard is None:
                    raise Unproven(f"no input took both sides of `{test.text}` (line {test.line})")
                guards.append((test.guard, next(iter(test.seen))))
        return list(dict.fromkeys(guards))


def numbers_in(value: Any) -> set[float]:
    """Finite numbers, alone or in a list or a table."""
    if isinstance(value, dict):
        value = [*value.keys(), *value.values()]
    parts = value if isinstance(value, tuple | list | set | frozenset) else (value,)
    numbers = [p for p in parts if isinstance(p, int | float) and not isinstance(p, bool)]
    return {float(n) for n in numbers if abs(n) < 1e300 and math.isfinite(n)}


def _number(value: Any) -> float:
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
    return number if isinstance(number, int | float) else math.nan


def trusted(value: Any) -> bool:
    """A function or class of PyTorch or of Python, whose meaning is known."""
    home = getattr(value, "__module__", None) or ""
    return home.split(".")[0] in _TRUSTED
