"""What a part relies on: children, functions and methods whose calls have no effects, and the test that each call asks.

Anybody may put another child, setting or hook there at any time, and nothing tells of it: the test is written out as
code without loops, since each call of a module runs it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from ferryman.porting.model import leaf, source
from ferryman.porting.model.part import Relied
from ferryman.porting.model.trace import meant

_PLAIN = leaf.PLAIN | tuple


@dataclass(frozen=True, eq=False)
class State:
    """A child's code, its settings, and what is in it."""

    kind: Any
    forward: Any
    settings: tuple[tuple[str, Any], ...]
    inside: tuple[tuple[str, Any], ...]


def original_of(module: nn.Module) -> Any:
    """The class that a ported module had; another library's over ours is a class of its own."""
    return vars(type(module)).get("ferryman_original", type(module))


def state_of_calls(module: nn.Module, paths: Iterable[str]) -> Relied:
    """What calls of children, of functions that a module has, and of its methods come to now."""
    reached = [(path, _reached(module, path.split("."))) for path in sorted(paths)]
    return tuple((path, _state(one) if isinstance(one, nn.Module) else meant(one)) for path, one in reached)


def _reached(one: Any, names: list[str]) -> Any:
    """What a path leads to; None where it leads nowhere."""
    for name in names:
        if isinstance(one, nn.Module):
            child, own = one._modules.get(name), one.__dict__
            one = child if child is not None else own[name] if name in own else getattr(original_of(one), name, None)
        elif isinstance(one, list | tuple):
            one = one[int(name)] if name.isdigit() and int(name) < len(one) else None
        else:
            one = one.get(name) if isinstance(one, dict) else getattr(one, name, None)
    return one


def _state(child: nn.Module) -> State:
    kind = original_of(child)
    names = sorted(n for n in leaf.names_reached(kind) if leaf.is_setting(kind, n))
    settings = tuple((name, child.__dict__.get(name)) for name in names)
    inside = tuple((name, None if one is None else _state(one)) for name, one in child._modules.items())
    return State(kind, kind.forward, settings, inside)


def text_of(state: Any) -> str:
    """What a call comes to, as text that is the same in every process."""
    if not isinstance(state, State):
        return str(getattr(state, "__qualname__", type(state).__qualname__))
    settings = [(n, v if isinstance(v, leaf.PLAIN) else type(v).__qualname__) for n, v in state.settings]
    return f"{state.kind.__qualname__} {settings} {[(n, text_of(one)) for n, one in state.inside]}"


def test_of(relied: Relied) -> Callable[[Any], bool]:
    """A test of a module that these come to what they did, and no hook hears of them."""
    text = _Text()
    for path, before in relied:
        if isinstance(before, State):
            text.of_path(path.split("."), before)
        else:
            text.refuse(f"not means(reached(c0, {path.split('.')!r}), {text.known(before)})")
    exec(compile(text.whole(), "<ferryman relied>", "exec"), text.meaning)  # noqa: S102 - our own text
    test: Callable[[Any], bool] = text.meaning["still"]
    return test


@dataclass
class _Text:
    """The lines of a test. ``c0`` is the module, ``c1`` and so on what is in it, ``d1`` the attributes of ``c1``."""

    lines: list[str] = field(default_factory=list)
    meaning: dict[str, Any] = field(
        default_factory=lambda: {
            "hooked": source.hooked_globally,
            "own_forward": source.own_forward,
            "means": _means,
            "reached": _reached,
            "same": _same,
            "Module": nn.Module,
        }
    )
    states: list[State] = field(default_factory=list)
    children: int = 0

    def whole(self) -> str:
        kinds = [f"{kind}.forward is not {forward}" for kind, forward in self._kinds()]
        tests = " or ".join(["hooked()", *kinds])
        return "\n    ".join(["def still(c0):", f"if {tests}:", "    return False", *self.lines, "return True\n"])

    def _kinds(self) -> list[tuple[str, str]]:
        """The names of each class and of its forward as it was."""
        states = {v.kind: v for v in self.states}
        return [(self.known(kind), self.known(state.forward)) for kind, state in states.items()]

    def known(self, value: Any) -> str:
        """A name for a value."""
        for name, other in self.meaning.items():
            if other is value and name[0] == "v":
                return name
        name = f"v{len(self.meaning)}"
        self.meaning[name] = value
        return name

    def refuse(self, test: str) -> None:
        self.lines += [f"if {test}:", "    return False"]

    def of_path(self, names: list[str], before: State) -> None:
        owner = 0
        for name in names[:-1]:
            self._has_none_before_it(owner, name)
            owner = self._child(owner, name)
            self.refuse(f"not isinstance(c{owner}, Module)")
        self._has_none_before_it(owner, names[-1])
        self.of_child(owner, names[-1], before)

    def _has_none_before_it(self, owner: int, name: str) -> None:
        """An attribute of a child's name is what Python reads, and not the child."""
        self.refuse(f"{name!r} in c{owner}.__dict__")

    def _child(self, owner: int, name: str) -> int:
        self.children += 1
        self.lines.append(f"c{self.children} = c{owner}._modules.get({name!r})")
        return self.children

    def of_child(self, owner: int, name: str, before: State) -> None:
        self.states.append(before)
        i, kind = self._child(owner, name), self.known(before.kind)
        self.refuse(f"type(c{i}) is not {kind} and vars(type(c{i})).get('ferryman_original') is not {kind}")
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        tests = [f"c{i}.{hook}" for hook in hooks]
        tests.append(f"'forward' in d{i} and not own_forward(c{i})")
        tests.append(f"len(c{i}._modules) != {len(before.inside)}")
        tests += [self._differs(f"d{i}.get({setting!r})", value) for setting, value in before.settings]
        self.lines.append(f"d{i} = c{i}.__dict__")
        self.refuse(" or ".join(tests))
        for inner, one in before.inside:
            if one is None:
                self.refuse(f"c{i}._modules.get({inner!r}) is not None")
            else:
                self.of_child(i, inner, one)

    def _differs(self, now: str, value: Any) -> str:
        name = "None" if value is None else self.known(value)
        plain = isinstance(value, _PLAIN) and value is not None and not isinstance(value, bool)
        return f"{now} is not {name}" + (f" and not same({now}, {name})" if plain else "")


def _means(now: Any, before: Any) -> bool:
    """Whether what a module has or holds computes what it did."""
    if now is before or (type(now) is functools.partial and _is_given_the_same(now, before)):
        return True
    return _same(meant(now), before)


def _is_given_the_same(now: Any, before: Any) -> bool:
    """Whether a partial is of a function and plain values that are, each, the very one that `meant` had of it: that is
    cheaper than to compare what they say."""
    if type(before) is not tuple or before[:1] != (functools.partial,) or now.func is not before[1]:
        return False
    given = (*enumerate(now.args), *now.keywords.items())
    return len(given) == len(before) - 2 and all(
        name == known[0] and value is known[3] and isinstance(value, leaf.PLAIN)
        for (name, value), known in zip(given, before[2:], strict=True)
    )


def _same(now: Any, before: Any) -> bool:
    return now is before or (type(now) is type(before) and isinstance(now, _PLAIN) and bool(now == before))
