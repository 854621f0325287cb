"""Which branches of a module's or a function's code a proof took.

The code is run as an instrumented copy: each test of an ``if``, each operand of ``and``/``or``, reports its outcome. A
test that came out one way only is not covered: it becomes a guard, or the proof is none. A ``for`` is such a test: it
must have had items, and none. What cannot be followed (a ``while``, a state change, code without a source) is refused
before it runs.
"""

from __future__ import annotations

import types
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from ferryman.porting.model import handing, source
from ferryman.porting.model.instrument import Instrument
from ferryman.porting.model.trace import Trace, Unproven, lasting, numbers_in, trusted
from ferryman.porting.model.trees import copied

_DEPTH = 4
_CHANGING = Tensor | list | dict | set


def follow_module(
    module: nn.Module, trace: Trace, known: Collection[str] = (), undecorated: bool = False
) -> type[nn.Module]:
    """A subclass whose forward, and the methods and functions that it calls, report their tests.

    known: children whose code was proven elsewhere. undecorated: follow what the forward's decorators wrap; whoever
    asks answers for these.
    """
    kind = type(module)
    own = source.methods(kind)
    forward = own.get("forward")
    if forward is None:
        raise Unproven("its class has no forward of its own")
    namespace: dict[str, Any] = {}
    follower = Follower(trace, kind, own, module, namespace, known=known)
    namespace["forward"] = follower.function(source.innermost(forward) if undecorated else forward, "forward", 0)
    try:
        return type(kind.__name__, (kind,), dict(namespace))
    except Exception as error:  # a class may refuse heirs with whatever it likes
        raise Unproven(f"no class can be derived from its own: {type(error).__name__}: {error}") from error


def follow_function(function: Any, trace: Trace) -> Any:
    return Follower(trace, None, {}, None, {}).function(function, "forward", 0)


@dataclass
class Follower:
    trace: Trace
    kind: type | None
    methods: dict[str, Any]
    module: nn.Module | None
    namespace: dict[str, Any]
    functions: dict[int, Any] = field(default_factory=dict)
    known: Collection[str] = ()
    kinds: dict[type, Any] = field(default_factory=dict)

    def function(self, function: Any, role: str, depth: int) -> Any:
        """``role``: "forward" (its tests may become guards over its parameters), "method" or "helper"."""
        inner = source.innermost(function)
        name = getattr(inner, "__qualname__", repr(inner))
        if depth > _DEPTH:
            raise Unproven(f"{name}: calls go deeper than {_DEPTH}")
        tree = source.parsed(inner)
        if tree is None:
            raise Unproven(f"{name}: its source is not available, or is not what runs")
        if inner is not function and not all(trusted(w) or handing.passes_on(w.of) for w in _decorators(function)):
            raise Unproven(f"{name}: a decorator stands around it")
        self.kept(inner, name)
        change = Instrument(self, inner, tree, role, depth)
        instrumented = source.rebuilt(inner, change.visit(copied(tree)), change.new)
        wrapped = source.rewrapped(function, instrumented)
        if wrapped is None:
            raise Unproven(f"{name}: its decorator cannot be copied")
        return wrapped

    def kept(self, function: types.FunctionType, name: str) -> None:
        """What a function keeps must last: its defaults, and what it closes over. Their numbers are noted."""
        defaults = [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
        enclosed = [source.content(cell) for cell in function.__closure__ or ()]
        for value in (*defaults, *enclosed, *(c for code in source.codes_of(function) for c in code.co_consts)):
            self.trace.numbers |= numbers_in(value)
        changing = [v for v in defaults if not lasting(v)] + [v for v in enclosed if isinstance(v, _CHANGING)]
        if changing:
            raise Unproven(f"{name}: it keeps a {type(changing[0]).__name__}, which may change in place")

    def method(self, name: str, depth: int) -> None:
        if name not in self.namespace:
            self.namespace[name] = None  # recursion ends here
            self.namespace[name] = self.function(self.methods[name], "method", depth)

    def property(self, name: str, depth: int) -> None:
        """A property of the class is code, too."""
        declared = None if self.kind is None else source.members(self.kind).get(name)
        if isinstance(declared, property) and name not in self.namespace:
            self.namespace[name] = declared
            self.namespace[name] = property(self.function(declared.fget, "method", depth))

    def entry(self, table: Any, key: Any) -> Any:
        """What a table of a file holds now: others may put another there."""
        value, entered = table[key], table.get(key)  # a library's may make one of what was entered
        if type(key) not in (str, int, bool, type(None)) or not (lasting(value) and lasting(entered)):
            raise Unproven(f"it reads a {type(value).__name__} of a table, which may change in place")
        self.trace.note(table, key, entered)
        self.trace.numbers |= numbers_in(value)
        return value

    def taken(self, value: Any) -> Any:
        """What code takes out of a table of functions and calls, such as an activation: followed, or of PyTorch."""
        function = isinstance(value, types.FunctionType | types.BuiltinFunctionType)
        if trusted(value) if function else trusted(type(value)) and isinstance(value, nn.Module):
            return value
        plain = isinstance(value, nn.Module) and not [*value.children(), *value.parameters(), *value.buffers()]
        if not plain or "forward" in value.__dict__ or value._forward_hooks or value._forward_pre_hooks:
            raise Unproven(f"a table holds {type(value).__name__}, which no proof follows")
        if type(value) not in self.kinds:
            self.kinds[type(value)] = follow_module(value, self.trace)
        kind = self.kinds[type(value)]
        twin = kind.__new__(kind)
        twin.__dict__.update(value.__dict__)
        return twin.forward

    def helper(self, function: Any, depth: int) -> Any:
        if id(function) not in self.functions:
            self.functions[id(function)] = function
            self.functions[id(function)] = self.function(function, "helper", depth)
        return self.functions[id(function)]


def _decorators(function: Any) -> list[Any]:
    """The wrappers' own homes: what functools.wraps copied over them says nothing."""
    wrappers = []
    while hasattr(function, "__wrapped__"):
        code = getattr(function, "__code__", None)
        home = function.__globals__.get("__name__", "") if code is not None else ""
        wrappers.append(types.SimpleNamespace(__module__=home, of=function))
        function = function.__wrapped__
    return wrappers
