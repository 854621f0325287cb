"""The code that a module with a proven role runs in its forward's place, and what ends the role.

A role was proven with the module's tensors and attributes as they were. The code reads each tensor once and asks
whether it is still plain, and whether one that was absent still is; whether its class's forward, and what that comes
to, are still the same; and whether lists and dictionaries have the contents that they had. What the op refuses goes to
the module's own code. An attribute that is set to another value ends the role: the module gets its own class back.
"""

from __future__ import annotations

import inspect
import re
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.overrides import TorchFunctionMode

from ferryman import ops
from ferryman.dispatch import own_limit, registry, state
from ferryman.errors import ArgumentError
from ferryman.porting.model import laid, source
from ferryman.porting.model.leaf import is_setting
from ferryman.porting.model.repeated import ATTRIBUTE, Served
from ferryman.porting.model.scalars import holds
from ferryman.porting.model.source import same
from ferryman.porting.model.trace import Read, meaning

# What an op takes as it is. A subclass that arrives after porting (a quantised or a distributed tensor) is its module's
# own affair.
PLAIN = frozenset((Tensor, nn.Parameter, FakeTensor, FunctionalTensor))
_MISSING = object()
# what the names in `left` mean
LEFT_MEANING = {"ferryman_compiling": torch.compiler.is_dynamo_compiling, "ferryman_state": state}


# Ids for each row of a table, below which its gradient is left to Inductor. Between a token table, which has less than
# one, and T5's table of positions, which has thousands and whose gradient Inductor's atomic sums make slow; not timed.
FEW_IDS = 16


def left(ops_served: Iterable[str], kind: Any = None, code: Iterable[str] = (), few: str = "") -> str:
    """When a call is left to the module's own code: under torch.compile, without a request, where what it would be
    given in place of each op is the op's definition. Inductor fuses the module's own code as well, and Dynamo has less
    to guard in each call (100 to 300 us of a small model's). Empty: never. code: attributes of the class ``kind`` that
    Dynamo then guards, as it does not by itself. few: where an op's gradient stays whole (of a table), a test of calls
    so small that the module's own gradient is as quick."""
    known = [registry.primitive(op) for op in ops_served]
    if not all(op.lower for op in known):
        return ""
    tests, _ = source.still(kind, [name for name in code if name != "forward"])
    if any(op.gradient.whole for op in known):
        tests.append(f"(not torch.is_grad_enabled() or {few})" if few else "not torch.is_grad_enabled()")
    return " and ".join(["ferryman_compiling() and not ferryman_state.requests", *tests])


def like(x: Any, other: Tensor) -> bool:
    """Whether what is made as x is made as another tensor would be: a plain one of its dtype, on its device."""
    return type(x) in PLAIN and x.dtype is other.dtype and x.device == other.device and x.layout is other.layout


def is_one_call(run: Callable[..., Any], *given: Tensor) -> bool:
    """Whether code calls one function of PyTorch's, beside reading what a tensor is. It runs in float32."""
    seen: list[str] = []

    class Seeing(TorchFunctionMode):
        def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(getattr(function, "__name__", ""))
            return function(*args, **(kwargs or {}))

    plain = [t.float() if t.is_floating_point() else t for t in given]
    try:
        with torch.no_grad(), Seeing():
            run(*plain)
    except Exception:  # noqa: BLE001 - foreign code that has another dtype: it is none that is known to be one call
        return False
    return len([name for name in seen if name != "__get__"]) == 1


def little(x: Tensor, table: Tensor | None, *tensors: Tensor | None) -> bool:
    """Whether a gradient is wanted of so little that a call or two of PyTorch's take the host less time than a Function
    of ours, by more than a kernel saves (the profile's thresholds.autograd.bytes). table: of which x names rows."""
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():  # compiled, no call costs the host anything
        return False
    limit = own_limit.bytes_of(x.device)
    if limit is None:
        return False
    if table is None:
        wanted, read = x.requires_grad, x.numel() * x.element_size()
    else:
        wanted = table.requires_grad
        read = x.numel() * (x.element_size() + 2 * table.shape[-1] * table.element_size())
    for t in tensors:
        if t is not None and t is not table:
            wanted, read = wanted or t.requires_grad, read + t.numel() * t.element_size()
    return wanted and read <= limit


def served(
    current: Sequence[str],
    tests: Sequence[str],
    guards: Sequence[tuple[str, bool]],
    tensors: Sequence[str],
    absent: Sequence[str],
    inputs: Sequence[str],
    expression: str,
) -> Served:
    """An expression, with what must hold for the role to hold, where each tensor of ``self`` is read once.

    current: tests that the class's code is the one that was proven. A tensor that is no parameter is a buffer, or
    computed, as by `torch.nn.utils.weight_norm`'s hook: an attribute.
    """
    own = {name: f"ferryman_own_{name}" for name in tensors}
    before = ["ferryman_held = self._parameters"] if tensors or absent else []
    for name, local in own.items():
        before += [f"{local} = ferryman_held.get({name!r})"]
        before += [f"if {local} is None: {local} = getattr(self, {name!r}, None)"]
    asked = [f"type({name}) in ferryman_plain" for name in (*inputs, *own.values())]
    asked += [f"ferryman_held.get({name!r}) is None and self._buffers.get({name!r}) is None" for name in absent]
    asked += [*tests, *(f"bool({text}) is {outcome}" for text, outcome in guards)]

    def read(text: str) -> str:
        return re.sub(r"\bself\.(\w+)\b", lambda m: own.get(m[1], m[0]), text)

    return Served(tuple(before), tuple(current), tuple(map(read, asked)), read(expression))


def known(
    kind: Any, guards: Sequence[tuple[str, bool]], code: Sequence[str], reads: Sequence[Read] = ()
) -> dict[str, Any]:
    """What the code's names mean. A parameter that a guard reads, and a served call does not give, has its default."""
    names = source.names_read(kind.forward, [text for text, _ in guards])
    parameters = inspect.signature(kind.forward).parameters.values()
    names |= {p.name: p.default for p in parameters if p.default is not p.empty}
    _, current = source.still(kind, code)
    ours = {
        "ops": ops,
        "torch": torch,
        "ferryman_plain": PLAIN,
        "ferryman_refused": ArgumentError,
        "ferryman_same": same,
        "ferryman_little": little,
        "ferryman_holds": holds,
        laid.NAME: laid.laid,
        laid.APART: laid.apart,
    }
    return names | ours | current | meaning(reads)


def forward(
    body: Served,
    parameters: Sequence[str],
    inputs: Sequence[str],
    meaning: Mapping[str, Any],
    kind: Any,
    otherwise: Any,
    left: str = "",
) -> types.FunctionType:
    """A forward that gives ``body`` where its tests hold and the op takes it; ``otherwise``, or else the one that the
    class has then, serves the other calls, and those of which ``left`` is true (`left`)."""
    names, ours = ", ".join(parameters), ", ".join(inputs)
    other = f"{'ferryman_kind.forward' if otherwise is None else 'ferryman_served'}(self, {names}, *rest, **more)"
    lines, names_in_it = body.lines(other)
    lines = [*([] if names == ours else [f"{ours} = {names}"]), *lines]
    own = next(iter(inspect.signature(kind.forward).parameters), "self")  # what guards call the module
    if own != "self" and own.isidentifier():
        lines.insert(0, f"{own} = self")
    signature = inspect.signature(kind.forward if otherwise is None else otherwise)
    may = signature.parameters  # be left out
    declared = ", ".join(
        n if n not in may or may[n].default is inspect.Parameter.empty else f"{n}=None" for n in parameters
    )
    text = f"def forward(self, {declared}, *rest, **more):\n"
    text += f"    if not rest and not more{left and f' and not ({left})'}:\n"
    text += "".join(f"        {line}\n" for line in lines)
    text += f"    return {other}\n"
    namespace = {**meaning, **names_in_it, "ferryman_served": otherwise, **LEFT_MEANING}
    exec(compile(text, "<ferryman forward>", "exec"), namespace)  # noqa: S102 - our own text, their identifiers
    function: types.FunctionType = namespace["forward"]
    function.__signature__ = signature  # type: ignore[attr-defined]  # libraries read it
    return function


def attempt(expression: str) -> list[str]:
    """Lines that return an expression, unless its op refuses a shape or a dtype that came later."""
    return ["    try:", f"        return {expression}", "    except ferryman_refused:", "        pass"]


def ending(
    original: Any, settings: frozenset[str] | None, read: frozenset[str], back: Callable[[type], type]
) -> dict[str, Callable[..., None]]:
    """A ported class's __setattr__ and __delattr__. Another value of an attribute in ``settings`` ends the role (None:
    of any that the module has), and a value of another type of one in ``read``. back: a module's class without ours."""

    def asked(self: nn.Module, name: str) -> bool:
        if settings is not None:
            return name in settings
        return is_setting(original, name) and (name in self.__dict__ or hasattr(type(self), name))

    def __setattr__(self: nn.Module, name: str, value: Any) -> None:  # noqa: N807
        before = self.__dict__.get(name, _MISSING)
        if (asked(self, name) and not _alike(before, value)) or (name in read and type(before) is not type(value)):
            self.__class__ = back(type(self))
            self.__dict__.pop(ATTRIBUTE, None)
        original.__setattr__(self, name, value)

    def __delattr__(self: nn.Module, name: str) -> None:  # noqa: N807
        if asked(self, name) or name in read:
            self.__class__ = back(type(self))
            self.__dict__.pop(ATTRIBUTE, None)
        original.__delattr__(self, name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


def _alike(before: Any, value: Any) -> bool:
    plain = isinstance(value, bool | int | float | str | tuple | torch.dtype)
    return before is value or (plain and type(before) is type(value) and bool(before == value))
