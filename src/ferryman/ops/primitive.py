"""How an op is defined: its meaning, and everything that follows from the meaning rather than from an implementation.

The decorated body *is* the meaning. On float64 inputs it is the oracle; on the storage dtype it accumulates in float32
(`wide`) and rounds once, and is the last resort on any device. A primitive learns how to run from a resolver that
`ferryman.dispatch` installs; until then, calling it runs the definition.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import re
import typing
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from ferryman.errors import ArgumentError

P = ParamSpec("P")
R = TypeVar("R")
IDENTIFIER = re.compile(r"[a-z][a-z0-9_]{0,63}")
STORAGE_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
_PLAIN: dict[Any, str] = {float: "float", int: "int", bool: "bool", str: "str", torch.dtype: "ScalarType"}
_LISTS: dict[Any, str] = {Tensor: "Tensor[]", int: "int[]", float: "float[]"}
# annotation of a parameter -> its type in the schema
_SCHEMA_TYPES: dict[Any, str] = {
    Tensor: "Tensor",
    Tensor | None: "Tensor?",
    **_PLAIN,
    **{kind | None: f"{name}?" for kind, name in _PLAIN.items()},
    **{collection[kind]: name for kind, name in _LISTS.items() for collection in (list, Sequence)},
    **{
        collection[kind] | None: f"{name}?"
        for kind, name in _LISTS.items()
        if kind is not Tensor
        for collection in (list, Sequence)
    },
}


@dataclass(frozen=True)
class Cost:
    """The least work the op can be done with: floating-point operations, and bytes moved once each."""

    flops: float
    bytes: float


@dataclass(frozen=True)
class Rounding:
    """An intermediate that an implementation is permitted to round to the storage dtype."""

    name: str
    meaning: str


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a case. ``dtype`` "storage" is the dtype under test; ``layout`` is how it lies in memory.

    ``dtype`` may be that of any PyTorch tensor: "float8_e4m3fn", "int32", "uint8" (two values of 4 bits), "bool".
    layouts: "contiguous"; "rows" (rows padded apart); "last" (strided last dimension); "heads" ((B, S, H, D) storage
    seen as (B, H, S, D)); "offset" (storage offset of one element, which breaks 16-byte alignment); "strided:7,0+3"
    (any strides and offset, in elements; elements may share memory).
    ``fill`` None takes the fill of the run; integers draw from [low, high). A fill of the op's own may read the other
    arguments of the case, so that a page table fits its cache.
    """

    shape: tuple[int, ...]
    dtype: str = "storage"
    fill: str | None = None
    layout: str = "contiguous"
    low: int = 0
    high: int = 1


@dataclass(frozen=True)
class Case:
    """One set of arguments. ``tier``: "small" is quick everywhere (interpreters too), "standard" for real devices.

    ``exact``: every partial result is representable whatever the order, so the result must be the oracle's, rounded,
    bit for bit (gate G1). ``inexact``: for what that does not hold: outputs (of the op or its backward), storage
    dtypes, declared roundings and accumulation classes. ``cotangent``: the fill of the gradients that a backward gets.
    ``saved``: the layout of a saved output that stands in an argument's place, for a backward. ``gradients``: that of
    the gradients that a backward gets; None: the first tensor's for those of as many dimensions, else contiguous.
    """

    name: str
    args: Mapping[str, Any]
    tier: Literal["small", "standard"] = "small"
    exact: bool = False
    inexact: tuple[str, ...] = ()
    cotangent: str | None = None
    saved: str = "contiguous"
    gradients: str | None = None


@dataclass(frozen=True)
class Gradient:
    """How an op differentiates.

    backward: the primitive that computes gradients; its parameters that are not ``grad...`` say what forward saves.
    None: the op has no gradient. grads: the forward arguments that its results belong to (a tuple shares one result).
    nondifferentiable: outputs that have no gradient. whole: where a gradient is wanted torch.compile keeps the op as it
    is, and traces its definition elsewhere only.
    """

    backward: str | None = None
    grads: tuple[str | tuple[str, ...], ...] = ()
    nondifferentiable: tuple[str, ...] = ()
    whole: bool = False

    @property
    def owners(self) -> tuple[tuple[str, ...], ...]:
        """For each result of the backward, the forward arguments whose gradient it is."""
        return tuple((g,) if isinstance(g, str) else g for g in self.grads)


_NO_GRADIENT = Gradient()


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What evidence about an implementation is held against: how far it may be off, and what may not matter.

    bound: the error terms of a result (see docs/parity.md). accumulate: the class of accumulation of the definition.
    roundings: the rounding points that are permitted. rounded: gives the definition with a set of them applied, where
    the body does not show them. reduction: how many terms are summed for one element of a result. batch: inputs and
    outputs along whose leading axis samples are independent, each with the dimensions of one sample (an input that has
    no more, or a leading axis of 1, is shared); or why there are none. unseen: replaces in place what some results may
    not depend on, and returns a mask of those for each output; None where everything matters.
    """

    bound: Callable[..., Any]
    accumulate: str = "fp32"
    roundings: tuple[Rounding, ...] = ()
    rounded: Callable[[frozenset[str]], Callable[..., Any]] | None = None
    reduction: Callable[..., int] | None = None
    batch: Mapping[str, int] | str = "the op declares no batch axis"
    unseen: Callable[..., Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Meaning:
    """What an op means. ``parameters`` are in schema order, ``types`` what they are there; `primitive` has the rest."""

    name: str
    body: Callable[..., Any]
    parameters: tuple[inspect.Parameter, ...]
    types: Mapping[str, str]
    outputs: tuple[str, ...]
    check: Callable[..., None]
    meta: Callable[..., Any]
    cost: Callable[..., Cost]
    lower: Callable[..., Any] | None
    autocast: tuple[Literal["fp32", "low"], str] | None
    mutates: Mapping[str, str]
    dtypes: Mapping[str, tuple[torch.dtype, ...]]
    added: Mapping[str, Any]
    elementwise: tuple[str, ...]

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(p.name for p in self.parameters)

    @functools.cached_property
    def tensors(self) -> tuple[str, ...]:
        """Parameters that are one tensor, or None."""
        return tuple(n for n in self.names if self.types[n] in ("Tensor", "Tensor?"))

    @functools.cached_property
    def lists(self) -> tuple[str, ...]:
        """Parameters that are lists, of tensors or numbers."""
        return tuple(n for n in self.names if "[]" in self.types[n])

    @property
    def schema(self) -> str:
        """The torch.library schema, without a namespace. Only what was added later has a default there."""
        kinds = dict(self.types)
        for letter, name in zip("abcdefgh", self.mutates, strict=False):
            kinds[name] = kinds[name].replace("Tensor", f"Tensor({letter}!)")
        defaults = {name: f"={value}" for name, value in self.added.items()}
        args = [f"{kinds[n]} {n}{defaults.get(n, '')}" for n in self.names]
        fresh = len(self.outputs) - len(self.mutates)
        returns = "Tensor" if fresh == 1 else f"({', '.join(['Tensor'] * fresh)})"
        return f"{self.name}({', '.join(args)}) -> {returns}"

    def left_out(self, name: str, value: Any) -> bool:
        """Whether an argument that came later is at its default: then the call is one of before."""
        if name not in self.added:
            return False
        default = self.added[name]
        return value is default or (type(default) is float and isinstance(value, float | int) and value == default)

    @functools.cached_property
    def overwritten(self) -> tuple[tuple[int, int], ...]:
        """(index of an argument, index of the output that is written over it)."""
        return tuple((self.names.index(a), self.outputs.index(o)) for a, o in self.mutates.items())

    def fresh(self, outputs: Any) -> Any:
        """Of all outputs, what the schema returns: those that are written over no argument; None without any."""
        if not self.mutates:
            return outputs
        own = {o for _, o in self.overwritten}
        whole = outputs if isinstance(outputs, tuple) else (outputs,)
        returned = tuple(value for i, value in enumerate(whole) if i not in own)
        return returned if len(returned) > 1 else returned[0] if returned else None

    def whole(self, args: Sequence[Any], returned: Any) -> tuple[Any, ...]:
        """All outputs of a mutating op, from its arguments and what the schema returned."""
        fresh = iter(returned if isinstance(returned, tuple) else (returned,))
        into = {o: args[a] for a, o in self.overwritten}
        return tuple(into[i] if i in into else next(fresh) for i in range(len(self.outputs)))

    def bind(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """All arguments in schema order, defaults filled in; TypeError as Python words it."""
        bound = inspect.Signature(list(self.parameters)).bind(*args, **kwargs)
        bound.apply_defaults()
        return tuple(bound.arguments[n] for n in self.names)


@dataclass(frozen=True, kw_only=True)
class Primitive(Meaning):
    """An op as a record: what it means, how it differentiates, and what evidence about it is held against."""

    gradient: Gradient
    limits: Limits
    namespace: dict[str, Any] = field(repr=False, compare=False)

    def saved(self, backward: Primitive) -> tuple[str, ...]:
        """What forward saves: the backward's parameters that are not gradients of outputs."""
        return tuple(n for n in backward.names if n not in self.gradient_names())

    def gradient_names(self) -> dict[str, int]:
        """Backward parameter name -> index of the output whose gradient it is."""
        own = [(i, n) for i, n in enumerate(self.outputs) if n not in self.gradient.nondifferentiable]
        return {"grad": own[0][0]} if len(own) == 1 else {f"grad_{name}": i for i, name in own}


def wide(x: Tensor) -> Tensor:
    """The accumulate dtype's view of a tensor: floats of 16 and 8 bits become float32; what else there is stays."""
    return x.float() if x.is_floating_point() and x.dtype.itemsize < 4 else x


def primitive(
    *,
    outputs: tuple[str, ...],
    check: Callable[..., None],
    meta: Callable[..., Any],
    cost: Callable[..., Cost],
    limits: Limits,
    gradient: Gradient = _NO_GRADIENT,
    lower: Callable[..., Any] | Literal["definition"] | None = None,
    autocast: tuple[Literal["fp32", "low"], str] | None = None,
    mutates: Mapping[str, str] = MappingProxyType({}),
    dtypes: Mapping[str, tuple[torch.dtype, ...]] = MappingProxyType({}),
    added: tuple[str, ...] = (),
    elementwise: tuple[str, ...] = (),
    name: str | None = None,
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Turn a definition into an op.

    outputs: names of what the schema returns. check: raises ArgumentError, takes the op's arguments. meta: empty
    outputs of the right shape, dtype and strides (also the fake implementation). lower: what torch.compile traces
    ("definition", another function, or None for an opaque call). autocast: the dtype that autocast gives the op, on
    devices where PyTorch's list has the ATen op that is named beside it. mutates: arguments that are written over ->
    the output that is written there. The definition computes values and writes over nothing; a kernel returns the
    argument itself in the output's place, and the schema, which may not return an argument, leaves that output out.
    dtypes: of the tensors that are not of the float dtype under test, those that they may have, the usual one first.
    added: the last parameters that came after the op did, whose defaults, None, a bool or a float, mean what it meant
    before. They stand in the schema with them, so that a saved program holds; a lockfile's region says nothing of a
    default. elementwise: of an op with one output that is element-wise, the tensors that have its shape. The output's
    dimensions are in memory in the order of the first one's, as PyTorch's are; ``meta`` and kernels give a contiguous
    one (`dispatch.order`).
    Parameters are annotated as Tensor, float, int, bool, str or torch.dtype, each ``| None`` where it is optional, or
    as list[Tensor], list[int] or list[float]. Results have shapes that follow from shapes and scalars. An op with a
    list of tensors names no backward.
    """

    def decorate(body: Callable[P, R]) -> Callable[P, R]:
        op = name or body.__name__
        if not IDENTIFIER.fullmatch(op) or keyword.iskeyword(op):
            raise ArgumentError("primitive", "name", repr(op), "a lower-case identifier")
        hints = typing.get_type_hints(body)
        signature = inspect.signature(body)
        parameters = tuple(signature.parameters.values())
        types = {p.name: _schema_type(op, p.name, hints[p.name]) for p in parameters}
        later = {p.name: p.default for p in parameters[len(parameters) - len(added) :]}
        if tuple(later) != added or any(not isinstance(x, bool | float | None) for x in later.values()):
            required = "its last parameters, None, a bool or a float by default"
            raise ArgumentError("primitive", f"{op}: added", added, required)
        if gradient.backward is not None and "Tensor[]" in types.values():
            raise ArgumentError("primitive", f"{op}'s backward", gradient.backward, "None: it has a list of tensors")
        namespace: dict[str, Any] = {"_resolve": body}
        source = _entry_source(op, parameters, namespace)
        exec(compile(source, f"<ferryman op {op}>", "exec"), namespace)  # noqa: S102 - built from our own signature
        entry = namespace[op]
        entry.__doc__, entry.__module__, entry.__qualname__ = body.__doc__, body.__module__, op
        entry.__annotations__, entry.__signature__ = hints, signature
        entry.primitive = Primitive(
            name=op,
            body=body,
            parameters=parameters,
            types=types,
            outputs=outputs,
            check=check,
            meta=meta,
            cost=cost,
            lower=body if lower == "definition" else lower,
            autocast=autocast,
            mutates=mutates,
            dtypes=dtypes,
            added=later,
            elementwise=elementwise,
            gradient=gradient,
            limits=limits,
            namespace=namespace,
        )
        return typing.cast("Callable[P, R]", entry)

    return decorate


def _schema_type(op: str, name: str, hint: Any) -> str:
    if hint not in _SCHEMA_TYPES:
        required = (
            "Tensor, float, int, bool, str, torch.dtype, one of these or None, list[Tensor], list[int], list[float]"
        )
        raise ArgumentError("primitive", f"{op}'s {name}", hint, required)
    return _SCHEMA_TYPES[hint]


def public(op: Callable[..., Any]) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Mark the Python face of a primitive whose schema returns more than the call does."""

    def decorate(face: Callable[P, R]) -> Callable[P, R]:
        face.primitive = op.primitive  # type: ignore[attr-defined]
        return face

    return decorate


def first_of(op: Callable[..., Any]) -> Callable[..., Any]:
    """The op's first output alone, as a function of the same parameters.

    Dispatch may trace a vendor's own call for it under torch.compile, where no other output has to be differentiable.
    """
    known: Primitive = op.primitive  # type: ignore[attr-defined]
    namespace = known.namespace
    namespace["_resolve_first"] = lambda *args: namespace["_resolve"](*args)[0]
    names = ", ".join(known.names)
    source = f"def first({names}):\n    return _resolve_first({names})\n"
    exec(compile(source, f"<ferryman op {known.name}, first output>", "exec"), namespace)  # noqa: S102 - as above
    first: Callable[..., Any] = namespace["first"]
    return first


def _entry_source(op: str, parameters: Sequence[inspect.Parameter], namespace: dict[str, Any]) -> str:
    """A function with the op's own signature, so that CPython itself binds keywords (0.1 us; inspect takes 8)."""
    declared, star = [], False
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not star:
            declared.append("*")
            star = True
        if p.default is p.empty:
            declared.append(p.name)
        else:
            namespace[f"_default_{p.name}"] = p.default
            declared.append(f"{p.name}=_default_{p.name}")
    return f"def {op}({', '.join(declared)}):\n    return _resolve({', '.join(p.name for p in parameters)})\n"
