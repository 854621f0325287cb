"""How an op's backward is called: which outputs' gradients it takes, what of a forward is saved for it.

All follows from its parameters. ``Plan`` is a forward that is to be differentiated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from torch import Tensor

from ferryman.backends.base import Target
from ferryman.dispatch import registry, state
from ferryman.errors import ArgumentError
from ferryman.ops.primitive import Primitive


@dataclass(frozen=True)
class Source:
    """Where one argument of the backward comes from: ("arg" | "out" | "grad" | "need", index)."""

    kind: str
    index: int


@dataclass(frozen=True)
class Plan:
    """A forward that is to be differentiated: its launcher, its target, if it takes one, and the state it hands on.

    ``facts``: shape, dtype and device of each output, once it has run.
    """

    recipe: Recipe
    launch: Callable[..., Any]
    target: Target | None
    asked: state.State
    facts: list[tuple[Any, ...]] = field(default_factory=list)


@dataclass(frozen=True, eq=False)
class Recipe:
    """How an op's backward is called. ``returns`` gives, for each forward argument, the index of its gradient."""

    op: Primitive
    backward: Primitive | None
    sources: tuple[Source, ...]
    optional: tuple[bool, ...]
    returns: tuple[int | None, ...]

    @cached_property
    def seen(self) -> tuple[int, ...]:
        """Places of the arguments that are tensors, or may be."""
        return tuple(i for i, n in enumerate(self.op.names) if self.op.types[n] in ("Tensor", "Tensor?"))

    @cached_property
    def kept(self) -> tuple[tuple[bool, int], ...]:
        """Tensors that the backward takes: (whether an argument, else an output; its index)."""
        return tuple((s.kind == "arg", s.index) for s in self.sources if self._is_tensor(s))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """Places of the other arguments that the backward takes."""
        return tuple(s.index for s in self.sources if s.kind == "arg" and not self._is_tensor(s))

    @cached_property
    def template(self) -> tuple[tuple[str, int], ...]:
        """Where `gradients` finds each argument of the backward; a need by its place among the function's arguments."""
        places: list[tuple[str, int]] = []
        counts = {"saved": 0, "number": 0}
        for source, optional in zip(self.sources, self.optional, strict=True):
            if source.kind in ("arg", "out"):
                kind = "saved" if self._is_tensor(source) else "number"
                places.append((kind, counts[kind]))
                counts[kind] += 1
            elif source.kind == "need":
                places.append(("need", 2 + self.seen.index(source.index)))
            else:
                places.append(("grad?" if optional else "grad", source.index))
        return tuple(places)

    @cached_property
    def handed(self) -> tuple[tuple[int, int | None], ...]:
        """For each argument in ``seen``: its place among the function's arguments, and the index of its gradient."""
        return tuple((2 + at, self.returns[i]) for at, i in enumerate(self.seen))

    def backward_of(self, args: tuple[Any, ...]) -> list[Any]:
        """Arguments of the backward that have the facts of those that it would get, for choosing what runs it."""
        result = self.op.meta(*args)
        outputs = result if isinstance(result, tuple) else (result,)
        arguments: list[Any] = []
        for source in self.sources:
            if source.kind == "need":
                value = args[source.index]
                arguments.append(isinstance(value, Tensor) and value.requires_grad)
            else:
                arguments.append(args[source.index] if source.kind == "arg" else outputs[source.index])
        return arguments

    def _is_tensor(self, source: Source) -> bool:
        if source.kind == "arg":
            return self.op.types[self.op.names[source.index]] in ("Tensor", "Tensor?")
        return source.kind == "out"

    @classmethod
    def of(cls, op: Primitive) -> Recipe:
        if op.gradient.backward is None:
            return cls(op, None, (), (), tuple(None for _ in op.names))
        backward = registry.primitive(op.gradient.backward)
        gradients = op.gradient_names()
        sources = []
        for name in backward.names:
            bare = name.removeprefix("out_")
            if name in gradients:
                sources.append(Source("grad", gradients[name]))
            elif name.startswith("need_") and name.removeprefix("need_") in op.names:
                sources.append(Source("need", op.names.index(name.removeprefix("need_"))))
            elif name in op.names:
                sources.append(Source("arg", op.names.index(name)))
            elif bare in op.outputs:
                sources.append(Source("out", op.outputs.index(bare)))
            else:
                what = f"parameter {name!r} is no argument, output or gradient of {op.name}"
                raise ValueError(f"{backward.name}: {what}; its gradients are {', '.join(gradients) or 'none'}")
        owner = {name: i for i, shared in enumerate(op.gradient.owners) for name in shared}
        return cls(
            op,
            backward,
            tuple(sources),
            tuple(backward.types[n] == "Tensor?" for n in backward.names),
            tuple(owner.get(n) for n in op.names),
        )

    def plan(self, launch: Callable[..., Any], target: Target, asked: state.State) -> Plan:
        return Plan(self, launch, target, asked)

    def check_inputs(self, args: tuple[Any, ...]) -> None:
        """An argument that has no gradient must not ask for one: it would silently get none."""
        if self.backward is None:
            return
        for name, value, index in zip(self.op.names, args, self.returns, strict=True):
            if index is None and isinstance(value, Tensor) and value.requires_grad:
                raise ArgumentError(
                    self.op.name, f"{name}.requires_grad", True, "False: it is not differentiable; detach it"
                )

    def nondifferentiable(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        return [o for n, o in zip(self.op.outputs, outputs, strict=True) if n in self.op.gradient.nondifferentiable]
