"""Autograd for every op from what its backward's parameters say (`recipe`).

Eager, an op has an `autograd.Function` of its own, written out as straight code when its gradient is first asked for:
tables that serve any op, as `gradients` reads them, take as long again as PyTorch's own part of such a function. A
forward hands its request and its tracer to its backward, which runs on autograd's threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import _SingleLevelFunction

from ferryman.dispatch import state
from ferryman.dispatch.recipe import Plan, Recipe
from ferryman.errors import ArgumentError, FerrymanError, Unsupported
from ferryman.ops.primitive import Primitive

_TEMPLATE = """
class {name}(SingleLevel):
    @staticmethod
    def forward(ctx, plan, args, {seen}):
        {outputs} = plan.launch(*args, plan.target)
{detached}
        ctx.set_materialize_grads(False)
{kept}
        ctx.plan = plan
        return {outputs}

    @staticmethod
    def backward(ctx, {grads}):
        if grad_enabled():
            return twice(ctx, backward, {grads})
{body}

backward = {name}.backward

def run({params}, plan):
    return apply(plan, ({params},), {seen})
"""


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
        _nothing_behind(ctx)
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


def _nothing_behind(ctx: Any) -> NoReturn:
    raise FerrymanError(f"{ctx.plan.recipe.op.name} is not differentiable: it is itself a gradient")


def _backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    return gradients(ctx, grads)


class _SingleLevel(_SingleLevelFunction):
    """What compiled autograd asks of a function is what it asks of `torch.autograd.Function`.

    Its ``apply`` is autograd's own: the one in Python around it, `torch.autograd.Function`'s, takes as long again and
    serves functorch, whose calls do not come here. A function is applied to (plan, all arguments of the op, its tensors
    ..): autograd must see the latter, and works on each argument for some microseconds of a slow host.
    """

    _compiled_autograd_key = staticmethod(torch.autograd.Function._compiled_autograd_key)


class _Once(_SingleLevel):
    """Gradients as they are, which raise where they are differentiated. They depend on all that they were made of: of
    gradients that hang on nothing PyTorch says that they do not depend on an input, and `hessian` gives zeros."""

    @staticmethod
    def forward(ctx: Any, op: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.op = op
        return tuple(t.detach() for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> NoReturn:
        raise Unsupported(f"ferryman: the gradient of {ctx.op} is not differentiated again (once_differentiable)")


def _twice(ctx: Any, backward: Callable[..., Any], *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    """Of a gradient that is asked for with create_graph: what depends on anything raises where it is differentiated."""
    with torch.no_grad():
        input_grads: tuple[Tensor | None, ...] = backward(ctx, *grads)
    made_of = [t for t in (*grads, *ctx.saved_tensors) if t is not None and t.requires_grad]
    if not made_of:
        return input_grads
    given = [g for g in input_grads if g is not None]
    outputs = iter(_Once.apply(ctx.plan.recipe.op.name, len(given), *given, *made_of))  # type: ignore[attr-defined]
    return tuple(None if g is None else next(outputs) for g in input_grads)


class _Overwriting(_SingleLevel):
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
        return _twice(ctx, _backward, *grads) if torch.is_grad_enabled() else gradients(ctx, grads)


class _Put(_SingleLevel):
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


# Written out for an op ------------------------------------------------------------------------------------------


def source_of(recipe: Recipe) -> str:
    """The class and the function that applies it: ``run(*arguments, plan)``."""
    op = recipe.op
    params = [f"{name}_" for name in op.names]  # none of the names here
    seen = [params[i] for i in recipe.seen]
    outputs = [f"out_{i}" for i in range(len(op.outputs))]
    # of memory that is the launcher's own; autograd lets nobody write in place to a view that a Function returns
    detached = [f"if {o}._is_view():\n    {o} = {o}.data" for o in outputs]
    kept = []
    if op.gradient.nondifferentiable:
        marked = [o for o, n in zip(outputs, op.outputs, strict=True) if n in op.gradient.nondifferentiable]
        kept.append(f"ctx.mark_non_differentiable({', '.join(marked)})")
    saved = [params[i] if given else outputs[i] for given, i in recipe.kept]
    if saved:
        kept.append(f"ctx.save_for_backward({', '.join(saved)})")
    if recipe.numbers:
        kept.append(f"ctx.numbers = {', '.join(f'args[{i}]' for i in recipe.numbers)},")
    if len(outputs) > 1:  # equal for every call of a plan
        facts = ", ".join(f"({o}.shape, {o}.dtype, {o}.device)" for o in outputs)
        kept.append(f"if not plan.facts:\n    plan.facts.extend(({facts}))")
    grads = [f"grad_{i}" for i in range(len(outputs))]
    return _TEMPLATE.format(
        name=f"{op.name}_Bridge",
        seen=", ".join(seen),
        params=", ".join(params),
        outputs=", ".join(outputs),
        detached=_indented(detached),
        kept=_indented(kept),
        grads=", ".join(grads),
        body=_indented(_body(recipe, grads)),
    )


def _indented(statements: list[str]) -> str:
    return "\n".join(f"        {line}" for statement in statements for line in statement.split("\n"))


def _body(recipe: Recipe, grads: list[str]) -> list[str]:
    """Statements of the backward, from what the context has to what goes to each argument of the function."""
    if recipe.backward is None:
        return ["nothing_behind(ctx)"]
    lines, places = [], len(recipe.seen)
    if len(grads) == 1:  # PyTorch runs a node whose gradient a Function gave as None
        lines.append(f"if {grads[0]} is None:\n    return {('None, ' * (2 + places)).rstrip()}")
    required = {i for kind, i in recipe.template if kind == "grad"}
    for i in sorted(required) if len(grads) > 1 else ():
        lines.append(f"if {grads[i]} is None:\n    {grads[i]} = zeros(ctx, {i})")
    if recipe.kept:
        lines.append(f"{''.join(f'saved_{i}, ' for i in range(len(recipe.kept)))}= ctx.saved_tensors")
    if recipe.numbers:
        lines.append(f"{''.join(f'number_{i}, ' for i in range(len(recipe.numbers)))}= ctx.numbers")
    lines.append("needs = ctx.needs_input_grad")
    spelled = {"saved": "saved_{}", "number": "number_{}", "need": "needs[{}]", "grad": "grad_{}", "grad?": "grad_{}"}
    args = ", ".join(spelled[kind].format(i) for kind, i in recipe.template)
    results = [f"to_{i}" for i in range(len(recipe.backward.outputs))]
    lines += [
        "token = enter(ctx.plan.asked)",
        f"try:\n    {', '.join(results)} = backwards['_resolve']({args})\nfinally:\n    leave(token)",
    ]
    handed = [f"{results[i]} if needs[{place}] else None" if i is not None else "None" for place, i in recipe.handed]
    lines.append(f"return None, None, {', '.join(handed)}")
    return lines


def _zeros(ctx: Any, output: int) -> torch.Tensor:
    """The gradient of an output that nothing came to."""
    shape, dtype, device = ctx.plan.facts[output]
    return torch.zeros(shape, dtype=dtype, device=device)


def runner_under_autograd(op: Primitive) -> Callable[..., Any]:
    """What runs a plan whose result is to be differentiated: of (arguments in schema order, plan)."""
    if op.mutates:
        return overwriting
    recipe = Recipe.of(op)
    namespace: dict[str, Any] = {
        "SingleLevel": _SingleLevel,
        "grad_enabled": torch.is_grad_enabled,
        "twice": _twice,
        "nothing_behind": _nothing_behind,
        "zeros": _zeros,
        "enter": state.enter,
        "leave": state.leave,
        "backwards": None if recipe.backward is None else recipe.backward.namespace,
        "__name__": __name__,
    }
    exec(compile(source_of(recipe), f"<ferryman gradient of {op.name}>", "exec"), namespace)  # noqa: S102
    function = namespace[f"{op.name}_Bridge"]
    namespace["apply"] = function.apply
    node = function._backward_cls
    if "apply" in vars(torch.autograd.function.BackwardCFunction):
        # what autograd calls: PyTorch's own finds the class's backward anew each time, in two frames of Python
        node.apply = function.backward
    run: Callable[..., Any] = namespace["run"]
    return run
