"""Autograd for every op from what its backward's parameters say: which outputs' gradients it takes, what is saved.

A forward hands its request and its tracer to its backward, which runs on autograd's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ferryman.backends.base import Target
from ferryman.dispatch import registry, state
from ferryman.errors import ArgumentError, FerrymanError
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


def keep(ctx: Any, plan: Plan, args: tuple[Any, ...], outputs: Sequence[Tensor]) -> None:
    """Note in a forward what its backward takes: tensors through autograd, the rest beside them."""
    recipe = plan.recipe
    ctx.set_materialize_grads(False)
    if recipe.op.gradient.nondifferentiable:
        ctx.mark_non_differentiable(*recipe.nondifferentiable(outputs))
    ctx.save_for_backward(*[args[i] if given else outputs[i] for given, i in recipe.kept])
    ctx.plan = plan
    ctx.numbers = [args[i] for i in recipe.numbers]
    if len(outputs) > 1:
        ctx.facts = [(o.shape, o.dtype, o.device) for o in outputs]


def gradients(
    ctx: Any, grads: tuple[Tensor | None, ...], below: Callable[[Primitive], Callable[..., Any]] | None = None
) -> tuple[Tensor | None, ...]:
    """Call the backward of a function that is applied to (plan, arguments, ..): what goes to each of these.

    ``below`` says what runs the backward instead of its resolver.
    """
    recipe, needs = ctx.plan.recipe, ctx.needs_input_grad
    if recipe.backward is None:
        nothing_behind(ctx)
    saved, numbers = ctx.saved_tensors, ctx.numbers
    if len(grads) == 1 and grads[0] is None:  # PyTorch runs a node whose gradient a Function gave as None
        return (None,) * len(needs)
    args: list[Any] = []
    for kind, i in recipe.template:
        if kind == "saved":
            args.append(saved[i])
        elif kind == "number":
            args.append(numbers[i])
        elif kind == "need":
            args.append(needs[i])
        elif kind == "grad?" or grads[i] is not None:
            args.append(grads[i])
        else:
            shape, dtype, device = ctx.facts[i]
            args.append(torch.zeros(shape, dtype=dtype, device=device))
    run = recipe.backward.namespace["_resolve"] if below is None else below(recipe.backward)
    token = state.enter(ctx.plan.asked)
    try:
        results = run(*args)
    finally:
        state.leave(token)
    input_grads = results if isinstance(results, tuple) else (results,)
    return (None, None, *[input_grads[i] if i is not None and needs[place] else None for place, i in recipe.handed])


def nothing_behind(ctx: Any) -> NoReturn:
    raise FerrymanError(f"{ctx.plan.recipe.op.name} is not differentiable: it is itself a gradient")


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return gradients(ctx, grads)


class SingleLevel(_SingleLevelFunction):
    """What compiled autograd asks of a function is what it asks of `torch.autograd.Function`.

    Its ``apply`` is autograd's own: the one in Python around it, `torch.autograd.Function`'s, takes as long again and
    serves functorch, whose calls do not come here. A function is applied to (plan, all arguments of the op, its tensors
    ..): autograd must see the latter, and works on each argument for some microseconds of a slow host.
    """

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


def twice(ctx: Any, backward: Callable[..., Any], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of a gradient that is asked for with create_graph: what depends on anything raises where it is differentiated."""
    with torch.no_grad():
        input_grads: tuple[Tensor | None, ...] = backward(ctx, *grads)
    if not any(t is not None and t.requires_grad for t in (*grads, *ctx.saved_tensors)):
        return input_grads
    message = f"ferryman: the gradient of {ctx.plan.recipe.op.name} is not differentiated again (once_differentiable)"
    raising = torch._C._functions.DelayedError(message.encode(), len(input_grads))
    apart: list[Any] = [None if g is None else g.detach().requires_grad_() for g in input_grads]
    outputs: tuple[Tensor | None, ...] = raising(*apart)
    return outputs


class _Overwriting(SingleLevel):
    """The function of a mutating op. What it returns for an argument that is written over is an alias of the result:
    `_Put` makes the argument itself the result, so that views, other results and autograd's own checks are as with
    ``argument.copy_(result)``, where one function that marks its inputs dirty may not return two, nor take views."""

    @staticmethod
    def forward(ctx: Any, plan: Plan, given: tuple[list[Any], tuple[Any, ...]], *seen: Tensor | None) -> Any:
        contexts, args = given
        op = plan.recipe.op
        result = plan.launch(*args, plan.target)
        outputs = list(result if isinstance(result, tuple) else (result,))
        ctx.watched = []
        for _, i in op.overwritten:
            if any(s.kind == "out" and s.index == i for s in plan.recipe.sources):
                ctx.watched.append(outputs[i].detach())
            outputs[i] = outputs[i].data  # with a version of its own: `_Put` raises the argument's
        keep(ctx, plan, args, outputs)
        ctx.done = False
        contexts.append(ctx)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        op, backward = ctx.plan.recipe.op, ctx.plan.recipe.backward
        if any(kept._version != version for kept, version in zip(ctx.watched, ctx.versions, strict=True)):
            raise FerrymanError(
                f"{op.name}: {', '.join(op.mutates)} held the gradient, and it or another view of its memory was "
                "written to before the backward. Leave that memory alone until then, in parts too, or use an op that "
                "keeps its own"
            )
        if backward is not None and backward.mutates and ctx.done:
            raise FerrymanError(
                f"{op.name}: a second backward, and the first has handed over the gradient's memory. "
                "Run the forward again, or use an op that keeps its inputs"
            )
        ctx.done = True
        return twice(ctx, _backward, *grads) if torch.is_grad_enabled() else gradients(ctx, grads)


class _Put(SingleLevel):
    """``into.copy_(value)`` for autograd, where the value is in the memory of ``into`` already."""

    @staticmethod
    def forward(ctx: Any, into: Tensor, value: Tensor) -> Tensor:
        ctx.mark_dirty(into)
        ctx.set_materialize_grads(False)
        ctx.view = into._is_view()
        return into

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        # a view's gradient is a part of its base's, and where it is None PyTorch drops the base's other parts with it
        lost = grad.new_zeros(()).expand(grad.shape) if ctx.view and grad is not None else None
        return lost, grad


def overwriting(*args: Any) -> Any:
    """Run a mutating op's plan under autograd: (arguments in schema order, plan)."""
    plan: Plan = args[-1]
    op = plan.recipe.op
    contexts: list[Any] = []
    for place, _ in op.overwritten:
        value = args[place]
        if value.requires_grad and value.is_leaf:
            raise ArgumentError(
                op.name,
                f"{op.names[place]}.is_leaf",
                "True, and it requires grad",
                "a tensor that is computed from the leaf, or torch.no_grad()",
            )
    seen = [args[i] for i in plan.recipe.seen]
    outputs = list(_Overwriting.apply(plan, (contexts, args[:-1]), *seen))  # type: ignore[attr-defined]
    for place, output in op.overwritten:
        outputs[output] = _Put.apply(args[place], outputs[output])  # type: ignore[attr-defined]
    (ctx,) = contexts
    ctx.versions = [kept._version for kept in ctx.watched]
    return tuple(outputs) if len(outputs) > 1 else outputs[0]
